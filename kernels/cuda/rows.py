"""One row of logits to its best column, a tile of columns a program: mask, bans, biases, penalties, temperature, noise.

Row j of a lane assumes that drafts[:j] were accepted, or in a tree the drafts on the way to it, so all rows are
computed at once. Invariant: the output of a
program depends on its slot, row and tile alone, and the tile size is fixed by the workspace, never by the batch. `pick`
chooses the best column of all tiles. Not responsible for: filters (see filters.py), acceptance (see acceptance.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import row_kinds
from kernels.cuda import row_state
from kernels.cuda.noise import gumbel_at, gumbel_tile

ALL = tl.constexpr(row_kinds.ALL)
APPLY = tl.constexpr(row_kinds.APPLY)
FORCED = tl.constexpr(row_kinds.FORCED)
DEFER = tl.constexpr(row_kinds.DEFER)
DEAD_END = tl.constexpr(row_kinds.DEAD_END)
STEERED = tl.constexpr(row_kinds.STEERED)
SEEN = tl.constexpr(row_state.SEEN)
MAX_BIASES = tl.constexpr(row_state.MAX_BIASES)
NO_COLUMN = tl.constexpr(0x7FFFFFFF)
MIN_TEMPERATURE = tl.constexpr(1e-6)
"""Below it the peaks of two tiles are compared at this temperature, where every row is greedy already."""


@triton.jit
def ban(
    x: tl.tensor,
    token: tl.tensor,
    rule: tl.tensor,
    early: tl.tensor,
    tokens: tl.tensor,
    drafts: tl.tensor,
    num_committed: tl.tensor,
    n: tl.tensor,
) -> tl.tensor:
    """Apply a slot's packed rules: stop ids while `early`, bad ids,
    the last id of a bad word whose other ids are in place."""
    stops = tl.load(rule)
    for i in range(tl.where(early, stops, 0)):
        x = tl.where(token == tl.load(rule + 1 + i), float("-inf"), x)
    rule += 1 + stops
    bad = tl.load(rule)
    for i in range(bad):
        x = tl.where(token == tl.load(rule + 1 + i), float("-inf"), x)
    rule += 1 + bad
    words = tl.load(rule)
    at = 1
    for _ in range(words):
        size = tl.load(rule + at)
        differs = tl.where(n >= size - 1, 0, 1)
        for i in range(size - 1):
            p = n - (size - 1) + i
            old = tl.load(tokens + p, mask=(p >= 0) & (p < num_committed), other=-1)
            new = tl.load(drafts + p - num_committed, mask=p >= num_committed, other=-1)
            present = tl.where(p < num_committed, old, new)
            differs += tl.where(present == tl.load(rule + at + 1 + i), 0, 1)
        last = tl.load(rule + at + size)
        x = tl.where((token == last) & (differs == 0), float("-inf"), x)
        at += 1 + size
    return x


@triton.jit
def add_biases(
    x: tl.tensor,
    token: tl.tensor,
    first: tl.tensor,
    ids: tl.tensor,
    values: tl.tensor,
    count: tl.tensor,
    ROWS: tl.constexpr,
    D2T: tl.constexpr,
) -> tl.tensor:
    """Add a slot's biases to a tile that begins at column `first`. The ids rise, so few of them are in one tile."""
    begin, end = count * 0, count
    if not D2T:
        if count > 0:
            at = tl.arange(0, MAX_BIASES)
            tokens = tl.load(ids + at, mask=at < count, other=NO_COLUMN)
            begin = tl.sum((tokens < first).to(tl.int32), axis=0)
            end = tl.sum((tokens < first + ROWS * 32).to(tl.int32), axis=0)
    for i in range(begin, end):
        x = tl.where(token == tl.load(ids + i), x + tl.load(values + i), x)
    return x


@triton.jit
def way_to(
    b: tl.tensor,
    j: tl.tensor,
    drafts: tl.tensor,
    depths: tl.tensor,
    tree_tokens: tl.tensor,
    lane_stride: tl.tensor,
    TREE: tl.constexpr,
) -> tl.tensor:
    """Return the number of drafts on the way to row j, and where they are."""
    if TREE:
        lane = b * lane_stride + j
        return tl.load(depths + lane), tree_tokens + lane * lane_stride
    else:
        return j, drafts + b * lane_stride


