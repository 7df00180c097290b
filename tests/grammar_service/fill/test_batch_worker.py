"""A worker that answers many slots at once, of which one hangs or fails."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from grammar_service.backends.backend import Filled, MatcherFailed, Rows
from grammar_service.fill.batch import PROPOSALS_PER_LOOK
from service_runtime.threads import OS_THREADS
from shared_mem.layout import RowKind, Stage
from tests.grammar_service.fill.conftest import MakePlane
from tests.grammar_service.fill.plane import PATIENCE_S, TEXTS, GatedMatcher, Plane, until
from tests.grammar_service.toy import ToyFiller, ToyMatcher

APPLY, FORCED, DEFER = RowKind.APPLY, RowKind.FORCED, RowKind.DEFER
MANY = 64


class Member(ToyMatcher):
    """Can be filled in a batch; `breaks` is called before every row."""

    number = 0

    def __init__(self, filler: ToyFiller, breaks: Callable[[ToyMatcher], None] = lambda matcher: None) -> None:
        super().__init__(TEXTS)
        self.filler, self.breaks = filler, breaks

    def fill(self, rows: Rows, index: int) -> None:
        self.breaks(self)
        super().fill(rows, index)


class QuickFills(type(OS_THREADS)):  # type: ignore[misc]
    """Threads whose clock of fills goes on by a microsecond at each look, so that no slot is slow on a busy machine."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    def perf_counter_ns(self) -> int:
        return 1000 * next(self._looks)


@pytest.fixture
def plane(make_plane: MakePlane) -> Plane:
    """A plane of many quick slots, whose answers are late only after `may_be_late`."""
    return make_plane(num_slots=MANY, system=QuickFills())


def begin(plane: Plane, filler: ToyFiller, count: int = 8, broken: Callable[[], ToyMatcher] | None = None) -> None:
    """Bind the slots, of which the fourth is `broken`, and commit token 1: a first record is answered by itself."""
    for slot in range(count):
        plane.bind(slot, broken if broken and slot == 3 else lambda: Member(filler))
    assert plane.whole(plane.post(range(count), 0, [1]), range(count)) == [[APPLY, DEFER, DEFER]] * count


def test_many_quick_slots_are_not_late(plane: Plane) -> None:
    filler = ToyFiller()
    plane.may_be_late()
    begin(plane, filler, MANY)
    # On a busy machine some of these steps are late, but not all.
    for at in range(500):
        late = plane.worker.stats()["late_answers"]
        # The same position again with other drafts.
        seq = plane.post(range(MANY), 1 + at % 2, [[2], [3]][at % 2], [[5], [4]][at % 2])
        plane.first(seq, range(MANY))
        if at and plane.worker.stats()["late_answers"] == late:
            break
        if at % 2:
            for slot in range(MANY):
                plane.bind(slot, lambda: Member(filler), [1])
    else:
        pytest.fail("every step was late")
    assert filler.fills


def test_a_slot_that_hangs_in_a_batch_holds_the_others_only_briefly(plane: Plane) -> None:
    filler = ToyFiller()
    slow = GatedMatcher(at=2, filler=filler)
    begin(plane, filler, broken=slow.again)
    others = [slot for slot in range(8) if slot != 3]
    try:
        seq = plane.post(range(8), 1, [2], [3])
        assert slow.begun.wait(PATIENCE_S)
        plane.may_be_late()
        assert plane.first(seq, range(8)).kinds[3].tolist() == [DEFER] * 3
        assert filler.fills == 1
        assert plane.whole(seq, others) == [[APPLY, FORCED, DEFER]] * 7
        assert plane.row(seq, 0) == {3, 5}
        # The slot now holds its own thread, and the next step is answered without it.
        seq = plane.post(range(8), 2, [3])
        assert plane.whole(seq, others) == [[FORCED, DEFER, DEFER]] * 7
        assert plane.first(seq, [3]).kinds[0].tolist() == [DEFER] * 3
        assert plane.worker.alive
    finally:
        slow.gate.set()
    assert plane.whole(seq, [3]) == [[FORCED, DEFER, DEFER]]


def test_the_rows_of_a_late_batch_are_added_when_they_are_filled(plane: Plane) -> None:
    plane.worker.abandon_s = 10 * PATIENCE_S
    filler = ToyFiller()
    slow = GatedMatcher(at=2, filler=filler)
    begin(plane, filler, broken=slow.again)
    seq = plane.post(range(8), 1, [2], [3])
    try:
        assert slow.begun.wait(PATIENCE_S)
        plane.may_be_late()
        first = plane.first(seq, range(8))
        assert (first.kinds.tolist(), first.num_late) == ([[DEFER] * 3] * 8, 8)
    finally:
        slow.gate.set()
    assert plane.whole(seq, range(8)) == [[APPLY, FORCED, DEFER]] * 8
    assert [plane.row(seq, slot) for slot in (0, 3)] == [{3, 5}] * 2
    assert filler.fills == 1


