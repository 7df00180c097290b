"""The engine's counters and gauges as one value, and the last iterations of its loop in a ring.

The engine's thread writes both; a reader's copy is at most a step old.

The invariant: a step counts with a few additions, without a lock; an iteration adds one tuple of numbers to the ring,
and the ring's size never changes.

Not responsible for: the Prometheus metrics (ops/metrics_engine.py), sending the ring to clients (front/stats_feed.py).
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

STEP_BOUNDS_S = (1e-3, 2e-3, 5e-3, 1e-2, 1.5e-2, 2e-2, 3e-2, 4e-2, 6e-2, 8e-2, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
MASK_WAIT_BOUNDS_S = (1e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
GAP_BOUNDS_S = (1e-3, 5e-3, 1e-2, 1.5e-2, 2e-2, 2.5e-2, 3e-2, 4e-2, 5e-2, 7.5e-2, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
TOKENS_BOUNDS = tuple(float(count) for count in range(17))


class Histogram:
    """Counts per bucket, with one writing thread. A reader may miss the last observation, and sees none twice."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Args: `bounds` are the inclusive upper ends of the buckets, rising; one more bucket has no upper end."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Per bucket, not cumulative."""
        self.total = 0.0
        """Sum of the observed values."""

    def observe(self, value: float) -> None:
        """Count `value`."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def count(self, number: int) -> None:
        """Count `number`, where the bounds are 0, 1, 2 and so on."""
        counts = self.counts
        counts[number if number < len(counts) else -1] += 1
        self.total += number

    def __repr__(self) -> str:
        return f"<Histogram count={sum(self.counts)} total={self.total:g}>"


class MemoryUse(NamedTuple):
    """Bytes that an engine holds from its start to its end."""

    weight_bytes: int = 0
    """Weights and rotary tables, copies in other layouts included."""
    kv_cache_bytes: int = 0
    """Pages of the target."""
    buffer_bytes: int = 0
    """Buffers of slots and lanes; on a GPU the buffers of sampling as well."""
    draft_bytes: int = 0
    """Weights and pages of the draft model of drafter=decoupled."""
    state_bytes: int = 0
    """States of the target's recurrent layers, with their snapshots."""

    def __str__(self) -> str:
        weights, cache, buffers, drafts, states = (f"{count / 1e6:,.1f} MB" for count in self)
        line = f"{weights} of weights, {cache} of KV pages, {buffers} of buffers"
        line += f", {states} of recurrent states" if self.state_bytes else ""
        return f"{line}, {drafts} of a draft model" if self.draft_bytes else line


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and gauges. Times in the names' units."""

    memory: MemoryUse = field(default_factory=MemoryUse)
    """The memory of this process; it changes only with the draft model."""
    num_slots: int = 0
    num_pages: int = 0
    waiting: int = 0
    running: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    """Pages without an owner, reusable by prefix match."""
    snapshots: int = 0
    """Recurrent states that the prefix cache resumes from."""
    max_snapshots: int = 0
    """Places for them; 0: the model has no recurrent layers, or there is no prefix cache."""
    steps: int = 0
    step_rows: int = 0
    """Rows of the steps' forwards: the batch's, padding included, and those of prompts."""
    step_ms: float = 0.0
    """Time spent in decode steps."""
    generated_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not prefilled: their KV pages were cached, by another sequence or before a preemption."""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    jump_forward_tokens: int = 0
    """Drafts that the grammar forced."""
    accepted_jump_forward_tokens: int = 0
    index_draft_tokens: int = 0
    """Drafts from earlier answers."""
    accepted_index_draft_tokens: int = 0
    mask_wait_ms: float = 0.0
    deferred_rows: int = 0
    preemptions: int = 0
    dead_ends: int = 0
    """Sequences that ended because no token was legal."""
    matcher_errors: int = 0
    """Sequences that ended because their matcher rejected a committed token, or failed."""
    finished: Counter[str] = field(default_factory=Counter)
    """Ended sequences, by the name of their FinishReason."""
    failed: Counter[str] = field(default_factory=Counter)
    """Failed sequences, by the name of their gRPC status."""
    step_seconds: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    mask_wait_seconds: Histogram = field(default_factory=lambda: Histogram(MASK_WAIT_BOUNDS_S))
    """Only steps with a guided sequence count."""
    token_gap_seconds: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS_S))
    """Time between two steps in a row that gave a sequence tokens."""
    drafts_per_step: Histogram = field(default_factory=lambda: Histogram(TOKENS_BOUNDS))
    """Drafts of a sequence that a step verified."""
    step_ms_by_rows: dict[bool, dict[int, float]] = field(default_factory=dict)
    """Expected time of a step by the rows of its forward, as learned; by whether it has a guided sequence."""
    tokens_per_step: Histogram = field(default_factory=lambda: Histogram(TOKENS_BOUNDS))
    """Tokens that a step gave a sequence: its accepted drafts and the target's own token; 0: its rows were deferred."""

    def count_step(self, num_rows: int, step_ms: float, waited_ms: float, *, guided: bool) -> None:
        """Count one collected step; `guided`: at least one sequence of it has a grammar."""
        self.steps += 1
        self.step_rows += num_rows
        self.step_ms += step_ms
        self.mask_wait_ms += waited_ms
        self.step_seconds.observe(step_ms / 1e3)
        if guided:
            self.mask_wait_seconds.observe(waited_ms / 1e3)

    def count_tokens(self, num_tokens: int, num_drafts: int, num_accepted: int, num_jump_forward: int = 0) -> None:
        """Count one step of one sequence; its first `num_jump_forward` drafts were jump-forward tokens."""
        self.tokens_per_step.count(num_tokens)
        self.drafts_per_step.count(num_drafts)
        self.generated_tokens += num_tokens
        if num_tokens:
            self.draft_tokens += num_drafts
            self.accepted_draft_tokens += num_accepted
            self.jump_forward_tokens += min(num_jump_forward, num_drafts)
            self.accepted_jump_forward_tokens += min(num_jump_forward, num_accepted)


