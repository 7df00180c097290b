"""Which guided sequence may be the one that grammar processes die of.

A grammar that crashes or hangs its process does so again in the next one, where the same matcher is made of the same
tokens; so every end of a process counts against those whom it owed an answer then, until they get a token. One
invariant: a sequence that gets a token between two ends is never found out. Of several that got none nobody knows whose
fault it is, so suspects are tried one at a time; who comes meanwhile is not held up. A hang for which the engine kills
it counts, and so does its memory; an end from outside is taken back. Pure: reads the scheduler's states, writes the
notes on a sequence. Not here: opening and ending (guides.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from gpu_engine.core.running import RunningSequence
from gpu_engine.core.scheduler import GrammarState

SUSPECT = 2
"""So many ends in a row without a token make a suspect."""
FOUND = 3
"""So many end the sequence, if it alone can have been at fault."""
FOUND_IN_COMPANY = 6
"""So many end it anyhow: those who come meanwhile, and have none yet, cannot hide it for ever."""


def gained(sequence: RunningSequence) -> None:
    """It got a token: whatever came before was not its doing."""
    sequence.payload.strikes, sequence.payload.gained = 0, True


def died(owed: Iterable[RunningSequence], decoding: Iterable[RunningSequence]) -> RunningSequence | None:
    """Count the end of a process; return the one that is found out.

    Args:
        owed: it owed these an answer: rows, or a matcher.
        decoding: their matchers stood; some of them may have been owed rows.
    """
    sequences, stood = list(owed), list(decoding)
    without = [sequence for sequence in sequences if not sequence.payload.gained]
    # Where only matchers were being made for those without a token, it may have died of who was decoding beside them.
    alone = len(without) == 1 and (without[0] in stood or not stood)
    for sequence in sequences:
        notes = sequence.payload
        notes.strikes, notes.gained, notes.had = notes.strikes + 1, False, notes.gained
    for sequence in stood:
        sequence.payload.ends += 1
    most = max(without, key=lambda sequence: sequence.payload.strikes, default=None)
    enough = FOUND if alone else FOUND_IN_COMPANY
    return most if most is not None and most.payload.strikes >= enough else None


def pardon(owed: Iterable[RunningSequence], decoding: Iterable[RunningSequence]) -> None:
    """Take the last end back: it was not the doing of any of them."""
    for sequence in owed:
        notes = sequence.payload
        notes.strikes, notes.gained = max(notes.strikes - 1, 0), notes.gained or notes.had
    for sequence in decoding:
        sequence.payload.ends -= 1


def drafts(sequence: RunningSequence) -> bool:
    """Whether it may still draft. A library may crash over a draft, or over what is forced, which no answer needs."""
    return sequence.payload.ends < SUSPECT


def turn(sequence: RunningSequence) -> int:
    """A key that sorts those who may be opened: who was tried least often comes first, so that nobody bars the way."""
    return sequence.payload.tried


def opened(sequence: RunningSequence) -> None:
    """It is asked to be opened."""
    sequence.payload.tried += sequence.payload.strikes >= SUSPECT


def must_wait(sequence: RunningSequence, running: Iterable[RunningSequence]) -> bool:
    """Whether another suspect is being tried: it has been asked to be opened, and has neither a token nor an end."""
    return sequence.payload.strikes >= SUSPECT and any(
        other is not sequence and other.payload.strikes >= SUSPECT and other.grammar_state is not GrammarState.LOST
        for other in running
    )
