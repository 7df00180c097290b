"""Tiny models with latent attention that runs as one native call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from tests.gpu_engine import tiny

_SIZES: dict[str, Any] = {
    **tiny._LATENT,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 0.707}
_YARN |= {"original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}


def family(name: str, **fields: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: AutoConfig.for_model(name, **(_SIZES | fields))


FAMILIES = {
    "deepseek_v2": family("deepseek_v2", q_lora_rank=None, topk_method="greedy"),
    "deepseek_v2 yarn": family("deepseek_v2", rope_parameters=_YARN),
    "deepseek_v2 groups": family("deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=2),
    "deepseek_v3": family("deepseek_v3", n_group=4, topk_group=2),
    "deepseek_v3 halves": family("deepseek_v3", n_group=1, topk_group=1, rope_interleave=False, rope_parameters=_YARN),
    "glm4_moe_lite": family("glm4_moe_lite", n_group=1, topk_group=1, v_head_dim=64),
    "minicpm3": family("minicpm3", intermediate_size=96),
    "youtu": family("youtu", intermediate_size=96),
}
