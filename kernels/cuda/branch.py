"""A second continuation next to the drafts of a prompt lookup, so that they are a tree: one kernel after the lookup.

The lookup (ngram.py) proposes what follows one earlier place. This kernel looks for the best place whose next token is
another one, by the same order of places, and adds what follows there as a branch. A run shorter than the longest that
is looked up is often wrong, so its drafts give their last places to the branch; those of the longest run leave it what
they do not fill. Invariant: siblings have different tokens, and only tokens of the slot's own history are proposed.

Shapes: S slots, B lanes, R rows a slot, L tokens of a full sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BRANCH_TOKENS = 2
"""Drafts that a lookup of a shorter run leaves to the branch. Not measured on a GPU."""


@triton.jit
def branch_kernel(
    slots: tl.tensor,
    guided: tl.tensor,
    history: tl.tensor,
    length: tl.tensor,
    prompt_length: tl.tensor,
    draft_limit: tl.tensor,
    max_length: tl.tensor,
    drafts: tl.tensor,
    num_drafts: tl.tensor,
    parents: tl.tensor,
    num_jump_forward: tl.tensor,
    history_stride: tl.tensor,
    R: tl.tensor,
    max_drafts: tl.tensor,
    reserved: tl.tensor,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BEHIND: tl.constexpr,
) -> None:
    """Grid (B): see `add_branch`."""
    b = tl.program_id(0)
    s = tl.load(slots + b).to(tl.int64)
    num_forward = tl.zeros([], tl.int32)
    if BEHIND:
        num_forward = tl.load(num_jump_forward + b)
    if (s < 0) | (num_forward < 0):
        return
    j = tl.arange(0, ROWS)
    n = tl.load(length + s) + num_forward
    prompt = tl.load(prompt_length + s)
    own = tl.load(num_drafts + s) - num_forward
    tokens = history + s * history_stride
    next_token = tl.load(drafts + s * R + num_forward, mask=own > 0, other=-1)
    longest = tl.zeros([BLOCK], tl.int32)
    best = tl.full([BLOCK], -1, tl.int32)
    best_end = tl.full([BLOCK], 0, tl.int32)
    searches = own > 0
    if not BEHIND:
        searches = searches & (tl.load(guided + b) == 0)
    end_of_search = tl.where(searches, n - 1, 0)
    for first in range(0, end_of_search, BLOCK):
        at = first + tl.arange(0, BLOCK)
        alive = at < n - 1
        run = tl.zeros([BLOCK], tl.int32)
        for t in tl.static_range(MOST):
            suffix = tl.load(tokens + tl.maximum(n - 1 - t, 0))
            alive = alive & (at >= t) & (tl.load(tokens + at - t, mask=alive & (at >= t), other=-1) == suffix)
            run += alive.to(tl.int32)
        longest = tl.maximum(longest, run)
        score = run * 2 * n + tl.where(at + 1 >= prompt, n + at, n - 1 - at)
        other = tl.load(tokens + at + 1, mask=at < n - 1, other=-1) != next_token
        better = (run >= 1) & other & (score > best)
        best = tl.where(better, score, best)
        best_end = tl.where(better, at, best_end)
    highest = tl.max(best, axis=0)
    run = tl.where(highest < 0, 0, highest // (2 * n))
    end = tl.min(tl.where(best == highest, best_end, n), axis=0)
    room = tl.minimum(max_drafts, tl.load(draft_limit + s)) - num_forward
    room = tl.maximum(tl.minimum(room, tl.load(max_length + s) - n - 1), 0)
    count = tl.where(run > 0, tl.minimum(n - 1 - end, 2 * run + 1), 0)
    gives = (count > 0) & (tl.max(longest, axis=0) < MOST)
    kept = tl.where(gives, tl.minimum(own, tl.maximum(room - tl.minimum(count, reserved), 1)), own)
    count = tl.maximum(tl.minimum(count, room - kept), 0)
    at = num_forward + kept
    proposed = tl.load(tokens + end + 1 + j, mask=j < count, other=0)
    tl.store(drafts + s * R + at + j, proposed, mask=j < count)
    tl.store(num_drafts + s, at + count)
    tl.store(parents + s * R + j, tl.where((j == at) & (count > 0), num_forward, j), mask=j < R)


def add_branch(
    slots_B: torch.Tensor,
    guided_B: torch.Tensor,
    history_SL: torch.Tensor,
    length_S: torch.Tensor,
    prompt_length_S: torch.Tensor,
    draft_limit_S: torch.Tensor,
    max_length_S: torch.Tensor,
    drafts_SR: torch.Tensor,
    num_drafts_S: torch.Tensor,
    parents_SR: torch.Tensor,
    *,
    ngram_max: int,
    max_rows: int = 16,
    num_jump_forward_B: torch.Tensor | None = None,
) -> None:
    """Add a branch to the drafts that `propose_ngram` wrote, within the same limits, and write `parents_SR`.

    Draft i is row i + 1, and its parent is row parents_SR[s, i] <= i: row i of a chain, and for the first draft of
    the branch the row after the jump-forward tokens. Without jump-forward tokens the lanes in `guided_B` (bool) get
    no branch: such a lane may look up again though it emitted nothing, and finds as many drafts as the next step has
    rows, but a cached mask row belongs to one place in a tree. Other arguments as in `propose_ngram`;
    int32, contiguous.
    """
    tensors = (history_SL, length_S, prompt_length_S, draft_limit_S, max_length_S, drafts_SR, num_drafts_S, parents_SR)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in (slots_B, *tensors))
    assert guided_B.dtype == torch.bool
    assert parents_SR.shape == drafts_SR.shape
    assert ngram_max >= 1, ngram_max
    R = drafts_SR.shape[1]
    branch_kernel[(slots_B.shape[0],)](
        slots_B,
        guided_B.view(torch.uint8),
        *tensors,
        num_jump_forward_B,
        history_SL.stride(0),
        R,
        min(max_rows, R + 1) - 1,
        BRANCH_TOKENS,
        MOST=ngram_max,
        ROWS=triton.next_power_of_2(R),
        BLOCK=4096,
        BEHIND=num_jump_forward_B is not None,
        num_warps=8,
    )
