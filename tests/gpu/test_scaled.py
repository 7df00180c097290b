"""Scaled products on a GPU: they multiply what the matrix says, and a model has the same bits for up to 16 rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.model.quantised.scaled import ScaledKind, ScaledLinear, rounded_rows, why_not_scaled
from gpu_engine.model.recording import distance
from tests.gpu.product_logits import logits
from tests.gpu_engine import published, tiny
from tests.gpu_engine.harness import config

pytestmark = pytest.mark.gpu


@pytest.fixture(params=list(ScaledKind))
def kind(request: pytest.FixtureRequest) -> ScaledKind:
    kind: ScaledKind = request.param
    if why := why_not_scaled(kind, torch.device("cuda")):
        pytest.skip(why)
    return kind


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 4096, 4096), (16, 576, 1536), (17, 1536, 576), (300, 4096, 14_336)])
def test_a_product_is_that_of_its_matrix(kind: ScaledKind, M: int, N: int, K: int, bias: bool) -> None:
    made = torch.Generator().manual_seed(M)
    x, weight = (torch.randn(*shape, generator=made).to("cuda", torch.bfloat16) for shape in ((M, K), (N, K)))
    offset = torch.randn(N, generator=made).to("cuda", torch.bfloat16) if bias else None
    product = ScaledLinear(rounded_rows(weight, kind), offset)
    inputs = rounded_rows(x, kind).dequantised()
    want = nn.functional.linear(inputs, product.rows.dequantised(), None if offset is None else offset.float())
    assert distance(product(x), want) < 1e-2


def test_a_row_of_int8_has_the_same_bits_for_any_number_of_rows() -> None:
    product = ScaledLinear(rounded_rows(torch.randn(4096, 1536, device="cuda"), ScaledKind.INT8), None)
    x = torch.randn(600, 1536, device="cuda").bfloat16()
    whole = product(x)
    for count in (1, 7, 16, 17, 64, 100, 511):
        assert torch.equal(product(x[:count]), whole[:count])


@pytest.fixture
def model(kind: ScaledKind, tmp_path: Path) -> LoadedModel:
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path / "model")
    return load_model(config(model=str(folder), device="cuda", dtype="bfloat16", quantization=kind.value))


def test_a_token_has_the_same_logits_with_any_drafts_beside_it(model: LoadedModel) -> None:
    assert model.quantised
    assert model.fused.forward is not None, model.fused.left
    whole = logits(model, 16, 32)
    for count in (1, 2, 3, 8):
        assert torch.equal(logits(model, count, 32), whole[:count])


@pytest.mark.parametrize("of", ["w8a8", "fp8"])
def test_a_checkpoint_runs_from_its_own_numbers(tmp_path: Path, of: str) -> None:
    kind = ScaledKind.INT8 if of == "w8a8" else ScaledKind.FP8
    if why := why_not_scaled(kind, torch.device("cuda")):
        pytest.skip(why)
    source = tiny.save(tiny.FAMILIES["llama"](), tmp_path / "source")
    made = published.w8a8() if of == "w8a8" else published.fp8_channel()
    quantised, floats = published.write(source, made, tmp_path / "made")
    native = load_model(config(model=str(quantised), device="cuda", dtype="auto"))
    plain = load_model(config(model=str(floats), device="cuda", dtype="auto", quantization="none"))
    assert native.quantised
    assert not plain.quantised
    assert distance(logits(native, 16, 32), logits(plain, 16, 32)) < 0.25
