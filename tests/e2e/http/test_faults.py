"""What clients of a gateway do to it, and its own death, change nothing for requests on other ways to the engine."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from benchmarks.harness.gateway import start_gateway
from benchmarks.harness.server import ServerFailed
from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import answer, chat, idle_stats
from tests.e2e.conftest import RunningServer
from tests.http_gateway.fake_engine import ask, begin, close, request
from tests.rpc_client import Client

pytestmark = [pytest.mark.model, pytest.mark.slow]

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 60}}, "required": ["a"]}
LONG = ask("Tell a long story.", max_tokens=400, stream=True, ignore_eos=True)


async def large_bodies(address: str) -> None:
    large = json.dumps(ask("x" * (10 << 20))).encode()
    assert [(await request(address, CHAT, large)).status for _ in range(3)] == [413] * 3


async def slow_readers(address: str) -> None:
    """They read nothing after the head, and leave while the answer runs."""
    readers = await asyncio.gather(*(begin(address, CHAT, LONG) for _ in range(3)))
    await asyncio.sleep(1)
    for reader in readers:
        await close(reader.writer)


async def idle_connections(address: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    host, _, port = address.rpartition(":")
    idle = await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in range(1000)))
    assert (await request(address, CHAT, ask("Hi.", max_tokens=4))).status == 200
    await asyncio.gather(*(close(writer) for _, writer in idle))


async def others(client: Client, gateway: str) -> list[list[int]]:
    """Return the tokens of answers over gRPC and over another gateway: guided and free, greedy and sampled."""
    grammar = pb.Grammar(json_schema=json.dumps(SCHEMA))
    guided = chat("Name something.", grammar=grammar, sampling=pb.SamplingParams(max_tokens=60, seed=3))
    free = chat("Count.", sampling=pb.SamplingParams(max_tokens=80, temperature=0, ignore_eos=True))
    body = ask("Name a city.", max_tokens=60, seed=4, return_token_ids=True)
    one, two, three = await asyncio.gather(answer(client, guided), answer(client, free), request(gateway, CHAT, body))
    return [one.token_ids, two.token_ids, three.json["choices"][0]["token_ids"]]


@pytest.mark.parametrize("attack", [large_bodies, slow_readers, idle_connections], ids=lambda one: str(one.__name__))
async def test_clients_of_one_gateway_change_nothing_elsewhere(
    server: RunningServer, gateway: str, attack: Callable[[str], Awaitable[None]]
) -> None:
    context = start_gateway(server.address)
    attacked = await asyncio.to_thread(context.__enter__)
    try:
        async with Client(server.address) as client:
            usual = await others(client, gateway)
            attacking = asyncio.ensure_future(attack(attacked))
            assert await others(client, gateway) == usual
            await attacking
            assert await others(client, gateway) == usual
            stats = await idle_stats(client)
            assert (stats.running, stats.waiting) == (0, 0)
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


async def test_a_gateway_killed_in_mid_stream_changes_nothing_elsewhere(server: RunningServer, gateway: str) -> None:
    context = start_gateway(server.address)
    before = {child.pid for child in psutil.Process().children()}
    address = await asyncio.to_thread(context.__enter__)
    (process,) = [child for child in psutil.Process().children() if child.pid not in before]
    async with Client(server.address) as client:
        usual = await others(client, gateway)
        streams = await asyncio.gather(*(begin(address, CHAT, LONG) for _ in range(3)))
        first: list[Any] = [stream.reader for stream in streams]
        await asyncio.gather(*(reader.readuntil(b"data: ") for reader in first))
        running = asyncio.ensure_future(others(client, gateway))
        process.kill()
        assert await running == usual
        stats = await idle_stats(client)
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert await others(client, gateway) == usual
    for stream in streams:
        await close(stream.writer)
    with pytest.raises(ServerFailed, match="ended with -9"):
        await asyncio.to_thread(context.__exit__, None, None, None)
