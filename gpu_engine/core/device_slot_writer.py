"""Writes the slots of a device: into pinned twins of the slot buffers, copied in the stream's order.

The copies are enqueued after the steps in flight, so the previous owner's step is over before the next owner's numbers
arrive, and they arrive before any of its own steps. Invariant: a twin's slot is rewritten only after its last copy
has run. Not responsible for: the values (see running.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.processors import ProcessorUse, captured_together
from gpu_engine.api.request import Request
from gpu_engine.core.running import RunningSequence, SlotWriter
from gpu_engine.step.buffers import SlotBuffers
from gpu_engine.step.processing.captured import CapturedSlots
from gpu_engine.step.stream import Event, Stream
from kernels.accept import SlotParams
from kernels.cuda.row_state import SlotBiases, SlotRows

Buffers = TypeVar("Buffers", SlotBuffers, SlotParams, SlotBiases, CapturedSlots)

_PER_SLOT = ("length_S", "num_drafts_S", "draft_limit_S", "jump_forward_limit_S", "done_S", "posted_S")
"""Fields of `SlotBuffers` with one number a slot, written when a sequence gets the slot."""


def pinned_twin(buffers: Buffers, stream: Stream) -> Buffers:
    """Return buffers of the same shapes and dtypes in pinned host memory."""

    def twin(value: Any) -> Any:
        if is_dataclass(value):
            return pinned_twin(value, stream)  # type: ignore[type-var]
        if value is None:
            return None
        return stream.pinned(value.numel() * value.element_size()).view(value.dtype).view(value.shape)

    return type(buffers)(**{field.name: twin(getattr(buffers, field.name)) for field in fields(buffers)})


@dataclass(slots=True)
class _Copied:
    """An event after the last copy out of a slot's twin."""

    event: Event
    used: bool = False


