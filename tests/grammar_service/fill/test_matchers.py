"""The walk over a toy matcher: every answer a record can get, and its equality with a matcher made from scratch."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grammar_service.backends.backend import MatcherFailed, Rows
from grammar_service.fill.matchers import Answer, Health, MatcherRejected, MatcherTable, SlotMatcher
from grammar_service.grammar.mask_rows import Classifier
from shared_mem.layout import RowKind, Stage, node
from shared_mem.records import Record
from tests.grammar_service.toy import STOP, VOCAB, ToyMatcher, row_of, tokens_in

TEXTS = [(1, 2, 3, 4), (1, 2, 5), (1, 6, 7, 8), (2,)]
ROWS = 4


class Table:
    """One slot of a table, with rows to look at."""

    def __init__(self, *, fail_at: Sequence[int] = (), gen: int = 1, committed: Sequence[int] = ()) -> None:
        self.table = MatcherTable(Classifier(VOCAB))
        self.made: list[ToyMatcher] = []
        self.fail_at = fail_at
        self.table.bind(0, SlotMatcher.bind(gen, self.fresh, committed))
        self.rows = Rows(np.full((2 * ROWS, 4), 0x5A5A5A5A, dtype=np.int32))

    def fresh(self) -> ToyMatcher:
        self.made.append(ToyMatcher(TEXTS, self.fail_at))
        return self.made[-1]

    @property
    def slot(self) -> SlotMatcher:
        return self.table.slots[0]

    def ask(
        self,
        at: int,
        committed: Sequence[int],
        drafts: Sequence[int] = (),
        *,
        gen: int = 1,
        slot: int = 0,
        need: int = 15,
        stage: Stage = Stage.VERIFY,
    ) -> Answer:
        record = Record(slot, gen, at, tuple(committed), tuple(drafts), stage, need)
        return self.table.answer(record, self.rows, ROWS)

    def legal(self, row: int) -> set[int]:
        return tokens_in(self.rows.words[ROWS + row, :3])


def test_a_chain_of_true_drafts_fills_every_row() -> None:
    table = Table()
    answer = table.ask(0, [], [1, 2, 3])
    assert answer.kinds == [RowKind.APPLY, RowKind.APPLY, RowKind.APPLY, RowKind.FORCED]
    assert answer.forced == [-1, -1, -1, 4]
    assert [table.legal(row) for row in range(4)] == [{1, 2}, {2, 6}, {3, 5}, {4}]


def test_only_the_rows_of_the_slot_are_written() -> None:
    table = Table()
    table.ask(0, [], [1])
    untouched = np.int32(0x5A5A5A5A)
    assert (table.rows.words[:ROWS] == untouched).all()
    assert (table.rows.words[ROWS + 2 :] == untouched).all()


def test_a_committed_stop_token_leaves_nothing_to_fill() -> None:
    table = Table()
    assert table.ask(0, [2, STOP], [1]).kinds == [RowKind.DEFER] * 2
    assert table.slot.health is Health.GOOD


def test_accepted_drafts_stay_and_rejected_ones_are_rolled_back() -> None:
    table = Table()
    table.ask(0, [1], [2, 3])
    answer = table.ask(1, [2, 5], [])
    assert answer.kinds == [RowKind.FORCED]
    assert answer.forced == [STOP]
    assert table.made[0].rollbacks == [1]
    assert table.slot.tokens == [1, 2, 5]
    assert table.slot.num_committed == 3


def test_a_gap_is_deferred_and_waits_for_a_new_bind() -> None:
    table = Table()
    assert table.ask(1, [2], [3]).kinds == [RowKind.DEFER] * 2
    assert table.slot.health is Health.GAP
    assert table.table.gaps == 1
    table.table.bind(0, SlotMatcher.bind(1, table.fresh, [1]))
    assert table.ask(1, [2], [3]).kinds == [RowKind.APPLY, RowKind.FORCED]


def test_drafts_do_not_close_a_gap() -> None:
    # The record that committed these drafts was lost: the matcher has the tokens, but no record has committed them.
    table = Table()
    table.ask(0, [1], [2, 3])
    assert table.ask(3, [4]).kinds == [RowKind.DEFER]


def test_a_rejected_committed_token_ends_the_request(caplog: pytest.LogCaptureFixture) -> None:
    table = Table()
    assert table.ask(0, [1, 9], [2]).kinds == [RowKind.ERROR] * 2
    assert table.ask(0, [1], [2]).kinds == [RowKind.ERROR] * 2
    assert "token 9 at 1" in table.slot.problem
    assert [message for message in caplog.messages if "token 9 at 1" in message] == caplog.messages[:1]  # said once


def test_a_matcher_that_fails_on_a_committed_row_ends_the_request() -> None:
    table = Table(fail_at=[1])
    assert table.ask(0, [1], [2]).kinds == [RowKind.ERROR] * 2
    assert table.slot.health is Health.FAILED


class BrokenMatcher(ToyMatcher):
    """Fails on every token."""

    def accept(self, token: int) -> bool:
        raise MatcherFailed("out of fuel")


def test_a_matcher_that_fails_is_logged_with_its_request(caplog: pytest.LogCaptureFixture) -> None:
    table = Table()
    table.table.bind(0, SlotMatcher.bind(2, lambda: BrokenMatcher(TEXTS), ()))
    table.slot.request_id = "r-7"
    assert table.ask(0, [1], [2], gen=2).kinds == [RowKind.ERROR] * 2
    (line,) = caplog.records
    assert vars(line)["request_id"] == "r-7"
    assert "out of fuel" in line.getMessage()


def test_a_matcher_that_fails_on_a_draft_is_rebuilt() -> None:
    table = Table(fail_at=[3])
    answer = table.ask(0, [1], [2, 3])
    assert answer.kinds == [RowKind.APPLY, RowKind.APPLY, RowKind.DEFER]
    assert table.table.rebuilds == 1
    assert table.slot.tokens == [1]
    assert table.ask(1, [2], []).kinds == [RowKind.APPLY]
    assert len(table.made) == 2


def test_records_of_other_owners_get_no_mask_and_change_nothing() -> None:
    table = Table(gen=5)
    assert table.ask(0, [1], [2, 3], gen=4).kinds == [RowKind.ALL] * 3, "of an older owner"
    assert table.ask(0, [1], [2], gen=6).kinds == [RowKind.DEFER] * 2, "of one that is not bound yet"
    assert table.ask(0, [1], [2], slot=3).kinds == [RowKind.DEFER] * 2
    assert table.slot.tokens == []
    # A late release or bind of an older owner changes nothing.
    table.table.release(0, 4)
    table.table.bind(0, SlotMatcher.bind(4, table.fresh, []))
    assert table.slot.slot_gen == 5
    assert table.ask(0, [1], gen=5).kinds == [RowKind.APPLY]
    table.table.release(0, 5)
    table.table.bind(0, SlotMatcher.bind(4, table.fresh, []))
    assert 0 not in table.table.slots
    assert table.ask(0, [1], [2], gen=5).kinds == [RowKind.ALL] * 2
    assert table.ask(0, [1], [2], gen=6).kinds == [RowKind.DEFER] * 2


def test_rows_that_are_not_needed_are_not_filled() -> None:
    table = Table()
    answer = table.ask(0, [], [1, 2], need=0b100)
    assert answer.kinds == [RowKind.DEFER, RowKind.DEFER, RowKind.APPLY]
    assert table.made[0].fills == 1
    assert table.legal(2) == {3, 5}


def test_bind_names_the_illegal_token() -> None:
    with pytest.raises(MatcherRejected, match="token 9 at 2") as caught:
        SlotMatcher.bind(1, lambda: ToyMatcher(TEXTS), [1, 2, 9])
    assert (caught.value.index, caught.value.token) == (2, 9)


@pytest.mark.parametrize(
    ("legal", "kind", "token"),
    [
        (set(range(VOCAB)), RowKind.ALL, -1),
        (set(range(VOCAB - 1)), RowKind.APPLY, -1),
        (set(range(1, VOCAB)), RowKind.APPLY, -1),
        (set(), RowKind.DEAD_END, -1),
        ({0}, RowKind.FORCED, 0),
        ({31}, RowKind.FORCED, 31),
        ({32}, RowKind.FORCED, 32),
        ({63}, RowKind.FORCED, 63),
        ({VOCAB - 1}, RowKind.FORCED, VOCAB - 1),
        ({31, 63}, RowKind.APPLY, -1),
        ({30, 31}, RowKind.APPLY, -1),
        ({0, VOCAB - 1}, RowKind.APPLY, -1),
    ],
)
def test_a_row_has_the_kind_of_its_legal_tokens(legal: set[int], kind: RowKind, token: int) -> None:
    # The stride after the row's words is not part of the row.
    row = np.concatenate([row_of(legal, 3), np.array([-1], dtype=np.int32)])
    assert Classifier(VOCAB).classify(row) == (kind, token)


@pytest.mark.parametrize("stage", [Stage.VERIFY, Stage.TREE])
@given(
    seed=st.integers(0, 2**32),
    texts=st.sets(st.lists(st.integers(1, 4), min_size=1, max_size=7).map(tuple), min_size=1),
)
def test_any_history_gives_each_row_of_a_new_matcher_on_its_way(
    stage: Stage, seed: int, texts: set[tuple[int, ...]]
) -> None:
    """Chains and trees of drafts, some records twice: rows after an illegal draft or the end are deferred."""
    draw = random.Random(seed)
    table = MatcherTable(Classifier(VOCAB))
    table.bind(0, SlotMatcher.bind(1, lambda: ToyMatcher(texts), ()))
    rows = Rows(np.zeros((ROWS, 3), dtype=np.int32))
    done: list[int] = []
    fresh: list[int] = []
    for _ in range(12):
        drafts = [draw.choice([1, 2, 3, 4, STOP]) for _ in range(draw.randrange(ROWS))]
        parents = [draw.randint(0, j) if stage is Stage.TREE else j for j in range(len(drafts))]
        sent = [node(token, parent) for token, parent in zip(drafts, parents, strict=True)]
        record = Record(
            0, 1, len(done) - len(fresh), tuple(fresh), tuple(sent if stage is Stage.TREE else drafts), stage
        )
        answer = table.answer(record, rows, 0)
        if draw.random() < 0.3:
            answer = table.answer(record, rows, 0)
        states: list[ToyMatcher | None] = []
        for row in range(len(drafts) + 1):
            way = [row]
            while way[-1]:
                way.append(parents[way[-1] - 1])
            scratch = ToyMatcher(texts)
            path = [*done, *(drafts[at - 1] for at in reversed(way[:-1]))]
            reached = all(scratch.accept(token) for token in path) and not scratch.terminated
            states.append(scratch if reached else None)
            if not reached:
                assert answer.kinds[row] == RowKind.DEFER
                continue
            legal = scratch.legal()
            assert tokens_in(rows.words[row]) == legal
            assert answer.kinds[row] == (RowKind.FORCED if len(legal) == 1 else RowKind.APPLY)
            assert answer.forced[row] == (min(legal) if len(legal) == 1 else -1)
        # Verification goes to some row that was reached, and takes its own legal token.
        at = draw.choice([row for row, state in enumerate(states) if state is not None] or [-1])
        if at < 0:
            break
        taken: list[int] = []
        own = draw.choice(sorted(states[at].legal()))  # type: ignore[union-attr]
        while at:
            taken.insert(0, drafts[at - 1])
            at = parents[at - 1]
        fresh = [*taken, own]
        done = [*done, *fresh]


def test_a_draft_whose_parent_is_not_in_front_of_it_is_deferred() -> None:
    answer = Table().ask(0, [], [node(1, 0), node(2, 2), node(2, 1)], stage=Stage.TREE)
    assert answer.kinds == [RowKind.APPLY, RowKind.APPLY, RowKind.DEFER, RowKind.APPLY]


def test_a_matcher_that_fails_inside_a_tree_is_rebuilt() -> None:
    table = Table(fail_at=[2])
    answer = table.ask(0, [], [node(1, 0), node(2, 1), node(2, 0)], stage=Stage.TREE)
    assert answer.kinds[0] == RowKind.APPLY
    assert RowKind.DEFER in answer.kinds
    assert table.table.rebuilds == 1
    assert table.slot.tokens == []


def proposed(table: Table, at: int, committed: Sequence[int], limit: int = 4) -> list[int]:
    answer = table.ask(at, committed, need=(1 << limit) - 1, stage=Stage.PROPOSE)
    assert answer.kinds == [RowKind.FORCED] * len(answer.forced)
    return answer.forced


def test_a_proposal_returns_jump_forward_tokens_and_fills_no_row() -> None:
    table = Table()
    assert proposed(table, 0, []) == []
    assert proposed(table, 0, [1, 6]) == [7, 8, STOP]
    assert proposed(table, 0, [1, 6], limit=2) == [7, 8]
    assert table.made[0].fills == 0
    assert (table.rows.words == np.int32(0x5A5A5A5A)).all()
    # The record that follows says the same tokens again, and finds the matcher where they end.
    assert table.ask(0, [1, 6], [7, 8]).kinds == [RowKind.FORCED] * 3
    assert table.made[0].taken == [1, 6, 7, 8]
    assert proposed(table, 2, [7]) == [8, STOP]
    assert table.slot.tokens == [1, 6, 7]


@pytest.mark.parametrize(
    ("committed", "at", "gen", "kinds"),
    [
        ([3], 0, 1, [RowKind.ERROR]),
        ([2], 1, 1, [RowKind.DEFER]),
        ([], 0, 2, [RowKind.DEFER]),
        ([], 0, 0, [RowKind.ALL]),
    ],
    ids=["illegal", "gap", "not bound yet", "of the past"],
)
def test_a_proposal_that_cannot_be_made_has_a_kind_and_no_token(
    committed: list[int], at: int, gen: int, kinds: list[RowKind]
) -> None:
    assert Table().ask(at, committed, gen=gen, stage=Stage.PROPOSE).kinds == kinds


def test_a_matcher_that_fails_during_a_proposal_is_rebuilt() -> None:
    table = Table(fail_at=[2])
    assert proposed(table, 0, [1, 6]) == []
    assert table.table.rebuilds == 1
    assert table.slot.health is Health.GOOD
    assert proposed(table, 2, [7]) == [8, STOP]


class DearMatcher(ToyMatcher):
    """Works for two milliseconds before it proposes."""

    def jump_forward_tokens(self, limit: int) -> tuple[int, ...]:
        end_ns = time.thread_time_ns() + 2_000_000
        while time.thread_time_ns() < end_ns:
            pass
        return super().jump_forward_tokens(limit)


def test_slow_proposals_are_skipped_for_a_while() -> None:
    table = Table()
    table.table.bind(0, SlotMatcher.bind(1, lambda: DearMatcher(TEXTS), []))
    answers = [proposed(table, 0, [1, 6]) for _ in range(40)]
    assert answers[0] == [7, 8, STOP]
    assert answers[1:17] == [[]] * 16
    assert table.ask(0, [1, 6]).kinds == [RowKind.FORCED]
