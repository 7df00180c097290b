"""Whole servers as a client sees them: the embedded model, a grammar process, gRPC.

One witness of each behaviour of guided answers: libraries and drafts, calls of tools, reasoning, and the end at
max_tokens. tests/gpu_engine has each of them in all its forms.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest

from benchmarks.faults.traffic import GRAMMARS, LEAST_GUIDED
from benchmarks.harness.workloads import workload
from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import Answer, answer, chat, left_idle
from tests.e2e.conftest import RunningServer
from tests.rpc_client import Client

pytestmark = pytest.mark.model

PROMPT = "Extract name, year and tags as JSON: The Eiffel Tower, an iron tower in Paris, was opened in 1889."
ENDS = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_GRAMMAR_CLOSED)
BACKENDS = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(pb.BACKEND_LLGUIDANCE, id="llguidance"),
        # Its compile process loads torch: 20 s of CPU time on a slow machine.
        pytest.param(pb.BACKEND_XGRAMMAR, id="xgrammar", marks=pytest.mark.slow),
    ],
)


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


TOWER = closed(
    name={"type": "string", "maxLength": 30},
    year={"type": "integer", "minimum": 0, "maximum": 2100},
    tags={"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 3},
)
CITY = closed(city={"type": "string", "maxLength": 20}, people={"type": "integer", "maximum": 99999999})
SEA = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "words": {"type": "array", "items": {"type": "string"}, "minItems": 2}},
    "required": ["title", "words"],
}
TOOLS = {
    "weather": closed(city={"type": "string", "maxLength": 20}, unit={"enum": ["celsius", "fahrenheit"]}),
    "time": closed(zone={"enum": ["UTC", "CET"]}),
}


async def with_drafts(client: Client, request: pb.GenerateRequest) -> Answer:
    """Return the answer without drafts, whose tokens the answers with drafts have as well."""
    made = []
    for drafts in (0, 3, 7):
        made.append(pb.GenerateRequest())
        made[-1].CopyFrom(request)
        made[-1].speculation.num_draft_tokens = drafts
    plain, *drafted = await asyncio.gather(*(answer(client, each) for each in made))
    assert [each.whole for each in drafted] == [plain.whole] * 2
    assert plain.last.telemetry.draft_tokens == 0
    return plain


@BACKENDS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_streamed_guided_answer_fits_its_schema(
    server: RunningServer, backend: pb.Backend, temperature: float
) -> None:
    grammar = pb.Grammar(json_schema=json.dumps(TOWER), backend=backend)
    sampling = pb.SamplingParams(max_tokens=160, seed=1, temperature=temperature)
    request, tries = chat(PROMPT, grammar=grammar, sampling=sampling), 1
    async with Client(server.address) as client:
        got = await with_drafts(client, request)
        while got.deltas <= 3 and tries < 5:  # a server that was stopped for a while sends all it has as one response
            got, tries = await with_drafts(client, request), tries + 1
    assert got.last.finish_reason == pb.FINISH_REASON_STOP, got.text
    jsonschema.validate(json.loads(got.text), TOWER)
    assert got.deltas > 3
    telemetry, usage = got.last.telemetry, got.last.usage
    assert usage.completion_tokens == len(got.token_ids)
    assert telemetry.backend == backend
    assert 0 < telemetry.queue_ms <= telemetry.ttft_ms <= telemetry.total_ms
    assert telemetry.steps >= usage.completion_tokens - 1


async def test_a_cancelled_answer_leaves_nothing(server: RunningServer) -> None:
    async with Client(server.address) as client:
        call = client.generate(chat(PROMPT, grammar=pb.Grammar(json_object=True)))
        await anext(call)
        await call.aclose()
        await left_idle(client)


@BACKENDS
async def test_a_long_answer_is_completed_at_its_limit(server: RunningServer, backend: pb.Backend) -> None:
    request = chat(
        "Tell me about the sea, at length.",
        grammar=pb.Grammar(json_schema=json.dumps(SEA), backend=backend),
        sampling=pb.SamplingParams(max_tokens=24, temperature=0, seed=3),
    )
    async with Client(server.address) as client:
        got = await with_drafts(client, request)
        request.sampling.max_tokens = 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answer(client, request)
    assert got.last.finish_reason == pb.FINISH_REASON_GRAMMAR_CLOSED
    assert got.last.WhichOneof("matched_stop") == "matched_token_id"
    assert len(got.token_ids) <= 24
    jsonschema.validate(json.loads(got.text), SEA)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith("sampling.max_tokens: leaves 1 tokens, no answer of this grammar")


@BACKENDS
@pytest.mark.parametrize("budget", [None, pytest.param(24, marks=pytest.mark.slow)])
async def test_an_answer_after_reasoning_fits_its_schema(
    server: RunningServer, backend: pb.Backend, budget: int | None
) -> None:
    """A phase without a budget is closed before max_tokens."""
    request = pb.GenerateRequest(
        text="Tell a long story of a king and his daughter.\n<think>\n",
        grammar=pb.Grammar(json_schema=json.dumps(CITY), backend=backend),
        sampling=pb.SamplingParams(max_tokens=100, seed=5, temperature=1),
        reasoning=pb.Reasoning(begin="<think>", end="</think>", max_tokens=budget),
    )
    async with Client(server.address) as client:
        got = await with_drafts(client, request)
    assert got.last.finish_reason in ENDS[budget is None :]
    assert len(got.parts[pb.AnswerPart.KIND_REASONING].split()) > (20 if budget is None else 1)
    jsonschema.validate(json.loads(got.parts[pb.AnswerPart.KIND_CONTENT]), CITY)


@BACKENDS
async def test_required_calls_fit_their_schemas(server: RunningServer, backend: pb.Backend) -> None:
    tools = pb.Tools(choice=pb.TOOL_CHOICE_REQUIRED)
    for name, schema in TOOLS.items():
        tools.tools.add(name=name, description=f"Tells the {name}.", parameters=json.dumps(schema))
    sampling = pb.SamplingParams(max_tokens=150, seed=3, temperature=0.8)
    request = chat("What is the weather in Oslo?", tools=tools, sampling=sampling, grammar=pb.Grammar(backend=backend))
    async with Client(server.address) as client:
        got = await with_drafts(client, request)
        request.tools.tools.add(name="bad", parameters='{"properties": {"a": {"type": "strin"}}}')
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answer(client, request)
    assert got.last.finish_reason in ENDS
    assert got.parts.get(pb.AnswerPart.KIND_CONTENT, "").strip() == ""
    assert got.calls
    for call in got.calls:
        jsonschema.validate(json.loads(call["arguments"]), TOOLS[call["name"]])
    assert len({call["id"] for call in got.calls}) == len(got.calls)
    assert str(refused.value.details()).startswith("tools.tools[2].parameters: ")


async def test_the_generate_command_prints_a_valid_answer(server: RunningServer, root: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(TOWER))
    command = [
        *(sys.executable, "-m", "gpu_engine", "generate", "--server", server.address, "--chat", PROMPT),
        *("--schema", str(schema), "--temperature", "0", "--max-tokens", "160"),
    ]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    jsonschema.validate(json.loads(done.stdout), TOWER)
    assert "tokens/s" in done.stderr


@pytest.mark.slow
def test_the_demo_shows_a_valid_answer(root: Path) -> None:
    command = [sys.executable, "-m", "gpu_engine", "demo"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "jsonschema says valid" in done.stdout
    assert "the same answer" in done.stdout


async def test_no_grammar_of_the_soak_needs_more_tokens_than_it_leaves(server: RunningServer) -> None:
    """A smaller max_tokens is INVALID_ARGUMENT, which the soak takes for a fault of the server."""
    schemas = {item.name: pb.Grammar(json_schema=item.schema) for item in workload("schema") if item.schema}
    grammars = {**GRAMMARS, **schemas}
    async with Client(server.address) as client:
        needed = {name: (await client.compile(grammar)).min_tokens for name, grammar in grammars.items()}
    assert len(needed) > 12
    assert {name: tokens for name, tokens in needed.items() if not 0 < tokens <= LEAST_GUIDED} == {}