class DeviceSlotWriter(SlotWriter):
    """`slot` is the pinned twin, `buffers` are on the device. Used by the engine thread, with the stream current."""

    def __init__(
        self,
        stream: Stream,
        device: SlotBuffers,
        rows: SlotRows,
        processing: CapturedSlots | None = None,
        *,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        num_drafts: int,
        adapters: bool = False,
    ) -> None:
        twin = pinned_twin(device, stream)
        super().__init__(
            twin, max_model_len=max_model_len, eos_token_ids=eos_token_ids, num_drafts=num_drafts, adapters=adapters
        )
        self._per_slot = (*_PER_SLOT, "adapter_S") if adapters else _PER_SLOT
        self.buffers, self._stream, self._rows = device, stream, rows
        S, max_rules = rows.rules_SX.shape
        self._rules_SX = stream.pinned(4 * S * max_rules).view(torch.int32).view(S, max_rules)
        self._biases = pinned_twin(rows.biases, stream)
        self._processing = processing
        self._pinned_processing = None if processing is None else pinned_twin(processing, stream)
        self._captured: set[int] = set()
        """Slots of which captured logits processors change rows."""
        self._copied = [_Copied(stream.event()) for _ in range(S)]
        self._pages_copied: set[int] = set()
        """Slots of which a row of the page table was copied since they were assigned."""

    def assign(self, sequence: RunningSequence) -> None:
        """Enqueue the history and parameters of a sequence that just got its slot."""
        s = sequence.slot
        if self._copied[s].used:
            self._copied[s].event.wait()
        self._pages_copied.discard(s)
        super().assign(sequence)
        request, count = sequence.request, sequence.length
        self._copy(self.buffers.history_SL[s, :count], self.slot.history_SL[s, :count])
        for name in self._per_slot:
            self._copy_one(getattr(self.buffers, name), getattr(self.slot, name), s)
        for field in fields(SlotParams):
            self._copy_one(getattr(self.buffers.params, field.name), getattr(self.slot.params, field.name), s)
        rules = self._rules_of(request)
        self._rules_SX[s, : len(rules)] = rules
        self._stream.kernel(self._rows.write_rules, s, self._rules_SX[s, : len(rules)])
        self._write_biases(s, request.sampling.logit_bias)
        if self._processing is not None and self._pinned_processing is not None:
            self._write_processors(s, request.logits_processors, self._processing, self._pinned_processing)
        # Penalties leave the virtual tokens of a prompt adapter out: their ids come after the vocabulary.
        virtual = request.num_virtual_tokens
        seen = self.buffers.history_SL[s, virtual:count]
        self._stream.kernel(self._rows.count_seen, s, seen, len(request.prompt_ids) - virtual)
        self._mark(s)

    def _write_biases(self, slot: int, biases: tuple[tuple[int, float], ...]) -> None:
        pinned, count = self._biases, len(biases)
        if count == 0 == int(pinned.num_S[slot]):
            return  # as before
        pinned.num_S[slot] = count
        ids, values = pinned.ids_SX[slot, :count], pinned.values_SX[slot, :count]
        ids[:] = torch.tensor([token for token, _ in biases], dtype=torch.int32)
        values[:] = torch.tensor([bias for _, bias in biases], dtype=torch.float32)
        self._stream.kernel(self._rows.biases.write, slot, ids, values)

    def _write_processors(
        self, slot: int, uses: tuple[ProcessorUse, ...], device: CapturedSlots, pinned: CapturedSlots
    ) -> None:
        captured = uses if captured_together(uses) else ()
        if not captured and slot not in self._captured:
            return  # as before
        pinned.on_SC[slot] = False
        for use in captured:
            first, numbers = use.loaded.first_argument, torch.tensor([*use.arguments], dtype=torch.float64)
            pinned.on_SC[slot, use.loaded.column] = True
            pinned.arguments_SA[slot, first : first + len(numbers)] = numbers
        (self._captured.add if captured else self._captured.discard)(slot)
        self._copy(device.on_SC[slot], pinned.on_SC[slot])
        self._copy(device.arguments_SA[slot], pinned.arguments_SA[slot])

    def bind(self, sequence: RunningSequence, *, drafts: bool = True) -> None:
        """See `SlotWriter.bind`; enqueues."""
        self._stream.kernel(self._write_posted, sequence.slot, len(sequence.answer))
        if not drafts:
            self._stream.kernel(self._end_drafts, sequence.slot)

    def _extend(self, slot: int, length: int, token: int) -> None:
        self._stream.kernel(super()._extend, slot, length, token)

    def _fork(self, source: int, target: int, length: int) -> None:
        self._stream.kernel(super()._fork, source, target, length)

    def check(self, request: Request) -> None:
        """Raise InvalidRequest when stops and bans do not fit into a slot's rules."""
        count, room = len(self._rules_of(request)), self._rows.rules_SX.shape[1]
        if count > room:
            raise InvalidRequest(
                "sampling.bad_words",
                f"with stop_token_ids and bad_token_ids makes rules of {count} numbers, at most {room} are allowed",
            )

    def write_pages(self, sequence: RunningSequence) -> None:
        """Enqueue the entries of the page table that are new. If all are, first wait for earlier copies of the row."""
        if not sequence.pages_written and sequence.slot in self._pages_copied:
            self._copied[sequence.slot].event.wait()
        end = self._write_pages(sequence) and sequence.pages_written
        if end:
            self._pages_copied.add(sequence.slot)
            # The whole row up to here: earlier entries do not change.
            self._copy(self.buffers.page_table_SN[sequence.slot, :end], self.slot.page_table_SN[sequence.slot, :end])
            self._mark(sequence.slot)

    def _write_posted(self, slot: int, count: int) -> None:
        self.buffers.posted_S[slot].fill_(count)

    def _end_drafts(self, slot: int) -> None:
        for limit_S in (self.buffers.num_drafts_S, self.buffers.draft_limit_S, self.buffers.jump_forward_limit_S):
            limit_S[slot].fill_(0)

    def _copy_one(self, target_S: torch.Tensor, source_S: torch.Tensor, slot: int) -> None:
        self._copy(target_S[slot : slot + 1], source_S[slot : slot + 1])

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._stream.copy(target, source)

    def _mark(self, slot: int) -> None:
        self._copied[slot].event.mark()
        self._copied[slot].used = True

    def __repr__(self) -> str:
        return f"<DeviceSlotWriter of {len(self._copied)} slots on {self._stream.device}>"
