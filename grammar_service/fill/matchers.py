"""The slots' matchers, and the walk: one record in, one answer per row out.

Invariant: a matcher has accepted exactly `tokens`, of which the first `certain` are committed and the rest are drafts
of the last step. A row is filled only in the state that its record describes; when that state cannot be reached the
answer is DEFER or ERROR, never a guess. Handling a record twice gives the same answer.

Near the answer's most tokens the rows are narrowed by what `CompletionBudget` found (closing.py).

Pure over the `Matcher` protocol and a view of rows: no sockets, no sequence numbers, no threads of its own. One
thread uses a slot at a time.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from grammar_service.backends.backend import ChainFiller, Matcher, MatcherFailed, Rows, chain_filler_of
from grammar_service.completion.budget import CompletionBudget
from grammar_service.grammar.mask_rows import Classifier
from shared_mem.grammar_end import Record
from shared_mem.layout import STEERED, RowKind, Stage

logger = logging.getLogger(__name__)

_DEAR_NS, _REST, _MOST_REST = 500_000, 8, 255
"""For every half of a millisecond that a proposal takes, so many of the slot's next ones are left out: a long forced
text may cost a library as much as a row, at every step, while nobody has to have it."""


class Answer(NamedTuple):
    """Per row 0..len(drafts): kind; forced token, STEERED or -1."""

    kinds: list[int]
    forced: list[int]


class Health(enum.Enum):
    """How a slot's matcher is."""

    GOOD = enum.auto()
    GAP = enum.auto()
    """A record spoke of tokens that never came; it needs a new Bind."""
    FAILED = enum.auto()
    """It refused a committed token, or its library failed on one; its request is over."""


@dataclass(slots=True)
class Slot:
    """The matcher of one owner of one slot."""

    gen: int
    fresh: Callable[[], Matcher]
    """Makes a matcher at the start of the answer, for a rebuild."""
    matcher: Matcher
    tokens: list[int]
    certain: int
    closing: CompletionBudget | None = None
    """Stands where the matcher stands. None: rows are never narrowed."""
    health: Health = Health.GOOD
    problem: str = ""
    request_id: str = ""
    """For the logs."""
    cost_ns: int = 0
    """What the last record of this slot took; the worker serves cheap slots first."""
    resting: int = 0
    """Proposals to leave out."""
    timed: int = 0
    """Records until it may be timed by itself again, which it was in a batch that took longer than it should."""
    filler: ChainFiller | None = None
    """Fills its rows together with other slots'; None: nothing does."""

    @staticmethod
    def bind(
        gen: int,
        fresh: Callable[[], Matcher],
        committed: Sequence[int],
        closes: Callable[[Matcher], CompletionBudget] | None = None,
    ) -> Slot:
        """Return a slot whose matcher has moved over `committed`; `closes` makes what narrows its rows.

        Raises MatcherRejected when a token does not fit.
        """
        matcher = fresh()
        slot = Slot(gen, fresh, matcher, [], 0, closes(matcher) if closes else None, filler=chain_filler_of(matcher))
        for i, token in enumerate(committed):
            if not slot.accept(token):
                raise MatcherRejected(i, token)
        slot.certain = len(committed)
        return slot

    def accept(self, token: int) -> bool:
        """Move over `token`; False: it is illegal, and nothing has moved."""
        if not self.matcher.accept(token):
            return False
        self.tokens.append(token)
        if self.closing is not None:
            self.closing.advance(self.matcher, self.tokens)
        return True

    def fill(self, rows: Rows, index: int, classifier: Classifier) -> tuple[RowKind, int]:
        """Fill row `index` for the present state; return kind and forced as in `Answer`."""
        self.matcher.fill(rows, index)
        words = rows.words[index]
        if self.closing is None:
            return classifier.classify(words)
        at = len(self.tokens)
        narrowed = self.closing.narrowed_row(at)
        if narrowed is not None:
            words[: len(narrowed)] = narrowed
        kind, forced = classifier.classify(words)
        if self.closing.steered_tokens_left(at) < 0 or kind not in (RowKind.ALL, RowKind.APPLY, RowKind.FORCED):
            return kind, forced
        return (RowKind.APPLY if kind is RowKind.FORCED else kind), STEERED

    def forced(self, limit: int) -> tuple[int, ...]:
        """Return at most `limit` tokens that are likely to follow because nothing else may; the matcher stays."""
        if self.matcher.terminated:
            return ()
        way = None if self.closing is None else self.closing.only_path(len(self.tokens))
        # The stop at the way's end needs no draft: a step adds a token of its own.
        return self.matcher.jump_forward_tokens(limit) if way is None else way[:-1][:limit]


