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

from gpu_engine.core.running import Seat
from gpu_engine.core.scheduler import Guide

SUSPECT = 2
"""So many ends in a row without a token make a suspect."""
FOUND = 3
"""So many end the sequence, if it alone can have been at fault."""
FOUND_IN_COMPANY = 6
"""So many end it anyhow: those who come meanwhile, and have none yet, cannot hide it for ever."""


def gained(seat: Seat) -> None:
    """It got a token: whatever came before was not its doing."""
    seat.payload.strikes, seat.payload.gained = 0, True


def died(owed: Iterable[Seat], decoding: Iterable[Seat]) -> Seat | None:
    """Count the end of a process; return the one that is found out.

    Args:
        owed: it owed these an answer: rows, or a matcher.
        decoding: their matchers stood; some of them may have been owed rows.
    """
    seats, stood = list(owed), list(decoding)
    without = [seat for seat in seats if not seat.payload.gained]
    # Where only matchers were being made for those without a token, it may have died of who was decoding beside them.
    alone = len(without) == 1 and (without[0] in stood or not stood)
    for seat in seats:
        notes = seat.payload
        notes.strikes, notes.gained, notes.had = notes.strikes + 1, False, notes.gained
    for seat in stood:
        seat.payload.ends += 1
    most = max(without, key=lambda seat: seat.payload.strikes, default=None)
    enough = FOUND if alone else FOUND_IN_COMPANY
    return most if most is not None and most.payload.strikes >= enough else None


def pardon(owed: Iterable[Seat], decoding: Iterable[Seat]) -> None:
    """Take the last end back: it was not the doing of any of them."""
    for seat in owed:
        notes = seat.payload
        notes.strikes, notes.gained = max(notes.strikes - 1, 0), notes.gained or notes.had
    for seat in decoding:
        seat.payload.ends -= 1


def drafts(seat: Seat) -> bool:
    """Whether it may still draft. A library may crash over a draft, or over what is forced, which no answer needs."""
    return seat.payload.ends < SUSPECT


def turn(seat: Seat) -> int:
    """A key that sorts those who may be opened: who was tried least often comes first, so that nobody bars the way."""
    return seat.payload.tried


def opened(seat: Seat) -> None:
    """It is asked to be opened."""
    seat.payload.tried += seat.payload.strikes >= SUSPECT


def must_wait(seat: Seat, seated: Iterable[Seat]) -> bool:
    """Whether another suspect is being tried: it has been asked to be opened, and has neither a token nor an end."""
    return seat.payload.strikes >= SUSPECT and any(
        other is not seat and other.payload.strikes >= SUSPECT and other.guide is not Guide.LOST for other in seated
    )
