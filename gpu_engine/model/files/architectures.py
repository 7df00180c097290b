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
    by_key_head: tuple[str, ...] = ()
    """Parts of the names of joined parameters whose rows the model has by key heads of a delta net: queries, keys,
    values and gates of the first head, then those of the next."""
    flat: tuple[str, ...] = ()
    """Tensors with a further dimension, which their parameters lack."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Parts of a parameter's name, in place of which the library's table has others."""
    joined: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Parts of a parameter's name, whose rows are those of two tensors where a file has no tensor of its own for it."""
    gated: bool = True
    """An expert's first product has the outputs of a gate before those of up."""
    one_row: tuple[str, ...] = ()
    """Tensors that may lack the dimension of 1 with which their parameters begin."""


_ROUTER = ".ffn_gate_inp.weight"
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
_GRANITE = replace(
    ARCHITECTURES["granitehybrid"],
    renamed={".block_sparse_moe.router": ".block_sparse_moe.router.layer"},
    joined={".shared_mlp.input_linear": (".mlp.shared_expert.gate_proj", ".mlp.shared_expert.up_proj")},
)
_CORRECTION = "e_score_correction"
_SHARED_GATE = ("ffn_gate_inp_shexp",)
_CORRECTED = Architecture(renamed={f".{_CORRECTION}_bias": f".{_CORRECTION}.bias"})
WITH_EXPERTS = {
    "deepseek2": replace(_CORRECTED, joined={".kv_b_proj": (".k_b_proj", ".v_b_proj")}),
    "ernie4_5-moe": Architecture(
        renamed={f".gate.moe_statics.{_CORRECTION}_bias": f".moe_statics.{_CORRECTION}.bias"},
        one_row=("exp_probs_b",),
    ),
    "gemma4": Architecture(
        renamed=ARCHITECTURES["gemma4"].renamed
        | {".router.scale": ".router.proj.scale", ".router.per_expert_scale": ".experts.down_proj.scale"}
    ),
    "glm4moe": _CORRECTED,
    "gpt-oss": Architecture(renamed={".sinks": ".sinks.weight"}),
    "granitehybrid": _GRANITE,
    "granitemoe": _GRANITE,
    "jamba": ARCHITECTURES["jamba"],
    "lfm2moe": Architecture(renamed={".expert_bias": ".expert_bias.bias"}),
    "llama": ARCHITECTURES["llama"],
    "nemotron_h_moe": replace(
        ARCHITECTURES["nemotron_h"], renamed=ARCHITECTURES["nemotron_h"].renamed | _CORRECTED.renamed, gated=False
    ),
    "olmoe": Architecture(),
    "qwen2moe": Architecture(one_row=_SHARED_GATE),
    "qwen3moe": Architecture(),
    "qwen3next": Architecture(
        norm_offset=1.0,
        by_key_head=(".in_proj_qkvz",),
        joined={".in_proj_qkvz": (".in_proj_qkv", ".in_proj_z")},
        one_row=_SHARED_GATE,
    ),
    "qwen35moe": replace(ARCHITECTURES["qwen35"], one_row=_SHARED_GATE),
}
"""The same of files with experts, of which each is read by itself: by one process, on a CPU. Mixtral's is llama."""


def architecture_of(header: GGUFHeader) -> Architecture | None:
    """Return the architecture of a file; None: it is not read here."""
    return (WITH_EXPERTS if has_experts(header) else ARCHITECTURES).get(header.architecture)


def has_experts(header: GGUFHeader) -> bool:
    """Return whether a file has a mixture of experts: Jamba's files say that an ordinary block is one expert."""
    count = header.get("{arch}.expert_count")
    return bool(count) and (count != 1 or _router(header) is not None)


def _router(header: GGUFHeader) -> str | None:
    """Return the name of a router; None: the file has none."""
    return next((name for name in header.tensors if name.endswith(_ROUTER)), None)


def check_experts(header: GGUFHeader) -> None:
    """Raise ValueError for numbers of experts that no model has, or that the file's routers do not have."""
    key = f"{header.architecture}.expert_count"
    count, chosen = (header.get(f"{{arch}}.expert_{name}", 0) for name in ("count", "used_count"))
    if header.architecture not in ARCHITECTURES and header.architecture in WITH_EXPERTS and not count:
        raise ValueError(f"its {key} is {count!r}, and a {header.architecture} has experts")
    if not has_experts(header) or header.architecture not in WITH_EXPERTS:
        return
    if not isinstance(count, int):
        raise ValueError(f"its {key} is {count!r}, and must be one number")
    if not isinstance(chosen, int) or not 0 < chosen <= count:
        used = f"{header.architecture}.expert_used_count"
        raise ValueError(f"its {used} is {chosen!r}, and must be a number from 1 to its expert_count, {count}")
    for name, tensor in header.tensors.items():
        if name.endswith(_ROUTER) and tensor.shape[0] != count:
            raise ValueError(f"its {key} is {count}, and {name} has {tensor.shape[0]}")
    if _router(header) is None:
        raise ValueError(f"its {key} is {count}, and it has no router, such as blk.0{_ROUTER}")


def width_of_experts(header: GGUFHeader) -> int:
    """Return the channels between an expert's two products; a file without them has llama.cpp's default. Raises
    ValueError where they are no number."""
    keys = ("expert_feed_forward_length", "feed_forward_length", "expert_used_count")
    own, all_chosen, chosen = (header.get(f"{{arch}}.{key}") for key in keys)
    width = all_chosen // chosen if own is None and isinstance(all_chosen, int) and chosen else own
    if not isinstance(width, int):
        raise ValueError(f"its {header.architecture}.{keys[0]} is {width!r}, and must be one number")
    return width
