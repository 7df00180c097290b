"""Compilations of each tenant at a time: so many run, some more wait for their turn, and one more is refused.

So a tenant that floods fills neither the queue of the grammar process nor its workers. Invariant: what `admit` has let
in is given back by `ended`; a turn that ends, however it ends, goes to the tenant's oldest waiting compilation. Used on
the event loop.

Not responsible for: the limit of the grammar process, for all together (see compilations.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gpu_engine.api.errors import LimitExceeded
from gpu_engine.api.request import GrammarOwner


@dataclass(slots=True)
class _State:
    """The compilations of one tenant."""

    admitted: int = 0
    """Running and waiting ones."""
    running: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class TenantCompileLimiter:
    """The turns of all tenants."""

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
        return f"<TenantCompileLimiter {sum(state.admitted for state in self._states.values())} refused={self.refused}>"


async def _wait(state: _State) -> None:
    """Wait for a turn. If the task is cancelled when it already has the turn, the turn is passed on."""
    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    state.waiting.append(turn)
    try:
        await turn
    except asyncio.CancelledError:
        if turn.done() and not turn.cancelled():
            _pass_on(state)
        else:
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
