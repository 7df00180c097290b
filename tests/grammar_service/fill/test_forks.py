"""A matcher becomes a copy of another slot's by a record of the step plane."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from grammar_service.fill.matchers import SlotMatcher
from grammar_service.fill.worker import Worker
from shared_mem.channel import EngineEnd, GrammarEnd
from shared_mem.layout import Layout, RowKind, Stage
from shared_mem.segment import Segment
from tests.grammar_service.toy import VOCAB, ToyMatcher, tokens_in

TEXTS = [(1, 2, 3, 4), (1, 2, 5), (1, 6, 7, 8), (2,)]
LAYOUT = Layout(num_slots=3, num_rows=3, vocab_size=VOCAB, num_recs=4)
PATIENCE_S = 60.0


def fresh() -> ToyMatcher:
    return ToyMatcher(TEXTS)


@pytest.fixture
def plane() -> Iterator[tuple[EngineEnd, Worker]]:
    with Segment.create(LAYOUT) as segment:
        worker = Worker(GrammarEnd(Segment.attach(os.dup(segment.fileno()))), threads=2, spin_s=0.0)
        worker.start()
        yield EngineEnd(segment), worker
        assert worker.stop(PATIENCE_S)


def fork(engine: EngineEnd, slot: int, gen: int, source: int, num_committed: int) -> None:
    engine.post([slot], [gen], [num_committed], [1], [0], [[source]], stage=int(Stage.FORK))


def legal(
    engine: EngineEnd, slot: int, gen: int, at: int, committed: list[int], drafts: tuple[int, ...] = ()
) -> set[int] | RowKind:
    """Return the legal tokens of the first row, or its kind where there is no mask."""
    seq = engine.post([slot], [gen], [at], [len(committed)], [len(drafts)], [[*committed, *drafts]])
    result = engine.await_rows(seq, [slot], [gen], timeout_s=PATIENCE_S)
    kind, forced = RowKind(result.kinds[0, 0]), int(result.forced[0, 0])
    if kind is RowKind.FORCED:
        return {forced}
    return set(tokens_in(engine.mask_rows(seq)[slot, 0, :3])) if kind is RowKind.APPLY else kind


def test_a_copy_moves_by_itself(plane: tuple[EngineEnd, Worker]) -> None:
    engine, worker = plane
    worker.bind(0, SlotMatcher.bind(1, fresh, []))
    assert legal(engine, 0, 1, 0, [1]) == {2, 6}
    fork(engine, 2, 7, 0, 1)
    assert legal(engine, 0, 1, 1, [2]) == {3, 5}
    assert legal(engine, 2, 7, 1, [6]) == {7}
    assert legal(engine, 0, 1, 2, [3]) == {4}
    assert worker.counts().matchers == 2


def test_a_copy_is_taken_at_the_committed_tokens_wherever_the_source_is(plane: tuple[EngineEnd, Worker]) -> None:
    """The source has accepted drafts, and more tokens, since."""
    engine, worker = plane
    worker.bind(0, SlotMatcher.bind(1, fresh, []))
    assert legal(engine, 0, 1, 0, [1, 2], (3, 4)) == {3, 5}
    fork(engine, 1, 2, 0, 1)
    assert legal(engine, 1, 2, 1, [6, 7]) == {8}


def test_a_copy_replaces_the_matcher_of_an_earlier_owner(plane: tuple[EngineEnd, Worker]) -> None:
    engine, worker = plane
    worker.bind(0, SlotMatcher.bind(1, fresh, [1]))
    worker.bind(1, SlotMatcher.bind(3, fresh, [1, 2]))
    fork(engine, 1, 4, 0, 1)
    assert legal(engine, 1, 4, 1, [6]) == {7}
    assert legal(engine, 1, 3, 2, [3]) is RowKind.ALL
    assert worker.counts().matchers == 2


@pytest.mark.parametrize(("source", "at"), [(2, 0), (0, 2)], ids=["no matcher", "fewer tokens"])
def test_without_a_state_to_copy_the_slot_waits_for_a_bind(
    plane: tuple[EngineEnd, Worker], source: int, at: int
) -> None:
    engine, worker = plane
    worker.bind(0, SlotMatcher.bind(1, fresh, [1]))
    worker.bind(1, SlotMatcher.bind(3, fresh, [1, 2]))
    fork(engine, 1, 4, source, at)
    assert legal(engine, 1, 4, 2, [3]) is RowKind.DEFER
    worker.bind(1, SlotMatcher.bind(4, fresh, [1, 2]))
    assert legal(engine, 1, 4, 2, [3]) == {4}


def test_an_owner_that_was_released_gets_no_copy(plane: tuple[EngineEnd, Worker]) -> None:
    engine, worker = plane
    worker.bind(0, SlotMatcher.bind(1, fresh, [1]))
    worker.release(1, 4)
    assert legal(engine, 0, 1, 1, [2]) == {3, 5}
    fork(engine, 1, 4, 0, 1)
    assert legal(engine, 1, 4, 1, [6]) is RowKind.ALL
    assert worker.counts().matchers == 1


def test_forks_of_one_post_may_have_one_source(plane: tuple[EngineEnd, Worker]) -> None:
    engine, worker = plane
    worker.bind(1, SlotMatcher.bind(1, fresh, [1]))
    sources = [[1], [1]]
    engine.post([0, 2], [5, 6], [1, 1], [1, 1], [0, 0], sources, stage=int(Stage.FORK))
    assert legal(engine, 0, 5, 1, [2]) == {3, 5}
    assert legal(engine, 2, 6, 1, [6]) == {7}
