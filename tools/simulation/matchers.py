"""The grammar library with faults: its rows may take long, hang or fail; what they say is the library's own.

Invariant: without a fault a call is the library's. A row that takes time lets other threads run meanwhile, as a library
that releases the GIL does. Not responsible for: when a fault happens (see faults.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grammar_service.backends.backend import (
    Backend,
    ChainFiller,
    Compiled,
    Filled,
    Matcher,
    MatcherFailed,
    Rows,
    chain_filler_of,
)
from grammar_service.grammar.value import Grammar
from tools.simulation.faults import Fault, Faults
from tools.simulation.world import World

_loaded: dict[tuple[Backend, bytes], Compiled] = {}
"""Compiled grammars, which are immutable, so that all runs of a process share them."""


@dataclass(frozen=True, eq=False)
class SimBackend:
    """A backend whose matchers are `SimMatcher`s."""

    backend: Backend
    world: World
    faults: Faults

    @property
    def name(self) -> str:
        """See `Backend`."""
        return self.backend.name

    def compile(self, grammar: Grammar, *, allow_unenforced: bool = False) -> bytes:
        """See `Backend`; only compile workers call it, with their own backend."""
        raise AssertionError("the grammar process compiles nothing by itself")

    def load(self, grammar: Grammar, artifact: bytes) -> Compiled:
        """See `Backend`."""
        self.world.point("sidecar loads a grammar")
        key = self.backend, artifact
        if key not in _loaded:
            _loaded[key] = self.backend.load(grammar, artifact)
        return SimCompiled(_loaded[key], self)


@dataclass(frozen=True, eq=False)
class SimCompiled:
    """A compiled grammar."""

    compiled: Compiled
    backend: SimBackend

    @property
    def warnings(self) -> tuple[str, ...]:
        """See `Compiled`."""
        return self.compiled.warnings

    @property
    def memory_bytes(self) -> int:
        """See `Compiled`."""
        return self.compiled.memory_bytes

    def matcher(self) -> Matcher:
        """See `Compiled`."""
        return SimMatcher(self.compiled.matcher(), self.backend)


class SimMatcher:
    """A matcher. `filler` is there if the library's matcher has one.

    A copy looks ahead to the end of an answer, and never fails: what a failure there changes is the choice of the end,
    which no promise covers.
    """

    def __init__(self, matcher: Matcher, backend: SimBackend, *, looks_ahead: bool = False) -> None:
        self.own, self._backend, self._looks_ahead = matcher, backend, looks_ahead
        own = chain_filler_of(matcher)
        self.filler = None if own is None else SimFiller(own, backend)

    @property
    def terminated(self) -> bool:
        """See `Matcher`."""
        return self.own.terminated

    def accept(self, token: int) -> bool:
        """See `Matcher`."""
        return self.own.accept(token)

    def rollback(self, count: int) -> None:
        """See `Matcher`."""
        self.own.rollback(count)

    def copy(self) -> SimMatcher:
        """See `Matcher`."""
        return SimMatcher(self.own.copy(), self._backend, looks_ahead=True)

    def fill(self, rows: Rows, index: int) -> None:
        """See `Matcher`."""
        meet_fault(self._backend, fails=not self._looks_ahead)
        self.own.fill(rows, index)

    def jump_forward_tokens(self, limit: int) -> tuple[int, ...]:
        """See `Matcher`."""
        return self.own.jump_forward_tokens(limit)

    def num_jump_forward_bytes(self) -> int:
        """See `Matcher`."""
        return self.own.num_jump_forward_bytes()


class SimFiller:
    """A chain filler over `SimMatcher`s."""

    def __init__(self, filler: ChainFiller, backend: SimBackend) -> None:
        self._filler, self._backend = filler, backend
        self.special, self.threaded, self.plain = filler.special, filler.threaded, filler.plain

    def may_follow(self, matcher: Any, tokens: Sequence[int]) -> bool:
        """See `ChainFiller`."""
        return self._filler.may_follow(matcher.own, tokens)

    def accept_each(self, matchers: Sequence[Any], tokens: Sequence[list[int]]) -> list[int]:
        """See `ChainFiller`."""
        return self._filler.accept_each([matcher.own for matcher in matchers], tokens)

    def fill(
        self, matchers: Sequence[Any], drafts: Sequence[list[int]], rows: NDArray[np.int32], stride: int, threads: int
    ) -> Filled:
        """See `ChainFiller`."""
        try:
            meet_fault(self._backend)
        except MatcherFailed:
            return Filled([0], [])
        return self._filler.fill([matcher.own for matcher in matchers], drafts, rows, stride, threads)


def meet_fault(backend: SimBackend, *, fails: bool = True) -> None:
    """Apply the fault that is due for this row, if any; `fails` False: skip a failure. Raises MatcherFailed.

    Nothing happens on an event loop, because it must not wait.
    """
    world = backend.world
    if world.current is None:
        return
    world.point("library fills")
    match backend.faults.fill():
        case None:
            return
        case Fault.FAILED_FILL, _:
            if fails:
                raise MatcherFailed("a limit of the library")
        case _, seconds:
            world.sleep(seconds)
