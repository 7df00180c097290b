"""The kernels of a step in one CUDA graph: replays have the results of the same launches without a graph."""

from __future__ import annotations

import pytest
import torch

from kernels.accept import AcceptResult, SlotParams, StepTensors, accept, draw_drafts
from kernels.cuda.row_state import DeviceRows, RowScratch, SlotRows
from kernels.cuda.step_inputs import load_step
from kernels.paged_attention import KVPages, paged_attention

pytestmark = pytest.mark.gpu

B, P, V, L, N = 3, 4, 1000, 200, 16


class Step:
    """Tensors of a small step whose model is its attention's output times a matrix."""

    def __init__(self) -> None:
        g = torch.Generator("cuda").manual_seed(0)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g, device="cuda")

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device="cuda")

        self.embed, self.head = rand(V, 64).bfloat16(), rand(64, V).bfloat16()
        self.pages = KVPages.allocate(B * N, 1, 64, 16, torch.bfloat16, torch.device("cuda"))
        self.table_SN = torch.arange(B * N, device="cuda").int().view(B, N)
        self.ids, self.positions, self.table = ints(B, P).long(), ints(B, P), ints(B, N)
        self.drafts_SR, self.num_drafts, self.draft_limits = ints(B, P), ints(B) + P - 1, ints(B) + P - 1
        params = SlotParams.allocate(B, "cuda")
        params.temperature_S.copy_(torch.tensor([0.0, 0.9, 1.2]))
        params.top_p_S.copy_(torch.tensor([1.0, 1.0, 0.9]))
        params.repetition_S.copy_(torch.tensor([1.0, 1.3, 1.0]))
        params.num_logprobs_S.copy_(torch.tensor([-1, 5, 0]))
        params.max_length_S.fill_(L - P)
        done = torch.zeros(B, dtype=torch.bool, device="cuda")
        rows = SlotRows.allocate(B, V, torch.full((B, P, 32), 0x55555555, dtype=torch.int32, device="cuda"), done)
        kinds = torch.tensor([[1, 0, 1, 0]] * B, dtype=torch.uint8, device="cuda")
        self.step = StepTensors(
            *(torch.arange(B, dtype=torch.int32, device="cuda"), ints(B, P), ints(B), kinds, ints(B, P), 0, (0, 0)),
            *(ints(B, L), ints(B) + 5, params, AcceptResult.allocate(B, P, V, "cuda")),
            DeviceRows(rows, RowScratch.allocate(B * P, V, "cuda")),
        )
        self.emitted: list[torch.Tensor] = []
        """The emitted tokens of each step that has run, and their numbers."""

    def run(self) -> None:
        s = self.step
        assert s.device is not None
        done = s.device.slots.done_S
        load_step(
            *(s.slots_B, s.history_SL, s.length_S, self.drafts_SR, self.num_drafts, done, self.table_SN, self.ids),
            *(self.positions, s.drafts_BR, s.num_drafts_B, self.table, self.draft_limits),
        )
        x = self.embed[self.ids][:, :, None]
        out = paged_attention(x, x, x, self.pages, self.table, self.positions, scale=0.1)
        logits = (out.view(B * P, 64) @ self.head).float() / 8
        accept(logits, s, num_rows=P)
        draw_drafts(logits.view(B, P, V)[:, 0].contiguous(), s, 0)
        self.drafts_SR.copy_(s.drafts_BR.clamp(min=0))

    def note(self) -> None:
        r = self.step.result
        self.emitted.append(torch.cat([r.num_emitted_B[:, None], r.emitted_BR], dim=1).cpu())


def test_replays_equal_plain_launches() -> None:
    plain, captured, warm = Step(), Step(), Step()
    warm.run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run()
    for _ in range(6):
        plain.run()
        plain.note()
        graph.replay()
        captured.note()
    assert all(torch.equal(*pair) for pair in zip(plain.emitted, captured.emitted, strict=True))
    assert int(captured.emitted[5][:, 0].min()) >= 1  # every lane emitted
    assert torch.equal(plain.step.history_SL, captured.step.history_SL)
    assert torch.equal(plain.pages.k, captured.pages.k)
    assert torch.equal(plain.step.result.logprob_BR[1], captured.step.result.logprob_BR[1])


def test_tokens_of_a_large_vocabulary_equal_those_of_the_cpu() -> None:
    large, rows = 128_256, 4
    logits = (torch.randn(rows, large, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    kinds = torch.zeros(rows, 1, dtype=torch.uint8)
    params = SlotParams.allocate(rows)
    params.temperature_S.copy_(torch.tensor([0.0, 0.7, 1.0, 1.3]))
    params.top_p_S.copy_(torch.tensor([1.0, 1.0, 0.9, 0.95]))
    params.top_k_S.copy_(torch.tensor([0, 0, 0, 40]))
    params.repetition_S.fill_(1.0)
    params.num_logprobs_S.fill_(-1)
    params.max_length_S.fill_(100)
    for seed in range(20):
        params.seed_S.copy_(torch.arange(rows) + (seed << 40))
        tokens = []
        for name in ("cpu", "cuda"):
            there = SlotParams(*(getattr(params, f).to(name) for f in SlotParams.__slots__))
            zeros = torch.zeros(rows, 1, dtype=torch.int32, device=name)
            result = AcceptResult.allocate(rows, 1, large, name)
            device = None
            if name == "cuda":
                masks = torch.zeros(rows, 1, large // 32, dtype=torch.int32, device=name)
                state = SlotRows.allocate(rows, large, masks, torch.zeros(rows, dtype=torch.bool, device=name))
                device = DeviceRows(state, RowScratch.allocate(rows, large, name))
            lanes = (torch.arange(rows, dtype=torch.int32, device=name), zeros, zeros[:, 0].contiguous())
            history, length = torch.zeros(rows, 20, dtype=torch.int32, device=name), zeros[:, 0].contiguous() + 3
            step = StepTensors(*lanes, kinds.to(name), zeros, 0, (0, 0), history, length, there, result, device)
            accept(logits.to(name), step, num_rows=1)
            tokens.append(result.emitted_BR[:, 0].tolist())
        assert tokens[0] == tokens[1]
