"""Moves the matchers of many records at once, each to the first row that its record needs.

Invariant: afterwards a matcher has moved over the same tokens as in `MatcherTable.answer`,
too. A record that is not *simple*, or whose matcher does not get there, is left to that slower way: its matcher is good
and at or after the record's position, all its tokens are plain, the answer's end is far, the answer does not repeat
itself, and every row after the first needed one is needed.

Not responsible for: filling rows and publishing them (see batch.py), which thread holds the slots (see work_queues.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from grammar_service.backends.backend import ChainFiller, MatcherFailed
from grammar_service.fill.matchers import Health, MatcherTable, SlotMatcher
from shared_mem.records import Records

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class MovedChains:
    """The simple records of one backend, whose matchers are at the first needed row. One entry for each record."""

    which: list[int] = field(default_factory=list)
    """Numbers of the records."""
    slots: list[SlotMatcher] = field(default_factory=list)


@dataclass(slots=True)
class _Moves:
    """What the matchers of one backend have still to accept."""

    plain: list[int]
    """1 for each record of the post that has only plain tokens."""
    which: list[int] = field(default_factory=list)
    slots: list[SlotMatcher] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)


def move_chains(
    table: MatcherTable, records: Records, which: Sequence[int], slots: Sequence[SlotMatcher | None]
) -> tuple[list[tuple[ChainFiller, MovedChains]], list[int]]:
    """Move the matchers of the simple records; return them by backend, and the numbers of all other records.

    Args:
        table: rebuilds a matcher whose position is not known.
        records: the records of one post.
        which: numbers of the records, of different slots.
        slots: the slot's matcher for each of `which`; the caller holds them all.
    """
    rest: list[int] = []
    groups: dict[ChainFiller, _Moves] = {}
    for index, slot in zip(which, slots, strict=True):
        if slot is None or (filler := slot.filler) is None:
            rest.append(index)
            continue
        if (moves := groups.get(filler)) is None:
            moves = groups[filler] = _Moves(records.plain(filler.plain))
        tokens = _begin(table, slot, records, index) if moves.plain[index] else None
        if tokens is None:
            rest.append(index)
            continue
        moves.which.append(index)
        moves.slots.append(slot)
        moves.tokens.append(tokens)
    moved = [(filler, _accept(table, filler, records, moves, rest)) for filler, moves in groups.items()]
    return [(filler, chains) for filler, chains in moved if chains.which], rest


def _begin(table: MatcherTable, slot: SlotMatcher, records: Records, index: int) -> list[int] | None:
    """Roll back to what the matcher's tokens and the record's committed tokens have in common.

    Returns the tokens up to the first needed row that are still to be accepted; None: the record is not simple.
    """
    start, count, told, tokens = records.commit_pos[index], records.n_commit[index], records.tokens[index], slot.tokens
    good = slot.health is Health.GOOD and slot.slot_gen == records.slot_gens[index] and start <= slot.num_committed
    if not good or records.first[index] < 0 or slot.matcher.terminated:
        return None
    common, end, length = start, start + count, len(tokens)
    while common < end and common < length and tokens[common] == told[common - start]:
        common += 1
    budget, last = slot.budget, end + records.n_draft[index]
    if budget is not None and not budget.is_far(common, last):
        return None
    if budget and budget.repetition and budget.repeats_within(tokens, common, told[common - start : last - start]):
        return None
    if common < slot.answer_from:
        return None
    if common < length:
        try:
            slot.rollback(common)
        except MatcherFailed:
            table.rebuild(slot)
            return None
    slot.num_committed = common
    # The drafts are right after the committed tokens.
    return told[common - start : count + records.first[index]]


def _accept(table: MatcherTable, filler: ChainFiller, records: Records, moves: _Moves, rest: list[int]) -> MovedChains:
    """Let each matcher accept its tokens. A record whose matcher does not accept all of them goes to `rest`."""
    if not any(moves.tokens):
        return MovedChains(moves.which, moves.slots)
    try:
        counts = filler.accept_each([slot.matcher for slot in moves.slots], moves.tokens)
    except Exception:
        # A defect of ours or of a library ends one request at most, when the records are answered by themselves.
        logger.exception("%r: %d records", filler, len(moves.which))
        counts = [-1] * len(moves.which)
    chains = MovedChains()
    for index, slot, tokens, count in zip(moves.which, moves.slots, moves.tokens, counts, strict=True):
        if count < 0:
            table.rebuild(slot)
            rest.append(index)
            continue
        end = records.commit_pos[index] + records.n_commit[index]
        slot.num_committed = min(end, slot.num_committed + count)
        if count == len(tokens):
            slot.tokens += tokens
            chains.which.append(index)
            chains.slots.append(slot)
        else:
            slot.tokens += tokens[:count]
            rest.append(index)
    return chains
