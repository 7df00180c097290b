"""Tiny hybrid models as GGUF files, with what llama.cpp's converter does to their weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from tests.gpu_engine.gguf_files import write_vocabulary

_Array = npt.NDArray[np.float32]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.embeddings": "token_embd",
    "model.embedding_norm": "token_embd_norm",
    "model.norm": "output_norm",
    "model.norm_f": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "norm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "q_layernorm": "attn_q_norm",
    "k_layernorm": "attn_k_norm",
    "q_a_proj": "attn_q_a",
    "q_a_layernorm": "attn_q_a_norm",
    "q_b_proj": "attn_q_b",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "kv_a_layernorm": "attn_kv_a_norm",
    "kv_b_proj": "attn_kv_b",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "shared_mlp.output_linear": "ffn_down",
    "w1": "ffn_gate",
    "w3": "ffn_up",
    "w2": "ffn_down",
    "ffn_norm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "post_attention_layernorm": "ffn_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "conv1d": "ssm_conv1d",
    "in_proj": "ssm_in",
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_ba": "ssm_ba",
    "in_proj_a": "ssm_alpha",
    "in_proj_b": "ssm_beta",
    "x_proj": "ssm_x",
    "dt_proj": "ssm_dt",
    "dt_layernorm": "ssm_dt_norm",
    "b_layernorm": "ssm_b_norm",
    "c_layernorm": "ssm_c_norm",
    "mamba.norm": "ssm_norm",
    "linear_attn.norm": "ssm_norm",
    "out_proj": "ssm_out",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "mlp.gate": "ffn_gate_inp",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.router": "ffn_gate_inp",
    "mixer.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "expert_bias": "exp_probs_b.bias",
    "e_score_correction_bias": "exp_probs_b.bias",
    "shared_expert_gate": "ffn_gate_inp_shexp",
    "shared_expert.gate_proj": "ffn_gate_shexp",
    "shared_expert.up_proj": "ffn_up_shexp",
    "shared_expert.down_proj": "ffn_down_shexp",
    "shared_experts.gate_proj": "ffn_gate_shexp",
    "shared_experts.up_proj": "ffn_up_shexp",
    "shared_experts.down_proj": "ffn_down_shexp",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.up_proj": "ffn_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
"""Ends of transformers' names, the longer one first where two fit, and the names in a file."""
BIASES = ("expert_bias", "e_score_correction_bias")
"""Ends of the names of biases in the choice of experts."""
FAMILIES: dict[str, str] = {
    "falcon-h1": "falcon_h1 plain",
    "granitehybrid": "granite dense",
    "jamba": "jamba dense",
    "lfm2": "lfm2",
    "nemotron_h": "nemotron_h dense",
    "qwen35": "qwen3_5",
}
WITH_EXPERTS = {
    "granitehybrid": "granite",
    "jamba": "jamba",
    "lfm2moe": "lfm2 moe",
    "nemotron_h_moe": "nemotron_h moe",
    "qwen35moe": "qwen3_5 moe",
    "qwen3next": "qwen3_next",
}
KEYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "falcon-h1": lambda c: {
        "attention.key_length": c.head_dim,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count_kv": c.num_key_value_heads,
        **_mamba_2(c.mamba_d_conv, c.mamba_d_state, c.mamba_n_groups, c.mamba_n_heads, c.mamba_d_head),
    },
    "granitehybrid": lambda c: {
        "feed_forward_length": c.intermediate_size if c.num_local_experts else c.shared_intermediate_size,
        **(_experts(c, c.num_local_experts, shared=c.shared_intermediate_size) if c.num_local_experts else {}),
        "attention.head_count_kv": _kv_heads(c),
        "embedding_scale": c.embedding_multiplier,
        "residual_scale": c.residual_multiplier,
        "attention.scale": c.attention_multiplier,
        "logit_scale": c.logits_scaling,
        "rope.scaling.finetuned": False,
        **_mamba_2(c.mamba_d_conv, c.mamba_d_state, c.mamba_n_groups, c.mamba_n_heads, c.mamba_d_head),
    },
    "jamba": lambda c: {
        **_experts(c, c.num_experts),
        "feed_forward_length": c.intermediate_size,
        "attention.head_count_kv": _kv_heads(c),
        "ssm.conv_kernel": c.mamba_d_conv,
        "ssm.inner_size": c.mamba_expand * c.hidden_size,
        "ssm.state_size": c.mamba_d_state,
        "ssm.time_step_rank": c.mamba_dt_rank,
    },
    "lfm2": lambda c: {
        "feed_forward_length": c.intermediate_size,
        "attention.head_count_kv": _kv_heads(c),
        "shortconv.l_cache": c.conv_L_cache,
    },
    "lfm2moe": lambda c: {
        **KEYS["lfm2"](c),
        **_experts(c, c.num_experts, c.moe_intermediate_size),
        "leading_dense_block_count": c.num_dense_layers,
    },
    "nemotron_h": lambda c: {
        "attention.key_length": c.head_dim,
        "feed_forward_length": [c.intermediate_size if kind == "mlp" else 0 for kind in c.layers_block_type],
        "attention.head_count_kv": _kv_heads(c),
        **_mamba_2(c.conv_kernel, c.ssm_state_size, c.n_groups, c.mamba_num_heads, c.mamba_head_dim),
    },
    "nemotron_h_moe": lambda c: {
        "attention.key_length": c.head_dim,
        "feed_forward_length": [c.moe_intermediate_size if kind == "moe" else 0 for kind in c.layers_block_type],
        "attention.head_count_kv": _kv_heads(c),
        **_mamba_2(c.conv_kernel, c.ssm_state_size, c.n_groups, c.mamba_num_heads, c.mamba_head_dim),
        **_experts(c, c.n_routed_experts, c.moe_intermediate_size, c.moe_shared_expert_intermediate_size),
        "expert_shared_count": c.n_shared_experts,
        "expert_weights_norm": c.norm_topk_prob,
        "expert_weights_scale": float(c.routed_scaling_factor),
        "expert_group_count": c.n_group,
        "attention.layer_norm_rms_epsilon": None,
        "attention.layer_norm_epsilon": float(c.layer_norm_epsilon),
    },
    "qwen35": lambda c: {
        "block_count": c.num_hidden_layers + 1,
        "nextn_predict_layers": 1,
        "attention.key_length": c.head_dim,
        **({"feed_forward_length": c.intermediate_size} if hasattr(c, "intermediate_size") else {}),
        "attention.head_count_kv": c.num_key_value_heads,
        "full_attention_interval": 3,
        "rope.dimension_count": c.head_dim // 4,
        "rope.dimension_sections": [11, 11, 10, 0],
        **_mamba_2(
            c.linear_conv_kernel_dim,
            c.linear_key_head_dim,
            c.linear_num_key_heads,
            c.linear_num_value_heads,
            c.linear_value_head_dim,
        ),
    },
    "qwen3next": lambda c: {
        **KEYS["qwen35moe"](c),
        "attention.recurrent_layers": [kind == "linear_attention" for kind in [*c.layer_types, "mtp"]],
        "rope.dimension_sections": None,
    },
    "qwen35moe": lambda c: {
        **KEYS["qwen35"](c),
        **_experts(c, c.num_experts, c.moe_intermediate_size, c.shared_expert_intermediate_size),
    },
}
"""What a file says besides the sizes that all have."""


