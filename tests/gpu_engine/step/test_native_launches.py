"""Each native launch of the CPU leaves the same numbers in the same buffers as plain torch, over random states."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.launches import PROPOSE, VERIFY
from gpu_engine.step.mask_rows import RowStore
from gpu_engine.step.native_launches import NativeLaunches
from gpu_engine.step.post_buffers import PostBuffers
from tests.gpu_engine.step.torch_launches import TorchLaunches

S, R, V, L, B, WORDS = 7, 5, 100, 60, 5, 8
"""S slots, the last of which is spare."""


class State:
    """Buffers with random numbers that a step may meet. Lane 3 is padding."""

    def __init__(self, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)
        slot, lane = SlotBuffers.allocate(S, R, L, 16), LaneBuffers.allocate(B, R, 8)
        self.slot, self.lane = slot, lane
        slot.history_SL.copy_(self.ints(*slot.history_SL.shape, high=V))
        slot.params.prompt_length_S.copy_(self.ints(S, low=1, high=20))
        slot.posted_S.copy_(self.ints(S, high=10))
        slot.length_S.copy_(slot.params.prompt_length_S + slot.posted_S + self.ints(S, low=1, high=R))
        slot.params.max_length_S.copy_(slot.length_S + self.ints(S, low=1, high=8))
        slot.jump_forward_limit_S.copy_(self.ints(S, high=R))
        slot.drafts_SR.copy_(self.ints(S, R, high=V))
        slot.num_drafts_S.copy_(self.ints(S, high=R))
        slot.page_table_SN.copy_(self.ints(*slot.page_table_SN.shape, high=50))
        slot.done_S.copy_(self.bools(S, 0.2))
        lane.slots_B.copy_(torch.randperm(S - 1, generator=self.g)[:B])
        lane.slots_B[3] = -1
        lane.guided_B.copy_(self.bools(B, 0.7))
        lane.draft_limit_B.copy_(self.ints(B, high=R + 1))
        lane.slot_gens_B.copy_(self.ints(B, high=99))
        lane.drafting_B.copy_(self.bools(B, 0.6))
        lane.drafting_B[3] = False
        lane.drafts_BR.copy_(self.ints(B, R, high=V))
        lane.num_drafts_B.copy_(self.ints(B, high=R))
        for result in (lane.result.num_emitted_B, lane.result.finish_B):
            result.copy_(self.ints(B, high=3))
        lane.result.blocked_B.copy_(self.ints(B, high=6) * self.bools(B, 0.3))
        self.store = RowStore.around(self.ints(S - 1, R, WORDS, high=1000))
        self.store.cached_SR.copy_(self.bools(S * R, 0.4).view(S, R))
        self.store.kind_SR.copy_(self.ints(S, R, high=6).to(torch.uint8))
        self.store.forced_SR.copy_(self.ints(S, R, high=V))
        self.post = PostBuffers(B, R)
        self.ids = torch.full((B, R), 7), torch.full((B, R), 7, dtype=torch.int32)
        self.table_BN = torch.zeros(B, slot.page_table_SN.shape[1], dtype=torch.int32)
        self.post_seq = torch.zeros(1, dtype=torch.int64)

    def ints(self, *shape: int, low: int = 0, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.g, dtype=torch.int32)

    def bools(self, count: int, share: float) -> torch.Tensor:
        return torch.rand(count, generator=self.g) < share

    def batch(self, num_rows: int = R, max_rows: int = R) -> StepBatch:
        return StepBatch(self.slot, self.lane, B, num_rows, any_guided=True, max_rows=max_rows)

    def differences(self, other: State) -> list[str]:
        """The names of the buffers that differ."""
        mine, theirs = dict(self.tensors()), dict(other.tensors())
        return [name for name in mine if not torch.equal(mine[name], theirs[name])]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        named: list[tuple[str, torch.Tensor]] = []
        for part in ("slot", "lane", "store"):
            value: Any = getattr(self, part)
            named += [
                (f"{part}.{name}", getattr(value, name))
                for name in value.__slots__
                if isinstance(getattr(value, name), torch.Tensor)
            ]
        posted = [getattr(self.post, name) for name in ("slots", "slot_gens", "commit_pos", "n_commit", "n_draft")]
        return [*named, ("posted", torch.stack(posted)), ("need", self.post.need_rows), ("seq", self.post_seq)]


def masks(seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 1000, (2, S - 1, R, WORDS)).astype(np.int32)


@pytest.fixture(params=range(12))
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def both(seed: int) -> tuple[tuple[State, Any], tuple[State, Any]]:
    """Two equal states; native launches over the one, torch over the other."""
    one, rows = State(seed), masks(seed)
    other = copy.deepcopy(one)
    native = NativeLaunches(one.slot, one.lane, lambda seq: rows[seq & 1])
    return (one, native), (other, TorchLaunches(R, mask_rows=lambda seq: rows[seq & 1]))


@pytest.mark.parametrize("num_rows", [1, 3, R])
def test_load(both: Any, num_rows: int) -> None:
    inputs = []
    for state, launches in both:
        ids, positions = (t[:, :num_rows].contiguous() for t in state.ids)
        launches.load(state.batch(num_rows), ids, positions, state.table_BN)
        inputs.append((ids, positions, state.table_BN))
    for native, torch_ in zip(*inputs, strict=True):
        assert torch.equal(native, torch_)
    assert both[0][0].differences(both[1][0]) == []


def test_advance(both: Any) -> None:
    for state, launches in both:
        launches.advance(state.batch(), state.store)
    assert both[0][0].differences(both[1][0]) == []


@pytest.mark.parametrize("k", [VERIFY, PROPOSE, 0, 2])
@pytest.mark.parametrize("max_rows", [1, 3, R])
def test_a_post_and_its_cached_rows(both: Any, seed: int, k: int, max_rows: int) -> None:
    for state, launches in both:
        launches.pack(state.batch(max_rows=max_rows), state.store, state.post, k)
    (one, _), (other, _) = both
    assert one.differences(other) == []
    for b in range(B):
        count = int(one.post.n_commit[b] + one.post.n_draft[b])
        if one.post.slots[b] >= 0:
            assert one.post.tokens[b, :count].tolist() == other.post.tokens[b, :count].tolist()
    kinds, forced = one.ints(B, R, high=6).to(torch.uint8), one.ints(B, R, high=V + 9) - 3
    for state, launches in both:
        state.post.kinds.copy_(kinds)
        state.post.forced.copy_(forced)
        state.post.awaited.fill_(seed + 1)
        if k == PROPOSE:
            launches.take_jump_forward(state.batch(), state.post, V)
        else:
            launches.cache_rows(state.batch(), state.store, state.post, k, state.post_seq if k == VERIFY else None)
    assert one.differences(other) == []


def test_a_step_that_posts_nothing_caches_nothing(both: Any) -> None:
    for state, launches in both:
        state.store.cached_SR.fill_(True)
        launches.pack(state.batch(), state.store, state.post, VERIFY)
        state.post.kinds.fill_(1)
        state.post.awaited.fill_(0)
        before = state.store.mask_SRW.clone()
        launches.cache_rows(state.batch(), state.store, state.post, VERIFY, state.post_seq)
        assert state.post.slots.tolist() == [-1] * B
        assert torch.equal(state.store.mask_SRW, before)
    assert both[0][0].differences(both[1][0]) == []
