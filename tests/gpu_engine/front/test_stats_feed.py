"""WatchStats, the tokenizer and the grammar cache as calls of the service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest
import tokenizers

from gpu_engine.api.stats import IterationRing
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from tests.fakes import EOS
from tests.gpu_engine.front.feed import ran
from tests.gpu_engine.front.serving import Setup, ask, serving
from tests.waiting import eventually

Stub: TypeAlias = "engine_pb2_grpc.EngineAsyncStub"


@asynccontextmanager
async def stub_of(tmp_path: Path, *, with_grammar: bool = True) -> AsyncIterator[tuple[Setup, Stub]]:
    async with (
        serving(tmp_path, with_grammar=with_grammar) as s,
        grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel,
        asyncio.timeout(30),
    ):
        yield s, engine_pb2_grpc.EngineStub(channel)  # type: ignore[misc]


def test_a_ring_has_the_last_iterations_and_says_where_they_end() -> None:
    ring = IterationRing(4)
    assert ring.since(0) == ([], 0)
    ran(ring, 3)
    assert [each.number for each in ring.since(1)[0]] == [1, 2]
    ran(ring, 7)
    found, end = ring.since(2)
    assert ([each.number for each in found], end) == ([6, 7, 8, 9], 10)
    assert ring.since(10) == ([], 10)


async def test_a_watcher_gets_the_past_then_what_is_new(tmp_path: Path) -> None:
    async with stub_of(tmp_path) as (s, stub):
        ran(s.engine.iterations, 5)
        call = stub.WatchStats(pb.WatchStatsRequest(history=2, interval_ms=10, omit_requests=True))
        first = await call.read()
        assert isinstance(first, pb.WatchStatsResponse)
        assert ([each.iteration for each in first.iterations], first.missed, len(first.requests)) == ([3, 4], 0, 0)
        assert first.iterations[1] == pb.IterationStats(
            iteration=4, time_s=1e9 + 4, iteration_ms=4, waiting=5, running=6, num_slots=4, decoding=7,
            prefill_tokens=8, generated_tokens=9, draft_tokens=10, accepted_draft_tokens=11, parked=12, preempted=13,
            pages_used=14, num_pages=64,
        )  # fmt: skip
        ran(s.engine.iterations, 1)
        second = await call.read()
        assert isinstance(second, pb.WatchStatsResponse)
        assert [each.iteration for each in second.iterations] == [5]
        ran(s.engine.iterations, s.engine.iterations.size + 3)
        third = await call.read()
        assert isinstance(third, pb.WatchStatsResponse)
        assert (third.iterations[-1].iteration, third.missed + len(third.iterations)) == (16, 11)
        call.cancel()


async def test_a_history_longer_than_the_ring_is_what_the_ring_has(tmp_path: Path) -> None:
    async with stub_of(tmp_path) as (s, stub):
        ran(s.engine.iterations, 20)
        call = stub.WatchStats(pb.WatchStatsRequest(history=2**31))
        first = await call.read()
        assert isinstance(first, pb.WatchStatsResponse)
        assert (len(first.iterations), first.missed) == (s.engine.iterations.size, 0)
        call.cancel()


async def test_a_watcher_sees_the_requests_with_their_client(tmp_path: Path) -> None:
    async with stub_of(tmp_path) as (s, stub):
        running = stub.Generate(ask(request_id="r", client_id="team"))
        reading = asyncio.create_task(running.read())
        await eventually(lambda: s.engine.submitted)
        ran(s.engine.iterations, 1)
        call = stub.WatchStats(pb.WatchStatsRequest(history=1))
        first = await call.read()
        assert isinstance(first, pb.WatchStatsResponse)
        assert list(first.requests) == [
            pb.RequestStats(request_id="r", client_id="team", stage=pb.RequestStats.STAGE_DECODE, prompt_tokens=2)
        ]
        call.cancel()
        running.cancel()
        await asyncio.wait([reading])


@pytest.mark.parametrize("interval_ms", [0, 9, 3_600_001])
async def test_an_interval_beyond_its_limits_is_refused(tmp_path: Path, interval_ms: int) -> None:
    async with stub_of(tmp_path) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchStats(pb.WatchStatsRequest(interval_ms=interval_ms)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == f"interval_ms: is {interval_ms}, must be in [10, 3600000]"


async def test_a_server_that_drains_ends_its_watchers(tmp_path: Path) -> None:
    async with stub_of(tmp_path) as (s, stub):
        ran(s.engine.iterations, 1)
        call = stub.WatchStats(pb.WatchStatsRequest(history=1))
        await call.read()
        await s.calls.drain(1)
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stub


async def test_the_tokenizer_comes_with_the_ids_of_its_tokens(tmp_path: Path) -> None:
    async with stub_of(tmp_path) as (s, stub):
        info = await stub.GetTokenizerInfo(pb.GetTokenizerInfoRequest())
        again = await stub.GetTokenizerInfo(pb.GetTokenizerInfoRequest())
        backend = s.calls.model.tokenizer.backend_tokenizer
    assert {token: i for i, token in enumerate(info.encoded_vocab)} == backend.get_vocab()
    assert tokenizers.Tokenizer.from_str(info.tokenizer_str).encode("h\u00e9").ids == [104, 195, 169]
    assert list(info.stop_token_ids) == [EOS]
    assert json.loads(again.tokenizer_str) == json.loads(info.tokenizer_str)


async def test_the_grammar_cache_is_cleared_where_there_is_one(tmp_path: Path) -> None:
    async with stub_of(tmp_path) as (_, stub):
        memory = await stub.ClearGrammarCache(pb.ClearGrammarCacheRequest())
        both = await stub.ClearGrammarCache(pb.ClearGrammarCacheRequest(disk=True))
    assert (memory.dropped, memory.kept, memory.files, memory.freed_bytes) == (3, 1, 0, 99)
    assert both.files == 2


async def test_a_server_without_a_grammar_process_has_no_cache_to_clear(tmp_path: Path) -> None:
    async with stub_of(tmp_path, with_grammar=False) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ClearGrammarCache(pb.ClearGrammarCacheRequest())
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
