"""Run a function for the event loop on a thread of its own, which ends with the function.

The threads of `asyncio.to_thread` stay alive. The OpenMP runtime under torch keeps a pool of workers for every living
thread that ever ran a parallel loop. When the pools together have more threads than the machine has cores, idle workers
sleep between loops instead of polling. A step has hundreds of loops: one idle second pool made it 1.8 times as slow
(docs/log/).

The invariant: after the start, the engine's thread is the only one with a pool.

Not responsible for: functions that do not use torch (`asyncio.to_thread` is enough for them).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def in_own_thread(function: Callable[[], Result]) -> Result:
    """Return `function()`, or raise its error. If the caller is cancelled, the function still runs to its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def set_outcome(result: Result | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result, error = function(), None
        except BaseException as raised:  # including SystemExit: it is raised again in the caller
            result, error = None, raised
        loop.call_soon_threadsafe(set_outcome, result, error)

    threading.Thread(target=run, name="own-thread").start()
    return await done
