"""Sidecars of the tests that propose jump-forward tokens, right ones and wrong ones."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.gpu_engine.tiny import VOCAB
from tests.gpu_engine.toy_sidecar import Automaton

Proposes = Callable[[Automaton, list[int]], list[int]]


def prophet(expected: list[list[int]]) -> Proposes:
    """Return a proposer of the right tokens: the rest of every expected answer."""

    def proposes(automaton: Automaton, emitted: list[int]) -> list[int]:
        return next(
            (answer[len(emitted) :] for answer in expected if emitted and answer[: len(emitted)] == emitted), []
        )

    return proposes


def liar(automaton: Automaton, emitted: list[int]) -> list[int]:
    """Propose random tokens: illegal ones, stop tokens, too many."""
    return random.Random(len(emitted)).choices(range(VOCAB), k=len(emitted) % 12)


def half_right(expected: list[list[int]]) -> Proposes:
    """Return a proposer of two right tokens and then a wrong one."""
    knows = prophet(expected)
    return lambda automaton, emitted: [*knows(automaton, emitted)[:2], len(emitted) % 256]
