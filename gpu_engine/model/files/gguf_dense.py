"""Configurations of families without experts and recurrences whose GGUF files transformers does not describe.

Invariant: what a file does not say, every model of the family has. Not responsible for: Gemma 4, hybrids and families
with experts (see gguf_configs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    Ernie4_5Config,
    Exaone4Config,
    GemmaConfig,
    Glm4Config,
    GraniteConfig,
    HunYuanDenseV1Config,
    Ministral3Config,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

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

_EPSILONS = dict.fromkeys(("cohere2", "command-r"), ("layer_norm_eps", "attention.layer_norm_epsilon"))
_RMS_EPSILON = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
_PERIOD = 4
"""Every fourth layer has no sliding window, where a file does not say which have one."""


def dense_configuration(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration of a file of one of DENSE. `common`: what all families have, by transformers' names.
    Raises KeyError, TypeError, ValueError or GGUFError."""
    epsilon, key = _EPSILONS.get(header.architecture, _RMS_EPSILON)
    heads = common["num_attention_heads"]
    fields = {
        **common,
        "num_hidden_layers": layers_of(header),
        "intermediate_size": number_of(header, "feed_forward_length"),
        "head_dim": head_size_of(header, common["hidden_size"] // heads),
        epsilon: number_of(header, key),
        "rope_parameters": rotation_of(header),
        "eos_token_id": ends_of(header),
    }
    return DENSE[header.architecture](header, fields)


def _kinds_of_layers(header: GGUFHeader) -> list[str]:
    """Return which layers have a sliding window, by transformers' names."""
    pattern, count = header.get("{arch}.attention.sliding_window_pattern", _PERIOD), layers_of(header)
    if not isinstance(pattern, list):
        pattern = [(layer + 1) % pattern != 0 for layer in range(count)]
    return ["sliding_attention" if slides else "full_attention" for slides in pattern[:count]]


def _arcee(header: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    return ArceeConfig(
        **fields, attention_bias=has_tensor(header, "attn_q.bias"), mlp_bias=has_tensor(header, "ffn_up.bias")
    )


def _cohere(header: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    return CohereConfig(
        **fields, use_qk_norm=has_tensor(header, "attn_q_norm.weight"), logit_scale=number_of(header, "logit_scale")
    )


def _cohere2(header: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    rotated = header.get("{arch}.rope.dimension_count", fields["head_dim"])
    if rotated != fields["head_dim"]:
        raise GGUFError(f"{rotated} of {fields['head_dim']} channels of a head rotate, and in its family all do")
    return Cohere2Config(
        **fields,
        sliding_window=number_of(header, "attention.sliding_window"),
        layer_types=_kinds_of_layers(header),
        logit_scale=number_of(header, "logit_scale"),
    )


def _ernie(header: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    return Ernie4_5Config(**fields, use_bias=has_tensor(header, "attn_q.bias"))


def _exaone4(header: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    """Where layers have sliding windows, the others have no rotation."""
    window = header.get("{arch}.attention.sliding_window") or None
    kinds = _kinds_of_layers(header) if window else ["full_attention"] * fields["num_hidden_layers"]
    return Exaone4Config(**fields, sliding_window=window, layer_types=kinds)


def _gemma(_: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    return GemmaConfig(**fields)


def _glm4(header: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    if header.get("{arch}.rope.dimension_sections"):
        raise GGUFError("its rotation has sections, as in a model of images, which is not described")
    rotated = rotated_of(header, fields["head_dim"]) / fields["head_dim"]
    return Glm4Config(
        **{**fields, "rope_parameters": {**fields["rope_parameters"], "partial_rotary_factor": rotated}},
        attention_bias=has_tensor(header, "attn_q.bias"),
    )


def _granite(header: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    if header.get("{arch}.rope.scaling.finetuned") is False:
        raise GGUFError("it is a Granite without rotation, which is not described")
    return GraniteConfig(
        **fields,
        attention_bias=has_tensor(header, "attn_q.bias"),
        mlp_bias=has_tensor(header, "ffn_up.bias"),
        embedding_multiplier=header.get("{arch}.embedding_scale") or 1.0,
        residual_multiplier=header.get("{arch}.residual_scale") or 1.0,
        attention_multiplier=header.get("{arch}.attention.scale") or fields["head_dim"] ** -0.5,
        logits_scaling=number_of(header, "logit_scale"),
    )


def _hunyuan(header: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    """The base of a file's rotation has its scale already."""
    return HunYuanDenseV1Config(**fields, attention_bias=has_tensor(header, "attn_q.bias"))


def _mistral3(header: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    """Ministral's queries grow with their position, and those of the models before it do not."""
    growth = header.get("{arch}.attention.temperature_scale")
    if not growth:
        return MistralConfig(**fields, sliding_window=None)
    if fields["rope_parameters"]["rope_type"] != "yarn":
        raise GGUFError("its queries grow with their position, and its rotation is not scaled by 'yarn'")
    fields["rope_parameters"]["llama_4_scaling_beta"] = growth
    return Ministral3Config(**fields)


def _olmo(header: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    """OLMo 3 is OLMo 2 with sliding windows, and scales only the rotation of the layers without one."""
    window = header.get("{arch}.attention.sliding_window")
    if not window:
        return Olmo2Config(**fields, attention_bias=has_tensor(header, "attn_q.bias"))
    theta = header.get("{arch}.rope.freq_base_swa", fields["rope_parameters"]["rope_theta"])
    rotations = {
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        "full_attention": fields["rope_parameters"],
    }
    return Olmo3Config(
        **{**fields, "rope_parameters": rotations},
        attention_bias=has_tensor(header, "attn_q.bias"),
        sliding_window=window,
        layer_types=_kinds_of_layers(header),
    )


def _qwen2_vl(_: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    """Without images it is Qwen 2: the positions of text are equal in time, height and width."""
    return Qwen2Config(**fields)


def _qwen3_vl(header: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    """Without images it is Qwen 3."""
    return Qwen3Config(**fields, attention_bias=has_tensor(header, "attn_q.bias"))


def _seed_oss(header: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    return SeedOssConfig(
        **fields,
        attention_bias=has_tensor(header, "attn_q.bias"),
        attention_out_bias=has_tensor(header, "attn_output.bias"),
        mlp_bias=has_tensor(header, "ffn_up.bias"),
    )


def _smollm3(header: GGUFHeader, fields: dict[str, Any]) -> PreTrainedConfig:
    """Every fourth layer has no rotation."""
    return SmolLM3Config(
        **fields, attention_bias=has_tensor(header, "attn_q.bias"), mlp_bias=has_tensor(header, "ffn_up.bias")
    )


DENSE: dict[str, Callable[[GGUFHeader, dict[str, Any]], PreTrainedConfig]] = {
    "arcee": _arcee,
    "cohere2": _cohere2,
    "command-r": _cohere,
    "ernie4_5": _ernie,
    "exaone4": _exaone4,
    "gemma": _gemma,
    "glm4": _glm4,
    "granite": _granite,
    "hunyuan-dense": _hunyuan,
    "mistral3": _mistral3,
    "olmo2": _olmo,
    "qwen2vl": _qwen2_vl,
    "qwen3vl": _qwen3_vl,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
}
"""By the name of an architecture: makes the configuration of a file, given the fields that all of them have."""
