"""Configurations of the families whose GGUF files transformers does not describe.

Invariant: what a file does not say, such as the multipliers of Falcon-H1, its converter has put into the weights, or
every model of the family has it. Not responsible for: families that transformers reads (see reading.py), the fields of
families without experts and recurrences (see gguf_dense.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    FalconH1Config,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2MoeConfig,
    NemotronHConfig,
    PreTrainedConfig,
)

from gpu_engine.model.files.architectures import WITH_EXPERTS, has_experts
from gpu_engine.model.files.gguf_dense import DENSE, dense_configuration
from gpu_engine.model.files.gguf_header import GGUFError, GGUFHeader
from gpu_engine.model.files.gguf_keys import has as _has
from gpu_engine.model.files.gguf_keys import number as _number
from gpu_engine.model.files.rope_factors import PROPORTIONAL, rotated_share


def own_configuration(header: GGUFHeader) -> PreTrainedConfig | None:
    """Return the configuration of one of these files; None: transformers makes it. Raises OSError or GGUFError."""
    make = _FAMILIES.get(header.architecture)
    if make is None:
        return None
    if has_experts(header) and header.architecture not in WITH_EXPERTS:
        raise GGUFError(f"it is a mixture of experts of the architecture {header.architecture}, which is not read")
    try:
        return make(header, _common(header))
    except GGUFError:  # says what it is about
        raise
    except (KeyError, TypeError, IndexError, ZeroDivisionError, ValueError) as error:
        raise GGUFError(f"its header does not describe a model of {header.architecture}: {error!r}") from error


def _common(header: GGUFHeader) -> dict[str, Any]:
    """Return what all families have, by transformers' names."""
    vocabulary = header.get("tokenizer.ggml.tokens")
    return {
        "vocab_size": header.get("{arch}.vocab_size")
        or (vocabulary if isinstance(vocabulary, int) else len(vocabulary)),
        "hidden_size": _number(header, "embedding_length"),
        "num_attention_heads": _number(header, "attention.head_count"),
        "num_key_value_heads": max(_kv_heads(header)),
        "max_position_embeddings": _number(header, "context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **{
            f"{name}_token_id": header.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("eos", "eos"), ("bos", "bos"), ("pad", "padding"))
        },
    }


def _kv_heads(header: GGUFHeader) -> list[int]:
    """Return the key heads of each layer: none, if it has no attention."""
    heads = _number(header, "attention.head_count_kv")
    return list(heads) if isinstance(heads, list) else [heads] * _number(header, "block_count")


