"""Two hundred requests, many of them invalid or cancelled: each error names its field, and nothing is leaked."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import chat, idle_stats, left_idle
from tests.e2e.conftest import RunningServer
from tests.rpc_client import Client

pytestmark = pytest.mark.model

REQUESTS = 200
CONCURRENCY = 16
MAX_GROWTH_BYTES = 48 << 20
"""Allowed growth of the resident set in an identical round: allocator noise, far below a leak of prompts."""


def ask(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"text": "Say something.", "sampling": pb.SamplingParams(max_tokens=24)} | fields)


def sampled(**fields: Any) -> pb.GenerateRequest:
    return ask(sampling=pb.SamplingParams(**fields))


def guided(**fields: Any) -> pb.GenerateRequest:
    return ask(grammar=pb.Grammar(**fields))


Make = Callable[[], pb.GenerateRequest]

BAD: dict[str, list[Make]] = {
    "sampling.temperature": [lambda: sampled(temperature=-1.0), lambda: sampled(temperature=math.nan)],
    "sampling.n": [lambda: sampled(n=1000)],
    "text": [lambda: ask(text="x" * (10 << 20)), lambda: ask(text="word " * 600), lambda: ask(text="")],
    "token_ids.ids[1]": [lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2**31]))],
    "prompt": [pb.GenerateRequest],
    "messages.messages[0].role": [
        lambda: pb.GenerateRequest(messages=pb.ChatMessages(messages=[pb.ChatMessage(role="wizard", content="x")]))
    ],
    "speculation.num_draft_tokens": [lambda: ask(speculation=pb.Speculation(num_draft_tokens=99))],
    "grammar": [
        *(lambda source=source: guided(json_schema=source) for source in ("{", '{"type": "strnig"}')),  # type: ignore[misc]
        lambda: guided(regex="(["),
        lambda: guided(ebnf="root ::= nowhere"),
        lambda: guided(lark="start: ("),
    ],
}
"""Field that an error names -> requests. The front door has all of them (tests/gpu_engine/front/test_validation.py)."""
GOOD: list[Make] = [
    lambda: chat("Hello", sampling=pb.SamplingParams(max_tokens=24)),
    lambda: guided(regex="[a-z]{3,12}"),
    lambda: guided(json_schema='{"type": "array", "items": {"type": "boolean"}, "maxItems": 4}'),
    lambda: ask(sampling=pb.SamplingParams(max_tokens=12, n=2)),
]


async def one(client: Client, dice: random.Random) -> str:
    """Send one request, valid or not, and read it to its end or cancel it; return the outcome, or fail."""
    if dice.random() < 0.5:
        field = dice.choice(sorted(BAD))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in client.generate(dice.choice(BAD[field])(), timeout_s=120):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (field, caught.value.details())
        assert (caught.value.details() or "").startswith(f"{field}: "), caught.value.details()
        return "refused"
    call = client.generate(dice.choice(GOOD)(), timeout_s=120)
    if dice.random() < 0.5:
        try:
            async with asyncio.timeout(dice.random() * 0.3):
                async for _ in call:
                    pass
        except TimeoutError:
            return "cancelled"
        finally:
            await call.aclose()
        return "answered"
    last = [response async for response in call][-1]
    assert last.finish_reason in (
        pb.FINISH_REASON_STOP,
        pb.FINISH_REASON_LENGTH,
        pb.FINISH_REASON_GRAMMAR_INCOMPLETE,
        pb.FINISH_REASON_GRAMMAR_CLOSED,
    )
    return "answered"


async def one_round(client: Client, seed: int) -> Counter[str]:
    gate = asyncio.Semaphore(CONCURRENCY)

    async def gated(i: int) -> str:
        async with gate:
            return await one(client, random.Random(seed * REQUESTS + i))

    return Counter(await asyncio.gather(*(gated(i) for i in range(REQUESTS))))


@pytest.mark.slow
async def test_invalid_and_cancelled_requests_leave_nothing_behind(server: RunningServer) -> None:
    sizes = []
    async with Client(server.address) as client:
        before = await idle_stats(client)
        for _ in range(3):
            outcomes = await one_round(client, seed=7)
            stats = await left_idle(client)
            assert outcomes["refused"] > 60
            assert outcomes["answered"] > 30
            sizes.append([process.memory_info().rss for process in (server.process, server.grammar_process())])
    assert stats.grammar_starts == before.grammar_starts
    failed = {status: count - before.failed.get(status, 0) for status, count in stats.failed.items()}
    assert {status for status, count in failed.items() if count} == {"INVALID_ARGUMENT"}
    growth = [after - before for before, after in zip(sizes[-2], sizes[-1], strict=True)]
    assert max(growth) < MAX_GROWTH_BYTES, sizes
