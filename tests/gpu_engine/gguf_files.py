"""Tiny models of `tiny` as GGUF files, in the order of llama.cpp's converter.

Not responsible for: files of real models, whose kinds of blocks the gguf package cannot write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GraniteConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from tests.fakes import EOS
from tests.gpu_engine import tiny

_SHAPE: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE, head_dim=16),
    "llama tied": lambda: LlamaConfig(**_SHAPE, head_dim=16, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**_SHAPE, head_dim=32, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=128),
    "phi3": lambda: Phi3Config(**_SHAPE),
    "gemma2": lambda: Gemma2Config(**_SHAPE, head_dim=32, sliding_window=tiny.WINDOW),
    "gemma3": lambda: Gemma3TextConfig(**_SHAPE, head_dim=32, sliding_window=tiny.WINDOW),
}
"""Shapes that a GGUF file's keys describe in full."""
_FOUR: dict[str, Any] = {**_SHAPE, "num_hidden_layers": 4}
_WITHOUT_RMS = {name: value for name, value in _FOUR.items() if name != "rms_norm_eps"}
_PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 50_000.0}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 50_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
_GROWING = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
_BY_KIND = {"full_attention": {**_YARN, "attention_factor": 1.5}, "sliding_attention": _PLAIN}
_SCALES = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
DENSE: dict[str, Callable[[], PreTrainedConfig]] = {
    "arcee": lambda: ArceeConfig(**_SHAPE, rope_parameters=_YARN),
    "cohere": lambda: CohereConfig(**_WITHOUT_RMS, logit_scale=0.25, rope_parameters=_PLAIN),
    "cohere with norms of heads": lambda: CohereConfig(
        **_WITHOUT_RMS, use_qk_norm=True, logit_scale=0.25, rope_parameters=_PLAIN
    ),
    "cohere2": lambda: Cohere2Config(
        **_WITHOUT_RMS, sliding_window=tiny.WINDOW, logit_scale=0.25, rope_parameters=_PLAIN
    ),
    "ernie4_5": lambda: Ernie4_5Config(**_SHAPE, head_dim=32, rope_parameters=_PLAIN),
    "exaone4": lambda: Exaone4Config(**_FOUR, sliding_window=tiny.WINDOW, rope_parameters=_PLAIN),
    "exaone4 without windows": lambda: Exaone4Config(
        **_SHAPE, sliding_window=None, layer_types=["full_attention"] * 2, rope_parameters=_PLAIN
    ),
    "gemma": lambda: GemmaConfig(**_SHAPE, head_dim=32, rope_parameters=_PLAIN),
    "glm4": lambda: Glm4Config(**_SHAPE, head_dim=32, rope_parameters={**_PLAIN, "partial_rotary_factor": 0.5}),
    "granite": lambda: GraniteConfig(**_SHAPE, **_SCALES, tie_word_embeddings=True, rope_parameters=_PLAIN),
    "hunyuan-dense": lambda: HunYuanDenseV1Config(**_SHAPE, head_dim=32, rope_parameters=_PLAIN),
    "mistral3": lambda: Ministral3Config(**_SHAPE, head_dim=32, rope_parameters=_GROWING),
    "olmo2": lambda: Olmo2Config(**_SHAPE, rope_parameters=_PLAIN),
    "olmo3": lambda: Olmo3Config(**_FOUR, sliding_window=tiny.WINDOW, rope_parameters=_BY_KIND),
    "seed_oss": lambda: SeedOssConfig(**_SHAPE, head_dim=32, rope_parameters=_PLAIN),
    "smollm3": lambda: SmolLM3Config(**_FOUR, rope_parameters=_PLAIN),
}
"""Families whose GGUF files transformers does not read."""
_ARCHITECTURES = {
    "cohere": "command-r",
    "gemma3_text": "gemma3",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "mistral3",
    "mistral": "llama",
    "olmo3": "olmo2",
    "qwen3_moe": "qwen3moe",
}
"""By transformers' name, where a file has another."""
_INTERLEAVED = ("arcee", "granite", "llama", "mistral3", "smollm3")
_OWN_KEYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "arcee": lambda c: _yarn(c.rope_parameters),
    "cohere": lambda c: {
        "attention.layer_norm_epsilon": c.layer_norm_eps,
        "logit_scale": c.logit_scale,
        "rope.scaling.type": "none",
    },
    "cohere2": lambda c: {
        **_OWN_KEYS["cohere"](c),
        "attention.sliding_window": c.sliding_window,
    },
    "exaone4": lambda c: _windows(c) if c.sliding_window else {},
    "glm4": lambda c: {"rope.dimension_count": int(c.head_dim * c.rope_parameters["partial_rotary_factor"])},
    "granite": lambda c: {
        "embedding_scale": c.embedding_multiplier,
        "residual_scale": c.residual_multiplier,
        "attention.scale": c.attention_multiplier,
        "logit_scale": c.logits_scaling,
    },
    "ministral3": lambda c: {
        **_yarn(c.rope_parameters),
        "rope.scaling.yarn_log_multiplier": c.rope_parameters["mscale_all_dim"],
        "attention.temperature_scale": c.rope_parameters["llama_4_scaling_beta"],
    },
    "olmo3": lambda c: {
        **_windows(c),
        **_yarn(c.rope_parameters["full_attention"]),
        "rope.scaling.yarn_attn_factor": c.rope_parameters["full_attention"]["attention_factor"],
    },
}
"""What a file of one of DENSE says besides the sizes that all have, by transformers' name."""

