"""Thins out the products of parameters: `make test` runs a third of their cases, `make test-slow` the others.

Invariant: every value of a parameter occurs with every value of another one in `make test`, where a test has three
parameters or more; a product of fewer parameters runs whole. The choice depends on the positions of the values alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

SHARE = 3
"""One case in so many is not slow."""
MIN_PARAMETERS = 3


def _positions(item: pytest.Function) -> list[int]:
    """Return the position of the value of each parameter; names that one mark sets together are one parameter."""
    if not hasattr(item, "callspec"):
        return []
    indices = dict(item.callspec.indices)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], tuple) else (mark.args[0],)
        for name in names[1:]:
            indices.pop(name, None)
    return list(indices.values())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not isinstance(item, pytest.Function) or not item.path.is_relative_to(Path(__file__).parent):
            continue
        positions = _positions(item)
        if len(positions) >= MIN_PARAMETERS and sum(positions) % SHARE != 0:
            item.add_marker(pytest.mark.slow)
