"""The memory of one layer's paged KV cache, in the layout of its device.

Invariant: a page has the same index in `k`, `v` and their scales.

Not responsible for: the owners of pages (see gpu_engine/core/kv_cache.py), attention over the cache (see
paged_attention.py).

Shapes: Hkv KV heads, D head size, T tokens per page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

MAX_WIDTH = {"cpu": 576, "cuda": 256}
"""The most channels of a head that attention takes, by type of device. On a GPU the sums of a tile of queries are in
registers, and those of 64 queries with 512 channels would fill them."""


SCALE = torch.float32
"""The dtype of the scales next to keys and values of 8 bits."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""The dtypes of pages on a CPU, as paged_attention.h numbers them."""


class KVHeads(NamedTuple):
    """The heads of one layer's keys and values."""

    number: int
    width: int
    """Channels of a head."""
    values: int = 0
    """Channels of a value that is the first part of its key, and so has no memory of its own; 0: values are apart."""


def bytes_of_token(layers: Iterable[KVHeads], dtype: torch.dtype) -> int:
    """Return the bytes of a token's keys and values in some layers."""
    scale = SCALE.itemsize if dtype is torch.int8 else 0
    parts = ((1 if heads.values else 2) * heads.number * (heads.width * dtype.itemsize + scale) for heads in layers)
    return sum(parts)


@dataclass(frozen=True, slots=True)
class KVPages:
    """One layer's cache, in the model's dtype, or on a CPU in int8 with a scale for each token of a head.

    On a CPU the keys are channel-major, so that a vector holds neighbouring tokens; on a GPU they are token-major like
    the values, so that a token's key is one run of bytes. Keys that begin with their values are token-major everywhere:
    `k` and its scales are `v` and its scales.
    """

    k: torch.Tensor
    """[num_pages, Hkv, D, T], or [num_pages, Hkv, T, D] when `token_major`."""
    v: torch.Tensor
    """[num_pages, Hkv, T, D]."""
    token_major: bool = False
    """How `k` is laid out."""
    k_scales: torch.Tensor | None = None
    """Of int8 keys, float32 [num_pages, Hkv, T]; else None."""
    v_scales: torch.Tensor | None = None
    """The same of the values."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All memory of the layer; the first dimension is the page."""
        parts = {id(part): part for part in (self.k, self.v, self.k_scales, self.v_scales) if part is not None}
        return tuple(parts.values())

    @property
    def joined(self) -> bool:
        """True: the values are the first channels of the keys."""
        return self.k is self.v

    @property
    def kind(self) -> int:
        """The number that the native attention gives to the dtype."""
        return KINDS[self.v.dtype]

    @property
    def scales(self) -> tuple[int | None, int | None]:
        """Addresses of the scales, for the native attention."""
        k, v = self.k_scales, self.v_scales
        return None if k is None else k.data_ptr(), None if v is None else v.data_ptr()

    @property
    def k_NHTD(self) -> torch.Tensor:
        """The keys token by token, a view."""
        return self.k if self.token_major or self.joined else self.k.transpose(2, 3)

    @classmethod
    def allocate_layers(
        cls,
        layers: Sequence[KVHeads],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        token_major: bool | None = None,
    ) -> list[KVPages]:
        """Return the zeroed pages of some layers, as `allocate` does for one.

        Layers with equal heads are one allocation: on a CPU a large one is not resident until it is written
        (`untouched_zeros`).
        """
        parts: dict[KVHeads, Iterator[KVPages]] = {}
        for heads in dict.fromkeys(layers):
            sizes = (layers.count(heads) * num_pages, heads.number, heads.width, page_size)
            whole = cls.allocate(*sizes, dtype, device, token_major, joined=heads.values > 0)
            parts[heads] = iter(whole.split(num_pages))
        return [next(parts[heads]) for heads in layers]

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        token_major: bool | None = None,
        *,
        joined: bool = False,
    ) -> KVPages:
        """Return zeroed pages, in the layout of the device unless it is named. `joined`: see `KVPages.joined`."""
        by_token, by_channel = (
            (num_pages, num_kv_heads, page_size, head_dim),
            (num_pages, num_kv_heads, head_dim, page_size),
        )
        v = untouched_zeros(by_token, dtype, device)
        if joined:
            scales = untouched_zeros(by_token[:3], SCALE, device) if dtype is torch.int8 else None
            return cls(v, v, k_scales=scales, v_scales=scales)
        if device.type != "cpu" if token_major is None else token_major:
            assert dtype is not torch.int8, "int8 pages exist only on a CPU"
            return cls(untouched_zeros(by_token, dtype, device), v, token_major=True)
        k = untouched_zeros(by_channel, dtype, device)
        if dtype is not torch.int8:
            return cls(k, v)
        k_scales, v_scales = (untouched_zeros(by_token[:3], SCALE, device) for _ in range(2))
        return cls(k, v, k_scales=k_scales, v_scales=v_scales)

    def split(self, num_pages: int) -> list[KVPages]:
        """Return the parts of so many pages, views."""
        scales = (
            [None] * (len(self.v) // num_pages) if part is None else part.split(num_pages)
            for part in (self.k_scales, self.v_scales)
        )
        parts = zip(self.k.split(num_pages), self.v.split(num_pages), *scales, strict=True)
        if self.joined:
            return [KVPages(v, v, k_scales=v_scales, v_scales=v_scales) for _, v, _, v_scales in parts]
        return [KVPages(k, v, self.token_major, k_scales, v_scales) for k, v, k_scales, v_scales in parts]


def copy_page(layers: list[KVPages], source: int, target: int) -> None:
    """Copy the keys and values of one page into another, in every layer."""
    for layer in layers:
        for part in layer.tensors:
            part[target].copy_(part[source])


def check_limits(window: int, chunk: int, sinks_H: torch.Tensor | None, num_heads: int) -> None:
    """Assert what an attention over the pages takes next to its tensors."""
    assert window >= 0 <= chunk, (window, chunk)
    assert not (window and chunk), (window, chunk)
    if sinks_H is not None:
        assert sinks_H.shape == (num_heads,), (sinks_H.shape, num_heads)
        assert sinks_H.dtype == torch.float32, sinks_H.dtype
        assert sinks_H.is_contiguous()


_ALIGNMENT = 64
"""Bytes: a vector never crosses two cache lines."""


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU the system's own zero pages: `torch.zeros` writes them, and so makes them resident."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8))
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).view(shape)
