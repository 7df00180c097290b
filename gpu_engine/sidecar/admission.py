"""Compilations that the grammar process would refuse, refused here: a flood of them costs neither process a call.

The invariant: what is refused would have found the grammar process's queue full, by its own words (Configure), and is
no grammar that it was seen to have, for those it answers at once. A request that holds a slot was accepted before, and
is never refused, here or there: its caller gives no limit. It counts as the others here, so that behind a restart who
comes new is refused a little sooner. Used on the event loop. Not here: the
calls (`grammar_compile.py`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from gpu_engine.api.errors import LimitExceeded
from gpu_engine.api.request import GrammarSpec

KNOWN = 16384
"""Grammars that are remembered as compiled, by their hash. Two that share one are both asked for, as without this."""


@dataclass(slots=True)
class Admission:
    """Counts compilations on their way, by the backend that was asked for."""

    max_known: int = KNOWN
    refused: int = 0
    """So many were not sent."""
    _running: Counter[int] = field(default_factory=Counter)
    _known: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _attached: int = 0
    """The grammar process that has what is known."""

    def enter(self, spec: GrammarSpec, attached: int, limit: int) -> bool:
        """Let a compilation through; return whether it counts, and is to `leave`. Raises LimitExceeded.

        Args: `attached` is the number of the grammar process, `limit` what one backend of it takes at once; 0: any.
        """
        if attached == self._attached and hash(spec) in self._known:
            self._known.move_to_end(hash(spec))
            return False
        if 0 < limit <= self._running[spec.backend]:
            self.refused += 1
            raise LimitExceeded(f"grammar: compile_queue: {limit} compilations run or wait already; try again")
        self._running[spec.backend] += 1
        return True

    def leave(self, spec: GrammarSpec) -> None:
        """One that counted is over."""
        self._running[spec.backend] -= 1

    def compiled(self, spec: GrammarSpec, attached: int) -> None:
        """The grammar process of that number has it."""
        if attached != self._attached:
            self._attached = attached
            self._known.clear()
        self._known[hash(spec)] = None
        self._known.move_to_end(hash(spec))
        if len(self._known) > self.max_known:
            self._known.popitem(last=False)

    def __repr__(self) -> str:
        return f"<Admission running={self._running.total()} known={len(self._known)} refused={self.refused}>"
