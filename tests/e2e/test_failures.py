"""Death, hang and leak of the grammar process in the middle of answers: every request ends with its own tokens.

The reference is the same server, undisturbed, a moment before. Only a failing test is bounded by time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from benchmarks.harness.server import EngineServer, ServerOptions
from gpu_engine.api.config import EngineConfig
from gpu_engine.cli.client import Client
from gpu_engine.ops.core_split import CoreSplit
from protos.engine.v1 import engine_pb2 as pb
from service_runtime.cores import usable_cores
from tests.e2e.asking import ANSWER_TIMEOUT_S, chat, idle_stats
from tests.e2e.conftest import RunningServer

pytestmark = [pytest.mark.model, pytest.mark.slow]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "years": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2100}, "minItems": 8},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 4, "maxItems": 8},
    },
    "required": ["name", "years", "words"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One thread: what is tested is not speed, and two would wait for each other on a busy machine."""
    extra = ("--max-model-len", "512", "--num-threads", "1", "--grammar-silence-s", "2")
    before = {child.pid for child in psutil.Process().children()}
    with EngineServer(ServerOptions(dtype="auto", max_batch_size=8, extra=extra)) as engine:
        (process,) = [child for child in psutil.Process().children() if child.pid not in before]
        yield RunningServer(engine.address, process)


def test_beside_a_model_of_one_thread_the_grammar_process_keeps_to_another_core(server: RunningServer) -> None:
    every = frozenset(server.process.cpu_affinity() or ()) | os.sched_getaffinity(0)
    split = CoreSplit.of(EngineConfig(device="cpu", num_threads=1), every, usable_cores())
    if split is None:
        pytest.skip("needs two to four cores and no quota")
    (sidecar,) = [one for one in server.process.children() if "grammar_service" in one.cmdline()]
    assert set(sidecar.cpu_affinity() or ()) == split.rest
    workers = [one for one in sidecar.children() if "--idle" in one.cmdline()]
    assert len(workers) == len(sidecar.children()) > 0
    anywhere = [one for one in server.process.threads() if os.sched_getaffinity(one.id) == split.every]
    assert 0 < len(anywhere) < server.process.num_threads(), "the engine's thread, and not the others"


def requests() -> list[pb.GenerateRequest]:
    """Two guided requests at T = 0 and two at T = 0.8, and a free one that lasts longer than they do."""
    guided = [
        chat(
            "Describe a tower as JSON: its name, the years that matter, some words.",
            grammar=pb.Grammar(json_schema=json.dumps(SCHEMA)),
            sampling=pb.SamplingParams(max_tokens=32, temperature=temperature, seed=seed),
        )
        for temperature in (0.0, 0.8)
        for seed in (1, 2)
    ]
    sampling = pb.SamplingParams(max_tokens=80, temperature=0.8, seed=3, ignore_eos=True)
    return [*guided, pb.GenerateRequest(text="Once upon a time", sampling=sampling)]


async def ends(
    client: Client, request: pb.GenerateRequest, seen: Callable[[int], None] = lambda count: None
) -> tuple[list[int], int, pb.Telemetry]:
    """Return tokens, finish reason and telemetry; `seen` is told how many tokens there are."""
    tokens: list[int] = []
    last = pb.GenerateResponse()
    async for response in client.generate(request, timeout_s=ANSWER_TIMEOUT_S):
        tokens.extend(response.token_ids)
        seen(len(tokens))
        last = response
    return tokens, last.finish_reason, last.telemetry


async def disturbed(client: Client, trouble: Callable[[], None]) -> list[tuple[list[int], int, pb.Telemetry]]:
    """Run all requests at once, and cause trouble when every guided one has begun and none has ended."""
    begun: set[int] = set()

    def seen(index: int, count: int) -> None:
        if count >= 4 and index not in begun:
            begun.add(index)
            if len(begun) == 4:
                trouble()

    made = requests()
    tasks = [ends(client, request, lambda count, i=i: seen(i, count)) for i, request in enumerate(made[:4])]  # type: ignore[misc]
    result = await asyncio.gather(*tasks, ends(client, made[4]))
    assert len(begun) == 4
    return list(result)


def kill(server: RunningServer) -> None:
    os.kill(server.grammar_process().pid, signal.SIGKILL)


def hang(server: RunningServer) -> None:
    os.kill(server.grammar_process().pid, signal.SIGSTOP)


def hang_for_a_while(server: RunningServer) -> None:
    process = server.grammar_process()
    process.suspend()
    asyncio.get_running_loop().call_later(0.5, process.resume)


@pytest.mark.parametrize(
    ("trouble", "restarts"), [(kill, 1), (hang, 1), (hang_for_a_while, 0)], ids=["killed", "hung", "hung for a moment"]
)
async def test_every_request_ends_as_it_would_have(
    server: RunningServer, trouble: Callable[[RunningServer], None], restarts: int
) -> None:
    async with Client(server.address) as client:
        wanted = await asyncio.gather(*(ends(client, request) for request in requests()))
        before = await idle_stats(client)
        got = await disturbed(client, lambda: trouble(server))
        after = await idle_stats(client)
    assert [(tokens, finish) for tokens, finish, _ in got] == [(tokens, finish) for tokens, finish, _ in wanted]
    assert after.grammar_starts - before.grammar_starts == restarts
    assert after.grammar_ready
    assert (after.running, after.waiting, after.pages_used, after.matchers) == (0, 0, 0, 0)
    # The free request took part in every step of its own: as many as it has tokens to show for, and not one more.
    free = got[4][2]
    assert free.steps == len(got[4][0]) - free.accepted_draft_tokens
    assert free.deferred_rows == 0