class MatcherRejected(Exception):
    """Token number `index` of the committed tokens is illegal."""

    def __init__(self, index: int, token: int) -> None:
        super().__init__(f"token {token} at {index} does not fit the grammar")
        self.index = index
        self.token = token


@dataclass(slots=True)
class SlotTable:
    """Every slot's matcher. Slots are independent: threads with different slots may call `answer` at the same time."""

    classifier: Classifier
    slots: dict[int, Slot] = field(default_factory=dict)
    released: dict[int, int] = field(default_factory=dict)
    """slot -> newest gen whose matcher was dropped: its late records are answered without one."""
    gaps: int = 0
    rebuilds: int = 0

    def bind(self, slot: int, state: Slot) -> None:
        """Install a matcher. One of an older owner, or of the same, is replaced; an older `state` is dropped."""
        current = self.slots.get(slot)
        newest = max(current.gen if current else -1, self.released.get(slot, -1))
        if state.gen >= newest:
            self.slots[slot] = state

    def release(self, slot: int, gen: int) -> None:
        """Drop the matcher of (slot, gen), if it is there."""
        current = self.slots.get(slot)
        if current is not None and current.gen <= gen:
            del self.slots[slot]
        self.released[slot] = max(gen, self.released.get(slot, -1))

    def drop(self, slot: int) -> None:
        """Drop a slot's matcher as if it had never been bound: its records are deferred until the next bind."""
        self.slots.pop(slot, None)

    def answer(
        self, record: Record, rows: Rows, first: int, told: Callable[[int, RowKind, int], bool] = lambda *row: True
    ) -> Answer:
        """Move the slot's matcher as the record says and fill rows `first`, `first + 1`, ... in place.

        Rows are written only where the kind is APPLY or FORCED. `told` hears of every row (number, kind, forced)
        as soon as it stands, and may end the walk with False. Never raises for anything that a record can say.
        """
        count = len(record.drafts) + 1
        slot = self.slots.get(record.slot)
        if slot is None or slot.gen != record.slot_gen:
            newest = max(slot.gen if slot else -1, self.released.get(record.slot, -1))
            return _same(RowKind.ALL if record.slot_gen <= newest else RowKind.DEFER, count)
        if slot.health is Health.FAILED:
            return _same(RowKind.ERROR, count)
        if record.commit_pos > slot.certain:
            slot.health = Health.GAP
            slot.problem = f"record at {record.commit_pos}, matcher at {slot.certain}"
            self.gaps += 1
            return _same(RowKind.DEFER, count)
        try:
            if not self._move(slot, record):
                return _same(RowKind.ERROR, count)
        except MatcherFailed as error:
            _fail(slot, str(error))
            return _same(RowKind.ERROR, count)
        slot.health = Health.GOOD
        if record.stage == Stage.PROPOSE:
            return self._propose(slot, record.need_rows.bit_count())
        return self._walk(slot, record, rows, first, told)

    def _move(self, slot: Slot, record: Record) -> bool:
        """Bring the matcher to just after the committed tokens. False: one is illegal, and the slot has failed."""
        start, committed = record.commit_pos, record.committed
        certain = start + len(committed)
        keep = start
        while keep < certain and keep < len(slot.tokens) and slot.tokens[keep] == committed[keep - start]:
            keep += 1
        roll_back(slot, keep)
        slot.certain = keep
        for token in committed[keep - start :]:
            if not slot.accept(token):
                _fail(slot, f"token {token} at {slot.certain} does not fit the grammar")
                return False
            slot.certain += 1
        return True

    def _walk(
        self, slot: Slot, record: Record, rows: Rows, first: int, told: Callable[[int, RowKind, int], bool]
    ) -> Answer:
        """Fill row 0, accept draft 0, fill row 1, ... until a draft is illegal or ends the answer."""
        count = len(record.drafts) + 1
        answer = _same(RowKind.DEFER, count)
        row = 0
        try:
            for row in range(count):
                if row:
                    token = record.drafts[row - 1]
                    # The target cannot draw what its row does not offer, so no row behind it will be looked at.
                    if slot.closing is not None and slot.closing.forbids(len(slot.tokens), token):
                        break
                    if not slot.accept(token):
                        break
                if slot.matcher.terminated:
                    break
                if record.need_rows >> row & 1:
                    kind, forced = slot.fill(rows, first + row, self.classifier)
                    answer.kinds[row], answer.forced[row] = kind, forced
                    if not told(row, kind, forced):
                        break
        except MatcherFailed as error:
            if row == 0:
                _fail(slot, str(error))
                return _same(RowKind.ERROR, count)
            # Only a draft led here. The rows so far stand; the matcher is made anew from what is certain.
            answer.kinds[row:] = [RowKind.DEFER] * (count - row)
            answer.forced[row:] = [-1] * (count - row)
            self.rebuild(slot)
        return answer

    def _propose(self, slot: Slot, limit: int) -> Answer:
        """Return what is forced behind the committed tokens, where the matcher stays. Nothing is filled."""
        if slot.resting:
            slot.resting -= 1
            return Answer([], [])
        begun_ns = time.thread_time_ns()
        try:
            tokens = slot.forced(limit)
        except MatcherFailed:
            # Nobody asked for a row yet: a matcher made anew may give it.
            tokens = ()
            self.rebuild(slot)
        slot.resting = min(_MOST_REST, (time.thread_time_ns() - begun_ns) // _DEAR_NS * _REST)
        return Answer([RowKind.FORCED] * len(tokens), list(tokens))

    def rebuild(self, slot: Slot) -> None:
        """Make the matcher anew from what is certain; a slot whose tokens it refuses has failed."""
        self.rebuilds += 1
        try:
            anew = Slot.bind(slot.gen, slot.fresh, slot.tokens[: slot.certain])
            # The marks along the tokens that stay are still true.
            if slot.closing is not None:
                slot.closing.truncate(slot.certain)
        except (MatcherRejected, MatcherFailed) as error:
            _fail(slot, str(error))
            return
        slot.matcher, slot.tokens = anew.matcher, anew.tokens

    def stats(self) -> dict[str, int]:
        """Return gauges and counters."""
        return {"matchers": len(self.slots), "gaps": self.gaps, "rebuilds": self.rebuilds}


def roll_back(slot: Slot, length: int) -> None:
    """Take back every token behind `length`. Raises MatcherFailed, and then nothing has moved."""
    extra = len(slot.tokens) - length
    if extra > 0:
        slot.matcher.rollback(extra)
        del slot.tokens[length:]
        if slot.closing is not None:
            slot.closing.truncate(length)


def _fail(slot: Slot, problem: str) -> None:
    # The step plane has no room for words: what the client sees is that the matcher failed, the reason stands here.
    logger.warning("a matcher failed, and its request ends: %s", problem, extra={"request_id": slot.request_id})
    slot.health = Health.FAILED
    slot.problem = problem


def _same(kind: RowKind, count: int) -> Answer:
    return Answer([kind] * count, [-1] * count)
