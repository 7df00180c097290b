"""Lanes of a batch over a drafting network."""

from __future__ import annotations

import torch

from gpu_engine.drafters.heads.eagle3 import Eagle3Net
from gpu_engine.drafters.heads.eagle3_head import Eagle3Head
from gpu_engine.drafters.nets import Hidden
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.prompt_rows import Chunks
from kernels.paged_attention import KVPages
from tests.gpu_engine.eagle import H, PlainAttention, V

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
            # Stale rows of a step with more rows lie after those of the emitted tokens.
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
