"""Requests of the step's tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.gpu_engine.harness import (
    Answer,
    ask,
    tokens,
)

MIX: list[Callable[[], Answer]] = [
    partial(ask, tokens(30, 1, repeat=10), max_tokens=60),
    partial(ask, tokens(1, 2), max_tokens=50, ignore_eos=True),
    partial(ask, tokens(17, 3), temperature=1.0, seed=2**64 - 1, ignore_eos=True),
    partial(ask, tokens(33, 4, repeat=8), temperature=0.7, top_p=0.9, seed=5),
    partial(ask, tokens(16, 5), temperature=0.7, top_k=5, min_p=0.05, seed=6),
    partial(ask, tokens(40, 6, repeat=20), repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    partial(ask, tokens(25, 7, repeat=5), temperature=0.4, bad_token_ids=(65, 66), min_tokens=20, seed=8),
    partial(ask, tokens(48, 12, repeat=24), temperature=0.2, seed=9, max_tokens=60, drafts=2),
]
"""Functions that make a request each: one of every kind of sampling parameters."""


def made() -> list[Answer]:
    return [make() for make in MIX]
