"""Requests with logits processors and tensors, on a server with few pages, when the grammar process is killed.

The reference is each request alone on the same server, without drafts. Not responsible for: captured graphs (see
tests/gpu_engine/device/test_device_processors.py), beams (see test_beams.py).
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from benchmarks.harness.server import EngineServer, ServerOptions
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from tests.e2e.asking import ANSWER_TIMEOUT_S, idle_stats, left_idle, started_again
from tests.e2e.conftest import RunningServer
from tests.rpc_client import Client

pytestmark = [pytest.mark.model, pytest.mark.slow]

ROOM = "gpu_engine.processors"
LOADED = (
    f"ngrams={ROOM}.ngrams:NoRepeatedNgrams",
    f"end={ROOM}.long_answers:LengthPenalty",
    f'clients={ROOM}.client_tokens:ForbiddenForClient{{"clients": {{"guest": [31, 32, 33]}}}}',
)
"""One made of torch operations alone, which a device captures; one for all rows of a step; one for a sequence."""
USES: list[dict[str, str]] = [
    {"ngrams": '{"size": 8}'},
    {"end": '{"start": 4, "factor": 1.1}'},
    {"clients": ""},
    {"end": '{"start": 8, "factor": 1.2}', "ngrams": '{"size": 8}', "clients": ""},
    {},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "years": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2100}, "minItems": 8},
    },
    "required": ["name", "years"],
    "additionalProperties": False,
}
STATES = "hidden_states.30"
KV_TOKENS = 256
"""Less than half of what the five requests have together at their ends."""


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    """A server whose pages are too few for its slots, so that it preempts."""
    extra = ["--max-model-len", "256", "--kv-cache-tokens", str(KV_TOKENS), "--compile-timeout-s", "60"]
    for entry in LOADED:
        extra += ["--logits-processor", entry]
    with EngineServer(ServerOptions(num_threads=1, max_batch_size=5, extra=tuple(extra))) as engine:
        assert engine.pid is not None
        yield RunningServer(engine.address, psutil.Process(engine.pid))


@dataclass
class Found:
    """One answer."""

    tokens: list[int] = field(default_factory=list)
    finish: int = 0
    rows: dict[str, list[NDArray[Any]]] = field(default_factory=lambda: defaultdict(list))
    starts: dict[str, int] = field(default_factory=dict)

    def take(self, response: pb.GenerateResponse) -> None:
        """Add a response; asserts that no row is missing or comes twice."""
        self.tokens += response.token_ids
        self.finish = response.finish_reason
        for output in response.outputs:
            rows = np.frombuffer(output.data, dtype=np.uint8).reshape(output.shape[0], -1)
            begin = self.starts.setdefault(output.name, output.start)
            assert output.start == begin + sum(map(len, self.rows[output.name]))
            self.rows[output.name].append(rows)

    def tensor(self, name: str) -> NDArray[Any]:
        """Return the bytes of all rows, [rows, bytes]."""
        return np.concatenate(self.rows[name])


def requests(run: str, drafts: int) -> list[pb.GenerateRequest]:
    """Return four guided requests and a free one; all return tensors, and no run shares pages with another."""
    made = []
    for number, uses in enumerate(USES):
        sampling = pb.SamplingParams(max_tokens=64, temperature=0.8 * (number % 2), seed=number)
        request = pb.GenerateRequest(
            text=f"Describe tower number {number} as JSON, with its name and the years that matter most: ",
            sampling=sampling,
            cache_salt=f"{run} {number}",
            client_id="guest",
            response=pb.ResponseOptions(
                context_logits=number == 0,
                generation_logits=True,
                additional_outputs=[pb.AdditionalOutput(name=STATES, context=True)],
            ),
            speculation=pb.Speculation(num_draft_tokens=drafts),
        )
        if number < 4:
            request.grammar.json_schema = json.dumps(SCHEMA)
        else:
            request.sampling.ignore_eos = True
        for name, arguments in uses.items():
            request.logits_processors.add(name=name, arguments=arguments)
        made.append(request)
    return made


async def answer(client: Client, request: pb.GenerateRequest, seen: Callable[[int], None] = lambda _: None) -> Found:
    """Return the answer; `seen` is called with the number of its tokens so far."""
    found = Found()
    async for response in client.generate(request, timeout_s=ANSWER_TIMEOUT_S):
        found.take(response)
        seen(len(found.tokens))
    return found


async def all_at_once(client: Client, run: str, drafts: int, trouble: Callable[[], None]) -> list[Found]:
    """Run all requests together; call `trouble` once half of the guided ones have ten tokens."""
    begun: set[int] = set()

    def seen(number: int, count: int) -> None:
        if number < 4 and count >= 10 and number not in begun:
            begun.add(number)
            if len(begun) == 2:
                trouble()

    made = requests(run, drafts)
    found = await asyncio.gather(
        *(answer(client, each, lambda count, i=i: seen(i, count)) for i, each in enumerate(made))  # type: ignore[misc]
    )
    assert len(begun) >= 2
    return list(found)


async def preempted(address: str) -> int:
    """Return how many sequences have lost their slot in the iterations that the server remembers."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: engine_pb2_grpc.EngineAsyncStub = engine_pb2_grpc.EngineStub(channel)
        call = stub.WatchStats(pb.WatchStatsRequest(history=1000, omit_requests=True))
        first = await anext(aiter(call))
        call.cancel()
    return sum(each.preempted for each in first.iterations)


async def test_a_kill_changes_no_token_and_no_row(small: RunningServer) -> None:
    async with Client(small.address) as client:
        wanted = [await answer(client, each) for each in requests("alone", 0)]
        plain = requests("plain", 0)[3]
        plain.ClearField("logits_processors")
        without = await answer(client, plain)
        before = await idle_stats(client)
        assert await preempted(small.address) == 0
        runs = {}
        for drafts in (0, 3, 7):
            runs[drafts] = await all_at_once(client, f"killed {drafts}", drafts, small.kill_grammar_process)
            await started_again(client, before.grammar_starts + len(runs))
            await left_idle(client)
        assert await preempted(small.address) > 0
        after = await idle_stats(client)
    assert without.tokens != wanted[3].tokens, "the processors change the answer"
    assert after.grammar_starts == before.grammar_starts + 3
    for found in runs.values():
        for one, expected in zip(found, wanted, strict=True):
            assert (one.tokens, one.finish) == (expected.tokens, expected.finish)
            assert one.starts == expected.starts
            assert one.rows.keys() == expected.rows.keys() >= {"generation_logits", STATES}
            for name in expected.rows:
                # A row of a quantised model on a CPU has the same bits in any company.
                np.testing.assert_array_equal(one.tensor(name), expected.tensor(name))
    for one in wanted:
        assert len(one.tensor("generation_logits")) == len(one.tokens)
    assert "context_logits" in wanted[0].rows
