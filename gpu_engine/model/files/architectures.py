"""The families whose GGUF files are read tensor by tensor, and what the converter of their files did to the weights.

A model of another family is loaded through transformers, which holds every tensor in full. Not responsible for: the
names of the tensors, which are the gguf library's table (see gguf_weights.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the converter of a family has done to its weights."""

    interleaved: bool = False
    """The rows of a head of queries or keys alternate between the halves that rotate together."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""


ARCHITECTURES = {
    "gemma2": Architecture(norm_offset=1.0),
    "gemma3": Architecture(norm_offset=1.0),
    "llama": Architecture(interleaved=True),
    "phi3": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
}
"""The architectures that are read here, by their names in a file. Mistral's is llama."""
