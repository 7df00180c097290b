"""Logits that are computed after the grammar's rows: those that a row leaves, with the bits of the whole product."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_engine.model.attention import AttentionContext, PromptRows
from gpu_engine.model.loader import LoadedModel, load_model
from kernels.accept import AcceptResult, StepTensors, accept
from kernels.blocks import can_multiply_blocks
from kernels.row_kinds import ALL, APPLY, DEFER, FORCED
from tests.gpu_engine.harness import config
from tests.gpu_engine.tiny import VOCAB
from tests.kernels.accept_cases import Case, tensors

pytestmark = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")

GROUP = 32
"""Outputs that the product computes together."""
Saved = Callable[[str], Path]


class Step:
    """Lanes of random kinds, drafts and masks, and the rows of a prompt next to them."""

    def __init__(self, model: LoadedModel, seed: int, num_lanes: int, num_rows: int) -> None:
        self.model, self.B, self.P = model, num_lanes, num_rows
        self._generator = torch.Generator().manual_seed(seed)
        self.cases = [self._case() for _ in range(num_lanes)]
        self.ids_BP = torch.randint(0, 256, (num_lanes, num_rows), generator=self._generator)
        self.positions_BP = torch.arange(num_rows, dtype=torch.int32).repeat(num_lanes, 1)
        for b, case in enumerate(self.cases):
            self.positions_BP[b, len(case.drafts) + 1 :] = -1

    def _pick(self, n: int) -> int:
        return int(torch.randint(n, (1,), generator=self._generator))

    def _case(self) -> Case:
        kinds = [(ALL, APPLY, APPLY, APPLY, FORCED, FORCED, DEFER)[self._pick(7)] for _ in range(self.P)]
        masks = {}
        for j, kind in enumerate(kinds):
            if kind == APPLY:  # most with a token or two, some with nearly all
                masks[j] = torch.rand(VOCAB, generator=self._generator) < (0.004, 0.004, 0.8)[self._pick(3)]
        return Case(
            history=[self._pick(256) for _ in range(6)],
            prompt_length=3,
            drafts=[self._pick(256) for _ in range(self._pick(self.P))],
            kinds=kinds,
            forced={j: self._pick(VOCAB) for j, kind in enumerate(kinds) if kind == FORCED},
            masks=masks,
            temperature=(0.0, 1.0)[self._pick(2)],
            repetition=(1.0, 1.3)[self._pick(2)],
            num_logprobs=(-1, -1, -1, 2)[self._pick(4)],
            seed=self._pick(1000),
        )

    def forward(self, *, defers_head: bool) -> torch.Tensor:
        """[B * P, V], of the memory that the model has for them."""
        tables = torch.arange(self.B + 1, dtype=torch.int32).view(-1, 1)
        prompt = PromptRows(torch.arange(40), torch.arange(40, dtype=torch.int32), (40,), tables[-1:].expand(1, 3))
        pages = self.model.allocate_pages(self.B + 4, 16)
        ctx = AttentionContext(pages, tables[:-1].expand(-1, 3).contiguous(), self.positions_BP, prompts=prompt)
        ctx.defers_head = defers_head
        return self.model.logits(self.ids_BP, ctx)

    def tensors(self) -> tuple[StepTensors, torch.Tensor]:
        """Return the step, and what it appends to: [S, L]."""
        t, R = tensors(self.cases, VOCAB, self.P + 1), self.P + 1
        words = t.masks_SRW.shape[2]
        self._masks = t.masks_SRW
        step = StepTensors(
            *(torch.arange(self.B, dtype=torch.int32), t.drafts_BR, t.num_drafts_B, t.kinds_BR, t.forced_BR),
            *(t.masks_SRW.data_ptr(), (R * words, words), t.history_SL, t.length_S, t.params),
            AcceptResult.allocate(self.B, R, VOCAB),
        )
        return step, t.history_SL

    def wanted(self) -> torch.Tensor:
        """[B * P, V]: the logits that `accept` may read, those that share a group with them, and no others."""
        wanted_NV = torch.zeros(self.B * self.P, math.ceil(VOCAB / GROUP) * GROUP, dtype=torch.bool)
        for b, case in enumerate(self.cases):
            for j in range(len(case.drafts) + 1):
                row_V, kind = wanted_NV[b * self.P + j], (case.kinds or [])[j]
                if kind == DEFER:
                    continue
                if kind == ALL or case.num_logprobs >= 0:
                    row_V[:] = True
                elif kind == FORCED:
                    row_V[case.forced[j]] = True
                else:
                    row_V[:VOCAB] = case.masks[j]
                    row_V[VOCAB:] = True  # the bits after the vocabulary are set in these cases
        groups_NG = wanted_NV.view(len(wanted_NV), -1, GROUP).any(2)
        return groups_NG.repeat_interleave(GROUP, dim=1)[:, :VOCAB]


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "gemma4 small"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("quantization", ["q4", "int8"])
def test_what_rows_leave_has_the_bits_of_the_whole_product(
    saved: Saved, family: str, threads: int, quantization: str
) -> None:
    model = load_model(config(model=str(saved(family)), dtype="bfloat16", quantization=quantization))
    assert model.can_defer_head
    before, partly = torch.get_num_threads(), 0
    torch.set_num_threads(threads)
    try:
        for seed, (num_lanes, num_rows) in enumerate([(1, 1), (1, 4), (3, 1), (5, 4), (9, 8), (20, 3)]):
            made = Step(model, seed, num_lanes, num_rows)
            whole_NV = made.forward(defers_head=False).clone()
            want, want_history = made.tensors()
            accept(whole_NV, want, num_rows=num_rows)
            deferred_NV = made.forward(defers_head=True)
            deferred_NV.fill_(math.nan)
            step, history = made.tensors()
            model.masked_head(step, num_rows)
            wanted_NV = made.wanted()
            assert torch.equal(deferred_NV[wanted_NV], whole_NV[wanted_NV])
            for row_V, wanted_V in zip(deferred_NV, wanted_NV, strict=True):
                if int(wanted_V.sum()) < VOCAB / 4:
                    partly += bool(wanted_V.any())
                    assert row_V[~wanted_V].isnan().all(), "only what is wanted is computed"
            accept(deferred_NV, step, num_rows=num_rows)
            assert torch.equal(history, want_history)
            for name in ("emitted_BR", "num_emitted_B", "finish_B", "blocked_B"):
                assert torch.equal(getattr(step.result, name), getattr(want.result, name)), name
            assert torch.equal(step.result.logprob_BR, want.result.logprob_BR)
    finally:
        torch.set_num_threads(before)
    assert partly > 10, "the cases have rows of which parts are computed"


@torch.inference_mode()
def test_a_head_that_was_not_deferred_is_not_computed_again(saved: Saved) -> None:
    model = load_model(config(model=str(saved("llama")), dtype="bfloat16", quantization="q4"))
    made = Step(model, 0, 2, 2)
    made.forward(defers_head=False)
    with pytest.raises(AssertionError, match="defers_head"):
        model.masked_head(made.tensors()[0], 2)


def test_other_forwards_defer_no_head(saved: Saved) -> None:
    model = load_model(config(model=str(saved("llama")), dtype="bfloat16", quantization="none"))
    assert not model.can_defer_head
