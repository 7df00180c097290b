"""GGUF files of the hybrid families: what llama.cpp's converter does to a model's weights is undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_engine.model.experts import Experts, split_experts
from gpu_engine.model.files.filled import fill, refuse_misfits, sources_of, unfilled
from gpu_engine.model.files.gguf_header import GGUFError, GGUFHeader
from gpu_engine.model.files.gguf_weights import GGUFWeights
from gpu_engine.model.files.reading import configuration_of
from gpu_engine.model.loader import load_model
from gpu_engine.model.quantised.linear import BlockLinear
from gpu_engine.model.quantised.native import NativeForward
from gpu_engine.model.recording import distance, typical_distance
from kernels.blocks import can_multiply_blocks
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.model_logits import logits, some_ids
from tests.gpu_engine.model.recurrent.families import CONFIGS, tiny
from tests.gpu_engine.model.recurrent.hybrid_gguf_files import BIASES, FAMILIES, KEYS, WITH_EXPERTS, write

needs_avx2 = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")


@pytest.mark.parametrize("arch", FAMILIES)
def test_weights_come_back(tmp_path: Path, arch: str) -> None:
    own = tiny(FAMILIES[arch])
    header = GGUFHeader(write(own, arch, tmp_path / "model.gguf"))
    net = unfilled(configuration_of(header.path, header), torch.float32, "eager")
    with GGUFWeights(header) as weights:
        refuse_misfits(net, weights)
        unread = weights.unread(sources_of(net, weights).values())
        assert unread == ([] if arch == "qwen35" else [f"blk.{own.config.num_hidden_layers}.nextn.eh_proj.weight"])
        fill(net, weights, torch.float32, lambda name, parent, linear: None, lambda share: None)
    got, want = dict(net.named_parameters()), dict(own.named_parameters())
    assert got.keys() == want.keys()
    for name, parameter in want.items():
        torch.testing.assert_close(got[name], parameter, rtol=1e-6, atol=1e-6)


def with_random_biases(net: Any) -> Any:
    """Return the model with biases in the choice of experts, which are zeros at first."""
    for name, buffer in net.named_buffers():
        if name.endswith(BIASES):
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(len(name))))
    return net


@pytest.mark.parametrize("arch", WITH_EXPERTS)
def test_weights_of_experts_come_back(tmp_path: Path, arch: str) -> None:
    own = with_random_biases(tiny(WITH_EXPERTS[arch]))
    header = GGUFHeader(write(own, arch, tmp_path / "model.gguf"))
    net = unfilled(configuration_of(header.path, header), torch.float32, "eager")
    assert split_experts(net) > 0
    with GGUFWeights(header) as weights:
        refuse_misfits(net, weights)
        unread = weights.unread(sources_of(net, weights).values())
        assert [name for name in unread if "nextn" not in name] == []
        fill(net, weights, torch.float32, lambda name, parent, linear: None, lambda share: None)
    got, want = net.state_dict(), dict[str, torch.Tensor]()
    for name, tensor in own.state_dict().items():
        if ".experts." in name:
            product = name.removesuffix("_proj").replace(".up", ".gate_up")  # some have no gate
            want |= {f"{product}.{expert}.weight": part for expert, part in enumerate(tensor)}
        else:
            want[name] = tensor
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-6)


@needs_avx2
@pytest.mark.parametrize("arch", WITH_EXPERTS)
def test_experts_of_a_file_run_over_its_own_blocks(tmp_path: Path, arch: str) -> None:
    own = with_random_biases(tiny(WITH_EXPERTS[arch]))
    file = write(own, arch, tmp_path / "model.gguf", "Q8_0")
    follows = arch in ("jamba", "qwen3next")  # their choice of experts follows each rounding
    dtype = "float32" if follows else "bfloat16"
    model = load_model(config(model=str(file), dtype=dtype, quantization="q4"))
    experts = [module for module in model.net.modules() if type(module) is Experts]
    assert model.quantised
    assert experts
    for each in experts:
        assert {type(product) for product in (*each.gate_up, *each.down)} == {BlockLinear}
        assert each.native is not None
    ids_BP = some_ids(3, 40)
    with torch.inference_mode():
        got_NV, want_NV = (each.flatten(0, 1) for each in (logits(model, ids_BP), own(ids_BP, use_cache=False).logits))
    assert typical_distance(got_NV.float(), want_NV) < 0.15


@needs_avx2
@pytest.mark.parametrize("arch", ["falcon-h1", "granitehybrid", "lfm2", "nemotron_h", "qwen35"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_file_of_blocks_runs_as_one_native_call(tmp_path: Path, arch: str, kind: str) -> None:
    """What controls a row of a delta net may be in another kind than the other products."""
    file = write(tiny(FAMILIES[arch]), arch, tmp_path / "model.gguf", kind)
    settings = {"model": str(file), "dtype": "float32", "quantization": "q4"}
    own, model = (load_model(config(**settings, fuse_parts=fuse)) for fuse in (False, True))
    assert own.fused.forward is None
    assert isinstance(model.fused.forward, NativeForward), model.fused.left
    ids_BP = some_ids(1, 40)
    assert typical_distance(logits(model, ids_BP)[0], logits(own, ids_BP)[0]) < 2e-2


@pytest.mark.parametrize(("arch", "family"), [*FAMILIES.items(), *WITH_EXPERTS.items()])
def test_a_file_has_the_logits_of_its_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arch: str, family: str
) -> None:
    own = with_random_biases(tiny(family))
    file = write(own, arch, tmp_path / "model.gguf")
    with caplog.at_level("INFO"):
        model = load_model(config(model=str(file), dtype="float32"))
    assert not [line for line in caplog.messages if "through transformers" in line]
    assert model.tokenizer("ab").input_ids[-1] == model.tokenizer.convert_tokens_to_ids("ab")
    ids_BP = some_ids(1, 40)
    with torch.inference_mode():
        assert distance(logits(model, ids_BP)[0], own(ids_BP, use_cache=False).logits[0]) < 1e-4


@pytest.mark.parametrize("arch", ["lfm2", "nemotron_h"])
def test_a_long_vocabulary_is_counted(tmp_path: Path, arch: str) -> None:
    shape = CONFIGS[FAMILIES[arch]]()
    shape.vocab_size = 5000  # more than is read of the arrays in a header
    header = GGUFHeader(write(AutoModelForCausalLM.from_config(shape), arch, tmp_path / "model.gguf"))
    assert configuration_of(header.path, header).vocab_size == 5000


@needs_avx2
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("qwen35", "model.layers.0.linear_attn.out_proj.weight"),
        ("qwen35", "model.layers.0.linear_attn.in_proj_qkv.weight"),
        ("qwen3next", "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        ("granitehybrid", "model.layers.0.shared_mlp.input_linear.weight"),
    ],
)
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1"])
def test_products_have_the_order_of_the_model(tmp_path: Path, arch: str, name: str, kind: str) -> None:
    """Columns that are moved in whole blocks, rows that are moved, and rows of two tensors, also in turn."""
    own = tiny((WITH_EXPERTS | FAMILIES)[arch])
    header = GGUFHeader(write(own, arch, tmp_path / "model.gguf", kind))
    with GGUFWeights(header) as weights:
        assert weights.blocks_kind(name) is not None
        product, matrix_NK = weights.product(name, None), weights.tensor(name, torch.float32)
    want_NK = dict(own.named_parameters())[name]
    assert distance(matrix_NK, want_NK) < 0.15
    x_MK = torch.randn(3, want_NK.shape[1], generator=torch.Generator().manual_seed(0))
    assert distance(product(x_MK), x_MK @ matrix_NK.T) < 2e-2


def test_mixtures_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "falcon-h1")
    writer.add_expert_count(4)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = GGUFHeader(tmp_path / "model.gguf")
    with pytest.raises(GGUFError, match="a mixture of experts of the architecture falcon-h1, which is not read"):
        configuration_of(header.path, header)


@pytest.mark.parametrize("arch", ["falcon-h1", "nemotron_h"])
def test_the_size_of_a_head_is_bounded(tmp_path: Path, arch: str) -> None:
    """The angles of a rotation take memory before any tensor's shape is compared."""
    own = tiny(FAMILIES[arch])
    keys = {**KEYS[arch](own.config), "attention.key_length": 2**32 - 1}
    header = GGUFHeader(write(own, arch, tmp_path / "model.gguf", keys=keys))
    with pytest.raises(GGUFError, match="key_length is 4294967295, and must be from 1 to 65536"):
        configuration_of(header.path, header)
