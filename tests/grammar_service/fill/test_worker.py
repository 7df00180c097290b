"""A worker with a real segment in one process, as an engine sees it."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from grammar_service.backends.backend import Rows
from grammar_service.fill.matchers import SlotMatcher
from grammar_service.fill.worker import Worker
from shared_mem.channel import AwaitResult, EngineEnd, GrammarEnd
from shared_mem.layout import Layout, RowKind, Stage
from shared_mem.segment import Segment
from tests.grammar_service.toy import VOCAB, ToyMatcher, Watched, tokens_in

TEXTS = [(1, 2, 3, 4), (1, 2, 5), (1, 6, 7, 8), (2,)]
LAYOUT = Layout(num_slots=3, num_rows=3, vocab_size=VOCAB, num_recs=4)

StartWorker = Callable[..., Worker]
"""`late` says whether an answer may be late: of its tasks one is slow, and on a busy machine any other."""
PATIENCE_S = 120.0
"""Bound on waits that only a failing test reaches."""


def fresh() -> ToyMatcher:
    return ToyMatcher(TEXTS)


class SlowMatcher(ToyMatcher):
    """Fills when the gate opens."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(TEXTS)
        self.gate, self.begun = gate, threading.Event()

    def fill(self, rows: Rows, index: int) -> None:
        self.begun.set()
        assert self.gate.wait(10 * PATIENCE_S)
        super().fill(rows, index)


class BrokenMatcher(ToyMatcher):
    """Raises an exception that is no MatcherFailed."""

    def fill(self, rows: Rows, index: int) -> None:
        raise ZeroDivisionError


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(LAYOUT) as created:
        yield created


@pytest.fixture
def engine(segment: Segment) -> EngineEnd:
    return EngineEnd(segment)


@pytest.fixture
def start(segment: Segment) -> Iterator[StartWorker]:
    started: list[Worker] = []

    def make(*, threads: int = 1, spin_s: float = 0.0, late: bool = False) -> Worker:
        end = Watched(Segment.attach(os.dup(segment.fileno())))
        end.hurries = late
        worker = Worker(end, threads=threads, spin_s=spin_s)
        worker.start()
        started.append(worker)
        return worker

    yield make
    for worker in started:
        assert worker.stop(PATIENCE_S)


def whole(engine: EngineEnd, seq: int, slot: int, gen: int = 1) -> AwaitResult:
    """Return the answer once it is complete."""
    _until(lambda: not engine.await_rows(seq, [slot], [gen], timeout_s=PATIENCE_S).num_late)
    return engine.await_rows(seq, [slot], [gen], timeout_s=0)


def ask(engine: EngineEnd, slot: int, at: int, committed: list[int], drafts: list[int], gen: int = 1) -> list[int]:
    seq = engine.post([slot], [gen], [at], [len(committed)], [len(drafts)], [[*committed, *drafts]])
    return whole(engine, seq, slot, gen).kinds[0].tolist()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spin_s", [0.0, 0.001])
def test_rows_arrive_in_shared_memory(engine: EngineEnd, start: StartWorker, threads: int, spin_s: float) -> None:
    worker = start(threads=threads, spin_s=spin_s)
    worker.bind(0, SlotMatcher.bind(1, fresh, []))
    worker.bind(2, SlotMatcher.bind(4, fresh, [1]))
    seq = engine.post([0, 2], [1, 4], [0, 1], [1, 1], [2, 0], [[1, 2, 3], [2, 0, 0]])
    result = engine.await_rows(seq, [0, 2], [1, 4], timeout_s=PATIENCE_S)
    assert result.kinds.tolist() == [
        [RowKind.APPLY, RowKind.APPLY, RowKind.FORCED],
        [RowKind.APPLY, RowKind.DEFER, RowKind.DEFER],
    ]
    assert result.forced[0].tolist() == [-1, -1, 4]
    rows = engine.mask_rows(seq)[:, :, :3]
    assert [tokens_in(rows[0, row]) for row in range(3)] == [{2, 6}, {3, 5}, {4}]
    assert tokens_in(rows[2, 0]) == {3, 5}


def test_a_record_after_a_bind_meets_the_new_matcher(engine: EngineEnd, start: StartWorker) -> None:
    worker = start()
    for gen in range(1, 60):
        worker.bind(1, SlotMatcher.bind(gen, fresh, []))
        assert ask(engine, 1, 0, [1], [], gen)[0] == RowKind.APPLY
        worker.release(1, gen)
    assert ask(engine, 1, 0, [1], [], 59)[0] == RowKind.ALL


