"""Work for the event loop on a thread of its own, which ends with the work.

Not `asyncio.to_thread`: its threads stay. The OpenMP runtime under torch keeps a pool of workers for every living
thread that ever ran a parallel loop, and when the pools together have more threads than the machine has cores it lets
workers sleep instead of spin between loops. A step has hundreds of loops: one idle second pool made it 1.8 times as
slow (docs/log.md). One invariant: after the start, the engine's thread is the only one with a pool. Not here: work
without torch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def in_own_thread(function: Callable[[], Result]) -> Result:
    """Return `function()`, or raise what it raises. When this is cancelled the function runs on to its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result, error = function(), None
        except BaseException as raised:  # handed over whole: the caller decides
            result, error = None, raised
        loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="own-thread").start()
    return await done
