"""Values of a GGUF file's header that configurations of several families are made from.

Not responsible for: the configurations (see gguf_configs.py, gguf_mixtures.py).
"""

from __future__ import annotations

from typing import Any

from gpu_engine.model.files.gguf_header import GGUFHeader


def number_of(header: GGUFHeader, key: str) -> Any:
    """Return the value of a key of the architecture. Raises KeyError where the file has none."""
    value = header.get(f"{{arch}}.{key}")
    if value is None:
        raise KeyError(f"{header.architecture}.{key}")
    return value


def common_values(header: GGUFHeader) -> dict[str, Any]:
    """Return what all families have, by transformers' names."""
    vocabulary = header.get("tokenizer.ggml.tokens")
    return {
        "vocab_size": header.get("{arch}.vocab_size")
        or (vocabulary if isinstance(vocabulary, int) else len(vocabulary)),
        "hidden_size": number_of(header, "embedding_length"),
        "num_attention_heads": number_of(header, "attention.head_count"),
        "num_key_value_heads": max(heads_by_layer(header)),
        "max_position_embeddings": number_of(header, "context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **{
            f"{name}_token_id": header.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("eos", "eos"), ("bos", "bos"), ("pad", "padding"))
        },
    }


def heads_by_layer(header: GGUFHeader) -> list[int]:
    """Return the key heads of each layer: none, if it has no attention."""
    heads = number_of(header, "attention.head_count_kv")
    return list(heads) if isinstance(heads, list) else [heads] * number_of(header, "block_count")


def has_tensor(header: GGUFHeader, end: str) -> bool:
    """Return whether the file has a tensor whose name ends so."""
    return any(name.endswith(end) for name in header.tensors)
