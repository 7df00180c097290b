"""A second model that drafts apart from the target on a GPU: with its own graphs, pages and stream.

After a step its stream replays the draft graph of the step's bucket: a chain of the model's own K, over the buffers
of the step. The next step waits for it, only by events: the host knows no token, and waits for nothing. What a draft
model lacks of a text, such as a prompt, it reads in another graph while the target's next step runs, a bounded number
of tokens a step; until then the sequence has no drafts but jump-forward tokens. So both models' prompts, the target's
prefix cache, preemption and an exchange of the model need no help from the rest of the engine.

With `draft_device` set it drafts over a `DraftDeviceReplica` of the step's buffers: they cross after the step, and the
drafts cross before the next one.

Order: step, draft graph, next step. The reading graph runs between two draft graphs, next to anything else. It touches
the model's own pages and counters, and of the step's buffers it reads only committed text. Where a slot gets another
sequence meanwhile, the next draft graph sees another `slot_gen`, and forgets what was read.

Invariant: a draft changes no token, and nothing of a slot's earlier sequence is drafted for the next one. Nothing here
reads a value of the device but `most_lacking`, a number that may be a step old and decides only speed. Not
responsible for: a CPU's drafts (see decoupled.py), loading a model (see exchange.py), the steps (see
step/device/graphs.py). Never run on a GPU so far: the tests run it over a recorded stream.

Shapes: S slots with the spare one, B lanes, L tokens of history, K links of the chain, T tokens of a first link, C
lanes of a reading graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from gpu_engine.drafters.chain import ChainDrafter
from gpu_engine.drafters.decoupled import TAIL, DraftModel
from gpu_engine.drafters.draft_device_replica import DraftDeviceReplica, pad
from gpu_engine.drafters.nets import ModelNet
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loaded_model import LoadedModel
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.launches import place_of
from gpu_engine.step.prompt_rows import Chunks, Hidden
from gpu_engine.step.stream import Graph, Stream
from gpu_engine.step.sync import Sync
from kernels.accept import StepTensors

_WARM_UPS = 2
"""Libraries choose at the first run and allocate at the second."""
READ_LANES = 4
"""The most sequences of which one reading graph reads tokens."""


class _Shape(NamedTuple):
    """The shape that a draft graph is captured for."""

    num_lanes: int
    guided: bool
    """The step may have jump-forward tokens."""
    links: int


Steps = Mapping[_Shape, tuple[StepBatch, StepTensors]]


class DecoupledNet(ModelNet):
    """The draft model as the net of a chain, with what it knows of each slot.

    Args:
        draft: the model, on the device of `slot`.
        slot: of the step program, or its twin.
        num_lanes: the largest batch.
        num_links: K.
        catch_up: tokens that one reading graph reads at most.
    """

    def __init__(self, draft: DraftModel, slot: SlotBuffers, num_lanes: int, num_links: int, catch_up: int) -> None:
        super().__init__(draft.model, draft.pages, num_links, draft.d2t_V)
        S, device = len(slot.length_S), slot.length_S.device
        self.draft, self._slot, self.table_SN = draft, slot, draft.table_SN
        self._spare, self._most = S - 1, slot.history_SL.shape[1] - 1

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._gens_S = torch.full((S,), -1, dtype=torch.int32, device=device)
        """The sequence that the rest is about."""
        self._seen_S = ints(S)
        """Tokens from the first one on whose keys are stored."""
        self._fed_SK, self._num_fed_S = ints(S, num_links), ints(S)
        """Drafts after them whose keys are stored as well. They hold where the text has come true as drafted."""
        self._foreign_S = ints(S, dtype=torch.bool)
        """The text has tokens for which the model has no embedding: virtual tokens of a prompt adapter."""
        self._tail_T = torch.arange(max(TAIL, num_links + 2), dtype=torch.int32, device=device)
        self._link_K = torch.arange(num_links, dtype=torch.int32, device=device)
        self._places_B, self._ends_B = ints(num_lanes, dtype=torch.int64), ints(num_lanes)
        """Of the lanes of the last draft graph, for the reading after it: their slots, and the tokens before the
        last one; 0: nothing is to be read."""
        self.lacking_1 = ints(1)
        """The most tokens that a sequence of the last draft graph lacks."""
        self._read_lanes = min(READ_LANES, num_lanes)
        self._read_T = torch.arange(max(1, catch_up // self._read_lanes), dtype=torch.int32, device=device)
        self._first: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """Ids, positions and counts of the first link."""
        self._place_B, self._table_BN, self._fed = self._places_B, self.table_SN, 0
        """Of the chain that is enqueued: slots, pages, and the number of drafts that it has fed."""

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Return: the model reads texts by itself, after the target."""

    def begin(self, batch: StepBatch, place_B: torch.Tensor, going_B: torch.Tensor) -> torch.Tensor:
        """Compare each text with what the model has seen, and choose the tokens of the first link.

        Return which lanes have drafts then, bool [B]: those that lack no token after it.
        """
        slot, gens_B = self._slot, batch.lane.slot_gens_B[: batch.num_lanes]
        length_B, same_B = slot.length_S[place_B], self._gens_S[place_B] == gens_B
        seen_B, fed_B = self._seen_S[place_B] * same_B, self._num_fed_S[place_B] * same_B
        # The last token is always fed: its row gives the first draft.
        at_BK = seen_B[:, None] + self._link_K
        right_BK = self._text(place_B, at_BK) == self._fed_SK[place_B]
        right_BK &= (self._link_K < fed_B[:, None]) & (at_BK < length_B[:, None] - 1)
        seen_B = seen_B + right_BK.int().cumprod(1).sum(1).int()
        at_BT = seen_B[:, None] + self._tail_T
        count_B = (length_B - seen_B).clamp(min=0, max=len(self._tail_T)) * going_B
        live_BT = self._tail_T < count_B[:, None]
        ids_BT = self._text(place_B, at_BT)
        foreign_B = (self._foreign_S[place_B] & same_B) | self._unknown(ids_BT, live_BT)
        self._first = (self._known(ids_BT, live_BT), torch.where(live_BT, at_BT, -1), count_B)
        self._place_B, self._table_BN, self._fed = place_B, self.table_SN[place_B], 0
        seen_B = seen_B + count_B
        lacks_B = (length_B - seen_B) * going_B * ~foreign_B
        for own_S, value_B in (
            (self._gens_S, gens_B),
            (self._seen_S, seen_B),
            (self._num_fed_S, torch.zeros_like(seen_B)),
            (self._foreign_S, foreign_B),
        ):
            own_S[place_B] = torch.where(going_B, value_B, own_S[place_B])
        B = len(place_B)
        self._places_B.fill_(self._spare)
        self._places_B[:B] = place_B
        self._ends_B.zero_()
        self._ends_B[:B] = torch.where(lacks_B > 0, length_B - 1, 0)
        self.lacking_1.copy_(lacks_B.amax(0, keepdim=True))
        return going_B & ~foreign_B & (lacks_B == 0)

    def first(
        self, batch: StepBatch, place_B: torch.Tensor, going_B: torch.Tensor, wants_BL: torch.Tensor,
        page_table_BN: torch.Tensor, hidden: Hidden,
    ) -> torch.Tensor:  # fmt: skip
        """Run the tokens that `begin` chose, over the model's own pages."""
        assert self._first is not None, "begin comes first"
        (ids_BT, positions_BT, count_B), self._first = self._first, None
        last_B = (count_B - 1).clamp(min=0)
        rows_B = torch.arange(len(place_B), device=place_B.device) * ids_BT.shape[1] + last_B
        return self._drawable(self.model.logits_of(ids_BT, self._context(positions_BT, self._table_BN), rows_B))

    def next(self, ids_B1: torch.Tensor, positions_B1: torch.Tensor, page_table_BN: torch.Tensor) -> torch.Tensor:
        """Run one draft, and note it as fed."""
        fed_B, place_B = positions_B1[:, 0] >= 0, self._place_B
        self._fed_SK[place_B, self._fed] = ids_B1[:, 0].int()
        self._fed += 1
        self._num_fed_S[place_B] = torch.where(fed_B, self._fed, self._num_fed_S[place_B])
        return super().next(self._known(ids_B1, fed_B[:, None]), positions_B1, self._table_BN)

    @torch.no_grad()
    def read(self) -> None:
        """Store the keys of tokens that the lanes of the last draft graph lack most of."""
        seen_B = self._seen_S[self._places_B]
        lacks_C, lanes_C = (self._ends_B - seen_B).clamp(min=0).topk(self._read_lanes)
        place_C, count_C = self._places_B[lanes_C], lacks_C.clamp(max=len(self._read_T))
        at_CT = seen_B[lanes_C][:, None] + self._read_T
        live_CT = self._read_T < count_C[:, None]
        ids_CT = self._text(place_C, at_CT)
        self._foreign_S[place_C] |= self._unknown(ids_CT, live_CT)
        context = self._context(torch.where(live_CT, at_CT, -1), self.table_SN[place_C])
        self.model.prefill(self._known(ids_CT, live_CT), context)
        self._seen_S[place_C] += count_C

    def _text(self, place_B: torch.Tensor, at_BT: torch.Tensor) -> torch.Tensor:
        return self._slot.history_SL[place_B[:, None], at_BT.clamp(max=self._most).long()]

    def _unknown(self, ids_BT: torch.Tensor, live_BT: torch.Tensor) -> torch.Tensor:
        return ((ids_BT >= self.draft.num_tokens) & live_BT).any(1)

    def _known(self, ids_BT: torch.Tensor, live_BT: torch.Tensor) -> torch.Tensor:
        """Return ids that the embedding has, int64, whatever they are: another sequence may be writing the text."""
        return torch.where(live_BT, ids_BT, 0).clamp(min=0, max=self.draft.num_tokens - 1).long()

    def _context(self, positions_BP: torch.Tensor, page_table_BN: torch.Tensor) -> AttentionContext:
        return super()._context(positions_BP, page_table_BN.contiguous())

    def __repr__(self) -> str:
        return f"<DecoupledNet {self.model.name}>"


