"""Posts and cached rows equal those of the engine's inline sync, on a channel that answers at random."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.mask_rows import RowStore
from gpu_engine.step.stream import ImmediateStream
from gpu_engine.step.stream_sync import InlineSync
from kernels.cuda.advance import advance
from kernels.cuda.jump_forward import take_jump_forward
from kernels.cuda.posting import PROPOSE, VERIFY, CachedRows, PostTensors, cache_rows, pack_post
from shared_mem.batch import BatchArrays
from shared_mem.layout import Layout, RowKind
from tests.gpu_engine.step.torch_launches import TorchLaunches

S, R, V, L = 6, 4, 100, 60
LANES = [4, 1, 5, 0]


class RandomAnswers:
    """The engine's end of a channel that has a random answer at once."""

    def __init__(self) -> None:
        self.layout = Layout(num_slots=S, num_rows=R, vocab_size=V)
        words = self.layout.row_stride // 4
        self.random = np.random.default_rng(3)
        self.masks = self.random.integers(-(2**31), 2**31, (2, S, R, words), dtype=np.int64).astype(np.int32)
        self.seq = 0
        self.posted: dict[str, Any] = {}
        """A copy of the fields of the last post."""

    def batch_arrays(self, num_lanes: int, memory: Any) -> BatchArrays:
        return BatchArrays(num_lanes, R, memory)

    def post_batch(self, arrays: BatchArrays, *, stage: int) -> int:
        names = ("slots", "slot_gens", "commit_pos", "n_commit", "n_draft", "need_rows", "tokens")
        self.posted = {name: getattr(arrays, name).copy() for name in names}
        self.seq += 1
        return self.seq

    def await_batch(self, arrays: BatchArrays, seq: int, *, timeout_s: float) -> SimpleNamespace:
        arrays.kinds[:] = self.random.integers(0, 6, arrays.kinds.shape)
        arrays.forced[:] = self.random.integers(0, V, arrays.forced.shape)
        return SimpleNamespace(waited_ns=0)

    def mask_rows(self, seq: int) -> Any:
        return self.masks[seq & 1]


