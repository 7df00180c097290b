"""Rows of features in which each two that may be in one request are together at least once.

Not responsible for: which may (see docs/features.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

Row = tuple[str, ...]


def pairs_of(names: Collection[str]) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in itertools.combinations(names, 2)}


def covering_rows(
    names: Sequence[str], apart: Collection[frozenset[str]], needs: Mapping[str, str], size: int
) -> list[Row]:
    """Return rows of about `size` names that have every pair which may be together.

    Args:
        apart: pairs of which no row has both.
        needs: another name that a row with the key has.
    """

    def closed(row: Row, name: str) -> Row:
        row = row if name in row else (*row, name)
        return closed(row, needs[name]) if name in needs else row

    def allowed(row: Row) -> bool:
        return not pairs_of(row) & set(apart)

    left = {pair for pair in pairs_of(names) if allowed(closed(closed((), min(pair)), max(pair)))}
    rows: list[Row] = []
    while left:
        first = min(sorted(pair) for pair in left)
        row = closed(closed((), first[0]), first[1])
        while len(row) < size:
            longer = [closed(row, name) for name in names if name not in row and allowed(closed(row, name))]
            best = max(longer, key=lambda each: len(pairs_of(each) & left), default=row)
            if not pairs_of(best) & left - pairs_of(row):
                break
            row = best
        rows.append(tuple(name for name in names if name in row))
        left -= pairs_of(row)
    return rows
