"""The check at load that a model's attention is ours: logits that follow each rounding, and those of another attention.

Not responsible for: families that are refused for their configuration (see test_families.py).
"""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)

from gpu_engine.model import attention
from gpu_engine.model.loaded_model import LoadedModel, ModelNotSupported
from gpu_engine.model.loader import prepare
from gpu_engine.model.probe import own_logits, probe
from gpu_engine.model.quantised.native import NativeForward
from kernels.blocks import can_multiply_blocks
from tests.fakes import byte_tokenizer
from tests.gpu_engine.harness import config

needs_blocks = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")


def wild(
    num_layers: int,
    kind: type[PretrainedConfig] = LlamaConfig,
    shape: dict[str, object] | None = None,
    **fields: object,
) -> LoadedModel:
    """A model with large weights, which make a rounding in its first layer grow from layer to layer."""
    attention.register()
    torch.manual_seed(0)
    made = kind(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        **(shape or {}),
    )
    net = AutoModelForCausalLM.from_config(made, attn_implementation=attention.NAME, dtype=torch.bfloat16)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    return prepare(config(model="wild", dtype="bfloat16", **fields), net, tokenizer)


@pytest.mark.parametrize(("num_layers", "quantization"), [(12, "q4"), (24, "none")])
def test_a_model_that_follows_each_rounding_is_served(num_layers: int, quantization: str) -> None:
    """Their logits are further from transformers' than a bound allows that holds for others."""
    wild(num_layers, quantization=quantization)


_DELTA_NETS: dict[str, object] = {
    "layer_types": ["linear_attention", "full_attention"] * 12,
    "head_dim": 32,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
}


@needs_blocks
@pytest.mark.parametrize(
    ("kind", "shape"), [(Lfm2Config, {"layer_types": ["conv", "full_attention"] * 8}), (Qwen3_5TextConfig, _DELTA_NETS)]
)
def test_a_hybrid_that_follows_each_rounding_runs_in_one_native_call(
    kind: type[PretrainedConfig], shape: dict[str, object]
) -> None:
    """The loop and transformers' forward, or the native call and the loop, are further apart than others' are."""
    layers = shape["layer_types"]
    assert isinstance(layers, list)
    model = wild(len(layers), kind, shape, quantization="q4")
    assert isinstance(model.fused.forward, NativeForward)


def test_logits_of_another_attention_are_refused() -> None:
    model = wild(2, fuse_parts=False)
    own = own_logits(model)
    probe(model, own=own)
    with pytest.raises(ModelNotSupported, match="the attention of llama does more than ours"):
        probe(model, own=own.flip(0))


def test_another_attention_is_refused_in_a_model_that_follows_each_rounding_too() -> None:
    model = wild(12, quantization="q4", fuse_parts=False)
    own = own_logits(model)
    assert probe(model, own=own).noise > 0.1
    with pytest.raises(ModelNotSupported, match="does more than ours"):
        probe(model, own=own.flip(0))
    with pytest.raises(ModelNotSupported, match="does more than ours"):
        probe(model, own=own, moves=lambda: 0.0)
