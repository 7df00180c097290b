"""Sends requests to a running server and joins the responses of each sequence.

Not responsible for: checks of an answer (see the tests).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protos.engine.v1 import engine_pb2 as pb
from tests.rpc_client import Client

ANSWER_TIMEOUT_S = 300.0
"""Only a failing test waits that long, and a busy machine makes many of them slow."""


@dataclass(slots=True)
class Answer:
    """All responses of one sequence, joined."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    deltas: int = 0
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    parts: dict[int, str] = field(default_factory=dict)
    """Kind of a part -> its text."""
    calls: list[dict[str, str]] = field(default_factory=list)
    """Id, name and arguments of each call of a tool."""
    last: pb.GenerateResponse = field(default_factory=pb.GenerateResponse)

    @property
    def whole(self) -> tuple[list[int], str, int, int]:
        """Return what an undisturbed run of the same request has as well."""
        return self.token_ids, self.text, self.last.finish_reason, self.last.telemetry.backtracks

    def take(self, response: pb.GenerateResponse) -> None:
        self.text += response.text
        self.token_ids.extend(response.token_ids)
        self.logprobs.extend(response.logprobs)
        self.deltas += 1
        self.last = response
        for part in response.parts:
            self.parts[part.kind] = self.parts.get(part.kind, "") + part.text
            if part.kind == pb.AnswerPart.KIND_TOOL_CALL:
                assert part.tool_call_index == len(self.calls)
                self.calls.append({"id": part.tool_call_id, "name": part.tool_name, "arguments": ""})
            elif part.kind == pb.AnswerPart.KIND_TOOL_ARGUMENTS:
                self.calls[part.tool_call_index]["arguments"] += part.text


Seen = Callable[[Answer], None]


def chat(content: str, **fields: Any) -> pb.GenerateRequest:
    """Return a request with one user message."""
    return pb.GenerateRequest(
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=content)]), **fields
    )


async def answers(client: Client, request: pb.GenerateRequest, seen: Seen = lambda answer: None) -> list[Answer]:
    """Return all sequences of the request, by index; `seen` is called after each response."""
    by_index: dict[int, Answer] = {}
    async for response in client.generate(request, timeout_s=ANSWER_TIMEOUT_S):
        answer = by_index.setdefault(response.index, Answer())
        answer.take(response)
        seen(answer)
    return [by_index[index] for index in sorted(by_index)]


async def answer(client: Client, request: pb.GenerateRequest, seen: Seen = lambda answer: None) -> Answer:
    """Return the one sequence of the request."""
    (only,) = await answers(client, request, seen)
    return only


async def steps_after(client: Client, count: int) -> None:
    """Wait until the server has run so many steps."""
    stats = await client.stats()
    while stats.steps < count:
        await asyncio.sleep(0.002)
        stats = await client.stats()


async def started_again(client: Client, starts: int) -> None:
    """Wait until so many grammar processes have been started: the server may not have noticed a death yet."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while (await client.stats()).grammar_starts < starts:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def idle_stats(client: Client, timeout_s: float = 120.0) -> pb.GetStatsResponse:
    """Return the counters when no resource is held and the grammar process is ready, or after `timeout_s`."""
    stats = await client.stats()
    try:
        async with asyncio.timeout(timeout_s):
            while stats.running or stats.waiting or stats.pages_used or stats.matchers or not stats.grammar_ready:
                await asyncio.sleep(0.05)
                stats = await client.stats()
    except TimeoutError:
        return stats
    return stats


async def left_idle(client: Client, timeout_s: float = 120.0) -> pb.GetStatsResponse:
    """Return the counters of a server of which no request holds anything, with a grammar process that is ready."""
    stats = await idle_stats(client, timeout_s)
    assert stats.grammar_ready
    assert (stats.running, stats.waiting, stats.pages_used, stats.matchers) == (0, 0, 0, 0)
    return stats
