"""The tree that a head grows from its likeliest tokens, and the drafts taken from it (EAGLE-2, Li et al. 2024).

A level of the tree is scored with the noise that verification will use at its position, so the candidates after a node
are those that the target is likeliest to draw there, at any temperature. The score of a candidate is the sum of
log-probabilities along its way. `grow_kernel` expands the best candidates of a level, and `take_kernel` takes the best
of all levels. A candidate is never better than the one before it, and of two equal ones the first counts, so what
is taken is a tree whose rows come after their parents. Jump-forward tokens are its trunk: where the grammar forces a
token, it is the one candidate of its level. Invariant: a tree changes which rows are verified, and never a token. Not
responsible for: the head (see gpu_engine/drafters/head_tree.py), attention along the ways (see
attention/tree_decode.py), masks.

Shapes: B lanes, S slots, R rows a slot, V columns of the head; C and X are those of `DraftTree`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.accept import score_rows
from kernels.step_tensors import TREE_ROWS, DraftTree, StepTensors


@triton.jit
def place_of(score: tl.tensor, order: tl.tensor, other: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return how many candidates come before each `other`, which has the number `at`, by score and then number."""
    better = score[None, :] > other[:, None]
    equal = (score[None, :] == other[:, None]) & (order[None, :] < at[:, None])
    return tl.sum(((better | equal) & inside[None, :]).to(tl.int32), axis=1)


@triton.jit
def grow_kernel(
    slots: tl.tensor,
    drafting: tl.tensor,
    length: tl.tensor,
    drafts: tl.tensor,
    num_jump_forward: tl.tensor,
    values: tl.tensor,
    columns: tl.tensor,
    d2t: tl.tensor,
    score: tl.tensor,
    token: tl.tensor,
    parent: tl.tensor,
    node: tl.tensor,
    above: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    depth: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    X: tl.tensor,
    k: tl.tensor,
    first: tl.tensor,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOT: tl.constexpr,
    EXPANDS: tl.constexpr,
    D2T: tl.constexpr,
    BEHIND: tl.constexpr,
) -> None:
    """Grid (B): see `grow_tree`. `values` and `columns` [B * NODES, WIDTH] are the likeliest after each node."""
    b = tl.program_id(0)
    s = tl.load(slots + b).to(tl.int64)
    going = (s >= 0) & (tl.load(drafting + b) != 0)
    s = tl.maximum(s, 0)
    i = tl.arange(0, BLOCK)
    inside = i < NODES * WIDTH
    behind = i // WIDTH
    column = tl.load(columns + b * NODES * WIDTH + i, mask=inside, other=0).to(tl.int32)
    value = tl.load(values + b * NODES * WIDTH + i, mask=inside, other=float("-inf"))
    # A row without a legal token has no number; rounding may give a certain token more than all of the mass.
    total = tl.where(value > float("-inf"), tl.minimum(value, 0.0), float("-inf"))
    drawn = column
    if D2T:
        drawn += tl.load(d2t + column, mask=inside, other=0)
    front = tl.full([BLOCK], -1, tl.int32)
    if not ROOT:
        front = tl.load(node + b * X + (k - 1) * WIDTH + behind, mask=inside, other=0)
        total += tl.load(score + b * C + front, mask=inside, other=float("-inf"))
    if BEHIND:
        if k < tl.load(num_jump_forward + b):
            total = tl.where(i == 0, 0.0, float("-inf"))
            drawn = tl.where(i == 0, tl.load(drafts + s * R + k), drawn)
    at = b * C + first + i
    tl.store(score + at, total, mask=inside)
    tl.store(token + at, drawn, mask=inside)
    tl.store(parent + at, front, mask=inside)
    if EXPANDS:
        place = place_of(total, i, total, i, inside)
        chosen = inside & (place < WIDTH)
        row = k * WIDTH + place
        lane = b * X + row
        tl.store(node + lane, first + i, mask=chosen)
        tl.store(above + lane, behind, mask=chosen)
        tl.store(ids + lane, drawn, mask=chosen)
        # The pair of a draft is stored at the position before it.
        tl.store(positions + lane, tl.where(going, tl.load(length + s) - 1 + k, -1), mask=chosen)
        tl.store(depth + lane, k + 1, mask=chosen)
        before = b * X + (k - 1) * WIDTH + behind
        for d in range(k):
            tl.store(tokens + lane * X + d, tl.load(tokens + before * X + d, mask=chosen, other=0), mask=chosen)
            tl.store(rows + lane * X + d, tl.load(rows + before * X + d, mask=chosen, other=0), mask=chosen)
        tl.store(tokens + lane * X + k, drawn, mask=chosen)
        tl.store(rows + lane * X + k, row, mask=chosen)


