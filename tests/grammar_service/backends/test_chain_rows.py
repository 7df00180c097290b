"""The native call that publishes the rows of chains: the kinds that it finds and the answers that it does not touch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from grammar_service.grammar.mask_rows import Classifier
from shared_mem.chains import DONE, SLOW, STALE, ChainArrays, SpecialWords
from shared_mem.channel import EngineEnd, GrammarEnd
from shared_mem.layout import Layout, RowKind
from shared_mem.segment import Segment
from tests.grammar_service.toy import row_of, tokens_in

ROWS = 4
NONE = SpecialWords(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=np.uint32))


class Table:
    """Both ends of a segment, with arrays for its slots."""

    def __init__(self, vocab_size: int, segment: Segment) -> None:
        self.engine, self.grammar = EngineEnd(segment), GrammarEnd(segment)
        self.layout, self.vocab_size = segment.layout, vocab_size
        self.tallies = np.zeros((self.layout.num_slots, len(RowKind)), dtype=np.int64)
        self.arrays: ChainArrays = self.grammar.chains(self.layout.num_slots, self.tallies)

    def publish(
        self, slot: int, rows: list[set[int] | None], drafts: list[int], special: SpecialWords = NONE, first: int = 0
    ) -> tuple[list[int], list[int], int, int]:
        """Publish one chain of an unanswered record.
        Return the kinds, the forced tokens, its state and its sequence."""
        tokens, wanted = [[0] * first + drafts], [(1 << ROWS) - (1 << first)]
        seq = self.engine.post([slot], [1], [0], [0], [first + len(drafts)], tokens, need_rows=wanted)
        arrays = self.arrays
        arrays.take(self.grammar.read(seq), [0])
        for at, row in enumerate(rows):
            if row is not None:
                arrays.rows[at] = row_of(row, self.layout.words)
        self.grammar.publish_chains(seq, arrays, special)
        state = int(arrays.states[0])
        if state == SLOW:
            return [], [], state, seq
        result = self.engine.await_rows(seq, [slot], [1], timeout_s=0)
        return result.kinds[0].tolist(), result.forced[0].tolist(), state, seq


@pytest.fixture(params=[1, 31, 32, 33, 70, 4100])
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    with Segment.create(Layout(num_slots=2, num_rows=ROWS, vocab_size=request.param)) as segment:
        yield Table(request.param, segment)


def test_the_kind_of_a_row_agrees_with_the_classifier(table: Table) -> None:
    size = table.vocab_size
    rng = np.random.default_rng(size)
    full = set(range(size))
    rows = [full, set(), {0}, {size - 1}, full - {0}, full - {size - 1}, {0, size - 1}, {size // 2}, {0, 1} & full]
    rows += [set(rng.integers(0, size, count).tolist()) for count in (1, 2, 3, 40)]
    classifier = Classifier(size)
    for row in rows:
        kinds, forced, state, seq = table.publish(1, [row], [])
        assert (RowKind(kinds[0]), forced[0]) == classifier.classify(row_of(row, table.layout.words)), row
        assert kinds[1:] == [RowKind.DEFER] * (ROWS - 1)
        assert state == DONE
        if kinds[0] in (RowKind.APPLY, RowKind.FORCED):
            assert tokens_in(table.engine.mask_rows(seq)[1, 0, : table.layout.words]) == row
    assert table.tallies.sum() == table.tallies[1].sum() == len(rows)


@pytest.fixture
def small() -> Iterator[Table]:
    with Segment.create(Layout(num_slots=2, num_rows=ROWS, vocab_size=70)) as segment:
        yield Table(70, segment)


def test_an_empty_row_after_an_illegal_draft_is_no_row(small: Table) -> None:
    # xgrammar clears the row after a draft that it refuses, and touches none after it.
    kinds, _, state, _ = small.publish(0, [{1, 2}, set(), None, None], [5, 6, 7])
    assert (kinds, state) == ([RowKind.APPLY, RowKind.DEFER, RowKind.DEFER, RowKind.DEFER], DONE)
    assert small.arrays.num_rows == 1


@pytest.mark.parametrize(
    ("rows", "drafts"),
    [
        ([None], []),
        ([{1, 2}, None], [1]),  # offered, and not taken
        ([{1, 2}, {3}], [5]),  # taken, and not offered
        ([{1, 2}, {3, 40}], [1]),  # a stop token, where only the matcher knows
    ],
)
def test_bits_that_no_special_word_names_do_not_change(
    small: Table, rows: list[set[int] | None], drafts: list[int]
) -> None:
    stops = SpecialWords(
        *(np.array([value], dtype=kind) for value, kind in ((1, "i4"), (0xFFFFFEFF, "u4"), (256, "u4")))
    )
    assert small.publish(0, rows, drafts, stops)[2] == SLOW
    assert not small.tallies.any()
    assert small.engine.await_rows(1, [0], [1], timeout_s=0).num_missing == 1


@pytest.mark.parametrize("accepting", [0, 1])
def test_a_stop_token_is_legal_where_the_answer_is_complete(small: Table, accepting: int) -> None:
    stops = SpecialWords(
        *(np.array([value], dtype=kind) for value, kind in ((1, "i4"), (0xFFFFFCFF, "u4"), (256, "u4")))
    )
    small.arrays.accepting[0] = accepting
    # Token 40 is a stop token; token 41 is special and never legal.
    _, _, _, seq = small.publish(0, [{1, 2, 40, 41}], [], stops)
    assert tokens_in(small.engine.mask_rows(seq)[0, 0, :3]) == ({1, 2, 40} if accepting else {1, 2})


def test_an_answer_older_than_the_published_one_is_not_published(small: Table) -> None:
    _, _, _, seq = small.publish(0, [{1, 2}], [])
    small.arrays.take(small.grammar.read(seq), [0])
    small.arrays.rows[0] = row_of({5, 6}, 3)
    small.grammar.publish_chains(seq - 1, small.arrays, NONE)
    assert small.arrays.states[0] == STALE
    assert small.grammar.stats()["stale_answers"] == 1
    assert tokens_in(small.engine.mask_rows(seq)[0, 0, :3]) == {1, 2}
