"""The event loop of a simulated process, under the world's clock: an actor that runs one callback at a time.

Invariant: callbacks run in the order of `call_soon`, as in every asyncio loop; what happens between two of them in
other threads and processes is the scheduler's choice. A function of `run_in_executor` is a thread of the process.

Not responsible for: sockets (see wire.py), which bring their own `recv` and `accept`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from tools.simulation.world import Process, SimThread

_MOST_UNWINDINGS = 20


class SimLoop(asyncio.AbstractEventLoop):
    """The loop of `process`."""

    def __init__(self, process: Process) -> None:
        self.process, self.name = process, f"{process.name}/loop"
        self._world = process.world
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[int, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._executor_calls = itertools.count()
        self.tasks: list[asyncio.Task[Any]] = []
        """The tasks of the loop that were started and not yet found done, oldest first."""
        process.world.add(self)

    # -- the actor ---------------------------------------------------------------------------------------------------

    def is_ready(self, now_ns: int) -> bool:
        """See `Actor`."""
        return bool(self._ready) or (bool(self._timers) and self._timers[0][0] <= now_ns)

    def due_ns(self) -> int | None:
        """See `Actor`."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def step(self) -> None:
        """Run one callback."""
        now_ns = self._world.now_ns
        while self._timers and self._timers[0][0] <= now_ns:
            self._ready.append(heapq.heappop(self._timers)[2])
        while self._ready:
            handle = self._ready.popleft()
            if not handle.cancelled():
                asyncio._set_running_loop(self)
                try:
                    handle._run()
                finally:
                    asyncio._set_running_loop(None)
                return

    def discard(self) -> None:
        """Unwind the tasks of a run that is over. No effect of theirs is seen any more."""
        for _ in range(_MOST_UNWINDINGS):
            for task in (left := [task for task in self.tasks if not task.done()]):
                task.cancel()
            self._timers.clear()
            while self._ready:
                self.step()
            if not left:
                return

    # -- asyncio -----------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._world.now_ns / 1e9

    def get_debug(self) -> bool:
        """Return False."""
        return False

    def is_running(self) -> bool:
        """Return True: the scheduler may run it at any time."""
        return True

    def is_closed(self) -> bool:
        """Return whether the process has ended."""
        return not self.process.alive

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        """See asyncio."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (round(when * 1e9), next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Return: a cancelled timer leaves the heap when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        """See asyncio."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """See asyncio."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks = [each for each in self.tasks if not each.done()]
        self.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run the function on a thread of the process, whatever the executor is."""
        future = self.create_future()
        if self._world.over:
            future.cancel()
            return future

        def deliver(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def call() -> None:
            try:
                result = func(*args)
            except Exception as error:
                self.call_soon(deliver, None, error)
            else:
                self.call_soon(deliver, result, None)

        SimThread(self.process, call, f"{self.process.name}/executor-{next(self._executor_calls)}").start()
        return future

    async def sock_recv(self, sock: Any, nbytes: int) -> bytes:
        """Return b"" when the peer of a simulated socket has hung up."""
        received: bytes = await sock.recv_on(self)
        return received

    async def sock_accept(self, sock: Any) -> tuple[Any, str]:
        """Return the next connection of a simulated listener."""
        return await sock.accept_on(self), ""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Note an exception that no code took."""
        if self.process.alive and not self._world.over:
            self._world.complain(f"{self.name}: {context.get('message')}: {context.get('exception')!r}")

    def __repr__(self) -> str:
        return f"<SimLoop {self.name} ready={len(self._ready)} timers={len(self._timers)}>"
