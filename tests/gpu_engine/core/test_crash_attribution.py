"""Crash counts of guided sequences: which sequence ends, which is quarantined, which is opened when."""

from __future__ import annotations

import pytest

from gpu_engine.core import crash_attribution
from gpu_engine.core.running import RunningSequence
from gpu_engine.core.scheduler import GrammarState
from tests.gpu_engine.harness import ask, tokens


def sequences(count: int) -> list[RunningSequence]:
    requests = [ask(tokens(9, i), grammar="20").request for i in range(count)]
    return [RunningSequence(9, guided=True, slot=i, request=requests[i]) for i in range(count)]


def process_ended(waiting: list[RunningSequence]) -> list[RunningSequence]:
    """End a process while all of `waiting` decode."""
    return crash_attribution.process_ended(waiting, waiting)


@pytest.mark.parametrize("decodes", [True, False])
def test_three_ends_without_a_token_in_between_blame_a_sequence(decodes: bool) -> None:
    """Whether it decoded, or its matcher was being built."""
    (sequence,) = sequences(1)
    crash_attribution.token_received(sequence)
    matchers = [sequence] if decodes else []
    assert [crash_attribution.process_ended([sequence], matchers) for _ in range(3)] == [[], [], [sequence]]


def test_a_sequence_that_gets_a_token_between_two_ends_is_never_blamed() -> None:
    (sequence,) = sequences(1)
    for _ in range(20):
        assert process_ended([sequence]) == []
        assert process_ended([sequence]) == []
        crash_attribution.token_received(sequence)


def test_an_end_does_not_count_against_a_sequence_that_waited_for_nothing() -> None:
    one, other = sequences(2)
    for _ in range(2):
        process_ended([one])
    assert other.crash_count == 0
    assert process_ended([one]) == [one]


def test_a_neighbour_that_gets_tokens_neither_hides_a_sequence_nor_is_blamed() -> None:
    one, other = sequences(2)
    for _ in range(2):
        crash_attribution.token_received(other)
        assert process_ended([one, other]) == []
    crash_attribution.token_received(other)
    assert process_ended([other, one]) == [one]


def test_quarantined_sequences_are_opened_one_at_a_time_and_others_at_any_time() -> None:
    one, other, arrival = everyone = sequences(3)
    for _ in range(2):
        process_ended([one, other])
    for sequence in everyone:
        sequence.grammar_state = GrammarState.LOST
    assert [crash_attribution.must_wait(sequence, everyone) for sequence in everyone] == [False, False, False]
    one.grammar_state = GrammarState.OPENING
    crash_attribution.trial_started(one)
    assert [crash_attribution.must_wait(sequence, everyone) for sequence in everyone] == [False, True, False]
    # When the process ends before the trial has a result, the sequence with fewer trials comes first.
    assert sorted([one, other], key=crash_attribution.trial_order) == [other, one]
    one.grammar_state = GrammarState.OPEN
    assert crash_attribution.must_wait(other, everyone)
    crash_attribution.token_received(one)
    assert not crash_attribution.must_wait(other, everyone)
    assert not crash_attribution.must_wait(arrival, everyone)


def test_of_several_waiting_sequences_only_those_whose_trial_fails_are_blamed() -> None:
    deadly, innocent = everyone = sequences(2)
    for _ in range(2):
        assert process_ended(everyone) == []
    assert process_ended([deadly]) == [deadly]
    crash_attribution.token_received(innocent)
    assert [process_ended([innocent]) for _ in range(2)] == [[], []]


def test_arrivals_do_not_hide_a_sequence_for_ever() -> None:
    sequence, *arrivals = sequences(6)
    waiting = [[sequence, *arrivals[max(i - 1, 0) : i + 1]] for i in range(6)]
    assert [process_ended(group) for group in waiting] == [[]] * 5 + [[sequence]]


def test_an_end_that_is_forgiven_counts_against_no_sequence() -> None:
    (sequence,) = sequences(1)
    for _ in range(20):
        process_ended([sequence])
        crash_attribution.forgive([sequence], [sequence])
    assert [process_ended([sequence]) for _ in range(3)] == [[], [], [sequence]]


def test_a_sequence_in_quarantine_or_with_a_matcher_at_two_ends_does_not_draft() -> None:
    here, elsewhere, quarantined = sequences(3)
    for drafts in (True, False):
        crash_attribution.process_ended([quarantined], [])
        assert crash_attribution.may_draft(quarantined) == drafts
    crash_attribution.process_ended([], [here])
    crash_attribution.forgive([], [here])
    crash_attribution.process_ended([], [here])
    crash_attribution.token_received(here)
    assert crash_attribution.may_draft(here)
    crash_attribution.process_ended([], [here])
    assert not crash_attribution.may_draft(here)
    assert crash_attribution.may_draft(elsewhere)
