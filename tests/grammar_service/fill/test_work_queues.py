"""WorkQueues with a crew that does as it is told: who works, who is relieved, who is told that it is late."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from grammar_service.fill.work_queues import LOOK_AGAIN_S, WorkQueues

PATIENCE_S = 20.0
"""Used up by a failing test alone, on however busy a machine."""


class Piece:
    """Work that ends when it is let."""

    def __init__(self, *lanes: int) -> None:
        self.lanes, self.left = lanes, list[Piece]()
        self.begun, self.gate = threading.Event(), threading.Event()

    def __call__(self) -> list[Piece]:
        self.begun.set()
        assert self.gate.wait(10 * PATIENCE_S)
        return self.left

    def replaces(self, other: object) -> bool:
        return False


class FakeCrew:
    """A leader is overdue as soon as it is away from `wait`, once `patient` is over."""

    def __init__(self) -> None:
        self.lanes: WorkQueues
        self.came: collections.deque[list[Piece]] = collections.deque()
        self.told: list[Piece] = []
        self.instead: list[Piece] = []
        self.patient = True
        self.waits = False
        self.began: list[Piece] = []
        self._away = False

    def wait(self) -> int:
        self._away = False
        time.sleep(0.001)
        self._away = True
        return 0

    def handle(self, news: int) -> None:
        while self.came:
            for piece in self.came.popleft():
                self.lanes.put(piece)

    def overdue(self, timeout_s: float) -> bool:
        time.sleep(0.001)
        return self._away and not self.patient

    def relieved(self) -> None:
        self._away = True

    def begins(self, work: Piece) -> None:
        self.began.append(work)

    def keeps_waiting(self) -> bool:
        return self.waits

    def parted(self, work: Piece, lanes: list[int]) -> list[Piece]:
        work.lanes = tuple(lane for lane in work.lanes if lane not in lanes)
        parts = [Piece(lane) for lane in lanes]
        for part in parts:
            part.gate.set()
        return parts

    def abandon(self, work: Piece) -> list[Piece]:
        return self.instead

    def late(self, work: Piece) -> None:
        self.told.append(work)


@pytest.fixture
def crew() -> Iterator[FakeCrew]:
    crew = FakeCrew()
    crew.lanes = WorkQueues(2, crew)  # type: ignore[arg-type]
    crew.lanes.start()
    yield crew
    assert crew.lanes.stop(PATIENCE_S)


def test_work_that_is_slow_is_told_whoever_does_it(crew: FakeCrew) -> None:
    first, second = Piece(0), Piece(1)
    crew.came.append([first, second])
    try:
        assert first.begun.wait(PATIENCE_S)
        # The other thread helps.
        assert second.begun.wait(PATIENCE_S)
        crew.patient = False
        first.gate.set()
        _until(lambda: second in crew.told)
    finally:
        first.gate.set()
        second.gate.set()


def test_a_leader_that_is_stuck_is_relieved_and_stands_by_behind_it(crew: FakeCrew) -> None:
    stuck, others = Piece(0), [Piece(lane) for lane in range(1, 4)]
    for piece in others:
        piece.gate.set()
    crew.patient = False
    crew.came.append([stuck, *others])
    try:
        _until(lambda: crew.lanes.leader_handoffs >= 1 and all(piece.begun.is_set() for piece in others))
        assert crew.told[0] is stuck
    finally:
        stuck.gate.set()
    behind = Piece(0)
    behind.gate.set()
    crew.came.append([behind])
    assert behind.begun.wait(PATIENCE_S)


def test_time_runs_for_what_waited_behind_slow_work_too(crew: FakeCrew) -> None:
    slow, behind, neighbour = Piece(0), Piece(0), Piece(1)
    neighbour.gate.set()
    crew.patient = False
    crew.came.append([slow])
    try:
        _until(lambda: slow in crew.told)
        crew.came.append([behind, neighbour])
        assert neighbour.begun.wait(PATIENCE_S)
        crew.patient = True  # nobody is relieved from here
        assert crew.lanes.stuck_s() > 0
        slow.gate.set()
        assert behind.begun.wait(PATIENCE_S)
        assert crew.lanes.stuck_s() > 0
    finally:
        slow.gate.set()
        behind.gate.set()
    _until(lambda: crew.lanes.stuck_s() == 0)


def test_what_was_not_begun_is_not_told_while_it_has_time(crew: FakeCrew) -> None:
    stuck, others = [Piece(0), Piece(1)], [Piece(2)]
    others[0].gate.set()
    crew.patient, crew.waits = False, True
    crew.came.append([*stuck, *others])
    try:
        # Two threads, both stuck: what waits behind them is not begun, whoever was relieved.
        _until(lambda: stuck[1].begun.is_set() and crew.lanes.leader_handoffs >= 1)
        assert others[0] not in crew.told
    finally:
        for piece in stuck:
            piece.gate.set()
    assert others[0].begun.wait(PATIENCE_S)
    assert others[0] not in crew.told


def test_a_leader_counts_time_for_each_piece(crew: FakeCrew) -> None:
    pieces = [Piece(lane) for lane in range(5)]
    for piece in pieces:
        piece.gate.set()
    crew.came.append(pieces)
    _until(lambda: crew.began == pieces)


def test_work_in_several_lanes_gives_them_free_together_and_leaves_what_it_could_not_do(crew: FakeCrew) -> None:
    together, left, behind = Piece(0, 1, 2), Piece(1), Piece(1)
    together.left = [left]
    left.gate.set()
    behind.gate.set()
    crew.came.append([together])
    try:
        assert together.begun.wait(PATIENCE_S)
        crew.patient = False
        _until(lambda: together in crew.told)
        crew.came.append([behind])
        _until(lambda: behind in crew.told)
        assert not behind.begun.is_set()
    finally:
        together.gate.set()
    assert left.begun.wait(PATIENCE_S)
    assert behind.begun.wait(PATIENCE_S)


def test_work_in_several_lanes_leaves_out_those_that_are_held(crew: FakeCrew) -> None:
    stuck, together = Piece(1), Piece(0, 1, 2)
    together.gate.set()
    crew.patient = False
    crew.came.append([stuck])
    try:
        _until(lambda: stuck in crew.told)
        crew.came.append([together])
        assert together.begun.wait(PATIENCE_S)
        assert together.lanes == (0, 2)
        # Its part in the lane that is held waits there, and is told.
        _until(lambda: [piece.lanes for piece in crew.told].count((1,)) >= 2)
    finally:
        stuck.gate.set()


def test_work_in_several_lanes_that_does_not_end_gives_them_up(crew: FakeCrew) -> None:
    stuck, instead = Piece(0, 1), [Piece(0), Piece(1)]
    for piece in instead:
        piece.gate.set()
    crew.instead, crew.patient = instead, False
    crew.came.append([stuck])
    try:
        _until(lambda: stuck in crew.told)
        crew.lanes.give_up(0.0)
        assert all(piece.begun.wait(PATIENCE_S) for piece in instead)
        assert crew.lanes.stuck_s() > 0
        # Its thread is lost for now; another one has come.
        one = Piece(5)
        crew.came.append([one])
        assert one.begun.wait(PATIENCE_S)
        one.gate.set()
    finally:
        stuck.gate.set()
    _until(lambda: crew.lanes.stuck_s() == 0)


class Reading(FakeCrew):
    """Reads until it is let, and is over its time all the while."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.reads, self.gate = threading.Event(), threading.Event()

    def handle(self, news: int) -> None:
        self.reads.set()
        assert self.gate.wait(10 * PATIENCE_S)

    def overdue(self, timeout_s: float) -> bool:
        self.looks += 1
        return True


def test_who_stands_by_leaves_the_interpreter_to_a_leader_that_reads() -> None:
    crew = Reading()
    crew.lanes = WorkQueues(3, crew)  # type: ignore[arg-type]
    crew.lanes.start()
    try:
        assert crew.reads.wait(PATIENCE_S)
        since_s, looks = time.monotonic(), crew.looks
        _until(lambda: time.monotonic() > since_s + 20 * LOOK_AGAIN_S)
        assert crew.looks - looks <= (time.monotonic() - since_s) / LOOK_AGAIN_S + 1
        assert crew.lanes.leader_handoffs == 0
    finally:
        crew.gate.set()
        assert crew.lanes.stop(PATIENCE_S)


def _until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.001)
