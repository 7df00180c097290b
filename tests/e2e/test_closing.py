"""Budgeted completion through both processes and with the real model: answers that end within max_tokens."""

from __future__ import annotations

import json
import random

import grpc
import jsonschema
import pytest

from benchmarks.quality.random_schemas import random_schema
from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import answer, chat
from tests.e2e.conftest import RunningServer
from tests.rpc_client import Client

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "words": {"type": "array", "items": {"type": "string"}, "minItems": 2}},
    "required": ["title", "words"],
}
BACKENDS = [pb.BACKEND_LLGUIDANCE, pb.BACKEND_XGRAMMAR]


def request(
    schema: object, backend: pb.Backend, max_tokens: int, drafts: int, temperature: float = 0.0
) -> pb.GenerateRequest:
    return chat(
        "Tell me about the sea, at length.",
        grammar=pb.Grammar(json_schema=json.dumps(schema), backend=backend),
        sampling=pb.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=3),
        speculation=pb.Speculation(num_draft_tokens=drafts),
    )


@pytest.mark.parametrize("backend", [pb.BACKEND_LLGUIDANCE, pytest.param(pb.BACKEND_XGRAMMAR, marks=pytest.mark.slow)])
async def test_a_long_answer_is_completed_at_its_limit_with_the_same_tokens_for_any_number_of_drafts(
    server: RunningServer, backend: pb.Backend
) -> None:
    async with Client(server.address) as client:
        plain = await answer(client, request(SCHEMA, backend, 24, 0))
        drafted = await answer(client, request(SCHEMA, backend, 24, 7))
    assert plain.last.finish_reason == pb.FINISH_REASON_GRAMMAR_CLOSED
    assert plain.last.WhichOneof("matched_stop") == "matched_token_id"
    assert len(plain.token_ids) <= 24
    jsonschema.validate(json.loads(plain.text), SCHEMA)
    assert drafted.token_ids == plain.token_ids
    assert drafted.last.finish_reason == plain.last.finish_reason


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
async def test_random_schemas_at_random_limits(server: RunningServer, backend: pb.Backend) -> None:
    luck = random.Random(5)
    closed = 0
    async with Client(server.address) as client:
        for seed in range(6):
            schema = random_schema(seed)
            try:
                got = await answer(client, request(schema, backend, luck.randint(4, 60), 7, 0.8 * (seed % 2)))
            except grpc.aio.AioRpcError as error:
                if "sampling.max_tokens" not in (error.details() or ""):
                    raise
                continue
            if got.last.finish_reason != pb.FINISH_REASON_GRAMMAR_INCOMPLETE:
                jsonschema.validate(json.loads(got.text), schema)
                closed += got.last.finish_reason == pb.FINISH_REASON_GRAMMAR_CLOSED
    assert closed


async def test_a_limit_below_the_shortest_answer_is_rejected_at_once(server: RunningServer) -> None:
    async with Client(server.address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answer(client, request(SCHEMA, pb.BACKEND_LLGUIDANCE, 1, 0))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith("sampling.max_tokens: leaves 1 tokens, no answer of this grammar")
