"""Configurations of the families whose GGUF files transformers does not describe.

Invariant: what a file does not say, such as the multipliers of Falcon-H1, its converter has put into the weights, or
every model of the family has it. Not responsible for: families that transformers reads (see reading.py), the fields of
families without experts and recurrences (see gguf_dense.py) or without models that have no experts (see
gguf_mixtures.py).
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

from gpu_engine.model.files.architectures import WITH_EXPERTS, has_experts, width_of_experts
from gpu_engine.model.files.gguf_dense import DENSE, dense_configuration
from gpu_engine.model.files.gguf_header import GGUFError, GGUFHeader
from gpu_engine.model.files.gguf_mixtures import MIXTURES, mixture_configuration
from gpu_engine.model.files.gguf_values import (
    common_values,
    has_tensor,
    head_size_of,
    heads_by_layer,
    layers_of,
    number_of,
)
from gpu_engine.model.files.rope_factors import PROPORTIONAL, rotated_share


def own_configuration(header: GGUFHeader) -> PreTrainedConfig | None:
    """Return the configuration of one of these files; None: transformers makes it. Raises OSError or GGUFError."""
    mixtures = dict.fromkeys(MIXTURES, mixture_configuration) if has_experts(header) else {}
    make = (_FAMILIES | mixtures).get(header.architecture)
    if make is None:
        return None
    if has_experts(header) and header.architecture not in WITH_EXPERTS:
        raise GGUFError(f"it is a mixture of experts of the architecture {header.architecture}, which is not read")
    try:
        return make(header, common_values(header))
    except GGUFError:  # says what it is about
        raise
    except (KeyError, TypeError, IndexError, ZeroDivisionError, ValueError) as error:
        raise GGUFError(f"its header does not describe a model of {header.architecture}: {error!r}") from error


def _mamba(header: GGUFHeader) -> dict[str, Any]:
    """Return the mixers of Bamba's kind."""
    inner, heads = number_of(header, "ssm.inner_size"), number_of(header, "ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": number_of(header, "ssm.group_count"),
        "mamba_d_state": number_of(header, "ssm.state_size"),
        "mamba_d_conv": number_of(header, "ssm.conv_kernel"),
        "mamba_conv_bias": has_tensor(header, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_tensor(header, "ssm_in.bias"),
    }


def _falcon_h1(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    own: dict[str, Any] = {"head_dim": head_size_of(header)}  # the class does not name it
    return FalconH1Config(
        **common,
        **_mamba(header),
        **own,
        num_hidden_layers=number_of(header, "block_count"),
        intermediate_size=number_of(header, "feed_forward_length"),
        mamba_d_ssm=number_of(header, "ssm.inner_size"),
        mamba_rms_norm=has_tensor(header, "ssm_norm.weight"),
        mamba_norm_before_gate=False,
        rms_norm_eps=number_of(header, "attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number_of(header, "rope.freq_base")},
    )


def _gemma4(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    """A file has no list of its kinds of layers, but which of them have a sliding window."""
    slides = [bool(each) for each in number_of(header, "attention.sliding_window_pattern")]
    kv_heads, width, full = heads_by_layer(header), number_of(header, "feed_forward_length"), slides.index(False)
    widths = width if isinstance(width, list) else [width]
    by_layer = header.tensors.get("per_layer_token_embd.weight")
    sliding = {"rope_type": "default", "rope_theta": number_of(header, "rope.freq_base_swa")}
    own: dict[str, Any] = {  # the class takes these without naming them
        "global_head_dim": head_size_of(header),
        "num_global_key_value_heads": kv_heads[full],
    }
    if number_of_experts := header.get("{arch}.expert_count"):
        own["enable_moe_block"], own["num_experts"] = True, number_of_experts
        own["top_k_experts"] = number_of(header, "expert_used_count")
        own["moe_intermediate_size"] = width_of_experts(header)
    return Gemma4TextConfig(
        **{**common, "num_key_value_heads": kv_heads[slides.index(True) if any(slides) else full]},
        **own,
        num_hidden_layers=number_of(header, "block_count"),
        intermediate_size=min(widths),
        use_double_wide_mlp=max(widths) == 2 * min(widths),
        layer_types=["sliding_attention" if each else "full_attention" for each in slides],
        head_dim=head_size_of(header, key="attention.key_length_swa"),
        attention_k_eq_v=f"blk.{full}.attn_v.weight" not in header.tensors,
        num_kv_shared_layers=header.get("{arch}.attention.shared_kv_layers") or 0,
        hidden_size_per_layer_input=header.get("{arch}.embedding_length_per_layer_input") or 0,
        vocab_size_per_layer_input=common["vocab_size"] if by_layer is None else by_layer.shape[0],
        sliding_window=number_of(header, "attention.sliding_window"),
        final_logit_softcapping=header.get("{arch}.final_logit_softcapping"),
        rms_norm_eps=number_of(header, "attention.layer_norm_rms_epsilon"),
        rope_parameters={
            "sliding_attention": sliding,
            "full_attention": {
                "rope_type": PROPORTIONAL,
                "rope_theta": number_of(header, "rope.freq_base"),
                "partial_rotary_factor": rotated_share(header),
            },
        },
    )


def _gpt_oss(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    """A file does not say that its frequencies change between whole numbers of channels, as its model's do."""
    kind = header.get("{arch}.rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": number_of(header, "rope.freq_base")}
    if kind == "yarn":
        rope |= {
            "rope_type": kind,
            "factor": number_of(header, "rope.scaling.factor"),
            "beta_fast": header.get("{arch}.rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": header.get("{arch}.rope.scaling.yarn_beta_slow", 1.0),
            "truncate": False,
            "original_max_position_embeddings": number_of(header, "rope.scaling.original_context_length"),
        }
    elif kind != "none":
        raise GGUFError(f"its rotation is scaled by {kind!r}, which no model of gpt-oss has")
    return GptOssConfig(
        **common,
        num_hidden_layers=number_of(header, "block_count"),
        intermediate_size=number_of(header, "expert_feed_forward_length"),
        head_dim=head_size_of(header),
        num_local_experts=number_of(header, "expert_count"),
        num_experts_per_tok=number_of(header, "expert_used_count"),
        sliding_window=number_of(header, "attention.sliding_window"),
        rms_norm_eps=number_of(header, "attention.layer_norm_rms_epsilon"),
        attention_bias=has_tensor(header, "attn_q.bias"),
        rope_parameters=rope,
    )


def _granite(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    if header.get("{arch}.rope.scaling.finetuned"):
        raise GGUFError("it is a hybrid of Bamba's family, whose rotation of a part of each head is not described")
    width, experts = number_of(header, "feed_forward_length"), has_experts(header)
    return GraniteMoeHybridConfig(
        **common,
        **_mamba(header),
        num_hidden_layers=number_of(header, "block_count"),
        intermediate_size=width,
        shared_intermediate_size=number_of(header, "expert_shared_feed_forward_length") if experts else width,
        num_local_experts=number_of(header, "expert_count") if experts else 0,
        num_experts_per_tok=number_of(header, "expert_used_count") if experts else 0,
        mamba_expand=number_of(header, "ssm.inner_size") // common["hidden_size"],
        layer_types=["full_attention" if heads else "linear_attention" for heads in heads_by_layer(header)],
        rms_norm_eps=number_of(header, "attention.layer_norm_rms_epsilon"),
        embedding_multiplier=number_of(header, "embedding_scale"),
        residual_multiplier=number_of(header, "residual_scale"),
        attention_multiplier=number_of(header, "attention.scale"),
        logits_scaling=number_of(header, "logit_scale"),
        position_embedding_type="nope",
    )


def _jamba(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    kv_heads = heads_by_layer(header)
    attention = [layer for layer, heads in enumerate(kv_heads) if heads]
    own: dict[str, Any] = {"num_experts": 1}
    if has_experts(header):
        mixtures = [at for at in range(len(kv_heads)) if f"blk.{at}.ffn_gate_inp.weight" in header.tensors]
        own = {
            "num_experts": number_of(header, "expert_count"),
            "num_experts_per_tok": number_of(header, "expert_used_count"),
            "expert_layer_period": _period(mixtures, len(kv_heads), "experts"),
            "expert_layer_offset": mixtures[0],
        }
    return JambaConfig(
        **common,
        num_hidden_layers=number_of(header, "block_count"),
        intermediate_size=number_of(header, "feed_forward_length"),
        **own,
        attn_layer_period=_period(attention, len(kv_heads), "attention"),
        attn_layer_offset=attention[0],
        rms_norm_eps=number_of(header, "attention.layer_norm_rms_epsilon"),
        mamba_d_state=number_of(header, "ssm.state_size"),
        mamba_d_conv=number_of(header, "ssm.conv_kernel"),
        mamba_expand=number_of(header, "ssm.inner_size") // common["hidden_size"],
        mamba_dt_rank=number_of(header, "ssm.time_step_rank"),
        mamba_conv_bias=has_tensor(header, "ssm_conv1d.bias"),
        mamba_proj_bias=has_tensor(header, "ssm_in.bias"),
    )


def _period(layers: list[int], count: int, of: str) -> int:
    """Return the distance of such layers of a model with `count` layers. Raises GGUFError for several distances."""
    period = layers[1] - layers[0] if len(layers) > 1 else count
    if layers != list(range(layers[0], count, period)):
        raise GGUFError(f"its layers with {of}, {layers}, are not at equal distances")
    return period


def _lfm2_moe(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    return Lfm2MoeConfig(
        **common,
        num_hidden_layers=number_of(header, "block_count"),
        intermediate_size=number_of(header, "feed_forward_length"),
        moe_intermediate_size=number_of(header, "expert_feed_forward_length"),
        num_experts=number_of(header, "expert_count"),
        num_experts_per_tok=number_of(header, "expert_used_count"),
        num_dense_layers=number_of(header, "leading_dense_block_count"),
        use_expert_bias=has_tensor(header, "exp_probs_b.bias"),
        conv_L_cache=number_of(header, "shortconv.l_cache"),
        conv_bias=has_tensor(header, "shortconv.conv.bias"),
        layer_types=["full_attention" if heads else "conv" for heads in heads_by_layer(header)],
        norm_eps=number_of(header, "attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number_of(header, "rope.freq_base")},
    )


def _nemotron_h(header: GGUFHeader, common: dict[str, Any]) -> PreTrainedConfig:
    block = "moe" if has_experts(header) else "mlp"
    kinds = {(True, False): "full_attention", (False, True): block, (False, False): "linear_attention"}
    widths, heads = number_of(header, "feed_forward_length"), number_of(header, "ssm.time_step_rank")
    layers = list(zip(heads_by_layer(header), widths, strict=True))
    return NemotronHConfig(
        **common,
        **(_experts_of_nemotron(header) if has_experts(header) else {}),
        layers_block_type=[kinds[kv_heads > 0, width > 0] for kv_heads, width in layers[: layers_of(header)]],
        intermediate_size=max(widths),
        head_dim=head_size_of(header),
        layer_norm_epsilon=header.get("{arch}.attention.layer_norm_rms_epsilon")
        or number_of(header, "attention.layer_norm_epsilon"),
        ssm_state_size=number_of(header, "ssm.state_size"),
        mamba_num_heads=heads,
        mamba_head_dim=number_of(header, "ssm.inner_size") // heads,
        n_groups=number_of(header, "ssm.group_count"),
        conv_kernel=number_of(header, "ssm.conv_kernel"),
        use_conv_bias=has_tensor(header, "ssm_conv1d.bias"),
        use_bias=has_tensor(header, "ssm_in.bias"),
        attention_bias=has_tensor(header, "attn_q.bias"),
        mlp_bias=has_tensor(header, "ffn_up.bias"),
    )


def _experts_of_nemotron(header: GGUFHeader) -> dict[str, Any]:
    return {
        "n_routed_experts": number_of(header, "expert_count"),
        "num_experts_per_tok": number_of(header, "expert_used_count"),
        "n_shared_experts": number_of(header, "expert_shared_count"),
        "moe_intermediate_size": number_of(header, "expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": number_of(header, "expert_shared_feed_forward_length"),
        "moe_latent_size": header.get("{arch}.moe_latent_size"),
        "routed_scaling_factor": header.get("{arch}.expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(header.get("{arch}.expert_weights_norm")),
        "n_group": header.get("{arch}.expert_group_count") or 1,
        "topk_group": header.get("{arch}.expert_group_used_count") or 1,
    }


_FAMILIES: dict[str, Callable[[GGUFHeader, dict[str, Any]], PreTrainedConfig]] = {
    "falcon-h1": _falcon_h1,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "granitehybrid": _granite,
    "jamba": _jamba,
    "lfm2moe": _lfm2_moe,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    **dict.fromkeys(DENSE, dense_configuration),
}
