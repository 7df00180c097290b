"""Packs a step's post and caches the rows of its answer: one kernel before the post, one after the wait.

The rules: a cached row is not requested again. A constrained row that is missing is DEFER in verification, ALL in
drafting.
Invariant: a lane with a negative slot is idle, and touches no slot. Not responsible for: the flags, and the wait
(see flags.py; host functions), dropping rows (see advance.py).

Shapes: B lanes, S slots, R rows a slot, L tokens of a full sequence, W' words of a mask row's stride.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import step_tensors
from kernels.cuda.rows import APPLY, DEFER
from kernels.step_tensors import TreeRows

VERIFY, PROPOSE = -1, -2
"""In place of a draft's number. VERIFY: the post or the wait of the verify step. PROPOSE: the post requests
jump-forward tokens and no row."""
PARENT_SHIFT = tl.constexpr(step_tensors.PARENT_SHIFT)


@dataclass(frozen=True, slots=True)
class CachedRows:
    """Mask rows on the device, per slot. Writer: `cache_rows`. A change of a slot's owner clears `cached_SR`."""

    mask_SRW: torch.Tensor  # int32
    kind_SR: torch.Tensor  # uint8 RowKind
    forced_SR: torch.Tensor  # int32
    cached_SR: torch.Tensor  # bool


@dataclass(frozen=True, slots=True)
class PostTensors:
    """The fields of `shared_mem.BatchArrays` as tensors; may be mapped pinned host memory. All int32 but `kinds`."""

    slots_B: torch.Tensor
    slot_gens_B: torch.Tensor
    commit_pos_B: torch.Tensor
    n_commit_B: torch.Tensor
    n_draft_B: torch.Tensor
    need_rows_B: torch.Tensor
    tokens_BT: torch.Tensor
    """[B, 2R]."""
    kinds_BR: torch.Tensor
    """uint8, written by the wait, as are the next."""
    forced_BR: torch.Tensor


@triton.jit
def post_kernel(
    lanes: tl.tensor,
    guided: tl.tensor,
    drafting: tl.tensor,
    gens: tl.tensor,
    drafts: tl.tensor,
    num_drafts: tl.tensor,
    history: tl.tensor,
    length: tl.tensor,
    prompt_length: tl.tensor,
    posted: tl.tensor,
    cached: tl.tensor,
    done: tl.tensor,
    jump_forward_limit: tl.tensor,
    max_length: tl.tensor,
    slots: tl.tensor,
    slot_gens: tl.tensor,
    commit_pos: tl.tensor,
    n_commit: tl.tensor,
    n_draft: tl.tensor,
    need_rows: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    history_stride: tl.tensor,
    R: tl.tensor,
    k: tl.tensor,
    max_drafts: tl.tensor,
    ROWS: tl.constexpr,
    DONE: tl.constexpr,
    ASKS_FORCED: tl.constexpr,
    TREE: tl.constexpr,
) -> None:
    """Grid (B): see `pack_post`."""
    b = tl.program_id(0)
    s = tl.load(lanes + b).to(tl.int64)
    real = s >= 0
    is_posted = real & (tl.load(guided + b) != 0)
    s = tl.maximum(s, 0)
    if DONE:
        is_posted = is_posted & (tl.load(done + s) == 0)
    j = tl.arange(0, ROWS)
    count = tl.load(num_drafts + b)
    missing = (j <= count) & (j < R) & (tl.load(cached + s * R + j, mask=j < R, other=1) == 0)
    if k >= 0:
        count = tl.zeros_like(count) + k
        missing = (j == k) & (tl.load(drafting + b) != 0)
    if ASKS_FORCED:
        count = tl.zeros_like(count)
        room = tl.load(max_length + s) - tl.load(length + s) - 1
        wanted = tl.minimum(tl.minimum(tl.load(jump_forward_limit + s), room), max_drafts)
        missing = (j < wanted) & (tl.load(drafting + b) != 0)
    need = tl.where(is_posted, tl.sum(tl.where(missing, 1 << j, 0), axis=0), 0)
    # An idle lane would race with the program that advances slot 0.
    num_posted = tl.load(posted + s, mask=real, other=0)
    start = tl.load(prompt_length + s) + num_posted
    requested = need != 0
    num_new = tl.where(requested, tl.load(length + s) - start, 0)
    tl.store(slots + b, tl.where(requested, s, -1).to(tl.int32))
    tl.store(slot_gens + b, tl.load(gens + b))
    tl.store(commit_pos + b, num_posted)
    tl.store(n_commit + b, num_new)
    tl.store(n_draft + b, tl.where(requested, count, 0))
    tl.store(need_rows + b, need)
    if requested:
        i = tl.arange(0, 2 * ROWS)
        committed = tl.load(history + s * history_stride + start + i, mask=i < num_new, other=0)
        draft = tl.load(drafts + b * R + i - num_new, mask=(i >= num_new) & (i - num_new < R), other=0)
        if TREE:
            # Draft j is row j + 1, whose parent this is.
            at = i - num_new + 1
            parent = tl.load(parents + b * R + at, mask=(i >= num_new) & (at < R), other=0)
            draft += parent << PARENT_SHIFT
        tl.store(tokens + b * 2 * R + i, tl.where(i < num_new, committed, draft), mask=i < 2 * R)
        if not ASKS_FORCED:
            tl.store(posted + s, num_posted + num_new)


