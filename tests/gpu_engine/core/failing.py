"""A part of an engine that fails once."""

from __future__ import annotations

from typing import Any


class FailsOnce:
    """A net that raises in one forward of its life, on request."""

    def __init__(self, net: Any) -> None:
        self._net, self.fails_next = net, False

    def __call__(self, **arguments: Any) -> Any:
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("a fault of the test")
        return self._net(**arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._net, name)
