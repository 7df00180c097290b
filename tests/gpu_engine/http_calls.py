"""Calls of the HTTP API of a server in this process."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

ASK = {"messages": [{"role": "user", "content": "x"}]}


async def get(address: str, path: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
    """Return the status and the JSON of an answer; (0, None) where none came."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}{path}", data)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")

    def ask() -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError:
            return 0, None

    return await asyncio.to_thread(ask)


async def until_healthy(address: str) -> None:
    async with asyncio.timeout(30):
        while (await get(address, "/health"))[0] != 200:  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.05)
