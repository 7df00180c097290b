"""What an engine counts, as one readable value. Writer: the engine thread; a reader gets a copy, a step old at most.

The invariant: counting costs a step a few additions: no lock, and nothing is allocated. Not here: what it looks like to
Prometheus (`metrics_engine.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

STEP_BOUNDS_S = (1e-3, 2e-3, 5e-3, 1e-2, 1.5e-2, 2e-2, 3e-2, 4e-2, 6e-2, 8e-2, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
MASK_WAIT_BOUNDS_S = (1e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
GAP_BOUNDS_S = (1e-3, 5e-3, 1e-2, 1.5e-2, 2e-2, 2.5e-2, 3e-2, 4e-2, 5e-2, 7.5e-2, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
TOKENS_BOUNDS = tuple(float(count) for count in range(17))


class Histogram:
    """Counts per bucket, with one writing thread. A reader may be one observation behind, and sees no count twice."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Args: `bounds` are the upper ends of the buckets, included, in rising order; above the last is one more."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Not cumulated."""
        self.total = 0.0
        """Sum of what was observed."""

    def observe(self, value: float) -> None:
        """Count `value`."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def __repr__(self) -> str:
        return f"<Histogram count={sum(self.counts)} total={self.total:g}>"


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and gauges of now."""

    num_slots: int = 0
    num_pages: int = 0
    waiting: int = 0
    running: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    """In use by nobody; who begins with their tokens finds them."""
    steps: int = 0
    step_rows: int = 0
    """Rows verified, padding included."""
    step_ms: float = 0.0
    """Time in decode steps."""
    generated_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    """Not prefilled: their keys and values were there, from another sequence or before a preemption."""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    jump_forward_tokens: int = 0
    """Of the drafts: what the grammar forces."""
    accepted_jump_forward_tokens: int = 0
    mask_wait_ms: float = 0.0
    deferred_rows: int = 0
    preemptions: int = 0
    dead_ends: int = 0
    """Sequences that had no legal token left."""
    matcher_errors: int = 0
    """Sequences whose matcher refused a committed token, or failed."""
    finished: Counter[str] = field(default_factory=Counter)
    """By FinishReason name."""
    failed: Counter[str] = field(default_factory=Counter)
    """By gRPC status name."""
    step_seconds: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    mask_wait_seconds: Histogram = field(default_factory=lambda: Histogram(MASK_WAIT_BOUNDS_S))
    """Of steps with a guided sequence."""
    token_gap_seconds: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS_S))
    """From one step that brought tokens to a sequence to the next."""
    tokens_per_step: Histogram = field(default_factory=lambda: Histogram(TOKENS_BOUNDS))
    """Tokens that a step brought to a sequence: accepted drafts and one of the target's own; 0: deferred."""

    def count_step(self, num_rows: int, step_ms: float, waited_ms: float, *, guided: bool) -> None:
        """Count a step that was collected; `guided` says that some sequence of it has a grammar."""
        self.steps += 1
        self.step_rows += num_rows
        self.step_ms += step_ms
        self.mask_wait_ms += waited_ms
        self.step_seconds.observe(step_ms / 1e3)
        if guided:
            self.mask_wait_seconds.observe(waited_ms / 1e3)

    def count_tokens(self, num_tokens: int, num_drafts: int, num_accepted: int, num_jump_forward: int = 0) -> None:
        """Count what a step brought to one sequence; the first `num_jump_forward` of its drafts were forced."""
        self.tokens_per_step.observe(num_tokens)
        self.generated_tokens += num_tokens
        if num_tokens:
            self.draft_tokens += num_drafts
            self.accepted_draft_tokens += num_accepted
            self.jump_forward_tokens += min(num_jump_forward, num_drafts)
            self.accepted_jump_forward_tokens += min(num_jump_forward, num_accepted)
