"""Each launch, native and in Triton, leaves the same numbers in the same buffers as plain torch, over random states.

Triton's kernels run on a GPU if there is one, and else in Triton's interpreter on a CPU.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.launches import PROPOSE, VERIFY
from gpu_engine.step.mask_rows import RowStore
from gpu_engine.step.native_launches import NativeLaunches
from gpu_engine.step.post_buffers import PostBuffers
from kernels.row_kinds import FORCED
from tests.gpu_engine.step.torch_launches import TorchLaunches

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy

S, R, V, L, B, WORDS = 7, 5, 100, 60, 5, 8
"""S slots, the last of which is spare."""
REAL = [0, 1, 2, 4]
"""The lanes but for the padded one."""


class State:
    """Buffers with random numbers that a step may meet. Lane 3 is padding."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.g, self.device = torch.Generator().manual_seed(seed), device
        slot, lane = SlotBuffers.allocate(S, R, L, 16, device), LaneBuffers.allocate(B, R, 8, device)
        self.slot, self.lane = slot, lane
        slot.history_SL.copy_(self.ints(*slot.history_SL.shape, high=V))
        slot.params.prompt_length_S.copy_(self.ints(S, low=1, high=20))
        slot.posted_S.copy_(self.ints(S, high=10))
        slot.length_S.copy_(slot.params.prompt_length_S + slot.posted_S + self.ints(S, low=1, high=R).to(device))
        slot.params.max_length_S.copy_(slot.length_S + self.ints(S, low=1, high=5).to(device))
        slot.draft_limit_S.copy_(self.ints(S, high=R))
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
        self.store = RowStore.around(self.ints(S - 1, R, WORDS, high=1000).to(device))
        self.store.cached_SR.copy_(self.bools(S * R, 0.4).view(S, R))
        self.store.kind_SR.copy_(self.ints(S, R, high=6).to(torch.uint8))
        self.store.forced_SR.copy_(self.ints(S, R, high=V))
        self.post = PostBuffers(B, R, device)
        self.table_BN = torch.zeros(B, slot.page_table_SN.shape[1], dtype=torch.int32, device=device)
        self.post_seq = torch.zeros(1, dtype=torch.int64, device=device)

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
        """Copies in CPU memory, without the padded lane and the spare slot: Triton's kernels leave them as they are."""
        named: list[tuple[str, torch.Tensor]] = []
        for part in ("slot", "lane", "store"):
            value: Any = getattr(self, part)
            for name in value.__slots__:
                if isinstance(tensor := getattr(value, name), torch.Tensor):
                    kept = REAL if part == "lane" else slice(0, S - 1)
                    named.append((f"{part}.{name}", tensor[kept].cpu()))
        named.append(("seq", self.post_seq.cpu()))
        posts = ("slots", "slot_gens", "commit_pos", "n_commit", "n_draft", "need_rows")
        posted_B = self.post.slots.cpu() >= 0
        named += [(name, torch.where(posted_B, getattr(self.post, name).cpu(), -1)) for name in posts]
        counts = (self.post.n_commit + self.post.n_draft).cpu() * posted_B
        return [*named, ("tokens", self.post.tokens.cpu() * (torch.arange(2 * R) < counts[:, None]))]


def masks(seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 1000, (2, S - 1, R, WORDS)).astype(np.int32)


CASES = [("native", seed) for seed in range(12)] + [("triton", seed) for seed in range(3)]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def both(request: pytest.FixtureRequest) -> list[tuple[State, Any]]:
    """Two equal states: the launches over the one, torch's over the other."""
    kind, seed = request.param
    rows, cpu = masks(seed), torch.device("cpu")
    other = State(seed, cpu), TorchLaunches(R, mask_rows=lambda seq: rows[seq & 1])
    if kind == "native":
        one = State(seed, cpu)
        return [(one, NativeLaunches(one.slot, one.lane, lambda seq: rows[seq & 1].ctypes.data)), other]
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton: pip install .[dev]")
    from gpu_engine.step.device.triton_launches import TritonLaunches

    there = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [(State(seed, there), TritonLaunches(torch.from_numpy(rows).to(there))), other]


