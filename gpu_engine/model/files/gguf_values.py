"""Values of a GGUF file's header that configurations of several families are made from.

Invariant: a number that memory is taken for has a bound. Not responsible for: the configurations (see gguf_configs.py,
gguf_dense.py, gguf_mixtures.py).
"""

from __future__ import annotations

from typing import Any

from gpu_engine.model.files.gguf_header import GGUFError, GGUFHeader

_MOST_CHANNELS = 65536
"""Of a head: the angles of a rotation are computed before any tensor's shape is compared."""


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


def layers_of(header: GGUFHeader) -> int:
    """Return the layers without those that draft, which come last. Raises GGUFError where no other is left."""
    blocks, drafting = number_of(header, "block_count"), header.get("{arch}.nextn_predict_layers") or 0
    if not 0 <= drafting < blocks:
        key = f"{header.architecture}.nextn_predict_layers"
        raise GGUFError(f"its {key} is {drafting!r}, and must be at least 0 and below its block_count, {blocks}")
    return int(blocks - drafting)


def ends_of(header: GGUFHeader) -> list[int]:
    """Return the tokens that end a text, a turn or a message."""
    ends = (header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(end for end in ends if end is not None))


def head_size_of(header: GGUFHeader, otherwise: int | None = None, key: str = "attention.key_length") -> int:
    """Return the channels of a head; `otherwise`: where the file does not say. Raises KeyError or GGUFError."""
    size = header.get(f"{{arch}}.{key}") or otherwise or number_of(header, key)
    if not isinstance(size, int) or not 0 < size <= _MOST_CHANNELS:
        raise GGUFError(f"its {header.architecture}.{key} is {size!r}, and must be from 1 to {_MOST_CHANNELS}")
    return size


def rotated_of(header: GGUFHeader, head_size: int) -> int:
    """Return how many channels of a head rotate. Raises KeyError or GGUFError."""
    count = number_of(header, "rope.dimension_count")
    if not isinstance(count, int) or count % 2 or not 0 < count <= head_size:
        key = f"{header.architecture}.rope.dimension_count"
        raise GGUFError(f"its {key} is {count!r}, and must be an even number up to {head_size}")
    return count


def rotation_of(header: GGUFHeader) -> dict[str, Any]:
    """Return the rotary parameters; factors that are tensors come later (see rope_factors.py). Raises KeyError, or
    GGUFError for a kind of scaling that is not read."""
    kind, factor = (header.get(f"{{arch}}.rope.scaling.{key}") for key in ("type", "factor"))
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": header.get("{arch}.rope.freq_base", 10_000.0)}
    if kind == "none" or (kind in (None, "linear") and factor in (None, 0.0, 1.0)):
        return plain
    if kind in (None, "linear"):
        return {**plain, "rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise GGUFError(f"its {header.architecture}.rope.scaling.type is {kind!r}; none, linear and yarn are read")
    given = {
        "attention_factor": header.get("{arch}.rope.scaling.yarn_attn_factor"),
        "beta_fast": header.get("{arch}.rope.scaling.yarn_beta_fast"),
        "beta_slow": header.get("{arch}.rope.scaling.yarn_beta_slow"),
        "mscale_all_dim": header.get("{arch}.rope.scaling.yarn_log_multiplier") or None,
    }
    return {
        **plain,
        "rope_type": kind,
        "factor": number_of(header, "rope.scaling.factor"),
        "original_max_position_embeddings": number_of(header, "rope.scaling.original_context_length"),
        **({"mscale": 1.0} if given["mscale_all_dim"] else {}),
        **{name: value for name, value in given.items() if value is not None},
    }
