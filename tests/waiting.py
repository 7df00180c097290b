"""Wait for another task, thread or process.

Not responsible for: waiting for a fixed time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path


async def eventually(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Return when `condition()` is true. Raises TimeoutError after `timeout_s`; only a failing test waits that long."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - there is no event in this process to wait for
            await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    """Return whether a process runs: it is neither gone nor a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
