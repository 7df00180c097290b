"""Copies KV pages between the cache and host memory, on the stream of the steps.

On a device the pages go through a buffer there and pinned memory. Invariant: a copy runs after everything enqueued
before it. Reading waits for the device, so an engine whose steps wait for another process only writes.
`weights_digest` is a part of the format of pages. Two loads of the same files give the same digest. It does not see
kernels and their rounding, which the keys and values of a fixed prompt show (identity.py).

Not responsible for: the owners of pages (see core/kv_cache.py), and when pages are moved (see pages.py).

Shapes: L layers, N pages of the cache, n pages that are moved, E numbers of the keys, or of the values, of a page.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence

import numpy as np
import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.page_transfer import Bytes, PageFormat
from gpu_engine.model.loaded_model import LoadedModel
from gpu_engine.step.stream import Event, Stream
from kernels.kv_pages import KVPages

_SAMPLE = 64
"""Numbers of each tensor that go into the digest."""
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "_attn_implementation")


class PageMover:
    """Used only by the engine thread, with the stream current.

    Args:
        stream: where the copies are enqueued.
        pages: the target's cache, which the steps own; the last page is no sequence's.
        form: the format of these pages.
    """

    def __init__(self, stream: Stream, pages: list[KVPages], form: PageFormat) -> None:
        self._stream, self._pages, self.form = stream, pages, form
        self._staged: torch.Tensor | None = None
        """uint8 [bytes of a piece] on the device."""
        self._host = torch.empty(0, dtype=torch.uint8)
        """Pinned: bytes of a piece."""
        self._numbers_host = torch.empty(0, dtype=torch.int64)
        """Pinned: int64 [n]."""
        self._numbers = torch.empty(0, dtype=torch.int64)
        self._copied: Event = stream.event()
        self._marked = False

    def read(self, pages: Sequence[int]) -> Bytes:
        """Return the bytes of the pages: for each layer their keys, then their values. Waits for the device."""
        size = self._begin(pages)
        staged = self._staged
        assert staged is not None
        self._stream.kernel(self._gather, len(pages))
        self._stream.copy(self._host[:size], staged[:size])
        self._copied.mark()
        self._marked = True
        self._copied.wait()
        return self._host[:size].numpy().copy()

    def write(self, pages: Sequence[int], data: bytes | Bytes) -> None:
        """Write the pages, which no step reads yet; waits only for the write before this one."""
        size = self._begin(pages)
        staged = self._staged
        assert staged is not None
        self._host[:size].numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        self._stream.copy(staged[:size], self._host[:size])
        self._copied.mark()
        self._marked = True
        self._stream.kernel(self._scatter, len(pages))

    def warm_up(self) -> None:
        """Move the last page there and back, so that every kernel is loaded and all memory allocated."""
        last = [len(self._pages[0].v) - 1]
        self.write(last, self.read(last))

    def _begin(self, pages: Sequence[int]) -> int:
        """Write the numbers of the pages; return the bytes of all."""
        assert len(pages) <= self.form.piece_pages, pages
        if self._staged is None:
            self._allocate()
        if self._marked:
            self._copied.wait()
        self._numbers_host[: len(pages)] = torch.tensor(pages, dtype=torch.int64)
        self._stream.copy(self._numbers[: len(pages)], self._numbers_host[: len(pages)])
        return len(pages) * self.form.page_bytes

    def _allocate(self) -> None:
        most = self.form.piece_pages
        self._staged = torch.zeros(most * self.form.page_bytes, dtype=torch.uint8, device=self._stream.device)
        self._numbers = torch.zeros(most, dtype=torch.int64, device=self._stream.device)
        self._host = self._stream.pinned(most * self.form.page_bytes)
        self._numbers_host = self._stream.pinned(8 * most).view(torch.int64)

    def _parts(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return ([N, E] of the cache, [n, E] of the buffer) of each layer's keys and values."""
        assert self._staged is not None
        dtype = self._pages[0].v.dtype
        parts, at = [], 0
        for layer in self._pages:
            for whole in layer.tensors:
                flat = whole.view(len(whole), -1)
                size = count * flat.shape[1] * dtype.itemsize
                parts.append((flat, self._staged[at : at + size].view(dtype).view(count, -1)))
                at += size
        return parts

    @torch.no_grad()
    def _gather(self, count: int) -> None:
        for whole, staged in self._parts(count):
            torch.index_select(whole, 0, self._numbers[:count], out=staged)

    @torch.no_grad()
    def _scatter(self, count: int) -> None:
        for whole, staged in self._parts(count):
            whole.index_copy_(0, self._numbers[:count], staged)

    def __repr__(self) -> str:
        return f"<PageMover of {self.form.piece_pages} pages of {self.form.page_bytes} bytes>"


def page_format(config: EngineConfig, model: LoadedModel, pages: list[KVPages]) -> PageFormat:
    """Return the format of an engine's pages, with only the digest of the weights as its fingerprint."""
    alike = len(set(model.kv_heads)) == 1
    number, width = model.kv_heads[0][:2] if alike else (0, 0)
    layout = "joined" if pages[0].joined else "token-major" if pages[0].token_major else "channel-major"
    return PageFormat(
        fingerprint=weights_digest(model),
        dtype=model.dtype_name,
        page_size=config.page_size,
        layout=layout,
        num_layers=len(model.kv_heads),
        num_kv_heads=number,
        head_dim=width,
        layers=() if alike else tuple((heads.number, heads.width) for heads in model.kv_heads),
    )


def weights_digest(model: LoadedModel) -> str:
    """Return 64 hexadecimal digits: of the configuration, and of name, shape, dtype and a sample of each tensor.

    A sample, so that a large model takes no longer than a small one.
    """
    digest = hashlib.sha256(f"{model.model_type} {model.quantised}".encode())
    config = {name: value for name, value in model.net.config.to_dict().items() if name not in _NOT_THE_MODEL}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    tensors = itertools.chain(model.net.named_parameters(), model.net.named_buffers())
    for name, tensor in sorted(tensors, key=lambda named: str(named[0])):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_sample(tensor))
    return digest.hexdigest()


@torch.no_grad()
def _sample(tensor: torch.Tensor) -> bytes:
    """Return the bytes of up to `_SAMPLE` numbers, evenly spaced."""
    count = tensor.numel()
    if not count:
        return b""
    chosen = torch.linspace(0, count - 1, min(count, _SAMPLE), dtype=torch.float64).long().tolist()
    # Indices a dimension: a tensor that is not contiguous is not copied.
    places = [torch.unravel_index(torch.tensor(at), tensor.shape) for at in chosen] if tensor.dim() else [()]
    return b"".join(tensor[place].reshape(1).cpu().view(torch.uint8).numpy().tobytes() for place in places)
