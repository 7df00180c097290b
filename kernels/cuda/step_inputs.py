"""The beginning of a step, one kernel: its inputs cut from the slots.

Invariant: a lane with a negative slot is idle: its inputs are padding, and no slot is touched. Not responsible for:
posts to the grammar process (see posting.py), the copy of results to the host (see gpu_engine/step/output_ring.py).

Shapes: B lanes, S slots, R rows a slot, P rows of this step (P <= R), L tokens of a full sequence, N pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.step_tensors import TreeRows


@triton.jit
def parent_of(parents: tl.tensor, row: tl.tensor, R: tl.tensor) -> tl.tensor:
    """Return the parent of each row, by the parents of a slot's drafts; of row 0 row 0. It is a smaller number,
    whatever is there."""
    parent = tl.load(parents + row - 1, mask=(row > 0) & (row < R), other=0)
    return tl.maximum(tl.minimum(parent, row - 1), 0)


@triton.jit
def load_kernel(
    slots: tl.tensor,
    history: tl.tensor,
    length: tl.tensor,
    slot_drafts: tl.tensor,
    slot_num_drafts: tl.tensor,
    done: tl.tensor,
    slot_table: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    drafts: tl.tensor,
    num_drafts: tl.tensor,
    table: tl.tensor,
    draft_limit: tl.tensor,
    slot_parents: tl.tensor,
    parents: tl.tensor,
    depths: tl.tensor,
    tree_rows: tl.tensor,
    tree_tokens: tl.tensor,
    history_stride: tl.tensor,
    R: tl.tensor,
    P: tl.tensor,
    slot_table_stride: tl.tensor,
    table_stride: tl.tensor,
    N: tl.tensor,
    ROWS: tl.constexpr,
    PAGES: tl.constexpr,
    TREE: tl.constexpr,
) -> None:
    """Grid (B): see `load_step`."""
    b = tl.program_id(0)
    s = tl.load(slots + b).to(tl.int64)
    busy = s >= 0
    s = tl.maximum(s, 0)
    j = tl.arange(0, ROWS)
    n = tl.load(length + s)
    most = tl.minimum(tl.load(draft_limit + b), P - 1)
    count = tl.where(busy, tl.minimum(tl.load(slot_num_drafts + s), most), 0)
    tl.store(num_drafts + b, count)
    tl.store(drafts + b * R + j, tl.load(slot_drafts + s * R + j, mask=j < R, other=0), mask=j < R)
    live = j <= tl.where(busy & (n > 0) & (tl.load(done + s) == 0), count, -1)
    first = tl.load(history + s * history_stride + tl.maximum(n - 1, 0))
    proposed = tl.load(slot_drafts + s * R + j - 1, mask=(j > 0) & (j < P), other=0)
    token = tl.where(live, tl.where(j == 0, first, proposed), 0)
    tl.store(ids + b * P + j, token.to(ids.dtype.element_ty), mask=j < P)
    depth = j
    if TREE:
        above = slot_parents + s * R
        depth = tl.zeros([ROWS], tl.int32)
        row = j
        for _ in range(ROWS):
            depth += (row > 0).to(tl.int32)
            row = parent_of(above, row, R)
        lane = b * R + j
        tl.store(parents + lane, parent_of(above, j, R), mask=j < R)
        tl.store(depths + lane, depth, mask=j < R)
        row = j
        for i in range(ROWS):
            on_way = (j < R) & (depth >= i)
            tl.store(tree_rows + lane * R + depth - i, row, mask=on_way)
            is_draft = on_way & (row > 0)
            drafted = tl.load(slot_drafts + s * R + row - 1, mask=is_draft, other=0)
            tl.store(tree_tokens + lane * R + depth - i - 1, drafted, mask=is_draft)
            row = parent_of(above, row, R)
    tl.store(positions + b * P + j, tl.where(live, n - 1 + depth, -1), mask=j < P)
    for first_page in range(0, N, PAGES):
        at = first_page + tl.arange(0, PAGES)
        page = tl.load(slot_table + s * slot_table_stride + at, mask=at < tl.where(busy, N, 0), other=0)
        tl.store(table + b.to(tl.int64) * table_stride + at, page, mask=at < N)


def load_step(
    slots_B: torch.Tensor,
    history_SL: torch.Tensor,
    length_S: torch.Tensor,
    drafts_SR: torch.Tensor,
    num_drafts_S: torch.Tensor,
    done_S: torch.Tensor,
    page_table_SN: torch.Tensor,
    ids_BP: torch.Tensor,
    positions_BP: torch.Tensor,
    drafts_BR: torch.Tensor,
    num_drafts_B: torch.Tensor,
    page_table_BN: torch.Tensor,
    draft_limit_B: torch.Tensor,
    parents_SR: torch.Tensor | None = None,
    tree: TreeRows | None = None,
) -> None:
    """Cut a step's inputs: the last token and the drafts after it, their positions, the drafts, and the page table.

    With `parents_SR` int32 the drafts are a tree, and draft i's parent is row parents_SR[s, i] <= i: the position of
    a row follows from its depth, and `tree` is filled except for `walked_BR`. All int32 and contiguous, but `done_S` is
    bool, `ids_BP` may be int64, and tables may have wider rows. A slot in `done_S` is padding. Written: `ids_BP` (0
    where padding), `positions_BP` (-1 where padding), `drafts_BR`, `num_drafts_B` (at most P - 1 and
    `draft_limit_B`), `page_table_BN`.
    """
    (B, P), R, N = ids_BP.shape, drafts_SR.shape[1], page_table_BN.shape[1]
    tensors = (slots_B, history_SL, length_S, drafts_SR, num_drafts_S, positions_BP, drafts_BR, num_drafts_B)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in (*tensors, draft_limit_B))
    assert done_S.dtype == torch.bool
    assert ids_BP.dtype in (torch.int32, torch.int64)
    assert ids_BP.is_contiguous()
    assert positions_BP.shape == (B, P)
    assert drafts_BR.shape[1] == R >= P
    assert page_table_SN.dtype == page_table_BN.dtype == torch.int32
    assert page_table_SN.stride(1) == page_table_BN.stride(1) == 1
    assert page_table_SN.shape[1] >= N
    assert (parents_SR is None) == (tree is None)
    trees: tuple[torch.Tensor | None, ...] = (None,) * 5
    if parents_SR is not None and tree is not None:
        assert parents_SR.shape == drafts_SR.shape
        assert tree.rows_BRR.shape[1:] == tree.tokens_BRR.shape[1:] == (R, R)
        made = (parents_SR, tree.parent_BR, tree.depth_BR, tree.rows_BRR, tree.tokens_BRR)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in made)
        trees = made
    load_kernel[(B,)](
        slots_B,
        history_SL,
        length_S,
        drafts_SR,
        num_drafts_S,
        done_S.view(torch.uint8),
        page_table_SN,
        ids_BP,
        positions_BP,
        drafts_BR,
        num_drafts_B,
        page_table_BN,
        draft_limit_B,
        *trees,
        history_SL.stride(0),
        R,
        P,
        page_table_SN.stride(0),
        page_table_BN.stride(0),
        N,
        ROWS=triton.next_power_of_2(R),
        PAGES=1024,
        TREE=tree is not None,
        num_warps=4,
    )
