"""gpt-oss runs in one native call: sinks, angles of half the channels, biases of router and experts, its own gate."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.fused_forward import FusedForward
from gpu_engine.model.fused_layers import FusedAttention
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.loader import load_model
from gpu_engine.model.quantised.native import NativeForward
from gpu_engine.model.recording import distance, typical_distance
from kernels.blocks import can_multiply_blocks
from kernels.fused_arguments import Activation
from tests.gpu_engine import gguf_files, tiny
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.model_logits import context, logits, some_ids

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
    assert all(each.half_angles and each.sinks_H is not None for each in attentions)
    mixtures = list(got.fused.mixtures.values())
    assert [(each.act, each.renormalises, each.chosen) for each in mixtures] == [(Activation.SWIGLU_OAI, True, 2)] * 2
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


def gpt_oss() -> Any:
    """Return a model in float32, every weight of which matters."""
    shape = {**gguf_files._SHAPE, "rms_norm_eps": 1e-5}
    made = GptOssConfig(
        **shape, head_dim=32, num_local_experts=5, num_experts_per_tok=2, sliding_window=tiny.WINDOW, eos_token_id=256
    )
    made.rope_parameters |= {"original_max_position_embeddings": 64, "rope_theta": 10_000.0}
    torch.manual_seed(1)
    net = AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in net.parameters():
        parameter.copy_(torch.randn_like(parameter) * (1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))
    return net


@torch.inference_mode()
def test_a_gguf_file_has_the_logits_of_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = gpt_oss()
    file = gguf_files.write(net.config, tmp_path / "model.gguf", ["F32"], of=net)
    caplog.set_level(logging.INFO)
    model = load_model(config(model=str(file), dtype="float32", quantization="none"))
    assert "through transformers" not in caplog.text
    assert "does not read" not in caplog.text
    ids_BP = some_ids(2, 60)
    assert distance(logits(model, ids_BP), net(ids_BP, use_cache=False).logits) < 1e-5
    wanted, got = net.config.to_dict(), model.net.config.to_dict()
    assert {name for name in wanted if got[name] != wanted[name]} <= {
        "_name_or_path",
        "bos_token_id",
        "dtype",
        "rms_norm_eps",
    }


@needs_blocks
@torch.inference_mode()
@pytest.mark.parametrize("kinds", [("MXFP4", "Q8_0"), ("Q4_0",), ("Q8_0", "Q4_1", "Q5_0")])
def test_a_gguf_file_runs_over_its_own_blocks(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    file = gguf_files.write(gpt_oss().config, tmp_path / "model.gguf", kinds)
    model = load_model(config(model=str(file), dtype="auto"))
    assert isinstance(model.fused.forward, NativeForward), model.fused.left
    whole = load_model(config(model=str(file), dtype="float32", quantization="none"))
    ids_BP = some_ids(2, 30)
    got_NV, want_NV = (logits(each, ids_BP).float().flatten(0, 1) for each in (model, whole))
    assert typical_distance(got_NV, want_NV) < 0.15


@pytest.mark.parametrize(
    ("tensor", "shape", "why"),
    [
        ("blk.1.attn_sinks.weight", (3,), r"self_attn\.sinks is \[3\], and the model's is \[4\]"),
        ("blk.1.ffn_up_exps.bias", (5, 64), r"gate_up of layer 1 is made of .* not one shape"),
        ("blk.1.ffn_down_exps.bias", (4, 64), r"no weights for model\.layers\.1\.mlp\.experts\.down\.4\.bias$"),
        ("blk.0.attn_sinks.weight", None, r"no weights for model\.layers\.0\.self_attn\.sinks$"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, tensor: str, shape: tuple[int, ...] | None, why: str
) -> None:
    file = gguf_files.write(gpt_oss().config, tmp_path / "model.gguf", ["F32"], changed={tensor: shape})
    with pytest.raises(ModelNotSupported, match=why):
        load_model(config(model=str(file), dtype="float32", quantization="none"))


def test_another_kind_of_rotation_is_refused(tmp_path: Path) -> None:
    made = gpt_oss().config
    made.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    file = gguf_files.write(made, tmp_path / "model.gguf", ["F32"])
    with pytest.raises(ModelNotSupported, match=r"its rope\.scaling\.type is None, and gpt-oss has 'yarn'$"):
        load_model(config(model=str(file)))


@needs_blocks
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(folder: str) -> None:
    model = load_model(config(model=folder, dtype="bfloat16", quantization="q4"))
    ids_BP = some_ids(5, 33)
    whole_BPV = logits(model, ids_BP)
    assert torch.equal(logits(model, ids_BP[2:3]), whole_BPV[2:3])
    ctx = context(model, 5, 33)
    for begin, end in ((0, 1), (1, 9), (9, 32), (32, 33)):
        part = AttentionContext(ctx.pages, ctx.page_table_BN, ctx.positions_BP[:, begin:end].contiguous())
        got_NV = model.logits(ids_BP[:, begin:end], part)
        assert torch.equal(got_NV.view(5, end - begin, -1), whole_BPV[:, begin:end])
