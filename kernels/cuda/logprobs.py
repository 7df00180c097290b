"""Log-probabilities of tokens under the model's own distribution, or among the legal tokens of a row: no bias, no
penalty, no temperature.

One program a row: for the emitted rows of slots that return log-probabilities, or for rows of a prompt. Invariant:
equal values are listed by lowest id first. Not responsible for: choosing the token (see acceptance.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import step_tensors
from kernels.cuda.rows import ALL, APPLY, FORCED, NO_COLUMN
from kernels.logprobs import RowLogprobs
from kernels.step_tensors import MAX_LOGPROBS

TILE = 8192
MASKED = tl.constexpr(step_tensors.MASKED_LOGPROBS)


@triton.jit
def legal_logits(
    x: tl.tensor,
    column: tl.tensor,
    V: tl.tensor,
    kind: tl.tensor,
    forced: tl.tensor,
    mask_row: tl.tensor,
    MASKS: tl.constexpr,
) -> tl.tensor:
    """Return the logits of some columns of a row in fp32; -inf outside and where `kind` makes a token illegal."""
    y = tl.load(x + column, mask=column < V, other=float("-inf")).to(tl.float32)
    if MASKS:
        if kind == APPLY:
            words = tl.load(mask_row + column // 32, mask=column < V, other=0)
            y = tl.where(((words >> (column % 32)) & 1) != 0, y, float("-inf"))
        if kind == FORCED:
            y = tl.where(column == forced, y, float("-inf"))
    return y


@triton.jit
def logprobs_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    emitted: tl.tensor,
    num_emitted: tl.tensor,
    num_logprobs: tl.tensor,
    kinds: tl.tensor,
    forced: tl.tensor,
    masks: tl.tensor,
    walked: tl.tensor,
    logprob: tl.tensor,
    top_ids: tl.tensor,
    top_logprobs: tl.tensor,
    logits_stride: tl.tensor,
    lane_stride: tl.tensor,
    mask_slot_stride: tl.tensor,
    mask_row_stride: tl.tensor,
    V: tl.tensor,
    num_rows: tl.tensor,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    TREE: tl.constexpr,
    MASKS: tl.constexpr,
) -> None:
    """Grid (B * num_rows): emitted token j of lane b. `top_ids` and `top_logprobs` have MOST entries a row.

    MASKS: a slot may ask for the log-probabilities among legal tokens; where fewer than it wants are legal, the rest is
    -inf.
    """
    row = tl.program_id(0)
    b = row // num_rows
    j = row % num_rows
    s = tl.load(slots + b)
    if s < 0:
        return
    wanted = tl.load(num_logprobs + s)
    if (wanted < 0) | (j >= tl.load(num_emitted + b)):
        return
    at_row = j
    if TREE:
        at_row = tl.load(walked + b * lane_stride + j)
        row = b * num_rows + at_row
    x = logits + row.to(tl.int64) * logits_stride
    at = tl.arange(0, TILE)
    kind, only, mask_row = tl.full([], ALL, tl.int32), tl.full([], -1, tl.int32), masks
    if MASKS:
        if wanted >= MASKED:
            wanted -= MASKED
            kind = tl.load(kinds + b * lane_stride + at_row).to(tl.int32)
            only = tl.load(forced + b * lane_stride + at_row)
            mask_row = masks + s.to(tl.int64) * mask_slot_stride + at_row * mask_row_stride
    tops = tl.full([TILE], float("-inf"), tl.float32)
    for first in range(0, V, TILE):
        y = legal_logits(x, first + at, V, kind, only, mask_row, MASKS)
        tops = tl.maximum(tops, y)
    peak = tl.max(tops, axis=0)
    mass = tl.zeros([TILE], tl.float32)
    for first in range(0, V, TILE):
        y = legal_logits(x, first + at, V, kind, only, mask_row, MASKS)
        mass += tl.exp(y - peak)
    lse = peak + tl.log(tl.sum(mass, axis=0))
    out = b * lane_stride + j
    tl.store(logprob + out, tl.load(x + tl.load(emitted + out)).to(tl.float32) - lse)
    before = tl.full([], float("inf"), tl.float32)
    before_id = tl.full([], -1, tl.int32)
    for i in range(wanted):  # the largest pair (value, lowest id) after the previous one
        values = tl.full([TILE], float("-inf"), tl.float32)
        ids = tl.full([TILE], NO_COLUMN, tl.int32)
        for first in range(0, V, TILE):
            y = legal_logits(x, first + at, V, kind, only, mask_row, MASKS) - lse
            behind = (y < before) | ((y == before) & (first + at > before_id))
            better = behind & (y > values)
            values = tl.where(better, y, values)
            ids = tl.where(better, first + at, ids)
        before = tl.max(values, axis=0)
        before_id = tl.min(tl.where(values == before, ids, NO_COLUMN), axis=0)
        tl.store(top_logprobs + out * MOST + i, before)
        tl.store(top_ids + out * MOST + i, before_id)


def row_logprobs(logits_NV: torch.Tensor, rows: RowLogprobs) -> None:
    """Fill the results of `rows` for logits [N, V]; see `kernels.logprobs.row_logprobs`."""
    (n, V), lane = logits_NV.shape, torch.zeros_like(rows.count_1)
    assert n <= len(rows.tokens_N), (n, len(rows.tokens_N))
    assert logits_NV.stride(1) == 1
    logprobs_kernel[(n,)](
        logits_NV,
        lane,
        rows.tokens_N,
        rows.count_1,
        rows.wanted_1,
        None,
        None,
        None,
        None,
        rows.logprob_N,
        rows.top_ids_NM,
        rows.top_logprobs_NM,
        logits_NV.stride(0),
        len(rows.tokens_N),
        0,
        0,
        V,
        n,
        MOST=MAX_LOGPROBS,
        TILE=TILE,
        TREE=False,
        MASKS=False,
        num_warps=16,
    )
