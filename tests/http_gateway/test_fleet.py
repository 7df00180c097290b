"""The choice of an engine, without any engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from http_gateway.engines.engine import Engine
from http_gateway.engines.fleet import Fleet, prompt_bytes
from http_gateway.engines.prefixes import BLOCK_BYTES, MAX_BLOCKS, Prefixes, blocks_of
from http_gateway.wire.errors import ApiError
from protos.engine.v1 import engine_pb2 as pb
from tests.http_gateway.fake_engine import FakeEngine, served
from tests.waiting import eventually

LONG = b"p" * (4 * BLOCK_BYTES)


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    engines = [Engine(f"127.0.0.1:{port}", None, ()) for port in (1, 2, 3)]
    for engine in engines:
        engine.serves, engine.info = True, pb.GetModelInfoResponse(model="m", max_batch_size=4)
    yield Fleet(engines)
    for engine in engines:
        await engine.aclose()


async def test_the_least_loaded_engine_gets_a_prompt_that_none_has_seen(fleet: Fleet) -> None:
    fleet.engines[0].running, fleet.engines[1].running, fleet.engines[2].foreign = 2, 1, 3
    assert fleet.choose("m", b"x") is fleet.engines[1]


async def test_a_prompt_follows_its_beginning_until_the_queue_is_too_long(fleet: Fleet) -> None:
    first = fleet.choose(None, LONG)
    assert [fleet.choose(None, LONG + bytes([i]) * 500) for i in range(3)] == [first] * 3
    first.running = 3  # of 4 slots: more than half of them longer than the others
    second = fleet.choose(None, LONG + b"q")
    assert second is not first
    first.running = 0
    assert fleet.choose(None, LONG) is second, "the beginning was prefilled there as well, and last"


async def test_engines_that_failed_or_do_not_serve_are_passed_over(fleet: Fleet) -> None:
    a, b, c = fleet.engines
    a.serves = False
    assert fleet.choose(None, b"", [b]) is c

    def refusal(model: str | None, passed: list[Engine]) -> int:
        with pytest.raises(ApiError) as raised:
            fleet.choose(model, b"", passed)
        return raised.value.status

    assert refusal(None, [b, c]) == 503
    assert refusal("other", []) == 404
    a.info = None
    assert refusal("other", []) == 503, "one that never answered may have the model"


async def test_the_load_and_at_times_the_description_of_an_engine_are_read_again() -> None:
    async with served(FakeEngine()) as other:
        engine = Engine(other.address, None, ())
        engine.serves, other.running = True, 3
        polling = asyncio.create_task(engine.poll(0.01, info_every_s=0.02))
        try:
            await eventually(lambda: engine.foreign == 3)
            await eventually(lambda: engine.info is not None)
        finally:
            polling.cancel()
            await asyncio.wait([polling])
            await engine.aclose()


def test_blocks_are_known_by_all_that_is_before_them() -> None:
    a, b = blocks_of(LONG), blocks_of(b"q" + LONG[1:])
    assert len(a) == 4
    assert not set(a) & set(b)
    assert blocks_of(LONG + b"tail") == a
    assert len(blocks_of(b"x" * BLOCK_BYTES * (MAX_BLOCKS + 9))) == MAX_BLOCKS


def test_prompts_that_begin_alike_have_bytes_that_begin_alike() -> None:
    conversation = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x")])
    prompts = (
        {"text": "ab"},
        {"token_ids": pb.TokenIds(ids=[5, 6])},
        {"messages": conversation, "tools": pb.Tools(tools=[pb.Tool(name="f", parameters="{}")])},
    )
    for fields in prompts:
        found = prompt_bytes(pb.GenerateRequest(**fields))
        assert prompt_bytes(pb.GenerateRequest(cache_salt="s", **fields)) == b"s" + found
    assert prompt_bytes(pb.GenerateRequest(text="abc")) == b"\0abc"
    longer = prompt_bytes(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7])))
    assert longer.startswith(prompt_bytes(pb.GenerateRequest(**prompts[1])))


def test_the_least_recently_used_blocks_are_forgotten() -> None:
    prefixes = Prefixes(capacity=3)
    prefixes.insert([b"1", b"2"], "a")
    assert prefixes.longest([b"1", b"2", b"3"]) == ("a", 2)
    prefixes.insert([b"1"], "b")
    prefixes.insert([b"8", b"9"], "c")
    assert len(prefixes) == 3
    assert prefixes.longest([b"1", b"2"]) == ("b", 1)
    assert prefixes.longest([b"7"]) == ("", 0)
