"""The families whose GGUF files are read tensor by tensor, and what the converter of their files did to the weights.

A model of another family is loaded through transformers, which holds every tensor in full. Not responsible for: the
names of the tensors, which are the gguf library's table (see gguf_weights.py), configurations (see gguf_configs.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the library of GGUF files is loaded for one
    from gpu_engine.model.files.gguf_header import GGUFHeader


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the converter of a family has done to its weights."""

    interleaved: bool = False
    """The rows of a head of queries or keys alternate between the halves that rotate together."""
    norm_offset: float = 0.0
    """Added to the weights of norms, except for those next to a recurrence's gate (`ssm_norm`)."""
    tiled_values: bool = False
    """The value heads of a delta net are in the order (value of a key head, key head), and not the other way round."""
    flat: tuple[str, ...] = ()
    """Tensors with a further dimension, which their parameters lack."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Parts of a parameter's name, in place of which the library's table has others."""
    joined: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Parts of a parameter's name, whose rows are those of two tensors."""


_MAMBA_2 = ("ssm_a", "ssm_d", "ssm_norm")

ARCHITECTURES = {
    "arcee": Architecture(interleaved=True),
    "cohere2": Architecture(),
    "command-r": Architecture(),
    "ernie4_5": Architecture(),
    "exaone4": Architecture(),
    "falcon-h1": Architecture(flat=_MAMBA_2),
    "gemma": Architecture(norm_offset=1.0),
    "gemma2": Architecture(norm_offset=1.0),
    "gemma3": Architecture(norm_offset=1.0),
    "gemma4": Architecture(renamed={".layer_scalar": ".layer_scalar.weight"}),
    "glm4": Architecture(),
    "granite": Architecture(interleaved=True),
    "granitehybrid": Architecture(
        interleaved=True,
        flat=_MAMBA_2,
        renamed={".shared_mlp.output_linear": ".mlp.down_proj"},
        joined={".shared_mlp.input_linear": (".mlp.gate_proj", ".mlp.up_proj")},
    ),
    "hunyuan-dense": Architecture(),
    "jamba": Architecture(),
    "lfm2": Architecture(),
    "llama": Architecture(interleaved=True),
    "mistral3": Architecture(interleaved=True),
    "nemotron_h": Architecture(flat=_MAMBA_2, renamed={"model.": "backbone."}),
    "olmo2": Architecture(),
    "phi3": Architecture(),
    "qwen2": Architecture(),
    "qwen2vl": Architecture(),
    "qwen3": Architecture(),
    "qwen35": Architecture(norm_offset=1.0, tiled_values=True),
    "qwen3vl": Architecture(),
    "seed_oss": Architecture(),
    "smollm3": Architecture(interleaved=True),
}
"""The architectures of files without experts that are read here, by their names in a file. Mistral's is llama."""
WITH_EXPERTS = {
    "gpt-oss": Architecture(renamed={".sinks": ".sinks.weight"}),
    "granitehybrid": replace(
        ARCHITECTURES["granitehybrid"],
        renamed={".block_sparse_moe.router": ".block_sparse_moe.router.layer"},
        joined={".shared_mlp.input_linear": (".mlp.shared_expert.gate_proj", ".mlp.shared_expert.up_proj")},
    ),
    "lfm2moe": Architecture(renamed={".expert_bias": ".expert_bias.bias"}),
    "qwen3moe": Architecture(),
    "qwen35moe": ARCHITECTURES["qwen35"],
}
"""The same of files with experts, of which each is read by itself: by one process, on a CPU."""


def architecture_of(header: GGUFHeader) -> Architecture | None:
    """Return the architecture of a file; None: it is not read here."""
    return (WITH_EXPERTS if has_experts(header) else ARCHITECTURES).get(header.architecture)


def has_experts(header: GGUFHeader) -> bool:
    """Return whether a file has a mixture of experts."""
    return bool(header.get("{arch}.expert_count"))


def check_experts(header: GGUFHeader) -> None:
    """Raise ValueError for numbers of experts that no model has, or that the file's routers do not have."""
    key = f"{header.architecture}.expert_count"
    count, chosen = (header.get(f"{{arch}}.expert_{name}", 0) for name in ("count", "used_count"))
    if header.architecture not in ARCHITECTURES and header.architecture in WITH_EXPERTS and not count:
        raise ValueError(f"its {key} is {count!r}, and a {header.architecture} has experts")
    if not count or header.architecture not in WITH_EXPERTS:
        return
    if not isinstance(count, int):
        raise ValueError(f"its {key} is {count!r}, and must be one number")
    if not isinstance(chosen, int) or not 0 < chosen <= count:
        used = f"{header.architecture}.expert_used_count"
        raise ValueError(f"its {used} is {chosen!r}, and must be a number from 1 to its expert_count, {count}")
    for name, tensor in header.tensors.items():
        if name.endswith(".ffn_gate_inp.weight") and tensor.shape[0] != count:
            raise ValueError(f"its {key} is {count}, and {name} has {tensor.shape[0]}")
    if not any(name.endswith(".ffn_gate_inp.weight") for name in header.tensors):
        raise ValueError(f"its {key} is {count}, and it has no router, such as blk.0.ffn_gate_inp.weight")
