"""A worker that answers many slots at once, of which one hangs or fails."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from grammar_service.backends.backend import Filled, MatcherFailed, Rows
from grammar_service.fill.batch import PROPOSALS_PER_LOOK
from grammar_service.fill.matchers import SlotMatcher
from grammar_service.fill.worker import Worker
from shared_mem.batch import BatchArrays
from shared_mem.channel import AwaitResult, EngineEnd, GrammarEnd
from shared_mem.layout import Layout, RowKind, Stage
from shared_mem.segment import Segment
from tests.grammar_service.toy import VOCAB, ToyFiller, ToyMatcher, Watched, tokens_in

TEXTS = [(1, 2, 3, 4), (1, 2, 5), (1, 6, 7, 8), (2,)]
MANY = 64
PATIENCE_S = 120.0
"""Bound on waits that only a failing test reaches."""


class Member(ToyMatcher):
    """Can be filled in a batch; `breaks` is called before every row."""

    def __init__(self, filler: ToyFiller, breaks: Callable[[ToyMatcher], None] = lambda matcher: None) -> None:
        super().__init__(TEXTS)
        self.filler, self.breaks = filler, breaks

    def fill(self, rows: Rows, index: int) -> None:
        self.breaks(self)
        super().fill(rows, index)


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(Layout(num_slots=MANY, num_rows=3, vocab_size=VOCAB)) as created:
        yield created


@pytest.fixture
def worker(segment: Segment) -> Iterator[Worker]:
    """A worker whose answers are late only while `may_be_late` says so."""
    end = Watched(Segment.attach(os.dup(segment.fileno())))
    end.hurries = False
    worker = Worker(end)
    worker.start()
    yield worker
    assert worker.stop(PATIENCE_S)


def may_be_late(worker: Worker) -> None:
    """Find the leader overdue from here on, by the deadline of the worker."""
    worker._channel.hurries = True  # type: ignore[attr-defined]


def post(engine: EngineEnd, slots: int, at: int, committed: list[int], drafts: list[int]) -> tuple[int, BatchArrays]:
    """Post the same record for each of the first slots."""
    arrays = engine.batch_arrays(slots)
    arrays.slots[:], arrays.slot_gens[:], arrays.commit_pos[:] = range(slots), 1, at
    arrays.n_commit[:], arrays.n_draft[:] = len(committed), len(drafts)
    arrays.tokens[:, : len(committed) + len(drafts)] = committed + drafts
    return engine.post_batch(arrays), arrays


def step(engine: EngineEnd, slots: int, at: int, committed: list[int], drafts: list[int]) -> tuple[int, AwaitResult]:
    """Post the same record for each of the first slots, and wait for the answers."""
    seq, arrays = post(engine, slots, at, committed, drafts)
    return seq, engine.await_batch(arrays, seq, timeout_s=PATIENCE_S)


def whole(engine: EngineEnd, seq: int, slots: list[int]) -> list[list[int]]:
    """Return the kinds once the answers are complete."""
    gens = [1] * len(slots)
    _until(lambda: not engine.await_rows(seq, slots, gens, timeout_s=PATIENCE_S).num_late)
    return engine.await_rows(seq, slots, gens, timeout_s=0).kinds.tolist()


def test_many_quick_slots_are_not_late(segment: Segment, worker: Worker) -> None:
    engine, filler = EngineEnd(segment), ToyFiller()
    may_be_late(worker)
    for slot in range(MANY):
        worker.bind(slot, SlotMatcher.bind(1, lambda: Member(filler), []))
    step(engine, MANY, 0, [1], [2])
    # On a busy machine some of these steps are late, but not all.
    for at in range(500):
        late = worker.stats()["late_answers"]
        # The same position again with other drafts.
        step(engine, MANY, 1 + at % 2, [[2], [3]][at % 2], [[5], [4]][at % 2])
        if at and worker.stats()["late_answers"] == late:
            break
        if at % 2:
            for slot in range(MANY):
                worker.bind(slot, SlotMatcher.bind(1, lambda: Member(filler), [1]))
    else:
        pytest.fail("every step was late")
    assert filler.fills


def test_a_slot_that_hangs_in_a_batch_holds_the_others_only_briefly(segment: Segment, worker: Worker) -> None:
    engine, filler, gate, hanging = EngineEnd(segment), ToyFiller(), threading.Event(), threading.Event()

    def hangs(matcher: ToyMatcher) -> None:
        if len(matcher.taken) == 2:
            hanging.set()
            assert gate.wait(10 * PATIENCE_S)

    for slot in range(8):
        breaks = {"breaks": hangs} if slot == 3 else {}
        worker.bind(slot, SlotMatcher.bind(1, lambda breaks=breaks: Member(filler, **breaks), []))
    others = [slot for slot in range(8) if slot != 3]
    seq, _ = step(engine, 8, 0, [1], [])
    assert {tuple(row) for row in whole(engine, seq, list(range(8)))} == {(RowKind.APPLY, RowKind.DEFER, RowKind.DEFER)}
    try:
        seq, arrays = post(engine, 8, 1, [2], [3])
        assert hanging.wait(PATIENCE_S)
        may_be_late(worker)
        result = engine.await_batch(arrays, seq, timeout_s=PATIENCE_S)
        assert filler.fills == 1
        assert result.kinds[3].tolist() == [RowKind.DEFER] * 3
        assert whole(engine, seq, others) == [[RowKind.APPLY, RowKind.FORCED, RowKind.DEFER]] * 7
        assert tokens_in(engine.mask_rows(seq)[0, 0, :3]) == {3, 5}
        # The slot now holds its own thread, and the next step is answered without it.
        seq, result = step(engine, 8, 2, [3], [])
        assert whole(engine, seq, others) == [[RowKind.FORCED, RowKind.DEFER, RowKind.DEFER]] * 7
        assert result.kinds[3].tolist() == [RowKind.DEFER] * 3
        assert worker.alive
    finally:
        gate.set()
    assert whole(engine, seq, [3]) == [[RowKind.FORCED, RowKind.DEFER, RowKind.DEFER]]


def test_a_thread_that_returns_to_an_abandoned_batch_moves_no_matcher_in_use(segment: Segment, worker: Worker) -> None:
    engine, gate, held, back = EngineEnd(segment), threading.Event(), threading.Lock(), threading.Event()
    holds = threading.Event()

    class Slow(ToyFiller):
        def accept(self, matcher: Any, tokens: Sequence[int]) -> int:
            if matcher.number == 3 and list(tokens) == [2] and held.acquire(blocking=False):
                holds.set()
                assert gate.wait(10 * PATIENCE_S)
            return super().accept(matcher, tokens)

        def fill(
            self, matchers: Sequence[Any], drafts: Sequence[list[int]], rows: Any, stride: int, threads: int
        ) -> Filled:
            filled = super().fill(matchers, drafts, rows, stride, threads)
            if gate.is_set():
                back.set()
            return filled

    class Numbered(Member):
        number = 0

    filler = Slow()

    def made(number: int) -> Numbered:
        matcher = Numbered(filler)
        matcher.number = number
        return matcher

    for slot in range(8):
        worker.bind(slot, SlotMatcher.bind(1, partial(made, slot), []))
    slots = list(range(8))
    whole(engine, step(engine, 8, 0, [1], [])[0], slots)
    try:
        # The batch is abandoned while its thread moves matchers; the slots continue with new ones.
        for at, token in ((1, 2), (2, 3)):
            seq, _ = post(engine, 8, at, [token], [])
            assert holds.wait(PATIENCE_S)
            may_be_late(worker)
            expected = RowKind.APPLY if token == 2 else RowKind.FORCED
            assert whole(engine, seq, slots) == [[expected, RowKind.DEFER, RowKind.DEFER]] * 8
    finally:
        gate.set()
    assert back.wait(PATIENCE_S)
    # The abandoned thread moved matchers that no slot uses any more.
    seq, _ = step(engine, 8, 3, [4], [])
    assert {tuple(kinds) for kinds in whole(engine, seq, slots)} != {(RowKind.DEFER,) * 3}
    assert worker.stats()["gaps"] == 0


def test_a_library_error_in_a_batch_ends_one_request_at_most(
    segment: Segment, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(ToyFiller):
        def accept(self, matcher: Any, tokens: Sequence[int]) -> int:
            taken = super().accept(matcher, tokens)
            if list(tokens) == [2]:
                raise TypeError("already borrowed")
            return taken

    engine, filler = EngineEnd(segment), Broken()
    for slot in range(8):
        worker.bind(slot, SlotMatcher.bind(1, lambda: Member(filler), []))
    whole(engine, step(engine, 8, 0, [1], [])[0], list(range(8)))
    seq, _ = step(engine, 8, 1, [2], [3])
    assert whole(engine, seq, list(range(8))) == [[RowKind.APPLY, RowKind.FORCED, RowKind.DEFER]] * 8
    assert worker.alive
    assert "already borrowed" in caplog.text


def test_a_batch_that_hangs_ends_the_worker(segment: Segment) -> None:
    engine, filler, gate = EngineEnd(segment), ToyFiller(), threading.Event()
    worker = Worker(GrammarEnd(Segment.attach(os.dup(segment.fileno()))))
    worker.hang_s = 10 * PATIENCE_S
    hanging = threading.Event()

    def hangs(matcher: ToyMatcher) -> None:
        if len(matcher.taken) == 2:
            hanging.set()
            assert gate.wait(10 * PATIENCE_S)

    worker.start()
    try:
        for slot in range(8):
            breaks = {"breaks": hangs} if slot == 3 else {}
            worker.bind(slot, SlotMatcher.bind(1, lambda breaks=breaks: Member(filler, **breaks), []))
        whole(engine, step(engine, 8, 0, [1], [])[0], list(range(8)))
        post(engine, 8, 1, [2], [])
        assert hanging.wait(PATIENCE_S)
        worker.hang_s = 0.5
        _until(lambda: not worker.alive)
        assert "a mask computation runs for" in str(worker.error)
    finally:
        gate.set()
    assert worker.stop(PATIENCE_S)


@pytest.mark.parametrize("at_row", [0, 1])
def test_a_matcher_that_fails_in_a_batch_ends_only_its_own_request(
    segment: Segment, worker: Worker, at_row: int
) -> None:
    engine, filler = EngineEnd(segment), ToyFiller()

    def fails(matcher: ToyMatcher) -> None:
        if len(matcher.taken) == 2 + at_row:
            raise MatcherFailed("limit")

    for slot in range(8):
        breaks = {"breaks": fails} if slot == 3 else {}
        worker.bind(slot, SlotMatcher.bind(1, lambda breaks=breaks: Member(filler, **breaks), []))
    whole(engine, step(engine, 8, 0, [1], [])[0], list(range(8)))
    seq, _ = step(engine, 8, 1, [2], [3])
    kinds = whole(engine, seq, list(range(8)))
    assert filler.fills == 1
    failed = [RowKind.ERROR] * 2 + [RowKind.DEFER] if at_row == 0 else [RowKind.APPLY, RowKind.DEFER, RowKind.DEFER]
    assert kinds.pop(3) == failed
    assert kinds == [[RowKind.APPLY, RowKind.FORCED, RowKind.DEFER]] * 7


def _until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def test_proposals_of_a_batch_are_dropped_when_a_newer_record_arrives(segment: Segment, worker: Worker) -> None:
    """A batch looks between proposals whether the engine still waits for them."""
    engine, filler = EngineEnd(segment), ToyFiller()
    begun, gate, asked = threading.Event(), threading.Event(), list[int]()

    class Proposing(Member):
        def jump_forward_tokens(self, limit: int) -> tuple[int, ...]:
            asked.append(1)
            begun.set()
            assert gate.wait(10 * PATIENCE_S)
            return super().jump_forward_tokens(limit)

    for slot in range(MANY):
        worker.bind(slot, SlotMatcher.bind(1, lambda: Proposing(filler), []))
    # The first record of a slot is answered by itself.
    whole(engine, step(engine, MANY, 0, [1], [])[0], list(range(MANY)))
    arrays = engine.batch_arrays(MANY)
    arrays.slots[:], arrays.slot_gens[:], arrays.commit_pos[:] = range(MANY), 1, 1
    arrays.n_commit[:], arrays.n_draft[:], arrays.need_rows[:], arrays.tokens[:, 0] = 1, 0, 7, 6
    stale = engine.post_batch(arrays, stage=Stage.PROPOSE)
    try:
        assert begun.wait(PATIENCE_S)
        seq = engine.post([0], [1], [1], [1], [0], [[6]])
    finally:
        gate.set()
    assert whole(engine, seq, [0]) == [[RowKind.FORCED, RowKind.DEFER, RowKind.DEFER]]
    # Two threads may have begun a batch each.
    assert len(asked) <= 2 * PROPOSALS_PER_LOOK
    _until(lambda: worker.stats()["dropped_proposals"] >= MANY // 2)
    # Every proposal has an answer, so that no wait of the engine lasts until its deadline.
    slots = list(range(1, MANY))
    assert engine.await_rows(stale, slots, [1] * len(slots), timeout_s=PATIENCE_S).num_missing == 0


def test_proposals_of_many_slots_are_answered_together(segment: Segment, worker: Worker) -> None:
    engine, filler = EngineEnd(segment), ToyFiller()
    for slot in range(MANY):
        worker.bind(slot, SlotMatcher.bind(1, lambda: Member(filler), []))
    # The first record of a slot is answered by itself.
    whole(engine, step(engine, MANY, 0, [1], [])[0], list(range(MANY)))
    before, fills = worker.stats(), filler.fills
    arrays = engine.batch_arrays(MANY)
    arrays.slots[:], arrays.slot_gens[:], arrays.commit_pos[:] = range(MANY), 1, 1
    arrays.n_commit[:], arrays.n_draft[:], arrays.need_rows[:] = 1, 0, 3
    arrays.tokens[::2, 0], arrays.tokens[1::2, 0] = 6, 2
    # On a busy machine an answer may be late, and its tokens come later.
    seq = engine.post_batch(arrays, stage=Stage.PROPOSE)
    whole(engine, seq, list(range(MANY)))
    answer = engine.await_rows(seq, list(range(MANY)), [1] * MANY, timeout_s=0)
    assert answer.forced[::2].tolist() == [[7, 8, -1]] * (MANY // 2)
    assert answer.kinds[::2].tolist() == [[RowKind.FORCED, RowKind.FORCED, RowKind.DEFER]] * (MANY // 2)
    assert answer.forced[1::2].tolist() == [[-1] * 3] * (MANY // 2)
    # Counted after the publication.
    _until(lambda: worker.stats()["batched_records"] == before["batched_records"] + MANY)
    assert worker.stats()["proposed_tokens"] == MANY
    assert (worker.stats()["filled_rows"], filler.fills) == (before["filled_rows"], fills)