def pack_post(
    slots_B: torch.Tensor,
    guided_B: torch.Tensor,
    drafting_B: torch.Tensor,
    slot_gens_B: torch.Tensor,
    drafts_BR: torch.Tensor,
    num_drafts_B: torch.Tensor,
    history_SL: torch.Tensor,
    length_S: torch.Tensor,
    prompt_length_S: torch.Tensor,
    posted_S: torch.Tensor,
    rows: CachedRows,
    out: PostTensors,
    *,
    k: int = VERIFY,
    done_S: torch.Tensor | None = None,
    limits: tuple[torch.Tensor, torch.Tensor] | None = None,
    max_rows: int = 16,
    tree: TreeRows | None = None,
) -> None:
    """Write the records of a step, and advance `posted_S` of the posted lanes.

    To verify: guided lanes, for rows 0 to `num_drafts_B` that are not cached. To draft k: guided lanes in `drafting_B`,
    for row k after k drafts. A lane without a missing row gets slot -1.
    int32 and contiguous; `guided_B` and `drafting_B` bool. At most R answer tokens may be unposted. A slot in `done_S`
    (bool) requests nothing.

    PROPOSE: guided lanes in `drafting_B`, for as many tokens as they may have jump-forward drafts; `limits` are
    `jump_forward_limit_S` and `max_length_S`, and `max_rows` the rows of the next step. `posted_S` stays: the next post
    contains these tokens again.

    With `tree` the drafts of a verify post are nodes (`shared_mem.layout.node`), for a record of stage TREE.
    """
    B, R = slots_B.shape[0], drafts_BR.shape[1]
    ints = (slots_B, slot_gens_B, drafts_BR, num_drafts_B, history_SL, length_S, prompt_length_S, posted_S)
    outs = (out.slots_B, out.slot_gens_B, out.commit_pos_B, out.n_commit_B, out.n_draft_B, out.need_rows_B)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in (*ints, *outs, out.tokens_BT))
    assert guided_B.dtype == drafting_B.dtype == rows.cached_SR.dtype == torch.bool
    assert rows.cached_SR.shape[1] == R
    assert rows.cached_SR.is_contiguous()
    assert out.tokens_BT.shape[0] >= B
    assert out.tokens_BT.shape[1] == 2 * R
    assert PROPOSE <= k < R, k
    assert (k == PROPOSE) == (limits is not None)
    assert done_S is None or done_S.dtype == torch.bool
    assert tree is None or (k == VERIFY and tree.parent_BR.shape[1] == R)
    flags = (t.view(torch.uint8) for t in (guided_B, drafting_B))
    post_kernel[(B,)](
        slots_B,
        *flags,
        slot_gens_B,
        drafts_BR,
        num_drafts_B,
        history_SL,
        length_S,
        prompt_length_S,
        posted_S,
        rows.cached_SR.view(torch.uint8),
        None if done_S is None else done_S.view(torch.uint8),
        *(limits or (None, None)),
        *outs,
        out.tokens_BT,
        None if tree is None else tree.parent_BR,
        history_SL.stride(0),
        R,
        k,
        min(max_rows, R) - 1,
        ROWS=triton.next_power_of_2(R),
        DONE=done_S is not None,
        ASKS_FORCED=k == PROPOSE,
        TREE=tree is not None,
        num_warps=1,
    )