class _Chain(ChainDrafter):
    """A chain whose lanes wait for the model to have read their texts."""

    net: DecoupledNet

    def _begin(self, batch: StepBatch, links: int) -> None:
        super()._begin(batch, links)
        B = batch.num_lanes
        self._wanted_B[:B] *= self.net.begin(batch, place_of(batch), self._going_B[:B])


class _Graphs:
    """One draft model with its stream and graphs."""

    def __init__(
        self, stream: Stream, net: DecoupledNet, chain: _Chain, lane: LaneBuffers, replica: DraftDeviceReplica | None
    ) -> None:
        self.stream, self.net, self._chain, self._lane, self._replica = stream, net, chain, lane, replica
        self._graphs: dict[_Shape, Graph] = {}
        self._read: Graph | None = None
        self._lacking = stream.pinned(4).view(torch.int32)
        self.drafted = stream.event()

    def capture(self, steps: Steps, *, eager: bool) -> None:
        """Run every shape over padding and, unless `eager`, capture it. The device is idle, and idle again after it."""
        stream, shapes = self.stream, sorted(steps, reverse=True)
        with stream.current():
            for _ in range(_WARM_UPS):
                for shape in shapes:
                    self._pad(shape)
                    self._propose(*steps[shape])
                stream.kernel(self.net.read)
            stream.synchronize()
            if eager:
                return
            for shape in shapes:
                with stream.capture() as self._graphs[shape]:
                    self._propose(*steps[shape])
            with stream.capture() as self._read:
                stream.kernel(self.net.read)
            for shape in shapes:
                self._pad(shape)
                self._graphs[shape].replay()  # the first replay uploads a graph, which allocates
            self._read.replay()
            stream.synchronize()

    def launch(self, shape: _Shape, steps: Steps) -> None:
        """Enqueue the drafts, mark `drafted`, and read after it where a sequence lacks text. The stream is current."""
        if (graph := self._graphs.get(shape)) is None:
            self._propose(*steps[shape])
        else:
            graph.replay()
        self.stream.copy(self._lacking, self.net.lacking_1)
        self.drafted.mark()
        if not int(self._lacking):
            return
        if self._read is None:
            self.stream.kernel(self.net.read)
        else:
            self._read.replay()

    def close(self) -> None:
        """Wait for the stream, then destroy the graphs."""
        try:
            self.stream.synchronize()
        finally:
            for graph in (*self._graphs.values(), *([self._read] if self._read else [])):
                graph.reset()
            self._graphs.clear()
            self._read = None

    @property
    def num_graphs(self) -> int:
        """Captured graphs."""
        return len(self._graphs) + (self._read is not None)

    def _propose(self, batch: StepBatch, step: StepTensors) -> None:
        if self._replica is not None:
            self.stream.kernel(self._replica.unpack, batch)
        self._chain.propose(batch, step, self.net.table_SN, {})
        if self._replica is not None:
            self.stream.kernel(self._replica.pack_drafts, batch)

    def _pad(self, shape: _Shape) -> None:
        """Let the next drafts be those of padding."""
        self.stream.synchronize()
        if self._replica is None:
            self.stream.kernel(pad, self._lane)
        else:
            self._replica.send_padding(shape.num_lanes)


