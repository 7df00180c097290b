"""Tiny models of each hybrid family, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
}

HYBRIDS = (
    "bamba",
    "falcon_h1",
    "falcon_h1 with norms",
    "granite",
    "jamba",
    "lfm2",
    "nemotron_h",
    "qwen3_5",
    "qwen3_next",
)
"""One of each kind of layer; the others are without experts and multipliers, as files have them."""
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "bamba": lambda: BambaConfig(**SIZES, **MAMBA, attn_layer_indices=[1]),
    "falcon_h1": lambda: FalconH1Config(
        **SIZES,
        **MAMBA,
        mamba_d_ssm=128,
        head_dim=16,
        ssm_in_multiplier=1.5,
        ssm_multipliers=[0.5, 1.5, 0.75, 1.25, 2.0],
        key_multiplier=0.5,
        mlp_multipliers=[0.75, 1.5],
    ),
    "falcon_h1 plain": lambda: FalconH1Config(**SIZES, **MAMBA, mamba_d_ssm=128, head_dim=16),
    "falcon_h1 with norms": lambda: FalconH1Config(
        **SIZES, **MAMBA, mamba_d_ssm=128, head_dim=16, mamba_rms_norm=True, mamba_norm_before_gate=False
    ),
    "granite": lambda: GraniteMoeHybridConfig(
        **SIZES,
        **MAMBA,
        layer_types=["mamba", "attention", "mamba"],
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=3.0,
        num_local_experts=4,
        shared_intermediate_size=32,
    ),
    "granite dense": lambda: GraniteMoeHybridConfig(
        **SIZES,
        **MAMBA,
        layer_types=["mamba", "attention", "mamba"],
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=3.0,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=96,
    ),
    "jamba": lambda: JambaConfig(
        **SIZES,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=8,
    ),
    "jamba dense": lambda: JambaConfig(
        **SIZES, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, num_experts=1, mamba_dt_rank=8
    ),
    "lfm2": lambda: Lfm2Config(
        **SIZES, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False
    ),
    "lfm2 moe": lambda: Lfm2MoeConfig(
        **SIZES,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **SIZES,
        layers_block_type=["mamba", "mlp", "attention", "mamba", "moe"],
        head_dim=16,
        ssm_state_size=24,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=16,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        n_routed_experts=4,
    ),
    "nemotron_h dense": lambda: NemotronHConfig(
        **SIZES,
        layers_block_type=["mamba", "mlp", "attention", "mamba"],
        head_dim=16,
        ssm_state_size=24,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
    ),
    "nemotron_h moe": lambda: NemotronHConfig(
        **SIZES,
        layers_block_type=["mamba", "moe", "attention", "mamba", "moe"],
        head_dim=16,
        ssm_state_size=24,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=16,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(**SIZES, **DELTA_NET),
    "qwen3_5 moe": lambda: Qwen3_5MoeTextConfig(
        **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
        **DELTA_NET,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **SIZES,
        **DELTA_NET,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
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
