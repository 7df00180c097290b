"""Guided slots and events of the grammar process, in orders that are rare with a real process."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_engine.api.errors import GrammarUnavailable, LockstepError
from gpu_engine.api.request import Backtracking, TokenEvent
from gpu_engine.api.stats import EngineStats
from gpu_engine.core.crash_attribution import BLAME_AT, may_draft
from gpu_engine.core.events.held_tokens import go_back, hold, may_backtrack
from gpu_engine.core.grammar_slots import GrammarSlots
from gpu_engine.core.running import RunningSequence
from gpu_engine.core.scheduler import GrammarState
from gpu_engine.step.stream import ImmediateStream
from gpu_engine.step.sync import NoSync
from tests.gpu_engine.core.schedulers import scheduler
from tests.gpu_engine.harness import ask, tokens


class Recorder:
    """A grammar port, or a slot writer, that records each call and does nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **fields: self.calls.append((name, args, fields))


class Guided:
    """Grammar slots with one sequence, whose prompt is prefilled, and whose matcher is being opened."""

    def __init__(self, **fields: Any) -> None:
        request = ask(tokens(9, 1), grammar="20", **fields).request
        self.sequence: RunningSequence = RunningSequence(9, guided=True, request=request)
        machine: Any = scheduler(2, 8)
        machine.add(self.sequence)
        machine.plan()
        self.port: Any = Recorder()
        self.ended, self.now_s = list[LockstepError](), 100.0
        self.slots = GrammarSlots(
            port=self.port,
            scheduler=machine,
            slot_writer=Recorder(),  # type: ignore[arg-type]
            sync=NoSync(ImmediateStream(), 4, 8),
            stats=EngineStats(),
            in_step=lambda sequence: False,
            end=lambda sequence, *, error: self.ended.append(error),
            clock=lambda: self.now_s,
        )
        self.slots.open(self.sequence)
        self.sequence.prefilled = 8

    def opened(self, *, verified: bool = False) -> None:
        self.slots.opened(self.sequence.slot, self.sequence.slot_gen, 1.0, False, 2, (), verified=verified)


def test_a_step_of_the_previous_process_is_not_waited_for() -> None:
    one = Guided()
    one.opened()
    assert one.sequence.decoding
    # A step of it is in flight; the process is lost and the next one is attached before the step is collected.
    one.slots.process_lost()
    one.slots.process_restored()
    one.slots.defer(one.sequence, 7, advanced=False)
    one.opened()
    one.slots.poll()
    assert one.sequence.grammar_state is GrammarState.OPEN
    assert one.sequence.decoding
    assert not one.sequence.deferred_since_s


def test_a_sequence_ends_after_ten_seconds_without_rows_and_not_before() -> None:
    one = Guided()
    one.opened()
    one.slots.defer(one.sequence, 7, advanced=False)
    for one.now_s, expected in ((100.5, []), (109.9, []), (110.1, ["the grammar process gave no rows for 10 s"])):
        one.slots.poll()
        assert [str(error) for error in one.ended] == expected
    assert isinstance(one.ended[0], GrammarUnavailable)


def test_a_way_back_is_asked_of_the_next_process_again() -> None:
    one = Guided(backtracking=Backtracking(2, 2))
    one.opened(verified=True)
    for token in (5, 6, 7):
        one.sequence.answer.append(token)
        hold(one.sequence, TokenEvent(0, (token,)))
    assert may_backtrack(one.sequence)
    assert one.sequence.num_sent == 1
    one.slots.backtrack(one.sequence)
    assert not one.sequence.decoding
    one.slots.process_lost()
    one.slots.process_restored()
    asked = [(args[3], fields) for name, args, fields in one.port.calls if name == "backtrack"]
    assert asked == [((5, 6, 7), {"first": 1, "dead_texts": ()})] * 2
    go_back(one.sequence, 1, (b"x",))
    back = one.sequence
    assert (back.answer, back.num_sent, back.backtracking, back.dead_texts) == ([5], 1, False, (b"x",))
    with pytest.raises(ValueError, match="1 were sent"):
        go_back(one.sequence, 0, (b"x",))


def test_a_matcher_that_is_opened_anew_is_not_taken_back_after_that() -> None:
    one = Guided()
    one.opened()
    one.sequence.slot_gen += 1
    one.slots.begin_anew(one.sequence)
    with pytest.raises(AssertionError):
        one.slots.post_forks()  # to a grammar process that is not there
    one.slots.process_lost()
    one.slots.process_restored()
    one.slots.post_forks()
    assert [name for name, _, _ in one.port.calls] == ["open", "forked", "open"]


@pytest.mark.parametrize("first", ["reported", "forgiven"])
@pytest.mark.parametrize("from_outside", [True, False])
def test_ends_from_outside_are_not_counted(first: str, from_outside: bool) -> None:
    """Whether the supervisor tells of the end before the link reports it, or after it."""
    one = Guided()
    for _ in range(BLAME_AT):
        one.opened()
        one.sequence.deferred_since_s = 1.0  # its rows are late
        if from_outside and first == "forgiven":
            one.slots.forgive()
        one.slots.process_lost()
        if from_outside and first == "reported":
            one.slots.forgive()
        one.slots.process_restored()
    assert len(one.ended) == (not from_outside)
    assert may_draft(one.sequence) == from_outside
