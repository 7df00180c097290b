"""A second model that drafts apart from the target: no state of it is the target's, and no launch of it the step's own.

The draft model has its own KV pages, a fixed share of them for each slot, and follows the text of the slots by itself:
before it drafts, it compares each text with what it has seen, forgets what differs, and reads what it lacks, a bounded
number of tokens a step. So the target's prefix cache, preemption, a pause of the drafting and an exchange of the model
while requests run need no help from the rest of the engine. Drafts that were not verified, and turn out to be right,
are its next ones. The two-model mode of speculative decoding (Leviathan et al. 2023) as TensorRT-LLM has it, with the
noise of the target's own sampling.

Invariant: a draft changes no token, and nothing of a slot's earlier sequence is drafted for the next one. Not
responsible for: loading and exchanging the model (see exchange.py), a GPU (see decoupled_graphs.py), a draft model
inside the step (see chain.py), masks: verification rejects a draft that breaks the grammar.

Shapes: S slots, B lanes, T tokens of a forward for a lane, L tokens of history, N pages of a slot, V columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from gpu_engine.api.prefill_shapes import padded
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loaded_model import LoadedModel
from gpu_engine.step.buffers import SlotBuffers, StepBatch
from gpu_engine.step.prompt_rows import Chunks, Hidden
from gpu_engine.step.stream import Stream
from kernels.accept import AcceptResult, SlotParams, StepTensors, draw_drafts
from kernels.kv_pages import KVPages

TAIL = 8
"""Tokens that a lane may lack and still draft at once; more are read without logits first."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model with its pages: what one exchange brings. Owned by one drafter."""

    model: LoadedModel
    d2t_V: torch.Tensor | None
    """int32, zeros: how many of the columns have a token of the target; None: all."""
    pages: list[KVPages]
    table_SN: torch.Tensor
    """int32, the pages of each slot."""

    @classmethod
    def allocate(
        cls, model: LoadedModel, d2t_V: torch.Tensor | None, num_slots: int, num_tokens: int, page_size: int
    ) -> DraftModel:
        """Return the model with pages for `num_tokens` of each slot."""
        per_slot = -(-num_tokens // page_size)
        table_SN = torch.arange(num_slots * per_slot, dtype=torch.int32).view(num_slots, per_slot)
        return cls(model, d2t_V, model.allocate_pages(num_slots * per_slot, page_size), table_SN)

    @classmethod
    def for_device(
        cls, model: LoadedModel, d2t_V: torch.Tensor | None, slot: SlotBuffers, page_size: int
    ) -> DraftModel:
        """Return the model with pages for every position of each slot, in the layout of a GPU, on the model's device.

        Waits for the copies that loaded it, which another stream may not wait for.
        """
        S, num_tokens = slot.history_SL.shape
        per_slot, device = -(-num_tokens // page_size), model.device
        table_SN = torch.arange(S * per_slot, dtype=torch.int32, device=device).view(S, per_slot)
        draft = cls(model, d2t_V, model.allocate_pages(S * per_slot, page_size, token_major=True), table_SN)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return draft

    @property
    def num_tokens(self) -> int:
        """Tokens that it knows: ids from here on it cannot read."""
        return self.model.vocab_size if self.d2t_V is None else len(self.d2t_V)

    def fill(self, slot: int, ids: np.ndarray, start: int) -> None:
        """Store the keys of tokens `ids`, int32, of a slot from position `start` on."""
        ids_P = np.zeros(padded(len(ids)), np.int64)
        positions_P = np.full(len(ids_P), -1, np.int32)
        ids_P[: len(ids)], positions_P[: len(ids)] = ids, np.arange(start, start + len(ids))
        self.model.prefill(torch.from_numpy(ids_P)[None], self._context([slot], positions_P[None]))

    def logits(self, slots: Sequence[int], ids_BT: np.ndarray, positions_BT: np.ndarray) -> torch.Tensor:
        """Run tokens of some slots (int64; positions int32, -1 is padding); return the logits [B * T, V]."""
        return self.model.logits(torch.from_numpy(ids_BT), self._context(slots, positions_BT))

    def _context(self, slots: Sequence[int], positions_BT: np.ndarray) -> AttentionContext:
        return AttentionContext(self.pages, self.table_SN[list(slots)], torch.from_numpy(positions_BT))

    def __repr__(self) -> str:
        return f"<DraftModel {self.model.name}>"


@dataclass(frozen=True, slots=True)
class _Lane:
    """A lane that drafts in this step."""

    slot: int
    slot_gen: int
    length: int
    """Tokens of its text, jump-forward tokens included."""
    num_forced: int
    """Jump-forward tokens at the text's end."""
    wanted: int
    """The most drafts after them."""


class ExchangingDrafter(Protocol):
    """A drafter whose model may be exchanged while the server runs. Owned by the engine thread."""

    @property
    def draft(self) -> DraftModel:
        """The current draft model. Any thread may read it."""

    @property
    def buffers(self) -> tuple[object, ...]:
        """Tensors, and dataclasses of tensors, that are copied to the draft model's device and back if the target has
        another device."""

    def prepare(self, model: LoadedModel, d2t_V: torch.Tensor | None) -> DraftModel:
        """Return a loaded model as a draft model, with pages for the drafter's slots. Called on any thread."""

    def exchange(self, draft: DraftModel) -> None:
        """Replace the current draft model with `draft`; the pages of the replaced model are free when this returns.

        Raises RuntimeError if the device has no memory for the graphs of `draft`; the current model then stays.
        """


class DecoupledDrafter:
    """Drafts with its own model. Used only by the engine thread, on a stream that runs at once.

    Args:
        stream: of the steps.
        slot: of the step program.
        draft: the first model.
        vocab_size: columns of the target's logits.
        num_links: the model's own K.
        catch_up: tokens of all texts that the model reads in one step besides those that it drafts after.
        jump_forward: the drafts begin with the tokens that the grammar forces.
        page_size: of the pages of a model that takes over.
    """

    layers: tuple[int, ...] = ()
    buffers: tuple[object, ...] = ()

    def __init__(
        self,
        stream: Stream,
        slot: SlotBuffers,
        draft: DraftModel,
        vocab_size: int,
        *,
        num_links: int,
        catch_up: int,
        jump_forward: bool = False,
        page_size: int = 16,
    ) -> None:
        assert stream.runs_at_once
        self._stream, self.draft, self._links, self._page_size = stream, draft, num_links, page_size
        self._catch_up, self._jump_forward = catch_up, jump_forward
        S = len(slot.length_S)
        self._history_SL = torch.zeros_like(slot.history_SL)
        """The texts as the model knows them, and its drafts after them."""
        self._texts = self._history_SL.numpy()
        self._known, self._seen, self._gens = [0] * S, [0] * S, [-1] * S
        """By slot: tokens in `_texts`, the first of them whose keys are stored, and whose text it is. Of a text that is
        known the last token is never seen: its row gives the next draft."""
        self._tensors = _Draws(self._history_SL, slot.params, vocab_size)

    @property
    def num_slots(self) -> int:
        """S, the spare slot included."""
        return len(self._known)

    @property
    def max_tokens(self) -> int:
        """Positions of a slot that the model may write."""
        return self._history_SL.shape[1]

    def prepare(self, model: LoadedModel, d2t_V: torch.Tensor | None) -> DraftModel:
        """See `ExchangingDrafter.prepare`."""
        return DraftModel.allocate(model, d2t_V, self.num_slots, self.max_tokens, self._page_size)

    def exchange(self, draft: DraftModel) -> None:
        """Draft with another model from now on. It reads the texts that run as it gets to them; the pages of the one
        before are free when this returns."""
        self.draft = draft
        self._gens = [-1] * len(self._gens)

    def prefill(self, chunks: Chunks, hidden: Hidden) -> None:
        """Return: the model reads texts by itself, after the target."""

    def propose(self, batch: StepBatch, step: StepTensors, page_table_BN: torch.Tensor, hidden: Hidden) -> None:
        """Write the drafts of the lanes that go on; those of a lane that emitted nothing are unchanged."""
        self._stream.kernel(self._propose, batch)

    @torch.no_grad()
    def _propose(self, batch: StepBatch) -> None:
        slot, lane, B = batch.slot, batch.lane, batch.num_lanes
        lanes = self._lanes(batch)
        for each in lanes:
            self._follow(each, slot.history_SL[each.slot, : each.length].numpy())
        ready = self._read(lanes)
        while going := [each for each in ready if self._known[each.slot] < each.length + each.wanted]:
            stuck = self._draft(going)
            ready = [each for each in ready if each.slot not in stuck]
        emitted, drafting = lane.result.num_emitted_B[:B].tolist(), {each.slot: each for each in lanes}
        for s, num_emitted in zip(batch.slots_B.tolist(), emitted, strict=True):
            if s in drafting:
                self._write(slot, drafting[s])
            elif num_emitted and s >= 0:
                slot.num_drafts_S[s] = 0

    def _lanes(self, batch: StepBatch) -> list[_Lane]:
        """Return the lanes that draft."""
        slot, lane, B = batch.slot, batch.lane, batch.num_lanes
        forced_B = lane.num_jump_forward_B[:B].tolist() if self._jump_forward and batch.any_guided else [0] * B
        most = min(self._links, batch.max_links, batch.max_rows - 1)
        lanes = []
        for b, s in enumerate(batch.slots_B.tolist()):
            if not lane.drafting_B[b] or forced_B[b] < 0:
                continue
            length, forced = int(slot.length_S[s]), forced_B[b]
            limit = min(int(slot.draft_limit_S[s]), int(slot.params.max_length_S[s]) - length - 1, most)
            lanes.append(_Lane(s, int(lane.slot_gens_B[b]), length + forced, forced, max(0, limit - forced)))
        return lanes

    def _follow(self, lane: _Lane, text: np.ndarray) -> None:
        """Bring the slot's text up to date; drafts after it remain where the text has come true as drafted."""
        s, n = lane.slot, lane.length
        if self._gens[s] != lane.slot_gen:
            self._gens[s], self._known[s], self._seen[s] = lane.slot_gen, 0, 0
        own, both = self._texts[s], min(n, self._known[s])
        differs = np.flatnonzero(own[:both] != text[:both])
        same = int(differs[0]) if len(differs) else both
        if same < n:  # else the text ends within what was drafted, and the drafts after it remain
            own[same:n], self._known[s] = text[same:], n
            self._seen[s] = min(self._seen[s], same)

    def _read(self, lanes: list[_Lane]) -> list[_Lane]:
        """Read what the model lacks, within the bound of a step; return the lanes that it can draft for now."""
        left, ready = self._catch_up, []
        for lane in lanes:
            s = lane.slot
            if not lane.wanted or int(self._texts[s, : lane.length].max()) >= self.draft.num_tokens:
                continue  # nothing to draft, or virtual tokens of an adapter, for which it has no embedding
            while (lacks := self._known[s] - 1 - self._seen[s]) >= TAIL and left:
                count, start = min(lacks, left), self._seen[s]
                self.draft.fill(s, self._texts[s, start : start + count], start)
                self._seen[s] += count
                left -= count
            if self._known[s] - 1 - self._seen[s] < TAIL:
                ready.append(lane)
        return ready

    def _draft(self, lanes: list[_Lane]) -> set[int]:
        """Draw the next token of each lane; return the slots for which there is none."""
        slots = [lane.slot for lane in lanes]
        tails = [self._known[s] - self._seen[s] for s in slots]
        B, T = len(lanes), max(tails)
        ids_BT, positions_BT = np.zeros((B, T), np.int64), np.full((B, T), -1, np.int32)
        for b, (s, count) in enumerate(zip(slots, tails, strict=True)):
            start = self._seen[s]
            ids_BT[b, :count] = self._texts[s, start : start + count]
            positions_BT[b, :count] = np.arange(start, start + count)
        last_B = torch.tensor([b * T + count - 1 for b, count in enumerate(tails)])
        logits_BV = self.draft.logits(slots, ids_BT, positions_BT)[last_B]
        lengths = [self._known[s] for s in slots]
        stuck = set()
        for s, token in zip(slots, self._tensors.draw(logits_BV, slots, lengths, self.draft.d2t_V), strict=True):
            self._seen[s] = self._known[s]
            if token < 0:
                self._seen[s] -= 1
                stuck.add(s)
            else:
                self._known[s] += 1
        return stuck

    def _write(self, slot: SlotBuffers, lane: _Lane) -> None:
        s, start = lane.slot, lane.length
        count = min(self._known[s] - start, lane.wanted)
        if count:
            at = lane.num_forced
            slot.drafts_SR[s, at : at + count] = self._history_SL[s, start : start + count]
        slot.num_drafts_S[s] = lane.num_forced + count

    def __repr__(self) -> str:
        return f"<DecoupledDrafter of {self._links} with {self.draft!r}>"


class _Draws:
    """Draws tokens by the target's rule, each at the end of its slot's text."""

    def __init__(self, history_SL: torch.Tensor, params: SlotParams, vocab_size: int) -> None:
        S = len(history_SL)
        self._length_S, self._slots_B = torch.zeros(S, dtype=torch.int32), torch.zeros(S, dtype=torch.int32)
        zeros_B1, kinds_B1 = torch.zeros(S, 1, dtype=torch.int32), torch.zeros(S, 1, dtype=torch.uint8)
        self._drafts_B1 = torch.zeros(S, 1, dtype=torch.int32)
        self._of_history = (history_SL, self._length_S, params, AcceptResult.allocate(S, 1, vocab_size))
        self._rows = (self._drafts_B1, torch.zeros(S, dtype=torch.int32), kinds_B1, zeros_B1, 0, (0, 0))
        """Every row has the kind ALL, so no mask is read."""

    def draw(
        self, logits_BV: torch.Tensor, slots: Sequence[int], lengths: Sequence[int], d2t_V: torch.Tensor | None
    ) -> list[int]:
        """Return each lane's token at position `lengths[b]`, -1 where none is legal; put it into the slot's text."""
        B = len(slots)
        self._slots_B[:B] = torch.tensor(slots, dtype=torch.int32)
        self._length_S[list(slots)] = torch.tensor(lengths, dtype=torch.int32)
        step = StepTensors(self._slots_B[:B], *self._rows, *self._of_history)
        if d2t_V is not None:
            logits_BV = logits_BV[:, : len(d2t_V)].contiguous()
        draw_drafts(logits_BV, step, 0, d2t_V=d2t_V)
        return self._drafts_B1[:B, 0].tolist()