def test_a_thread_that_returns_to_an_abandoned_batch_moves_no_matcher_in_use(plane: Plane) -> None:
    gate, held, back, holds = threading.Event(), threading.Lock(), threading.Event(), threading.Event()

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

    filler, slots = Slow(), range(8)

    def made(number: int) -> Member:
        matcher = Member(filler)
        matcher.number = number
        return matcher

    for slot in slots:
        plane.bind(slot, partial(made, slot))
    plane.whole(plane.post(slots, 0, [1]), slots)
    try:
        # The batch is abandoned while its thread moves matchers; the slots continue with new ones.
        for at, token, expected in ((1, 2, APPLY), (2, 3, FORCED)):
            seq = plane.post(slots, at, [token])
            assert holds.wait(PATIENCE_S)
            plane.may_be_late()
            assert plane.whole(seq, slots) == [[expected, DEFER, DEFER]] * 8
    finally:
        gate.set()
    assert back.wait(PATIENCE_S)
    # The abandoned thread moved matchers that no slot uses any more.
    assert plane.whole(plane.post(slots, 3, [4]), slots) != [[DEFER] * 3] * 8
    assert plane.worker.stats()["gaps"] == 0


def test_a_library_error_in_a_batch_ends_one_request_at_most(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ToyFiller):
        def accept(self, matcher: Any, tokens: Sequence[int]) -> int:
            taken = super().accept(matcher, tokens)
            if list(tokens) == [2]:
                raise TypeError("already borrowed")
            return taken

    begin(plane, Broken())
    assert plane.whole(plane.post(range(8), 1, [2], [3]), range(8)) == [[APPLY, FORCED, DEFER]] * 8
    assert plane.worker.alive
    assert "already borrowed" in caplog.text


def test_a_batch_that_hangs_ends_the_worker(make_plane: MakePlane) -> None:
    plane, filler = make_plane(num_slots=8, start=False, late=True), ToyFiller()
    plane.worker.hang_s = 10 * PATIENCE_S
    slow = GatedMatcher(at=2, filler=filler)
    plane.worker.start()
    try:
        begin(plane, filler, broken=slow.again)
        plane.post(range(8), 1, [2])
        assert slow.begun.wait(PATIENCE_S)
        plane.worker.hang_s = 0.5
        until(lambda: not plane.worker.alive)
        assert "a mask computation runs for" in str(plane.worker.error)
    finally:
        slow.gate.set()


@pytest.mark.parametrize(("at_row", "failed"), [(0, [RowKind.ERROR, RowKind.ERROR, DEFER]), (1, [APPLY, DEFER, DEFER])])
def test_a_matcher_that_fails_in_a_batch_ends_only_its_own_request(
    plane: Plane, at_row: int, failed: list[int]
) -> None:
    filler = ToyFiller()

    def fails(matcher: ToyMatcher) -> None:
        if len(matcher.taken) == 2 + at_row:
            raise MatcherFailed("limit")

    begin(plane, filler, broken=lambda: Member(filler, fails))
    kinds = plane.whole(plane.post(range(8), 1, [2], [3]), range(8))
    assert filler.fills == 1
    assert kinds.pop(3) == failed
    assert kinds == [[APPLY, FORCED, DEFER]] * 7


def test_proposals_of_a_batch_are_dropped_when_a_newer_record_arrives(plane: Plane) -> None:
    """A batch looks between proposals whether the engine still waits for them."""
    filler, begun, gate, asked = ToyFiller(), threading.Event(), threading.Event(), list[int]()

    class Proposing(Member):
        def jump_forward_tokens(self, limit: int) -> tuple[int, ...]:
            asked.append(1)
            begun.set()
            assert gate.wait(10 * PATIENCE_S)
            return super().jump_forward_tokens(limit)

    for slot in range(MANY):
        plane.bind(slot, lambda: Proposing(filler))
    plane.whole(plane.post(range(MANY), 0, [1]), range(MANY))
    stale = plane.propose(range(MANY), 1, [6])
    try:
        assert begun.wait(PATIENCE_S)
        seq = plane.post([0], 1, [6])
    finally:
        gate.set()
    assert plane.whole(seq, [0]) == [[FORCED, DEFER, DEFER]]
    # Two threads may have begun a batch each.
    assert len(asked) <= 2 * PROPOSALS_PER_LOOK
    until(lambda: plane.worker.stats()["dropped_proposals"] >= MANY // 2)
    # Every proposal has an answer, so that no wait of the engine lasts until its deadline.
    assert plane.first(stale, range(1, MANY)).num_missing == 0


def test_proposals_of_many_slots_are_answered_together(plane: Plane) -> None:
    filler = ToyFiller()
    begin(plane, filler, MANY)
    before, fills = plane.worker.stats(), filler.fills
    arrays = plane.engine.batch_arrays(MANY)
    arrays.slots[:], arrays.slot_gens[:], arrays.commit_pos[:] = range(MANY), 1, 1
    arrays.n_commit[:], arrays.n_draft[:], arrays.need_rows[:] = 1, 0, 3
    arrays.tokens[::2, 0], arrays.tokens[1::2, 0] = 6, 2
    # On a busy machine an answer may be late, and its tokens come later.
    seq = plane.engine.post_batch(arrays, stage=Stage.PROPOSE)
    plane.whole(seq, range(MANY))
    answer = plane.first(seq, range(MANY))
    assert answer.forced[::2].tolist() == [[7, 8, -1]] * (MANY // 2)
    assert answer.kinds[::2].tolist() == [[FORCED, FORCED, DEFER]] * (MANY // 2)
    assert answer.forced[1::2].tolist() == [[-1] * 3] * (MANY // 2)
    # Counted after the publication.
    until(lambda: plane.worker.stats()["batched_records"] == before["batched_records"] + MANY)
    assert plane.worker.stats()["proposed_tokens"] == MANY
    assert (plane.worker.stats()["filled_rows"], filler.fills) == (before["filled_rows"], fills)
