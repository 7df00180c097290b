"""Configurations of the mixtures of experts whose GGUF files transformers does not describe, or not in full.

Invariant: a header that asks for another choice of experts than its family's router makes is refused by the key. Not
responsible for: families that also have models without experts, such as hybrids (see gguf_configs.py), the numbers of
experts (see architectures.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

from gpu_engine.model.files.architectures import width_of_experts
from gpu_engine.model.files.gguf_header import GGUFError, GGUFHeader
from gpu_engine.model.files.gguf_values import has_tensor, number_of
from gpu_engine.model.files.rope_factors import apply_rope_factors

_SIGMOID = 2
"""The value of expert_gating_func."""


def _layers(header: GGUFHeader) -> dict[str, Any]:
    """Return what all mixtures have besides the common values. Layers that draft are left out."""
    return {
        "num_hidden_layers": number_of(header, "block_count") - (header.get("{arch}.nextn_predict_layers") or 0),
        "num_experts_per_tok": number_of(header, "expert_used_count"),
        "rms_norm_eps": number_of(header, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rotation(header),
    }


def _rotation(header: GGUFHeader) -> dict[str, Any]:
    """Return the rotary parameters. Raises GGUFError for a kind of scaling that is not known."""
    kind = header.get("{arch}.rope.scaling.type", "none")
    rope = {"rope_type": "default", "rope_theta": header.get("{arch}.rope.freq_base", 10_000.0)}
    if kind == "none":
        return rope
    factor = number_of(header, "rope.scaling.factor")
    if kind == "linear":
        return rope | {"rope_type": kind, "factor": factor}
    if kind != "yarn":
        raise GGUFError(f"its {header.architecture}.rope.scaling.type is {kind!r}; none, linear and yarn are read")
    return rope | {
        "rope_type": kind,
        "factor": factor,
        "beta_fast": header.get("{arch}.rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": header.get("{arch}.rope.scaling.yarn_beta_slow", 1.0),
        "original_max_position_embeddings": number_of(header, "rope.scaling.original_context_length"),
    }


def _require(header: GGUFHeader, key: str, *known: object) -> None:
    """Raise GGUFError for a value of a key that the family's router does not have. A file may lack the key."""
    value = header.get(f"{{arch}}.{key}")
    if value is not None and value not in known:
        raise GGUFError(f"its {header.architecture}.{key} is {value!r}, and must be {' or '.join(map(str, known))}")


def _mixtral(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    config = MixtralConfig(
        **common,
        **_layers(header),
        intermediate_size=number_of(header, "feed_forward_length"),
        num_local_experts=number_of(header, "expert_count"),
        head_dim=header.get("{arch}.attention.key_length") or header.get("{arch}.rope.dimension_count"),
    )
    apply_rope_factors(config, header)
    return config


def _qwen2_moe(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    shared = header.tensors.get("blk.0.ffn_up_shexp.weight")  # older files have no key for its width
    return Qwen2MoeConfig(
        **common,
        **_layers(header),
        intermediate_size=number_of(header, "feed_forward_length"),
        moe_intermediate_size=width_of_experts(header),
        shared_expert_intermediate_size=number_of(header, "expert_shared_feed_forward_length")
        if shared is None
        else shared.shape[0],
        num_experts=number_of(header, "expert_count"),
        qkv_bias=has_tensor(header, "attn_q.bias"),
    )


def _granite(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    shared = header.get("{arch}.expert_shared_feed_forward_length") or 0
    own: dict[str, Any] = {
        **common,
        **_layers(header),
        "intermediate_size": number_of(header, "feed_forward_length"),
        "num_local_experts": number_of(header, "expert_count"),
        "embedding_multiplier": number_of(header, "embedding_scale"),
        "residual_multiplier": number_of(header, "residual_scale"),
        "attention_multiplier": number_of(header, "attention.scale"),
        "logits_scaling": number_of(header, "logit_scale"),
        "attention_bias": has_tensor(header, "attn_q.bias"),
    }
    return GraniteMoeSharedConfig(**own, shared_intermediate_size=shared) if shared else GraniteMoeConfig(**own)


def _olmoe(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    return OlmoeConfig(
        **common,
        **_layers(header),
        intermediate_size=number_of(header, "feed_forward_length"),
        num_experts=number_of(header, "expert_count"),
    )


def _ernie(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    layers = _layers(header)
    return Ernie4_5_MoeConfig(
        **common,
        **{name: value for name, value in layers.items() if name != "num_experts_per_tok"},
        moe_k=layers["num_experts_per_tok"],
        moe_num_experts=number_of(header, "expert_count"),
        moe_num_shared_experts=number_of(header, "expert_shared_count"),
        moe_layer_interval=number_of(header, "interleave_moe_layer_step"),
        moe_layer_start_index=number_of(header, "leading_dense_block_count"),
        moe_intermediate_size=number_of(header, "expert_feed_forward_length"),
        intermediate_size=number_of(header, "feed_forward_length"),
        use_bias=has_tensor(header, "attn_q.bias"),
    )


def _with_sigmoid(header: GGUFHeader) -> dict[str, Any]:
    """Return the mixture of GLM's and DeepSeek's kind: a sigmoid and a bias choose, and a shared expert is added."""
    return {
        "intermediate_size": number_of(header, "feed_forward_length"),
        "moe_intermediate_size": number_of(header, "expert_feed_forward_length"),
        "n_routed_experts": number_of(header, "expert_count"),
        "n_shared_experts": number_of(header, "expert_shared_count"),
        "first_k_dense_replace": header.get("{arch}.leading_dense_block_count") or 0,
        "routed_scaling_factor": header.get("{arch}.expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(header.get("{arch}.expert_weights_norm")),
        "n_group": header.get("{arch}.expert_group_count") or 1,
        "topk_group": header.get("{arch}.expert_group_used_count") or 1,
    }


def _glm4_moe(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    _require(header, "expert_gating_func", _SIGMOID)
    layers, head_dim = _layers(header), number_of(header, "attention.key_length")
    layers["rope_parameters"]["partial_rotary_factor"] = number_of(header, "rope.dimension_count") / head_dim
    own: dict[str, Any] = {"head_dim": head_dim}  # the class does not name it
    return Glm4MoeConfig(
        **common,
        **layers,
        **_with_sigmoid(header),
        **own,
        attention_bias=has_tensor(header, "attn_q.bias"),
        use_qk_norm=has_tensor(header, "attn_q_norm.weight"),
    )


MIXTURES: dict[str, Callable[[GGUFHeader, dict[str, Any]], PreTrainedConfig]] = {
    "ernie4_5-moe": _ernie,
    "glm4moe": _glm4_moe,
    "granitemoe": _granite,
    "llama": _mixtral,
    "olmoe": _olmoe,
    "qwen2moe": _qwen2_moe,
}
"""By the architecture of a file that has experts."""
