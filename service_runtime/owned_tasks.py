"""A set of background tasks with one owner: errors are logged, and every task ends with the owner.

The invariant: a task is in the set exactly while it runs.

Not responsible for: waiting for a result (await the task).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class OwnedTasks:
    """Used on one event loop.

    Args:
        expected: errors of this kind are left to the code that awaits the task; any other error is logged as well.
    """

    def __init__(self, expected: type[Exception]) -> None:
        self._expected = expected
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start `work`."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start `work` without a result."""
        _ = self.spawn(work, name)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, self._expected):
            log.error("%s failed", task.get_name(), exc_info=error)

    async def aclose(self) -> None:
        """Cancel the tasks that still run, and wait for their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __repr__(self) -> str:
        return f"<OwnedTasks {sorted(task.get_name() for task in self._tasks)}>"
