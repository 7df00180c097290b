"""The client measures what arrives, keeps order and bounds concurrency."""

from __future__ import annotations

import grpc
import pytest

from benchmarks.harness.client import Call, CallRefused, EngineClient, make_call
from protos.engine.v1 import engine_pb2 as pb
from tests.benchmarks.conftest import Serve
from tests.benchmarks.fake_engine import Script


def calls(count: int) -> list[Call]:
    sampling = pb.SamplingParams(max_tokens=4)
    return [make_call(f"call-{i}", [("user", str(i))], schema=None, sampling=sampling) for i in range(count)]


async def test_an_answer_is_put_together_from_its_deltas(serve_fake: Serve) -> None:
    address, _ = serve_fake(Script(tokens=lambda request: [7, 8, 9], text=lambda request: "seven"))
    client = EngineClient(address)
    answer = await client.generate(calls(1)[0])
    await client.close()
    assert (answer.token_ids, answer.text, answer.finish, answer.steps) == ((7, 8, 9), "seven", "stop", 2)
    assert answer.started_s < answer.first_s <= answer.last_s
    assert answer.times is not None
    assert answer.times.step_ms == 2.0


async def test_answers_keep_the_order_of_calls_at_a_bounded_concurrency(serve_fake: Serve) -> None:
    address, engine = serve_fake(Script())
    client = EngineClient(address)
    seen = []
    run = await client.run(calls(9), 4, lambda: seen.append(1))
    await client.close()
    assert [answer.name for answer in run.answers] == [f"call-{i}" for i in range(9)]
    assert engine.most_running <= 4
    assert len(seen) == 9
    assert run.wall_s > 0


async def test_a_refusal_carries_status_and_reason(serve_fake: Serve) -> None:
    address, _ = serve_fake(Script(refuse=(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")))
    client = EngineClient(address)
    with pytest.raises(CallRefused) as caught:
        await client.run(calls(3), 2)
    await client.close()
    assert (caught.value.status, caught.value.reason) == ("RESOURCE_EXHAUSTED", "queue is full")
