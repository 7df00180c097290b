"""Attributes crashes of the grammar process to guided sequences: a count, and a quarantine.

A grammar that crashes or hangs its process does so again in the next process, where the same matcher is built from the
same tokens. So each guided sequence has a crash count: grammar processes that ended while the sequence waited for mask
rows or for its matcher, since its last token.

    crash_count 2    quarantine: the sequence is opened again when no other quarantined sequence is on trial, and it
                     gets no more drafts
    crash_count 3    the sequence ends with INTERNAL; at 6 instead, if another sequence without a token also waited

A token sets the count to 0, so a sequence that gets a token between two ends is never blamed. Sequences outside the
quarantine are not delayed. In the quarantine the sequence with the fewest trials comes first, so that every
sequence gets a trial. An end that was caused from outside (SIGKILL, SIGTERM) is forgiven.

Pure: it reads grammar states and writes the counters of `RunningSequence`. Not responsible for: opening and ending
sequences (see grammar_slots.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from gpu_engine.core.running import RunningSequence
from gpu_engine.core.scheduler import GrammarState

QUARANTINE_AT = 2
BLAME_AT = 3
BLAME_IN_COMPANY_AT = 6
"""The count that ends several sequences together, when all waited without a token and the cause is not certain."""
NO_DRAFTS_AT = 2
"""A matcher that was open at this many ends is bound without drafts: the library may crash over a draft."""


def token_received(sequence: RunningSequence) -> None:
    """Reset the sequence's crash count to 0: its token shows that the grammar process served it."""
    sequence.crash_count = 0


def process_ended(waiting: Iterable[RunningSequence], with_matcher: Iterable[RunningSequence]) -> list[RunningSequence]:
    """Count the end of a grammar process; return the sequences that must end because of it.

    Args:
        waiting: sequences that waited for mask rows or for their matcher.
        with_matcher: sequences whose matcher was open; some of these may be in `waiting` as well.
    """
    for sequence in with_matcher:
        sequence.ends_while_open += 1
    suspects = []
    for sequence in waiting:
        sequence.crash_count += 1
        if is_quarantined(sequence):
            suspects.append(sequence)
    blame_at = BLAME_AT if len(suspects) == 1 else BLAME_IN_COMPANY_AT
    return [sequence for sequence in suspects if sequence.crash_count >= blame_at]


def forgive(waiting: Iterable[RunningSequence], with_matcher: Iterable[RunningSequence]) -> None:
    """Undo `process_ended` with the same sequences: the process was ended from outside."""
    for sequence in with_matcher:
        sequence.ends_while_open -= 1
    for sequence in waiting:
        sequence.crash_count = max(sequence.crash_count - 1, 0)


def may_draft(sequence: RunningSequence) -> bool:
    """Return whether the sequence may have drafts, which a library may crash over and no answer needs."""
    return sequence.crash_count < QUARANTINE_AT and sequence.ends_while_open < NO_DRAFTS_AT


def is_quarantined(sequence: RunningSequence) -> bool:
    """Return whether the sequence may be opened only while no other quarantined sequence is on trial."""
    return sequence.crash_count >= QUARANTINE_AT


def trial_order(sequence: RunningSequence) -> int:
    """Return a sort key for sequences that wait to be opened: the fewest trials first."""
    return sequence.trials


def trial_started(sequence: RunningSequence) -> None:
    """Count a trial if the sequence, which is being opened, is in quarantine."""
    sequence.trials += is_quarantined(sequence)


def must_wait(sequence: RunningSequence, running: Iterable[RunningSequence]) -> bool:
    """Return whether another quarantined sequence is on trial: it is opening or open, and has no token yet."""
    return is_quarantined(sequence) and any(
        other is not sequence and is_quarantined(other) and other.grammar_state is not GrammarState.LOST
        for other in running
    )
