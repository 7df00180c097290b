"""Whom the ends of grammar processes are counted against, and who is opened when."""

from __future__ import annotations

from gpu_engine.core import crash_attribution as suspects
from gpu_engine.core.running import RunningSequence, SequenceState
from gpu_engine.core.scheduler import GrammarState
from tests.gpu_engine.harness import ask, tokens


def sequences(count: int) -> list[RunningSequence]:
    return [
        RunningSequence(SequenceState(ask(tokens(9, i), grammar="20").request), 9, guided=True, slot=i)
        for i in range(count)
    ]


def died(owed: list[RunningSequence]) -> RunningSequence | None:
    """All of them decoded."""
    return suspects.died(owed, owed)


def test_three_ends_without_a_token_between_find_a_sequence_out() -> None:
    (sequence,) = sequences(1)
    suspects.gained(sequence)
    assert [died([sequence]) for _ in range(3)] == [None, None, sequence]


def test_a_token_between_two_ends_clears_a_sequence() -> None:
    (sequence,) = sequences(1)
    for _ in range(20):
        assert died([sequence]) is None
        assert died([sequence]) is None
        suspects.gained(sequence)


def test_an_end_counts_against_nobody_who_was_not_served() -> None:
    one, other = sequences(2)
    for _ in range(2):
        died([one])
    assert other.payload.strikes == 0
    assert died([one]) is one


def test_of_several_without_a_token_nobody_is_found_out_at_once() -> None:
    one, other = sequences(2)
    assert [died([one, other]) for _ in range(5)] == [None] * 5
    # Alone it is.
    assert died([other]) is other


def test_company_that_got_a_token_hides_nobody() -> None:
    one, other = sequences(2)
    for _ in range(2):
        suspects.gained(other)
        assert died([one, other]) is None
    suspects.gained(other)
    assert died([other, one]) is one


def test_newcomers_do_not_hide_one_for_ever() -> None:
    sequence, *newcomers = sequences(7)
    assert [died([newcomer, sequence]) for newcomer in newcomers] == [None] * 5 + [sequence]


def test_suspects_are_opened_one_at_a_time_and_others_at_any_time() -> None:
    one, other, free = sequences(3)
    for _ in range(2):
        died([one, other])
    for sequence in (one, other, free):
        sequence.grammar_state = GrammarState.LOST
    everybody = [one, other, free]
    assert [suspects.must_wait(sequence, everybody) for sequence in everybody] == [False, False, False]
    one.grammar_state = GrammarState.OPENING
    suspects.opened(one)
    assert [suspects.must_wait(sequence, everybody) for sequence in everybody] == [False, True, False]
    # Not in its turn for ever: when the process ends before it could be tried, the other one is first.
    assert sorted([one, other], key=suspects.turn) == [other, one]
    one.grammar_state = GrammarState.OPEN
    assert suspects.must_wait(other, everybody)
    suspects.gained(one)
    assert not suspects.must_wait(other, everybody)


def test_an_end_that_is_taken_back_counts_against_nobody() -> None:
    (sequence,) = sequences(1)
    for _ in range(20):
        died([sequence])
        suspects.pardon([sequence], [sequence])
    assert [died([sequence]) for _ in range(3)] == [None, None, sequence]


def test_a_pardon_gives_back_that_it_had_a_token() -> None:
    one, other = sequences(2)
    suspects.gained(other)
    died([other])
    suspects.pardon([other], [other])
    # So of two it is the other one that had none.
    died([one, other])
    suspects.gained(other)
    died([one, other])
    suspects.gained(other)
    assert died([one, other]) is one


def test_one_whose_matcher_was_being_made_is_in_the_company_of_those_who_decode() -> None:
    slow, noisy = sequences(2)
    found = []
    for _ in range(6):
        suspects.gained(noisy)
        found.append(suspects.died([slow], [noisy]))
    assert found == [None] * 5 + [slow]


def test_one_whose_matcher_was_being_made_with_nobody_beside_it_is_found_out() -> None:
    (sequence,) = sequences(1)
    assert [suspects.died([sequence], []) for _ in range(3)] == [None, None, sequence]


def test_who_was_there_at_two_ends_drafts_no_more_and_a_pardoned_end_is_none() -> None:
    here, elsewhere = sequences(2)
    suspects.died([], [here])
    suspects.pardon([], [here])
    suspects.died([], [here])
    assert suspects.drafts(here)
    suspects.died([], [here])
    assert not suspects.drafts(here)
    assert suspects.drafts(elsewhere)
