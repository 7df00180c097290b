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

from gpu_engine.cli.client import Client
from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import ANSWER_TIMEOUT_S, Answer, answer, answers, chat, idle_stats, started_again
from tests.e2e.conftest import RunningServer

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


async def test_a_stop_string_cuts_at_the_same_place_with_and_without_drafts(server: RunningServer) -> None:
    request = pb.GenerateRequest(
        text="1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5,", sampling=sampling(temperature=0.0, stop=["8,"], max_tokens=40)
    )
    async with Client(server.address) as client:
        drafted = await answer(client, request)
        plain = await answer(client, without_speculation(request))
    assert "8," not in drafted.text
    assert drafted.last.matched_stop_str == "8,"
    assert (drafted.text, drafted.token_ids) == (plain.text, plain.token_ids)
    assert drafted.last.usage.completion_tokens == plain.last.usage.completion_tokens == len(plain.token_ids)
    assert 0 < plain.last.usage.cached_tokens < plain.last.usage.prompt_tokens


async def test_the_seed_of_one_of_n_sequences_reproduces_it(server: RunningServer) -> None:
    async with Client(server.address) as client:
        request = pb.GenerateRequest(text="Once upon a time", sampling=sampling(n=3, max_tokens=16))
        all_of_them = await answers(client, request)
        assert len({tuple(a.token_ids) for a in all_of_them}) == 3
        request.sampling.n = 1
        request.sampling.seed = all_of_them[2].last.telemetry.seed
        again = await answer(client, request)
    assert again.token_ids == all_of_them[2].token_ids


async def test_logprobs_come_with_every_token(server: RunningServer) -> None:
    request = pb.GenerateRequest(
        text="The capital of France is", sampling=sampling(temperature=0.0, max_tokens=6, logprobs=3)
    )
    async with Client(server.address) as client:
        got = await answer(client, request)
    assert len(got.logprobs) == len(got.token_ids)
    for token, entry in zip(got.token_ids, got.logprobs, strict=True):
        values = [top.logprob for top in entry.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob <= 0
        assert entry.top[0].token_id == token


@pytest.mark.parametrize("backend", [pb.BACKEND_LLGUIDANCE, pytest.param(pb.BACKEND_XGRAMMAR, marks=pytest.mark.slow)])
async def test_log_probabilities_of_prompt_and_fields_are_those_of_the_same_tokens(
    server: RunningServer, backend: pb.Backend
) -> None:
    grammar = guided(json_schema=json.dumps(SCHEMA), backend=backend)
    options = pb.ResponseOptions(echo=True, prompt_logprobs=2, per_field_logprobs=True)
    request = chat(PROMPT, grammar=grammar, sampling=sampling(temperature=0.8, logprobs=2), response=options)
    async with Client(server.address) as client:

        async def streamed(asked: pb.GenerateRequest) -> list[pb.GenerateResponse]:
            return [response async for response in client.generate(asked, timeout_s=ANSWER_TIMEOUT_S)]

        responses = [await streamed(each) for each in (request, without_speculation(request))]
        first, last = responses[0][0], responses[0][-1]
        for mine in responses:
            assert list(mine[-1].field_logprobs) == list(last.field_logprobs)
            assert list(mine[0].prompt_logprobs) == list(first.prompt_logprobs)
        prompt, tokens = list(first.prompt_token_ids), [t for r in responses[0] for t in r.token_ids]
        chosen = [entry for r in responses[0] for entry in r.logprobs]
        text = "".join(r.text for r in responses[0])
        value = json.loads(text[text.index("{") :])  # the echo of the prompt is in front
        again = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt + tokens), response=options, sampling=sampling())
        again.response.per_field_logprobs, again.sampling.max_tokens = False, 1
        scored = (await streamed(again))[0].prompt_logprobs
    assert len(first.prompt_logprobs) == len(prompt)
    assert list(scored[: len(prompt)]) == list(first.prompt_logprobs)
    assert list(scored[len(prompt) :]) == chosen
    pointers = ["/name", "/year", *(f"/tags/{i}" for i in range(len(value["tags"])))]
    assert [leaf.pointer for leaf in last.field_logprobs] == pointers
    for leaf in last.field_logprobs:
        runs = (chosen[i : i + leaf.tokens] for i in range(len(chosen)))
        assert any(leaf.logprob == pytest.approx(sum(entry.logprob for entry in run)) for run in runs)


async def test_a_cancelled_answer_leaves_nothing_behind(server: RunningServer) -> None:
    async with Client(server.address) as client:
        call = client.generate(chat(PROMPT, grammar=guided(json_object=True), sampling=sampling(temperature=1.0)))
        await anext(call)
        await call.aclose()
        stats = await idle_stats(client)
    assert (stats.running, stats.waiting, stats.pages_used, stats.matchers) == (0, 0, 0, 0)


async def test_abort_ends_the_stream(server: RunningServer) -> None:
    async with Client(server.address) as client:
        request = pb.GenerateRequest(
            text="Count:", request_id="mine", sampling=sampling(ignore_eos=True, max_tokens=400, temperature=1.0)
        )
        task = asyncio.create_task(answer(client, request))
        while not await client.abort("mine"):  # noqa: ASYNC110 - until the server knows the request
            await asyncio.sleep(0.02)
        got: Answer = await task
    assert got.last.finish_reason == pb.FINISH_REASON_ABORTED


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
