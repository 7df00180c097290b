"""How long sequences may be, and how many tokens the KV cache holds: decided once, before a model's tables are made.

Both are in tokens and do not depend on each other, except that the cache holds at least one sequence of full length.
A model with recurrent layers also has a state for each slot, and snapshots of states for the prefix cache.
Invariant: the same settings, model and free memory give the same numbers; several ranks get those of the first.
Not responsible for: allocating the pages (core/executor.py), or what happens when they run out (core/scheduler.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.engine_settings import SLOT_TOKENS
from gpu_engine.model.loaded_model import LoadedModel, ModelNotSupported
from gpu_engine.model.names import part_names
from gpu_engine.model.recurrent.rows import RecurrentLayer, pending_bytes, state_bytes
from kernels.kv_pages import MAX_WIDTH, KVHeads, bytes_of_token
from service_runtime.memory import available_memory

log = logging.getLogger(__name__)

_CPU_SHARE, _GPU_SHARE = 0.5, 0.8
"""Share of the free memory that the KV cache may take. The rest is for activations, logits, captured graphs and a
drafter; on a CPU also for packed copies of the weights, and for other processes."""

_LONGEST_ON_GPU = 16_384
"""The longest sequence on a GPU where no length is set. Up to it, attention sums a sequence in parts of one size
(kernels/cuda/attention/paged.py), so a logit's bits do not follow from the length; buffers of captured graphs grow with
the length."""

_SNAPSHOT_SHARE, _LEAST_SNAPSHOTS, _MOST_SNAPSHOTS = 0.25, 4, 1024
"""Bytes of the snapshots of recurrent states, as a share of the KV cache's, and the bounds of their number."""

_LEAST = 16
"""The shortest sequence that a server is started for."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The two numbers, and the room that they were chosen for."""

    max_model_len: int
    """Longest prompt and answer together, in tokens."""
    room_tokens: int
    """Tokens that the KV cache may have in the memory that was free; 0: unknown."""


class StateSize(NamedTuple):
    """Bytes of the recurrent layers' memory."""

    state: int = 0
    """A sequence's committed state, and so a snapshot of it."""
    pending: int = 0
    """A row of a step that may still be rejected."""

    def of_slots(self, config: EngineConfig) -> int:
        """Return the bytes of every slot's state."""
        return config.max_batch_size * (self.state + config.num_rows * self.pending)


NO_STATE = StateSize()
"""Of a model without recurrent layers."""

_WITHOUT_ATTENTION = frozenset({"conv", "linear_attention", "mamba", "mlp", "moe"})
"""Kinds of layers in transformers' configurations that have no keys and values."""


def cache_places(text: Any) -> dict[int, int]:
    """Return the place in the cache of each layer with attention, in a model's text configuration, by its number.

    The last `num_kv_shared_layers` have the keys and values of the last layer before them that is of their kind, and so
    its place.
    """
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    layers = [layer for layer, kind in enumerate(kinds) if kind not in _WITHOUT_ATTENTION]
    own = layers[: len(layers) - (getattr(text, "num_kv_shared_layers", None) or 0)]
    places = {layer: place for place, layer in enumerate(own)}
    of_kind = {kinds[layer]: place for layer, place in places.items()}
    return places | {layer: of_kind[kinds[layer]] for layer in layers[len(own) :]}


def attention_layers(text: Any) -> list[int]:
    """Return the numbers of the layers with attention, in a model's text configuration."""
    return list(cache_places(text))


