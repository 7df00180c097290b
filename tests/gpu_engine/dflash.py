"""DFlash heads for the tiny Llama, and a plain reference of what they draft.

The heads are files of z-lab's public format: one of random weights, and one that repeats what the Llama said before.
The reference reads the same files with code of its own: it computes all keys anew for each block, with dense
attention and transformers' rotary embedding. Invariant: all is drawn from fixed seeds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from tests.gpu_engine.tiny import ROUND

BLOCK = 8
"""Rows of a block of the heads: K is at most 7."""
MASK = 299
"""An id that the tiny Llama's tokenizer does not have."""


def public_config(**changed: Any) -> dict[str, Any]:
    """Return the config.json of a head for the tiny Llama, as published heads have it."""
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_bias": False,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 512,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": None,
        "vocab_size": 300,
    } | changed


def random_tensors(config: dict[str, Any], seed: int = 5) -> dict[str, torch.Tensor]:
    """Return the tensors of a head by their public names."""
    H, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(config["dflash_config"]["target_layer_ids"]) * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}."
        shapes |= {f"{at}{name}.weight": (H,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}self_attn.{name}.weight": (width,) for name in ("q_norm", "k_norm")}
        shapes |= {f"{at}mlp.{name}.weight": (inner, H) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{at}mlp.down_proj.weight": (H, inner), f"{at}self_attn.o_proj.weight": (H, heads)}
        for name, size in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            shapes[f"{at}self_attn.{name}.weight"] = (size, H)
        if config["attention_bias"]:
            for name, size in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads), ("o_proj", H)):
                shapes[f"{at}self_attn.{name}.bias"] = (size,)
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=draw) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.2)
        + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Write a head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


