"""Keys and values of 8 bits under every family's attention: drafts, if a step has any, and company change no token.

Not responsible for: the kernel (see tests/kernels/test_int8_pages.py), drafters and events (see test_lossless.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_engine.model.loader import load_model
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import (
    Answer,
    answer_all,
    answer_each,
    ask,
    config,
    executor_of,
    tokens,
    unguided_engine,
    with_drafts,
)

FAMILIES = [
    pytest.param(family, marks=[] if family in ("gemma3", "mixtral") else [pytest.mark.slow])
    for family in tiny.FAMILIES | tiny.OWN_FORWARD
]


def answers() -> list[Answer]:
    return [ask(tokens(40, 2, repeat=8), max_tokens=24), ask(tokens(9, 5), max_tokens=24, temperature=0.7)]


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_and_company_change_no_token(saved: Callable[[str], Path], family: str) -> None:
    model = load_model(config(model=str(saved(family)), kv_cache_dtype="int8"))
    with unguided_engine(model, with_drafts(0, kv_cache_dtype="int8")) as engine:
        expected = answer_each(engine, answers())
    with unguided_engine(model, with_drafts(7, kv_cache_dtype="int8")) as engine:
        assert answer_all(engine, answers()) == expected
        assert {page.v.dtype for page in executor_of(engine).pages} == {torch.int8}
