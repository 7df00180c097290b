"""Tiny mixtures of experts as GGUF files, with the keys that llama.cpp's converter writes.

Not responsible for: hybrids with experts, and the names and order of weights (see recurrent/hybrid_gguf_files.py),
gpt-oss and Qwen 3 MoE (see test_gpt_oss_files.py and test_mixtures.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

from tests.gpu_engine.model.recurrent import hybrid_gguf_files

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_CHOICE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2}
_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 3.0,
}


_LATENT: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}


def _theta(**others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 30_000.0, **others}}


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "deepseek2": lambda: DeepseekV2Config(**_LATENT, **_theta(), q_lora_rank=None, routed_scaling_factor=1.5),
    "deepseek2 yarn": lambda: DeepseekV2Config(
        **_LATENT,
        **_theta(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.7),
        q_lora_rank=24,
    ),
    "deepseek2 v3": lambda: DeepseekV3Config(**_LATENT, **_theta(), q_lora_rank=24, n_group=4, topk_group=2),
    "ernie4_5-moe": lambda: Ernie4_5_MoeConfig(
        **_SIZES,
        **_theta(),
        intermediate_size=96,
        moe_num_experts=5,
        moe_k=2,
        moe_intermediate_size=32,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
    ),
    "glm4moe": lambda: Glm4MoeConfig(
        **_SIZES,
        **_theta(partial_rotary_factor=0.25),
        head_dim=32,  # type: ignore[call-arg]  # the class does not name it
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        n_group=4,
        topk_group=2,
        attention_bias=True,
        use_qk_norm=True,
    ),
    "granitemoe": lambda: GraniteMoeConfig(
        **_SIZES, **_theta(), **_MULTIPLIERS, intermediate_size=32, num_local_experts=5, num_experts_per_tok=2
    ),
    "granitemoe shared": lambda: GraniteMoeSharedConfig(
        **_SIZES,
        **_theta(),
        **_MULTIPLIERS,
        intermediate_size=32,
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
    ),
    "llama": lambda: MixtralConfig(
        **_SIZES, **_theta(), intermediate_size=32, num_local_experts=5, num_experts_per_tok=2, head_dim=32
    ),
    "olmoe": lambda: OlmoeConfig(**{**_SIZES, "num_key_value_heads": 4}, **_theta(), **_CHOICE, intermediate_size=32),
    "qwen2moe": lambda: Qwen2MoeConfig(
        **_SIZES,
        **_theta(),
        **_CHOICE,
        intermediate_size=96,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
}
"""By the architecture of a file, with what else tells two models apart after it."""


def keys_of(config: Any) -> dict[str, Any]:
    """Return what a file says besides the sizes that all have."""
    return {"attention.head_count_kv": config.num_key_value_heads, **_KEYS[config.model_type](config)}


def _of_granite(config: Any) -> dict[str, Any]:
    return {
        **_plain(config),
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "attention.scale": config.attention_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _plain(config: Any) -> dict[str, Any]:
    return {
        "expert_count": getattr(config, "num_local_experts", None) or config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "feed_forward_length": config.intermediate_size,
    }


def _with_groups(config: Any) -> dict[str, Any]:
    return {
        "feed_forward_length": config.intermediate_size,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_weights_scale": config.routed_scaling_factor,
        "leading_dense_block_count": config.first_k_dense_replace,
    }


def _latent(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope.get("factor"),
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
        "rope.scaling.yarn_log_multiplier": 0.1 * rope.get("mscale_all_dim", 0.0),
    }
    return {
        **_with_groups(config),
        **(yarn if rope["rope_type"] == "yarn" else {}),
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


_KEYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "deepseek_v2": _latent,
    "deepseek_v3": lambda c: {**_latent(c), "expert_gating_func": 2, "expert_weights_norm": c.norm_topk_prob},
    "ernie4_5_moe": lambda c: {
        **_plain(c),
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_count": c.moe_num_shared_experts,
        "leading_dense_block_count": c.moe_layer_start_index,
        "interleave_moe_layer_step": c.moe_layer_interval,
    },
    "glm4_moe": lambda c: {
        **_with_groups(c),
        "block_count": c.num_hidden_layers + 1,
        "nextn_predict_layers": 1,
        "attention.key_length": c.head_dim,
        "rope.dimension_count": int(c.head_dim * c.rope_parameters["partial_rotary_factor"]),
        "expert_gating_func": 2,
        "expert_weights_norm": c.norm_topk_prob,
    },
    "granitemoe": _of_granite,
    "granitemoeshared": lambda c: {
        **_of_granite(c),
        "expert_shared_feed_forward_length": c.shared_intermediate_size,
    },
    "mixtral": lambda c: {**_plain(c), "attention.key_length": c.head_dim, "rope.dimension_count": c.head_dim},
    "olmoe": _plain,
    "qwen2_moe": lambda c: {
        **_plain(c),
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
    },
}


def tiny(family: str) -> Any:
    """Return a model of a family, the same in every call."""
    torch.manual_seed(12)
    net: Any = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32).eval().requires_grad_(False)
    biases = [buffer for name, buffer in net.named_buffers() if name.endswith(hybrid_gguf_files.BIASES)]
    for tensor in (*net.parameters(), *biases):
        tensor.copy_(torch.randn_like(tensor) * (0.2 if tensor.dim() > 1 else 0.1) + (tensor.dim() < 2))
    return net


def write(
    net: Any,
    family: str,
    file: Path,
    kind: str = "F32",
    *,
    changed: Callable[[list[Any]], list[Any]] = lambda tensors: tensors,
    **others: Any,
) -> Path:
    """Write a model as a GGUF file whose matrices are of a kind.

    `changed`: returns what the file has in place of a parameter's tensors. `others`: keys in place of the family's,
    with "__" for a dot; None: the file lacks the key.
    """
    keys = keys_of(net.config) | {name.replace("__", "."): value for name, value in others.items()}
    return hybrid_gguf_files.write(net, family.split()[0], file, kind, keys, changed=changed)
