"""The factors of rotary frequencies that some GGUF files have as tensors: Llama 3.1's and later, Phi 3's and Gemma 4's.

transformers reads them from no such file. Gemma 4's say which channels of a head rotate. The others become rotary
parameters of the type `longrope`, which divides the frequencies by given factors: one list for long sequences and one
for short ones, or twice the same.
Invariant: a configuration with another type of rotation than the default stays as it is.
Not responsible for: the tables that are made from the parameters (see rotary.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from gpu_engine.model.files.pieces import FileBytes

if TYPE_CHECKING:
    from gpu_engine.model.files.gguf_header import GGUFHeader

_ALL, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_TYPE = "longrope"
PROPORTIONAL = "proportional"
"""A type that rotates only the channels with the highest frequencies."""
_STILL = 1e20
"""A factor so large that no position turns the channels."""


def apply_rope_factors(config: PreTrainedConfig, header: GGUFHeader) -> None:
    """Write the factors of a file, if it has some, into its configuration. Raises OSError, and ValueError for factors
    that do not fit."""
    parameters: Any = getattr(config, "rope_parameters", None)
    names = [name for name in (_ALL, _LONG, _SHORT) if name in header.tensors]
    if not names or not isinstance(parameters, dict) or parameters.get("rope_type") != "default":
        return
    factors = {name: factors_of(header, name) for name in names}
    long, short = (factors.get(name) or factors.get(_ALL) for name in (_LONG, _SHORT))
    if long is None or short is None:
        raise ValueError(f"it has {names[0]} without the factors of other lengths")
    text: Any = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
    if {len(long), len(short)} != {rotated}:
        raise ValueError(f"{names[0]} has {len(long)} factors, and {rotated} frequencies rotate")
    original = header.get("{arch}.rope.scaling.original_context_length", text.max_position_embeddings)
    if not isinstance(original, int) or original < 1:
        raise ValueError(f"rope.scaling.original_context_length is {original!r}, and must be a positive integer")
    scale = header.get("{arch}.rope.scaling.attn_factor", 1.0 if _ALL in factors else None)
    if hasattr(text, "original_max_position_embeddings"):  # Phi 3's, which comes before the parameters' own
        text.original_max_position_embeddings = original
    config.rope_parameters = {
        **parameters,
        "rope_type": _TYPE,
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": original,
        "factor": text.max_position_embeddings / original,
        "attention_factor": None if scale is None else float(scale),
    }


def rope_tensors(config: Any) -> frozenset[str]:
    """Return the names of the tensors of a file whose factors are in its configuration."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (parameters, parameters.get("full_attention")) if isinstance(each, dict)}
    if _TYPE in kinds:
        return frozenset({_ALL, _LONG, _SHORT})
    return frozenset({_ALL} if PROPORTIONAL in kinds else ())


def rotated_share(header: GGUFHeader) -> float:
    """Return the share of a head's channels that rotate: a file has the factor 1 for their frequencies, and a huge one
    for the others. Raises OSError, and ValueError for other factors."""
    if _ALL not in header.tensors:
        return 1.0
    factors = factors_of(header, _ALL)
    if any(factor != 1.0 and factor < _STILL for factor in factors):
        raise ValueError(f"{_ALL} has a factor that is neither 1 nor at least {_STILL:g}")
    return factors.count(1.0) / len(factors)


def factors_of(header: GGUFHeader, name: str) -> list[float]:
    """Return the factors of a file's tensor. Raises OSError."""
    from gguf.quants import dequantize

    tensor = header.tensors[name]
    file = FileBytes(tensor.file)
    try:
        raw = file.read(tensor.start, tensor.num_bytes)
    finally:
        file.close()
    return [float(value) for value in dequantize(raw[None], tensor.kind).reshape(-1)]
