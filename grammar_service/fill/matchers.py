"""The matcher of each slot, and how a record moves it: one record in, one answer for each row out.

Invariant: a matcher has accepted exactly `tokens`. The first `num_committed` of them are committed, the others are
drafts of the last step. A row is filled only in the state that its record describes. When the matcher cannot reach that
state, the answer is DEFER or ERROR, never a guess. The same record twice gives the same answer twice.

    answer(record):
        roll back to the longest common prefix of the accepted tokens and the record's committed tokens
        accept the rest of the committed tokens           illegal: ERROR, the request ends
        for each row: fill it, accept the next draft      illegal draft: the rows after it stay DEFER
        of a tree: the same, depth first, rolling back to the parent of the next draft

Near `max_tokens` the rows are narrowed (completion/budget.py). Pure over the `Matcher` protocol and a view of rows: no
sockets, no sequence numbers, no threads. One thread at a time uses a slot.

Not responsible for: when answers are published (see worker.py).
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from grammar_service.backends.backend import ChainFiller, Matcher, MatcherFailed, Rows, chain_filler_of
from grammar_service.backends.reasoning import ReasoningMatcher
from grammar_service.completion.budget import CompletionBudget
from grammar_service.grammar.mask_rows import Classifier
from shared_mem.layout import STEERED, RowKind, Stage, parent_of, token_of
from shared_mem.records import Record

logger = logging.getLogger(__name__)

SLOW_PROPOSAL_NS, SKIPPED_PROPOSALS, MAX_SKIPPED_PROPOSALS = 1_000_000, 8, 255
"""For each SLOW_PROPOSAL_NS that a proposal took, the slot's next SKIPPED_PROPOSALS are skipped. A long jump-forward
text may cost a library as much as a row at every step, and a step does not need it. The first proposal of a process
may take half of it on a busy machine."""


class Answer(NamedTuple):
    """The answer to a record, for rows 0 to len(drafts)."""

    kinds: list[int]
    """RowKind of each row."""
    forced: list[int]
    """The only legal token of a FORCED row, STEERED for a steered row, else -1."""


class Health(enum.Enum):
    """State of a slot's matcher."""

    GOOD = enum.auto()
    GAP = enum.auto()
    """A record assumed tokens that never arrived; the slot needs a new Bind."""
    FAILED = enum.auto()
    """The matcher rejected a committed token, or its library failed on one; the request ends."""


