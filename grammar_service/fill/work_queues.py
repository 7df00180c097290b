"""Threads that share one worker's tasks: one thread leads; when it is slow, another takes the lead over.

The leader waits for records and does their tasks itself, so a quick step costs no hand-over between threads. When the
leader has been away from `wait` for too long, an idle thread takes the lead: it reports the late tasks and
goes on with the others, while the slow thread finishes its task and then helps or becomes idle. Where a sequence has
several large tasks, the leader calls idle threads to help (`call_helpers`), so that one core runs Python while another
is inside a library.

Invariant: one thread leads, and it waits for records only when no other thread has a task in hand that may still become
late. One thread at a time works on a slot, in the order of `put`. A slow slot holds one thread and no other slot.

Not responsible for: what the tasks do (see worker.py).
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

from service_runtime.threads import OS_THREADS, Thread, Threads

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05
"""Interval at which an idle thread checks whether it must end."""
RETRY_S = 0.0005
"""Pause of a thread that finds the leader overdue without a task in hand: the leader reads, or waits for the GIL."""


class Task(Protocol):
    """A task of one slot, or of several slots at once."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Its slots. No other task works on them from its beginning to its end."""

    def __call__(self) -> Sequence[Task]:
        """Do the task; must not raise. Returns the rest of a task of several slots, as tasks of one slot each."""

    def replaces(self, other: Task) -> bool:
        """Return whether `other`, the last task in the slot's queue, need not be done before this one."""


