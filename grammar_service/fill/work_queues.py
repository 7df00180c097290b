"""Threads that share one worker's job: one leads, the others stand by, and a leader that is stuck is relieved.

The leader waits for records and does their work itself, so a step that is quick costs no hand-over. When it has been
away from `wait` for too long, whoever stands by takes the lead: it tells what is late and goes on with the rest, while
the thread that is stuck finishes its lane and then helps or stands by. Invariant: one thread leads, and it waits only
when no other one has work in hand that might still become late; one thread works in a lane at a time, in the order of
`put`; a slow lane holds one thread and nothing else. Not here: what the work is (worker).
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

logger = logging.getLogger(__name__)

STAND_BY_S = 0.05
"""A thread that stands by looks this often whether it shall end."""
LOOK_AGAIN_S = 0.0005
"""After a leader that is over its time and has no work in hand: it reads, or waits for the interpreter."""


class Work(Protocol):
    """A piece of work in a lane, or in several at once."""

    @property
    def lanes(self) -> tuple[int, ...]:
        """Which; they are its own from its beginning to its end."""

    def __call__(self) -> Sequence[Work]:
        """Do it; must not raise. Return what is left of a piece in several lanes, of one lane each."""

    def replaces(self, other: Work) -> bool:
        """Say whether `other`, the last that waits in the lane, need not be done before this."""


class WorkDelegate(Protocol):
    """Whose work it is. The leading thread calls `wait` and `handle`; `late` is called with `WorkQueues.lock` held."""

    def wait(self) -> int:
        """Wait for work, a bounded time; return what `handle` is told."""

    def handle(self, news: int) -> None:
        """Put the work that came. Quick: the leader is not relieved in here."""

    def overdue(self, timeout_s: float) -> bool:
        """Wait at most so long for the leader to be away from `wait` for too long."""

    def relieved(self) -> None:
        """The lead has changed hands; count the time anew."""

    def begins(self, work: Work) -> None:
        """The leader begins this piece of work; time runs for it alone, within reason."""

    def keeps_waiting(self) -> bool:
        """Say whether work that was not begun is not late yet, however long its neighbours took."""

    def late(self, work: Work) -> None:
        """This piece of work was not done in time."""

    def parted(self, work: Work, lanes: Sequence[int]) -> Sequence[Work]:
        """Take lanes out of a piece of work in several lanes, and return what that leaves, of one lane each."""

    def abandon(self, work: Work) -> Sequence[Work]:
        """A piece of work in several lanes does not end. Return what to do in its place, or () if it will end."""


class WorkQueues:
    """`threads` daemon threads, at least two of which make a stuck leader harmless."""

    def __init__(self, threads: int, crew: WorkDelegate) -> None:
        self.lock = threading.Lock()
        """Guards everything below, and what `WorkDelegate` guards by it."""
        self._crew = crew
        self._todo: collections.deque[Work] = collections.deque()
        self._busy: dict[int, collections.deque[Work]] = {}
        """WorkQueues that a thread works in: first what it does, then what waits behind that."""
        self._hands: dict[Work, threading.Thread] = {}
        """Work in hand -> who does it, while nobody was told that it is late."""
        self._abandoned: set[Work] = set()
        """In hand, and no longer in any lane."""
        self._left: set[Work] = set()
        """What the last relief found not begun: held up by a neighbour, and perhaps quick."""
        self._idle = True
        """The leader waits for records or reads them; it has no work in hand, and is not relieved."""
        self._leader: threading.Thread
        self._watch = threading.Lock()
        """Held by the one that looks at the leader; the others queue here."""
        self._begun_s: dict[Work, float] = {}
        """Work in hand -> `time.monotonic()` when it was found overdue."""
        self._stopping = threading.Event()
        self.leader_handoffs = 0
        self.error: BaseException | None = None
        """Why the threads ended, when they ended by themselves."""
        self._threads = [self._thread(i) for i in range(threads)]

    def _thread(self, number: int) -> threading.Thread:
        return threading.Thread(target=self._run, name=f"lockstep-grammar-{number}", daemon=True)

    def start(self) -> None:
        """Start the threads. Once."""
        self._leader = self._threads[0]
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End each thread after what it is doing. False when one did not end in time."""
        self._stopping.set()
        give_up = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, give_up - time.monotonic()))
        return not self.alive

    @property
    def alive(self) -> bool:
        """Some thread runs."""
        return any(thread.is_alive() for thread in self._threads)

    def put(self, work: Work) -> None:
        """Have `work` done after what is in its lane. The leader alone puts."""
        with self.lock:
            self._todo.append(work)

    def stuck_s(self) -> float:
        """Return how long the slowest piece of work is overdue; 0: none is."""
        begun_s = list(self._begun_s.values())
        return time.monotonic() - min(begun_s) if begun_s else 0.0

    def give_up(self, after_s: float) -> None:
        """Free the lanes of work in several lanes that is overdue for so long: one of them holds the others."""
        if not self._begun_s:
            return
        with self.lock:
            until_s = time.monotonic() - after_s
            for work, begun_s in self._begun_s.items():
                if len(work.lanes) == 1 or begun_s > until_s or work in self._abandoned:
                    continue
                if instead := self._crew.abandon(work):
                    self._abandoned.add(work)
                    self._free(work, instead)
                    # What made it slow will hold a thread for itself.
                    self._threads.append(self._thread(len(self._threads)))
                    self._threads[-1].start()

    def _free(self, work: Work, left: Sequence[Work]) -> None:
        """Give the lanes of a piece of work free: what is left of it comes next, then what waits behind it."""
        waiting: list[Work] = []
        for lane in work.lanes:
            behind = self._busy.pop(lane)
            behind.popleft()
            waiting += behind
        self._todo.extendleft(reversed([*left, *waiting]))

    def superseded(self, lane: int) -> bool:
        """Return whether something waits behind the work of a lane."""
        return len(self._busy[lane]) > 1

    def _run(self) -> None:
        me = threading.current_thread()
        try:
            while not self._stopping.is_set():
                if (work := self._next(me)) is not None:
                    if not self._do(work):
                        return
                elif self._leader is me:
                    self._crew.handle(self._crew.wait())
                else:
                    self._stand_by(me)
        except BaseException as error:
            self.error = error
            self._stopping.set()
            logger.exception("the grammar worker ended")

    def _next(self, me: threading.Thread) -> Work | None:
        """Begin a piece of work. None: there is none; a leader is idle from here, or leads no more."""
        with self.lock:
            leads = self._leader is me
            while self._todo:
                work = self._todo.popleft()
                if held := [lane for lane in work.lanes if lane in self._busy]:
                    alone = len(work.lanes) == 1
                    for part in (work,) if alone else self._crew.parted(work, held):
                        self._wait_behind(part)
                    if alone or not work.lanes:
                        continue
                for lane in work.lanes:
                    self._busy[lane] = collections.deque((work,))
                self._hands[work] = me
                if leads:
                    self._idle = False
                    self._crew.begins(work)
                return work
            if leads and self._hands:
                # Only a leader is watched: one who helps goes on as that, and `me` stands by.
                self._leader = next(iter(self._hands.values()))
                self._crew.relieved()
            elif leads:
                self._idle = True
            return None

    def _wait_behind(self, work: Work) -> None:
        # Its lane is stuck, or it would be free: whoever waits for this is told now.
        waiting = self._busy[work.lanes[0]]
        if len(waiting) > 1 and work.replaces(waiting[-1]):
            waiting.pop()
        waiting.append(work)
        self._crew.late(work)

    def _do(self, work: Work) -> bool:
        """Do it, and what waits behind it. False: another thread has taken this one's place."""
        while True:
            left = work()
            with self.lock:
                self._hands.pop(work, None)
                self._begun_s.pop(work, None)
                if work in self._abandoned:
                    self._abandoned.discard(work)
                    return False
                if left or len(work.lanes) > 1:
                    self._free(work, left)
                    return True
                waiting = self._busy[work.lanes[0]]
                waiting.popleft()
                if not waiting:
                    del self._busy[work.lanes[0]]
                    return True
                # Whoever waits for it was told when it came in here: it is overdue as it begins.
                work = waiting[0]
                self._begun_s[work] = time.monotonic()

    def _stand_by(self, me: threading.Thread) -> None:
        if not self._watch.acquire(timeout=STAND_BY_S):
            return
        try:
            if not self._crew.overdue(STAND_BY_S) or self._stopping.is_set():
                return
            with self.lock:
                if not self._idle:
                    self._leader = me
                    self.leader_handoffs += 1
                    self._crew.relieved()
                    for work in self._overdue():
                        self._crew.late(work)
                    return
            time.sleep(LOOK_AGAIN_S)
        finally:
            self._watch.release()

    def _overdue(self) -> Iterator[Work]:
        """What was begun and did not end; of what was not begun, what another relief has found so before."""
        self._hands.clear()
        for waiting in self._busy.values():
            self._begun_s.setdefault(waiting[0], time.monotonic())
            yield from waiting
        if not self._crew.keeps_waiting():
            yield from (work for work in self._todo if work in self._left)
            self._left = set(self._todo)

    def __repr__(self) -> str:
        return (
            f"<WorkQueues threads={len(self._threads)} busy={len(self._busy)} leader_handoffs={self.leader_handoffs}>"
        )
