"""Which compilations are sent to the grammar process: one policy, with a limit for each tenant and one for all.

A flood of compilations costs no RPC, and a tenant that floods fills neither the queue of the grammar process nor its
workers. Invariant: a compilation that `CompileAdmission.admit` has let in is given back by one `give_back`. Used on the
event loop.

Not responsible for: joining equal compilations, and sending them (see compilations.py).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from gpu_engine.api.errors import LimitExceeded
from gpu_engine.api.request import GrammarOwner, GrammarSpec

MAX_KNOWN = 16384
"""Grammars that are remembered as compiled, by their hash. On a collision, both are treated as known."""


@dataclass(slots=True)
class _Places:
    """The compilations of one tenant on one backend."""

    weight: float
    taken: int = 0


@dataclass(slots=True)
class QueuePlaces:
    """The compilations under way, by the backend that was asked for: one above its limit is refused.

    Invariant: a compilation that is refused here would have found the queue of the grammar process full, by the limit
    that the process itself gave (Configure). Grammars that the process is known to have are answered at once, and need
    no place. A sequence that holds a slot was accepted before and is never refused, but its compilation counts.

    Above the limit a tenant's compilation is sent while another tenant has more of them over its weight: the grammar
    process gives it the place of that tenant's newest one (see grammar_service/compile/queue.py).
    """

    max_known: int = MAX_KNOWN
    refused: int = 0
    """Compilations that were not sent."""
    _running: dict[int, dict[str, _Places]] = field(default_factory=dict)
    """Backend -> tenant, or client of a server without tenants, "" for none -> its compilations."""
    _known: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _attached: int = 0
    """The number of the grammar process that has the known grammars."""

    def enter(self, spec: GrammarSpec, attached: int, limit: int) -> bool:
        """Admit a compilation; return whether it takes a place, and needs a call of `leave`. Raises LimitExceeded.

        Args:
            attached: the number of the grammar process (`GrammarLink.attached`).
            limit: compilations that one backend of this process takes at once; 0: no limit.
        """
        if self.knows(spec, attached):
            self._known.move_to_end(hash(spec))
            return False
        all_places = self._running.setdefault(spec.backend, {})
        tenant, weight = spec.turn_of
        mine = all_places.get(tenant) or _Places(weight)
        mine.weight = weight
        full = 0 < limit <= sum(places.taken for places in all_places.values())
        if full and (mine.taken + 1) / weight >= max(places.taken / places.weight for places in all_places.values()):
            self.refused += 1
            raise LimitExceeded(f"grammar: compile_queue: {limit} compilations run or wait already; try again")
        mine.taken += 1
        all_places[tenant] = mine
        return True

    def knows(self, spec: GrammarSpec, attached: int) -> bool:
        """Return whether the grammar process of this number is known to have the grammar."""
        return attached == self._attached and hash(spec) in self._known

    def leave(self, spec: GrammarSpec) -> None:
        """Give back the place of a compilation that has ended."""
        all_places, (tenant, _) = self._running[spec.backend], spec.turn_of
        all_places[tenant].taken -= 1
        if not all_places[tenant].taken:
            del all_places[tenant]

    def compiled(self, spec: GrammarSpec, attached: int) -> None:
        """Remember that the grammar process of this number has the grammar."""
        if attached != self._attached:
            self._attached = attached
            self._known.clear()
        self._known[hash(spec)] = None
        self._known.move_to_end(hash(spec))
        if len(self._known) > self.max_known:
            self._known.popitem(last=False)

    def forget_known(self) -> None:
        """Forget which grammars the grammar process has: it dropped them."""
        self._known.clear()

    def __repr__(self) -> str:
        running = sum(places.taken for tenants in self._running.values() for places in tenants.values())
        return f"<QueuePlaces running={running} known={len(self._known)} refused={self.refused}>"


@dataclass(slots=True)
class _State:
    """The compilations of one tenant."""

    admitted: int = 0
    """Running and waiting ones."""
    running: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class TenantTurns:
    """Compilations of each tenant at a time: so many run, some more wait for their turn, and one more is refused.

    Invariant: what `admit` has let in is given back by `ended`. A turn that ends, however it ends, goes to the tenant's
    oldest waiting compilation.
    """

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}
        self.refused = 0

    def admit(self, owner: GrammarOwner) -> None:
        """Count a compilation. Raises LimitExceeded where as many run and wait as may."""
        state = self._states.setdefault(owner.tenant, _State())
        most = owner.max_compilations
        if most and state.admitted >= most + owner.max_waiting:
            self.refused += 1
            raise LimitExceeded(
                f"grammar: max_compilations: tenant {owner.tenant}: {most} compilations may run, and "
                f"{owner.max_waiting} wait (max_waiting_compilations); try again"
            )
        state.admitted += 1

    def ended(self, owner: GrammarOwner) -> None:
        """Give back what `admit` has counted."""
        state = self._states[owner.tenant]
        state.admitted -= 1
        if not state.admitted:
            del self._states[owner.tenant]

    @asynccontextmanager
    async def turn(self, owner: GrammarOwner) -> AsyncIterator[None]:
        """Wait until the tenant may run one more compilation, which is the block. It was admitted."""
        state = self._states[owner.tenant]
        most = owner.max_compilations
        if most and (state.running >= most or state.waiting):
            await _wait(state)
        else:
            state.running += 1
        try:
            yield
        finally:
            _pass_on(state)

    def __repr__(self) -> str:
        return f"<TenantTurns {sum(state.admitted for state in self._states.values())} refused={self.refused}>"


async def _wait(state: _State) -> None:
    """Wait for a turn. If the task is cancelled when it already has the turn, the turn is passed on."""
    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    state.waiting.append(turn)
    try:
        await turn
    except asyncio.CancelledError:
        if turn.done() and not turn.cancelled():
            _pass_on(state)
        elif turn in state.waiting:  # else a turn was passed on meanwhile, over this one
            state.waiting.remove(turn)
        raise


def _pass_on(state: _State) -> None:
    """Give a turn to the oldest compilation that waits, or back."""
    while state.waiting:
        turn = state.waiting.popleft()
        if not turn.done():
            turn.set_result(None)
            return
    state.running -= 1


class CompileAdmission:
    """The policy of one engine."""

    def __init__(self) -> None:
        self.queue = QueuePlaces()
        self.turns = TenantTurns()

    @property
    def refused(self) -> int:
        """Compilations that were not sent because the queue of the grammar process was full."""
        return self.queue.refused

    def admit(self, spec: GrammarSpec, process: Process, *, accepted: bool) -> Place:
        """Admit a compilation. Raises LimitExceeded.

        A tenant's compilation waits for a turn of its tenant before it asks for a place in the queue; any other one
        asks now. `accepted`: its sequence holds a slot, so it is counted and never refused.
        """
        owner = spec.owner
        if owner is not None and not accepted and not self.queue.knows(spec, process.attached):
            self.turns.admit(owner)
            return Place(self, spec, process, owner)
        limit = 0 if accepted else process.max_compilations
        place = Place(self, spec, process)
        place.is_taken = self.queue.enter(spec, process.attached, limit)
        return place

    def __repr__(self) -> str:
        return f"<CompileAdmission {self.queue!r} {self.turns!r}>"


class Process(Protocol):
    """The grammar process, as far as the policy looks at it."""

    @property
    def attached(self) -> int:
        """The number of the process that is attached."""

    @property
    def max_compilations(self) -> int:
        """Compilations that one of its backends takes at once; 0: no limit."""


@dataclass(slots=True)
class Place:
    """The place of one compilation."""

    _admission: CompileAdmission
    _spec: GrammarSpec
    _process: Process
    _turn_of: GrammarOwner | None = None
    """The tenant whose turn it waits for; None: it waits for none."""
    is_taken: bool = False
    """It has a place in the queue of the grammar process, and gives it back."""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until the compilation may be sent, which is the block. Raises LimitExceeded."""
        if self._turn_of is None:
            yield
            return
        async with self._admission.turns.turn(self._turn_of):
            process = self._process
            self.is_taken = self._admission.queue.enter(self._spec, process.attached, process.max_compilations)
            try:
                yield
            finally:
                self._leave_queue()

    def give_back(self) -> None:
        """Give back what `admit` has counted."""
        if self._turn_of is not None:
            self._admission.turns.ended(self._turn_of)
        else:
            self._leave_queue()

    def _leave_queue(self) -> None:
        if self.is_taken:
            self._admission.queue.leave(self._spec)
