"""Records of iterations for the feed of statistics."""

from __future__ import annotations

from gpu_engine.api.stats import Iteration, IterationRing


def ran(ring: IterationRing, count: int) -> None:
    """Add iterations that differ in each number."""
    for _ in range(count):
        n = ring.total
        ring.add(Iteration(n, 1e9 + n, n / 1e3, *(n + i for i in range(1, 11))))