@triton.jit
def scored(
    x: tl.tensor,
    peak: tl.tensor,
    t: tl.tensor,
    seed: tl.tensor,
    n: tl.tensor,
    token: tl.tensor,
    first: tl.tensor,
    ROWS: tl.constexpr,
    D2T: tl.constexpr,
    SCORES: tl.constexpr,
) -> tl.tensor:
    """Return the scores of a tile of logits with the peak `peak`: at a temperature above 0 less the peak, and with the
    noise of position `n`. SCORES: without taking the peak away."""
    score = x
    if t > 0.0:
        # The tile's peak goes to 0 first: a tiny temperature must not overflow it.
        base = tl.where(peak > float("-inf"), peak, 0.0)
        if D2T:
            noise = gumbel_at(seed, n, token)
        else:
            noise = gumbel_tile(seed, n, first, ROWS)
        score = tl.where(x > float("-inf"), tl.div_rn(x - base, t) + noise, float("-inf"))
        if SCORES:
            score += tl.div_rn(base, tl.maximum(t, MIN_TEMPERATURE))
    return score


@triton.jit
def row_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    drafts: tl.tensor,
    num_drafts: tl.tensor,
    kinds: tl.tensor,
    forced: tl.tensor,
    masks: tl.tensor,
    d2t: tl.tensor,
    history: tl.tensor,
    length: tl.tensor,
    prompt_length: tl.tensor,
    min_tokens: tl.tensor,
    temperature: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    top_k: tl.tensor,
    seed: tl.tensor,
    rules: tl.tensor,
    seen: tl.tensor,
    done: tl.tensor,
    bias_ids: tl.tensor,
    bias_values: tl.tensor,
    num_biases: tl.tensor,
    depths: tl.tensor,
    tree_tokens: tl.tensor,
    best: tl.tensor,
    best_column: tl.tensor,
    peaks: tl.tensor,
    scratch: tl.tensor,
    logits_stride: tl.tensor,
    lane_stride: tl.tensor,
    history_stride: tl.tensor,
    mask_slot_stride: tl.tensor,
    mask_row_stride: tl.tensor,
    rules_stride: tl.tensor,
    seen_stride: tl.tensor,
    scratch_stride: tl.tensor,
    partial_stride: tl.tensor,
    V: tl.tensor,
    num_rows: tl.tensor,
    first_row: tl.tensor,
    ROWS: tl.constexpr,
    DRAFT: tl.constexpr,
    D2T: tl.constexpr,
    FILTERS: tl.constexpr,
    TREE: tl.constexpr,
    SCORES: tl.constexpr,
) -> None:
    """Grid (tiles, B * num_rows): best score, its column and the peak of one tile of one row.

    DRAFT: whatever the number of drafts. D2T: column c is token c + d2t[c]. FILTERS: rows whose slot filters leave
    their masked logits in `scratch`. TREE: depth and drafts of a row are those of its way through the tree. SCORES:
    every row leaves its scores in `scratch`, which compare across tiles, and nothing else.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1)
    b = row // num_rows
    j = first_row + row % num_rows
    s = tl.load(slots + b).to(tl.int64)
    if s < 0:
        return
    kind = tl.load(kinds + b * lane_stride + j).to(tl.int32)
    if kind >= DEFER:
        return
    if not DRAFT:
        if (j > tl.load(num_drafts + b)) | (tl.load(done + s) != 0):
            return
    depth, drafts = way_to(b, j, drafts, depths, tree_tokens, lane_stride, TREE)
    first = tile * (ROWS * 32)
    column = first + tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = column < V
    x = tl.load(logits + row.to(tl.int64) * logits_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    num_committed = tl.load(length + s)
    n = num_committed + depth
    t = tl.load(temperature + s)
    token = column
    if D2T:
        token = column + tl.load(d2t + column, mask=inside, other=0)
    if kind == APPLY:
        mask_row = masks + s * mask_slot_stride + j * mask_row_stride
        if D2T:
            legal = (tl.load(mask_row + token // 32, mask=inside, other=0) >> (token % 32)) & 1
        else:
            word = tile * ROWS + tl.arange(0, ROWS)
            words = tl.load(mask_row + word, mask=word * 32 < V, other=0)
            legal = (words[:, None] >> tl.arange(0, 32)[None, :]) & 1
        x = tl.where(legal != 0, x, float("-inf"))
    if kind == FORCED:
        x = tl.where(token == tl.load(forced + b * lane_stride + j), x, float("-inf"))
    early = n - tl.load(prompt_length + s) < tl.load(min_tokens + s)
    x = ban(x, token, rules + s * rules_stride, early, history + s * history_stride, drafts, num_committed, n)
    at = s * MAX_BIASES
    x = add_biases(x, token, first, bias_ids + at, bias_values + at, tl.load(num_biases + s), ROWS, D2T)
    rep, pres, freq = tl.load(repetition + s), tl.load(presence + s), tl.load(frequency + s)
    if (rep != 1.0) | (pres != 0.0) | (freq != 0.0):
        count = tl.load(seen + s * seen_stride + token, mask=inside, other=0)
        for i in range(depth):
            count = tl.where(token == tl.load(drafts + i), (count | SEEN) + 1, count)
        times = count & (SEEN - 1)
        # A quotient by 1 is the product itself. Selecting the operands, and not the result, spares 12.0 a spill.
        y = tl.div_rn(tl.where(x > 0.0, x, x * rep), tl.where(x > 0.0, rep, 1.0))
        y -= freq * times.to(tl.float32) + tl.where(times > 0, pres, 0.0)
        x = tl.where(count != 0, y, x)
    peak = tl.max(tl.max(x, axis=1), axis=0)
    score = scored(x, peak, t, tl.load(seed + s), n, token, first, ROWS, D2T, SCORES)
    if SCORES:
        tl.store(scratch + row.to(tl.int64) * scratch_stride + column, score, mask=inside)
    else:
        top = tl.max(tl.max(score, axis=1), axis=0)
        lowest = tl.where(score == top, column, NO_COLUMN)
        at = row * partial_stride + tile
        tl.store(best + at, top)
        tl.store(best_column + at, tl.min(tl.min(lowest, axis=1), axis=0))
        tl.store(peaks + at, peak)
        if FILTERS:
            k, p, m = tl.load(top_k + s), tl.load(top_p + s), tl.load(min_p + s)
            if filters(t, k, p, m, V):
                tl.store(scratch + row.to(tl.int64) * scratch_stride + column, x)


@triton.jit
def filters(t: tl.tensor, k: tl.tensor, p: tl.tensor, m: tl.tensor, V: tl.tensor) -> tl.tensor:
    """Return whether the slot's parameters leave tokens out."""
    return (t > 0.0) & (((k > 0) & (k < V)) | (p < 1.0) | (m > 0.0))


