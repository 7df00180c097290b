"""WorkQueues with a fake delegate: which thread works, when the lead changes, which tasks are reported late."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from grammar_service.fill.work_queues import RETRY_S, WorkQueues

PATIENCE_S = 20.0
"""Used up by a failing test alone, on however busy a machine."""


class FakeTask:
    """A task that ends when its gate opens."""

    def __init__(self, *slots: int) -> None:
        self.slots, self.rest = slots, list[FakeTask]()
        self.begun, self.gate = threading.Event(), threading.Event()
        self.meet: threading.Barrier | None = None
        self.met = threading.Event()

    def __call__(self) -> list[FakeTask]:
        self.begun.set()
        assert self.gate.wait(10 * PATIENCE_S)
        if self.meet is not None:
            self.meet.wait(PATIENCE_S)
            self.met.set()
        return self.rest

    def replaces(self, other: object) -> bool:
        return False


class FakeDelegate:
    """Calls a leader overdue as soon as it is away from `wait`, unless `patient` is set."""

    def __init__(self) -> None:
        self.queues: WorkQueues
        self.arrived: collections.deque[list[FakeTask]] = collections.deque()
        self.reported_late: list[FakeTask] = []
        self.replacements: list[FakeTask] = []
        self.patient = True
        self.time_left = False
        self.began: list[FakeTask] = []
        self.num_helpers = 0
        self._away = False

    def wait(self) -> int:
        self._away = False
        time.sleep(0.001)
        self._away = True
        return 0

    def handle(self, newest: int) -> None:
        while self.arrived:
            for task in self.arrived.popleft():
                self.queues.put(task)
            self.queues.call_helpers(self.num_helpers)

    def overdue(self, timeout_s: float) -> bool:
        time.sleep(0.001)
        return self._away and not self.patient

    def leader_changed(self) -> None:
        self._away = True

    def begins(self, task: FakeTask) -> None:
        self.began.append(task)

    def has_time_left(self) -> bool:
        return self.time_left

    def part(self, task: FakeTask, slots: list[int]) -> list[FakeTask]:
        task.slots = tuple(slot for slot in task.slots if slot not in slots)
        parts = [FakeTask(slot) for slot in slots]
        for part in parts:
            part.gate.set()
        return parts

    def abandon(self, task: FakeTask) -> list[FakeTask]:
        return self.replacements

    def late(self, task: FakeTask) -> None:
        self.reported_late.append(task)


@pytest.fixture
def delegate() -> Iterator[FakeDelegate]:
    delegate = FakeDelegate()
    delegate.queues = WorkQueues(2, delegate)  # type: ignore[arg-type]
    delegate.queues.start()
    yield delegate
    assert delegate.queues.stop(PATIENCE_S)


def test_called_helpers_do_tasks_beside_a_leader_that_is_not_late() -> None:
    """One idle thread keeps the watch, so three threads do two tasks at once."""
    delegate = FakeDelegate()
    delegate.queues = WorkQueues(3, delegate)  # type: ignore[arg-type]
    # Without the call the third thread would look for tasks when the test has failed.
    delegate.queues.idle_wait_s = 10 * PATIENCE_S
    delegate.queues.start()
    tasks = [FakeTask(0, 1), FakeTask(2, 3)]
    for task in tasks:
        task.gate.set()
    together = threading.Barrier(2)
    for task in tasks:
        task.meet = together
    delegate.num_helpers = 1
    delegate.arrived.append(tasks)
    try:
        for task in tasks:
            assert task.met.wait(PATIENCE_S)
        assert delegate.queues.leader_handoffs == 0
        behind = FakeTask(0)
        behind.gate.set()
        delegate.arrived.append([behind])
        assert behind.begun.wait(PATIENCE_S)
    finally:
        assert delegate.queues.stop(PATIENCE_S)


def test_a_helper_that_gets_the_lead_keeps_the_time_of_its_task() -> None:
    """The leader has nothing left to do, and the helper's task of several slots is not late for that."""
    delegate = FakeDelegate()
    delegate.queues = WorkQueues(3, delegate)  # type: ignore[arg-type]
    delegate.queues.start()
    tasks = [FakeTask(0, 1), FakeTask(2, 3)]
    delegate.num_helpers = 1
    delegate.arrived.append(tasks)
    try:
        for task in tasks:
            assert task.begun.wait(PATIENCE_S)
        _until(lambda: len(delegate.began) == 1)
        (first,) = delegate.began
        first.gate.set()
        (other,) = (task for task in tasks if task is not first)
        _until(lambda: delegate.began == [first, other])
    finally:
        for task in tasks:
            task.gate.set()
        assert delegate.queues.stop(PATIENCE_S)


def test_a_task_that_waited_behind_a_slow_one_is_overdue_from_its_beginning(delegate: FakeDelegate) -> None:
    slow, behind, neighbour = FakeTask(0), FakeTask(0), FakeTask(1)
    neighbour.gate.set()
    delegate.patient = False
    delegate.arrived.append([slow])
    try:
        _until(lambda: slow in delegate.reported_late)
        delegate.arrived.append([behind, neighbour])
        assert neighbour.begun.wait(PATIENCE_S)
        delegate.patient = True  # the lead does not change from here
        assert delegate.queues.stuck_s() > 0
        slow.gate.set()
        assert behind.begun.wait(PATIENCE_S)
        assert delegate.queues.stuck_s() > 0
    finally:
        slow.gate.set()
        behind.gate.set()
    _until(lambda: delegate.queues.stuck_s() == 0)