def _experts(config: Any, count: int, width: int = 0, shared: int = 0) -> dict[str, Any]:
    sizes = {"expert_feed_forward_length": width, "expert_shared_feed_forward_length": shared}
    chosen = {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
    return {name: size for name, size in (sizes | chosen).items() if size}


def _mamba_2(taps: int, keys: int, groups: int, heads: int, values: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": taps,
        "ssm.state_size": keys,
        "ssm.group_count": groups,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * values,
    }


def _kv_heads(config: Any) -> list[int]:
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]


def _tiled(values: _Array, config: Any, width: int, axis: int = 0) -> _Array:
    """Return the value heads in the order of a file."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    shape = values.shape
    split = values.reshape(*shape[:axis], keys, heads // keys, width, *shape[axis + 1 :])
    return np.ascontiguousarray(np.swapaxes(split, axis, axis + 1)).reshape(shape)


def _converted(name: str, values: _Array, config: Any, arch: str) -> list[tuple[str, _Array]]:
    """Return the tensors of a parameter, as the converter writes them."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, suffix = name, ""
    found = re.match(r"model\.layers\.(\d+)\.(.*)", stem)
    part = found[2] if found else stem
    file_name = _file_name(part, arch)
    conv = values.ndim == 3 and "conv" in part
    values = _changed(values[:, 0] if conv else values, file_name, config, arch)
    where = f"blk.{found[1]}." if found else ""
    ending = f".{suffix}" if suffix and (arch, file_name) != ("falcon-h1", "ffn_norm") else ""
    shared = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    if part.endswith("in_proj_qkvz"):
        qkv, gate = _by_part(values, config)
        return [(f"{where}attn_qkv{ending}", qkv), (f"{where}attn_gate{ending}", gate)]
    if part == "shared_mlp.input_linear":
        gate, up = np.split(values, 2)
        return [(f"{where}ffn_gate{shared}{ending}", gate), (f"{where}ffn_up{shared}{ending}", up)]
    if part == "shared_mlp.output_linear":
        return [(f"{where}ffn_down{shared}{ending}", values)]
    if part.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        return [(f"{where}ffn_gate_exps.weight", gate), (f"{where}ffn_up_exps.weight", up)]
    return [(f"{where}{file_name}{ending}", values)]


