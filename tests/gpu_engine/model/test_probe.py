"""The check at load that a model's attention is ours: logits that follow each rounding, and those of another attention.

Not responsible for: families that are refused for their configuration (see test_families.py).
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from gpu_engine.model import attention
from gpu_engine.model.loaded_model import LoadedModel, ModelNotSupported
from gpu_engine.model.loader import prepare
from gpu_engine.model.probe import own_logits, probe
from tests.fakes import byte_tokenizer
from tests.gpu_engine.harness import config


def wild(num_layers: int, **fields: object) -> LoadedModel:
    """A model with large weights, which make a rounding in its first layer grow from layer to layer."""
    attention.register()
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    net = AutoModelForCausalLM.from_config(shape, attn_implementation=attention.NAME, dtype=torch.bfloat16)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    return prepare(config(model="wild", dtype="bfloat16", **fields), net, tokenizer)


@pytest.mark.parametrize(("num_layers", "quantization"), [(12, "q4"), (24, "none")])
def test_a_model_that_follows_each_rounding_is_served(num_layers: int, quantization: str) -> None:
    """Their logits are further from transformers' than a bound allows that holds for others."""
    wild(num_layers, quantization=quantization)


def test_logits_of_another_attention_are_refused() -> None:
    model = wild(2, fuse_parts=False)
    own = own_logits(model)
    probe(model, own=own)
    with pytest.raises(ModelNotSupported, match="the attention of llama does more than ours"):
        probe(model, own=own.flip(0))


def test_another_attention_is_refused_in_a_model_that_follows_each_rounding_too() -> None:
    model = wild(12, quantization="q4", fuse_parts=False)
    own, nudged = own_logits(model), own_logits(model, nudged=True)
    assert probe(model, own=own, nudged=lambda: nudged).noise > 0.1
    with pytest.raises(ModelNotSupported, match="does more than ours"):
        probe(model, own=own.flip(0), nudged=lambda: nudged.flip(0))
    with pytest.raises(ModelNotSupported, match="does more than ours"):
        probe(model, own=own, nudged=lambda: own)