_NONE: Mapping[int, KVHeads] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CachedShape:
    """The shape of a model's keys and values, and the size of its recurrent states."""

    num_layers: int
    """Those with attention."""
    heads: tuple[KVHeads, ...]
    """Of each layer in the cache. Keys and values are filled up to a multiple of 16 channels."""
    positions: int
    """The longest sequence that the model's positions allow; 0: they bound nothing."""
    states: StateSize = NO_STATE

    @classmethod
    def of(cls, text: Any, latent: Mapping[int, KVHeads] = _NONE) -> CachedShape:
        """Return the shape that a model's text configuration describes. `latent`: the heads of the layers that cache
        latent vectors, by number; others have the heads that these expand to."""
        places = cache_places(text)
        own = {place: layer for layer, place in reversed(places.items())}
        layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text] * text.num_hidden_layers
        heads = tuple(latent.get(own[place]) or _heads_of(layers[own[place]]) for place in sorted(own))
        return cls(len(places), heads, min(_position_limits(text), default=0))

    @property
    def like_layers(self) -> bool:
        """True: each layer has its own keys and values, in heads of one size and number."""
        return len(self.heads) == self.num_layers and len(set(self.heads)) <= 1

    def bounded_by(self, other: CachedShape) -> CachedShape:
        """Return this shape with the positions of the shorter of both."""
        return replace(self, positions=min((n for n in (self.positions, other.positions) if n), default=0))

    def token_bytes(self, config: EngineConfig, dtype: torch.dtype) -> int:
        """Return the bytes of a token's keys and values, of a model in `dtype`."""
        return bytes_of_token(self.heads, cache_dtype(config, dtype))


def cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the keys and values of a model in `dtype`."""
    return torch.int8 if config.kv_cache_dtype == "int8" else dtype


def refuse_wide_heads(layers: Sequence[KVHeads], device: str) -> None:
    """Raise ModelNotSupported for heads that attention does not take on a type of device, "cpu" or "cuda"."""
    widest = max((heads.width for heads in layers), default=0)
    if widest > MAX_WIDTH[device]:
        elsewhere = " on a GPU; serve it on a CPU" if widest <= MAX_WIDTH["cpu"] else ""
        raise ModelNotSupported(
            f"model: it has heads of {widest} channels, and attention takes at most {MAX_WIDTH[device]}{elsewhere}"
        )


def pool_tokens(config: EngineConfig, max_model_len: int, room_tokens: int) -> int:
    """Return the tokens of the KV cache: as set, or what full slots use, as far as there is room for them."""
    if config.kv_cache_tokens:
        return config.kv_cache_tokens
    each = max_model_len if config.max_model_len else min(max_model_len, SLOT_TOKENS)
    wanted = config.max_batch_size * each
    return max(max_model_len, min(wanted, room_tokens or wanted))


def num_snapshots(config: EngineConfig, model: LoadedModel, num_pages: int) -> int:
    """Return the number of snapshots of recurrent states that are kept next to a KV cache of `num_pages` pages."""
    if not model.recurrent:
        return 0
    cache_bytes = num_pages * config.page_size * bytes_of_token(model.kv_heads, cache_dtype(config, model.dtype))
    return snapshots_beside(config, state_bytes(model.recurrent), cache_bytes)


def snapshots_beside(config: EngineConfig, state: int, cache_bytes: int) -> int:
    """Return the same next to a KV cache of some bytes, for states of `state` bytes; 0: there are none."""
    if not state or not config.caches_prefixes:
        return 0
    return min(max(int(cache_bytes * _SNAPSHOT_SHARE) // state, _LEAST_SNAPSHOTS), _MOST_SNAPSHOTS)


def snapshot_interval(max_model_len: int, num_snapshots: int, chunk: int) -> int:
    """Return the tokens between two snapshots of a long prompt: a multiple of the chunks in which it is prefilled, such
    that the longest prompt has at most a quarter of the snapshots."""
    return chunk * max(1, -(-4 * max_model_len // (max(1, num_snapshots) * chunk)))


def states_of(recurrent: Mapping[int, RecurrentLayer]) -> StateSize:
    """Return the size of the states of some recurrent layers."""
    return StateSize(state_bytes(recurrent), pending_bytes(recurrent))


def decide(config: EngineConfig, shape: CachedShape, token_bytes: int, free_bytes: int | None) -> CacheSize:
    """Return the sizes. Raises ModelNotSupported for a length that the KV cache has no room for.

    Args:
        config: with `max_model_len` and `kv_cache_tokens` as set.
        shape: `positions` bounds every length.
        token_bytes: of a token's keys and values.
        free_bytes: the memory that is free for everything that is allocated from now on; None: unknown.
    """
    share = _CPU_SHARE if config.on_cpu else _GPU_SHARE
    room = 0
    if free_bytes is not None:
        states = shape.states.of_slots(config)
        if states > free_bytes * share:
            raise ModelNotSupported(
                f"max_batch_size: the recurrent states of {config.max_batch_size} slots take {states / 1e9:.2f} GB, "
                f"and {free_bytes / 1e9:.2f} GB of memory are free; lower it"
            )
        free_bytes -= states
        snapshots = _SNAPSHOT_SHARE if shape.states.state and config.caches_prefixes else 0.0
        room = max(1, int(free_bytes * share / (1 + snapshots)) // token_bytes)
    held = config.kv_cache_tokens or room
    wanted = (config.max_model_len,) if config.max_model_len else (held, _longest(config))
    bounds = [size for size in (*wanted, shape.positions) if size]
    if not bounds:
        raise ModelNotSupported("max_model_len: must be set, because neither the model nor the free memory bounds it")
    longest = min(bounds)
    if held and max(longest, _LEAST) > held:
        raise ModelNotSupported(
            f"max_model_len: {max(longest, _LEAST)} tokens do not fit into the KV cache, which has room for {held} "
            f"({(free_bytes or 0) / 1e9:.2f} GB of memory are free, and a token takes {token_bytes} bytes); lower it, "
            "or set kv_cache_tokens"
        )
    return CacheSize(longest, room)


def _longest(config: EngineConfig) -> int:
    """Return the longest sequence where no length is set; 0: what else bounds it. A draft model keeps tokens of this
    length for each slot, next to the KV cache."""
    if config.num_drafts and config.drafter in ("model", "decoupled"):
        return SLOT_TOKENS
    return 0 if config.on_cpu else _LONGEST_ON_GPU


def report(config: EngineConfig, shape: CachedShape, token_bytes: int, size: CacheSize) -> None:
    """Log the sizes in one line; a length above the model's is a warning."""
    asked, served, own = config.max_model_len, size.max_model_len, shape.positions
    if asked > served:
        log.warning("max_model_len is %d, which is more than the model has: %d tokens are served", asked, served)
    pool = pool_tokens(config, served, size.room_tokens)
    why = "all that the model has" if served == own else f"as set; the model has {own or 'no limit'}"
    if served != own and not asked:
        why = f"by default, or as the memory allows; the model has {own or 'no limit'}"
    text = "sequences of up to %d tokens (%s); KV cache of %d tokens, %.0f MB"
    log.info(text, served, why, pool, pool * token_bytes / 1e6)
    if shape.states.state:
        sizes = shape.states.state / 1e6, shape.states.of_slots(config) / 1e6
        log.info("recurrent states of %.1f MB a sequence: %.0f MB for every slot", *sizes)


