"""Tiny models of each hybrid family, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Lfm2Config, PreTrainedConfig

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "lfm2": lambda: Lfm2Config(
        **SIZES, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False
    ),
}


def tiny(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of a family, the same in every call."""
    torch.manual_seed(11)
    net = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=dtype).eval().requires_grad_(False)
    for name, parameter in net.named_parameters():
        if "A_log" not in name:
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.1) + (parameter.dim() < 2))
    return net