def test_dropping_everything_defers_until_the_next_bind(engine: EngineEnd, start: StartWorker) -> None:
    worker = start()
    worker.bind(0, SlotMatcher.bind(3, fresh, []))
    assert ask(engine, 0, 0, [1], [], 3)[0] == RowKind.APPLY
    worker.drop_all()
    assert ask(engine, 0, 1, [2], [], 3)[0] == RowKind.DEFER
    worker.bind(0, SlotMatcher.bind(3, fresh, [1]))
    assert ask(engine, 0, 1, [2], [], 3)[0] == RowKind.APPLY


def test_a_slow_slot_does_not_hold_the_others(engine: EngineEnd, start: StartWorker) -> None:
    gate = threading.Event()
    worker = start(threads=2, late=True)
    worker.bind(0, SlotMatcher.bind(1, lambda: SlowMatcher(gate), []))
    worker.bind(1, SlotMatcher.bind(1, fresh, []))
    seq = 0
    try:
        for step in range(3):
            committed = [[1], [2], [3]][step]
            seq = engine.post([0, 1], [1, 1], [step, step], [1, 1], [0, 0], [committed, committed])
            assert whole(engine, seq, 1).kinds[0, 0] in (RowKind.APPLY, RowKind.FORCED)
            assert engine.await_rows(seq, [0], [1], timeout_s=0.001).kinds[0, 0] == RowKind.DEFER
    finally:
        gate.set()
    # The records were handled in order, so the last one is answered without a gap.
    result = whole(engine, seq, 0)
    assert result.kinds[0, 0] == RowKind.FORCED
    assert result.forced[0, 0] == 4


def test_a_slow_slot_does_not_hold_the_others_even_with_one_thread(engine: EngineEnd, start: StartWorker) -> None:
    gate = threading.Event()
    worker = start(threads=1, late=True)
    worker.bind(0, SlotMatcher.bind(1, lambda: SlowMatcher(gate), []))
    worker.bind(1, SlotMatcher.bind(1, fresh, []))
    try:
        seq = engine.post([0], [1], [0], [1], [0], [[1]])
        _until(lambda: worker.stats()["late_answers"] == 1)
        handoffs = worker.stats()["leader_handoffs"]
        assert ask(engine, 1, 0, [1], [2])[:2] == [RowKind.APPLY] * 2
        worker.release(1, 1)
        worker.bind(2, SlotMatcher.bind(1, fresh, [1]))
        assert ask(engine, 2, 1, [2], [])[0] == RowKind.APPLY
        assert worker.stats()["leader_handoffs"] == handoffs >= 1
    finally:
        gate.set()
    assert whole(engine, seq, 0).kinds[0, 0] == RowKind.APPLY


class OneSlowRow(ToyMatcher):
    """Fills the row after `at` tokens when the gate opens, and records every row that it fills."""

    def __init__(self, at: int) -> None:
        super().__init__(TEXTS)
        self.at, self.gate, self.begun = at, threading.Event(), threading.Event()
        self.filled: list[tuple[int, ...]] = []

    def fill(self, rows: Rows, index: int) -> None:
        if len(self.taken) == self.at:
            self.begun.set()
            assert self.gate.wait(10 * PATIENCE_S)
        self.filled.append(tuple(self.taken))
        super().fill(rows, index)


def test_a_late_row_is_published_as_defer_and_added_when_it_is_filled(engine: EngineEnd, start: StartWorker) -> None:
    slow = OneSlowRow(at=2)
    worker = start(threads=1)
    worker.bind(0, SlotMatcher.bind(1, lambda: slow, []))
    seq = engine.post([0], [1], [0], [1], [2], [[1, 2, 3]])
    try:
        assert slow.begun.wait(PATIENCE_S)
        worker._channel.hurries = True  # type: ignore[attr-defined]
        first = engine.await_rows(seq, [0], [1], timeout_s=PATIENCE_S)
        assert first.kinds[0].tolist() == [RowKind.APPLY, RowKind.DEFER, RowKind.DEFER]
        assert (first.num_missing, first.num_late) == (0, 1)
        assert tokens_in(engine.mask_rows(seq)[0, 0, :3]) == {2, 6}
    finally:
        slow.gate.set()
    then = whole(engine, seq, 0)
    assert then.kinds[0].tolist() == [RowKind.APPLY, RowKind.APPLY, RowKind.FORCED]
    assert then.forced[0].tolist() == [-1, -1, 4]
    assert tokens_in(engine.mask_rows(seq)[0, 1, :3]) == {3, 5}
    # Both rows were added to the answer that was already published.
    assert worker.stats()["late_rows"] == 2


