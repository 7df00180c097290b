"""Death and hang of the grammar process during answers: every request still ends with its own tokens.

The reference is the same server, undisturbed, just before. Timeouts bound a failing test only.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gpu_engine.api.config import EngineConfig
from gpu_engine.ops.core_split import CoreSplit
from grammar_service.compile.worker import FORKS
from protos.engine.v1 import engine_pb2 as pb
from service_runtime.cores import usable_cores
from tests.e2e.asking import Answer, answer, chat, idle_stats, left_idle, started_again
from tests.e2e.conftest import RunningServer
from tests.rpc_client import Client

pytestmark = pytest.mark.model

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


def test_the_grammar_process_leaves_the_core_of_a_model_with_one_thread(server: RunningServer) -> None:
    every = frozenset(server.process.cpu_affinity() or ()) | os.sched_getaffinity(0)
    split = CoreSplit.of(EngineConfig(device="cpu", num_threads=1), every, usable_cores())
    if split is None:
        pytest.skip("needs two to four cores and no quota")
    (sidecar,) = [one for one in server.process.children() if "grammar_service" in one.cmdline()]
    assert set(sidecar.cpu_affinity() or ()) == split.rest
    (prepared,) = sidecar.children()
    assert FORKS in prepared.cmdline()
    workers = prepared.children()
    assert workers
    assert {os.sched_getscheduler(one.pid) for one in workers} == {os.SCHED_IDLE}
    anywhere = [one for one in server.process.threads() if os.sched_getaffinity(one.id) == split.every]
    assert 0 < len(anywhere) < server.process.num_threads(), "the engine's thread only"


def requests() -> list[pb.GenerateRequest]:
    """Two guided requests at T = 0, two at T = 0.8, and an unguided one that lasts longer than they do.

    One of each has logits processors.
    """
    guided = [
        chat(
            "Describe a tower as JSON: its name, the years that matter, some words.",
            grammar=pb.Grammar(json_schema=json.dumps(SCHEMA)),
            sampling=pb.SamplingParams(max_tokens=32, temperature=temperature, seed=seed),
        )
        for temperature in (0.0, 0.8)
        for seed in (1, 2)
    ]
    guided[1].logits_processors.add(name="end", arguments='{"start": 4, "factor": 1.1}')
    guided[3].logits_processors.add(name="ngrams", arguments='{"size": 12}')
    sampling = pb.SamplingParams(max_tokens=80, temperature=0.8, seed=3, ignore_eos=True)
    free = pb.GenerateRequest(text="Once upon a time", sampling=sampling)
    free.logits_processors.add(name="ngrams", arguments='{"size": 3}')
    return [*guided, free]


async def disturbed(client: Client, trouble: Callable[[], None]) -> list[Answer]:
    """Run all requests at once; call `trouble` when every guided one has begun and none has ended."""
    begun: set[int] = set()

    def seen(index: int, found: Answer) -> None:
        if len(found.token_ids) >= 4 and index not in begun:
            begun.add(index)
            if len(begun) == 4:
                trouble()

    made = requests()
    tasks = [answer(client, request, partial(seen, i)) for i, request in enumerate(made[:4])]
    result = await asyncio.gather(*tasks, answer(client, made[4]))
    assert len(begun) == 4
    return result


def hang(server: RunningServer) -> None:
    os.kill(server.grammar_process().pid, signal.SIGSTOP)


def hang_for_a_while(server: RunningServer) -> None:
    process = server.grammar_process()
    process.suspend()
    asyncio.get_running_loop().call_later(0.5, process.resume)


@pytest.mark.parametrize(
    ("trouble", "restarts"),
    [
        pytest.param(RunningServer.kill_grammar_process, 1, id="killed"),
        pytest.param(hang, 1, id="hung", marks=pytest.mark.slow),
        pytest.param(hang_for_a_while, 0, id="hung for a moment", marks=pytest.mark.slow),
    ],
)
async def test_every_request_ends_with_the_tokens_of_an_undisturbed_run(
    server: RunningServer, trouble: Callable[[RunningServer], None], restarts: int
) -> None:
    async with Client(server.address) as client:
        wanted = await asyncio.gather(*(answer(client, request) for request in requests()))
        before = await idle_stats(client)
        got = await disturbed(client, lambda: trouble(server))
        await started_again(client, before.grammar_starts + restarts)
        after = await left_idle(client)
    assert [each.whole for each in got] == [each.whole for each in wanted]
    assert after.grammar_starts - before.grammar_starts == restarts
    # The unguided request lost no step: it has one step for each token that was not an accepted draft.
    unguided = got[4].last.telemetry
    assert unguided.steps == len(got[4].token_ids) - unguided.accepted_draft_tokens
    assert unguided.deferred_rows == 0