def _file_name(part: str, arch: str) -> str:
    if part == "mixer.norm":
        return "ssm_norm"
    if arch.startswith(("glm4moe", "qwen35", "qwen3next")) and part == "post_attention_layernorm":
        return "post_attention_norm"
    ends = [end for end in NAMES if part == end or part.endswith(f".{end}")]
    return NAMES[max(ends, key=len)] if ends else part


def _changed(values: _Array, file_name: str, config: Any, arch: str) -> _Array:
    if file_name == "ssm_a":
        values = -np.exp(values)
    if arch.startswith("qwen35"):
        return _of_qwen(values, file_name, config)
    if arch == "qwen3next":
        return values + 1 if file_name.endswith("norm") and file_name != "ssm_norm" else values
    if arch in ("falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe"):
        if file_name in ("ssm_a", "ssm_d"):
            return values[:, None]
        if file_name == "ssm_norm":
            return values.reshape(2, -1)
    if arch in ("granitehybrid", "granitemoe", "llama") and file_name in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if file_name == "attn_q" else config.num_key_value_heads
        halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values


def _of_qwen(values: _Array, file_name: str, config: Any) -> _Array:
    width, first = config.linear_value_head_dim, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if file_name in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt.bias"):
        return _tiled(values, config, 1)
    if file_name == "attn_gate":
        return _tiled(values, config, width)
    if file_name in ("attn_qkv", "ssm_conv1d"):
        return np.concatenate([values[:first], _tiled(values[first:], config, width)])
    if file_name == "ssm_out":
        return _tiled(values, config, width, axis=1)
    if file_name == "ffn_gate_inp_shexp":
        return values[0]
    return values + 1 if file_name.endswith("norm") and file_name != "ssm_norm" else values


def _by_part(values: _Array, config: Any) -> tuple[_Array, _Array]:
    """Return the rows of queries, keys and values, and those of gates, of a product that has them by key heads."""
    heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
    each = config.linear_num_value_heads // heads * config.linear_value_head_dim
    by_head = values.reshape(heads, -1, values.shape[-1])
    parts = np.split(by_head, [keys, 2 * keys, 2 * keys + each], axis=1)
    *others, gate = (part.reshape(-1, values.shape[-1]) for part in parts)
    return np.concatenate(others), gate


def _by_head(name: str, values: _Array, config: Any) -> list[tuple[str, _Array]]:
    """Return the expansion of latent attention as two tensors: of keys, transposed, and of values."""
    heads = values.reshape(config.num_attention_heads, -1, values.shape[-1])
    keys, rest = np.split(heads, [config.qk_nope_head_dim], axis=1)
    return [(name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)), (name.replace("kv_b", "v_b"), rest)]


def _expert_biases(net: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in net.named_buffers() if name.endswith(BIASES)]


def write(
    net: Any,
    arch: str,
    file: Path,
    kind: str = "F32",
    keys: Mapping[str, Any] | None = None,
    *,
    changed: Callable[[list[tuple[str, _Array]]], list[tuple[str, _Array]]] = lambda tensors: tensors,
) -> Path:
    """Write a model as a GGUF file whose matrices are of a kind.

    `keys`: in place of those of its family. `changed`: returns what the file has in place of a parameter's tensors.
    """
    config, writer = net.config, gguf.GGUFWriter(file, arch)
    common = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": float(
            getattr(config, "rms_norm_eps", None) or getattr(config, "norm_eps", None) or config.layer_norm_epsilon
        ),
        "rope.freq_base": float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)),
    }
    all_keys = {**common, **(KEYS[arch](config) if keys is None else keys)}
    given = {key: value for key, value in all_keys.items() if value is not None}
    for key, value in given.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[str] = writer.add_string
        add[type(value)](key if key.startswith("tokenizer.") else f"{arch}.{key}", value)  # type: ignore[operator]
    write_vocabulary(writer, config.vocab_size)
    for name, parameter in (*net.named_parameters(), *_expert_biases(net)):
        converted = _converted(name, parameter.detach().float().numpy(), config, arch)
        if "attention.key_length_mla" in given and name.endswith("kv_b_proj.weight"):
            converted = _by_head(*converted[0], config)
        for file_name, values in changed(converted):
            plain = values.ndim < 2 or "conv" in file_name.split(".")[-2] or values.shape[-1] % 32
            of_kind = gguf.GGMLQuantizationType["F32" if plain else kind]
            writer.add_tensor(file_name, gguf.quants.quantize(np.ascontiguousarray(values), of_kind), raw_dtype=of_kind)
    writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
