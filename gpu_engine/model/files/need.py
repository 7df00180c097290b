"""The memory that a model takes on a CPU, computed before any of it is taken.

Invariant: a start that cannot fit is refused before a weight is read. Not responsible for: the length of sequences and
the KV cache's size (see cache_size.py), the memory of a GPU.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn

from gpu_engine.model.files.filled import Weights, loaders, sources_of
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.quantised.choice import ReadProducts
from kernels.blocks import BLOCK, BlockKind, joined_kind, packed_bytes

log = logging.getLogger(__name__)

WORKING, OF_LOADER = 150_000_000, 50_000_000
"""For what does not grow with the weights: the probe, tables of positions and activations; the slabs of a thread that
reads."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes."""

    weights: int
    """As they are used."""
    working: int
    """Beyond them, while they are prepared and run: most of all the largest layer's products, which are joined, or its
    experts, if one tensor holds them all while they are packed one by one."""

    @property
    def total(self) -> int:
        """Both."""
        return self.weights + self.working


def need_of(net: nn.Module, weights: Weights, products: ReadProducts | None, dtype: torch.dtype) -> Need:
    """Return what a model takes that has no memory yet. `products`: None, if its linear layers stay floats."""
    sources, kept, packed, joined, head, experts = sources_of(net, weights), dict[int, int](), 0, 0, 0, 0
    forms = defaultdict[tuple[str, str], list[tuple[BlockKind, bool, int, int]]](list)
    for path, module in net.named_modules():
        tensors = dict(module.named_parameters(recurse=False))
        if type(module) is nn.Linear:
            weight, size = module.weight, module.weight.numel() * dtype.itemsize
            if products is not None and module.in_features % BLOCK == 0:
                source = sources[f"{path}.weight"]
                kind, offsets = products.kind_of(path, source), products.has_offsets(path, source)
                size = packed_bytes(kind, (module.out_features, module.in_features), offsets=offsets)
                parent, _, name = path.rpartition(".")
                forms[parent, _JOINED.get(name, name)].append((kind, offsets, module.out_features, module.in_features))
            packed += size
            if path != "lm_head":
                joined = max(joined, size)
            elif size == weight.numel() * dtype.itemsize:
                head = size  # it is packed, and joined with nothing
            del tensors["weight"]
            assert weight.dim() == 2
        stacked = (tensor.numel() * dtype.itemsize for tensor in tensors.values() if tensor.dim() == 3)
        experts = max(experts, sum(stacked))
        kept.update({id(tensor): tensor.numel() * dtype.itemsize for tensor in tensors.values()})
    packed += sum(_more_when_joined(parts) for parts in forms.values())
    return Need(packed + sum(kept.values()), max(2 * joined, head, experts) + WORKING + loaders() * OF_LOADER)


_JOINED = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"), **dict.fromkeys(("gate_proj", "up_proj"), "gate_up")}
"""The products of a layer that become one where they have the same inputs."""


def _more_when_joined(parts: list[tuple[BlockKind, bool, int, int]]) -> int:
    """Return the bytes that products take beyond their own when they are one, whose blocks have one form.

    A part is its kind, whether it has offsets, its outputs and its inputs.
    """
    kind, offsets = joined_kind({part[0] for part in parts}), any(part[1] for part in parts)
    return sum(
        packed_bytes(kind, (N, K), offsets=offsets) - packed_bytes(own, (N, K), offsets=own_offsets)
        for own, own_offsets, N, K in parts
    )


def refuse_too_large(need: Need, free: int | None, setting: str, *, rounds: bool) -> None:
    """Raise ModelNotSupported for a model that the free memory has no room for. `free`: None where it is not known.

    `setting` names the model; `rounds`: its linear layers are quantised already.
    """
    if free is None or need.total <= free:
        return
    smaller = "take a file with fewer bits a weight" if rounds else 'set quantization to "q4" or "int8"'
    raise ModelNotSupported(
        f"{setting}: its weights take {_gb(need.weights)} and {_gb(need.working)} more to be prepared and run, and "
        f"{_gb(free)} of memory are free; {smaller}, take a smaller model, or free memory"
    )


def say_need(need: Need, cache_tokens: int, cache_bytes: int, free: int | None, state_bytes: int = 0) -> None:
    """Log what the start takes in one line. Raises ModelNotSupported for a cache that was set too large.

    `state_bytes`: of the recurrent layers, for every slot and every snapshot."""
    total = need.total + cache_bytes + state_bytes
    states = f"{_gb(state_bytes)} of recurrent states, " if state_bytes else ""
    parts = f"{_gb(need.weights)} of weights, {_gb(cache_bytes)} of KV cache, {states}{_gb(need.working)} to work"
    if free is not None and total > free:
        raise ModelNotSupported(
            f"kv_cache_tokens: {cache_tokens} tokens do not fit: the start takes {parts}, and {_gb(free)} are "
            "free; lower kv_cache_tokens, max_model_len or max_batch_size"
        )
    left = "free memory is not known" if free is None else f"{_gb(free)} are free"
    log.info("the start takes %s: %s; %s", _gb(total), parts, left)


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
