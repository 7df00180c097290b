"""A worker with a real segment in one process, as an engine sees it."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import pytest

from grammar_service.backends.backend import Rows
from shared_mem.layout import RowKind, Stage
from tests.grammar_service.fill.conftest import MakePlane
from tests.grammar_service.fill.plane import PATIENCE_S, TEXTS, GatedMatcher, Plane, fresh, legal_after, until
from tests.grammar_service.toy import ToyMatcher

ALL, APPLY, FORCED, DEFER = RowKind.ALL, RowKind.APPLY, RowKind.FORCED, RowKind.DEFER


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spin_s", [0.0, 0.001])
def test_rows_arrive_in_shared_memory(make_plane: MakePlane, threads: int, spin_s: float) -> None:
    plane = make_plane(threads=threads, spin_s=spin_s)
    plane.bind(0)
    plane.bind(2, fresh, [1], gen=4)
    seq = plane.engine.post([0, 2], [1, 4], [0, 1], [1, 1], [2, 0], [[1, 2, 3], [2, 0, 0]])
    result = plane.engine.await_rows(seq, [0, 2], [1, 4], timeout_s=PATIENCE_S)
    assert result.kinds.tolist() == [[APPLY, APPLY, FORCED], [APPLY, DEFER, DEFER]]
    assert result.forced[0].tolist() == [-1, -1, 4]
    assert [plane.row(seq, 0, row) for row in range(3)] == [{2, 6}, {3, 5}, {4}]
    assert plane.row(seq, 2) == {3, 5}
    # Counted after the publication, the rows last.
    until(lambda: sum(plane.worker.rows_by_kind().values()) == 4)
    stats = plane.worker.stats()
    assert plane.worker.rows_by_kind() == {"ALL": 0, "APPLY": 3, "FORCED": 1, "DEFER": 0, "DEAD_END": 0, "ERROR": 0}
    assert (stats["records"], stats["matchers"]) == (2, 2)
    assert stats["fill_p99_us"] >= stats["fill_p50_us"] > 0


def test_a_record_after_a_bind_meets_the_new_matcher(plane: Plane) -> None:
    for gen in range(1, 60):
        plane.bind(1, gen=gen)
        assert plane.ask(1, 0, [1], gen=gen)[0] == APPLY
        plane.worker.release(1, gen)
    assert plane.ask(1, 0, [1], gen=59)[0] == ALL


def test_dropping_everything_defers_until_the_next_bind(plane: Plane) -> None:
    plane.bind(0, gen=3)
    assert plane.ask(0, 0, [1], gen=3)[0] == APPLY
    plane.worker.drop_all()
    assert plane.ask(0, 1, [2], gen=3)[0] == DEFER
    plane.bind(0, fresh, [1], gen=3)
    assert plane.ask(0, 1, [2], gen=3)[0] == APPLY


@pytest.mark.parametrize("threads", [1, 2])
def test_a_slow_slot_does_not_hold_the_others(make_plane: MakePlane, threads: int) -> None:
    plane, slow = make_plane(threads=threads, late=True), GatedMatcher()
    plane.bind(0, lambda: slow)
    plane.bind(1)
    seq = 0
    try:
        for step, token in enumerate((1, 2, 3)):
            seq = plane.post([0, 1], step, [token])
            assert plane.whole(seq, [1])[0][0] in (APPLY, FORCED)
            assert plane.first(seq, [0], timeout_s=0.001).kinds[0, 0] == DEFER
        handoffs = plane.worker.stats()["leader_handoffs"]
        plane.worker.release(1, 1)
        plane.bind(2, fresh, [1])
        assert plane.ask(2, 1, [2])[0] == APPLY
        assert threads > 1 or plane.worker.stats()["leader_handoffs"] == handoffs >= 1
    finally:
        slow.gate.set()
    # The records were handled in order, so the last one is answered without a gap.
    assert plane.whole(seq, [0])[0][0] == FORCED
    assert plane.first(seq, [0]).forced[0, 0] == 4


def test_a_late_row_is_published_as_defer_and_added_when_it_is_filled(plane: Plane) -> None:
    slow = GatedMatcher(at=2)
    plane.bind(0, lambda: slow)
    seq = plane.post([0], 0, [1], [2, 3])
    try:
        assert slow.begun.wait(PATIENCE_S)
        plane.may_be_late()
        first = plane.first(seq, [0])
        assert first.kinds[0].tolist() == [APPLY, DEFER, DEFER]
        assert (first.num_missing, first.num_late) == (0, 1)
        assert plane.row(seq, 0) == {2, 6}
    finally:
        slow.gate.set()
    assert plane.whole(seq, [0]) == [[APPLY, APPLY, FORCED]]
    assert plane.first(seq, [0]).forced[0].tolist() == [-1, -1, 4]
    assert plane.row(seq, 0, 1) == {3, 5}
    # Both rows were added to the answer that was already published.
    assert plane.worker.stats()["late_rows"] == 2


def test_each_row_belongs_to_its_tokens_after_any_records(plane: Plane) -> None:
    """Drafts, commits, repeats and proposals at random: each row equals the row of a separate matcher."""
    dice = random.Random(5)
    for gen in range(1, 40):
        plane.bind(0, gen=gen)
        said: list[int] = []
        for _ in range(12):
            (text,) = dice.sample([text for text in TEXTS if list(text[: len(said)]) == said], 1)
            new = list(text[len(said) : len(said) + dice.randrange(3)])
            drafts = list(text[len(said) + len(new) :][: dice.randrange(3)])
            if not new and not said:
                continue
            if dice.random() < 0.2:
                plane.propose([0], len(said), new, gen=gen)
            need = dice.randrange(1, 1 << (len(drafts) + 1))
            seq = plane.post([0], len(said), new, drafts, gen=gen, need=need)
            (kinds,) = plane.whole(seq, [0], gen=gen)
            said += new
            for row in range(len(drafts) + 1):
                if need >> row & 1:
                    assert kinds[row] in (APPLY, FORCED)
                    assert plane.row(seq, 0, row) == legal_after((*said, *drafts[:row]))


def test_a_newer_record_ends_the_walk_of_the_older(make_plane: MakePlane) -> None:
    plane, slow = make_plane(late=True), GatedMatcher(at=1)
    plane.bind(0, lambda: slow)
    assert plane.first(plane.post([0], 0, [1], [2, 3]), [0]).num_late == 1
    again = plane.post([0], 1, [], [6])
    assert plane.first(again, [0]).num_late == 1
    slow.gate.set()
    assert plane.whole(again, [0])[0][:2] == [APPLY, FORCED]
    assert slow.filled == [(1,), (1,), (1, 6)]


class BrokenMatcher(ToyMatcher):
    """Raises an exception that is no MatcherFailed."""

    def fill(self, rows: Rows, index: int) -> None:
        raise ZeroDivisionError


def test_a_defect_ends_one_request_only(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    plane.bind(0, lambda: BrokenMatcher(TEXTS))
    plane.bind(1)
    assert plane.ask(0, 0, [1], [2])[:2] == [RowKind.ERROR] * 2
    assert plane.ask(1, 0, [1])[0] == APPLY
    assert plane.worker.alive
    assert "ZeroDivisionError" in caplog.text


def test_a_permissive_engine_gets_all(plane: Plane) -> None:
    plane.engine.permissive = True
    assert plane.ask(2, 5, [1], [2])[:2] == [ALL] * 2
    plane.engine.permissive = False
    assert plane.ask(2, 5, [1], [2])[:2] == [DEFER] * 2


def test_records_that_were_overwritten_show_as_a_gap(make_plane: MakePlane) -> None:
    plane = make_plane(start=False)
    plane.bind(0)
    for at, token in enumerate([1, 2, 3, 4, 9]):
        plane.post([0], at, [token])
    seq = plane.post([0], 5, [])
    plane.worker.start()
    assert plane.first(seq, [0]).kinds[0, 0] == DEFER
    assert plane.worker.stats()["overruns"] >= 1


def test_a_row_that_hangs_ends_the_worker(make_plane: MakePlane) -> None:
    plane, slow = make_plane(start=False, late=True), GatedMatcher()
    plane.worker.hang_s = 10 * PATIENCE_S
    plane.worker.start()
    try:
        plane.bind(0, lambda: slow)
        plane.post([0], 0, [1])
        assert slow.begun.wait(PATIENCE_S)
        plane.worker.hang_s = 0.1
        until(lambda: not plane.worker.alive)
        assert "a mask computation runs for" in str(plane.worker.error)
        assert not plane.worker.stop(0.05)
    finally:
        slow.gate.set()


def shows_life(plane: Plane) -> None:
    """Wait for a heartbeat after this call."""
    since_ns = time.monotonic_ns()
    # The clock is read first, because a later age is only greater.
    until(lambda: time.monotonic_ns() - since_ns > (plane.engine.heartbeat_age_ns() or 0) > 0)


def test_signs_of_life_stop_when_every_thread_hangs(make_plane: MakePlane) -> None:
    plane, slow = make_plane(late=True), [GatedMatcher(), GatedMatcher()]
    for slot, matcher in enumerate(slow):
        plane.bind(slot, partial(_same, matcher))
    plane.worker.hang_s = 10 * PATIENCE_S
    shows_life(plane)
    try:
        plane.post([0], 0, [1])
        until(lambda: plane.worker.stats()["late_answers"] == 1)
        shows_life(plane)
        plane.post([1], 0, [1])
        # Now the last thread hangs as well.
        until(lambda: (plane.engine.heartbeat_age_ns() or 0) > 300_000_000)
    finally:
        for matcher in slow:
            matcher.gate.set()
    shows_life(plane)


def _same(matcher: ToyMatcher) -> ToyMatcher:
    return matcher


# -- proposals ------------------------------------------------------------------------------------------------------


def test_jump_forward_tokens_arrive_in_shared_memory(plane: Plane) -> None:
    plane.bind(0)
    result = plane.first(plane.propose([0], 0, [1, 6]), [0])
    assert (result.kinds[0].tolist(), result.forced[0].tolist()) == ([FORCED] * 3, [7, 8, 9])
    assert plane.first(plane.propose([0], 0, [1]), [0]).kinds[0].tolist() == [DEFER] * 3
    until(lambda: plane.worker.stats()["records"] == 2)
    stats = plane.worker.stats()
    assert (stats["proposed_tokens"], stats["filled_rows"], stats["late_answers"]) == (3, 0, 0)
    assert sum(plane.worker.rows_by_kind().values()) == 0


def test_a_proposal_leaves_published_rows_unchanged(plane: Plane) -> None:
    matcher = fresh()
    plane.bind(0, lambda: matcher)
    verified = plane.post([0], 0, [1], [2])
    assert plane.whole(verified, [0])[0][:2] == [APPLY] * 2
    assert plane.first(plane.propose([0], 1, [2]), [0]).num_missing == 0
    assert [plane.row(verified, 0, row) for row in (0, 1)] == [{2, 6}, {3, 5}]
    # The next record commits the same tokens as the proposal.
    seq = plane.post([0], 1, [2], [3])
    assert plane.whole(seq, [0])[0][:2] == [APPLY, FORCED]
    assert [plane.row(seq, 0, row) for row in (0, 1)] == [{3, 5}, {4}]
    assert matcher.fills == plane.worker.stats()["filled_rows"] == 4


def test_a_proposal_after_a_slow_row_is_dropped_when_a_newer_record_of_its_slot_arrives(make_plane: MakePlane) -> None:
    plane, slow = make_plane(late=True), GatedMatcher(at=1)
    plane.bind(0, lambda: slow)
    assert plane.first(plane.post([0], 0, [1]), [0]).kinds[0, 0] == DEFER
    # After the slow row, the proposal gets an empty answer at once; when the row is filled, it is not computed.
    assert plane.first(plane.propose([0], 1, [2]), [0]).kinds[0].tolist() == [DEFER] * 3
    seq = plane.post([0], 1, [2])
    assert plane.first(seq, [0]).kinds[0, 0] == DEFER
    slow.gate.set()
    assert plane.whole(seq, [0])[0][0] == APPLY
    # The newer record replaced the proposal in the queue. One that is taken from the queue and dropped is counted.
    assert plane.worker.stats()["dropped_proposals"] == 0


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


def test_a_queued_proposal_is_dropped_when_a_newer_record_arrives(make_plane: MakePlane) -> None:
    """The rows of the newer record must not wait for proposals that the engine waits for no longer."""
    plane, gate = make_plane(late=True), threading.Event()
    matchers = [ProposingMatcher(gate) for _ in range(3)]
    for slot, matcher in enumerate(matchers):
        plane.bind(slot, partial(_same, matcher))
    try:
        # The first two proposals hold both threads. The third one stays in the queue.
        stale = plane.propose(range(3), 0, [1])
        until(lambda: sum(matcher.begun.is_set() for matcher in matchers) == 2)
        (queued,) = (slot for slot, matcher in enumerate(matchers) if not matcher.begun.is_set())
        seq = plane.post([queued], 0, [1])
    finally:
        gate.set()
    assert plane.whole(seq, [queued])[0][0] == APPLY
    assert matchers[queued].proposals == 0
    assert plane.worker.stats()["dropped_proposals"] == 1
    # The other two proposals were answered, so that no wait of the engine lasts until its deadline.
    assert plane.first(stale, [slot for slot in range(3) if slot != queued]).num_missing == 0


# -- forks: a matcher becomes a copy of another slot's by a record --------------------------------------------------


def fork(plane: Plane, slot: int, gen: int, source: int, num_committed: int) -> None:
    plane.post([slot], num_committed, [source], gen=gen, stage=Stage.FORK)


def legal(
    plane: Plane, slot: int, at: int, committed: list[int], drafts: tuple[int, ...] = (), *, gen: int = 1
) -> set[int] | int:
    """Return the legal tokens of the first row, or its kind where there is no mask."""
    seq = plane.post([slot], at, committed, drafts, gen=gen)
    kind = plane.whole(seq, [slot], gen=gen)[0][0]
    return plane.row(seq, slot) if kind in (APPLY, FORCED) else kind


def test_a_copy_moves_by_itself_from_the_committed_tokens_wherever_the_source_is(plane: Plane) -> None:
    plane.bind(0)
    assert legal(plane, 0, 0, [1, 2], (3, 4)) == {3, 5}
    fork(plane, 2, 7, 0, 1)
    assert legal(plane, 0, 2, [3]) == {4}
    assert legal(plane, 2, 1, [6], gen=7) == {7}
    assert plane.worker.counts().matchers == 2


def test_a_copy_replaces_the_matcher_of_an_earlier_owner_and_of_none_that_was_released(plane: Plane) -> None:
    plane.bind(0, fresh, [1])
    plane.bind(1, fresh, [1, 2], gen=3)
    fork(plane, 1, 4, 0, 1)
    assert legal(plane, 1, 1, [6], gen=4) == {7}
    assert legal(plane, 1, 2, [3], gen=3) == ALL
    assert plane.worker.counts().matchers == 2
    plane.worker.release(2, 5)
    fork(plane, 2, 5, 0, 1)
    assert legal(plane, 2, 1, [6], gen=5) == ALL
    assert plane.worker.counts().matchers == 2


def test_a_matcher_goes_back_for_the_next_owner_of_its_slot(plane: Plane) -> None:
    plane.bind(1, fresh, [1])
    assert legal(plane, 1, 1, [2], (3, 4)) == {3, 5}
    fork(plane, 1, 4, 1, 1)
    assert legal(plane, 1, 1, [6], gen=4) == {7}
    assert legal(plane, 1, 2, [3]) == ALL  # a record of the owner before
    fork(plane, 1, 9, 1, 0)
    assert legal(plane, 1, 0, [1, 2], gen=9) == {3, 5}
    assert plane.worker.counts().matchers == 1


def test_a_matcher_does_not_go_back_for_an_owner_that_was_released_or_replaced(plane: Plane) -> None:
    plane.bind(1, fresh, [1])
    plane.bind(1, fresh, [1, 2], gen=6)
    fork(plane, 1, 5, 1, 0)
    assert legal(plane, 1, 2, [3], gen=6) == {4}
    plane.worker.release(1, 8)
    fork(plane, 1, 8, 1, 0)
    assert legal(plane, 1, 0, [1], gen=8) == ALL
    assert plane.worker.counts().matchers == 0


@pytest.mark.parametrize(("source", "at"), [(2, 0), (0, 2)], ids=["no matcher", "fewer tokens"])
def test_without_a_state_to_copy_the_slot_waits_for_a_bind(plane: Plane, source: int, at: int) -> None:
    plane.bind(0, fresh, [1])
    plane.bind(1, fresh, [1, 2], gen=3)
    fork(plane, 1, 4, source, at)
    assert legal(plane, 1, 2, [3], gen=4) == DEFER
    plane.bind(1, fresh, [1, 2], gen=4)
    assert legal(plane, 1, 2, [3], gen=4) == {4}


def test_forks_of_one_post_may_have_one_source(plane: Plane) -> None:
    plane.bind(1, fresh, [1])
    plane.engine.post([0, 2], [5, 6], [1, 1], [1, 1], [0, 0], [[1], [1]], stage=int(Stage.FORK))
    assert legal(plane, 0, 1, [2], gen=5) == {3, 5}
    assert legal(plane, 2, 1, [6], gen=6) == {7}