@dataclass(slots=True)
class SlotMatcher:
    """The matcher of one owner of one slot."""

    slot_gen: int
    new_matcher: Callable[[], Matcher]
    """Returns a matcher at the start of the answer, for a rebuild."""
    matcher: Matcher
    tokens: list[int]
    """The tokens that the matcher has accepted."""
    num_committed: int
    budget: CompletionBudget | None = None
    """At the matcher's position. None: rows are never narrowed."""
    health: Health = Health.GOOD
    problem: str = ""
    request_id: str = ""
    """For log lines."""
    last_fill_ns: int = 0
    """Time of the slot's last record; slots that took less come first. 0: not known."""
    proposals_to_skip: int = 0
    next_timing_seq: int = 0
    """The slot may be taken out of a batch to be timed by itself from this sequence on."""
    filler: ChainFiller | None = None
    """Fills rows of this slot together with rows of other slots. None: the backend has no such call, or the slot is in
    its reasoning."""
    answer_from: int = 0
    """Tokens of a reasoning phase. The matcher covers only the answer after them, and is not rolled back into them."""

    @staticmethod
    def bind(
        slot_gen: int,
        new_matcher: Callable[[], Matcher],
        committed: Sequence[int],
        new_budget: Callable[[Matcher], CompletionBudget] | None = None,
    ) -> SlotMatcher:
        """Return a slot's matcher that has accepted `committed`.

        `new_budget` returns the completion budget of a matcher at the start of the answer. Raises MatcherRejected when
        a token is illegal.
        """
        matcher = new_matcher()
        budget = new_budget(matcher) if new_budget else None
        slot = SlotMatcher(slot_gen, new_matcher, matcher, [], 0, budget, filler=chain_filler_of(matcher))
        for i, token in enumerate(committed):
            if not slot.accept(token):
                raise MatcherRejected(i, token)
        slot.num_committed = len(committed)
        slot.leave_reasoning()
        return slot

    def leave_reasoning(self) -> None:
        """After a committed reasoning, go on with the answer's own matcher, whose rows are filled in batches."""
        if isinstance(self.matcher, ReasoningMatcher):
            answer = self.matcher.answer_alone(len(self.tokens) - self.num_committed)
            if answer is not None:
                self.matcher, self.filler, self.answer_from = answer, chain_filler_of(answer), self.num_committed

    def accept(self, token: int) -> bool:
        """Advance over `token`. False: it is illegal, and nothing has moved."""
        if not self.matcher.accept(token):
            return False
        self.tokens.append(token)
        if self.budget is not None:
            self.budget.advance(self.matcher, self.tokens)
        return True

    def rollback(self, length: int) -> None:
        """Take back all tokens after the first `length`. Raises MatcherFailed, and then nothing has moved."""
        extra = len(self.tokens) - length
        if extra > 0:
            if length < self.answer_from:
                self._return_to_reasoning(length)
            else:
                self.matcher.rollback(extra)
            del self.tokens[length:]
            if self.budget is not None:
                self.budget.truncate(length)

    def _return_to_reasoning(self, length: int) -> None:
        """Replace the matcher by one of the reasoning, after the first `length` tokens. Raises MatcherFailed."""
        matcher = self.new_matcher()
        if not all(matcher.accept(token) for token in self.tokens[:length]):
            raise MatcherFailed("a token of the answer was rejected when a matcher was moved over it again")
        self.matcher, self.filler, self.answer_from = matcher, chain_filler_of(matcher), 0

    def fill(self, rows: Rows, index: int, classifier: Classifier) -> tuple[RowKind, int]:
        """Fill row `index` for the present state. Returns kind and forced as in `Answer`. Raises MatcherFailed."""
        at = len(self.tokens)
        known = None if self.budget is None else self.budget.known_row(at)
        words = rows.words[index]
        if known is None:
            self.matcher.fill(rows, index)
        else:
            words[: len(known)] = known
        if self.budget is None:
            return classifier.classify(words)
        kind, forced = classifier.classify(words)
        if self.budget.steered_tokens_left(at) < 0 or kind not in (RowKind.ALL, RowKind.APPLY, RowKind.FORCED):
            return kind, forced
        return (RowKind.APPLY if kind is RowKind.FORCED else kind), STEERED

    def jump_forward_tokens(self, limit: int) -> tuple[int, ...]:
        """Return at most `limit` tokens that probably follow, because no other text may; the matcher stays in place."""
        if self.matcher.terminated:
            return ()
        path = None if self.budget is None else self.budget.only_path(len(self.tokens))
        # The stop token at the end of the path needs no draft: a step adds the bonus token.
        return self.matcher.jump_forward_tokens(limit) if path is None else path[:-1][:limit]


class MatcherRejected(Exception):
    """Token number `index` of the committed tokens is illegal."""

    def __init__(self, index: int, token: int) -> None:
        super().__init__(f"token {token} at {index} does not fit the grammar")
        self.index = index
        self.token = token


def _ignore_row(row: int, kind: RowKind, forced: int) -> bool:
    return True