class PlainDFlash:
    """A head, read from its folder and computed block by block without a cache."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.said, self.tensors = config, tensors
        own: dict[str, Any] = dict(config["dflash_config"])
        self.mask: int = own["mask_token_id"]
        self.scale, self.factor = own.get("input_embedding_scale", 1.0), own.get("output_multiplier", 1.0)
        self.softcap = own.get("final_logit_softcapping")
        fields = ("hidden_size", "head_dim", "num_attention_heads", "max_position_embeddings", "rope_parameters")
        self.rotary = Qwen3RotaryEmbedding(Qwen3Config(**{name: config[name] for name in fields}))

    @staticmethod
    def read(folder: Path) -> PlainDFlash:
        return PlainDFlash(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))

    def logits(
        self, states_SF: torch.Tensor, last: int, drafts: int, embedding_VH: torch.Tensor, head_VH: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits [drafts, V] of the tokens after `last`.

        `states_SF` are the states of the tokens before it.
        """
        said, S, R = self.said, len(states_SF), drafts + 1
        context = self._norm(self._linear(states_SF, "fc"), "hidden_norm")
        x = embedding_VH[torch.tensor([last] + [self.mask] * drafts)] * self.scale
        angles = self.rotary(x[None], torch.arange(S + R)[None])
        query, key = torch.arange(S, S + R)[:, None], torch.arange(S + R)
        for layer, kind in enumerate(said["layer_types"]):
            sees = torch.ones(R, S + R, dtype=torch.bool)
            if kind == "sliding_attention" or said.get("is_causal"):
                sees &= key <= query
            if kind == "sliding_attention":
                sees &= query - key < said["sliding_window"]
            h = self._norm(x, f"layers.{layer}.input_layernorm")
            x = x + self._attention(layer, h, context, angles, sees)
            h = self._norm(x, f"layers.{layer}.post_attention_layernorm")
            at = f"layers.{layer}.mlp."
            gated = functional.silu(self._linear(h, at + "gate_proj")) * self._linear(h, at + "up_proj")
            x = x + self._linear(gated, at + "down_proj")
        logits = self._norm(x, "norm")[1:] @ head_VH.T * self.factor
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def _attention(
        self, layer: int, h: torch.Tensor, context: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor],
        sees: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        at, width, (cos, sin) = f"layers.{layer}.self_attn.", self.said["head_dim"], angles
        group = self.said["num_attention_heads"] // self.said["num_key_value_heads"]
        rows = torch.cat([context, h])
        q = self._norm(self._linear(h, at + "q_proj").unflatten(-1, (-1, width)), at + "q_norm")
        k = self._norm(self._linear(rows, at + "k_proj").unflatten(-1, (-1, width)), at + "k_norm")
        v = self._linear(rows, at + "v_proj").unflatten(-1, (-1, width)).repeat_interleave(group, 1)

        def turned(x: torch.Tensor, rows: slice) -> torch.Tensor:
            x = x.transpose(0, 1)[None]
            return apply_rotary_pos_emb(x, x, cos[:, rows], sin[:, rows])[0][0]

        keys = turned(k, slice(None)).repeat_interleave(group, 0)
        scores = turned(q, slice(-len(h), None)) @ keys.transpose(1, 2) * width**-0.5
        shares = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        return self._linear(torch.einsum("hrs,shd->rhd", shares, v).flatten(1), at + "o_proj")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.tensors[name + ".weight"], self.tensors.get(name + ".bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.float().pow(2).mean(-1, keepdim=True) + self.said["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[name + ".weight"]


class PlainTarget:
    """The tiny Llama as transformers computes it, for the states that a head reads."""

    def __init__(self, folder: Path) -> None:
        self.net: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.net.eval().requires_grad_(False)
        self.embedding_VH = self.net.get_input_embeddings().weight
        self.head_VH = self.net.get_output_embeddings().weight

    def states(self, ids: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
        """Return the outputs of `layers`, side by side, for each token."""
        out = self.net(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.cat([out[layer + 1][0] for layer in layers], dim=-1)

    def drafts(self, head: PlainDFlash, ids: Sequence[int], count: int) -> torch.Tensor:
        """Return the logits [count, V] that `head` gives the tokens after `ids`."""
        states_SF = self.states(ids[:-1], head.said["dflash_config"]["target_layer_ids"])
        return head.logits(states_SF, ids[-1], count, self.embedding_VH, self.head_VH)


def save_random(folder: Path) -> Path:
    """Write a head of random weights, whose drafts are rarely accepted."""
    config = public_config()
    return save(folder, config, random_tensors(config))


def save_repeating(folder: Path) -> Path:
    """Write a head whose drafts are what the target said one round of its circle before, which is often right.

    Queries and keys have a bias alone, which rotation turns into a peak at one distance. There the two layers copy the
    halves of the target's final state, and the target's output head makes of it what it made of it then.
    """
    config = public_config(attention_bias=True) | {
        "dflash_config": public_config()["dflash_config"] | {"input_embedding_scale": 1e-3}
    }
    H, width = config["hidden_size"], config["head_dim"]
    tensors = {
        name: torch.ones_like(tensor) if "norm" in name else torch.zeros_like(tensor)
        for name, tensor in random_tensors(config).items()
    }
    tensors["fc.weight"][:, H:] = torch.eye(H)
    turns = 1e4 ** (-torch.arange(3) / (width / 2)) * -(ROUND + 1)
    for layer in range(2):
        at, copied = f"layers.{layer}.self_attn.", range(layer * H // 2, (layer + 1) * H // 2)
        for name, angles in (("q", turns), ("k", torch.zeros(3))):
            tensors[f"{at}{name}_norm.weight"] *= 5.0
            heads = tensors[f"{at}{name}_proj.bias"].view(-1, width)
            heads[:, :3], heads[:, width // 2 : width // 2 + 3] = angles.cos(), angles.sin()
        for channel, source in enumerate(copied):
            tensors[f"{at}v_proj.weight"][channel, source] = 1.0
            # Two query heads share a key-value head, and the first of them is read.
            read = channel // width * 2 * width + channel % width
            tensors[f"{at}o_proj.weight"][source, read] = 1.0
    return save(folder, config, tensors)
