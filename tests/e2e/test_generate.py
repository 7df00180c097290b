"""Whole servers as a client sees them: the embedded model, a grammar process, gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import answer, chat, idle_stats, started_again
from tests.e2e.conftest import RunningServer
from tests.rpc_client import Client

pytestmark = pytest.mark.model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "year": {"type": "integer", "minimum": 0, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "year", "tags"],
    "additionalProperties": False,
}
PROMPT = "Extract name, year and tags as JSON: The Eiffel Tower, an iron tower in Paris, was opened in 1889."


def sampling(**fields: Any) -> pb.SamplingParams:
    return pb.SamplingParams(**{"max_tokens": 160, "seed": 1} | fields)


def guided(**fields: Any) -> pb.Grammar:
    return pb.Grammar(**fields)


def without_speculation(request: pb.GenerateRequest) -> pb.GenerateRequest:
    plain = pb.GenerateRequest()
    plain.CopyFrom(request)
    plain.speculation.num_draft_tokens = 0
    return plain


@pytest.mark.parametrize(
    ("temperature", "backend"),
    [
        (0.0, pb.BACKEND_LLGUIDANCE),
        (1.0, pb.BACKEND_LLGUIDANCE),
        # Its compile process loads torch: 20 s of CPU time on a slow machine.
        pytest.param(0.0, pb.BACKEND_XGRAMMAR, marks=pytest.mark.slow),
        pytest.param(1.0, pb.BACKEND_XGRAMMAR, marks=pytest.mark.slow),
    ],
)
async def test_a_streamed_guided_answer_fits_its_schema(
    server: RunningServer, backend: pb.Backend, temperature: float
) -> None:
    grammar = guided(json_schema=json.dumps(SCHEMA), backend=backend)
    async with Client(server.address) as client:
        got = await answer(client, chat(PROMPT, grammar=grammar, sampling=sampling(temperature=temperature)))
    assert got.last.finish_reason == pb.FINISH_REASON_STOP, got.text
    jsonschema.validate(json.loads(got.text), SCHEMA)
    assert got.deltas > 3
    telemetry, usage = got.last.telemetry, got.last.usage
    assert usage.completion_tokens == len(got.token_ids)
    assert telemetry.backend == backend
    assert 0 < telemetry.queue_ms <= telemetry.ttft_ms <= telemetry.total_ms
    assert telemetry.steps + telemetry.accepted_draft_tokens >= usage.completion_tokens - 1


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (guided(choice=pb.Choice(choices=["yes", "no", "perhaps"])), "yes|no|perhaps"),
        (guided(regex="[0-9]{4}-[0-9]{2}-[0-9]{2}"), "[0-9]{4}-[0-9]{2}-[0-9]{2}"),
        (guided(ebnf='root ::= "a" ("b" | "c") "d"'), "a[bc]d"),
        (guided(lark='start: "x" ("y" | "z")', backend=pb.BACKEND_LLGUIDANCE), "x[yz]"),
        (guided(json_schema='{"const": {"a": [1, 2]}}', whitespace=pb.WHITESPACE_COMPACT), r'\{"a":\[1,2\]\}'),
    ],
    ids=["choice", "regex", "ebnf", "lark", "compact"],
)
async def test_every_kind_of_grammar_constrains_the_answer(
    server: RunningServer, grammar: pb.Grammar, pattern: str
) -> None:
    async with Client(server.address) as client:
        got = await answer(client, chat("Answer.", grammar=grammar, sampling=sampling(temperature=2.0)))
    assert got.last.finish_reason == pb.FINISH_REASON_STOP
    assert re.fullmatch(pattern, got.text)


@pytest.mark.parametrize("grammar", [None, guided(json_schema=json.dumps(SCHEMA))], ids=["unguided", "guided"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_speculation_changes_no_token(
    server: RunningServer, grammar: pb.Grammar | None, temperature: float
) -> None:
    request = chat(PROMPT, grammar=grammar, sampling=sampling(temperature=temperature, max_tokens=60))
    async with Client(server.address) as client:
        drafted = await answer(client, request)
        plain = await answer(client, without_speculation(request))
    assert drafted.token_ids == plain.token_ids
    assert plain.last.telemetry.draft_tokens == 0


async def test_a_cancelled_answer_leaves_nothing_behind(server: RunningServer) -> None:
    async with Client(server.address) as client:
        call = client.generate(chat(PROMPT, grammar=guided(json_object=True), sampling=sampling(temperature=1.0)))
        await anext(call)
        await call.aclose()
        stats = await idle_stats(client)
    assert (stats.running, stats.waiting, stats.pages_used, stats.matchers) == (0, 0, 0, 0)


@pytest.mark.slow
async def test_a_guided_answer_survives_the_death_of_the_grammar_process(server: RunningServer) -> None:
    request = chat(PROMPT, grammar=guided(json_schema=json.dumps(SCHEMA)), sampling=sampling(temperature=0.0))
    async with Client(server.address) as client:
        undisturbed = await answer(client, request)
        starts = (await client.stats()).grammar_starts
        text, token_ids, killed = "", list[int](), False
        last = pb.GenerateResponse()
        async for response in client.generate(request, timeout_s=120):
            text += response.text
            token_ids.extend(response.token_ids)
            last = response
            if not killed and len(token_ids) > 5:
                os.kill(server.grammar_process().pid, signal.SIGKILL)
                killed = True
        await started_again(client, starts + 1)
        stats = await idle_stats(client)
    assert killed
    assert last.finish_reason == pb.FINISH_REASON_STOP
    assert token_ids == undisturbed.token_ids
    jsonschema.validate(json.loads(text), SCHEMA)
    assert stats.grammar_starts == starts + 1


async def test_the_model_describes_itself(server: RunningServer) -> None:
    async with Client(server.address) as client:
        info = await client.info()
    assert (info.model, info.model_type, info.max_model_len, info.max_batch_size) == ("embedded", "llama", 512, 8)
    assert info.num_parameters == 134_515_008
    assert set(info.backends) == {pb.BACKEND_LLGUIDANCE, pb.BACKEND_XGRAMMAR}


async def test_the_generate_command_prints_a_valid_answer(server: RunningServer, root: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    command = [
        *(sys.executable, "-m", "gpu_engine", "generate", "--server", server.address, "--chat", PROMPT),
        *("--schema", str(schema), "--temperature", "0", "--max-tokens", "160"),
    ]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    jsonschema.validate(json.loads(done.stdout), SCHEMA)
    assert "tokens/s" in done.stderr


@pytest.mark.slow
def test_the_demo_shows_a_valid_answer(root: Path) -> None:
    command = [sys.executable, "-m", "gpu_engine", "demo"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "jsonschema says valid" in done.stdout
    assert "the same answer" in done.stdout
