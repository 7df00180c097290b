"""The inputs of a step equal those of plain torch, and prompt lookup has the drafts of the engine's drafter."""

from __future__ import annotations

import pytest
import torch

from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from kernels.cuda.ngram import propose_ngram
from kernels.cuda.step_inputs import load_step
from tests.gpu_engine.step.torch_launches import TorchLaunches


def ints(device: torch.device, *shape: int, low: int = 0, high: int = 1000, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=g).int().to(device)


@pytest.mark.parametrize("P", [1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_load_cuts_the_last_token_and_the_drafts(device: torch.device, P: int, dtype: torch.dtype) -> None:
    S, R, L, N = 4, 5, 40, 7
    history, drafts, table = (ints(device, S, width, seed=width) for width in (L, R, N + 3))
    length = torch.tensor([9, 1, 30, 12], dtype=torch.int32, device=device)
    num = torch.tensor([4, 0, 2, 1], dtype=torch.int32, device=device)
    slots = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=device)
    ids, positions = torch.full((4, P), 9, dtype=dtype, device=device), ints(device, 4, P)
    out_drafts, out_num, out_table = ints(device, 4, R), ints(device, 4), ints(device, 4, N)
    limits = torch.tensor([1, 9, 3, 9], dtype=torch.int32, device=device)
    done = torch.tensor([False, True, False, False], device=device)
    load_step(slots, history, length, drafts, num, done, table, ids, positions, out_drafts, out_num, out_table, limits)
    for b, s in enumerate([2, -1, 0, 1]):
        count = min(int(num[s]), P - 1, int(limits[b])) if s >= 0 else 0
        live = s >= 0 and not done[s]
        want = [int(history[s, length[s] - 1]), *drafts[s, :count].tolist()] if live else []
        padding = P - len(want)
        assert ids[b].tolist() == want + [0] * padding
        assert positions[b].tolist() == [int(length[s]) - 1 + j for j in range(len(want))] + [-1] * padding
        assert int(out_num[b]) == count
        if s >= 0:
            assert out_drafts[b].tolist() == drafts[s].tolist()
            assert torch.equal(out_table[b], table[s, :N])


@pytest.mark.parametrize(("longest", "ids"), [(3, 3), (4, 4), (2, 200)])
def test_ngram_drafts_equal_those_of_the_engine(device: torch.device, longest: int, ids: int) -> None:
    S, R, L = 8, 4, 150
    slot, lane = SlotBuffers.allocate(S, R, L, 16), LaneBuffers.allocate(S, R, 8)
    slot.history_SL.copy_(ints(torch.device("cpu"), *slot.history_SL.shape, high=ids, seed=ids))
    slot.length_S.copy_(torch.tensor([1, 2, 5, 40, 90, 150, 149, 60]))
    slot.draft_limit_S.copy_(torch.tensor([3, 3, 3, 3, 0, 3, 3, 2]))
    slot.params.max_length_S.fill_(150)
    lane.slots_B.copy_(torch.arange(S).flip(0))
    slot.params.prompt_length_S.copy_(slot.length_S // 2)
    ours = [t.to(device) for t in (lane.slots_B, slot.history_SL, slot.length_S)]
    ours += [slot.params.prompt_length_S.to(device), slot.draft_limit_S.to(device)]
    drafts, num = slot.drafts_SR.to(device), slot.num_drafts_S.to(device)
    limit = slot.params.max_length_S.to(device)
    propose_ngram(*ours, limit, drafts, num, ngram_max=longest)
    batch = StepBatch(slot, lane, S, R, any_guided=False)
    TorchLaunches(R).propose_ngram(batch, longest, jump_forward=False)
    assert num.tolist() == slot.num_drafts_S.tolist()
    for s in range(S):
        assert drafts[s, : int(num[s])].tolist() == slot.drafts_SR[s, : int(num[s])].tolist()


@pytest.mark.parametrize("ids", [2, 6])
def test_ngram_drafts_continue_after_jump_forward_tokens(device: torch.device, ids: int) -> None:
    S, R, L = 8, 4, 150
    slot, lane = SlotBuffers.allocate(S, R, L, 16), LaneBuffers.allocate(S, R, 8)
    slot.history_SL.copy_(ints(torch.device("cpu"), *slot.history_SL.shape, high=ids, seed=ids))
    slot.drafts_SR.copy_(ints(torch.device("cpu"), S, R, high=ids, seed=3))
    slot.length_S.copy_(torch.tensor([4, 2, 5, 40, 90, 140, 60, 60]))
    # There may be more jump-forward tokens than the limit of a drafter's drafts.
    slot.draft_limit_S.copy_(torch.tensor([3, 3, 3, 2, 1, 1, 3, 2]))
    slot.params.max_length_S.fill_(150)
    slot.num_drafts_S.fill_(2)
    lane.slots_B.copy_(torch.arange(S))
    lane.num_jump_forward_B.copy_(torch.tensor([1, 0, -1, 3, 1, 2, -1, 1]))
    for s, count in enumerate(lane.num_jump_forward_B.clamp(min=0).tolist()):
        slot.drafts_SR[s, :count] = slot.history_SL[s, int(slot.length_S[s]) :][:count]
    before = slot.drafts_SR.clone()
    slot.params.prompt_length_S.copy_(slot.length_S // 2)
    ours = [t.to(device) for t in (lane.slots_B, slot.history_SL, slot.length_S)]
    ours += [slot.params.prompt_length_S.to(device), slot.draft_limit_S.to(device)]
    drafts, num = slot.drafts_SR.clone().to(device), slot.num_drafts_S.clone().to(device)
    limit, ahead = slot.params.max_length_S.to(device), lane.num_jump_forward_B.to(device)
    propose_ngram(*ours, limit, drafts, num, ngram_max=4, num_jump_forward_B=ahead)
    batch = StepBatch(slot, lane, S, R, any_guided=True)
    TorchLaunches(R).propose_ngram(batch, 4, jump_forward=True)
    assert num.tolist() == slot.num_drafts_S.tolist()
    assert num[lane.num_jump_forward_B < 0].tolist() == [2, 2]
    assert any(int(num[s]) > count for s, count in enumerate(lane.num_jump_forward_B.tolist()) if count > 0)
    for s, count in enumerate(lane.num_jump_forward_B.tolist()):
        assert drafts[s, : int(num[s])].tolist() == slot.drafts_SR[s, : int(num[s])].tolist()
        assert drafts[s, : count if count >= 0 else R].tolist() == before[s, : count if count >= 0 else R].tolist()
