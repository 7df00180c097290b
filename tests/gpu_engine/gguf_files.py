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
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
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
_ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
"""By transformers' name, where a file has another."""

KINDS = ("Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1")
"""Of the matrices, in turn: the last has no product of its own, and is rounded again."""


def write(
    config: PreTrainedConfig,
    file: Path,
    kinds: Iterable[str] = KINDS,
    seed: int = 0,
    *,
    in_part: int = 0,
    also: Mapping[str, npt.NDArray[np.float32]] = {},
) -> Path:
    """Write a model with random weights, whose matrices have the kinds in turn; return the file.

    `in_part`: tensors of a part, 0 for a file without parts, whose first one is returned. `also`: further tensors.
    """
    arch = _ARCHITECTURES.get(config.model_type, config.model_type)
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[arch], config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=in_part)
    _write_keys(writer, config, arch)
    torch.manual_seed(seed)
    net = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    in_turn = list(kinds)
    for at, (name, weight) in enumerate(net.named_parameters()):
        stem, _, suffix = name.rpartition(".")
        drawn = (torch.randn_like(weight) * (1.0 if weight.dim() == 1 else weight.shape[-1] ** -0.5)).numpy()
        parts = {f"{names.get_name(stem)}.{suffix}": drawn}
        if suffix == "gate_up_proj":
            halves = np.ascontiguousarray(np.split(drawn, 2, axis=1))
            parts = {
                f"{names.get_name(f'{stem}.{part}_proj')}.weight": halves[i] for i, part in enumerate(("gate", "up"))
            }
        elif suffix == "down_proj":
            parts = {f"{names.get_name(name)}.weight": drawn}
        for part, given in parts.items():
            values = _converted(part, given, config, arch)
            is_float = values.ndim == 1 or "ffn_gate_inp" in part
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
    if arch == "llama" and heads:
        halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values + 1 if arch.startswith("gemma") and name.endswith("norm.weight") else values


def _write_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig, arch: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(f"tiny {config.model_type}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10_000.0)
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if getattr(config, "sliding_window", None) and arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "num_experts", 0):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    write_vocabulary(writer, tiny.VOCAB)


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
