"""A reasoning phase before a guided answer, as a client sees it: the embedded model, with markers of the request's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import ANSWER_TIMEOUT_S
from tests.e2e.conftest import RunningServer
from tests.rpc_client import Client

pytestmark = pytest.mark.model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 99999999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
PROMPT = "How many people live in Oslo? Think first, then answer in JSON.\n<think>\n"
BACKENDS = [
    pytest.param(pb.BACKEND_LLGUIDANCE, id="llguidance"),
    pytest.param(pb.BACKEND_XGRAMMAR, id="xgrammar", marks=pytest.mark.slow),
]


def request(drafts: int, backend: pb.Backend, **fields: Any) -> pb.GenerateRequest:
    made = pb.GenerateRequest(
        text=PROMPT,
        grammar=pb.Grammar(json_schema=json.dumps(SCHEMA), backend=backend),
        sampling=pb.SamplingParams(max_tokens=120, seed=5, temperature=0.8),
        reasoning=pb.Reasoning(begin="<think>", end="</think>", max_tokens=24),
    )
    made.MergeFrom(pb.GenerateRequest(**fields))
    made.speculation.num_draft_tokens = drafts
    return made


async def ask(client: Client, message: pb.GenerateRequest) -> tuple[list[int], dict[int, str], pb.GenerateResponse]:
    """Return the tokens, the text of each kind of part, and the last response."""
    tokens: list[int] = []
    parts: dict[int, str] = {}
    last = pb.GenerateResponse()
    async for response in client.generate(message, timeout_s=ANSWER_TIMEOUT_S):
        tokens += response.token_ids
        last = response
        for part in response.parts:
            parts[part.kind] = parts.get(part.kind, "") + part.text
    return tokens, parts, last


@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_answer_behind_the_phase_fits_its_schema_with_any_number_of_drafts(
    server: RunningServer, backend: pb.Backend
) -> None:
    async with Client(server.address) as client:
        found = await asyncio.gather(*(ask(client, request(k, backend)) for k in (0, 3, 7)))
    tokens, parts, last = found[0]
    assert [one[0] for one in found] == [tokens] * 3
    assert last.finish_reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_GRAMMAR_CLOSED)
    assert parts[pb.AnswerPart.KIND_REASONING]
    jsonschema.validate(json.loads(parts[pb.AnswerPart.KIND_CONTENT]), SCHEMA)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_phase_without_a_budget_is_closed_before_max_tokens(server: RunningServer, backend: pb.Backend) -> None:
    made = [request(k, backend, sampling=pb.SamplingParams(max_tokens=100, temperature=1)) for k in (3, 0)]
    for message in made:
        message.text = "Tell a long story of a king and his daughter.\n<think>\n"
        message.reasoning.ClearField("max_tokens")
    async with Client(server.address) as client:
        (tokens, parts, last), (plain, *_) = await asyncio.gather(*(ask(client, message) for message in made))
    assert tokens == plain
    assert len(tokens) <= 100
    assert last.finish_reason == pb.FINISH_REASON_GRAMMAR_CLOSED
    assert len(parts[pb.AnswerPart.KIND_REASONING].split()) > 20
    jsonschema.validate(json.loads(parts[pb.AnswerPart.KIND_CONTENT]), SCHEMA)


async def test_reasoning_without_a_grammar_needs_no_matcher(server: RunningServer) -> None:
    message = pb.GenerateRequest(
        text="<think>Hm.</think>\nOslo is",
        sampling=pb.SamplingParams(max_tokens=8, temperature=0),
        reasoning=pb.Reasoning(begin="<think>", end="</think>"),
    )
    async with Client(server.address) as client:
        _, parts, last = await ask(client, message)
    assert set(parts) == {pb.AnswerPart.KIND_CONTENT}
    assert last.telemetry.backend == pb.BACKEND_UNSPECIFIED
