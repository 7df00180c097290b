"""Adapters over the wire: faults of a tiny model's server with a real grammar process.

Not responsible for: what an adapter computes (see tests/gpu_engine/adapters/).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from lockstep_client import AsyncExecutor
from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import ANSWER_TIMEOUT_S, answer, idle_stats, left_idle, started_again, steps_after
from tests.e2e.conftest import RunningServer, small_server
from tests.e2e.random_requests import SCHEMA
from tests.gpu_engine import tiny
from tests.gpu_engine.adapters.files import save_lora, save_prompt
from tests.rpc_client import Client

CASES = [(lora, prompt, guided) for lora in ("", "a", "b") for prompt in ("", "p") for guided in (False, True)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of a tiny model with three adapters and too few pages for its slots."""
    root: Path = tmp_path_factory.mktemp("small")
    folder = tiny.save(tiny.FAMILIES["llama"](), root / "model", rounds=True)
    files = {
        "a": save_lora(folder, root / "a", seed=1),
        "b": save_lora(folder, root / "b", seed=2, rank=8, targets=("q_proj", "v_proj")),
        "p": save_prompt(root / "p", tokens=20, hidden=64, seed=1),
    }
    extra = [flag for name, path in files.items() for flag in ("--adapter", f"{name}={path}")]
    with small_server(folder, "--kv-cache-tokens", "512", *extra) as server:
        yield server


def request(number: int, drafts: int) -> pb.GenerateRequest:
    lora, prompt, guided = CASES[number % len(CASES)]
    ids = random.Random(number).choices(range(97, 123), k=20)
    made = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids + ids[:10]),
        sampling=pb.SamplingParams(max_tokens=90, seed=number, temperature=0.7 * (number % 2), ignore_eos=not guided),
        speculation=pb.Speculation(num_draft_tokens=drafts),
        lora=lora,
        prompt_adapter=prompt,
    )
    if guided:
        made.grammar.CopyFrom(pb.Grammar(json_schema=SCHEMA))
    return made


async def users(client: Client) -> list[int]:
    return [adapter.in_use for adapter in (await client.adapters()).adapters]


@pytest.mark.slow
async def test_kills_preemption_and_cancels_change_no_token_and_leak_nothing(small: RunningServer) -> None:
    count = 2 * len(CASES)
    async with Client(small.address) as client:
        expected = [(await answer(client, request(number, 0))).token_ids for number in range(count)]
        assert len({tuple(ids) for ids in expected}) > count - 3
        await idle_stats(client)
        for drafts in (0, 3, 7):
            before = await client.stats()
            asked = [asyncio.create_task(answer(client, request(number, drafts))) for number in range(count)]
            cancelled = [asyncio.create_task(answer(client, request(count + number, drafts))) for number in range(8)]
            await steps_after(client, before.steps + 25)
            assert max(await users(client)) > 0
            small.kill_grammar_process()
            for task in cancelled:
                task.cancel()
            found = await asyncio.wait_for(asyncio.gather(*asked), ANSWER_TIMEOUT_S)
            assert [each.token_ids for each in found] == expected
            for task in cancelled:
                with pytest.raises((asyncio.CancelledError, grpc.RpcError)):
                    await task
            await started_again(client, before.grammar_starts + 1)
            after = await left_idle(client)
            assert await users(client) == [0, 0, 0]
            assert after.grammar_starts == before.grammar_starts + 1
            assert after.accepted_draft_tokens > before.accepted_draft_tokens or not drafts
    async with AsyncExecutor(address=small.address) as executor:
        iterations = await executor.get_latest_iteration_stats()
        assert sum(each.preempted for each in iterations) > 0
