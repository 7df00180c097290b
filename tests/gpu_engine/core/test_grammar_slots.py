"""Guided slots and events of the grammar process, in orders that are rare with a real process."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_engine.api.errors import GrammarUnavailable, InternalError, LockstepError
from gpu_engine.api.prefill_shapes import PrefillShapes
from gpu_engine.api.request import Backtracking, Request, TokenEvent
from gpu_engine.api.stats import EngineStats
from gpu_engine.core.crash_attribution import BLAME_AT, may_draft
from gpu_engine.core.events.held_tokens import go_back, hold, may_backtrack
from gpu_engine.core.grammar_slots import GrammarSlots
from gpu_engine.core.kv_cache import PageAllocator
from gpu_engine.core.running import RunningSequence
from gpu_engine.core.scheduler import GrammarState, Scheduler
from gpu_engine.step.stream import ImmediateStream
from gpu_engine.step.sync import NoSync
from tests.gpu_engine.harness import ask, tokens


class Port:
    """Counts what is opened and closed."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []
        self.sought: list[tuple[tuple[int, ...], int, tuple[bytes, ...]]] = []

    def backtrack(
        self,
        slot: int,
        slot_gen: int,
        request: Request,
        committed: tuple[int, ...],
        first: int,
        dead_texts: tuple[bytes, ...],
    ) -> None:
        self.sought.append((committed, first, dead_texts))

    def open(
        self,
        slot: int,
        slot_gen: int,
        request: Request,
        committed: tuple[int, ...],
        dead_texts: tuple[bytes, ...] = (),
    ) -> None:
        self.opened.append((slot, slot_gen))

    def forked(self, slot: int, slot_gen: int, request: Request, before: tuple[int, int] | None) -> None:
        self.opened.append((slot, slot_gen))

    def close(self, slot: int, slot_gen: int) -> None:
        self.opened.remove((slot, slot_gen))


class Binds:
    """A slot writer that checks the slot and writes nothing."""

    def bind(self, sequence: RunningSequence, *, drafts: bool = True) -> None:
        assert sequence.slot >= 0


def small_scheduler() -> Scheduler[RunningSequence]:
    return Scheduler(2, PageAllocator(8, 16), prefill_chunk=16, lookahead=8, shapes=PrefillShapes(16, 1, 16))


def slots_over(
    scheduler: Scheduler[RunningSequence], *, port: Any = None, end: Any = lambda sequence, **_: None, **clock: Any
) -> GrammarSlots:
    sync, writer = NoSync(ImmediateStream(), 4, 8), Binds()
    return GrammarSlots(port or Port(), scheduler, writer, sync, EngineStats(), lambda sequence: False, end, **clock)  # type: ignore[arg-type]


def test_a_step_of_the_previous_process_is_not_waited_for() -> None:
    scheduler = small_scheduler()
    # Its answers never come: they went with the process.
    grammar_slots = slots_over(scheduler)
    request = ask(tokens(9, 1), grammar="20").request
    sequence: RunningSequence = RunningSequence(9, guided=True, request=request)
    scheduler.add(sequence)
    scheduler.plan()
    grammar_slots.open(sequence)
    sequence.prefilled = 8
    grammar_slots.opened(sequence.slot, sequence.slot_gen, 1.0, False, 2, ())
    assert sequence.decoding

    # A step of it is in flight; the process is lost and the next one is attached before the step is collected.
    grammar_slots.process_lost()
    grammar_slots.process_restored()
    grammar_slots.defer(sequence, 7, advanced=False)
    grammar_slots.opened(sequence.slot, sequence.slot_gen, 1.0, False, 2, ())
    grammar_slots.poll()
    assert sequence.grammar_state is GrammarState.OPEN
    assert sequence.decoding
    assert not sequence.deferred_since_s


def test_a_sequence_ends_after_ten_seconds_without_rows_and_not_before() -> None:
    now_s, ended = [100.0], list[LockstepError]()
    scheduler = small_scheduler()
    grammar_slots = slots_over(scheduler, end=lambda sequence, *, error: ended.append(error), clock=lambda: now_s[0])
    sequence: RunningSequence = RunningSequence(9, guided=True, request=ask(tokens(9, 1), grammar="20").request)
    scheduler.add(sequence)
    scheduler.plan()
    grammar_slots.open(sequence)
    sequence.prefilled = 8
    grammar_slots.opened(sequence.slot, sequence.slot_gen, 1.0, False, 2, ())
    grammar_slots.defer(sequence, 7, advanced=False)
    for now_s[0], expected in ((100.5, []), (109.9, []), (110.1, ["the grammar process gave no rows for 10 s"])):
        grammar_slots.poll()
        assert [str(error) for error in ended] == expected
    assert isinstance(ended[0], GrammarUnavailable)


def test_a_way_back_is_asked_of_the_next_process_again() -> None:
    scheduler, port = small_scheduler(), Port()
    grammar_slots = slots_over(scheduler, port=port)
    request = ask(tokens(9, 1), grammar="20", backtracking=Backtracking(2, 2)).request
    sequence: RunningSequence = RunningSequence(9, guided=True, request=request)
    scheduler.add(sequence)
    scheduler.plan()
    grammar_slots.open(sequence)
    sequence.prefilled = 8
    grammar_slots.opened(sequence.slot, sequence.slot_gen, 1.0, False, 2, (), verified=True)
    for token in (5, 6, 7):
        sequence.answer.append(token)
        hold(sequence, TokenEvent(0, (token,)))
    assert may_backtrack(sequence)
    assert sequence.num_sent == 1

    grammar_slots.backtrack(sequence)
    assert not sequence.decoding
    asked = (5, 6, 7), 1, ()
    assert port.sought == [asked]
    grammar_slots.process_lost()
    grammar_slots.process_restored()
    assert port.sought == [asked, asked]

    go_back(sequence, 1, (b"x",))
    assert (sequence.answer, sequence.num_sent, sequence.backtracking, sequence.dead_texts) == ([5], 1, False, (b"x",))
    with pytest.raises(ValueError, match="1 were sent"):
        go_back(sequence, 0, (b"x",))


@pytest.mark.parametrize("first", ["reported", "forgiven"])
@pytest.mark.parametrize("from_outside", [True, False])
def test_ends_from_outside_are_not_counted(first: str, from_outside: bool) -> None:
    """Whether the supervisor tells of the end before the link reports it, or after it."""
    scheduler = small_scheduler()
    ended: list[InternalError] = []
    grammar_slots = slots_over(scheduler, end=lambda sequence, *, error: ended.append(error))
    sequence: RunningSequence = RunningSequence(9, guided=True, request=ask(tokens(9, 1), grammar="20").request)
    scheduler.add(sequence)
    scheduler.plan()
    grammar_slots.open(sequence)
    sequence.prefilled = 8
    for _ in range(BLAME_AT):
        grammar_slots.opened(sequence.slot, sequence.slot_gen, 1.0, False, 2, ())
        sequence.deferred_since_s = 1.0  # its rows are late
        if from_outside and first == "forgiven":
            grammar_slots.forgive()
        grammar_slots.process_lost()
        if from_outside and first == "reported":
            grammar_slots.forgive()
        grammar_slots.process_restored()
    assert len(ended) == (not from_outside)
    assert may_draft(sequence) == from_outside
