"""Beam searches over the wire, on the embedded model and both libraries of grammars: valid, whole, without leaks.

A fast witness of guided beams is in http/test_extensions.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import jsonschema
import pytest

from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import ANSWER_TIMEOUT_S, idle_stats, left_idle, started_again, steps_after
from tests.e2e.conftest import RunningServer
from tests.rpc_client import Client

pytestmark = pytest.mark.model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "London", "Prague", "Cairo"]},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "kind": {"enum": ["tower", "bridge", "castle"]},
    },
    "required": ["city", "year", "kind"],
    "additionalProperties": False,
}


def request(backend: int | None, width: int = 4, max_tokens: int = 40) -> pb.GenerateRequest:
    """Return a search for `width` answers; `backend` None: without a grammar."""
    made = pb.GenerateRequest(
        text="A famous building, as JSON: ",
        sampling=pb.SamplingParams(max_tokens=max_tokens, n=width),
        beam_search=pb.BeamSearch(beam_width=width),
    )
    if backend is not None:
        made.grammar.CopyFrom(pb.Grammar(json_schema=json.dumps(SCHEMA), backend=pb.Backend.ValueType(backend)))
        made.grammar.whitespace = pb.WHITESPACE_BOUNDED  # with one layout, two beams may spell one text
    return made


async def responses(client: Client, made: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in client.generate(made, timeout_s=ANSWER_TIMEOUT_S)]


def found(answers: list[pb.GenerateResponse]) -> list[tuple[str, float]]:
    assert [each.index for each in answers] == list(range(len(answers)))
    assert all(each.HasField("beam_score") for each in answers)
    return [(each.text, each.beam_score) for each in answers]


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pb.BACKEND_LLGUIDANCE, pb.BACKEND_XGRAMMAR], ids=["llguidance", "xgrammar"])
async def test_every_guided_beam_is_valid_and_survives_a_kill(server: RunningServer, backend: int) -> None:
    async with Client(server.address) as client:
        free, guided = await asyncio.gather(
            responses(client, request(None, 2, 24)), responses(client, request(backend))
        )
        before = await idle_stats(client)
        asked = asyncio.create_task(responses(client, request(backend)))
        await steps_after(client, before.steps + 6)
        server.kill_grammar_process()
        again = await asked
        await started_again(client, before.grammar_starts + 1)
        after = await left_idle(client)
    texts = [text for text, _ in found(guided)]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) == 4
    scores = [score for _, score in found(guided)]
    assert scores == sorted(scores, reverse=True)
    assert len({text for text, _ in found(free)}) == 2
    assert [text for text, _ in found(again)] == texts
    assert [score for _, score in found(again)] == pytest.approx(scores, rel=1e-5)
    assert after.grammar_starts == before.grammar_starts + 1


async def test_a_cancelled_search_leaves_nothing(server: RunningServer) -> None:
    async with Client(server.address) as client:
        before = await idle_stats(client)
        asked = asyncio.create_task(responses(client, request(pb.BACKEND_LLGUIDANCE)))
        await steps_after(client, before.steps + 4)
        asked.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.RpcError)):
            await asked
        await left_idle(client)