@pytest.mark.parametrize("num_rows", [1, 3, R])
def test_load(both: list[tuple[State, Any]], num_rows: int) -> None:
    inputs = []
    for state, launches in both:
        # Triton's kernel also writes ids of 32 bits.
        narrow = num_rows == 3 and not isinstance(launches, NativeLaunches | TorchLaunches)
        dtype = torch.int32 if narrow else torch.int64
        ids = torch.full((B, num_rows), 7, dtype=dtype, device=state.device)
        positions = torch.full((B, num_rows), 7, dtype=torch.int32, device=state.device)
        launches.load(state.batch(num_rows), ids, positions, state.table_BN)
        inputs.append((ids, positions, state.table_BN))
    for ours, theirs in zip(*inputs, strict=True):
        assert torch.equal(ours.cpu()[REAL].long(), theirs[REAL].long())
    assert both[0][0].differences(both[1][0]) == []


def test_advance(both: list[tuple[State, Any]]) -> None:
    for state, launches in both:
        launches.advance(state.batch(), state.store)
    assert both[0][0].differences(both[1][0]) == []


@pytest.mark.parametrize("both", [case for case in CASES if case[0] == "native"], indirect=True)
def test_drafts_are_dropped_of_the_lanes_that_emitted(both: list[tuple[State, Any]]) -> None:
    for state, launches in both:
        launches.drop_drafts(state.batch())
    assert both[0][0].differences(both[1][0]) == []


@pytest.mark.parametrize("k", [VERIFY, PROPOSE, 0, 2])
@pytest.mark.parametrize("max_rows", [1, 3, R])
def test_a_post_and_its_cached_rows(both: list[tuple[State, Any]], k: int, max_rows: int) -> None:
    for state, launches in both:
        launches.pack(state.batch(max_rows=max_rows), state.store, state.post, k)
    (one, _), (other, _) = both
    assert one.differences(other) == []
    kinds, forced = other.ints(B, R, high=6).to(torch.uint8), other.ints(B, R, high=V + 9) - 3
    kinds[:2, :2] = FORCED
    for state, launches in both:
        state.post.kinds.copy_(kinds)
        state.post.forced.copy_(forced)
        state.post.awaited.fill_(1 + k % 2)
        if k == PROPOSE:
            launches.take_jump_forward(state.batch(), state.post, V)
        else:
            launches.cache_rows(state.batch(), state.store, state.post, k, state.post_seq if k == VERIFY else None)
    assert one.differences(other) == []


@pytest.mark.parametrize("jump_forward", [False, True])
@pytest.mark.parametrize("ids", [2, 6, 40])
@pytest.mark.parametrize("both", [case for case in CASES if case[0] == "triton"], indirect=True)
def test_prompt_lookup(both: list[tuple[State, Any]], ids: int, jump_forward: bool) -> None:
    """The drafts of a lane begin with its jump-forward tokens, which are after the history.

    The native drafter looks up by votes instead (see tests/kernels/test_suffix.py).
    """
    (one, _), (other, _) = both
    ahead_B = other.ints(B, low=-1, high=R - 1)
    lengths_S = other.ints(S, low=R, high=L - R)
    for state, launches in both:
        state.slot.history_SL.remainder_(ids)
        state.slot.length_S.copy_(lengths_S)
        state.slot.params.prompt_length_S.copy_(lengths_S // 2)
        state.slot.params.max_length_S.copy_(lengths_S + R)
        state.lane.num_jump_forward_B.copy_(ahead_B)
        # One token before the end of the prompt, and one at its begin, equal the last one: the answer's text wins.
        s, n = int(state.lane.slots_B[0]), int(lengths_S[state.lane.slots_B[0]])
        state.slot.history_SL[s, :n] = torch.arange(100, 100 + n, device=state.device)
        state.slot.history_SL[s, [1, n // 2 - 1, n - 1]] = 7
        state.slot.draft_limit_S[s] = R - 1
        for b in REAL:
            s, count = int(state.lane.slots_B[b]), max(int(ahead_B[b]), 0)
            length = int(lengths_S[s])
            state.slot.drafts_SR[s, :count] = state.slot.history_SL[s, length : length + count]
        launches.propose_ngram(state.batch(), 4, jump_forward=jump_forward)
        unused = torch.arange(R, device=state.device) >= state.slot.num_drafts_S[:, None]
        state.slot.drafts_SR.masked_fill_(unused, 0)
    assert one.differences(other) == []


def test_a_step_that_posts_nothing_caches_nothing(both: list[tuple[State, Any]]) -> None:
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
