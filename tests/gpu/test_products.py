"""A whole model in bfloat16: a token has the same logits, and an answer the same tokens, whatever ran beside it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import LlamaConfig

from gpu_engine.model.linear import InvariantLinear
from gpu_engine.model.loader import LoadedModel, load_model
from tests.gpu.product_logits import logits
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import Answer, answer_all, answer_each, ask, config, tokens, unguided_engine, with_drafts

pytestmark = pytest.mark.gpu

SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 2}
"""Large enough for the tiles of large matrices."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    shape = LlamaConfig(**{**tiny.FAMILIES["llama"]().to_dict(), **SHAPE, "head_dim": 128, "num_hidden_layers": 3})
    folder = tiny.save(shape, tmp_path_factory.mktemp("bits"), rounds=True)
    return load_model(config(model=str(folder), device="cuda", dtype="bfloat16"))


def test_products_use_the_kernel(model: LoadedModel) -> None:
    assert isinstance(model.net.get_output_embeddings(), InvariantLinear)
    assert model.fused.forward is not None


def test_a_token_has_the_same_logits_in_steps_and_in_prompts(model: LoadedModel) -> None:
    whole = logits(model, 300, 32)
    for count in (1, 2, 3, 8, 16, 17, 40, 64, 65, 128, 200):
        assert torch.equal(logits(model, count, 32), whole[:count]), count
    assert torch.equal(logits(model, 8, 200), whole[168:176]), "after a longer prompt"


def asked() -> list[Answer]:
    """Prompts of several lengths, greedy and sampled; most repeat themselves, so that a drafter proposes."""
    makes = [
        partial(
            ask, tokens(9 + 7 * at, at, repeat=6), max_tokens=48, ignore_eos=True, seed=at, temperature=0.7 * (at % 2)
        )
        for at in range(20)
    ]
    return [make() for make in makes]


@pytest.mark.parametrize("num_drafts", [0, 3, 7])
@pytest.mark.parametrize("batched", [16, 512])
def test_answers_do_not_depend_on_drafts_lanes_chunks_or_preemption(
    model: LoadedModel, num_drafts: int, batched: int
) -> None:
    with unguided_engine(model, with_drafts(0, device="cuda", dtype="bfloat16")) as engine:
        expected = answer_each(engine, asked())
    fields = {"device": "cuda", "dtype": "bfloat16", "max_batched_tokens": batched}
    # Pages for about a third of the answers: the others are preempted and prefilled again.
    few = {"max_batch_size": 16, "kv_cache_tokens": 1024, "prefix_cache": False}
    for more in ({"max_batch_size": 32}, few):
        with unguided_engine(model, with_drafts(num_drafts, **fields, **more)) as engine:
            assert answer_all(engine, asked()) == expected, more
            stats = engine.stats()
        assert (stats.accepted_draft_tokens > 20) == (num_drafts > 0)
        assert (stats.preemptions > 0) == (more is few)
