"""Verification and sampling of one step on a GPU: the launches behind `kernels.accept.accept`.

Two to four kernels: rows (a tile of columns each), filters (rows that ask), the walk, log-probabilities (rows that
ask). One invariant: no launch depends on data, so the whole can be captured. A lane with a negative slot is idle: it
emits nothing and touches no slot. The rule and the noise are those of kernels/accept.py.
"""

from __future__ import annotations

import torch
import triton

from kernels.accept import MAX_LOGPROBS, AcceptResult, SlotParams
from kernels.cuda.filters import filter_kernel
from kernels.cuda.logprobs import logprobs_kernel
from kernels.cuda.row_state import RowScratch, SlotRows
from kernels.cuda.rows import row_kernel
from kernels.cuda.walk import draft_kernel, walk_kernel

_FILTER_TILE_ROWS = 256
_LOGPROB_TILE = 8192


def accept(
    logits_NV: torch.Tensor,
    slots_B: torch.Tensor,
    drafts_BR: torch.Tensor,
    num_drafts_B: torch.Tensor,
    kinds_BR: torch.Tensor,
    forced_BR: torch.Tensor,
    history_SL: torch.Tensor,
    length_S: torch.Tensor,
    params: SlotParams,
    rows: SlotRows,
    scratch: RowScratch,
    result: AcceptResult,
    *,
    num_rows: int,
    filters: bool = True,
    logprobs: bool = True,
) -> None:
    """Verify and sample; append what is emitted to `history_SL`, advance `length_S`, count it in `rows.seen_SV`.

    As `kernels.accept.accept`, with masks and rules in `rows`. `logits_NV` [B * P, V] bf16, fp16 or fp32, row b * P +
    j; `num_rows` is P; the other shapes and dtypes are those of the CPU call. `filters` and `logprobs` are static:
    False leaves their kernels out of the program, and no lane may then ask for them.
    """
    _check(logits_NV, slots_B, drafts_BR, kinds_BR, forced_BR, history_SL, length_S, params, rows, scratch)
    B, R, V = slots_B.shape[0], kinds_BR.shape[1], logits_NV.shape[1]
    assert 1 <= num_rows <= R == drafts_BR.shape[1] == result.emitted_BR.shape[1], (num_rows, R)
    assert logits_NV.shape[0] >= B * num_rows, (logits_NV.shape, B, num_rows)
    assert num_drafts_B.dtype == torch.int32
    assert not filters or scratch.logits_NV.shape[0] >= B * num_rows, scratch.logits_NV.shape
    assert scratch.best_NC.shape[0] >= B * num_rows, scratch.best_NC.shape
    p, r = params, result
    _rows(
        *(logits_NV, slots_B, drafts_BR, num_drafts_B, kinds_BR, forced_BR, None),
        *(history_SL, length_S, params, rows, scratch),
        num_rows=num_rows,
        first_row=0,
        draft=False,
        filters=filters,
    )
    tiles = scratch.best_NC.shape[1]
    walk_kernel[(B,)](
        *(slots_B, drafts_BR, num_drafts_B, kinds_BR, history_SL, length_S, p.max_length_S),
        *(p.temperature_S, p.top_p_S, p.min_p_S, p.top_k_S, rows.rules_SX, rows.seen_SV),
        *(scratch.best_NC, scratch.best_column_NC, scratch.peak_NC, scratch.chosen_N),
        *(r.emitted_BR, r.num_emitted_B, r.num_accepted_B, r.finish_B, r.blocked_B),
        *(R, history_SL.stride(0), rows.rules_SX.stride(0), rows.seen_SV.stride(0), tiles, -(-V // scratch.block), V),
        num_rows,
        ROWS=triton.next_power_of_2(num_rows),
        TILES=triton.next_power_of_2(tiles),
        RULES=triton.next_power_of_2(rows.rules_SX.shape[1]),
        FILTERS=filters,
        num_warps=4,
    )
    if logprobs:
        logprobs_kernel[(B * num_rows,)](
            *(logits_NV, slots_B, r.emitted_BR, r.num_emitted_B, p.num_logprobs_S),
            *(r.logprob_BR, r.top_ids_BRN, r.top_logprobs_BRN, logits_NV.stride(0), R, V, num_rows),
            MOST=MAX_LOGPROBS,
            TILE=_LOGPROB_TILE,
            num_warps=16,
        )


def sample_draft(
    logits_BV: torch.Tensor,
    slots_B: torch.Tensor,
    row: int,
    drafts_SR: torch.Tensor,
    num_drafts_S: torch.Tensor,
    kinds_BR: torch.Tensor,
    forced_BR: torch.Tensor,
    history_SL: torch.Tensor,
    length_S: torch.Tensor,
    params: SlotParams,
    rows: SlotRows,
    scratch: RowScratch,
    *,
    d2t_V: torch.Tensor | None = None,
    filters: bool = True,
) -> None:
    """Draw the draft of row `row` of each lane into `drafts_SR`, by the rule and with the noise of that very row.

    The position is length + row, the history is committed + drafts_SR[slot, :row]. `logits_BV` [B, Vd]. Kinds and masks
    are read at `row`; a row without an answer (DEFER and above) is drawn unmasked, since verification guards it.
    `d2t_V` int32 [Vd] is added to a column to give its token, where the drafter's vocabulary is pruned. Where no token
    is legal the draft is 0 and `num_drafts_S` is cut to `row`. The caller sets `num_drafts_S` first.
    """
    _check(logits_BV, slots_B, drafts_SR, kinds_BR, forced_BR, history_SL, length_S, params, rows, scratch)
    B, V = slots_B.shape[0], logits_BV.shape[1]
    assert 0 <= row < drafts_SR.shape[1], (row, drafts_SR.shape)
    assert logits_BV.shape[0] >= B
    assert d2t_V is None or (d2t_V.dtype == torch.int32 and d2t_V.shape == (V,) and d2t_V.is_contiguous())
    p = params
    _rows(
        *(logits_BV, slots_B, drafts_SR, num_drafts_S, kinds_BR, forced_BR, d2t_V),
        *(history_SL, length_S, params, rows, scratch),
        num_rows=1,
        first_row=row,
        draft=True,
        filters=filters,
    )
    tiles = scratch.best_NC.shape[1]
    draft_kernel[(B,)](
        *(slots_B, kinds_BR, forced_BR, d2t_V, drafts_SR, num_drafts_S),
        *(p.temperature_S, p.top_p_S, p.min_p_S, p.top_k_S),
        *(scratch.best_NC, scratch.best_column_NC, scratch.peak_NC, scratch.chosen_N),
        *(kinds_BR.shape[1], drafts_SR.stride(0), tiles, -(-V // scratch.block), V, row),
        TILES=triton.next_power_of_2(tiles),
        FILTERS=filters,
        D2T=d2t_V is not None,
        num_warps=1,
    )


def _rows(
    logits: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    kinds: torch.Tensor,
    forced: torch.Tensor,
    d2t: torch.Tensor | None,
    history: torch.Tensor,
    length: torch.Tensor,
    p: SlotParams,
    rows: SlotRows,
    scratch: RowScratch,
    *,
    num_rows: int,
    first_row: int,
    draft: bool,
    filters: bool,
) -> None:
    """Fill `scratch` with the best column of every row, and of every filtered row."""
    B, R, V = slots.shape[0], kinds.shape[1], logits.shape[1]
    tiles, partial_stride = -(-V // scratch.block), scratch.best_NC.shape[1]
    partials = (scratch.best_NC, scratch.best_column_NC, scratch.peak_NC, scratch.logits_NV)
    row_kernel[(tiles, B * num_rows)](
        *(logits, slots, drafts, num_drafts, kinds, forced, rows.masks_SRW, d2t, history, length),
        *(p.prompt_length_S, p.min_tokens_S, p.temperature_S, p.top_p_S, p.min_p_S),
        *(p.repetition_S, p.presence_S, p.frequency_S, p.top_k_S, p.seed_S, rows.rules_SX, rows.seen_SV, *partials),
        *(logits.stride(0), R, drafts.stride(0), history.stride(0), rows.masks_SRW.stride(0), rows.masks_SRW.stride(1)),
        *(rows.rules_SX.stride(0), rows.seen_SV.stride(0), scratch.logits_NV.stride(0), partial_stride),
        *(V, num_rows, first_row),
        ROWS=scratch.block // 32,
        DRAFT=draft,
        D2T=d2t is not None,
        FILTERS=filters,
        num_warps=4,
    )
    if filters:
        filter_kernel[(B * num_rows,)](
            *(slots, num_drafts, kinds, d2t, length, p.temperature_S, p.top_p_S, p.min_p_S, p.top_k_S, p.seed_S),
            *(*partials, scratch.chosen_N, R, scratch.logits_NV.stride(0), partial_stride),
            *(tiles, tiles * scratch.block, V, num_rows, first_row),
            ROWS=_FILTER_TILE_ROWS,
            TILES=triton.next_power_of_2(tiles),
            DRAFT=draft,
            D2T=d2t is not None,
            num_warps=16,
        )


def _check(
    logits: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    kinds: torch.Tensor,
    forced: torch.Tensor,
    history: torch.Tensor,
    length: torch.Tensor,
    params: SlotParams,
    rows: SlotRows,
    scratch: RowScratch,
) -> None:
    V = logits.shape[1]
    assert logits.dtype in (torch.bfloat16, torch.float16, torch.float32), logits.dtype
    assert logits.stride(1) == 1
    assert kinds.dtype == torch.uint8
    assert kinds.is_contiguous()
    assert forced.shape == kinds.shape
    ints = (slots, drafts, forced, history, length, rows.rules_SX, rows.seen_SV)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in ints)
    assert rows.masks_SRW.dtype == torch.int32
    assert rows.masks_SRW.stride(2) == 1
    assert params.seed_S.dtype == torch.int64
    assert scratch.best_NC.shape[1] * scratch.block >= V, (V, scratch.best_NC.shape, scratch.block)
    device = logits.device
    tensors = (*ints, kinds, rows.masks_SRW, params.temperature_S, scratch.best_NC)
    assert all(t.device == device for t in tensors), [t.device for t in tensors]
