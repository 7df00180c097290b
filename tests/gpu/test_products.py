"""A whole model in bfloat16: its logits have the same bits for any number of rows up to 16."""

from __future__ import annotations

import pytest
import torch

from gpu_engine.model.linear import SkinnyLinear
from gpu_engine.model.loader import LoadedModel, load_model
from tests.gpu.product_logits import logits
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import config

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("bits"))
    return load_model(config(model=str(folder), device="cuda", dtype="bfloat16"))


def test_products_of_few_rows_use_the_skinny_kernel(model: LoadedModel) -> None:
    assert isinstance(model.net.get_output_embeddings(), SkinnyLinear)
    assert model.fused.forward is not None


def test_a_token_has_the_same_logits_with_any_drafts_beside_it(model: LoadedModel) -> None:
    whole = logits(model, 16, 32)
    for count in (1, 2, 3, 8):
        assert torch.equal(logits(model, count, 32), whole[:count])
