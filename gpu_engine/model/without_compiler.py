"""An import of transformers without torch's compiler, which nothing here uses.

transformers imports `torch._dynamo` for decorators that keep functions out of a compilation: 275 modules, 100 MB and a
tenth of the time of all imports. Inside `without_compiler` that package is an empty one with these decorators, and they
return the function. Invariant: whatever asks for another of its names gets the real package, and so does everything
after the block. Not responsible for: what is imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_PACKAGE = "torch._dynamo"
_DECORATORS = ("disable", "allow_in_graph", "assume_constant_result")


def _unchanged(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """Decorate a function, with arguments or without."""
    return (lambda decorated: decorated) if function is None else function


class _Deferred(ModuleType):
    """The package before it is loaded. Its submodules can be imported."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_PACKAGE)
        self.__spec__, self.__file__ = spec, spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())
        self.__dict__.update(dict.fromkeys(_DECORATORS, _unchanged))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by the import system
            raise AttributeError(name)
        self.load()
        return getattr(self, name)

    def load(self) -> None:
        """Become the real package."""
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]
        for decorator in _DECORATORS:
            del self.__dict__[decorator]
        spec.loader.exec_module(self)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Import `torch._dynamo` inside the block only if one of its names is used. Does nothing where it is imported."""
    spec = None if _PACKAGE in sys.modules else importlib.util.find_spec(_PACKAGE)
    if spec is None:
        yield
        return
    package = sys.modules[_PACKAGE] = torch._dynamo = _Deferred(spec)
    try:
        yield
    finally:
        if type(package) is _Deferred and sys.modules.get(_PACKAGE) is package:
            # The next import finds the package, and torch imports it for whoever asks for the attribute.
            del sys.modules[_PACKAGE], torch._dynamo
