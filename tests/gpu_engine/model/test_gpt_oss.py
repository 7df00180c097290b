"""gpt-oss runs in one native call: sinks, angles of half the channels, biases of router and experts, its own gate."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_engine.model.fused_forward import FusedForward
from gpu_engine.model.fused_layers import FusedAttention, Rotation
from gpu_engine.model.loader import load_model
from gpu_engine.model.quantised.native import NativeForward
from gpu_engine.model.recording import distance, typical_distance
from kernels.blocks import can_multiply_blocks
from kernels.fused_arguments import Activation
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.model_logits import (
    assert_same_bits_in_any_company,
    assert_same_bits_on_every_unit,
    logits,
    some_ids,
)

needs_blocks = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model whose sinks and biases are as large as what they are added to."""
    made = tiny.save(tiny.gpt_oss(), tmp_path_factory.mktemp("gpt-oss"))
    tensors, random = load_file(made / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith(("bias", "sinks")):
            tensor.copy_(torch.randn(tensor.shape, generator=random))
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return str(made)


@torch.inference_mode()
def test_the_parts_are_fused_and_the_logits_are_those_of_transformers(folder: str) -> None:
    got = load_model(config(model=folder, dtype="float32", quantization="none"))
    want = load_model(config(model=folder, dtype="float32", quantization="none", fuse_parts=False))
    assert isinstance(got.fused.forward, FusedForward), got.fused.left
    assert want.fused.forward is None
    attentions = [module for module in got.net.modules() if isinstance(module, FusedAttention)]
    assert all(each.rotation is Rotation.HALVES_BY_PAIR and each.sinks_H is not None for each in attentions)
    mixtures = list(got.fused.mixtures.values())
    found = [(each.act, each.choice.renormalises, each.choice.chosen) for each in mixtures]
    assert found == [(Activation.SWIGLU_OAI, True, 2)] * 2
    ids_BP = some_ids(3, 40)
    assert distance(logits(got, ids_BP), logits(want, ids_BP)) < 1e-5


@needs_blocks
@torch.inference_mode()
@pytest.mark.parametrize("quantization", ["int8", "q4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_runs_in_one_native_call(folder: str, quantization: str, dtype: str) -> None:
    native = load_model(config(model=folder, dtype=dtype, quantization=quantization))
    loop = load_model(config(model=folder, dtype=dtype, quantization=quantization, fuse_parts=False))
    assert isinstance(native.fused.forward, NativeForward), native.fused.left
    ids_BP = some_ids(3, 40)
    got_NV, want_NV = (logits(model, ids_BP).float().flatten(0, 1) for model in (native, loop))
    assert typical_distance(got_NV, want_NV) < (2e-2 if dtype == "float32" else 5e-2)


@needs_blocks
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company_and_on_every_unit(folder: str) -> None:
    model = load_model(config(model=folder, dtype="bfloat16", quantization="q4"))
    assert_same_bits_in_any_company(model)
    assert_same_bits_on_every_unit(model)
