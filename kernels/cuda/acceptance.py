"""Acceptance: from the best column of each row to the tokens that a lane emits. One tiny program a lane.

A draft is accepted iff it is the token of its row, and acceptance ends at the first that is not, at a stop token, at
the length limit, or at a row that may emit nothing. A slot that ended before emits nothing, as if its row were DEFER.
Invariant: only emitted tokens reach history, length and counts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.rows import DEAD_END, DEFER, FORCED, SEEN, STEERED, filters, pick


@triton.jit
def empty_lane(
    b: tl.tensor, num_emitted: tl.tensor, num_accepted: tl.tensor, finish: tl.tensor, blocked: tl.tensor
) -> None:
    """Write the results of an idle lane: nothing."""
    tl.store(num_emitted + b, 0)
    tl.store(num_accepted + b, 0)
    tl.store(finish + b, 0)
    tl.store(blocked + b, 0)


@triton.jit
def target_tokens(
    b: tl.tensor,
    s: tl.tensor,
    live: tl.tensor,
    temperature: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    best: tl.tensor,
    best_column: tl.tensor,
    peaks: tl.tensor,
    chosen: tl.tensor,
    partial_stride: tl.tensor,
    tiles: tl.tensor,
    V: tl.tensor,
    num_rows: tl.tensor,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    FILTERS: tl.constexpr,
) -> tl.tensor:
    """Return the target's own token of each row; -1: no token is legal there."""
    t = tl.load(temperature + s)
    token, _ = pick(best, best_column, peaks, b * num_rows, num_rows, t, partial_stride, tiles, ROWS, TILES)
    if FILTERS:
        if filters(t, tl.load(top_k + s), tl.load(top_p + s), tl.load(min_p + s), V):
            token = tl.load(chosen + b * num_rows + tl.arange(0, ROWS), mask=live, other=-1)
    return token


@triton.jit
def stopping(token: tl.tensor, rule: tl.tensor, RULES: tl.constexpr) -> tl.tensor:
    """Return 1 for each token that is a stop token of the slot whose rules begin at `rule`, else 0."""
    at = tl.arange(0, RULES)
    stop_ids = tl.load(rule + at, mask=(at >= 1) & (at <= tl.load(rule)), other=-1)
    return tl.max((token[:, None] == stop_ids[None, :]).to(tl.int32), axis=1)


