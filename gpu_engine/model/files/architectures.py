"""The families whose GGUF files are read tensor by tensor, and what the converter of their files did to the weights.

A model of another family is loaded through transformers, which holds every tensor in full. Not responsible for: the
names of the tensors, which are the gguf library's table (see gguf_weights.py), configurations (see gguf_configs.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the converter of a family has done to its weights."""

    interleaved: bool = False
    """The rows of a head of queries or keys alternate between the halves that rotate together."""
    norm_offset: float = 0.0
    """Added to the weights of norms, except for those next to a recurrence's gate (`ssm_norm`)."""
    tiled_values: bool = False
    """The value heads of a delta net are in the order (value of a key head, key head), and not the other way round."""
    by_expert: bool = False
    """The model is a mixture of experts, of which each expert is read by itself: by one process, on a CPU."""
    flat: tuple[str, ...] = ()
    """Tensors with a further dimension, which their parameters lack."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Parts of a parameter's name, in place of which the library's table has others."""
    joined: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Parts of a parameter's name, whose rows are those of two tensors."""


_MAMBA_2 = ("ssm_a", "ssm_d", "ssm_norm")

ARCHITECTURES = {
    "falcon-h1": Architecture(flat=_MAMBA_2),
    "gemma2": Architecture(norm_offset=1.0),
    "gemma3": Architecture(norm_offset=1.0),
    "gemma4": Architecture(renamed={".layer_scalar": ".layer_scalar.weight"}),
    "gpt-oss": Architecture(by_expert=True, renamed={".self_attn.sinks": ".self_attn.sinks.weight"}),
    "granitehybrid": Architecture(
        interleaved=True,
        flat=_MAMBA_2,
        renamed={".shared_mlp.output_linear": ".mlp.down_proj"},
        joined={".shared_mlp.input_linear": (".mlp.gate_proj", ".mlp.up_proj")},
    ),
    "jamba": Architecture(),
    "lfm2": Architecture(),
    "llama": Architecture(interleaved=True),
    "nemotron_h": Architecture(flat=_MAMBA_2, renamed={"model.": "backbone."}),
    "phi3": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "qwen3moe": Architecture(by_expert=True),
    "qwen35": Architecture(norm_offset=1.0, tiled_values=True),
}
"""The architectures that are read here, by their names in a file. Mistral's is llama."""