@triton.jit
def take_kernel(
    slots: tl.tensor,
    drafting: tl.tensor,
    num_emitted: tl.tensor,
    length: tl.tensor,
    max_length: tl.tensor,
    draft_limit: tl.tensor,
    num_jump_forward: tl.tensor,
    score: tl.tensor,
    token: tl.tensor,
    parent: tl.tensor,
    drafts: tl.tensor,
    num_drafts: tl.tensor,
    parents: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    count: tl.tensor,
    max_drafts: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BEHIND: tl.constexpr,
) -> None:
    """Grid (B): see `take_tree`."""
    b = tl.program_id(0)
    s = tl.load(slots + b).to(tl.int64)
    if s < 0:
        return
    if tl.load(drafting + b) == 0:
        tl.store(num_drafts + s, tl.where(tl.load(num_emitted + b) == 0, tl.load(num_drafts + s), 0))
        return
    i = tl.arange(0, BLOCK)
    inside = i < count
    total = tl.load(score + b * C + i, mask=inside, other=float("-inf"))
    front = tl.load(parent + b * C + i, mask=inside, other=-1)
    place = place_of(total, i, total, i, inside)
    of_front = tl.load(score + b * C + front, mask=inside & (front >= 0), other=0.0)
    row_of_front = tl.where(front < 0, 0, place_of(total, i, of_front, front, inside) + 1)
    room = tl.minimum(tl.load(draft_limit + s), tl.load(max_length + s) - tl.load(length + s) - 1)
    room = tl.maximum(tl.minimum(room, max_drafts), 0)
    taken = tl.minimum(tl.sum((total > float("-inf")).to(tl.int32), axis=0), room)
    num_forward = tl.zeros([], tl.int32)
    if BEHIND:
        num_forward = tl.maximum(tl.load(num_jump_forward + b), 0)
    kept = inside & (place < taken)
    drawn = tl.load(token + b * C + i, mask=inside, other=0)
    tl.store(drafts + s * R + place, drawn, mask=kept & (place >= num_forward))
    tl.store(parents + s * R + place, row_of_front, mask=kept)
    # Jump-forward tokens beyond the levels of the tree go on as a chain.
    j = tl.arange(0, ROWS)
    tl.store(parents + s * R + j, j, mask=(j >= taken) & (j < num_forward))
    tl.store(num_drafts + s, tl.maximum(taken, num_forward))


def grow_tree(
    logits_NV: torch.Tensor,
    step: StepTensors,
    tree: DraftTree,
    k: int,
    drafting_B: torch.Tensor,
    drafts_SR: torch.Tensor,
    *,
    width: int,
    levels: int,
    d2t_V: torch.Tensor | None = None,
    num_jump_forward_B: torch.Tensor | None = None,
) -> None:
    """Write the candidates of level k, and expand the best ones, unless it is the last of `levels`.

    `logits_NV` are those after the rows of level k - 1, or after the last token for k = 0; `width` and `levels` are
    those of `tree_shape`. `d2t_V` as in `draw_drafts`. `drafting_B` bool. `num_jump_forward_B` int32: the first drafts
    of a lane in `drafts_SR` that the grammar forces.
    """
    B, nodes = step.slots_B.shape[0], width if k else 1
    assert 0 <= k < levels
    assert width * (levels - 1) <= TREE_ROWS
    assert drafting_B.dtype == torch.bool
    assert drafts_SR.dtype == torch.int32
    assert drafts_SR.is_contiguous()
    scores_NV = score_rows(logits_NV, step, tree, k, nodes, d2t_V=d2t_V)
    likeliest = scores_NV.log_softmax(dim=-1).topk(width, dim=-1)
    grow_kernel[(B,)](
        step.slots_B,
        drafting_B.view(torch.uint8),
        step.length_S,
        drafts_SR,
        num_jump_forward_B,
        likeliest.values,
        likeliest.indices,
        d2t_V,
        tree.score_BC,
        tree.token_BC,
        tree.parent_BC,
        tree.node_BX,
        tree.above_BX,
        tree.ids_BX,
        tree.positions_BX,
        tree.depth_BX,
        tree.tokens_BXX,
        tree.rows_BXX,
        drafts_SR.shape[1],
        tree.score_BC.shape[1],
        TREE_ROWS,
        k,
        num_candidates(width, k),
        NODES=nodes,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(nodes * width),
        ROOT=k == 0,
        EXPANDS=k + 1 < levels,
        D2T=d2t_V is not None,
        BEHIND=num_jump_forward_B is not None,
        num_warps=1,
    )


def take_tree(
    step: StepTensors,
    tree: DraftTree,
    drafting_B: torch.Tensor,
    draft_limit_S: torch.Tensor,
    drafts_SR: torch.Tensor,
    num_drafts_S: torch.Tensor,
    parents_SR: torch.Tensor,
    *,
    width: int,
    levels: int,
    max_drafts: int,
    num_jump_forward_B: torch.Tensor | None = None,
) -> None:
    """Write the best candidates as drafts, best first, with their parents: at most `max_drafts`, within the limits of
    the slot, and after its jump-forward tokens.

    A lane that emitted nothing has the drafts that it had; one that stopped has none. int32 and contiguous, but
    `drafting_B` is bool.
    """
    tensors = (draft_limit_S, drafts_SR, num_drafts_S, parents_SR)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors)
    assert parents_SR.shape == drafts_SR.shape
    R, count = drafts_SR.shape[1], num_candidates(width, levels)
    assert max_drafts < R
    take_kernel[(step.slots_B.shape[0],)](
        step.slots_B,
        drafting_B.view(torch.uint8),
        step.result.num_emitted_B,
        step.length_S,
        step.params.max_length_S,
        draft_limit_S,
        num_jump_forward_B,
        tree.score_BC,
        tree.token_BC,
        tree.parent_BC,
        drafts_SR,
        num_drafts_S,
        parents_SR,
        R,
        tree.score_BC.shape[1],
        count,
        max_drafts,
        ROWS=triton.next_power_of_2(R),
        BLOCK=triton.next_power_of_2(count),
        BEHIND=num_jump_forward_B is not None,
        num_warps=4,
    )


def num_candidates(width: int, levels: int) -> int:
    """Return the candidates of the first `levels` levels."""
    return width + (levels - 1) * width * width if levels else 0
