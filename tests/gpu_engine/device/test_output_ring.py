"""The output ring: a reader gets the outputs of its own step, whatever later steps write, in the form of `outcomes`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gpu_engine.api.request import FinishReason
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.outcomes import outcomes
from gpu_engine.step.output_ring import OutputRing
from kernels.accept import STOP_TOKEN
from shared_mem.layout import RowKind
from tests.gpu_engine.device.recorded_stream import RecordedStream

LANES, R = 4, 3


@pytest.fixture
def stream() -> Iterator[RecordedStream]:
    made = RecordedStream()
    yield made
    made.close()


def step(lane: LaneBuffers, first: int) -> None:
    """Write the outputs of a step: lane b emits b tokens from `first + 10 b` on; lane 3 is deferred, lane 2 stops."""
    lane_B = torch.arange(LANES, dtype=torch.int32)
    r = lane.result
    r.emitted_BR.copy_(first + 10 * lane_B[:, None] + torch.arange(R))
    r.num_emitted_B.copy_(torch.where(lane_B < 3, lane_B, 0))
    r.num_accepted_B.copy_((lane_B - 1).clamp(min=0))
    r.blocked_B.copy_(torch.where(lane_B == 3, int(RowKind.DEFER), 0))
    r.finish_B.copy_(torch.where(lane_B == 2, STOP_TOKEN, 0))
    r.logprob_BR.copy_(-r.emitted_BR.float())
    r.top_ids_BRN.copy_(r.emitted_BR[:, :, None].expand_as(r.top_ids_BRN))
    lane.num_drafts_B.fill_(2)
    lane.slots_B.copy_(lane_B + 5)
    lane.slot_gens_B.fill_(first)


def test_outputs_belong_to_their_step_and_become_outcomes(stream: RecordedStream) -> None:
    lane, slot = LaneBuffers.allocate(LANES, R, 64), SlotBuffers.allocate(LANES, R, 64, 16)
    report = (torch.tensor([(1 << 40) + 7]), torch.tensor([123_456_789_012]))
    ring = OutputRing(stream, lane, report, max_inflight_steps=2)
    batch = StepBatch(slot, lane, LANES, R, any_guided=True)
    entries = []
    for first in (100, 1000):
        stream.kernel(step, lane, first)
        ring.pack(batch)
        entries.append(ring.push(batch, logprobs=first == 100))
    early, late = (ring.read(entry) for entry in entries)
    assert (early.seq, early.waited_ns) == ((1 << 40) + 7, 123_456_789_012)
    assert (early.slots, early.slot_gens) == ([5, 6, 7, 8], [100] * 4)
    results = outcomes(early, 4, guided=[True] * 4, logprobs=[None, 1, None, None])
    assert [outcome.token_ids for outcome in results] == [(), (110,), (120, 121), ()]
    assert [outcome.finish for outcome in results] == [None, None, FinishReason.STOP, None]
    assert [outcome.deferred for outcome in results] == [False, False, False, True]
    assert [outcome.num_drafts for outcome in results] == [2] * 4
    assert results[1].logprobs[0].logprob == -110
    assert [token for token, _ in results[1].logprobs[0].top] == [110]
    assert late.emitted[1][0] == 1010
    assert late.logprobs[0].numel() == 0, "no request asked for log-probabilities"
    half = StepBatch(slot, lane, 2, R, any_guided=False)
    ring = OutputRing(stream, lane)
    ring.pack(half)
    outputs = ring.read(ring.push(half))
    assert outputs.emitted == [[1000, 1001, 1002], [1010, 1011, 1012]], "of the lanes of a bucket"
    assert (outputs.seq, outputs.waited_ns) == (0, 0)