@dataclass(slots=True)
class MatcherTable:
    """The matchers of all slots. Slots are independent: threads with different slots may call `answer` at once."""

    classifier: Classifier
    slots: dict[int, SlotMatcher] = field(default_factory=dict)
    released: dict[int, int] = field(default_factory=dict)
    """Slot -> newest slot_gen that was released. Late records of that owner are answered without a matcher."""
    gaps: int = 0
    rebuilds: int = 0
    thread_time_ns: Callable[[], int] = time.thread_time_ns
    """The clock that measures proposals."""

    def bind(self, slot: int, state: SlotMatcher) -> None:
        """Install a matcher in place of one of the same or an older owner. A `state` of an older owner is dropped."""
        current = self.slots.get(slot)
        newest = max(current.slot_gen if current else -1, self.released.get(slot, -1))
        if state.slot_gen >= newest:
            self.slots[slot] = state

    def release(self, slot: int, slot_gen: int) -> None:
        """Drop the matcher of (slot, slot_gen), if it is there."""
        current = self.slots.get(slot)
        if current is not None and current.slot_gen <= slot_gen:
            del self.slots[slot]
        self.released[slot] = max(slot_gen, self.released.get(slot, -1))

    def copy_of(self, source: int, slot_gen: int, num_committed: int) -> SlotMatcher | None:
        """Return a copy of the matcher of slot `source` at its first `num_committed` tokens.

        It is for the owner `slot_gen` of another slot. None: there is no such state. The caller holds the slot
        `source`.
        """
        slot = self.slots.get(source)
        if slot is None or slot.health is not Health.GOOD or slot.num_committed < num_committed:
            return None
        twin = replace(
            slot,
            slot_gen=slot_gen,
            matcher=slot.matcher.copy(),
            tokens=list(slot.tokens),
            num_committed=num_committed,
            budget=slot.budget and slot.budget.copy(),
        )
        self._take_back(twin)
        return twin

    def move_to(self, slot: int, slot_gen: int, num_committed: int) -> None:
        """Give a slot's matcher, at its first `num_committed` tokens, to the slot's next owner.

        Nothing happens where there is no such state, or where that owner was released before this was read.
        """
        state = self.slots.get(slot)
        if state is None or state.health is Health.FAILED or state.num_committed < num_committed:
            return
        if state.slot_gen < slot_gen and slot_gen > self.released.get(slot, -1):
            state.num_committed = num_committed
            self._take_back(state)
            state.slot_gen = slot_gen

    def _take_back(self, state: SlotMatcher) -> None:
        """Move a matcher to its committed tokens. One that fails at that is rebuilt."""
        try:
            state.rollback(state.num_committed)
        except MatcherFailed:
            self.rebuild(state)

    def adopt(self, slot: int, state: SlotMatcher) -> None:
        """Install a copy, as `bind` does, unless its owner was released before the record of the fork was read."""
        if state.slot_gen > self.released.get(slot, -1):
            self.bind(slot, state)

    def drop(self, slot: int) -> None:
        """Drop a slot's matcher as if it had never been bound: its records are deferred until the next bind."""
        self.slots.pop(slot, None)

    def answer(
        self, record: Record, rows: Rows, first: int, on_row: Callable[[int, RowKind, int], bool] = _ignore_row
    ) -> Answer:
        """Move the slot's matcher as the record says, and fill rows `first`, `first + 1`, ... in place.

        Args:
            record: to be answered; no content of it raises.
            rows: int32 rows to write; a row is defined only where its kind is APPLY or FORCED.
            first: index of the record's row 0 in `rows`.
            on_row: called with (row, kind, forced) as soon as a row is written; False ends the walk.
        """
        count = len(record.drafts) + 1
        slot = self.slots.get(record.slot)
        if slot is None or slot.slot_gen != record.slot_gen:
            newest = max(slot.slot_gen if slot else -1, self.released.get(record.slot, -1))
            return _same(RowKind.ALL if record.slot_gen <= newest else RowKind.DEFER, count)
        if slot.health is Health.FAILED:
            return _same(RowKind.ERROR, count)
        if record.commit_pos > slot.num_committed:
            slot.health = Health.GAP
            slot.problem = f"record at {record.commit_pos}, matcher at {slot.num_committed}"
            self.gaps += 1
            return _same(RowKind.DEFER, count)
        try:
            if not self._commit(slot, record):
                return _same(RowKind.ERROR, count)
        except MatcherFailed as error:
            _fail(slot, str(error))
            return _same(RowKind.ERROR, count)
        slot.health = Health.GOOD
        if slot.filler is None:
            slot.leave_reasoning()
        if record.stage == Stage.PROPOSE:
            tokens = self.propose(slot, record.need_rows.bit_count())
            return Answer([int(RowKind.FORCED)] * len(tokens), list(tokens))
        if record.stage == Stage.TREE:
            return self._fill_tree(slot, record, rows, first, on_row)
        return self._fill_rows(slot, record, rows, first, on_row)

    def _commit(self, slot: SlotMatcher, record: Record) -> bool:
        """Bring the matcher to just after the committed tokens. False: one is illegal, and the slot has failed."""
        start, committed = record.commit_pos, record.committed
        end = start + len(committed)
        common = start
        while common < end and common < len(slot.tokens) and slot.tokens[common] == committed[common - start]:
            common += 1
        slot.rollback(common)
        slot.num_committed = common
        for token in committed[common - start :]:
            if not slot.accept(token):
                _fail(slot, f"token {token} at {slot.num_committed} does not fit the grammar")
                return False
            slot.num_committed += 1
        return True

    def _fill_rows(
        self, slot: SlotMatcher, record: Record, rows: Rows, first: int, on_row: Callable[[int, RowKind, int], bool]
    ) -> Answer:
        """Fill row 0, accept draft 0, fill row 1, ... until a draft is illegal or ends the answer."""
        answer, row = _same(RowKind.DEFER, len(record.drafts) + 1), 0
        try:
            for row in range(len(record.drafts) + 1):
                if not self._enter(slot, record.drafts[row - 1] if row else None):
                    break
                if not self._fill_row(slot, record, rows, first, row, answer, on_row):
                    break
        except MatcherFailed as error:
            for later in range(row, len(answer.kinds)):
                answer.kinds[later], answer.forced[later] = RowKind.DEFER, -1
            return self._after_failure(slot, row, error, answer)
        return answer

    def _fill_tree(
        self, slot: SlotMatcher, record: Record, rows: Rows, first: int, on_row: Callable[[int, RowKind, int], bool]
    ) -> Answer:
        """Fill row 0, and the row after each draft of a tree, depth first. Rows after an illegal draft, or after one
        that ends the answer, stay DEFER, and so do rows of a draft whose parent is not before it."""
        count, committed = len(record.drafts) + 1, slot.num_committed
        answer = _same(RowKind.DEFER, count)
        children: list[list[int]] = [[] for _ in range(count)]
        for row, draft in enumerate(record.drafts, 1):
            if 0 <= parent_of(draft) < row:
                children[parent_of(draft)].append(row)
        waiting, row = [(0, committed)], 0
        try:
            while waiting:
                row, length = waiting.pop()
                if row:
                    slot.rollback(length - 1)
                if not self._enter(slot, token_of(record.drafts[row - 1]) if row else None):
                    continue
                if not self._fill_row(slot, record, rows, first, row, answer, on_row):
                    break
                waiting += [(child, length + 1) for child in reversed(children[row])]
        except MatcherFailed as error:
            return self._after_failure(slot, row, error, answer)
        return answer

    def _enter(self, slot: SlotMatcher, draft: int | None) -> bool:
        """Accept a draft, or none for row 0; return whether the row after it is needed.

        The target cannot sample a token that a narrowed row lacks, so the rows after such a draft are not needed.
        """
        if draft is not None:
            if slot.budget is not None and slot.budget.forbids(len(slot.tokens), draft):
                return False
            if not slot.accept(draft):
                return False
        return not slot.matcher.terminated

    def _fill_row(
        self,
        slot: SlotMatcher,
        record: Record,
        rows: Rows,
        first: int,
        row: int,
        answer: Answer,
        on_row: Callable[[int, RowKind, int], bool],
    ) -> bool:
        """Fill a row if the record wants it; return whether to go on."""
        if not record.need_rows >> row & 1:
            return True
        kind, forced = slot.fill(rows, first + row, self.classifier)
        answer.kinds[row], answer.forced[row] = kind, forced
        return on_row(row, kind, forced)

    def _after_failure(self, slot: SlotMatcher, row: int, error: MatcherFailed, answer: Answer) -> Answer:
        """Return the answer of a matcher that failed at `row`: an error if no draft is before it.

        Otherwise a draft led to this state: the rows so far are valid, and the matcher is rebuilt from the committed
        tokens.
        """
        if row == 0:
            _fail(slot, str(error))
            return _same(RowKind.ERROR, len(answer.kinds))
        self.rebuild(slot)
        return answer

    def propose(self, slot: SlotMatcher, limit: int) -> tuple[int, ...]:
        """Return at most `limit` jump-forward tokens after the slot's tokens. The matcher must not have failed."""
        if slot.proposals_to_skip:
            slot.proposals_to_skip -= 1
            return ()
        begun_ns = self.thread_time_ns()
        try:
            tokens = slot.jump_forward_tokens(limit)
        except MatcherFailed:
            # No row depends on this call, and a rebuilt matcher may still fill the next one.
            tokens = ()
            self.rebuild(slot)
        took_ns = self.thread_time_ns() - begun_ns
        slot.proposals_to_skip = min(MAX_SKIPPED_PROPOSALS, took_ns // SLOW_PROPOSAL_NS * SKIPPED_PROPOSALS)
        return tokens

    def rebuild(self, slot: SlotMatcher) -> None:
        """Rebuild the matcher from the committed tokens. If the new matcher rejects one, the slot has failed."""
        self.rebuilds += 1
        try:
            rebuilt = SlotMatcher.bind(slot.slot_gen, slot.new_matcher, slot.tokens[: slot.num_committed])
            # The look-aheads along the committed tokens are still valid.
            if slot.budget is not None:
                slot.budget.truncate(slot.num_committed)
        except (MatcherRejected, MatcherFailed) as error:
            _fail(slot, str(error))
            return
        slot.matcher, slot.tokens = rebuilt.matcher, rebuilt.tokens
        slot.filler, slot.answer_from = rebuilt.filler, rebuilt.answer_from

    def stats(self) -> dict[str, int]:
        """Return gauges and counters."""
        return {"matchers": len(self.slots), "gaps": self.gaps, "rebuilds": self.rebuilds}


def _fail(slot: SlotMatcher, problem: str) -> None:
    # The step plane has no room for a message: the client learns that the matcher failed, and the log has the reason.
    logger.warning("a matcher failed and its request ends: %s", problem, extra={"request_id": slot.request_id})
    slot.health = Health.FAILED
    slot.problem = problem


def _same(kind: RowKind, count: int) -> Answer:
    return Answer([kind] * count, [-1] * count)