@triton.jit
def cache_kernel(
    lanes: tl.tensor,
    guided: tl.tensor,
    drafting: tl.tensor,
    posted_slots: tl.tensor,
    need_rows: tl.tensor,
    answered_kinds: tl.tensor,
    answered_jump_forward: tl.tensor,
    seq: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    kind_of: tl.tensor,
    forced_of: tl.tensor,
    cached: tl.tensor,
    kinds: tl.tensor,
    forced: tl.tensor,
    reported_seq: tl.tensor,
    R: tl.tensor,
    source_buffer: tl.tensor,
    source_slot: tl.tensor,
    source_row: tl.tensor,
    target_slot: tl.tensor,
    target_row: tl.tensor,
    W: tl.tensor,
    k: tl.tensor,
    BUFFERS: tl.constexpr,
    REPORTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (B, rows): see `cache_rows`."""
    b = tl.program_id(0)
    j = tl.program_id(1)
    if REPORTS:
        if (b == 0) & (j == 0):
            tl.store(reported_seq, tl.load(seq))
    if k >= 0:
        j += k
    lane = b * R + j
    s = tl.load(lanes + b).to(tl.int64)
    busy = s >= 0
    s = tl.maximum(s, 0)
    needed = (tl.load(need_rows + b) >> j) & 1
    row = s * R + j
    # An idle lane would race with the program that caches a row of slot 0.
    kind = tl.load(kind_of + row, mask=busy, other=0).to(tl.int32)
    token = tl.load(forced_of + row, mask=busy, other=0)
    here = tl.load(cached + row, mask=busy, other=0).to(tl.int32)
    if busy & (needed != 0) & (tl.load(posted_slots + b) >= 0):
        kind = tl.load(answered_kinds + lane).to(tl.int32)
        token = tl.load(answered_jump_forward + lane)
        here = (kind != DEFER).to(tl.int32)
        tl.store(kind_of + row, kind.to(tl.uint8))
        tl.store(forced_of + row, token)
        tl.store(cached + row, here.to(tl.uint8))
        if kind == APPLY:
            if BUFFERS > 1:
                source += (tl.load(seq) % BUFFERS) * source_buffer
            for first in range(0, W, BLOCK):
                at = first + tl.arange(0, BLOCK)
                words = tl.load(source + s * source_slot + j * source_row + at, mask=at < W, cache_modifier=".cg")
                tl.store(target + s * target_slot + j * target_row + at, words, mask=at < W)
    applies = busy & (tl.load(guided + b) != 0)
    late = DEFER
    if k >= 0:
        applies = applies & (tl.load(drafting + b) != 0)
        late = 0
    kind = tl.where(here != 0, kind, late)
    tl.store(kinds + lane, tl.where(applies, kind, 0).to(tl.uint8))
    tl.store(forced + lane, token)


def cache_rows(
    slots_B: torch.Tensor,
    guided_B: torch.Tensor,
    drafting_B: torch.Tensor,
    answer: PostTensors,
    seq: torch.Tensor,
    source_NSRW: torch.Tensor,
    rows: CachedRows,
    kinds_BR: torch.Tensor,
    forced_BR: torch.Tensor,
    *,
    k: int = VERIFY,
    reported_seq: torch.Tensor | None = None,
) -> None:
    """Cache the requested rows with their masks, and fill `kinds_BR` and `forced_BR`. Runs after the wait.

    To verify every row is filled: a constrained row that is missing is DEFER. To draft only row k: it is ALL where it
    is late. Masks are copied only for kind APPLY, with all their words in flight at once: `source_NSRW` int32 may be
    mapped pinned host memory, and buffer `seq` % N is read; `seq` int64 [1] on the device or pinned. Mask rows are of a
    multiple of four words and 16-byte aligned. `reported_seq` int64 [1] gets `seq`, so that reporting it is no node of
    its own.
    """
    N, S, R, W = source_NSRW.shape
    assert source_NSRW.dtype == rows.mask_SRW.dtype == torch.int32
    assert slots_B.dtype == rows.forced_SR.dtype == forced_BR.dtype == answer.forced_BR.dtype == torch.int32
    assert kinds_BR.dtype == rows.kind_SR.dtype == answer.kinds_BR.dtype == torch.uint8
    assert guided_B.dtype == drafting_B.dtype == rows.cached_SR.dtype == torch.bool
    assert seq.dtype == torch.int64
    assert reported_seq is None or reported_seq.dtype == torch.int64
    assert rows.mask_SRW.shape[:2] == rows.kind_SR.shape == rows.forced_SR.shape == rows.cached_SR.shape == (S, R)
    assert rows.mask_SRW.shape[2] >= W
    assert source_NSRW.stride(3) == rows.mask_SRW.stride(2) == 1
    assert all(stride % 4 == 0 for stride in (*source_NSRW.stride()[:3], *rows.mask_SRW.stride()[:2]))
    assert (source_NSRW.data_ptr() | rows.mask_SRW.data_ptr()) % 16 == 0
    assert kinds_BR.shape[1] == forced_BR.shape[1] == answer.kinds_BR.shape[1] == answer.forced_BR.shape[1] == R
    flat = (kinds_BR, forced_BR, answer.kinds_BR, answer.forced_BR, rows.kind_SR, rows.forced_SR, rows.cached_SR)
    assert all(t.is_contiguous() for t in flat)
    assert VERIFY <= k < R, k
    cache_kernel[(slots_B.shape[0], R if k == VERIFY else 1)](
        slots_B,
        guided_B.view(torch.uint8),
        drafting_B.view(torch.uint8),
        answer.slots_B,
        answer.need_rows_B,
        answer.kinds_BR,
        answer.forced_BR,
        seq,
        source_NSRW,
        rows.mask_SRW,
        rows.kind_SR,
        rows.forced_SR,
        rows.cached_SR.view(torch.uint8),
        kinds_BR,
        forced_BR,
        reported_seq,
        R,
        *source_NSRW.stride()[:3],
        *rows.mask_SRW.stride()[:2],
        W,
        k,
        BUFFERS=N,
        REPORTS=reported_seq is not None,
        BLOCK=8192,
        num_warps=16,
    )