def test_each_row_belongs_to_its_tokens_after_any_records(engine: EngineEnd, start: StartWorker) -> None:
    """Drafts, commits, repeats and proposals at random: each row equals the row of a separate matcher."""
    dice, worker = random.Random(5), start()
    for gen in range(1, 40):
        worker.bind(0, SlotMatcher.bind(gen, fresh, []))
        said: list[int] = []
        for _ in range(12):
            text = next(iter(dice.sample([text for text in TEXTS if list(text[: len(said)]) == said], 1)))
            fresh_tokens = list(text[len(said) : len(said) + dice.randrange(3)])
            drafts = list(text[len(said) + len(fresh_tokens) :][: dice.randrange(3)])
            if not fresh_tokens and not said:
                continue
            if dice.random() < 0.2:
                propose(engine, 0, len(said), fresh_tokens, gen)
            need = dice.randrange(1, 1 << (len(drafts) + 1))
            arrays = engine.batch_arrays(1)
            arrays.slots[0], arrays.slot_gens[0], arrays.commit_pos[0] = 0, gen, len(said)
            arrays.n_commit[0], arrays.n_draft[0], arrays.need_rows[0] = len(fresh_tokens), len(drafts), need
            arrays.tokens[0, : len(fresh_tokens) + len(drafts)] = [*fresh_tokens, *drafts]
            seq = engine.post_batch(arrays, 1, Stage.VERIFY)
            kinds = whole(engine, seq, 0, gen).kinds[0]
            said += fresh_tokens
            for row in range(len(drafts) + 1):
                if need >> row & 1:
                    assert kinds[row] in (RowKind.APPLY, RowKind.FORCED)
                    legal = legal_after((*said, *drafts[:row]))
                    assert tokens_in(engine.mask_rows(seq)[0, row, :3]) == legal


def legal_after(said: tuple[int, ...]) -> set[int]:
    matcher = fresh()
    assert all(matcher.accept(token) for token in said)
    return matcher.legal()


def test_a_newer_record_ends_the_walk_of_the_older(engine: EngineEnd, start: StartWorker) -> None:
    slow = OneSlowRow(at=1)
    worker = start(threads=1, late=True)
    worker.bind(0, SlotMatcher.bind(1, lambda: slow, []))
    seq = engine.post([0], [1], [0], [1], [2], [[1, 2, 3]])
    assert engine.await_rows(seq, [0], [1], timeout_s=PATIENCE_S).num_late == 1
    again = engine.post([0], [1], [1], [0], [1], [[6]])
    assert engine.await_rows(again, [0], [1], timeout_s=PATIENCE_S).num_late == 1
    slow.gate.set()
    assert whole(engine, again, 0).kinds[0, :2].tolist() == [RowKind.APPLY, RowKind.FORCED]
    assert slow.filled == [(1,), (1,), (1, 6)]


