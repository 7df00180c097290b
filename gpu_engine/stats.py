"""What an engine counts, as one readable value. Writer: the engine thread; a reader gets a copy, a step old at most."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and gauges of now."""

    num_slots: int = 0
    num_pages: int = 0
    waiting: int = 0
    running: int = 0
    pages_used: int = 0
    steps: int = 0
    step_rows: int = 0
    """Rows verified, padding included."""
    step_ms: float = 0.0
    """Time in decode steps."""
    generated_tokens: int = 0
    prefill_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    mask_wait_ms: float = 0.0
    deferred_rows: int = 0
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """By FinishReason name."""
    failed: Counter[str] = field(default_factory=Counter)
    """By gRPC status name."""