KINDS = ("Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1")
"""Of the matrices, in turn: the last has no product of its own, and is rounded again."""


def architecture_of(config: PreTrainedConfig) -> str:
    """Return the name that files have for a family."""
    return _ARCHITECTURES.get(config.model_type, config.model_type)


@torch.no_grad()
def drawn(config: PreTrainedConfig, seed: int = 0) -> Any:
    """Return a model with random weights."""
    torch.manual_seed(seed)
    net = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in net.parameters():
        weight.copy_(torch.randn_like(weight) * (1.0 if weight.dim() == 1 else weight.shape[-1] ** -0.5))
    return net.eval()


def write(
    config: PreTrainedConfig,
    file: Path,
    kinds: Iterable[str] = KINDS,
    seed: int = 0,
    *,
    in_part: int = 0,
    also: Mapping[str, npt.NDArray[np.float32]] = {},
    arch: str = "",
    keys: Mapping[str, Any] = {},
) -> Path:
    """Write the model that is `drawn`, whose matrices have the kinds in turn; return the file.

    `in_part`: tensors of a part, 0 for a file without parts, whose first one is returned. `also`: further tensors.
    `arch`: the architecture, if it is not the family's. `keys`: further keys of the header, which come before its own.
    """
    arch = arch or architecture_of(config)
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[arch], config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=in_part)
    _write_keys(writer, config, arch, dict(keys))
    in_turn = list(kinds)
    for at, (name, weight) in enumerate(drawn(config, seed).named_parameters()):
        stem, _, suffix = name.rpartition(".")
        whole = weight.detach().numpy()
        parts = {f"{names.get_name(stem)}.{suffix}": whole}
        if suffix == "gate_up_proj":
            halves = np.ascontiguousarray(np.split(whole, 2, axis=1))
            parts = {
                f"{names.get_name(f'{stem}.{part}_proj')}.weight": halves[i] for i, part in enumerate(("gate", "up"))
            }
        elif suffix == "down_proj":
            parts = {f"{names.get_name(name)}.weight": whole}
        for part, given in parts.items():
            values = _converted(part, given, config, arch)
            is_float = values.ndim == 1 or "ffn_gate_inp" in part or "_norm." in part
            kind = gguf.GGMLQuantizationType["F32" if is_float else in_turn[at % len(in_turn)]]
            writer.add_tensor(part, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in also.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(file.parent.glob(f"{file.stem}-00001-of-*.gguf")) if in_part else file


def _converted(
    name: str, values: npt.NDArray[np.float32], config: PreTrainedConfig, arch: str
) -> npt.NDArray[np.float32]:
    """Return a weight as the converter writes it."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2], 0)
    if arch in _INTERLEAVED and heads:
        halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values + 1 if arch.startswith("gemma") and name.endswith("norm.weight") else values


def _write_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig, arch: str, keys: dict[str, Any]) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotation = getattr(config, "rope_parameters", None) or {}
    own = {**_OWN_KEYS.get(config.model_type, lambda _: {})(config), **keys}
    if config.model_type in {dense().model_type for dense in DENSE.values()}:
        own = {"rope.freq_base": rotation.get("full_attention", rotation)["rope_theta"], **own}
    writer.add_name(f"tiny {config.model_type}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(own.pop("block_count", config.num_hidden_layers))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(own.pop("attention.key_length", head_dim))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(own.pop("rope.dimension_count", head_dim))
    writer.add_rope_freq_base(own.pop("rope.freq_base", 10_000.0))
    if rotation.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if getattr(config, "sliding_window", None) and arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "num_experts", 0):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    write_vocabulary(writer, tiny.VOCAB)
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
        str: writer.add_string,
    }
    for key, value in own.items():
        add[type(value)](key if key.startswith("tokenizer.") else f"{arch}.{key}", value)


def _windows(config: Any) -> dict[str, Any]:
    pattern = [kind == "sliding_attention" for kind in config.layer_types]
    return {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": pattern}


def _yarn(rotation: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rotation["factor"],
        "rope.scaling.original_context_length": rotation["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rotation["beta_fast"],
        "rope.scaling.yarn_beta_slow": rotation["beta_slow"],
    }


def write_vocabulary(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Write a vocabulary of bytes, filled up with padding."""
    letters = [text for text, _ in sorted(_bytes(), key=lambda pair: pair[1])]
    special = ["<|end|>", "<|start|>"]
    padding = [f"[PAD{at}]" for at in range(vocab_size - len(letters) - len(special) - 1)]
    tokens = [*letters, *special, "ab", *padding]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 5 if token in padding else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(EOS)
    writer.add_bos_token_id(EOS + 1)
    writer.add_pad_token_id(0)


def _bytes() -> list[tuple[str, int]]:
    """The byte-level alphabet of GPT-2: a letter for each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [(chr(byte if byte in printable else next(others)), byte) for byte in range(256)]