class OnDevice:
    """A copy of the same state, on which the kernels work."""

    def __init__(self, inline: InlineSync, batch: StepBatch, device: torch.device) -> None:
        def there(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone().to(device)

        slot, lane, store = batch.slot, batch.lane, inline.store
        self.lanes = [there(t) for t in (lane.slots_B, lane.guided_B, lane.drafting_B)]
        self.slot = [there(t) for t in (slot.history_SL, slot.length_S, slot.params.prompt_length_S, slot.posted_S)]
        self.gens, self.drafts, self.num = there(lane.slot_gens_B), there(lane.drafts_BR), there(lane.num_drafts_B)
        self.rows = CachedRows(
            *(there(t[:S]) for t in (store.mask_SRW, store.kind_SR, store.forced_SR, store.cached_SR))
        )
        self.kinds, self.forced = there(lane.kinds_BR), there(lane.forced_BR)
        B = len(LANES)
        ints = [torch.zeros(B, dtype=torch.int32, device=device) for _ in range(6)]
        self.out = PostTensors(
            *ints,
            torch.zeros(B, 2 * R, dtype=torch.int32, device=device),
            torch.zeros(B, R, dtype=torch.uint8, device=device),
            torch.zeros(B, R, dtype=torch.int32, device=device),
        )

    def post(self, k: int) -> None:
        post = (*self.lanes, self.gens, self.drafts, self.num, *self.slot, self.rows, self.out)
        pack_post(*post, k=k)

    def cache(self, inline: InlineSync, channel: RandomAnswers, k: int) -> None:
        self.out.kinds_BR.copy_(inline._buffers(len(LANES)).kinds)
        self.out.forced_BR.copy_(inline._buffers(len(LANES)).forced)
        masks = torch.from_numpy(channel.masks)
        if self.kinds.device.type == "cuda":
            masks = masks.pin_memory()  # read through the mapping
        seq = torch.tensor([channel.seq], device=self.kinds.device)
        cache_rows(*self.lanes, self.out, seq, masks, self.rows, self.kinds, self.forced, k=k)


def state() -> tuple[InlineSync, RandomAnswers, StepBatch]:
    g = torch.Generator().manual_seed(1)
    slot, lane = SlotBuffers.allocate(S, R, L - R, 16), LaneBuffers.allocate(len(LANES), R, 8)
    slot.history_SL.copy_(torch.randint(V, slot.history_SL.shape, generator=g))
    slot.params.prompt_length_S.copy_(torch.tensor([5, 9, 3, 10, 12, 7]))
    slot.posted_S.copy_(torch.tensor([2, 0, 5, 1, 4, 0]))
    slot.length_S.copy_(slot.params.prompt_length_S + slot.posted_S + torch.tensor([1, 0, 2, 3, 4, 1]))
    lane.slots_B.copy_(torch.tensor(LANES))
    lane.guided_B.copy_(torch.tensor([True, True, False, True]))
    lane.drafting_B.copy_(torch.tensor([True, False, True, True]))
    lane.slot_gens_B.copy_(torch.tensor([7, 8, 9, 10]))
    lane.drafts_BR.copy_(torch.randint(V, lane.drafts_BR.shape, generator=g))
    lane.num_drafts_B.copy_(torch.tensor([3, 0, 2, 1]))
    channel: Any = RandomAnswers()
    inline = InlineSync(ImmediateStream(), channel, TorchLaunches(R, mask_rows=channel.mask_rows), row_timeout_ms=1.0)
    inline.store.cached_SR[:S] = torch.rand(S, R, generator=g) < 0.4
    inline.store.cached_SR[0, :2] = True  # nothing is missing
    inline.store.kind_SR[:S] = torch.randint(3, (S, R), generator=g).to(torch.uint8)
    return inline, channel, StepBatch(slot, lane, len(LANES), R, any_guided=True)


@pytest.mark.parametrize("k", [VERIFY, 0, 2])
def test_a_post_and_its_cached_rows_equal_those_of_the_inline_sync(device: torch.device, k: int) -> None:
    inline, channel, batch = state()
    ours = OnDevice(inline, batch, device)
    if k == VERIFY:
        inline.post(batch)
    else:
        inline.post_draft(batch, k)
    ours.post(k)
    posted = channel.posted
    assert ours.out.slots_B.tolist() == posted["slots"].tolist()
    for b in range(len(LANES)):
        if posted["slots"][b] >= 0:
            count = int(posted["n_commit"][b] + posted["n_draft"][b])
            assert ours.out.tokens_BT[b, :count].tolist() == posted["tokens"][b, :count].tolist()
            for name in ("slot_gens", "commit_pos", "n_commit", "n_draft", "need_rows"):
                assert int(getattr(ours.out, f"{name}_B")[b]) == int(posted[name][b]), name
    assert ours.slot[3].tolist() == batch.slot.posted_S.tolist()

    if k == VERIFY:
        inline.await_rows(batch)
    else:
        inline.await_draft(batch, k)
    ours.cache(inline, channel, k)
    rows, store = ours.rows, inline.store
    for mine, theirs in (
        (rows.cached_SR, store.cached_SR[:S]),
        (rows.kind_SR, store.kind_SR[:S]),
        (rows.forced_SR, store.forced_SR[:S]),
        (ours.kinds, batch.lane.kinds_BR),
    ):
        assert mine.tolist() == theirs.tolist()
    columns = slice(None) if k == VERIFY else slice(k, k + 1)
    assert ours.forced[:, columns].tolist() == batch.lane.forced_BR[:, columns].tolist()
    apply = (store.cached_SR & (store.kind_SR == RowKind.APPLY)).nonzero().tolist()
    assert [rows.mask_SRW[s, j].tolist() for s, j in apply] == [store.mask_SRW[s, j].tolist() for s, j in apply]


@pytest.mark.parametrize("k", [0, 2])
def test_a_draft_requests_its_row(device: torch.device, k: int) -> None:
    inline, channel, batch = state()
    # A lane that drafts has emitted a token, and so has no cached rows.
    inline.store.cached_SR[batch.slots_B[batch.lane.drafting_B].long()] = False
    posted = batch.slot.posted_S.clone()
    ours = OnDevice(inline, batch, device)
    ours.post(k)
    inline.post_draft(batch, k)
    assert ours.out.slots_B.tolist() == inline._buffers(len(LANES)).slots.tolist() == [4, -1, -1, 0]
    assert ours.slot[3].tolist() == batch.slot.posted_S.tolist() != posted.tolist()
    assert channel.seq == 1


def test_idle_lanes_are_not_posted_and_are_unconstrained(device: torch.device) -> None:
    inline, channel, batch = state()
    batch.lane.slots_B[0] = -1
    ours = OnDevice(inline, batch, device)
    cached = ours.rows.cached_SR.clone()
    ours.post(VERIFY)
    assert int(ours.out.slots_B[0]) == -1
    assert int(ours.slot[3][4]) == 4
    ours.cache(inline, channel, VERIFY)
    assert ours.kinds[0].tolist() == [RowKind.ALL] * R
    assert torch.equal(ours.rows.cached_SR[4], cached[4])


def test_advance_drops_the_rows_of_lanes_that_emitted(device: torch.device) -> None:
    """The kernel and the CPU's launch also agree on the lanes that draft next."""

    def ints(values: list[int], where: torch.device | str = "cpu") -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=where)

    lanes = [3, 1, 0, 2, -1], [2, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 3, 0, 4, 0]
    cached = torch.ones(4, R, dtype=torch.bool, device=device)
    drafting = torch.ones(5, dtype=torch.bool, device=device)
    advance(*(ints(values, device) for values in lanes), drafting, cached)
    assert drafting.tolist() == [True, False, False, False, False]
    assert cached.any(dim=1).tolist() == [False, True, False, False]

    slot, lane = SlotBuffers.allocate(5, R, L, 16), LaneBuffers.allocate(5, R, 8)
    slots, emitted, finish, blocked = lanes
    for target, values in (
        (lane.slots_B, slots),
        (lane.result.num_emitted_B, emitted),
        (lane.result.finish_B, finish),
        (lane.result.blocked_B, blocked),
    ):
        target.copy_(ints(values))
    store = RowStore.around(torch.zeros(4, R, 4, dtype=torch.int32))
    store.cached_SR.fill_(True)
    TorchLaunches(R).advance(StepBatch(slot, lane, 5, R, any_guided=True), store)
    assert lane.drafting_B.tolist() == drafting.tolist()
    assert torch.equal(store.cached_SR[:4], cached.cpu())


