"""A budget that bounds drafts by chance."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gpu_engine.core.draft_budget import DraftBudget, Plan, Proposal, Shape


class RandomBudget(DraftBudget):
    """Chooses by chance, and records what it chose."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self.limits: set[tuple[int, ...]] = set()

    def choose(self, proposals: Sequence[Proposal], shapes: Sequence[Shape] | None, *, guided: bool) -> Plan:
        most = self._rng.choice((0, 2, 7))
        limits = tuple(self._rng.randint(0, most) for _ in proposals)
        self.limits.add(limits)
        return Plan(tuple(proposals), limits, guided)

    def rows_to_propose(self, plan: Plan, most: int) -> int:
        return self._rng.choice((1, 2, 4, most, most))