def test_a_task_that_has_not_begun_is_not_late_while_it_has_time_left(delegate: FakeDelegate) -> None:
    stuck, others = [FakeTask(0), FakeTask(1)], [FakeTask(2)]
    others[0].gate.set()
    delegate.patient, delegate.time_left = False, True
    delegate.arrived.append([*stuck, *others])
    try:
        # Both threads are stuck, so the third task does not begin whichever thread leads.
        _until(lambda: stuck[1].begun.is_set() and delegate.queues.leader_handoffs >= 1)
        assert others[0] not in delegate.reported_late
    finally:
        for task in stuck:
            task.gate.set()
    assert others[0].begun.wait(PATIENCE_S)
    assert others[0] not in delegate.reported_late


def test_the_time_of_a_leader_restarts_with_each_task() -> None:
    delegate = FakeDelegate()
    # Alone: no other thread takes a task of the leader's.
    delegate.queues = WorkQueues(1, delegate)  # type: ignore[arg-type]
    delegate.queues.start()
    tasks = [FakeTask(slot) for slot in range(5)]
    for task in tasks:
        task.gate.set()
    delegate.arrived.append(tasks)
    try:
        _until(lambda: delegate.began == tasks)
    finally:
        assert delegate.queues.stop(PATIENCE_S)


def test_a_task_of_several_slots_releases_them_together_and_its_rest_comes_next(delegate: FakeDelegate) -> None:
    together, rest, behind = FakeTask(0, 1, 2), FakeTask(1), FakeTask(1)
    together.rest = [rest]
    rest.gate.set()
    behind.gate.set()
    delegate.arrived.append([together])
    try:
        assert together.begun.wait(PATIENCE_S)
        delegate.patient = False
        _until(lambda: together in delegate.reported_late)
        delegate.arrived.append([behind])
        _until(lambda: behind in delegate.reported_late)
        assert not behind.begun.is_set()
    finally:
        together.gate.set()
    assert rest.begun.wait(PATIENCE_S)
    assert behind.begun.wait(PATIENCE_S)


def test_a_task_of_several_slots_leaves_out_slots_with_a_task_in_hand(delegate: FakeDelegate) -> None:
    stuck, together = FakeTask(1), FakeTask(0, 1, 2)
    together.gate.set()
    delegate.patient = False
    delegate.arrived.append([stuck])
    try:
        _until(lambda: stuck in delegate.reported_late)
        delegate.arrived.append([together])
        assert together.begun.wait(PATIENCE_S)
        assert together.slots == (0, 2)
        # The part of the busy slot waits in its queue and is reported late.
        _until(lambda: [task.slots for task in delegate.reported_late].count((1,)) >= 2)
    finally:
        stuck.gate.set()


def test_a_task_of_several_slots_that_hangs_loses_them(delegate: FakeDelegate) -> None:
    stuck, replacements = FakeTask(0, 1), [FakeTask(0), FakeTask(1)]
    for task in replacements:
        task.gate.set()
    delegate.replacements, delegate.patient = replacements, False
    delegate.arrived.append([stuck])
    try:
        _until(lambda: stuck in delegate.reported_late)
        delegate.queues.abandon_stuck(0.0)
        assert all(task.begun.wait(PATIENCE_S) for task in replacements)
        assert delegate.queues.stuck_s() > 0
        # The hanging thread is replaced by a new one.
        one = FakeTask(5)
        delegate.arrived.append([one])
        assert one.begun.wait(PATIENCE_S)
        one.gate.set()
    finally:
        stuck.gate.set()
    _until(lambda: delegate.queues.stuck_s() == 0)


class ReadingDelegate(FakeDelegate):
    """Its `handle` blocks until the gate opens, and the leader is overdue meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.reads, self.gate = threading.Event(), threading.Event()

    def handle(self, newest: int) -> None:
        self.reads.set()
        assert self.gate.wait(10 * PATIENCE_S)

    def overdue(self, timeout_s: float) -> bool:
        self.looks += 1
        return True


def test_a_thread_that_stands_by_leaves_the_interpreter_to_a_leader_that_reads() -> None:
    delegate = ReadingDelegate()
    delegate.queues = WorkQueues(3, delegate)  # type: ignore[arg-type]
    delegate.queues.start()
    try:
        assert delegate.reads.wait(PATIENCE_S)
        since_s, looks = time.monotonic(), delegate.looks
        _until(lambda: time.monotonic() > since_s + 20 * RETRY_S)
        assert delegate.looks - looks <= (time.monotonic() - since_s) / RETRY_S + 1
        assert delegate.queues.leader_handoffs == 0
    finally:
        delegate.gate.set()
        assert delegate.queues.stop(PATIENCE_S)


def _until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.001)
