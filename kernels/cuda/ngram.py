"""Prompt lookup in one kernel: the drafts are the tokens that followed an earlier occurrence of the last tokens.

The longest match wins. Among matches of equal length, the last one in the answer wins, then the first one in the
prompt, so that a rejected draft is not proposed again after the same tokens. A match of n tokens gives at most 2 n + 1
drafts (Saxena 2023; LLMA, Yang 2023).

Invariant: only tokens of the slot's own history are proposed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def ngram_kernel(
    slots: tl.tensor,
    history: tl.tensor,
    length: tl.tensor,
    prompt_length: tl.tensor,
    draft_limit: tl.tensor,
    max_length: tl.tensor,
    drafts: tl.tensor,
    num_drafts: tl.tensor,
    num_jump_forward: tl.tensor,
    history_stride: tl.tensor,
    R: tl.tensor,
    max_drafts: tl.tensor,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BEHIND: tl.constexpr,
) -> None:
    """Grid (B): see `propose_ngram`."""
    s = tl.load(slots + tl.program_id(0)).to(tl.int64)
    num_forward = tl.zeros([], tl.int32)
    if BEHIND:
        num_forward = tl.load(num_jump_forward + tl.program_id(0))
    if (s < 0) | (num_forward < 0):
        return
    n = tl.load(length + s) + num_forward
    prompt = tl.load(prompt_length + s)
    tokens = history + s * history_stride
    # Scores differ: run, then the place's rank in [0, 2 n).
    best = tl.full([BLOCK], -1, tl.int32)
    best_end = tl.full([BLOCK], 0, tl.int32)
    for first in range(0, n - 1, BLOCK):  # a match ends before the last token
        at = first + tl.arange(0, BLOCK)
        alive = at < n - 1
        run = tl.zeros([BLOCK], tl.int32)
        for t in tl.static_range(MOST):
            suffix = tl.load(tokens + tl.maximum(n - 1 - t, 0))
            alive = alive & (at >= t) & (tl.load(tokens + at - t, mask=alive & (at >= t), other=-1) == suffix)
            run += alive.to(tl.int32)
        score = run * 2 * n + tl.where(at + 1 >= prompt, n + at, n - 1 - at)
        better = (run >= 1) & (score > best)
        best = tl.where(better, score, best)
        best_end = tl.where(better, at, best_end)
    highest = tl.max(best, axis=0)
    longest = tl.where(highest < 0, 0, highest // (2 * n))
    end = tl.min(tl.where(best == highest, best_end, n), axis=0)
    count = tl.minimum(tl.minimum(n - 1 - end, max_drafts - num_forward), tl.load(draft_limit + s) - num_forward)
    count = tl.minimum(count, 2 * longest + 1)
    count = tl.maximum(tl.minimum(count, tl.load(max_length + s) - n - 1), 0)
    count = tl.where(longest > 0, count, 0)
    j = tl.arange(0, ROWS)
    proposed = tl.load(tokens + end + 1 + j, mask=j < count, other=0)
    tl.store(drafts + s * R + num_forward + j, proposed, mask=num_forward + j < R)
    tl.store(num_drafts + s, num_forward + count)


def propose_ngram(
    slots_B: torch.Tensor,
    history_SL: torch.Tensor,
    length_S: torch.Tensor,
    prompt_length_S: torch.Tensor,
    draft_limit_S: torch.Tensor,
    max_length_S: torch.Tensor,
    drafts_SR: torch.Tensor,
    num_drafts_S: torch.Tensor,
    *,
    ngram_max: int,
    max_rows: int = 16,
    num_jump_forward_B: torch.Tensor | None = None,
) -> None:
    """Write `drafts_SR` (0 after the last) and `num_drafts_S` of the lanes' slots; all int32, contiguous.

    A suffix of `ngram_max` down to one token is looked up; drafts stay within draft_limit, one below
    max_length, and one below `max_rows`. Cost: one pass over the history. The slot of an idle lane (negative slot) is
    unchanged.

    `num_jump_forward_B` int32: number of jump-forward tokens that are already in `drafts_SR` and after the history;
    the lookup goes on from there, and adds nothing where they reach beyond draft_limit. A lane of -1 is
    unchanged.
    """
    tensors = (slots_B, history_SL, length_S, prompt_length_S, draft_limit_S, max_length_S, drafts_SR, num_drafts_S)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors)
    assert ngram_max >= 1, ngram_max
    R = drafts_SR.shape[1]
    ngram_kernel[(slots_B.shape[0],)](
        *tensors,
        num_jump_forward_B,
        history_SL.stride(0),
        R,
        min(max_rows, R + 1) - 1,
        MOST=ngram_max,
        ROWS=triton.next_power_of_2(R),
        BLOCK=4096,
        BEHIND=num_jump_forward_B is not None,
        num_warps=8,
    )
