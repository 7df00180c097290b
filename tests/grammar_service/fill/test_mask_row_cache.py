"""Which rows stand, behind which tokens, as records commit, draft and overwrite."""

from __future__ import annotations

import pytest

from grammar_service.fill.mask_row_cache import MaskRowCache, Noted, Standing
from shared_mem.grammar_end import Record
from shared_mem.layout import RowKind, Stage


def record(at: int, committed: tuple[int, ...] = (), drafts: tuple[int, ...] = (), gen: int = 1) -> Record:
    return Record(0, gen, at, committed, drafts, int(Stage.VERIFY))


def put(standing: MaskRowCache, half: int, *path: int) -> Standing:
    """Write the row behind `path` where a record's row of that number goes."""
    made = Standing(half, len(path), kind=1, forced=-1)
    standing.clear(half, 1 << len(path))
    standing.put(path, made)
    return made


def test_a_row_is_found_behind_its_tokens_drafted_or_committed() -> None:
    standing = MaskRowCache()
    standing.follow(record(0, (7,)))
    rows = [put(standing, 0), put(standing, 1, 2), put(standing, 0, 2, 3)]
    assert [standing.find(path) for path in ((), (2,), (2, 3))] == rows
    assert standing.find((3,)) is None
    standing.follow(record(1, (2,)))
    assert [standing.find(path) for path in ((), (3,))] == rows[1:]
    standing.follow(record(1, (2, 5)))
    assert [standing.find(path) for path in ((), (3,), (2,))] == [None] * 3
    assert repr(standing) == "<StandingRows 0 behind 3 tokens of owner 1>"


def test_a_record_that_says_tokens_again_forgets_nothing() -> None:
    standing = MaskRowCache()
    standing.follow(record(0, (7, 8)))
    row = put(standing, 0, 9)
    for again in (record(0, (7, 8)), record(1, (8,)), record(2)):
        standing.follow(again)
        assert standing.find((9,)) == row


def test_a_row_is_gone_when_another_one_is_written_there() -> None:
    standing = MaskRowCache()
    standing.follow(record(0, (7,)))
    put(standing, 0, 2)
    other_half = put(standing, 1, 3)
    put(standing, 0, 4)
    assert standing.find((2,)) is None
    assert standing.find((3,)) == other_half
    standing.clear(1, 0b10)
    assert standing.find((3,)) is None


def test_a_row_that_moved_frees_the_place_where_it_was() -> None:
    standing = MaskRowCache()
    standing.follow(record(0, (7,)))
    put(standing, 0, 2)
    moved = put(standing, 1, 2)
    put(standing, 0, 5)
    assert standing.find((2,)) == moved


def test_another_owner_a_gap_or_a_step_back_begin_with_nothing() -> None:
    for following in (record(1, gen=2), record(5), record(0, (7,))):
        standing = MaskRowCache()
        standing.follow(record(0, (7, 8)))
        put(standing, 0)
        assert not standing.fill((1,))
        standing.follow(following)
        assert standing.find(()) is None
        assert not standing.fill((1,))


def test_a_row_that_is_computed_again_is_noticed_until_other_tokens_come() -> None:
    standing = MaskRowCache()
    standing.follow(record(0, (7,)))
    assert [standing.fill(path) for path in ((), (1,), (1, 2), (1,))] == [False, False, False, True]
    standing.follow(record(1, (1,)))
    assert [standing.fill(path) for path in ((), (2,), (3,))] == [True, True, False]
    standing.follow(record(2, (9,)))
    assert not standing.fill(())


def noted(half: int, drafts: tuple[int, ...], kinds: list[int], first: int = 0) -> Noted:
    return Noted(half, drafts, first, kinds, [-1] * len(kinds), [-1] * len(kinds))


def test_a_noted_answer_is_found_row_by_row_and_knows_what_was_computed() -> None:
    standing = MaskRowCache()
    assert standing.is_clean(record(0, (7,)))
    standing.note(noted(1, (2, 3), [RowKind.APPLY, RowKind.FORCED, RowKind.DEFER]))
    assert not standing.is_clean(record(1, (), (2,)))
    assert standing.find((2,)) == Standing(1, 1, RowKind.FORCED, -1, -1)
    assert standing.find((2, 3)) is None
    assert [standing.fill(path) for path in ((), (2,), (2, 3))] == [True, True, False]


@pytest.mark.parametrize(
    ("then", "clean"),
    [
        (record(1, (5,)), True),
        (record(1, (2,)), False),
        (record(1, (2, 3)), False),
        (record(1, (2, 3, 4)), True),
        (record(1, (2, 5)), True),
        (record(0, (7, 2)), False),
        (record(0, (7, 6)), True),
        (record(0, (7,)), False),
        (record(1, (2,), gen=2), True),
        (record(3, (2,)), True),
    ],
)
def test_nothing_is_left_where_other_tokens_were_committed(then: Record, clean: bool) -> None:
    quick, slow = MaskRowCache(), MaskRowCache()
    for standing in (quick, slow):
        assert standing.is_clean(record(0, (7,)))
        standing.note(noted(0, (2, 3), [RowKind.APPLY] * 3))
    slow.clear(1, 0)
    assert quick.is_clean(then) is slow.is_clean(then) is clean
    assert repr(quick) == repr(slow)
    for path in ((), (2,), (3,), (2, 3)):
        assert quick.find(path) == slow.find(path)


def test_a_noted_answer_begins_at_its_first_row_and_is_overwritten_as_others_are() -> None:
    standing = MaskRowCache()
    assert standing.is_clean(record(0, (7,)))
    standing.note(noted(0, (2, 3), [RowKind.DEFER, RowKind.DEFER, RowKind.APPLY], first=2))
    standing.clear(0, 0b001)
    assert standing.find((2, 3)) is not None
    standing.clear(0, 0b100)
    assert standing.find((2, 3)) is None
