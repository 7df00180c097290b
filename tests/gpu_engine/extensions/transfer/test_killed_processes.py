"""SIGKILL of the engine that prefills, and of the one that decodes, amid a transfer: nothing hangs or leaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.model.loader import LoadedModel
from protos.engine.v1 import engine_pb2 as pb
from tests.gpu_engine.extensions.transfer.processes import server_process
from tests.gpu_engine.harness import config, tokens
from tests.rpc_client import Client

ROUNDS = 8
PROMPTS = [tokens(440 + 16 * seed, seed) for seed in range(4)]
"""Dozens of chunks each, so that a transfer takes some tenths of a second."""
BOUND_S = 120.0

pytestmark = pytest.mark.slow


def settings(llama: LoadedModel, tmp_path: Path, role: str) -> tuple[EngineConfig, ServerConfig, str]:
    fields: dict[str, Any] = {"model": llama.name, "role": role, "num_draft_tokens": 3}
    if role == "decode":
        fields |= {"prefill_from": (f"unix:{tmp_path}/prefill",), "prefill_tokens": 32}
    engine = config(max_model_len=512, kv_cache_tokens=4096, **fields)
    return engine, ServerConfig(listen=f"unix:{tmp_path}/{role}", grammar="none"), f"{tmp_path}/{role}.log"


@asynccontextmanager
async def started(llama: LoadedModel, tmp_path: Path, role: str) -> AsyncIterator[Any]:
    engine, server, log_path = settings(llama, tmp_path, role)
    with server_process(engine, server, log_path) as process:
        async with Client(server.listen) as client:
            await serves(client)
        yield process


async def serves(client: Client) -> None:
    ends_s = time.monotonic() + BOUND_S
    while True:
        try:
            await client.stats(timeout_s=1.0)
            return
        except grpc.aio.AioRpcError:
            assert time.monotonic() < ends_s
            await asyncio.sleep(0.05)


async def ask(client: Client, prompt: list[int], salt: str) -> list[int]:
    sampling = pb.SamplingParams(max_tokens=8, temperature=0.7, seed=5, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling, cache_salt=salt)
    return [token async for response in client.generate(request, timeout_s=BOUND_S) for token in response.token_ids]


async def is_idle(address: str) -> None:
    """Wait until the engine holds neither a sequence nor a page."""
    async with Client(address) as client:
        ends_s = time.monotonic() + BOUND_S
        while True:
            stats = await client.stats()
            if stats.running == stats.waiting == stats.pages_used == 0:
                return
            assert time.monotonic() < ends_s, stats
            await asyncio.sleep(0.05)


def log_of(tmp_path: Path, role: str) -> str:
    return Path(tmp_path, f"{role}.log").read_text()


def open_files(process: Any) -> int:
    return psutil.Process(process.pid).num_fds()


async def test_the_prefill_engine_is_killed(llama: LoadedModel, tmp_path: Path) -> None:
    chance, address = random.Random(1), f"unix:{tmp_path}/decode"
    counts: list[int] = []
    async with started(llama, tmp_path, "decode") as decode, Client(address) as client:
        expected = [await ask(client, prompt, "alone") for prompt in PROMPTS]
        for number in range(ROUNDS):
            async with started(llama, tmp_path, "prefill") as prefill:
                await asyncio.sleep(1.1)  # the engine that failed rests no longer
                answers = asyncio.gather(*(ask(client, prompt, f"round {number}") for prompt in PROMPTS))
                await asyncio.sleep(chance.uniform(0.0, 0.5))
                prefill.kill()
                async with asyncio.timeout(BOUND_S):
                    assert await answers == expected, number
            await is_idle(address)
            counts.append(open_files(decode))
    assert max(counts[ROUNDS // 2 :]) <= max(counts[: ROUNDS // 2]) + 4, counts
    lines = log_of(tmp_path, "decode")
    assert "prompts are prefilled here, not by" in lines, "no round killed a fetch"
    assert "Traceback" not in lines


async def test_the_decode_engine_is_killed(llama: LoadedModel, tmp_path: Path) -> None:
    chance, counts = random.Random(2), []
    failed = 0
    async with started(llama, tmp_path, "prefill") as prefill:
        for number in range(ROUNDS):
            async with AsyncExitStack() as stack:
                decode = await stack.enter_async_context(started(llama, tmp_path, "decode"))
                client = await stack.enter_async_context(Client(f"unix:{tmp_path}/decode"))
                salt = f"round {number}"
                answers = [asyncio.create_task(ask(client, prompt, salt)) for prompt in PROMPTS]
                await asyncio.sleep(chance.uniform(0.0, 0.5))
                decode.kill()
                async with asyncio.timeout(BOUND_S):
                    for each in answers:
                        with contextlib.suppress(grpc.aio.AioRpcError):
                            await each
                            continue
                        failed += 1
            await is_idle(f"unix:{tmp_path}/prefill")
            counts.append(open_files(prefill))
    assert failed, "no round killed a request"
    assert max(counts[ROUNDS // 2 :]) <= max(counts[: ROUNDS // 2]) + 4, counts
    assert "Traceback" not in log_of(tmp_path, "prefill")