def test_jump_forward_tokens_equal_those_of_the_inline_sync(device: torch.device) -> None:
    for seed in range(8):
        inline, channel, batch = state()
        channel.random = np.random.default_rng(seed)
        lane, slot = batch.lane, batch.slot
        lane.drafting_B.copy_(torch.tensor([True, seed % 2 == 0, True, True]))
        # A lane that drafts has emitted tokens. Lane 1 does so for every second seed, and lane 2 has no grammar.
        lane.result.num_emitted_B.copy_(lane.drafting_B.int())
        slot.jump_forward_limit_S.copy_(torch.tensor([3, 2, 3, 3, seed % 4, 3]))
        slot.params.max_length_S.copy_(slot.length_S + torch.tensor([seed % 5, 20, 20, 20, 20, 20]))
        slot.num_drafts_S.fill_(3)
        ours = OnDevice(inline, batch, device)
        there = [t.clone().to(device) for t in (slot.drafts_SR, slot.num_drafts_S, lane.num_jump_forward_B)]
        limits = tuple(t.clone().to(device) for t in (slot.jump_forward_limit_S, slot.params.max_length_S))
        inline.post_jump_forward(batch)
        pack_post(
            *ours.lanes, ours.gens, ours.drafts, ours.num, *ours.slot, ours.rows, ours.out,
            k=PROPOSE, limits=limits, max_rows=batch.max_rows,
        )  # fmt: skip
        posted = channel.posted
        assert ours.out.slots_B.tolist() == posted["slots"].tolist()
        requested = posted["slots"] >= 0
        for name in ("slot_gens", "commit_pos", "n_commit", "n_draft", "need_rows"):
            assert (
                getattr(ours.out, f"{name}_B").cpu().numpy()[requested].tolist() == posted[name][requested].tolist()
            ), name
        assert ours.slot[3].tolist() == slot.posted_S.tolist()

        inline.await_jump_forward(batch)
        inline._buffers(len(LANES)).kinds[:, 0] = int(RowKind.FORCED)
        if channel.seq:
            # Ids inside and outside the vocabulary: the first token of lane 0, and of lane 3 the one after a legal one.
            inline._buffers(len(LANES)).forced[0, 0] = (-1, 0, V - 1, V)[seed % 4]
            inline._buffers(len(LANES)).kinds[3, :2] = int(RowKind.FORCED)
            inline._buffers(len(LANES)).forced[3, 1] = (-(2**31), 2**31 - 1, V, 0)[seed % 4]
            channel.await_batch = lambda *args, **kwargs: SimpleNamespace(waited_ns=0)  # type: ignore[method-assign]
            inline.await_jump_forward(batch)
        ours.out.kinds_BR.copy_(inline._buffers(len(LANES)).kinds)
        ours.out.forced_BR.copy_(inline._buffers(len(LANES)).forced)
        emitted = lane.result.num_emitted_B.to(device)
        out = ours.out
        take_jump_forward(
            *(ours.lanes[0], emitted, out.slots_B, out.need_rows_B, out.kinds_BR, out.forced_BR, ours.slot[1]),
            *(ours.slot[0], *there),
            vocab_size=V,
        )
        assert there[2].tolist() == lane.num_jump_forward_B.tolist()
        assert int((there[0] >= V).sum()) == int((there[0] < 0).sum()) == 0
        for b, s in enumerate(LANES):
            count = int(lane.num_jump_forward_B[b])
            assert int(there[1][s]) == (3 if count < 0 else count)
            if count > 0:
                at = int(slot.length_S[s])
                assert there[0][s, :count].tolist() == slot.drafts_SR[s, :count].tolist()
                assert ours.slot[0][s, at : at + count].tolist() == there[0][s, :count].tolist()
        assert lane.num_jump_forward_B[2] == 0