@triton.jit
def acceptance_kernel(
    slots: tl.tensor,
    drafts: tl.tensor,
    num_drafts: tl.tensor,
    kinds: tl.tensor,
    forced: tl.tensor,
    history: tl.tensor,
    length: tl.tensor,
    max_length: tl.tensor,
    temperature: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    rules: tl.tensor,
    seen: tl.tensor,
    done: tl.tensor,
    best: tl.tensor,
    best_column: tl.tensor,
    peaks: tl.tensor,
    chosen: tl.tensor,
    emitted: tl.tensor,
    num_emitted: tl.tensor,
    num_accepted: tl.tensor,
    finish: tl.tensor,
    blocked: tl.tensor,
    lane_stride: tl.tensor,
    history_stride: tl.tensor,
    rules_stride: tl.tensor,
    seen_stride: tl.tensor,
    partial_stride: tl.tensor,
    tiles: tl.tensor,
    V: tl.tensor,
    num_rows: tl.tensor,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    RULES: tl.constexpr,
    FILTERS: tl.constexpr,
) -> None:
    """Grid (B): fill the lane's results, append to history, advance length, count the emitted tokens."""
    b = tl.program_id(0)
    s = tl.load(slots + b).to(tl.int64)
    if s < 0:
        empty_lane(b, num_emitted, num_accepted, finish, blocked)
        return
    j = tl.arange(0, ROWS)
    last = tl.load(num_drafts + b)
    n = tl.load(length + s)
    live = (j <= last) & (j < num_rows)
    lane = b * lane_stride + j
    ended = tl.load(done + s) != 0  # by a step whose results the host has not read yet
    kind = tl.load(kinds + lane, mask=live, other=0).to(tl.int32)
    kind = tl.where(ended, tl.full([ROWS], DEFER, tl.int32), kind)
    draft = tl.load(drafts + lane, mask=live & (j < last), other=-1)
    token = target_tokens(
        b, s, live, temperature, top_p, min_p, top_k, best, best_column, peaks, chosen, partial_stride, tiles, V,
        num_rows, ROWS, TILES, FILTERS,
    )  # fmt: skip
    stop = stopping(token, rules + s * rules_stride, RULES) > 0
    full = n + j + 1 >= tl.load(max_length + s)
    shut = (kind >= DEFER) | (token < 0)
    match = (j < last) & (draft == token)
    end = tl.min(
        tl.where(live & match & ~shut & ~stop & ~full, ROWS, j), axis=0
    )  # the first row after which nothing is emitted
    gives = live & (j <= end) & ~shut
    tl.store(emitted + lane, token, mask=gives)
    tl.store(history + s * history_stride + n + j, token, mask=gives)
    count = tl.sum(gives.to(tl.int32), axis=0)
    tl.store(length + s, n + count)
    tl.store(num_emitted + b, count)
    tl.store(num_accepted + b, tl.sum((gives & match).to(tl.int32), axis=0))
    steered = tl.load(forced + lane, mask=live, other=-1) == STEERED
    how = tl.sum(tl.where(gives, tl.where(stop, tl.where(steered, 3, 1), tl.where(full, 2, 0)), 0), axis=0)
    tl.store(finish + b, how)
    kind = tl.where(kind >= DEFER, kind, DEAD_END)
    why = tl.sum(tl.where(live & (j == end) & shut, kind, 0), axis=0)
    tl.store(blocked + b, why)
    if (how != 0) | (why > DEFER):
        tl.store(done + s, 1)
    word = seen + s * seen_stride + token
    tl.atomic_or(word, tl.full([ROWS], SEEN, tl.int32), mask=gives)
    tl.atomic_add(word, tl.full([ROWS], 1, tl.int32), mask=gives)


@triton.jit
def draft_kernel(
    slots: tl.tensor,
    kinds: tl.tensor,
    forced: tl.tensor,
    d2t: tl.tensor,
    drafts: tl.tensor,
    history: tl.tensor,
    length: tl.tensor,
    temperature: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    best: tl.tensor,
    best_column: tl.tensor,
    peaks: tl.tensor,
    chosen: tl.tensor,
    lane_stride: tl.tensor,
    history_stride: tl.tensor,
    partial_stride: tl.tensor,
    tiles: tl.tensor,
    V: tl.tensor,
    row: tl.tensor,
    TILES: tl.constexpr,
    FILTERS: tl.constexpr,
    D2T: tl.constexpr,
) -> None:
    """Grid (B): write the draft of `row`, -1 where nothing is legal, and 0 or it into history after the length."""
    b = tl.program_id(0)
    s = tl.load(slots + b).to(tl.int64)
    if s < 0:
        return
    t = tl.load(temperature + s)
    columns, _ = pick(best, best_column, peaks, b, 1, t, partial_stride, tiles, 1, TILES)
    token = tl.sum(columns, axis=0)
    if FILTERS:
        if filters(t, tl.load(top_k + s), tl.load(top_p + s), tl.load(min_p + s), V):
            token = tl.load(chosen + b)
    at = b * lane_stride + row
    kind = tl.load(kinds + at).to(tl.int32)
    if D2T:
        # A row that was not computed (DEFER, say) leaves stale values in the scratch.
        known = (kind < DEFER) & (token >= 0) & (token < V)
        token += tl.load(d2t + tl.where(known, token, 0), mask=known, other=0)
        # A pruned vocabulary need not have the one legal token.
        token = tl.where(kind == FORCED, tl.load(forced + at), token)
    token = tl.where(kind >= DEFER, -1, token)
    tl.store(drafts + at, token)
    tl.store(history + s * history_stride + tl.load(length + s) + row, tl.maximum(token, 0))
