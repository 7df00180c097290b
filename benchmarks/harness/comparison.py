"""Compares two sets of answers token by token.

Invariant: an answer that is missing on one side is a difference; no answer is skipped.
Not responsible for: producing the answers (see client.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.measure import Answer


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an answer differs from its reference.

    `position` counts tokens from 0; a token of None means that the answer ended before.
    """

    name: str
    position: int
    expected: int | None
    actual: int | None
    note: str = ""

    def __str__(self) -> str:
        def show(token: int | None) -> str:
            return "the end" if token is None else str(token)

        words = f"{self.name}: at token {self.position} expected {show(self.expected)}, got {show(self.actual)}"
        return f"{words} ({self.note})" if self.note else words


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> tuple[int, int | None, int | None] | None:
    """Return (position, expected token, actual token) of the first difference, or None when the sequences are equal."""
    for position in range(max(len(expected), len(actual))):
        left = expected[position] if position < len(expected) else None
        right = actual[position] if position < len(actual) else None
        if left != right:
            return position, left, right
    return None


def compare(reference: Mapping[str, Answer], answers: Mapping[str, Answer]) -> list[Difference]:
    """Compare by name: token ids, then the finish reason. Returns one difference per answer that differs, in order."""
    differences = []
    for name in [*reference, *(name for name in answers if name not in reference)]:
        if name not in reference or name not in answers:
            differences.append(Difference(name, 0, None, None, "only on one side"))
            continue
        left, right = reference[name], answers[name]
        found = first_difference(left.token_ids, right.token_ids)
        if found is not None:
            differences.append(Difference(name, *found))
        elif left.finish != right.finish:
            note = f"finish {left.finish} became {right.finish}"
            differences.append(Difference(name, len(left.token_ids), None, None, note))
    return differences
