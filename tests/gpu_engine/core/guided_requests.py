"""Guided and free requests with a toy grammar, and what makes an answer legal."""

from __future__ import annotations

from functools import partial

from tests.gpu_engine.harness import (
    Answer,
    ask,
    tokens,
)
from tests.gpu_engine.toy_sidecar import Automaton

BIASES = tuple((token, 1.5 - token % 4) for token in range(0, 256, 3))


MIX = [
    partial(ask, tokens(30, 1, repeat=10), grammar="50", max_tokens=90),
    partial(ask, tokens(12, 2), max_tokens=60, ignore_eos=True),
    partial(ask, tokens(20, 3), grammar="40", max_tokens=90, temperature=1.0, seed=3, logit_bias=BIASES),
    partial(ask, tokens(33, 4), grammar="45", max_tokens=30, temperature=0.5, top_p=0.9),
    partial(ask, tokens(9, 5), max_tokens=50, temperature=0.6, seed=5, ignore_eos=True, logit_bias=BIASES),
    partial(ask, tokens(21, 6), grammar="1", max_tokens=60),
    partial(ask, tokens(40, 7), grammar="48", max_tokens=90, repetition_penalty=1.3, presence_penalty=0.4),
]


def made() -> list[Answer]:
    return [make() for make in MIX]


def legal(answer: Answer) -> bool:
    assert answer.request.grammar is not None
    return Automaton.parse(answer.request.grammar.source).allows(answer.tokens)
