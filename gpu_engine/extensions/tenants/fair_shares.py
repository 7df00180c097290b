"""Weighted fair shares of the engine between tenants: whose sequence gets the next slot.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with weights. A
counter grows by the tokens that the engine has computed for its tenant, divided by the tenant's weight, and the tenant
with the smallest counter is next. A tenant that comes back from idleness is lifted to the smallest counter of the
tenants that wait, so it cannot save up service. An answer's tokens cost twice a prompt's, as in the paper. Two things
differ: prompt tokens that the prefix cache had cost nothing, and an answer's tokens are counted when a slot is given,
not in each step, so steps pay nothing for it. Invariant: while tenants A and B wait, their counters differ by no more
than the work of the sequences that got slots at once, and a tenant never has more slots than its `max_running`.

Not responsible for: the order of one tenant's sequences (see core/scheduler.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

from gpu_engine.api.request import TenantShare
from gpu_engine.core.scheduler import S

PROMPT_COST, ANSWER_COST = 1.0, 2.0
"""The cost of one token."""


class FairShares(Generic[S]):
    """The counters of one engine, which are a `SlotOrder`. Used only by the engine thread."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._slots: dict[str, int] = {}
        """The slots of each tenant that has some."""
        self._counted: dict[S, int] = {}
        """The length up to which the tokens of a sequence with a slot are in the counter."""
        self._last = ""
        """The tenant whose sequence was the last to leave the queue."""

    def arrived(self, sequence: S, waiting: Iterable[S]) -> None:
        """Lift the counter of a tenant that had no sequence in the queue; `waiting` is the queue before this one."""
        tenant = sequence.tenant
        if tenant is None:
            return
        queued = {other.tenant.name for other in waiting if other.tenant is not None}
        if tenant.name in queued:
            return
        self._count_answers()
        least = min((self._counter(name) for name in queued), default=self._counter(self._last))
        self._counters[tenant.name] = max(self._counter(tenant.name), least)

    def next(self, waiting: Iterable[S]) -> S | None:
        """Return the sequence that gets the next slot, the first in the queue of some tenant; None: no tenant may.

        A sequence that was preempted goes first: it was chosen before, and its tenant's counter has it.
        """
        self._count_answers()
        first: dict[str, S] = {}
        for sequence in waiting:
            tenant = sequence.tenant
            if sequence.order or tenant is None:
                return sequence
            if tenant.name not in first and self._has_room(tenant, sequence):
                first[tenant.name] = sequence
        if not first:
            return None
        # Of equal counters, as a lifted one is: the tenant with fewer slots, the one that was not served last.
        return first[min(first, key=lambda name: (self._counter(name), self._slots.get(name, 0), name == self._last))]

    def assigned(self, sequence: S) -> None:
        """Count the prompt of a sequence that got its first slot, and its slots."""
        tenant = sequence.tenant
        if tenant is None:
            return
        name = tenant.name
        self._slots[name] = self._slots.get(name, 0) + len(sequence.members)
        if not sequence.order:
            self._add(tenant, PROMPT_COST * (sequence.length - sequence.num_cached_tokens))
        self._counted[sequence] = sequence.length
        self._last = name

    def released(self, sequence: S) -> None:
        """Count the answer of a sequence that loses its slots."""
        tenant = sequence.tenant
        if tenant is None or sequence not in self._counted:
            return
        self._count_answer(sequence)
        del self._counted[sequence]
        self._slots[tenant.name] -= len(sequence.members)
        if not self._slots[tenant.name]:
            del self._slots[tenant.name]

    @property
    def counters(self) -> dict[str, float]:
        """A copy of the counters, by tenant."""
        return dict(self._counters)

    def _has_room(self, tenant: TenantShare, sequence: S) -> bool:
        return not tenant.max_running or (self._slots.get(tenant.name, 0) + len(sequence.members) <= tenant.max_running)

    def _count_answers(self) -> None:
        for sequence in self._counted:
            self._count_answer(sequence)

    def _count_answer(self, sequence: S) -> None:
        assert sequence.tenant is not None
        if (new := sequence.length - self._counted[sequence]) > 0:
            self._counted[sequence] = sequence.length
            self._add(sequence.tenant, ANSWER_COST * new * len(sequence.members))

    def _add(self, tenant: TenantShare, cost: float) -> None:
        self._counters[tenant.name] = self._counter(tenant.name) + cost / tenant.weight

    def _counter(self, name: str) -> float:
        return self._counters.get(name, 0.0)

    def __repr__(self) -> str:
        return f"<FairShares {self._counters} slots={self._slots}>"
