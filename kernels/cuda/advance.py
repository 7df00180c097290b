"""After acceptance, one kernel: marks the lanes that go on to draft, and drops the cached rows of lanes that advanced.

Invariant: a lane that emitted a token drops every cached row of its slot; a lane without a token retains them for the
repeated step. Not responsible for: caching rows (see posting.py).

Shapes: B lanes, S slots, R rows a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def advance_kernel(
    lanes: tl.tensor,
    num_emitted: tl.tensor,
    finish: tl.tensor,
    blocked: tl.tensor,
    drafting: tl.tensor,
    cached: tl.tensor,
    R: tl.tensor,
    ROWS: tl.constexpr,
) -> None:
    """Grid (B): see `advance`."""
    b = tl.program_id(0)
    s = tl.load(lanes + b).to(tl.int64)
    moved = tl.load(num_emitted + b) > 0
    goes_on = moved & (tl.load(finish + b) == 0) & (tl.load(blocked + b) == 0) & (s >= 0)
    tl.store(drafting + b, goes_on.to(tl.uint8))
    j = tl.arange(0, ROWS)
    tl.store(cached + tl.maximum(s, 0) * R + j, tl.zeros([ROWS], tl.uint8), mask=j < tl.where(moved & (s >= 0), R, 0))


def advance(
    slots_B: torch.Tensor,
    num_emitted_B: torch.Tensor,
    finish_B: torch.Tensor,
    blocked_B: torch.Tensor,
    drafting_B: torch.Tensor,
    cached_SR: torch.Tensor,
) -> None:
    """Fill `drafting_B` bool: lanes that emitted a token and go on. Drop the cached rows of every lane that emitted a
    token."""
    ints = (slots_B, num_emitted_B, finish_B, blocked_B)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in ints)
    assert drafting_B.dtype == cached_SR.dtype == torch.bool
    assert cached_SR.is_contiguous()
    R = cached_SR.shape[1]
    advance_kernel[(slots_B.shape[0],)](
        *ints,
        drafting_B.view(torch.uint8),
        cached_SR.view(torch.uint8),
        R,
        ROWS=triton.next_power_of_2(R),
        num_warps=1,
    )
