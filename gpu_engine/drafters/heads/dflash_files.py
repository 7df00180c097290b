"""DFlash heads on disk, in z-lab's public format: a config.json of Qwen 3's form with `dflash_config`, and the tensors
of `DFlashHead`.

`dflash_config` has `target_layer_ids`, `mask_token_id` and, in newer heads, `block_size`; older ones have that next to
it. Invariant: a checkpoint that does not fit the target, or that asks for a computation that is not here, is refused at
load with the field or the tensor, and the value. Not responsible for: the head itself (see dflash_head.py), other
layouts of the same weights (vLLM's speculators) and its successors (DFlash 2, Domino), which are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_engine.drafters.heads.dflash_head import DFlashConfig, DFlashHead, LayerKind
from gpu_engine.drafters.heads.formats import DFLASH, HeadNotUsable, read_config, read_tensors

_BLOCK_SIZE = 16
"""Where a config names none, as in the public code."""
_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds whose angles do not depend on the length of the sequence."""
_DFLASH_FIELDS = frozenset(
    {
        *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "is_causal", "projector_type"),
        *("attention_mode", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
    }
)


def load_dflash(directory: Path, target_config: Any, dtype: torch.dtype) -> DFlashHead:
    """Return the head of a directory for a target with that transformers config, in eval mode, on the CPU.

    Raises HeadNotUsable.
    """
    config = _read_config(directory, target_config)
    tensors = {name.removeprefix("model."): tensor for name, tensor in read_tensors(directory).items()}
    # Embedding and output head are the target's own, and a copy of them is not needed.
    tensors = {name: t for name, t in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    head = DFlashHead(config)
    wanted = head.state_dict()
    for name, tensor in wanted.items():
        if name not in tensors:
            raise HeadNotUsable(f"{directory}: {name} is missing; this is not a DFlash head")
        if tensors[name].shape != tensor.shape:
            raise HeadNotUsable(f"{directory}: {name} is {list(tensors[name].shape)}, not {list(tensor.shape)}")
    if strange := sorted(set(tensors) - set(wanted)):
        raise HeadNotUsable(f"{directory}: {strange[0]} is no tensor of a DFlash head, which has no use for it")
    head.load_state_dict(tensors)
    return head.to(dtype).eval()


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of one config.json. A value of another kind than asked for raises HeadNotUsable with its name."""

    path: Path
    said: dict[str, Any]

    def refuse(self, name: str, wanted: str) -> HeadNotUsable:
        """Return the error of a field, which is top-level or in `dflash_config`."""
        value = self.value(name.removeprefix("dflash_config."))
        return HeadNotUsable(f"{self.path}: {name} is {value!r}, not {wanted}")

    def value(self, name: str) -> Any:
        """Return a field of `dflash_config`, or of the same name next to it."""
        inner = self.said.get("dflash_config")
        found = inner.get(name) if isinstance(inner, dict) else None
        return self.said.get(name) if found is None else found

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer of at least `least`."""
        value = self.value(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.refuse(name, f"an integer of at least {least}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a positive number."""
        value = self.value(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.refuse(name, "a positive number")
        return float(value)

    def one_of(self, name: str, *allowed: Any) -> None:
        """Check that a field, if it is there, has one of these values."""
        if self.value(name) not in (None, *allowed):
            raise self.refuse(name, f"{' or '.join(map(repr, allowed))}, the only one that is computed here")


def _read_config(directory: Path, target_config: Any) -> DFlashConfig:
    fields = _Fields(directory / "config.json", read_config(directory, "dflash"))
    _check_format(fields)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    theta, rope = _rope(fields)
    kinds = _kinds(fields)
    softcap = fields.value("final_logit_softcapping")
    config = DFlashConfig(
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // heads),
        vocab_size=fields.integer("vocab_size"),
        block_size=fields.integer("block_size", _BLOCK_SIZE, least=2),
        mask_token_id=fields.integer("mask_token_id", least=0),
        target_layer_ids=_target_layers(fields, target_config.num_hidden_layers),
        kinds=kinds,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=rope,
        max_position_embeddings=fields.integer("max_position_embeddings", target_config.max_position_embeddings),
        attention_bias=bool(fields.value("attention_bias")),
        input_embedding_scale=fields.number("input_embedding_scale", 1.0),
        output_multiplier=fields.number("output_multiplier", 1.0),
        logits_softcap=fields.number("final_logit_softcapping", 1.0) if softcap else 0.0,
    )
    _check_shapes(fields, config, target_config)
    return config


def _check_format(fields: _Fields) -> None:
    said, path = fields.said, fields.path
    if "speculators_model_type" in said:
        raise HeadNotUsable(f"{path}: speculators_model_type is there: only z-lab's own layout of DFlash heads is read")
    names = said.get("architectures")
    if not isinstance(names, list) or DFLASH not in names:
        raise HeadNotUsable(f"{path}: architectures is {names!r}, and {DFLASH} is what drafter=dflash reads")
    if not isinstance(said.get("dflash_config"), dict):
        raise HeadNotUsable(f"{path}: dflash_config is {said.get('dflash_config')!r}, not an object")
    if strange := sorted(set(said["dflash_config"]) - _DFLASH_FIELDS):
        raise HeadNotUsable(f"{path}: dflash_config.{strange[0]} is not known, and could change what is computed")
    fields.one_of("model_type", "qwen3")
    fields.one_of("hidden_act", "silu")
    fields.one_of("projector_type", "dflash")
    fields.one_of("attention_mode", "gqa", "mha")
    fields.one_of("partial_rotary_factor", 1, 1.0)


def _target_layers(fields: _Fields, num_layers: int) -> tuple[int, ...]:
    layers = fields.value("target_layer_ids")
    right = isinstance(layers, list) and layers and all(isinstance(i, int) and 0 <= i < num_layers for i in layers)
    if not right:
        raise fields.refuse("dflash_config.target_layer_ids", f"a list of the target's layers, 0 to {num_layers - 1}")
    if fields.integer("num_target_layers", num_layers) != num_layers:
        raise fields.refuse("num_target_layers", f"{num_layers}, the target's")
    return tuple(layers)


def _kinds(fields: _Fields) -> tuple[LayerKind, ...]:
    count = fields.integer("num_hidden_layers")
    types, causal = fields.said.get("layer_types"), fields.value("is_causal")
    types = ["full_attention"] * count if types is None else types
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != count or any(each not in known for each in types):
        raise fields.refuse("layer_types", f"{count} of {' and '.join(known)}")
    if causal not in (None, True, False):
        raise fields.refuse("is_causal", "true or false")
    slides = "sliding_attention" in types
    if slides and causal is False:
        raise fields.refuse("is_causal", "true or absent, where layer_types has a sliding_attention")
    window = fields.integer("sliding_window") if slides else 0
    sliding = LayerKind(causal=True, window=window)
    return tuple(sliding if each == known[1] else LayerKind(causal=bool(causal), window=0) for each in types)


def _rope(fields: _Fields) -> tuple[float, dict[str, Any] | None]:
    """Return the base and the other parameters of the rotary embedding."""
    said = fields.said
    name = "rope_parameters" if said.get("rope_parameters") else "rope_scaling"
    rope = said.get(name) or {}
    if not isinstance(rope, dict):
        raise fields.refuse(name, "an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE or rope.get("partial_rotary_factor", 1) != 1:
        raise fields.refuse(name, f"one of the kinds {', '.join(_ROPE)}, over whole heads")
    theta = rope.get("rope_theta", said.get("rope_theta", 10000.0))
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        raise HeadNotUsable(f"{fields.path}: rope_theta is {theta!r}, not a positive number")
    rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "type")}
    return float(theta), rest | {"rope_type": kind} if rest else None


def _check_shapes(fields: _Fields, config: DFlashConfig, target_config: Any) -> None:
    fits = {"vocab_size": target_config.vocab_size, "hidden_size": target_config.hidden_size}
    for name, wanted in fits.items():
        if getattr(config, name) != wanted:
            raise fields.refuse(name, f"{wanted}, the target's")
    wanted = config.vocab_size
    if config.mask_token_id >= wanted:
        raise fields.refuse("dflash_config.mask_token_id", f"a row of the target's embedding, below {wanted}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of {config.num_attention_heads} heads")
    if config.head_dim % 16 or config.head_dim > 256:
        raise fields.refuse("head_dim", "a multiple of 16, at most 256")
