"""Verification and sampling of one step on a GPU: the launches after `kernels.accept.accept`.

Two to four kernels: rows (a tile of columns each), filters (rows with filters), acceptance (along a chain, or along a
path of a tree, see tree_acceptance.py), log-probabilities (rows that return them). Invariant: no launch depends on
data, so all of them can be captured. A lane with a negative slot is idle: it emits nothing and touches no slot. The
rule and the noise equal those of kernels/accept.py."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from kernels.cuda.acceptance import acceptance_kernel, draft_kernel
from kernels.cuda.filters import filter_kernel
from kernels.cuda.logprobs import TILE as _LOGPROB_TILE
from kernels.cuda.logprobs import logprobs_kernel
from kernels.cuda.row_state import RowScratch, SlotRows
from kernels.cuda.rows import row_kernel
from kernels.cuda.tree_acceptance import tree_acceptance_kernel
from kernels.step_tensors import MAX_LOGPROBS, DraftTree, StepTensors

_FILTER_TILE_ROWS = 128


def accept(logits_NV: torch.Tensor, step: StepTensors, *, num_rows: int) -> None:
    """Verify and sample; append the emitted tokens to `history_SL`, advance `length_S`, count them in `seen_SV`.

    A slot in `done_S` emits nothing, with blocked DEFER; one that ends here (a finish, DEAD_END, ERROR) is added. As
    `kernels.accept.accept` otherwise; `logits_NV` may be fp16 too. Masks, rules and scratch are those of `step.device`,
    which is not None; `mask_address` and `params.rules_S` are not read.
    """
    rows, scratch, filters = _check(logits_NV, step, num_rows)
    B, R, V = step.slots_B.shape[0], step.kinds_BR.shape[1], logits_NV.shape[1]
    p, r, tiles = step.params, step.result, -(-V // scratch.block)
    _rows(logits_NV, step, None, num_rows=num_rows, first_row=0, draft=False)
    partial_stride, tree = scratch.best_NC.shape[1], step.tree
    kernel = acceptance_kernel if tree is None else tree_acceptance_kernel
    kernel[(B,)](
        step.slots_B,
        step.drafts_BR,
        step.num_drafts_B,
        step.kinds_BR,
        step.forced_BR,
        step.history_SL,
        step.length_S,
        p.max_length_S,
        p.temperature_S,
        p.top_p_S,
        p.min_p_S,
        p.top_k_S,
        rows.rules_SX,
        rows.seen_SV,
        rows.done_S.view(torch.uint8),
        scratch.best_NC,
        scratch.best_column_NC,
        scratch.peak_NC,
        scratch.chosen_N,
        r.emitted_BR,
        r.num_emitted_B,
        r.num_accepted_B,
        r.finish_B,
        r.blocked_B,
        *(() if tree is None else (tree.parent_BR, tree.walked_BR)),
        R,
        step.history_SL.stride(0),
        rows.rules_SX.stride(0),
        rows.seen_SV.stride(0),
        partial_stride,
        tiles,
        V,
        num_rows,
        ROWS=triton.next_power_of_2(num_rows),
        TILES=triton.next_power_of_2(tiles),
        RULES=triton.next_power_of_2(rows.rules_SX.shape[1]),
        FILTERS=filters,
        num_warps=4,
    )
    if step.device is not None and step.device.logprobs:
        own_NV = logits_NV if step.model_logits_NV is None else step.model_logits_NV
        assert own_NV.shape == logits_NV.shape
        assert own_NV.stride(1) == 1
        logprobs_kernel[(B * num_rows,)](
            own_NV,
            step.slots_B,
            r.emitted_BR,
            r.num_emitted_B,
            p.num_logprobs_S,
            step.kinds_BR,
            step.forced_BR,
            rows.masks_SRW,
            None if tree is None else tree.walked_BR,
            r.logprob_BR,
            r.top_ids_BRN,
            r.top_logprobs_BRN,
            own_NV.stride(0),
            R,
            rows.masks_SRW.stride(0),
            rows.masks_SRW.stride(1),
            V,
            num_rows,
            MOST=MAX_LOGPROBS,
            TILE=_LOGPROB_TILE,
            TREE=tree is not None,
            MASKS=True,
            num_warps=16,
        )


def draw_drafts(logits_BV: torch.Tensor, step: StepTensors, k: int, *, d2t_V: torch.Tensor | None = None) -> None:
    """Draw draft k of every lane into `drafts_BR[:, k]`, by the rule and with the noise of row k of the next verify.

    As `kernels.accept.draw_drafts`. `d2t_V` int32 [Vd] is added to a column of `logits_BV` [B, Vd] to give its token,
    where the drafter's vocabulary is pruned: masks, noise, penalties and bans are those of the token.
    """
    _, scratch, filters = _check(logits_BV, step, 1)
    V = logits_BV.shape[1]
    assert 0 <= k < step.drafts_BR.shape[1], (k, step.drafts_BR.shape)
    assert d2t_V is None or (d2t_V.dtype == torch.int32 and d2t_V.shape == (V,) and d2t_V.is_contiguous())
    _rows(logits_BV, step, d2t_V, num_rows=1, first_row=k, draft=True)
    p, tiles = step.params, -(-V // scratch.block)
    draft_kernel[(step.slots_B.shape[0],)](
        step.slots_B,
        step.kinds_BR,
        step.forced_BR,
        d2t_V,
        step.drafts_BR,
        step.history_SL,
        step.length_S,
        p.temperature_S,
        p.top_p_S,
        p.min_p_S,
        p.top_k_S,
        scratch.best_NC,
        scratch.best_column_NC,
        scratch.peak_NC,
        scratch.chosen_N,
        step.kinds_BR.shape[1],
        step.history_SL.stride(0),
        scratch.best_NC.shape[1],
        tiles,
        V,
        k,
        TILES=triton.next_power_of_2(tiles),
        FILTERS=filters,
        D2T=d2t_V is not None,
        num_warps=1,
    )


def _rows(
    logits: torch.Tensor, step: StepTensors, d2t: torch.Tensor | None, *, num_rows: int, first_row: int, draft: bool
) -> None:
    """Fill the scratch with the best column of every row, and of every filtered row."""
    rows, scratch, filters = _check(logits, step, num_rows)
    B, R, V, p = step.slots_B.shape[0], step.kinds_BR.shape[1], logits.shape[1], step.params
    tiles, partial_stride = -(-V // scratch.block), scratch.best_NC.shape[1]
    partials = (scratch.best_NC, scratch.best_column_NC, scratch.peak_NC, scratch.logits_NV)
    # A draft that is drawn is the next of a chain.
    tree = None if draft else step.tree
    ways = (None, None) if tree is None else (tree.depth_BR, tree.tokens_BRR)
    flags = {"DRAFT": draft, "FILTERS": filters, "SCORES": False}
    _launch_rows(logits, step, d2t, ways, scratch.logits_NV, num_rows, first_row, flags)
    if filters:
        filter_kernel[(B * num_rows,)](
            step.slots_B,
            step.num_drafts_B,
            step.kinds_BR,
            rows.done_S.view(torch.uint8),
            d2t,
            step.length_S,
            p.temperature_S,
            p.top_p_S,
            p.min_p_S,
            p.top_k_S,
            p.seed_S,
            ways[0],
            *partials,
            scratch.chosen_N,
            R,
            scratch.logits_NV.stride(0),
            partial_stride,
            tiles,
            tiles * scratch.block,
            V,
            num_rows,
            first_row,
            ROWS=_FILTER_TILE_ROWS,
            TILES=triton.next_power_of_2(tiles),
            DRAFT=draft,
            D2T=d2t is not None,
            TREE=tree is not None,
            num_warps=16,
        )


def score_rows(
    logits_NV: torch.Tensor,
    step: StepTensors,
    tree: DraftTree,
    k: int,
    num_rows: int,
    *,
    d2t_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the scores of the tokens after the rows of level k - 1, or after the last token for k = 0: float32
    [N, V].

    A score is what verification would compare there, except for masks and filters: bans, biases, penalties, temperature
    and the noise of the position. `num_rows` rows a lane, N = B * `num_rows`; a row of an idle lane is undefined.
    """
    assert step.device is not None, "StepTensors.device is needed on a GPU"
    B, (N, V), scratch = step.slots_B.shape[0], logits_NV.shape, step.device.scratch
    assert B * num_rows == N
    assert scratch.best_NC.shape[0] >= N
    assert logits_NV.stride(1) == 1
    assert d2t_V is None or (d2t_V.dtype == torch.int32 and d2t_V.shape == (V,) and d2t_V.is_contiguous())
    of_tree = replace(step, drafts_BR=tree.ids_BX, kinds_BR=tree.kinds_BX, forced_BR=tree.ids_BX)
    scores_NV = torch.empty(N, V, dtype=torch.float32, device=logits_NV.device)
    ways = (tree.depth_BX, tree.tokens_BXX) if k else (None, None)
    flags = {"DRAFT": True, "FILTERS": False, "SCORES": True}
    _launch_rows(logits_NV, of_tree, d2t_V, ways, scores_NV, num_rows, max(k - 1, 0) * num_rows, flags)
    return scores_NV


