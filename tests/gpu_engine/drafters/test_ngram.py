"""The n-gram drafter has the drafts of a plain search."""

from __future__ import annotations

import random

import pytest
import torch

from gpu_engine.drafters.ngram import NgramDrafter, NoDrafter
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.program import Drafter
from gpu_engine.step.stream import ImmediateStream
from kernels.accept import StepTensors
from tests.gpu_engine.step.torch_launches import TorchLaunches

SLOTS, ROWS, LENGTH = 6, 5, 96
STREAM, LAUNCHES = ImmediateStream(), TorchLaunches(ROWS)


def batch_of(slots: list[int]) -> StepBatch:
    slot = SlotBuffers.allocate(SLOTS, ROWS, LENGTH, 16)
    lane = LaneBuffers.allocate(SLOTS, ROWS, 64)
    # Values of the slot's earlier sequences must not matter.
    slot.history_SL.copy_(torch.randint(0, 4, slot.history_SL.shape, generator=torch.Generator().manual_seed(0)))
    slot.num_drafts_S[:] = -7
    slot.draft_limit_S[:] = ROWS - 1
    slot.params.max_length_S[:] = LENGTH
    lane.slots_B[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
    return StepBatch(slot, lane, len(slots), ROWS, any_guided=False)


def write(
    batch: StepBatch,
    slot: int,
    history: list[int],
    *,
    limit: int = ROWS - 1,
    max_length: int = LENGTH,
    prompt: int | None = None,
) -> None:
    batch.slot.history_SL[slot, : len(history)] = torch.tensor(history, dtype=torch.int32)
    batch.slot.length_S[slot] = len(history)
    batch.slot.params.prompt_length_S[slot] = len(history) if prompt is None else prompt
    batch.slot.draft_limit_S[slot] = limit
    batch.slot.params.max_length_S[slot] = max_length


def propose(drafter: Drafter, batch: StepBatch) -> None:
    slot, lane = batch.slot, batch.lane
    lanes = (batch.slots_B, lane.drafts_BR, lane.num_drafts_B, lane.kinds_BR, lane.forced_BR)
    drafter.propose(
        batch,
        StepTensors(*lanes, 0, (0, 0), slot.history_SL, slot.length_S, slot.params, lane.result),
        slot.page_table_SN,
        {},
    )


def drafts(batch: StepBatch, slot: int) -> list[int]:
    return batch.slot.drafts_SR[slot, : int(batch.slot.num_drafts_S[slot])].tolist()


def reference(history: list[int], most: int, limit: int, max_length: int, prompt: int) -> list[int]:
    """Return the tokens that follow the longest suffix that occurred before: its last occurrence before a token of
    the answer, else its first one."""
    n = len(history)
    room = max(min(limit, max_length - n - 1), 0)
    for size in range(min(most, n - 1), 0, -1):
        ends = [end for end in range(size, n) if history[end - size : end] == history[n - size :]]
        if ends:
            end = ends[-1] if ends[-1] >= prompt else ends[0]
            return history[end:][: min(room, 2 * size + 1)]
    return []


@pytest.mark.parametrize("most", [1, 3, 4, 8])
def test_drafts_equal_those_of_a_plain_search(most: int) -> None:
    drafter, draw = NgramDrafter(STREAM, LAUNCHES, most), random.Random(most * 10)
    found = 0
    for _ in range(150):
        slots = draw.sample(range(SLOTS), k=draw.randint(1, SLOTS))
        batch, expected = batch_of(slots), {}
        for slot in slots:
            letters = draw.randint(1, 6)
            history = [draw.randrange(letters) for _ in range(draw.randint(1, LENGTH - 1))]
            limit, max_length = draw.randint(0, ROWS - 1), draw.choice([LENGTH, len(history) + draw.randint(1, 4)])
            prompt = draw.randint(1, len(history))
            write(batch, slot, history, limit=limit, max_length=max_length, prompt=prompt)
            expected[slot] = reference(history, most, limit, max_length, prompt)
        propose(drafter, batch)
        assert {slot: drafts(batch, slot) for slot in slots} == expected
        assert all(int(batch.slot.num_drafts_S[slot]) == -7 for slot in range(SLOTS) if slot not in slots)
        found += sum(map(bool, expected.values()))
    assert found > 50


def test_no_drafter_leaves_the_numbers_of_drafts_unchanged() -> None:
    batch = batch_of([1, 4])
    batch.slot.num_drafts_S[:] = 3  # jump-forward tokens, which the sync wrote
    propose(NoDrafter(), batch)
    assert batch.slot.num_drafts_S.tolist() == [3] * SLOTS