@triton.jit
def pick(
    best: tl.tensor,
    best_column: tl.tensor,
    peaks: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    t: tl.tensor,
    partial_stride: tl.tensor,
    tiles: tl.tensor,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
) -> tl.tensor:
    """Return column and peak of `num_rows` rows from row `first`, both [ROWS]; column -1 where nothing is legal."""
    row = tl.arange(0, ROWS)[:, None]
    tile = tl.arange(0, TILES)[None, :]
    at = (first + row) * partial_stride + tile
    inside = (row < num_rows) & (tile < tiles)
    tops = tl.load(peaks + at, mask=inside, other=float("-inf"))
    scores = tl.load(best + at, mask=inside, other=float("-inf"))
    columns = tl.load(best_column + at, mask=inside, other=NO_COLUMN)
    peak = tl.max(tops, axis=1)
    hot = t > 0.0
    base = tl.where(peak > float("-inf"), peak, 0.0)
    shifted = tl.div_rn(tops - base[:, None], tl.where(hot, t, 1.0)) + scores
    scores = tl.where(tops > float("-inf"), tl.where(hot, shifted, scores), float("-inf"))
    top = tl.max(scores, axis=1)
    column = tl.min(tl.where(scores == top[:, None], columns, NO_COLUMN), axis=1)
    return tl.where((peak > float("-inf")) & (column < NO_COLUMN), column, -1), peak