def free_bytes(device: torch.device, weight_bytes: int = 0) -> int | None:
    """Return the free memory of a device, once `weight_bytes` more are on it; None: unknown."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None
    else:
        free = available_memory()
    return None if free is None else max(0, free - weight_bytes)


def file_bytes(path: Path, dtype: torch.dtype) -> int:
    """Return about what the weights in a model's files take as `dtype`; most files have 16 bits a weight."""
    files = map(path.with_name, part_names(path.name)) if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files) * max(1, dtype.itemsize // 2)


def device_bytes(config: EngineConfig, net: nn.Module, dtype: torch.dtype, *, of_8_bits: bool) -> int:
    """Return what the weights take on a GPU. `of_8_bits`: the checkpoint's matrices have 8 bits a weight.

    A quantised matrix has one byte a weight there, except for the output head (quantised/choice.py).
    """
    total = sum(weight.numel() for weight in net.parameters()) * dtype.itemsize
    if not of_8_bits and config.quantization in ("auto", "none"):
        return total
    linears = (module for name, module in net.named_modules() if type(module) is nn.Linear and name != "lm_head")
    return total - sum(linear.weight.numel() for linear in linears) * (dtype.itemsize - 1)


def _heads_of(layer: Any) -> KVHeads:
    """Return the heads in the cache of a layer's configuration."""
    if getattr(layer, "kv_lora_rank", None):  # latent attention, in its expanded form
        wide: int = max(layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim)
    else:
        wide = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    count = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return KVHeads(count, -(-wide // 16) * 16)


def _position_limits(text: Any) -> Sequence[int]:
    """Return the lengths that the model's positions allow."""
    limits = [getattr(text, "max_position_embeddings", None)]
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") == "longrope":
            # Beyond it the longest sequence of a batch would change the positions of all.
            limits.append(parameters.get("original_max_position_embeddings"))
    return [limit for limit in limits if limit]
