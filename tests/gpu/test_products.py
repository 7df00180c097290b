"""A whole model in bfloat16: its logits have the same bits for any number of rows up to 16."""

from __future__ import annotations

import pytest
import torch

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.linear import SkinnyLinear
from gpu_engine.model.loader import LoadedModel, load_model
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import config

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("bits"))
    return load_model(config(model=str(folder), device="cuda", dtype="bfloat16"))


@torch.inference_mode()
def logits(model: LoadedModel, count: int, start: int) -> torch.Tensor:
    """Return the logits of tokens [start, start + count) after `start` prefilled tokens."""
    table_BN = torch.arange(4, dtype=torch.int32, device="cuda")[None]
    pages, at = model.allocate_pages(4, 16, token_major=True), torch.arange(64, dtype=torch.int32, device="cuda")[None]
    ids = (at.long() * 37 + 5) % 256
    model.prefill(ids[:, :start], AttentionContext(pages, table_BN, at[:, :start].contiguous()))
    there = slice(start, start + count)
    return model.logits(ids[:, there], AttentionContext(pages, table_BN, at[:, there].contiguous()))


def test_products_of_few_rows_use_the_skinny_kernel(model: LoadedModel) -> None:
    assert isinstance(model.net.get_output_embeddings(), SkinnyLinear)
    assert model.fused.forward is not None


def test_a_token_has_the_same_logits_with_any_drafts_beside_it(model: LoadedModel) -> None:
    whole = logits(model, 16, 32)
    for count in (1, 2, 3, 8):
        assert torch.equal(logits(model, count, 32), whole[:count])
