"""Jump-forward tokens: one kernel after the wait copies them from an answer to where drafters read them.

Invariant: a lane that emitted nothing is unchanged, because its cached rows belong to the drafts that it has; an idle
lane (negative slot) touches no slot.
Not responsible for: the PROPOSE post (see posting.py), and the drafts after these tokens (see ngram.py).

Shapes: B lanes, S slots, R rows a slot, L tokens of a full sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.rows import FORCED


@triton.jit
def take_jump_forward_kernel(
    lanes: tl.tensor,
    num_emitted: tl.tensor,
    posted_slots: tl.tensor,
    need_rows: tl.tensor,
    kinds: tl.tensor,
    forced: tl.tensor,
    length: tl.tensor,
    history: tl.tensor,
    drafts: tl.tensor,
    num_drafts: tl.tensor,
    num_jump_forward: tl.tensor,
    history_stride: tl.tensor,
    R: tl.tensor,
    vocab_size: tl.tensor,
    ROWS: tl.constexpr,
) -> None:
    """Grid (B): see `take_jump_forward`."""
    b = tl.program_id(0)
    s = tl.load(lanes + b).to(tl.int64)
    moved = (s >= 0) & (tl.load(num_emitted + b) > 0)
    s = tl.maximum(s, 0)
    j = tl.arange(0, ROWS)
    wanted = (tl.load(need_rows + b) >> j) & 1
    kind = tl.load(kinds + b * R + j, mask=j < R, other=0).to(tl.int32)
    token = tl.load(forced + b * R + j, mask=j < R, other=0)
    proposed = (kind == FORCED) & (wanted != 0) & (j < R) & (tl.load(posted_slots + b) >= 0) & moved
    # The token comes from another process, and is embedded before anything masks it.
    proposed = proposed & (token >= 0) & (token < vocab_size)
    count = tl.min(tl.where(proposed, ROWS, j), axis=0)
    tl.store(num_jump_forward + b, tl.where(moved, count, -1))
    tl.store(history + s * history_stride + tl.load(length + s) + j, token, mask=j < count)
    tl.store(drafts + s * R + j, token, mask=j < count)
    if moved:
        tl.store(num_drafts + s, count)


def take_jump_forward(
    slots_B: torch.Tensor,
    num_emitted_B: torch.Tensor,
    posted_B: torch.Tensor,
    need_rows_B: torch.Tensor,
    kinds_BR: torch.Tensor,
    forced_BR: torch.Tensor,
    length_S: torch.Tensor,
    history_SL: torch.Tensor,
    drafts_SR: torch.Tensor,
    num_drafts_S: torch.Tensor,
    num_jump_forward_B: torch.Tensor,
    *,
    vocab_size: int,
) -> None:
    """Copy the tokens that an answer forces into `drafts_SR` and after the histories, and count them.

    `posted_B` and `need_rows_B` are the inputs of the PROPOSE post, `kinds_BR` (uint8 RowKind) and `forced_BR` are its
    answer. A lane's tokens end before the first row that is not FORCED or was not requested, and before the first token
    outside [0, `vocab_size`). The kernel writes their number to `num_drafts_S` and `num_jump_forward_B`; for a lane
    that emitted nothing, `num_drafts_S` is unchanged and `num_jump_forward_B` is -1. All tensors are contiguous int32,
    except `kinds_BR`.
    """
    ints = (slots_B, num_emitted_B, posted_B, need_rows_B, forced_BR, length_S, history_SL, drafts_SR, num_drafts_S)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in (*ints, num_jump_forward_B))
    assert kinds_BR.dtype == torch.uint8
    assert kinds_BR.is_contiguous()
    R = drafts_SR.shape[1]
    assert kinds_BR.shape[1] == forced_BR.shape[1] == R
    take_jump_forward_kernel[(slots_B.shape[0],)](
        slots_B,
        num_emitted_B,
        posted_B,
        need_rows_B,
        kinds_BR,
        forced_BR,
        length_S,
        history_SL,
        drafts_SR,
        num_drafts_S,
        num_jump_forward_B,
        history_SL.stride(0),
        R,
        vocab_size,
        ROWS=triton.next_power_of_2(R + 1),
        num_warps=1,
    )
