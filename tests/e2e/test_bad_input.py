"""Two hundred requests, most of them bad or cut short: each bad one is told what is wrong, and nothing stays behind."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from gpu_engine.cli.client import Client
from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import chat, idle_stats
from tests.e2e.conftest import RunningServer

pytestmark = [pytest.mark.model, pytest.mark.slow]

REQUESTS = 200
CONCURRENCY = 16
MOST_GROWTH_BYTES = 48 << 20
"""Allowed growth of the resident set in a second, identical round: allocator noise, far below a leak of prompts."""


def ask(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"text": "Say something.", "sampling": pb.SamplingParams(max_tokens=24)} | fields)


def sampled(**fields: Any) -> pb.GenerateRequest:
    return ask(sampling=pb.SamplingParams(**fields))


def held(**fields: Any) -> pb.GenerateRequest:
    return ask(grammar=pb.Grammar(**fields))


Make = Callable[[], pb.GenerateRequest]

BAD: dict[str, list[Make]] = {
    "sampling.max_tokens": [lambda: sampled(max_tokens=0)],
    "sampling.temperature": [lambda: sampled(temperature=-1.0), lambda: sampled(temperature=math.nan)],
    "sampling.top_p": [lambda: sampled(top_p=0.0), lambda: sampled(top_p=math.inf)],
    "sampling.stop_token_ids[0]": [lambda: sampled(stop_token_ids=[10**9])],
    "sampling.n": [lambda: sampled(n=1000)],
    "sampling.ignore_eos": [
        lambda: ask(grammar=pb.Grammar(json_object=True), sampling=pb.SamplingParams(ignore_eos=True))
    ],
    "text": [lambda: ask(text="x" * (10 << 20)), lambda: ask(text="word " * 600), lambda: ask(text="")],
    "token_ids.ids[1]": [lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2**31]))],
    "prompt": [pb.GenerateRequest],
    "messages.messages[0].role": [
        lambda: pb.GenerateRequest(
            messages=pb.ChatMessages(messages=[pb.ChatMessage(role="wizard", content="abracadabra")])
        )
    ],
    "speculation.num_draft_tokens": [lambda: ask(speculation=pb.Speculation(num_draft_tokens=99))],
    "grammar.json_schema": [lambda: held(json_schema="")],
    "grammar.choice.choices[1]": [lambda: held(choice=pb.Choice(choices=["a", "a"]))],
    "grammar.whitespace": [lambda: held(json_object=True, whitespace=42)],
    "grammar": [
        lambda: held(json_schema="{"),
        lambda: held(json_schema='{"type": "strnig"}'),
        lambda: held(regex="(["),
        lambda: held(ebnf="root ::= nowhere"),
        lambda: held(lark="start: ("),
    ],
}
GOOD: list[Make] = [
    lambda: chat("Hello", sampling=pb.SamplingParams(max_tokens=24)),
    lambda: held(regex="[a-z]{3,12}"),
    lambda: held(json_schema='{"type": "array", "items": {"type": "boolean"}, "maxItems": 4}'),
    lambda: ask(sampling=pb.SamplingParams(max_tokens=12, n=2)),
]


async def one(client: Client, dice: random.Random) -> str:
    """Ask once, well or badly, to the end or not; return what came of it, or fail."""
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


async def test_bad_requests_are_told_and_nothing_stays_behind(server: RunningServer) -> None:
    sizes = []
    async with Client(server.address) as client:
        for _ in range(3):
            outcomes = await one_round(client, seed=7)
            stats = await idle_stats(client)
            assert (stats.running, stats.waiting, stats.pages_used, stats.matchers) == (0, 0, 0, 0), stats
            assert outcomes["refused"] > 60
            assert outcomes["answered"] > 30
            sizes.append([process.memory_info().rss for process in (server.process, server.grammar_process())])
    assert stats.grammar_starts == 1
    assert set(stats.failed) == {"INVALID_ARGUMENT"}
    growth = [after - before for before, after in zip(sizes[-2], sizes[-1], strict=True)]
    assert max(growth) < MOST_GROWTH_BYTES, sizes


@pytest.mark.parametrize("field", sorted(BAD))
async def test_each_bad_field_is_named(server: RunningServer, field: str) -> None:
    async with Client(server.address) as client:
        for make in BAD[field]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(client.generate(make(), timeout_s=120))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith(f"{field}: ")