def _mamba(header: GGUFHeader) -> dict[str, Any]:
    """Return the mixers of Bamba's kind."""
    inner, heads = _number(header, "ssm.inner_size"), _number(header, "ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": _number(header, "ssm.group_count"),
        "mamba_d_state": _number(header, "ssm.state_size"),
        "mamba_d_conv": _number(header, "ssm.conv_kernel"),
        "mamba_conv_bias": _has(header, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(header, "ssm_in.bias"),
    }


def _falcon_h1(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    own: dict[str, Any] = {"head_dim": _number(header, "attention.key_length")}  # the class does not name it
    return FalconH1Config(
        **common,
        **_mamba(header),
        **own,
        num_hidden_layers=_number(header, "block_count"),
        intermediate_size=_number(header, "feed_forward_length"),
        mamba_d_ssm=_number(header, "ssm.inner_size"),
        mamba_rms_norm=_has(header, "ssm_norm.weight"),
        mamba_norm_before_gate=False,
        rms_norm_eps=_number(header, "attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": _number(header, "rope.freq_base")},
    )


def _gemma4(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    """A file has no list of its kinds of layers, but which of them have a sliding window."""
    slides = [bool(each) for each in _number(header, "attention.sliding_window_pattern")]
    kv_heads, width, full = _kv_heads(header), _number(header, "feed_forward_length"), slides.index(False)
    widths = width if isinstance(width, list) else [width]
    by_layer = header.tensors.get("per_layer_token_embd.weight")
    sliding = {"rope_type": "default", "rope_theta": _number(header, "rope.freq_base_swa")}
    own: dict[str, Any] = {  # the class takes these without naming them
        "global_head_dim": _number(header, "attention.key_length"),
        "num_global_key_value_heads": kv_heads[full],
    }
    return Gemma4TextConfig(
        **{**common, "num_key_value_heads": kv_heads[slides.index(True) if any(slides) else full]},
        **own,
        num_hidden_layers=_number(header, "block_count"),
        intermediate_size=min(widths),
        use_double_wide_mlp=max(widths) == 2 * min(widths),
        layer_types=["sliding_attention" if each else "full_attention" for each in slides],
        head_dim=_number(header, "attention.key_length_swa"),
        attention_k_eq_v=f"blk.{full}.attn_v.weight" not in header.tensors,
        num_kv_shared_layers=header.get("{arch}.attention.shared_kv_layers") or 0,
        hidden_size_per_layer_input=header.get("{arch}.embedding_length_per_layer_input") or 0,
        vocab_size_per_layer_input=common["vocab_size"] if by_layer is None else by_layer.shape[0],
        sliding_window=_number(header, "attention.sliding_window"),
        final_logit_softcapping=header.get("{arch}.final_logit_softcapping"),
        rms_norm_eps=_number(header, "attention.layer_norm_rms_epsilon"),
        rope_parameters={
            "sliding_attention": sliding,
            "full_attention": {
                "rope_type": PROPORTIONAL,
                "rope_theta": _number(header, "rope.freq_base"),
                "partial_rotary_factor": rotated_share(header),
            },
        },
    )


def _gpt_oss(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    """A file does not say that its frequencies change between whole numbers of channels, as its model's do."""
    kind = header.get("{arch}.rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _number(header, "rope.freq_base")}
    if kind == "yarn":
        rope |= {
            "rope_type": kind,
            "factor": _number(header, "rope.scaling.factor"),
            "beta_fast": header.get("{arch}.rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": header.get("{arch}.rope.scaling.yarn_beta_slow", 1.0),
            "truncate": False,
            "original_max_position_embeddings": _number(header, "rope.scaling.original_context_length"),
        }
    elif kind != "none":
        raise GGUFError(f"its rotation is scaled by {kind!r}, which no model of gpt-oss has")
    return GptOssConfig(
        **common,
        num_hidden_layers=_number(header, "block_count"),
        intermediate_size=_number(header, "expert_feed_forward_length"),
        head_dim=_number(header, "attention.key_length"),
        num_local_experts=_number(header, "expert_count"),
        num_experts_per_tok=_number(header, "expert_used_count"),
        sliding_window=_number(header, "attention.sliding_window"),
        rms_norm_eps=_number(header, "attention.layer_norm_rms_epsilon"),
        attention_bias=_has(header, "attn_q.bias"),
        rope_parameters=rope,
    )


def _granite(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    if header.get("{arch}.rope.scaling.finetuned"):
        raise GGUFError("it is a hybrid of Bamba's family, whose rotation of a part of each head is not described")
    width, experts = _number(header, "feed_forward_length"), has_experts(header)
    return GraniteMoeHybridConfig(
        **common,
        **_mamba(header),
        num_hidden_layers=_number(header, "block_count"),
        intermediate_size=width,
        shared_intermediate_size=_number(header, "expert_shared_feed_forward_length") if experts else width,
        num_local_experts=_number(header, "expert_count") if experts else 0,
        num_experts_per_tok=_number(header, "expert_used_count") if experts else 0,
        mamba_expand=_number(header, "ssm.inner_size") // common["hidden_size"],
        layer_types=["full_attention" if heads else "linear_attention" for heads in _kv_heads(header)],
        rms_norm_eps=_number(header, "attention.layer_norm_rms_epsilon"),
        embedding_multiplier=_number(header, "embedding_scale"),
        residual_multiplier=_number(header, "residual_scale"),
        attention_multiplier=_number(header, "attention.scale"),
        logits_scaling=_number(header, "logit_scale"),
        position_embedding_type="nope",
    )


def _jamba(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    kv_heads = _kv_heads(header)
    attention = [layer for layer, heads in enumerate(kv_heads) if heads]
    period = attention[1] - attention[0] if len(attention) > 1 else len(kv_heads)
    if attention != list(range(attention[0], len(kv_heads), period)):
        raise GGUFError(f"its layers with attention, {attention}, are not at equal distances")
    return JambaConfig(
        **common,
        num_hidden_layers=_number(header, "block_count"),
        intermediate_size=_number(header, "feed_forward_length"),
        attn_layer_period=period,
        attn_layer_offset=attention[0],
        num_experts=1,
        rms_norm_eps=_number(header, "attention.layer_norm_rms_epsilon"),
        mamba_d_state=_number(header, "ssm.state_size"),
        mamba_d_conv=_number(header, "ssm.conv_kernel"),
        mamba_expand=_number(header, "ssm.inner_size") // common["hidden_size"],
        mamba_dt_rank=_number(header, "ssm.time_step_rank"),
        mamba_conv_bias=_has(header, "ssm_conv1d.bias"),
        mamba_proj_bias=_has(header, "ssm_in.bias"),
    )


def _lfm2_moe(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    return Lfm2MoeConfig(
        **common,
        num_hidden_layers=_number(header, "block_count"),
        intermediate_size=_number(header, "feed_forward_length"),
        moe_intermediate_size=_number(header, "expert_feed_forward_length"),
        num_experts=_number(header, "expert_count"),
        num_experts_per_tok=_number(header, "expert_used_count"),
        num_dense_layers=_number(header, "leading_dense_block_count"),
        use_expert_bias=_has(header, "exp_probs_b.bias"),
        conv_L_cache=_number(header, "shortconv.l_cache"),
        conv_bias=_has(header, "shortconv.conv.bias"),
        layer_types=["full_attention" if heads else "conv" for heads in _kv_heads(header)],
        norm_eps=_number(header, "attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": _number(header, "rope.freq_base")},
    )


def _nemotron_h(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    kinds = {(True, False): "full_attention", (False, True): "mlp", (False, False): "linear_attention"}
    widths, heads = _number(header, "feed_forward_length"), _number(header, "ssm.time_step_rank")
    layers = zip(_kv_heads(header), widths, strict=True)
    return NemotronHConfig(
        **common,
        layers_block_type=[kinds[kv_heads > 0, width > 0] for kv_heads, width in layers],
        intermediate_size=max(widths),
        head_dim=_number(header, "attention.key_length"),
        layer_norm_epsilon=_number(header, "attention.layer_norm_rms_epsilon"),
        ssm_state_size=_number(header, "ssm.state_size"),
        mamba_num_heads=heads,
        mamba_head_dim=_number(header, "ssm.inner_size") // heads,
        n_groups=_number(header, "ssm.group_count"),
        conv_kernel=_number(header, "ssm.conv_kernel"),
        use_conv_bias=_has(header, "ssm_conv1d.bias"),
        use_bias=_has(header, "ssm_in.bias"),
        attention_bias=_has(header, "attn_q.bias"),
        mlp_bias=_has(header, "ffn_up.bias"),
    )


_FAMILIES: dict[str, Callable[[GGUFHeader, dict[str, Any]], PreTrainedConfig]] = {
    "falcon-h1": _falcon_h1,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "granitehybrid": _granite,
    "jamba": _jamba,
    "lfm2moe": _lfm2_moe,
    "nemotron_h": _nemotron_h,
    **dict.fromkeys(DENSE, dense_configuration),
}
