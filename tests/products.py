"""Marks most cases of large parameter products as slow: `make test` runs a third of them, `make test-slow` the rest.

Invariant: of a test with three parameters or more, each value of each parameter occurs in a case that is not slow, and
these cases together have as many pairs of values as a greedy choice finds. A test with fewer parameters runs whole.
The choice depends only on the cases that are collected, and on their order.
Not responsible for: which folders are thinned out (see conftest.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest

SHARE = 3
"""One case in so many is not slow, at most, unless the values need more, or fewer have every pair."""
MIN_PARAMETERS = 3


def chosen(cases: Sequence[Mapping[str, str]]) -> set[int]:
    """Return the places of the cases that are not slow: always the next one with the most pairs of values that are new,
    of several the one with the most new values, and of several of these the first."""
    left = [set(combinations(sorted(case.items()), 2)) for case in cases]
    unseen = {value for case in cases for value in case.items()}
    places: set[int] = set()
    while any(left) and (unseen or len(places) < -(-len(cases) // SHARE)):
        best = max(range(len(cases)), key=lambda place: (len(left[place]), len(unseen & cases[place].items())))
        places.add(best)
        unseen -= set(cases[best].items())
        taken = left[best].copy()
        for pairs in left:
            pairs.difference_update(taken)
    return places


def thin_out(items: Sequence[pytest.Item]) -> None:
    """Mark the cases that are not chosen as slow; those that are slow anyway are no part of a product."""
    products: dict[tuple[str, str], list[tuple[pytest.Function, dict[str, str]]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("slow") is None:
            values = _values(item)
            if len(values) >= MIN_PARAMETERS:
                products.setdefault((str(item.path), item.originalname), []).append((item, values))
    for cases in products.values():
        kept = chosen([values for _, values in cases])
        for place, (item, _) in enumerate(cases):
            if place not in kept:
                item.add_marker(pytest.mark.slow)


def _values(item: pytest.Function) -> dict[str, str]:
    """Return the value of each parameter, as text; names that one mark sets together are one parameter."""
    if not hasattr(item, "callspec"):
        return {}
    values = {name: repr(value) for name, value in item.callspec.params.items()}
    for mark in item.iter_markers("parametrize"):
        names = [mark.args[0]] if isinstance(mark.args[0], str) else list(mark.args[0])
        values["-".join(names)] = " ".join(values.pop(name) for name in names)
    return values
