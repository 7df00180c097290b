"""The choice of the cases of a product that `make test` runs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product

import pytest

from tests.products import SHARE, chosen

Case = dict[str, str]


def pairs(cases: Iterable[Case]) -> set[tuple[tuple[str, str], ...]]:
    return {pair for case in cases for pair in combinations(sorted(case.items()), 2)}


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 2), (2,) * 6, (3, 6, 2, 2), (9, 2, 2), (1, 1, 5)], ids=str)
def test_every_value_is_in_one_of_a_third_of_the_cases(sizes: tuple[int, ...]) -> None:
    cases = [{f"p{at}": str(value) for at, value in enumerate(values)} for values in product(*map(range, sizes))]
    found = [cases[place] for place in sorted(chosen(cases))]
    assert {value for case in found for value in case.items()} == {value for case in cases for value in case.items()}
    assert len(found) <= max(-(-len(cases) // SHARE), *sizes)
    if len(found) < -(-len(cases) // SHARE):
        assert pairs(found) == pairs(cases)


def test_one_case_is_always_chosen() -> None:
    assert chosen([{"a": "1", "b": "2", "c": "3"}]) == {0}
    assert chosen([]) == set()