class CapturedDecoupledDrafter:
    """Drafts with its own model, after the steps. Used only by the engine thread.

    Args:
        stream: of the steps.
        slot: of the step program, as are the lanes and the sync.
        draft: the first model.
        num_links: the model's own K.
        catch_up: tokens of all texts that the model reads in one step besides those that it drafts after.
        jump_forward: the drafts begin with the tokens that the grammar forces.
        page_size: of the model's pages.
        replica: the buffers on the draft model's device; None: it is the steps'.
    """

    layers: tuple[int, ...] = ()

    def __init__(
        self,
        stream: Stream,
        slot: SlotBuffers,
        lane: LaneBuffers,
        sync: Sync,
        draft: DraftModel,
        *,
        num_links: int,
        catch_up: int,
        jump_forward: bool,
        page_size: int,
        replica: DraftDeviceReplica | None = None,
    ) -> None:
        self._stream, self._sync, self.replica = stream, sync, replica
        self._slot, self._lane = (slot, lane) if replica is None else (replica.slot, replica.lane)
        self._links, self._catch_up, self._jump_forward = num_links, catch_up, jump_forward
        self._page_size, self._eager = page_size, False
        self._steps: dict[_Shape, tuple[StepBatch, StepTensors]] = {}
        self._stepped = stream.event()
        device = None if replica is None else replica.device
        self._streams = [stream.beside(device) for _ in range(2)]
        """The first one drafts, and an exchange captures on the second one: CUDA has few streams, and its libraries
        keep memory for each."""
        self._now = self._graphs_of(draft, self._streams[0])

    @property
    def draft(self) -> DraftModel:
        """The model that drafts now."""
        return self._now.net.draft

    @property
    def buffers(self) -> tuple[object, ...]:
        """See `ExchangingDrafter.buffers`."""
        return () if self.replica is None else self.replica.memory

    @property
    def num_graphs(self) -> int:
        """Captured graphs of the model that drafts now, and of the ways to it and back."""
        return self._now.num_graphs + (0 if self.replica is None else self.replica.num_graphs)

    def prepare(self, model: LoadedModel, d2t_V: torch.Tensor | None) -> DraftModel:
        """See `ExchangingDrafter.prepare`."""
        return DraftModel.for_device(model, d2t_V, self._slot, self._page_size)

    def exchange(self, draft: DraftModel) -> None:
        """Capture the graphs of another model, draft with it from now on, and free those of the one before.

        Waits for the device. Raises what the capture raises; the model before then drafts on.
        """
        before = self._now
        self._stream.synchronize()
        before.stream.synchronize()
        if self.replica is not None:
            self.replica.synchronize()
        drafting, spare = self._streams
        now = self._graphs_of(draft, spare.anew())
        try:
            now.capture(self._steps, eager=self._eager)
        except BaseException:
            now.close()
            raise
        self._now, self._streams = now, [now.stream, drafting]
        before.close()

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Return: the model reads texts by itself, after the target."""

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Enqueue nothing: the drafts come after the step. Its tensors are those of the draft graph."""
        if (shape := _shape_of(batch)) not in self._steps:
            batch = replace(batch, host_processed=(), beams=None)
            self._steps[shape] = (batch, step) if self.replica is None else self.replica.tensors(batch, step)

    def capture(self, *, eager: bool) -> None:
        """See `DrafterGraphs.capture`."""
        self._eager = eager
        if self.replica is not None:
            self.replica.capture(eager=eager)
        self._now.capture(self._steps, eager=eager)

    def launch(self, batch: StepBatch) -> None:
        """See `DrafterGraphs.launch`."""
        now, replica = self._now, self.replica
        self._stepped.mark()
        ready = self._stepped if replica is None else replica.send(batch.num_lanes, self._stepped)
        with now.stream.current():
            now.stream.after(ready)
            now.launch(_shape_of(batch), self._steps)
        if replica is not None:
            replica.take(batch.num_lanes, now.drafted)

    def join(self) -> None:
        """See `DrafterGraphs.join`."""
        self._stream.after(self._now.drafted if self.replica is None else self.replica.taken)

    def close(self) -> None:
        """See `DrafterGraphs.close`."""
        try:
            self._now.close()
        finally:
            if self.replica is not None:
                self.replica.close()

    def _graphs_of(self, draft: DraftModel, stream: Stream) -> _Graphs:
        num_lanes = len(self._lane.slots_B)
        net = DecoupledNet(draft, self._slot, num_lanes, self._links, self._catch_up)
        sizes = {"num_lanes": num_lanes, "num_links": self._links}
        chain = _Chain(stream, net, self._sync, masked=False, jump_forward=self._jump_forward, **sizes)
        return _Graphs(stream, net, chain, self._lane, self.replica)

    def __repr__(self) -> str:
        return f"<CapturedDecoupledDrafter of {self._links} with {self.draft!r}>"


def _shape_of(batch: StepBatch) -> _Shape:
    return _Shape(batch.num_lanes, batch.any_guided, min(batch.max_links, batch.max_rows - 1))