class WorkDelegate(Protocol):
    """The owner of the tasks. The leading thread calls `wait` and `handle`; `late` is called under the queues' lock."""

    def wait(self) -> int:
        """Wait a bounded time for records; return the value to pass to `handle`."""

    def handle(self, newest: int) -> None:
        """Put the tasks that arrived. Must be quick: another thread cannot take the lead meanwhile."""

    def overdue(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the leader to be away from `wait` for too long."""

    def leader_changed(self) -> None:
        """Restart the time of the leader."""

    def begins(self, task: Task) -> None:
        """Restart the time of the leader, which begins this task, within the limits of the sequence."""

    def has_time_left(self) -> bool:
        """Return whether tasks that have not begun are on time, however long the tasks before them took."""

    def late(self, task: Task) -> None:
        """Report a task that was not done in time."""

    def part(self, task: Task, slots: Sequence[int]) -> Sequence[Task]:
        """Take `slots` out of a task of several slots; return them as tasks of one slot each."""

    def abandon(self, task: Task) -> Sequence[Task]:
        """Return the tasks that replace a task of several slots that hangs; () if it is about to end after all."""


class WorkQueues:
    """`num_threads` daemon threads and the queues of the slots. With two threads or more, a slow slot is harmless."""

    idle_wait_s: float = IDLE_WAIT_S

    def __init__(self, num_threads: int, delegate: WorkDelegate, threads: Threads = OS_THREADS) -> None:
        self._os = threads
        self.lock = threads.lock()
        """Guards everything below, and what the delegate guards by it."""
        self._delegate = delegate
        self._todo: collections.deque[Task] = collections.deque()
        """Tasks that have not begun, in order."""
        self._busy: dict[int, Task] = {}
        """Slot -> its task in hand."""
        self._waiting: dict[int, collections.deque[Task]] = {}
        """Slot -> the tasks that wait after its task in hand; absent if there are none."""
        self._in_hand: dict[Task, Thread] = {}
        """Task in hand -> its thread, while the task is not known to be late."""
        self._abandoned: set[Task] = set()
        """Tasks in hand that lost their slots."""
        self._passed_over: set[Task] = set()
        """Tasks that the last change of leaders found not begun. A slow neighbour held them up; they may be quick."""
        self._idle = True
        """The leader waits for records or reads them. It has no task in hand, and no other thread takes the lead."""
        self._leader: Thread
        self._watch = threads.lock()
        """Held by the thread that watches the leader."""
        self._called = threads.condition(self.lock)
        """The other idle threads wait here until the watch is free, or their help is wanted."""
        self._overdue_since_s: dict[Task, float] = {}
        """Task in hand -> `Threads.monotonic()` when it was found overdue."""
        self._stopping = threads.event()
        self.leader_handoffs = 0
        self.error: BaseException | None = None
        """Why the threads ended, if `stop` was not the reason."""
        self._threads = [self._thread(i) for i in range(num_threads)]

    def _thread(self, number: int) -> Thread:
        return self._os.thread(self._run, f"lockstep-grammar-{number}")

    def start(self) -> None:
        """Start the threads. Once."""
        self._leader = self._threads[0]
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End each thread after the task in its hand. False: a thread did not end in time."""
        self._stopping.set()
        with self.lock:
            self._called.notify_all()
        deadline = self._os.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - self._os.monotonic()))
        return not self.alive

    @property
    def alive(self) -> bool:
        """Whether any thread runs."""
        return any(thread.is_alive() for thread in self._threads)

    def put(self, task: Task) -> None:
        """Append a task, which is done after the earlier tasks of its slots. Only the leader puts tasks."""
        with self.lock:
            self._todo.append(task)

    def call_helpers(self, count: int) -> None:
        """Let at most `count` idle threads do tasks in addition to the leader. One of them always watches."""
        if count > 0:
            with self.lock:
                self._called.notify(count)

    def stuck_s(self) -> float:
        """Return how long the slowest task in hand is overdue, in seconds; 0: none is."""
        since_s = list(self._overdue_since_s.values())
        return self._os.monotonic() - min(since_s) if since_s else 0.0

    def abandon_stuck(self, after_s: float) -> None:
        """Release the slots of tasks of several slots that are overdue for `after_s`: one slot holds up the others."""
        if not self._overdue_since_s:
            return
        with self.lock:
            until_s = self._os.monotonic() - after_s
            for task, since_s in self._overdue_since_s.items():
                if len(task.slots) == 1 or since_s > until_s or task in self._abandoned:
                    continue
                if replacements := self._delegate.abandon(task):
                    self._abandoned.add(task)
                    self._release(task, replacements)
                    # The slow slot will occupy a whole thread.
                    self._threads.append(self._thread(len(self._threads)))
                    self._threads[-1].start()

    def _release(self, task: Task, rest: Sequence[Task]) -> None:
        """Release the slots of a task. The rest of the task comes next, then the tasks that waited after it."""
        waiting: list[Task] = []
        for slot in task.slots:
            del self._busy[slot]
            waiting += self._waiting.pop(slot, ())
        self._todo.extendleft(reversed([*rest, *waiting]))

    def superseded(self, slot: int) -> bool:
        """Return whether a newer task waits after the slot's task in hand."""
        return slot in self._waiting

    def _run(self) -> None:
        me = self._os.current()
        try:
            while not self._stopping.is_set():
                if (task := self._next(me)) is not None:
                    if not self._do(task):
                        return
                elif self._leader is me:
                    self._delegate.handle(self._delegate.wait())
                else:
                    self._stand_by(me)
        except BaseException as error:
            self.error = error
            self._stopping.set()
            logger.exception("the threads that fill mask rows ended")

    def _next(self, me: Thread) -> Task | None:
        """Take a task. None: no task is left, and a leader is idle from now on or has passed the lead on."""
        with self.lock:
            leads = self._leader is me
            while self._todo:
                task = self._todo.popleft()
                if not self._busy.keys().isdisjoint(task.slots):
                    held = [slot for slot in task.slots if slot in self._busy]
                    single = len(task.slots) == 1
                    for part in (task,) if single else self._delegate.part(task, held):
                        self._wait_behind(part)
                    if single or not task.slots:
                        continue
                self._busy.update(dict.fromkeys(task.slots, task))
                self._in_hand[task] = me
                if leads:
                    self._idle = False
                    self._delegate.begins(task)
                return task
            if leads and self._in_hand:
                # Only the leader is watched, so a thread with a task in hand has to lead; this thread becomes idle.
                task, self._leader = next(iter(self._in_hand.items()))
                self._delegate.leader_changed()
                if len(task.slots) > 1:
                    # A task of several slots has more time than one of a single slot.
                    self._delegate.begins(task)
            elif leads:
                self._idle = True
            return None

    def _wait_behind(self, task: Task) -> None:
        # The slot's task in hand is slow, or the slot would be free: this task is reported late now.
        waiting = self._waiting.setdefault(task.slots[0], collections.deque())
        if waiting and task.replaces(waiting[-1]):
            waiting.pop()
        waiting.append(task)
        self._delegate.late(task)

    def _do(self, task: Task) -> bool:
        """Do a task and the tasks that wait after it. False: another thread has replaced this one."""
        while True:
            rest = task()
            with self.lock:
                self._in_hand.pop(task, None)
                self._overdue_since_s.pop(task, None)
                if task in self._abandoned:
                    self._abandoned.discard(task)
                    return False
                if rest or len(task.slots) > 1:
                    self._release(task, rest)
                    return True
                (slot,) = task.slots
                if (waiting := self._waiting.get(slot)) is None:
                    del self._busy[slot]
                    return True
                # The next task was reported late when it came to this queue, so it is overdue from its beginning.
                task = self._busy[slot] = waiting.popleft()
                if not waiting:
                    del self._waiting[slot]
                self._overdue_since_s[task] = self._os.monotonic()

    def _stand_by(self, me: Thread) -> None:
        """Watch the leader, or wait until the watch is free or help is wanted."""
        if self._watch.acquire(blocking=False):
            try:
                self._watch_leader(me)
            finally:
                self._watch.release()
                with self.lock:
                    self._called.notify()
            return
        with self.lock:
            # Tasks that came since this thread looked were announced before it listens.
            if self._watch.locked() and not self._todo:
                self._called.wait(self.idle_wait_s)

    def _watch_leader(self, me: Thread) -> None:
        if not self._delegate.overdue(IDLE_WAIT_S) or self._stopping.is_set():
            return
        with self.lock:
            if not self._idle:
                self._leader = me
                self.leader_handoffs += 1
                self._delegate.leader_changed()
                for task in self._overdue():
                    self._delegate.late(task)
                return
        self._os.sleep(RETRY_S)

    def _overdue(self) -> Iterator[Task]:
        """Yield the tasks in hand, and the tasks that have not begun since an earlier change of leaders."""
        self._in_hand.clear()
        for task in dict.fromkeys(self._busy.values()):
            self._overdue_since_s.setdefault(task, self._os.monotonic())
            yield task
        for waiting in self._waiting.values():
            yield from waiting
        if not self._delegate.has_time_left():
            yield from (task for task in self._todo if task in self._passed_over)
            self._passed_over = set(self._todo)

    def __repr__(self) -> str:
        return (
            f"<WorkQueues threads={len(self._threads)} busy={len(self._busy)} leader_handoffs={self.leader_handoffs}>"
        )