def _launch_rows(
    logits: torch.Tensor,
    step: StepTensors,
    d2t: torch.Tensor | None,
    ways: tuple[torch.Tensor | None, torch.Tensor | None],
    out: torch.Tensor,
    num_rows: int,
    first_row: int,
    flags: dict[str, bool],
) -> None:
    """Launch the kernel of rows; `ways` are the depths and tokens of a tree, and `out` is its scratch."""
    assert step.device is not None
    rows, scratch, p = step.device.slots, step.device.scratch, step.params
    B, R, V = step.slots_B.shape[0], step.kinds_BR.shape[1], logits.shape[1]
    row_kernel[(-(-V // scratch.block), B * num_rows)](
        logits,
        step.slots_B,
        step.drafts_BR,
        step.num_drafts_B,
        step.kinds_BR,
        step.forced_BR,
        rows.masks_SRW,
        d2t,
        step.history_SL,
        step.length_S,
        p.prompt_length_S,
        p.min_tokens_S,
        p.temperature_S,
        p.top_p_S,
        p.min_p_S,
        p.repetition_S,
        p.presence_S,
        p.frequency_S,
        p.top_k_S,
        p.seed_S,
        rows.rules_SX,
        rows.seen_SV,
        rows.done_S.view(torch.uint8),
        rows.biases.ids_SX,
        rows.biases.values_SX,
        rows.biases.num_S,
        *ways,
        scratch.best_NC,
        scratch.best_column_NC,
        scratch.peak_NC,
        out,
        logits.stride(0),
        R,
        step.history_SL.stride(0),
        rows.masks_SRW.stride(0),
        rows.masks_SRW.stride(1),
        rows.rules_SX.stride(0),
        rows.seen_SV.stride(0),
        out.stride(0),
        scratch.best_NC.shape[1],
        V,
        num_rows,
        first_row,
        ROWS=scratch.block // 32,
        D2T=d2t is not None,
        TREE=ways[0] is not None,
        num_warps=4,
        **flags,
    )


def _check(logits: torch.Tensor, step: StepTensors, num_rows: int) -> tuple[SlotRows, RowScratch, bool]:
    """Assert shapes, dtypes, strides and devices; return the device's state."""
    assert step.device is not None, "StepTensors.device is needed on a GPU"
    rows, scratch, filters = step.device.slots, step.device.scratch, step.device.filters
    B, R, V = step.slots_B.shape[0], step.kinds_BR.shape[1], logits.shape[1]
    assert logits.dtype in (torch.bfloat16, torch.float16, torch.float32), logits.dtype
    assert logits.stride(1) == 1
    assert logits.shape[0] >= B * num_rows, (logits.shape, B, num_rows)
    assert 1 <= num_rows <= R == step.drafts_BR.shape[1] == step.result.emitted_BR.shape[1], (num_rows, R)
    assert step.kinds_BR.dtype == torch.uint8
    assert step.forced_BR.shape == step.kinds_BR.shape
    lanes = (step.slots_B, step.drafts_BR, step.num_drafts_B, step.forced_BR)
    ints = (*lanes, step.history_SL, step.length_S, rows.rules_SX, rows.seen_SV, rows.biases.ids_SX, rows.biases.num_S)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in ints)
    assert step.kinds_BR.is_contiguous()
    assert rows.masks_SRW.dtype == torch.int32
    assert rows.masks_SRW.stride(2) == 1
    assert rows.done_S.dtype == torch.bool
    assert step.params.seed_S.dtype == torch.int64
    if step.tree is not None:
        trees = (step.tree.parent_BR, step.tree.depth_BR, step.tree.tokens_BRR, step.tree.walked_BR)
        assert all(t.dtype == torch.int32 and t.is_contiguous() and t.shape[1] == R for t in trees)
    assert scratch.best_NC.shape[1] * scratch.block >= V, (V, scratch.best_NC.shape, scratch.block)
    assert scratch.best_NC.shape[0] >= B * num_rows, scratch.best_NC.shape
    assert not filters or scratch.logits_NV.shape[0] >= B * num_rows, scratch.logits_NV.shape
    tensors = (
        *ints,
        step.kinds_BR,
        rows.masks_SRW,
        rows.done_S,
        step.params.temperature_S,
        scratch.best_NC,
        step.result.emitted_BR,
    )
    assert all(t.device == logits.device for t in tensors), [t.device for t in tensors]
    return rows, scratch, filters
