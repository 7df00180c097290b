"""Marks two thirds of large parameter products as slow: `make test` runs the rest, `make test-slow` runs these.

Invariant: a test with three parameters or more is thinned so that every pair of values still occurs in `make test`; a
test with fewer parameters runs whole. The choice depends only on the order of the values.
"""

from __future__ import annotations

from pathlib import Path

import pytest

SHARE = 3
"""One case in `SHARE` is not slow."""
MIN_PARAMETERS = 3


def _values(item: pytest.Function) -> dict[str, str]:
    """Return the value of each parameter, as text; names that one mark sets together are one parameter."""
    if not hasattr(item, "callspec"):
        return {}
    values = {name: repr(value) for name, value in item.callspec.params.items()}
    for mark in item.iter_markers("parametrize"):
        names = [mark.args[0]] if isinstance(mark.args[0], str) else list(mark.args[0])
        values["-".join(names)] = " ".join(values.pop(name) for name in names)
    return values


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: dict[tuple[object, str], list[str]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or not item.path.is_relative_to(Path(__file__).parent):
            continue
        values = _values(item)
        position = 0
        for name, value in values.items():
            earlier = seen.setdefault((item.function, name), [])
            if value not in earlier:
                earlier.append(value)
            position += earlier.index(value)
        if len(values) >= MIN_PARAMETERS and position % SHARE != 0:
            item.add_marker(pytest.mark.slow)
