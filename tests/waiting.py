"""Waiting for what another task, thread or process does. Not here: waiting for a fixed time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Return when `condition()` is true; TimeoutError after `timeout_s`, which only a failing test uses up."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event in this process
            await asyncio.sleep(0.005)
