"""The EAGLE3 head over paged memory has the drafts of a plain chain, and its columns are mapped to target tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_engine.drafters.heads.eagle3_head import Eagle3Head
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers
from kernels.accept import StepTensors, draw_drafts
from shared_mem.layout import RowKind
from tests.gpu_engine.drafters.lanes import PAGE, Lanes
from tests.gpu_engine.eagle import VD, V, make_head


@torch.inference_mode()
def test_drafts_equal_those_of_a_plain_chain() -> None:
    lanes = Lanes(make_head(), lengths=[20, 9, 31, 3], emitted=[1, 4, 2, 1])
    batch, slot = lanes.batch, lanes.batch.slot
    place_B, table_BN = batch.slots_B.long(), slot.page_table_SN
    going_B = torch.ones(4, dtype=torch.bool)
    logits = [lanes.net.first(batch, place_B, going_B, going_B[:, None], table_BN, lanes.step_hidden)]
    drafts: list[torch.Tensor] = []
    for k in range(3):
        drafts.append(lanes.head.target_ids[logits[-1].argmax(-1)])
        positions_B1 = (slot.length_S + k)[:, None]
        logits.append(lanes.net.next(drafts[-1][:, None], positions_B1, table_BN))
    for b in range(4):
        plain = lanes.plain(b, [int(draft[b]) for draft in drafts])
        torch.testing.assert_close(torch.stack([each[b] for each in logits]), plain, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_lane_that_does_not_draft_writes_no_keys() -> None:
    lanes = Lanes(make_head(), lengths=[20, 9], emitted=[1, 2])
    batch, slot = lanes.batch, lanes.batch.slot
    before = lanes.net._pages.v.clone()
    going_B = torch.tensor([False, False])
    lanes.net.first(batch, batch.slots_B.long(), going_B, going_B[:, None], slot.page_table_SN, lanes.step_hidden)
    lanes.net.next(torch.zeros(2, 1), torch.full((2, 1), -1), slot.page_table_SN)
    torch.testing.assert_close(lanes.net._pages.v, before, rtol=0, atol=0)


def drawn(
    head: Eagle3Head, logits_D: torch.Tensor, kind: RowKind, *, legal: list[int] | None = None, forced: int = -1
) -> int:
    """Return the draft that one lane draws under one mask row."""
    slot, lane = SlotBuffers.allocate(1, 1, 16, PAGE), LaneBuffers.allocate(1, 1, V)
    slot.length_S[0] = 1
    slot.params.top_p_S[:] = 1.0
    slot.params.repetition_S[:] = 1.0
    mask = np.zeros(V, dtype=bool)
    mask[legal or []] = True
    words = torch.from_numpy(np.packbits(mask, bitorder="little").view(np.int32).copy())
    lane.kinds_BR[0, 0], lane.forced_BR[0, 0] = int(kind), forced
    step = StepTensors(
        lane.slots_B, lane.drafts_BR, lane.num_drafts_B, lane.kinds_BR, lane.forced_BR, words.data_ptr(),
        (len(words), len(words)), slot.history_SL, slot.length_S, slot.params, lane.result,
    )  # fmt: skip
    draw_drafts(logits_D[None], step, 0, d2t_V=head.d2t.int())
    return int(lane.drafts_BR[0, 0])


@pytest.mark.parametrize("best", [0, 7, VD - 1])
def test_a_drawn_column_is_mapped_to_its_token(best: int) -> None:
    head, logits = make_head(), torch.zeros(VD)
    logits[best] = 3.0
    assert drawn(head, logits, RowKind.ALL) == int(head.target_ids[best])


def test_a_mask_applies_to_tokens_and_not_to_columns() -> None:
    head = make_head()
    ids = head.target_ids.tolist()
    logits = torch.arange(VD, dtype=torch.float32)
    assert drawn(head, logits, RowKind.APPLY, legal=[ids[3], ids[5]]) == ids[5]


def test_a_mask_without_draft_tokens_gives_no_draft() -> None:
    head = make_head()
    outside = sorted(set(range(V)) - set(head.target_ids.tolist()))
    assert drawn(head, torch.randn(VD), RowKind.APPLY, legal=outside) == -1


def test_a_forced_token_outside_the_draft_vocabulary_is_drafted() -> None:
    head = make_head()
    outside = next(i for i in range(V) if i not in set(head.target_ids.tolist()))
    assert drawn(head, torch.randn(VD), RowKind.FORCED, forced=outside) == outside