def test_a_defect_ends_one_request_only(
    engine: EngineEnd, start: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start()
    worker.bind(0, SlotMatcher.bind(1, lambda: BrokenMatcher(TEXTS), []))
    worker.bind(1, SlotMatcher.bind(1, fresh, []))
    assert ask(engine, 0, 0, [1], [2])[:2] == [RowKind.ERROR] * 2
    assert ask(engine, 1, 0, [1], [])[0] == RowKind.APPLY
    assert worker.alive
    assert "ZeroDivisionError" in caplog.text


def test_a_permissive_engine_gets_all(engine: EngineEnd, start: StartWorker) -> None:
    start()
    engine.permissive = True
    assert ask(engine, 2, 5, [1], [2])[:2] == [RowKind.ALL] * 2
    engine.permissive = False
    assert ask(engine, 2, 5, [1], [2])[:2] == [RowKind.DEFER] * 2


def test_records_that_were_overwritten_show_as_a_gap(segment: Segment, engine: EngineEnd, start: StartWorker) -> None:
    worker = Worker(GrammarEnd(Segment.attach(os.dup(segment.fileno()))))
    worker.bind(0, SlotMatcher.bind(1, fresh, []))
    for at, token in enumerate([1, 2, 3, 4]):
        engine.post([0], [1], [at], [1], [0], [[token]])
    engine.post([0], [1], [4], [1], [0], [[9]])
    seq = engine.post([0], [1], [5], [0], [0], [[0]])
    worker.start()
    try:
        assert engine.await_rows(seq, [0], [1], timeout_s=PATIENCE_S).kinds[0, 0] == RowKind.DEFER
        assert worker.stats()["overruns"] >= 1
    finally:
        assert worker.stop(PATIENCE_S)


def test_a_row_that_hangs_ends_the_worker(
    segment: Segment, engine: EngineEnd, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    slow = SlowMatcher(gate)
    worker = Worker(GrammarEnd(Segment.attach(os.dup(segment.fileno()))))
    worker.hang_s = 10 * PATIENCE_S
    worker.start()
    try:
        worker.bind(0, SlotMatcher.bind(1, lambda: slow, []))
        engine.post([0], [1], [0], [1], [0], [[1]])
        assert slow.begun.wait(PATIENCE_S)
        worker.hang_s = 0.1
        _until(lambda: not worker.alive)
        assert "a mask computation runs for" in str(worker.error)
        assert not worker.stop(0.05)
    finally:
        gate.set()
    assert worker.stop(PATIENCE_S)


def test_signs_of_life_stop_when_every_thread_hangs(engine: EngineEnd, start: StartWorker) -> None:
    gate = threading.Event()
    worker = start(threads=1, late=True)
    worker.bind(0, SlotMatcher.bind(1, lambda: SlowMatcher(gate), []))
    worker.bind(1, SlotMatcher.bind(1, lambda: SlowMatcher(gate), []))
    worker.hang_s = 10 * PATIENCE_S
    _shows_life(engine)
    try:
        engine.post([0], [1], [0], [1], [0], [[1]])
        _until(lambda: worker.stats()["late_answers"] == 1)
        _shows_life(engine)
        engine.post([1], [1], [0], [1], [0], [[1]])
        # Now the last thread hangs as well.
        _until(lambda: (engine.heartbeat_age_ns() or 0) > 300_000_000)
    finally:
        gate.set()
    _shows_life(engine)


def test_stats_count_rows_by_kind(engine: EngineEnd, start: StartWorker) -> None:
    worker = start()
    worker.bind(0, SlotMatcher.bind(1, fresh, []))
    ask(engine, 0, 0, [1], [2, 3])
    # Counted after the publication, the rows last.
    _until(lambda: sum(worker.rows_by_kind().values()) == 3)
    assert worker.stats()["records"] == 1
    assert worker.rows_by_kind() == {"ALL": 0, "APPLY": 2, "FORCED": 1, "DEFER": 0, "DEAD_END": 0, "ERROR": 0}
    assert worker.stats()["matchers"] == 1
    assert worker.stats()["fill_p99_us"] >= worker.stats()["fill_p50_us"] > 0


def _shows_life(engine: EngineEnd) -> None:
    """Wait for a heartbeat after this call."""
    since_ns = time.monotonic_ns()
    # The clock is read first, because a later age is only greater.
    _until(lambda: time.monotonic_ns() - since_ns > (engine.heartbeat_age_ns() or 0) > 0)


def _until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def propose(engine: EngineEnd, slot: int, at: int, committed: list[int], gen: int = 1) -> int:
    """Post a proposal for as many tokens as there are rows."""
    arrays = engine.batch_arrays(1)
    arrays.slots[0], arrays.slot_gens[0], arrays.commit_pos[0] = slot, gen, at
    arrays.n_commit[0], arrays.n_draft[0], arrays.need_rows[0] = len(committed), 0, 7
    arrays.tokens[0, : len(committed)] = committed
    return engine.post_batch(arrays, 1, Stage.PROPOSE)


def test_jump_forward_tokens_arrive_in_shared_memory(engine: EngineEnd, start: StartWorker) -> None:
    worker = start()
    worker.bind(0, SlotMatcher.bind(1, fresh, []))
    seq = propose(engine, 0, 0, [1, 6])
    result = engine.await_rows(seq, [0], [1], timeout_s=PATIENCE_S)
    assert (result.kinds[0].tolist(), result.forced[0].tolist()) == ([RowKind.FORCED] * 3, [7, 8, 9])
    seq = propose(engine, 0, 0, [1])
    assert engine.await_rows(seq, [0], [1], timeout_s=PATIENCE_S).kinds[0].tolist() == [RowKind.DEFER] * 3
    _until(lambda: worker.stats()["records"] == 2)
    stats = worker.stats()
    assert (stats["proposed_tokens"], stats["filled_rows"], stats["late_answers"]) == (3, 0, 0)
    assert sum(worker.rows_by_kind().values()) == 0


def test_a_proposal_leaves_published_rows_unchanged(engine: EngineEnd, start: StartWorker) -> None:
    worker, matcher = start(), fresh()
    worker.bind(0, SlotMatcher.bind(1, lambda: matcher, []))
    verified = engine.post([0], [1], [0], [1], [1], [[1, 2, 0]])
    assert whole(engine, verified, 0).kinds[0, :2].tolist() == [RowKind.APPLY] * 2
    seq = propose(engine, 0, 1, [2])
    assert engine.await_rows(seq, [0], [1], timeout_s=PATIENCE_S).num_missing == 0
    assert [tokens_in(row) for row in engine.mask_rows(verified)[0, :2, :3]] == [{2, 6}, {3, 5}]
    # The next record commits the same tokens as the proposal.
    seq = engine.post([0], [1], [1], [1], [1], [[2, 3, 0]])
    assert whole(engine, seq, 0).kinds[0, :2].tolist() == [RowKind.APPLY, RowKind.FORCED]
    assert [tokens_in(row) for row in engine.mask_rows(seq)[0, :2, :3]] == [{3, 5}, {4}]
    assert matcher.fills == worker.stats()["filled_rows"] == 4


def test_a_proposal_behind_a_slow_row_is_dropped_when_a_newer_record_of_its_slot_arrives(
    engine: EngineEnd, start: StartWorker
) -> None:
    slow = OneSlowRow(at=1)
    worker = start(threads=1, late=True)
    worker.bind(0, SlotMatcher.bind(1, lambda: slow, []))
    seq = engine.post([0], [1], [0], [1], [0], [[1]])
    assert engine.await_rows(seq, [0], [1], timeout_s=PATIENCE_S).kinds[0, 0] == RowKind.DEFER
    # After the slow row, the proposal gets an empty answer at once; when the row is filled, it is not computed.
    late = propose(engine, 0, 1, [2])
    assert engine.await_rows(late, [0], [1], timeout_s=PATIENCE_S).kinds[0].tolist() == [RowKind.DEFER] * 3
    seq = engine.post([0], [1], [1], [1], [0], [[2]])
    assert engine.await_rows(seq, [0], [1], timeout_s=PATIENCE_S).kinds[0, 0] == RowKind.DEFER
    slow.gate.set()
    assert whole(engine, seq, 0).kinds[0, 0] == RowKind.APPLY
    # The newer record replaced the proposal in the queue. One that is taken from the queue and dropped is counted.
    assert worker.stats()["dropped_proposals"] == 0


class ProposingMatcher(ToyMatcher):
    """Counts the calls for jump-forward tokens; each waits for the gate."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(TEXTS)
        self.gate, self.proposals, self.begun = gate, 0, threading.Event()

    def jump_forward_tokens(self, limit: int) -> tuple[int, ...]:
        self.proposals += 1
        self.begun.set()
        assert self.gate.wait(10 * PATIENCE_S)
        return super().jump_forward_tokens(limit)


def test_a_queued_proposal_is_dropped_when_a_newer_record_arrives(engine: EngineEnd, start: StartWorker) -> None:
    """The rows of the newer record must not wait for proposals that the engine waits for no longer."""
    gate = threading.Event()
    worker = start(threads=1, late=True)
    matchers = [ProposingMatcher(gate) for _ in range(3)]
    for slot, matcher in enumerate(matchers):
        worker.bind(slot, SlotMatcher.bind(1, lambda matcher=matcher: matcher, []))  # type: ignore[misc]
    try:
        # The first two proposals hold both threads. The third one stays in the queue.
        arrays = engine.batch_arrays(3)
        arrays.slots[:], arrays.slot_gens[:], arrays.commit_pos[:] = range(3), 1, 0
        arrays.n_commit[:], arrays.n_draft[:], arrays.need_rows[:], arrays.tokens[:, 0] = 1, 0, 7, 1
        stale = engine.post_batch(arrays, 3, Stage.PROPOSE)
        _until(lambda: sum(matcher.begun.is_set() for matcher in matchers) == 2)
        (queued,) = (slot for slot, matcher in enumerate(matchers) if not matcher.begun.is_set())
        seq = engine.post([queued], [1], [0], [1], [0], [[1]])
    finally:
        gate.set()
    assert whole(engine, seq, queued).kinds[0, 0] == RowKind.APPLY
    assert matchers[queued].proposals == 0
    assert worker.stats()["dropped_proposals"] == 1
    # The other two proposals were answered, so that no wait of the engine lasts until its deadline.
    others = [slot for slot in range(3) if slot != queued]
    assert engine.await_rows(stale, others, [1, 1], timeout_s=PATIENCE_S).num_missing == 0
