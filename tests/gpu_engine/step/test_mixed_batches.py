"""Prompts that share a step's forward with decoding sequences: no token changes, and the budget holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel, load_model
from kernels.blocks import can_multiply_blocks
from tests.gpu_engine.harness import (
    Answer,
    answer_all,
    answer_each,
    answer_staggered,
    ask,
    config,
    tokens,
    unguided_engine,
    with_drafts,
)

needs_avx2 = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")
PRECISIONS = [
    pytest.param({"dtype": "bfloat16", "quantization": "q4"}, marks=needs_avx2, id="q4"),
    pytest.param({"dtype": "bfloat16", "quantization": "none"}, id="bfloat16"),
    pytest.param({"dtype": "float32", "quantization": "none"}, id="float32"),
]


def made() -> list[Answer]:
    """Prompts of many lengths; the last three begin alike."""
    prompts = [tokens(n, n, repeat=n // 3) for n in (1, 2, 30, 70, 150)]
    prompts += [[*tokens(40, 9), *tokens(n, n)] for n in (3, 17, 33)]
    return [
        ask(prompt, max_tokens=30, temperature=0.6 * (i % 2), seed=i, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module", params=PRECISIONS)
def precision(request: pytest.FixtureRequest) -> dict[str, str]:
    found: dict[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def model(saved: Callable[[str], Path], precision: dict[str, str]) -> LoadedModel:
    return load_model(config(model=str(saved("llama")), **precision))


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> list[list[int]]:
    """The answers of an engine that serves one request at a time."""
    with unguided_engine(model, with_drafts(0, max_batched_tokens=256)) as engine:
        return answer_each(engine, made())


@pytest.mark.parametrize(
    ("budget", "num_drafts", "answer"),
    [
        (16, 7, answer_all),
        (64, 0, answer_all),
        (1000, 7, answer_all),
        (16, 0, answer_staggered),
        (64, 7, answer_staggered),
    ],
)
def test_company_changes_no_token(
    model: LoadedModel,
    expected: list[list[int]],
    budget: int,
    num_drafts: int,
    answer: Callable[[Engine, list[Answer]], list[list[int]]],
) -> None:
    with unguided_engine(model, with_drafts(num_drafts, max_batched_tokens=budget)) as engine:
        assert answer(engine, made()) == expected
        stats = engine.stats()
    if num_drafts == 0:
        # Without drafts a sequence has one row for each token, so the other rows of steps are prompts'.
        assert stats.step_rows > stats.generated_tokens
    if answer is answer_all:
        assert stats.cached_tokens > 0, "prompts that begin alike still share pages"


def test_a_draft_model_sees_the_prompts(
    saved: Callable[[str], Path], precision: dict[str, str], model: LoadedModel, expected: list[list[int]]
) -> None:
    """Its drafts are right from the first on, because it is the target."""
    same = {"draft_model": str(saved("llama")), **precision}
    with unguided_engine(model, with_drafts(3, max_batched_tokens=64, **same)) as engine:
        assert answer_all(engine, made()) == expected
        stats = engine.stats()
        assert stats.accepted_draft_tokens > 0.9 * stats.draft_tokens > 0


def test_preempted_sequences_are_prefilled_again_beside_others(model: LoadedModel, expected: list[list[int]]) -> None:
    with unguided_engine(model, with_drafts(3, max_batched_tokens=32, kv_cache_tokens=256)) as engine:
        assert answer_all(engine, made()) == expected
        assert engine.stats().preemptions > 0


def test_a_budget_of_a_few_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batched_tokens: must be 0 or at least 16"):
        config(max_batched_tokens=15)
