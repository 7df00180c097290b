"""Carries a step to another device and its drafts back, for a draft model on another GPU than the target's.

`DraftDeviceReplica` has copies of the step's buffers on the draft model's device. After a step, a stream of the
target's device packs the values of each lane that drafting reads (numbers, parameters, rules, and the whole text) and
copies them over. The draft graph unpacks them, drafts, and packs its drafts, which come back the same way. For
penalties the replica counts the tokens of a text anew: a text is smaller than its counts, which are one for each token
of the vocabulary.

Invariant: a kernel touches the memory of only one device, and only copies cross. The host waits for no copy: events
order the streams of the steps, of the copies and of the draft model. Not responsible for: drafting (see
decoupled_graphs.py).

Shapes: S slots, B lanes of a step, R rows a slot, L tokens of history, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch

from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.launches import place_of
from gpu_engine.step.stream import Event, Graph, Stream
from kernels.accept import StepTensors
from kernels.cuda.row_state import SEEN, DeviceRows, RowScratch, SlotBiases, SlotRows

Buffers = TypeVar("Buffers", SlotBuffers, LaneBuffers, SlotBiases)

_ALIGNED = 16
"""Bytes at which a part of a parcel begins."""
_WARM_UPS = 2
"""Libraries choose at the first run and allocate at the second."""


class _Part(NamedTuple):
    """A tensor that has a twin."""

    own: torch.Tensor
    twin: torch.Tensor
    by_slot: bool
    """A row is a slot's; otherwise a lane's."""


class _Parcel:
    """Memory on two devices for one row of each part, lane by lane, so that one copy carries them all.

    Args:
        rows: dtype and shape of a row of each part.
        num_lanes: the largest batch.
        source: device that packs.
        target: device that unpacks.
    """

    def __init__(self, rows: list[torch.Tensor], num_lanes: int, source: torch.device, target: torch.device) -> None:
        self._rows = [(row.dtype, tuple(row.shape[1:]), row.element_size()) for row in rows]
        size = self.num_bytes(num_lanes)
        self.packed, self.received = (torch.zeros(size, dtype=torch.uint8, device=at) for at in (source, target))

    def num_bytes(self, num_lanes: int) -> int:
        """Return the bytes of so many lanes."""
        return sum(self._sizes(num_lanes))

    def views(self, memory: torch.Tensor, num_lanes: int) -> Iterator[torch.Tensor]:
        """Yield each part's [B, ...] of `packed` or `received`."""
        at = 0
        for (dtype, shape, item), size in zip(self._rows, self._sizes(num_lanes), strict=True):
            used = item * num_lanes * prod(shape)
            yield memory[at : at + used].view(dtype).view(num_lanes, *shape)
            at += size

    def _sizes(self, num_lanes: int) -> Iterator[int]:
        for _, shape, item in self._rows:
            yield -(-item * num_lanes * prod(shape) // _ALIGNED) * _ALIGNED

    def carry(self, stream: Stream, num_lanes: int) -> None:
        """Enqueue the copy of so many lanes."""
        count = self.num_bytes(num_lanes)
        stream.copy(self.received[:count], self.packed[:count])


class DraftDeviceReplica:
    """The buffers of the step on another device. Used only by the engine thread.

    Args:
        stream: of the steps.
        slot: of the step program, as are the lanes.
        rows: of the steps' sampling.
        device: of the draft model.
    """

    def __init__(
        self, stream: Stream, slot: SlotBuffers, lane: LaneBuffers, rows: SlotRows, device: torch.device
    ) -> None:
        self.device, self._own_slot, self._own_lane = device, slot, lane
        self.slot, self.lane = twin_of(slot, device), twin_of(lane, device)
        """Writer: the draft graph."""
        S, R, W = rows.masks_SRW.shape
        num_lanes, vocab_size = len(lane.slots_B), rows.seen_SV.shape[1]
        # Every row has the kind ALL, so no mask is read.
        masks_SRW = torch.zeros(1, 1, W, dtype=rows.masks_SRW.dtype, device=device).expand(S, R, W)
        rules_SX, seen_SV = (torch.zeros_like(each, device=device) for each in (rows.rules_SX, rows.seen_SV))
        self._rows = SlotRows(masks_SRW, rules_SX, seen_SV, self.slot.done_S, twin_of(rows.biases, device))
        self._scratch = RowScratch.allocate(num_lanes, vocab_size, device)
        self._parts = [*self._lane_parts(), *self._slot_parts(rows)]
        self._there = _Parcel([part.own for part in self._parts], num_lanes, stream.device, device)
        self._back = _Parcel([slot.drafts_SR, slot.num_drafts_S], num_lanes, device, stream.device)
        self._carrier = stream.beside()
        """On the target's device, so that a step's outputs do not wait for the way of its drafts."""
        self._far_carrier = stream.beside(device)
        """The other end of each copy. torch orders a copy between two devices by the current streams of both. On the
        draft device that would otherwise be the default stream, on which a model may be loading, and the stream of the
        drafts reads texts after it has drafted."""
        self._sent, self._taken = self._carrier.event(), self._carrier.event()
        self._packs: dict[int, Graph] = {}
        self._takes: dict[int, Graph] = {}
        self._batches: dict[int, StepBatch] = {}

    @property
    def memory(self) -> tuple[object, ...]:
        """What it holds, on both devices: tensors, and dataclasses of tensors."""
        parcels = (each for parcel in (self._there, self._back) for each in (parcel.packed, parcel.received))
        return self.slot, self.lane, self._rows, self._scratch, *parcels

    def _lane_parts(self) -> Iterator[_Part]:
        own, twin = self._own_lane, self.lane
        for name in ("slots_B", "slot_gens_B", "drafting_B", "num_jump_forward_B"):
            yield _Part(getattr(own, name), getattr(twin, name), by_slot=False)
        yield _Part(own.result.num_emitted_B, twin.result.num_emitted_B, by_slot=False)

    def _slot_parts(self, own_rows: SlotRows) -> Iterator[_Part]:
        own, twin, rows = self._own_slot, self.slot, self._rows
        pairs: list[tuple[Any, Any]] = [(own_rows.rules_SX, rows.rules_SX)]
        for name in ("length_S", "history_SL", "drafts_SR", "num_drafts_S", "draft_limit_S", "done_S"):
            pairs.append((getattr(own, name), getattr(twin, name)))
        for mine, its in ((own.params, twin.params), (own_rows.biases, rows.biases)):
            pairs += ((getattr(mine, field.name), getattr(its, field.name)) for field in fields(mine))
        for mine, its in pairs:
            yield _Part(mine, its, by_slot=True)

    # -- before the first step ----------------------------------------------------------------------------------------

    def tensors(self, batch: StepBatch, step: StepTensors) -> tuple[StepBatch, StepTensors]:
        """Return the twins of a step's batch and tensors."""
        assert step.device is not None, "the tensors are a GPU's"
        lane, slot, B = self.lane, self.slot, batch.num_lanes
        self._batches.setdefault(B, batch)
        twin = replace(
            step,
            slots_B=lane.slots_B[:B],
            drafts_BR=lane.drafts_BR,
            num_drafts_B=lane.num_drafts_B,
            kinds_BR=lane.kinds_BR,
            forced_BR=lane.forced_BR,
            mask_address=self._rows.masks_SRW.data_ptr(),
            mask_strides=(0, 0),
            history_SL=slot.history_SL,
            length_S=slot.length_S,
            params=slot.params,
            result=lane.result,
            device=DeviceRows(self._rows, self._scratch, step.device.filters, logprobs=False),
        )
        return replace(batch, slot=slot, lane=lane), twin

    def capture(self, *, eager: bool) -> None:
        """Run both ways over padding; unless `eager`, capture them. The device is idle, and idle again after it."""
        stream = self._carrier
        with stream.current():
            stream.kernel(pad, self._own_lane)
            for _ in range(_WARM_UPS):
                for batch in self._batches.values():
                    stream.kernel(self._pack, batch)
                    stream.kernel(self._take, batch)
            stream.synchronize()
            if eager:
                return
            for num_lanes, batch in sorted(self._batches.items(), reverse=True):
                with stream.capture() as self._packs[num_lanes]:
                    stream.kernel(self._pack, batch)
                with stream.capture() as self._takes[num_lanes]:
                    stream.kernel(self._take, batch)
            for graph in (*self._packs.values(), *self._takes.values()):
                graph.replay()  # the first replay uploads a graph, which allocates
            stream.synchronize()

    def send_padding(self, num_lanes: int) -> None:
        """Send lanes that have no slot. Waits for the copy; the device is idle."""
        stream = self._carrier
        with stream.current():
            stream.kernel(pad, self._own_lane)
            self._run(self._packs, self._pack, num_lanes)
            self._carry(self._there, num_lanes)
            stream.synchronize()

    # -- after a step ------------------------------------------------------------------------------------------------

    def send(self, num_lanes: int, stepped: Event) -> Event:
        """Enqueue the way there after `stepped`; return an event at its end."""
        stream = self._carrier
        with stream.current():
            stream.after(stepped)
            self._run(self._packs, self._pack, num_lanes)
            self._carry(self._there, num_lanes)
            self._sent.mark()
        return self._sent

    def take(self, num_lanes: int, drafted: Event) -> None:
        """Enqueue the way back after `drafted`."""
        stream = self._carrier
        with stream.current():
            stream.after(drafted)
            self._carry(self._back, num_lanes)
            self._run(self._takes, self._take, num_lanes)
            self._taken.mark()

    @property
    def taken(self) -> Event:
        """The event at the end of the way back."""
        return self._taken

    def _carry(self, parcel: _Parcel, num_lanes: int) -> None:
        """Enqueue a copy. The carrier is the current stream of the target's device."""
        with self._far_carrier.current(), self._carrier.current():
            parcel.carry(self._carrier, num_lanes)

    def _run(self, graphs: Mapping[int, Graph], function: Any, num_lanes: int) -> None:
        if (graph := graphs.get(num_lanes)) is None:
            self._carrier.kernel(function, self._batches[num_lanes])
        else:
            graph.replay()

    def _pack(self, batch: StepBatch) -> None:
        B, place_B = batch.num_lanes, place_of(batch)
        for view, part in zip(self._there.views(self._there.packed, B), self._parts, strict=True):
            view.copy_(part.own[place_B] if part.by_slot else part.own[:B])

    def _take(self, batch: StepBatch) -> None:
        place_B, own = place_of(batch), self._own_slot
        drafts_BR, count_B = self._back.views(self._back.received, batch.num_lanes)
        own.drafts_SR[place_B], own.num_drafts_S[place_B] = drafts_BR, count_B

    # -- kernels of the draft graph -----------------------------------------------------------------------------------

    def unpack(self, batch: StepBatch) -> None:
        """Fill the twins from what was sent. `batch` is a twin."""
        B = batch.num_lanes
        received = list(zip(self._there.views(self._there.received, B), self._parts, strict=True))
        for view, part in received:
            if not part.by_slot:
                part.twin[:B] = view
        place_B = place_of(batch)
        for view, part in received:
            if part.by_slot:
                part.twin[place_B] = view
        self._count(place_B, self._rows.seen_SV)

    def _count(self, place_B: torch.Tensor, seen_SV: torch.Tensor) -> None:
        """Count the tokens of each text, as `SlotRows.count_seen`."""
        slot, V = self.slot, seen_SV.shape[1]
        text_BL = slot.history_SL[place_B]
        at_L = torch.arange(text_BL.shape[1], dtype=torch.int32, device=self.device)
        # Ids after the vocabulary are virtual tokens of a prompt adapter.
        live_BL = (at_L < slot.length_S[place_B][:, None]) & (text_BL >= 0) & (text_BL < V)
        answered_BL = live_BL & (at_L >= slot.params.prompt_length_S[place_B][:, None])
        ids_BL = torch.where(live_BL, text_BL, 0).long()
        zeros_BV = torch.zeros(len(place_B), V, dtype=torch.int32, device=self.device)
        there_BV = zeros_BV.scatter_add(1, ids_BL, live_BL.int()) > 0
        seen_SV[place_B] = zeros_BV.scatter_add(1, ids_BL, answered_BL.int()) + there_BV.int() * SEEN

    def pack_drafts(self, batch: StepBatch) -> None:
        """Put the drafts where the way back begins. `batch` is a twin."""
        place_B, slot = place_of(batch), self.slot
        drafts_BR, count_B = self._back.views(self._back.packed, batch.num_lanes)
        drafts_BR.copy_(slot.drafts_SR[place_B])
        count_B.copy_(slot.num_drafts_S[place_B])

    # -- the end ------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for the carrier."""
        self._carrier.synchronize()

    def close(self) -> None:
        """Wait for the carrier, then destroy the graphs."""
        try:
            self._carrier.synchronize()
        finally:
            for graph in (*self._packs.values(), *self._takes.values()):
                graph.reset()
            self._packs.clear()
            self._takes.clear()

    @property
    def num_graphs(self) -> int:
        """Captured graphs of both ways."""
        return len(self._packs) + len(self._takes)

    def __repr__(self) -> str:
        return f"<DraftDeviceReplica on {self.device} of {len(self._batches)} buckets>"


def pad(lane: LaneBuffers) -> None:
    """Leave no lane a slot."""
    lane.slots_B.fill_(-1)
    lane.drafting_B.fill_(False)


def twin_of(buffers: Buffers, device: torch.device) -> Buffers:
    """Return zeroed buffers of the same shapes and dtypes on another device."""

    def twin(value: Any) -> Any:
        if is_dataclass(value):
            return twin_of(value, device)  # type: ignore[type-var]
        return None if value is None else torch.zeros_like(value, device=device)

    return type(buffers)(**{field.name: twin(getattr(buffers, field.name)) for field in fields(buffers)})
