"""Prefill that also returns the log-probability of each token of a prompt, a part of one prompt at a time.

The logits of a part are used up by the launch that computes them, so their memory is bounded by `SCORED_ROWS`. Results
travel through a small ring of pinned memory, as those of steps do. Invariant: keys and values are those of any other
prefill, and on a device every launch has the one shape that was warmed up. Not responsible for: the choice of parts
(see core/scheduler.py), other prefills (see core/prefill_graphs.py).

Shapes: P rows of a launch, N rows of a prompt, M alternatives.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch

from gpu_engine.api.prefill_shapes import padded
from gpu_engine.api.request import PromptLogprobs
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from gpu_engine.model.states import SequenceStates
from gpu_engine.step.buffers import SlotBuffers
from gpu_engine.step.launches import StepLaunches
from gpu_engine.step.program import Drafter
from gpu_engine.step.prompt_rows import Chunks, Hidden
from gpu_engine.step.stream import Event, Stream
from kernels.logprobs import RowLogprobs
from kernels.paged_attention import KVPages

SCORED_ROWS = 64
"""The most tokens of a prompt whose logits exist at once."""
_ENTRIES = 3


@dataclass(slots=True)
class _Entry:
    """Pinned memory of one launch, after an event."""

    numbers: torch.Tensor
    """int32 [4]: slot, start, end, alternatives."""
    logprob_P: torch.Tensor
    top_ids_PM: torch.Tensor
    top_logprobs_PM: torch.Tensor
    event: Event
    owner: Hashable | None = None
    """None: there is nothing to read."""
    used: bool = False


class PromptScorer:
    """Used only by the engine thread, with the stream current.

    Args:
        stream: where the launches are enqueued.
        launches: of the stream's device.
        model: the target, on that device.
        pages: its cache, which the steps own.
        drafter: sees the same tokens.
        slot: buffers on the device; the last slot is spare, for the warm-up.
        states: of the model's recurrent layers; None: it has none.
    """

    def __init__(
        self,
        stream: Stream,
        launches: StepLaunches,
        model: LoadedModel,
        pages: list[KVPages],
        drafter: Drafter,
        slot: SlotBuffers,
        states: SequenceStates | None = None,
    ) -> None:
        self._stream, self._launches, self._model, self._pages = stream, launches, model, pages
        self._drafter, self._slot, self._states = drafter, slot, states
        self._numbers = torch.zeros(4, dtype=torch.int32, device=stream.device)
        self._rows = RowLogprobs.allocate(SCORED_ROWS, model.vocab_size, stream.device)
        self._entries = [self._entry() for _ in range(_ENTRIES)]
        self._next = 0
        self._parts: dict[Hashable, list[PromptLogprobs]] = {}

    def launch(self, owner: Hashable, slot: int, start: int, end: int, wanted: int) -> None:
        """Enqueue filling the caches with tokens [start, end) of a slot, and the results of the tokens after each.

        `end` is at most the last token of the prompt, and `wanted` the alternatives of each token. The slot's row of
        the page table is up to date.
        """
        assert 0 < end - start <= SCORED_ROWS, (start, end)
        entry = self._launch(slot, start, end, wanted)
        entry.owner = owner
        self._parts.setdefault(owner, [])

    def take(self, owner: Hashable) -> PromptLogprobs:
        """Wait for the owner's launches, and return their results in their order; none, where there was no launch."""
        for i in range(_ENTRIES):
            self._drain(self._entries[(self._next + i) % _ENTRIES])
        parts = self._parts.pop(owner, [])
        if not parts:
            return PromptLogprobs(np.zeros(0, np.float32), np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))
        return PromptLogprobs(
            np.concatenate([part.logprob_N for part in parts]),
            np.concatenate([part.top_ids_NM for part in parts]),
            np.concatenate([part.top_logprobs_NM for part in parts]),
        )

    def drop(self, owner: Hashable) -> None:
        """Forget the owner's results, also those of launches that run."""
        self._parts.pop(owner, None)
        for entry in self._entries:
            if entry.owner == owner:
                entry.owner = None

    def warm_up(self) -> None:
        """Run the shape of a device once, over page 0, which no sequence owns yet."""
        self._launch(len(self._slot.length_S) - 1, 0, min(SCORED_ROWS, self._slot.history_SL.shape[1] - 1), 1)

    def _launch(self, slot: int, start: int, end: int, wanted: int) -> _Entry:
        entry = self._entries[self._next]
        self._next = (self._next + 1) % _ENTRIES
        self._drain(entry)
        if entry.used:  # also where nothing is to be read: the numbers may not be copied yet
            entry.event.wait()
        entry.numbers[:] = torch.tensor([slot, start, end, wanted], dtype=torch.int32)
        length = padded(end - start) if self._stream.runs_at_once else SCORED_ROWS
        self._stream.copy(self._numbers, entry.numbers)
        self._stream.kernel(self._score, length)
        for pinned, result in (
            (entry.logprob_P, self._rows.logprob_N),
            (entry.top_ids_PM, self._rows.top_ids_NM),
            (entry.top_logprobs_PM, self._rows.top_logprobs_NM),
        ):
            self._stream.copy(pinned, result)
        entry.event.mark()
        entry.used = True
        return entry

    @torch.no_grad()
    def _score(self, length: int) -> None:
        place_1, start_1, end_1, wanted_1 = self._numbers.split(1)
        chunks = Chunks.cut(self._slot, place_1.long(), start_1, end_1, length)
        positions_BP, hidden = chunks.positions_BP, Hidden(dict.fromkeys(self._drafter.layers))
        ids_BP = torch.where(positions_BP < 0, 0, chunks.ids_BP()).long()
        context = AttentionContext(self._pages, chunks.page_table_BN, positions_BP, hidden=hidden)
        if self._model.adapters is not None:
            context.adapters_B = chunks.adapters_B
        if self._states is not None:
            context.recurrent = chunks.recurrent(self._states)
        logits_PV = self._model.logits(ids_BP, context)
        rows = self._rows
        tokens_P = chunks.ids_BP(1)[0]
        if self._model.adapters is not None:  # the ids of virtual tokens have no logits
            tokens_P = tokens_P.clamp(max=self._model.vocab_size - 1)
        rows.tokens_N[:length] = tokens_P
        torch.sub(end_1, start_1, out=rows.count_1)
        rows.wanted_1.copy_(wanted_1)
        self._launches.row_logprobs(logits_PV, rows)
        self._drafter.prefill(chunks, hidden)

    def _drain(self, entry: _Entry) -> None:
        """Wait for an entry that has an owner, and append its results to the owner's."""
        if entry.owner is None:
            return
        entry.event.wait()
        owner, entry.owner = entry.owner, None
        _, start, end, wanted = entry.numbers.tolist()
        count = end - start
        self._parts[owner].append(
            PromptLogprobs(
                entry.logprob_P[:count].numpy().copy(),
                entry.top_ids_PM[:count, :wanted].numpy().copy(),
                entry.top_logprobs_PM[:count, :wanted].numpy().copy(),
            )
        )

    def _entry(self) -> _Entry:
        def pinned(result: torch.Tensor) -> torch.Tensor:
            return self._stream.pinned(4 * result.numel()).view(result.dtype).view(result.shape)

        rows = self._rows
        results = (pinned(rows.logprob_N), pinned(rows.top_ids_NM), pinned(rows.top_logprobs_NM))
        return _Entry(pinned(self._numbers), *results, self._stream.event())

    def __repr__(self) -> str:
        return f"<PromptScorer of {SCORED_ROWS} rows, {len(self._parts)} prompts>"
