"""Lanes with a crew that does as it is told: who works, who is relieved, who is told that it is late."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from grammar_service.lanes import LOOK_AGAIN_S, Lanes

PATIENCE_S = 20.0
"""Used up by a failing test alone, on however busy a machine."""


class Piece:
    """Work that ends when it is let."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self.begun, self.gate = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.gate.wait(10 * PATIENCE_S)

    def replaces(self, other: object) -> bool:
        return False


class FakeCrew:
    """A leader is overdue as soon as it is away from `wait`, once `patient` is over."""

    def __init__(self) -> None:
        self.lanes: Lanes
        self.came: collections.deque[list[Piece]] = collections.deque()
        self.told: list[Piece] = []
        self.patient = True
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

    def late(self, work: Piece) -> None:
        self.told.append(work)


@pytest.fixture
def crew() -> Iterator[FakeCrew]:
    crew = FakeCrew()
    crew.lanes = Lanes(2, crew)  # type: ignore[arg-type]
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
        _until(lambda: crew.lanes.reliefs >= 1 and all(piece.begun.is_set() for piece in others))
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
    crew.lanes = Lanes(3, crew)  # type: ignore[arg-type]
    crew.lanes.start()
    try:
        assert crew.reads.wait(PATIENCE_S)
        since_s, looks = time.monotonic(), crew.looks
        _until(lambda: time.monotonic() > since_s + 20 * LOOK_AGAIN_S)
        assert crew.looks - looks <= (time.monotonic() - since_s) / LOOK_AGAIN_S + 1
        assert crew.lanes.reliefs == 0
    finally:
        crew.gate.set()
        assert crew.lanes.stop(PATIENCE_S)


def _until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.001)
