"""The EAGLE3 head over paged memory has the drafts of a plain chain, and its columns are mapped to target tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_engine.drafters.heads.eagle3 import Eagle3Net
from gpu_engine.drafters.heads.eagle3_head import Eagle3Head
from gpu_engine.drafters.nets import Hidden
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.prefill import Chunks
from kernels.accept import StepTensors, draw_drafts
from kernels.paged_attention import KVPages
from shared_mem.layout import RowKind
from tests.gpu_engine.eagle import VD, H, PlainAttention, V, make_head

PAGE, LENGTH, ROWS = 16, 64, 4


class Lanes:
    """Sequences of random tokens and hidden states: prefilled as the engine does it, then one step with emitted tokens.

    `lengths` and `emitted` give each lane's tokens after the step and the tokens that the step emitted. `walked`: the
    step verified a tree on a GPU, and these are the rows of each lane that gave its tokens.
    """

    def __init__(
        self, head: Eagle3Head, lengths: list[int], emitted: list[int], walked: list[list[int]] | None = None
    ) -> None:
        draw = torch.Generator().manual_seed(7)
        self.head, B = head, len(lengths)
        self.embedding = torch.nn.Embedding(V, H)
        torch.nn.init.normal_(self.embedding.weight, generator=draw)
        trees, shape = walked is not None, (2, H // 4, PAGE)
        pages = KVPages.allocate(B * LENGTH // PAGE + B, *shape, torch.float32, torch.device("cpu"), trees)
        self.net = Eagle3Net(head, self.embedding, pages)
        slot = SlotBuffers.allocate(B, ROWS, LENGTH, PAGE, trees=trees)
        lane = LaneBuffers.allocate(B, ROWS, V, trees=trees)
        slot.history_SL.copy_(torch.randint(0, V, slot.history_SL.shape, generator=draw))
        slot.page_table_SN.copy_(torch.arange(slot.page_table_SN.numel()).view(B, -1) % len(pages.v))
        lane.slots_B.copy_(torch.arange(B))
        self.aux_BLF = torch.randn(B, LENGTH, 3 * H, generator=draw)
        self.batch = StepBatch(slot, lane, B, ROWS, any_guided=False)
        befores = [length - count - 1 for length, count in zip(lengths, emitted, strict=True)]
        # Chunks with padding after the last token; the shorter lanes end before the longest one does.
        for start in range(0, max(befores), 5):
            places = list(range(B))
            starts = [min(start + b, before) for b, before in enumerate(befores)] if start else [0] * B
            ends = [min(start + 5 + b, before) for b, before in enumerate(befores)]
            chunks = Chunks.cut(slot, torch.tensor(places), *torch.tensor([starts, ends], dtype=torch.int32), 5 + B)
            self.net.prefill(chunks, self.hidden([(b, at, 5 + B) for b, at in zip(places, starts, strict=True)]))
        slot.length_S.copy_(torch.tensor(lengths))
        lane.result.num_emitted_B.copy_(torch.tensor(emitted))
        self.step_hidden = self.hidden(
            [(b, n - e - 1, ROWS) for b, (n, e) in enumerate(zip(lengths, emitted, strict=True))]
        )
        if lane.tree is not None and walked is not None:
            # Stale rows of a step with more rows lie behind those of the emitted tokens.
            lane.tree.walked_BR.fill_(15)
            for states_NH in self.step_hidden.values():
                assert states_NH is not None
                chain_BPH = states_NH.clone().view(B, ROWS, -1)
                states_NH.normal_(generator=draw)
                for b, rows in enumerate(walked):
                    lane.tree.walked_BR[b, : len(rows)] = torch.tensor(rows)
                    states_NH.view(B, ROWS, -1)[b, rows] = chain_BPH[b, : len(rows)]

    def hidden(self, rows: list[tuple[int, int, int]]) -> Hidden:
        """Return the target's hidden states of the rows (lane, first position, count), by layer."""
        aux_NF = torch.cat([self.aux_BLF[b, max(at, 0) : max(at, 0) + count] for b, at, count in rows])
        return {layer: aux_NF[:, i * H : (i + 1) * H] for i, layer in enumerate(self.head.config.aux_layers)}

    def plain(self, b: int, drafts: list[int]) -> torch.Tensor:
        """Return the logits of draft 0, 1, ... of lane `b`, from all its true pairs and then the head's own outputs."""
        length = int(self.batch.slot.length_S[b])
        ids = self.batch.slot.history_SL[b, :length].long()
        attention, last = PlainAttention(self.head), length - 1
        embeds, fused = self.embedding(ids[1:]), self.head.fuse(self.aux_BLF[b, :last])
        hidden = self.head(embeds, fused, torch.arange(last), attention)[-1:]
        out = [self.head.logits(hidden)[0]]
        for k, draft in enumerate(drafts):
            hidden = self.head(self.embedding(torch.tensor([draft])), hidden, torch.tensor([last + k]), attention)
            out.append(self.head.logits(hidden)[0])
        return torch.stack(out)


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
