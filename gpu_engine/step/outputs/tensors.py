"""Tensors of the model at tokens that a sequence has already, from a separate forward between steps.

The forward of some rows reads the keys and values before them from the sequence's pages. Its own keys and values
go to scratch pages, which no sequence has. Invariant: nothing that a step or another sequence reads is written, so the
tokens are the same with and without. On a device every forward has the one shape that was warmed up. Not responsible
for: which rows are wanted, and when (see core/events/tensor_streams.py).

Shapes: P rows of a forward, N pages of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gpu_engine.api.output_tensors import LOGITS, MAX_ROW_BYTES
from gpu_engine.api.prefill_shapes import padded
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from gpu_engine.model.outputs import compute
from gpu_engine.step.buffers import SlotBuffers
from gpu_engine.step.prompt_rows import Chunks
from gpu_engine.step.stream import Event, Stream
from kernels.paged_attention import KVPages

_ENTRIES = 2
_ROWS = 64

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def forward_rows(page_size: int) -> int:
    """Return P, the most rows of a forward: those of two pages at least, since a forward begins where a page does."""
    return max(_ROWS, 2 * page_size)


def scratch_pages(page_size: int) -> int:
    """Return how many pages the forwards need next to those of the sequences."""
    return forward_rows(page_size) // page_size


@dataclass(slots=True, eq=False)
class _Entry:
    """Pinned memory of one forward's results, after an event."""

    numbers: torch.Tensor
    """int32 [3]: slot, first position, end."""
    results: torch.Tensor
    """uint8 [max_bytes]."""
    event: Event
    free: bool = True
    marked: bool = False


@dataclass(slots=True, eq=False)
class Piece:
    """Rows [start, end) of some outputs, which a forward computes. Its memory is free after `take` or `drop`."""

    start: int
    end: int
    parts: dict[str, int]
    """Bytes of a row by source, in the order of the results."""
    _entry: _Entry = field(repr=False)

    def ready(self) -> bool:
        """Return whether `take` would not wait. Raises when the device failed."""
        return self._entry.event.reached()

    def take(self) -> dict[str, Bytes]:
        """Wait for the rows, and return a copy of them, [end - start, bytes of a row] by source."""
        self._entry.event.wait()
        rows: dict[str, Bytes] = {}
        count, at = self.end - self.start, 0
        for source, size in self.parts.items():
            rows[source] = self._entry.results[at : at + count * size].view(count, size).numpy().copy()
            at += count * size
        self._entry.free = True
        return rows

    def drop(self) -> None:
        """Forget the rows, also of a forward that runs."""
        self._entry.free = True


