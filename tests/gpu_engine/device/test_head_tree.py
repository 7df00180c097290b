"""An EAGLE3 head after a tree, and over one, has the states of plain chains."""

from __future__ import annotations

import torch

from tests.gpu_engine.device.device_requests import INTERPRETED
from tests.gpu_engine.drafters.lanes import Lanes
from tests.gpu_engine.eagle import make_head
from tests.kernels.tree_cases import way_to

pytestmark = INTERPRETED

PARENTS = [0, 0, 1, 2, 1, 3]
"""Of the drafts, which are rows 1 to 6; row 0 has the last token."""
LEVELS = [[0, 1], [2, 3, 4], [5]]


@torch.inference_mode()
def test_every_way_has_the_states_of_a_plain_chain() -> None:
    """The step emitted tokens of rows that were no chain, and the head's tree has two nodes and more on a level."""
    lanes = Lanes(make_head(), lengths=[15], emitted=[3], walked=[[0, 2, 3]])
    batch, net, table_BN = lanes.batch, lanes.net, lanes.batch.slot.page_table_SN
    going_B = torch.ones(1, dtype=torch.bool)
    last_BH = net.last(batch, batch.slots_B.long(), going_B, table_BN, lanes.step_hidden)
    torch.testing.assert_close(net.logits(last_BH), lanes.plain(0, []), rtol=1e-4, atol=1e-4)

    drafts_BP = torch.tensor([[7, 30, 2, 2, 9, 11]], dtype=torch.int32)
    rows_BXX = torch.zeros(1, 16, 16, dtype=torch.int32)
    depths = [len(way_to(PARENTS, row)) - 2 for row in range(1, 7)]
    for p in range(6):
        rows_BXX[:, p, : depths[p] + 1] = torch.tensor([row - 1 for row in way_to(PARENTS, p + 1)[1:]])
    before_BP = batch.slot.length_S[:, None] - 1
    positions_BP = (before_BP + torch.tensor(depths)).int()
    hidden_BPH, out_BPH = torch.zeros(1, 6, last_BH.shape[1]), torch.zeros(1, 6, last_BH.shape[1])
    for level in LEVELS:
        for p in level:
            hidden_BPH[:, p] = out_BPH[:, PARENTS[p] - 1] if PARENTS[p] else last_BH
        count = level[-1] + 1
        inputs = (t[:, :count].contiguous() for t in (drafts_BP, hidden_BPH, positions_BP))
        out_BPH[:, :count] = net.branch(*inputs, table_BN, rows_BXX)
    for p in range(6):
        way = [int(drafts_BP[0, row - 1]) for row in way_to(PARENTS, p + 1)[1:]]
        torch.testing.assert_close(net.logits(out_BPH[:, p])[0], lanes.plain(0, way)[-1], rtol=1e-4, atol=1e-4)
