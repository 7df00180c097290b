"""Rotary tables have the bits of transformers' own modules, which are not called after a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.loader import load_model, prepare
from gpu_engine.model.rotary import RotaryTable, install_tables
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.model_logits import logits
from tests.gpu_engine.tiny import FAMILIES, save

LENGTH = 256
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": LENGTH,
        "factor": 2.0,
    },
}


def rotary(kind: str) -> LlamaRotaryEmbedding:
    parameters = {"rope_type": kind, "rope_theta": 10_000.0, **TYPES[kind]}
    limit = 2 * LENGTH if kind == "longrope" else LENGTH
    return LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=limit, rope_parameters=parameters)
    )


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_has_the_bits_of_the_module(kind: str, dtype: torch.dtype) -> None:
    table, draw = RotaryTable(rotary(kind), LENGTH), torch.Generator().manual_seed(1)
    for B, P in ((1, 1), (1, 2), (3, 5), (2, 33)):
        x, places = torch.zeros(B, P, 64, dtype=dtype), torch.randint(0, LENGTH, (B, P), generator=draw)
        got, expected = table(x, places), rotary(kind)(x, places)
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.dtype == theirs.dtype == dtype
            assert torch.equal(ours, theirs)
    in_three = table(x, places.expand(3, B, P))
    assert torch.equal(in_three[0], got[0]), "positions in time, height and width"
    assert table(x, torch.tensor([[LENGTH + 63]]))[0].shape == (1, 1, 16), "a rejected draft's position"


@pytest.mark.parametrize("fuse", [False, True])
def test_a_dynamic_model_calls_its_rotary_embedding_only_at_load(tmp_path: Path, fuse: bool) -> None:
    source = FAMILIES["llama"]()
    source.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    folder = tmp_path / "dynamic"
    save(source, folder)
    model = load_model(config(model=str(folder), max_model_len=64, fuse_parts=fuse))
    modules = [m for m in model.net.modules() if type(m).__name__ == "LlamaRotaryEmbedding"]
    assert len(modules) == 1
    called: list[object] = []
    modules[0].register_forward_hook(lambda *given: called.append(given))
    assert bool(logits(model, torch.arange(4)[None]).isfinite().all())
    assert called == [], "its forward compares the longest position on the host, which a capture forbids"


class OtherRotaryEmbedding(torch.nn.Module):
    """No pair of tables: its result is complex. It may compare the longest position on the host, or fail."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4))
        self.does, self.rope_type = does, "dynamic"

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if self.does == "fails":
            raise TypeError("a further argument is missing")
        if self.does == "reads" and position_ids.max() > 16:
            raise AssertionError("the trial call asks for the first positions only")
        return torch.polar(torch.ones(1, 2, 4), torch.ones(1, 2, 4))


@pytest.mark.parametrize("does", ["computes", "reads", "fails"])
def test_a_module_that_reads_a_tensor_back_is_rejected_where_the_forward_is_captured(does: str) -> None:
    decoder = torch.nn.Module()
    decoder.rotary_emb = OtherRotaryEmbedding(does)
    assert install_tables(decoder, 16, captured=False) == 0, "a CPU runs it as it is"
    assert isinstance(decoder.rotary_emb, OtherRotaryEmbedding), "it has other values, so it is not replaced"
    if does == "computes":
        assert install_tables(decoder, 16, captured=True) == 0, "a graph can contain it"
        return
    with pytest.raises(ModelNotSupported, match="OtherRotaryEmbedding reads a tensor back"):
        install_tables(decoder, 16, captured=True)


class NetOfADevice(LlamaForCausalLM):
    """Stays in host memory: the check comes before the first work on the device."""

    def to(self, device: torch.device) -> NetOfADevice:  # type: ignore[override]
        assert device.type == "cuda"
        return self


def test_the_loader_rejects_such_a_module_for_a_cuda_device(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save(FAMILIES["llama"](), tmp_path))
    net = NetOfADevice(FAMILIES["llama"]())
    net.model.rotary_emb = OtherRotaryEmbedding("reads")
    with pytest.raises(ModelNotSupported, match="OtherRotaryEmbedding reads a tensor back"):
        prepare(config(device="cuda"), net, tokenizer)
