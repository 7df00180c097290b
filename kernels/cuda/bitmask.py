"""Token bitmasks on a GPU: say what they leave, and apply them to logits.

One invariant: a row is judged by one program and applied by others, from memory that does not change meanwhile, so that
it cannot be torn. `accept` and `draw_drafts` apply masks on their own. Kept for a drafter with a pruned vocabulary
(EAGLE3's `d2t`) that takes more than one token of a row: it needs the row masked, and told when nothing is left of it.

Shapes: B lanes, R rows a slot, S slots, P rows of this step, V columns, W' words of a row's stride.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.rows import APPLY, FORCED

DEAD_END_KIND = tl.constexpr(4)
EMPTY_DRAFT = 0x80
"""Added to a status: the mask leaves nothing of the drafter's vocabulary, and the row is unmasked."""
EMPTY_DRAFT_BIT = tl.constexpr(EMPTY_DRAFT)


@triton.jit
def judge_kernel(
    slots: tl.tensor,
    kinds: tl.tensor,
    masks: tl.tensor,
    d2t: tl.tensor,
    status: tl.tensor,
    R: tl.tensor,
    mask_slot: tl.tensor,
    mask_row: tl.tensor,
    V: tl.tensor,
    D2T: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (B, rows): a row's kind; DEAD_END where its mask leaves nothing, ALL | EMPTY_DRAFT with d2t."""
    b = tl.program_id(0)
    j = tl.program_id(1)
    s = tl.load(slots + b).to(tl.int64)
    kind = tl.where(s < 0, 0, tl.load(kinds + b * R + j).to(tl.int32))
    if kind == APPLY:
        mask = masks + s * mask_slot + j * mask_row
        found = tl.zeros([BLOCK], tl.int32)
        if D2T:
            for first in range(0, V, BLOCK):
                column = first + tl.arange(0, BLOCK)
                token = column + tl.load(d2t + column, mask=column < V, other=0)
                found |= (tl.load(mask + token // 32, mask=column < V, other=0) >> (token % 32)) & 1
        else:
            for first in range(0, tl.cdiv(V, 32), BLOCK):
                word = first + tl.arange(0, BLOCK)
                bits = tl.load(mask + word, mask=word * 32 < V, other=0)
                # Bits past the vocabulary mean nothing.
                past = tl.minimum(tl.maximum(V - word * 32, 0), 32)
                found |= tl.where(past < 32, bits & ((1 << past) - 1), bits)
        if tl.max((found != 0).to(tl.int32), axis=0) == 0:
            if D2T:
                kind = tl.zeros_like(kind) + EMPTY_DRAFT_BIT
            else:
                kind = tl.zeros_like(kind) + DEAD_END_KIND
    tl.store(status + b * R + j, kind.to(tl.uint8))


@triton.jit
def apply_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    status: tl.tensor,
    forced: tl.tensor,
    masks: tl.tensor,
    d2t: tl.tensor,
    R: tl.tensor,
    logits_stride: tl.tensor,
    mask_slot: tl.tensor,
    mask_row: tl.tensor,
    V: tl.tensor,
    num_rows: tl.tensor,
    ROWS: tl.constexpr,
    D2T: tl.constexpr,
) -> None:
    """Grid (tiles, B * num_rows): -inf where illegal; a tile without an illegal token is not touched."""
    row = tl.program_id(1)
    b = row // num_rows
    j = row % num_rows
    kind = tl.load(status + b * R + j).to(tl.int32)
    if (kind != APPLY) & (kind != FORCED):
        return
    column = tl.program_id(0) * (ROWS * 32) + tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = column < V
    token = column
    if D2T:
        token = column + tl.load(d2t + column, mask=inside, other=0)
    if kind == FORCED:
        legal = (token == tl.load(forced + b * R + j)).to(tl.int32)
    else:
        mask = masks + tl.load(slots + b).to(tl.int64) * mask_slot + j * mask_row
        if D2T:
            legal = (tl.load(mask + token // 32, mask=inside, other=0) >> (token % 32)) & 1
        else:
            word = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
            bits = tl.load(mask + word, mask=word * 32 < V, other=0)
            legal = (bits[:, None] >> tl.arange(0, 32)[None, :]) & 1
    nothing = tl.full([ROWS, 32], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row.to(tl.int64) * logits_stride + column, nothing, mask=inside & (legal == 0))


def apply_bitmask(
    logits_NV: torch.Tensor,
    slots_B: torch.Tensor,
    kinds_BR: torch.Tensor,
    forced_BR: torch.Tensor,
    masks_SRW: torch.Tensor,
    status_BR: torch.Tensor,
    *,
    num_rows: int,
    d2t_V: torch.Tensor | None = None,
) -> None:
    """Set the illegal columns of `logits_NV` [B * P, V] (bf16, fp16 or fp32; row b * P + j) to -inf, in place.

    By kind: APPLY by the bitmask row of (slot, j), FORCED all but `forced_BR`, every other kind nothing. `status_BR`
    uint8 gets the kind that was acted on: an APPLY row without a legal token is untouched and becomes DEAD_END. With
    `d2t_V` int32 [V] column c is token c + d2t[c], and a mask that leaves none of these tokens makes the row ALL |
    EMPTY_DRAFT, untouched. Logits are written, never read.
    """
    B, R, V = slots_B.shape[0], kinds_BR.shape[1], logits_NV.shape[1]
    assert logits_NV.dtype in (torch.bfloat16, torch.float16, torch.float32), logits_NV.dtype
    assert logits_NV.stride(1) == 1
    assert logits_NV.shape[0] >= B * num_rows
    assert kinds_BR.dtype == status_BR.dtype == torch.uint8
    assert forced_BR.dtype == masks_SRW.dtype == slots_B.dtype == torch.int32
    assert all(t.is_contiguous() for t in (slots_B, kinds_BR, forced_BR, status_BR))
    assert forced_BR.shape == kinds_BR.shape == status_BR.shape
    assert num_rows <= R
    assert masks_SRW.stride(2) == 1
    assert d2t_V is not None or masks_SRW.shape[2] * 32 >= V
    assert d2t_V is None or (d2t_V.dtype == torch.int32 and d2t_V.shape == (V,) and d2t_V.is_contiguous())
    strides, pruned = masks_SRW.stride()[:2], d2t_V is not None
    judge_kernel[(B, num_rows)](
        *(slots_B, kinds_BR, masks_SRW, d2t_V, status_BR, R, *strides, V), D2T=pruned, BLOCK=4096, num_warps=8
    )
    apply_kernel[(-(-V // 4096), B * num_rows)](
        *(logits_NV, slots_B, status_BR, forced_BR, masks_SRW, d2t_V, R, logits_NV.stride(0), *strides, V, num_rows),
        ROWS=128,
        D2T=pruned,
        num_warps=4,
    )
