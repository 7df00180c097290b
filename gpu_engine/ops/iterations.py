"""Writes each iteration of the engine's loop into the ring of the last ones.

The invariant: an iteration costs three readings of clocks, five subtractions and one tuple, and nothing more while it
is watched.

Not responsible for: the ring (api/stats.py), the counters (core/loop.py).
"""

from __future__ import annotations

import time

from gpu_engine.api.stats import EngineStats, Iteration, IterationRing


class IterationRecorder:
    """Used only on the engine's thread."""

    def __init__(self, stats: EngineStats, ring: IterationRing) -> None:
        """Args: `stats` has the counters whose growth is an iteration's share of them."""
        self._stats, self._ring = stats, ring
        self._before = self._counters()
        self._began_s = 0.0

    def begin(self) -> None:
        """Note the begin of an iteration."""
        self._began_s = time.perf_counter()

    def end(self, *, waiting: int, running: int, decoding: int, parked: int, pages_used: int) -> None:
        """Add an iteration that had something to do; its counters are those since the last one that had."""
        before, self._before = self._before, (now := self._counters())
        ring = self._ring
        ring.add(
            Iteration(
                ring.total,
                time.time(),
                time.perf_counter() - self._began_s,
                waiting,
                running,
                decoding,
                now[0] - before[0],
                now[1] - before[1],
                now[2] - before[2],
                now[3] - before[3],
                parked,
                now[4] - before[4],
                pages_used,
            )
        )

    def _counters(self) -> tuple[int, int, int, int, int]:
        s = self._stats
        return s.prefill_tokens, s.generated_tokens, s.draft_tokens, s.accepted_draft_tokens, s.preemptions

    def __repr__(self) -> str:
        return f"<IterationRecorder {self._ring!r}>"