class Iteration(NamedTuple):
    """One iteration of the engine's loop that had something to do."""

    number: int
    """From 0, since the start."""
    ended_s: float
    """Seconds since 1970."""
    seconds: float
    waiting: int
    running: int
    decoding: int
    """Sequences in its decode step."""
    prefill_tokens: int
    generated_tokens: int
    """Tokens of the step whose outputs the iteration processed; with `overlap`, an earlier step."""
    draft_tokens: int
    accepted_draft_tokens: int
    parked: int
    """Guided sequences with a prefilled prompt that wait for the grammar process."""
    preempted: int
    pages_used: int


class IterationRing:
    """The last iterations. One thread adds to it; any thread reads it, and a reader that is too slow misses some."""

    def __init__(self, size: int) -> None:
        """Args: `size` is the number of iterations that are kept, at least 1."""
        self.size = size
        self._ring: list[Iteration | None] = [None] * size
        self.total = 0
        """Iterations since the start; the number of the next one."""

    def add(self, iteration: Iteration) -> None:
        """Add the iteration with the number `total`, over the oldest one."""
        self._ring[iteration.number % self.size] = iteration
        self.total = iteration.number + 1

    def since(self, number: int) -> tuple[list[Iteration], int]:
        """Return the iterations from `number` on that the ring still has, and the number after the last of them."""
        end = self.total
        found = [self._ring[i % self.size] for i in range(max(number, end - self.size), end)]
        # The writer may have replaced some of the oldest meanwhile.
        return [each for each in found if each is not None and each.number < end], end

    def __repr__(self) -> str:
        return f"<IterationRing {self.total} iterations, {self.size} kept>"


class Stage(enum.Enum):
    """Where a sequence is; the values equal the proto enum's."""

    WAITING = 1
    PREFILL = 2
    DECODE = 3
    PARKED = 4


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """One sequence that waits or runs. Its numbers may be of two neighbouring steps."""

    request_id: str
    index: int
    client_id: str
    stage: Stage
    prompt_tokens: int
    prefilled_tokens: int
    """Prompt tokens whose keys and values are in pages."""
    generated_tokens: int
    slot: int | None
    pages: int
