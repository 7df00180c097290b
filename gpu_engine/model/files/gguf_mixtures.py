"""Configurations of the mixtures of experts whose GGUF files transformers does not describe, or not in full.

Invariant: a header that asks for another choice of experts than its family's router makes is refused by the key. Not
responsible for: families that also have models without experts, such as hybrids (see gguf_configs.py), the numbers of
experts (see architectures.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
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
    Qwen3NextConfig,
)

from gpu_engine.model.files.architectures import width_of_experts
from gpu_engine.model.files.gguf_header import GGUFError, GGUFHeader
from gpu_engine.model.files.gguf_values import (
    ends_of,
    has_tensor,
    head_size_of,
    layers_of,
    number_of,
    rotated_of,
    rotation_of,
)

_SOFTMAX, _SIGMOID = 1, 2
"""Values of expert_gating_func."""
_OF_V2, _OF_V3 = 160, 256
"""Experts of DeepSeek's models that choose by groups: their older files do not say so."""


def mixture_configuration(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration of a file of one of MIXTURES. `common`: what all families have, by transformers' names.
    Raises KeyError, TypeError, ValueError or GGUFError."""
    return MIXTURES[header.architecture](header, {**common, "eos_token_id": ends_of(header)})


def _layers(header: GGUFHeader) -> dict[str, Any]:
    """Return what all mixtures have besides the common values."""
    return {
        "num_hidden_layers": layers_of(header),
        "num_experts_per_tok": number_of(header, "expert_used_count"),
        "rms_norm_eps": number_of(header, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": rotation_of(header),
    }


def _shared_width(header: GGUFHeader) -> int:
    """Return the channels of the shared expert; 0: there is none. Older files have no key for it."""
    shared = header.tensors.get("blk.0.ffn_up_shexp.weight")
    return shared.shape[0] if shared else header.get("{arch}.expert_shared_feed_forward_length") or 0


def _require(header: GGUFHeader, key: str, *known: object) -> None:
    """Raise GGUFError for a value of a key that the family's router does not have. A file may lack the key."""
    value = header.get(f"{{arch}}.{key}")
    if value is not None and value not in known:
        raise GGUFError(f"its {header.architecture}.{key} is {value!r}, and must be {' or '.join(map(str, known))}")


def _mixtral(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    return MixtralConfig(
        **common,
        **_layers(header),
        intermediate_size=number_of(header, "feed_forward_length"),
        num_local_experts=number_of(header, "expert_count"),
        head_dim=head_size_of(header, common["hidden_size"] // common["num_attention_heads"]),
    )


def _qwen2_moe(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    return Qwen2MoeConfig(
        **common,
        **_layers(header),
        intermediate_size=number_of(header, "feed_forward_length"),
        moe_intermediate_size=width_of_experts(header),
        shared_expert_intermediate_size=_shared_width(header),
        num_experts=number_of(header, "expert_count"),
        qkv_bias=has_tensor(header, "attn_q.bias"),
    )


def _granite(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    shared = _shared_width(header)
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
    layers, head_dim = _layers(header), head_size_of(header)
    layers["rope_parameters"]["partial_rotary_factor"] = rotated_of(header, head_dim) / head_dim
    own: dict[str, Any] = {"head_dim": head_dim}  # the class does not name it
    return Glm4MoeConfig(
        **common,
        **layers,
        **_with_sigmoid(header),
        **own,
        attention_bias=has_tensor(header, "attn_q.bias"),
        use_qk_norm=has_tensor(header, "attn_q_norm.weight"),
    )


def _deepseek2(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    """DeepSeek V2, or with a bias in the choice of experts V3, whose layers GLM 4.7 Flash has as well.

    A file has the heads' latent form, one head of keys, and in keys that end in _mla what it is expanded to.
    """
    layers, keys = _layers(header), _head_size(header, "key")
    rotated = rotated_of(header, keys)
    rope, log_mscale = layers["rope_parameters"], header.get("{arch}.rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] == "yarn" and log_mscale:
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), 10.0 * log_mscale)  # a file has 0.1 of it
    own: dict[str, Any] = {
        **{**common, "num_key_value_heads": common["num_attention_heads"]},
        **layers,
        **_with_sigmoid(header),
        "kv_lora_rank": number_of(header, "attention.kv_lora_rank"),
        "q_lora_rank": header.get("{arch}.attention.q_lora_rank"),
        "qk_nope_head_dim": keys - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": _head_size(header, "value"),
    }
    _require(header, "attention.temperature_scale", 0)  # of Mistral Large, whose queries grow with the position
    if has_tensor(header, "exp_probs_b.bias"):
        _require(header, "expert_gating_func", _SIGMOID)
        if header.get("{arch}.expert_group_count") is None and own["n_routed_experts"] == _OF_V3:
            own |= {"n_group": 8, "topk_group": 4}
        return DeepseekV3Config(**own)
    _require(header, "expert_gating_func", _SOFTMAX)
    _require(header, "expert_weights_norm", False)
    _require(header, "expert_group_count", 0, 1)  # llama.cpp adds two outputs of a group, where the family takes one
    if own["n_routed_experts"] == _OF_V2:
        raise GGUFError(f"it has {_OF_V2} experts, which DeepSeek V2 chooses by groups; such files are not read")
    return DeepseekV2Config(**own)


def _head_size(header: GGUFHeader, of: str) -> int:
    """Return the channels of a head of keys or values; older files have them without a latent form."""
    older = header.get(f"{{arch}}.attention.{of}_length_mla") is None
    return head_size_of(header, key=f"attention.{of}_length{'' if older else '_mla'}")


def _qwen3_next(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    layers, head_dim = _layers(header), head_size_of(header)
    layers["rope_parameters"]["partial_rotary_factor"] = rotated_of(header, head_dim) / head_dim
    count, values = layers["num_hidden_layers"], number_of(header, "ssm.time_step_rank")
    interval = header.get("{arch}.full_attention_interval") or 4
    recurrent = header.get("{arch}.attention.recurrent_layers") or [(at + 1) % interval > 0 for at in range(count)]
    return Qwen3NextConfig(
        **common,
        **layers,
        head_dim=head_dim,
        layer_types=["linear_attention" if each else "full_attention" for each in recurrent[:count]],
        linear_conv_kernel_dim=number_of(header, "ssm.conv_kernel"),
        linear_key_head_dim=number_of(header, "ssm.state_size"),
        linear_value_head_dim=number_of(header, "ssm.inner_size") // values,
        linear_num_key_heads=number_of(header, "ssm.group_count"),
        linear_num_value_heads=values,
        intermediate_size=header.get("{arch}.feed_forward_length") or 0,
        moe_intermediate_size=number_of(header, "expert_feed_forward_length"),
        shared_expert_intermediate_size=number_of(header, "expert_shared_feed_forward_length"),
        num_experts=number_of(header, "expert_count"),
    )


MIXTURES: dict[str, Callable[[GGUFHeader, dict[str, Any]], PreTrainedConfig]] = {
    "deepseek2": _deepseek2,
    "ernie4_5-moe": _ernie,
    "glm4moe": _glm4_moe,
    "granitemoe": _granite,
    "llama": _mixtral,
    "olmoe": _olmoe,
    "qwen2moe": _qwen2_moe,
    "qwen3next": _qwen3_next,
}
"""By the architecture of a file that has experts."""