class TensorOutputs:
    """Used only by the engine thread, with the stream current.

    Args:
        stream: where the forwards are enqueued.
        model: the target, on the stream's device.
        pages: its cache, which the steps own, with `scratch_pages` pages after those of the sequences.
        slot: buffers on the device; the last slot is spare, for the warm-up.
        page_size: tokens of a page.
        max_bytes: of the results of one forward.
    """

    def __init__(
        self,
        stream: Stream,
        model: LoadedModel,
        pages: list[KVPages],
        slot: SlotBuffers,
        page_size: int,
        max_bytes: int = MAX_ROW_BYTES,
    ) -> None:
        self._max_bytes = max_bytes
        self._stream, self._model, self._pages, self._slot = stream, model, pages, slot
        self._page_size, self._rows = page_size, forward_rows(page_size)
        self._scratch = len(pages[0].v) - scratch_pages(page_size)
        """The first scratch page."""
        self._numbers = torch.zeros(3, dtype=torch.int32, device=stream.device)
        self._results: torch.Tensor | None = None
        """uint8 [max_bytes] on the device: the results of the forward that runs."""
        self._entries: list[_Entry] = []
        self.forwards = 0
        """Number of forwards so far, the warm-up included."""

    def launch(self, slot: int, start: int, end: int, parts: dict[str, int]) -> Piece | None:
        """Enqueue computing rows of positions [start, end), or of fewer where they do not fit into one forward.

        `parts` has the bytes of a row by source, together at most `max_bytes`. The slot's history has the tokens up
        to `end`, its row of the page table is up to date, and its pages have the keys up to the page of `start`.
        Returns None while the results of earlier forwards take all memory.
        """
        self._allocate()
        entry = next((entry for entry in self._entries if entry.free), None)
        if entry is None:
            return None
        if entry.marked:  # a forward that was dropped may still write there
            entry.event.wait()
        first = start - start % self._page_size
        end = min(end, first + self._rows, start + self._max_bytes // sum(parts.values()))
        entry.numbers[:] = torch.tensor([slot, first, end], dtype=torch.int32)
        length = padded(end - first) if self._stream.runs_at_once else self._rows
        self._stream.copy(self._numbers, entry.numbers)
        self._stream.kernel(self._compute, length, start - first, end - start, parts)
        size = (end - start) * sum(parts.values())
        assert self._results is not None
        self._stream.copy(entry.results[:size], self._results[:size])
        entry.event.mark()
        entry.free, entry.marked = False, True
        self.forwards += 1
        return Piece(start, end, parts, entry)

    def warm_up(self) -> None:
        """Allocate, and run the shape of a device once over scratch pages, through both of the model's forwards."""
        outputs, room = self._model.outputs, self._slot.history_SL.shape[1]
        if not outputs:
            return  # a model with recurrent layers
        parts = {name: outputs[name].row_bytes for name in (LOGITS, list(outputs)[-1])}  # the last one is a module
        piece = self.launch(len(self._slot.length_S) - 1, 0, min(self._rows, room), parts)
        assert piece is not None
        piece.drop()

    def _allocate(self) -> None:
        """Allocate at the first use on a CPU, and in the warm-up on a device, where it may wait for the device."""
        if self._results is not None:
            return
        self._results = torch.zeros(self._max_bytes, dtype=torch.uint8, device=self._stream.device)
        for _ in range(_ENTRIES):
            numbers = self._stream.pinned(4 * 3).view(torch.int32)
            self._entries.append(_Entry(numbers, self._stream.pinned(self._max_bytes), self._stream.event()))

    @torch.no_grad()
    def _compute(self, length: int, skip: int, count: int, parts: dict[str, int]) -> None:
        place_1, start_1, end_1 = self._numbers.split(1)
        chunks = Chunks.cut(self._slot, place_1.long(), start_1, end_1, length)
        positions_1P = chunks.positions_BP
        ids_1P = torch.where(positions_1P < 0, 0, chunks.ids_BP()).long()
        context = AttentionContext(self._pages, self._table(chunks.page_table_BN, start_1), positions_1P)
        if self._model.adapters is not None:
            context.adapters_B = chunks.adapters_B
        found = compute(self._model, tuple(parts), ids_1P, context)
        assert self._results is not None
        at = 0
        for source, size in parts.items():
            rows = found[source][skip : skip + count].reshape(-1).view(torch.uint8)
            assert len(rows) == count * size, (source, rows.shape)
            self._results[at : at + len(rows)].copy_(rows)
            at += len(rows)

    def _table(self, table_1N: torch.Tensor, start_1: torch.Tensor) -> torch.Tensor:
        """Return the page table with scratch pages from the page of `start_1`, which begins there, on."""
        columns_N = torch.arange(table_1N.shape[1], dtype=torch.int32, device=table_1N.device)
        behind_N = columns_N - torch.div(start_1, self._page_size, rounding_mode="floor")
        is_scratch_N = (behind_N >= 0) & (behind_N < scratch_pages(self._page_size))
        return torch.where(is_scratch_N, behind_N + self._scratch, table_1N).contiguous()

    def __repr__(self) -> str:
        busy = sum(not entry.free for entry in self._entries)
        return f"<TensorOutputs of {self._rows} rows, {busy} pieces unread, {self.forwards} forwards>"
