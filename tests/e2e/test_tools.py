"""Tool calls as a client sees them: the embedded model, whose chat template shows no functions, and both backends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import jsonschema
import pytest

from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import ANSWER_TIMEOUT_S
from tests.e2e.conftest import RunningServer
from tests.rpc_client import Client

pytestmark = pytest.mark.model

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TIME: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "time": TIME}
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}
BACKENDS = [
    pytest.param(pb.BACKEND_LLGUIDANCE, id="llguidance"),
    pytest.param(pb.BACKEND_XGRAMMAR, id="xgrammar", marks=pytest.mark.slow),
]


def functions(**fields: Any) -> pb.Tools:
    shown = [
        pb.Tool(name=name, description=f"Tells the {name}.", parameters=json.dumps(schema))
        for name, schema in SCHEMAS.items()
    ]
    return pb.Tools(tools=shown, **fields)


def request(content: str, tools: pb.Tools, drafts: int | None = None, **fields: Any) -> pb.GenerateRequest:
    message = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=content)])
    sampling = pb.SamplingParams(max_tokens=150, seed=3, temperature=0.8)
    made = pb.GenerateRequest(messages=message, tools=tools, sampling=sampling, **fields)
    if drafts is not None:
        made.speculation.num_draft_tokens = drafts
    return made


async def ask(client: Client, message: pb.GenerateRequest) -> tuple[list[int], list[dict[str, str]], str, int]:
    """Return the tokens, the calls, the content and the finish reason of an answer."""
    tokens: list[int] = []
    calls: list[dict[str, str]] = []
    content, finish = "", 0
    async for response in client.generate(message, timeout_s=ANSWER_TIMEOUT_S):
        tokens += response.token_ids
        finish = response.finish_reason or finish
        for part in response.parts:
            if part.kind == pb.AnswerPart.KIND_TOOL_CALL:
                assert part.tool_call_index == len(calls)
                calls.append({"id": part.tool_call_id, "name": part.tool_name, "arguments": ""})
            elif part.kind == pb.AnswerPart.KIND_TOOL_ARGUMENTS:
                calls[part.tool_call_index]["arguments"] += part.text
            else:
                assert part.kind == pb.AnswerPart.KIND_CONTENT
                content += part.text
    return tokens, calls, content, finish


def check(calls: list[dict[str, str]]) -> None:
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    assert len({call["id"] for call in calls}) == len(calls)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_required_calls_fit_their_schemas_with_any_number_of_drafts(
    server: RunningServer, backend: pb.Backend
) -> None:
    options = pb.Grammar(backend=backend)
    tools = functions(choice=pb.TOOL_CHOICE_REQUIRED)
    async with Client(server.address) as client:
        found = await asyncio.gather(
            *(ask(client, request("What is the weather in Oslo?", tools, k, grammar=options)) for k in (0, 3, 7))
        )
    tokens, calls, content, finish = found[0]
    assert [one[0] for one in found] == [tokens] * 3
    assert finish in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_GRAMMAR_CLOSED)
    assert content.strip() == ""
    assert calls
    check(calls)


async def test_a_named_call_and_its_result(server: RunningServer) -> None:
    tools = functions(choice=pb.TOOL_CHOICE_NAMED, name="time", parallel=False)
    message = request("What time is it?", tools)
    async with Client(server.address) as client:
        _, calls, _, _ = await ask(client, message)
        assert [call["name"] for call in calls] == ["time"]
        check(calls)
        message.messages.messages.add(role="assistant", tool_calls=[pb.ToolCall(**calls[0])])
        message.messages.messages.add(role="tool", tool_call_id=calls[0]["id"], content="It is noon.")
        message.tools.choice, message.tools.name = pb.TOOL_CHOICE_NONE, ""
        _, calls, content, _ = await ask(client, message)
        assert content
        assert not calls


@pytest.mark.parametrize("backend", BACKENDS)
async def test_tools_or_an_answer_to_a_schema_in_one_request(server: RunningServer, backend: pb.Backend) -> None:
    grammar = pb.Grammar(json_schema=json.dumps(ANSWER), backend=backend)
    async with Client(server.address) as client:
        found = await asyncio.gather(
            *(ask(client, request(text, functions(), grammar=grammar)) for text in ("How are you?", "Weather in Oslo?"))
        )
    for _, calls, content, _ in found:
        check(calls)
        if not calls:
            jsonschema.validate(json.loads(content), ANSWER)


async def test_free_text_with_tools_has_content(server: RunningServer) -> None:
    async with Client(server.address) as client:
        _, calls, content, _ = await ask(client, request("Write a poem about the sea.", functions()))
    check(calls)
    assert calls or content


async def test_an_error_of_a_schema_names_the_function(server: RunningServer) -> None:
    bad = pb.Tool(name="bad", parameters='{"properties": {"a": {"type": "strin"}}}')
    tools = pb.Tools(tools=[*functions().tools, bad], choice=pb.TOOL_CHOICE_REQUIRED)
    async with Client(server.address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(client, request("x", tools))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(refused.value.details()).startswith("tools.tools[2].parameters: ")
