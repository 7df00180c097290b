"""Files of random weights: every kind is read back by the gguf package, with the size of a layer's weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from gpu_engine.model.loader import load_model
from gpu_engine.model.quantised.native import NativeForward
from kernels.blocks import can_multiply_blocks
from tests.gpu_engine.harness import config
from tools.shapes import KINDS, MIXED, SAFETENSORS, SCALED, Pool, Shape, kind_of, write_folder, write_gguf

TINY = Shape(hidden=256, layers=8, heads=4, kv_heads=2, head_dim=64, inner=512)


@pytest.mark.parametrize("kind", [*KINDS, *SCALED])
def test_rows_of_each_kind_have_the_deviation_of_a_layer(kind: str) -> None:
    raw = Pool(0).matrix(kind, (300, 512))
    values = dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])
    assert values.shape == (300, 512)
    assert values.std() == pytest.approx(512**-0.5, rel=0.05)
    assert abs(values.mean()) < 0.1 * 512**-0.5


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")
@pytest.mark.parametrize("kind", ["q4_0", SAFETENSORS])
def test_a_mixture_of_experts_loads_in_both_formats(tmp_path: Path, kind: str) -> None:
    shape = dataclasses.replace(TINY, layers=2, inner=64, experts=6, chosen=3)
    path = tmp_path / ("folder" if kind == SAFETENSORS else "m.gguf")
    if kind == SAFETENSORS:
        write_folder(shape, path)
    else:
        write_gguf(shape, "tiny", kind, path)
    model = load_model(config(model=str(path), dtype="bfloat16", quantization="q4"))
    assert isinstance(model.fused.forward, NativeForward), model.fused.left
    assert model.net.config.num_experts == 6
    assert model.net.config.num_experts_per_tok == 3
    assert model.net.config.norm_topk_prob


@pytest.mark.model
@pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")
@pytest.mark.parametrize("kind", ["q8_0", "bf16"])
def test_a_file_of_gpt_oss_has_experts_in_mxfp4(tmp_path: Path, kind: str) -> None:
    shape = dataclasses.replace(TINY, layers=2, inner=64, experts=6, chosen=3, window=32)
    write_gguf(shape, "tiny", kind, tmp_path / "m.gguf")
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert {kinds[name] for name in kinds if name.endswith("_exps.weight")} == {"mxfp4"}
    assert {kinds[name] for name in kinds if name.endswith("bias") or "ffn_gate_inp" in name} == {"f32"}
    assert {kinds[f"{name}.weight"] for name in ("token_embd", "output", "blk.1.attn_q", "blk.0.attn_output")} == {kind}
    model = load_model(config(model=str(tmp_path / "m.gguf"), dtype="auto"))
    made = model.net.config
    assert (made.num_local_experts, made.num_experts_per_tok, made.sliding_window) == (6, 3, 32)
    assert model.forms == "4-bit floats: 24, 8-bit blocks: 9"


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q4_k_m", "q5_k_m"])
def test_a_mixed_file_has_its_two_kinds_where_llama_cpp_has_them_and_a_token_for_each_row(
    tmp_path: Path, kind: str
) -> None:
    write_gguf(dataclasses.replace(TINY, vocabulary=49_200), "tiny", kind, tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in reader.tensors if len(tensor.shape) == 2}
    few, many = MIXED[kind]
    more = {layer for layer in range(TINY.layers) if kinds[f"blk.{layer}.ffn_down.weight"] == many}
    assert more == {0, 3, 6, 7}
    assert {layer for layer in range(TINY.layers) if kinds[f"blk.{layer}.attn_v.weight"] == many} == more
    assert kinds["output.weight"] == many
    assert {kinds[name] for name in kinds if "ffn_up" in name or "attn_q" in name or "token" in name} == {few}
    layer = [tensor for tensor in reader.tensors if tensor.name.startswith("blk.0.")]
    assert all(np.isfinite(dequantize(tensor.data, tensor.tensor_type)).all() for tensor in layer)
    tokens, types = (reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    assert len(tokens) == len(set(tokens)) == len(types) == 49_200
    assert tokens[-1] == "[PAD49199]"
    assert types[-1] == gguf.TokenType.UNUSED


def test_every_mixed_kind_has_a_row_here_and_a_plain_one_has_itself_everywhere() -> None:
    assert set(MIXED) == {"q4_k_m", "q5_k_m"}
    assert kind_of("q8_0", "output.weight", TINY) == "q8_0"
