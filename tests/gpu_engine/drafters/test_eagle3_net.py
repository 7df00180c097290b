"""The EAGLE3 head over paged memory has the drafts of a plain chain.

Not responsible for: its columns, which are mapped to target tokens (see tests/kernels/test_accept.py).
"""

from __future__ import annotations

import torch

from tests.gpu_engine.drafters.lanes import Lanes
from tests.gpu_engine.eagle import make_head


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
