"""Reasoning over HTTP: a toy model whose chat template thinks, a real engine, a gateway, and OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from benchmarks.harness.gateway import start_gateway
from benchmarks.harness.server import EngineServer, ServerOptions
from tests.gpu_engine import tiny

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content or '' }}{{ m.content or '' }}\n{% endfor %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}\n{% endif %}"
    "{# <tool_call> #}{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
)
END = b"</think>"
BUDGET = 24
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"enum": [1, 22]}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
ASK: Any = [{"role": "user", "content": "A number."}]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("thinker"), rounds=True)
    path = Path(folder) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    options = ServerOptions(
        model=str(folder), dtype="float32", num_threads=1, max_batch_size=4, extra=("--max-model-len", "512")
    )
    with (
        EngineServer(options) as engine,
        start_gateway(engine.address) as address,
        openai.OpenAI(base_url=f"http://{address}/v1", api_key="unused", max_retries=0, timeout=120) as client,
    ):
        yield client


def create(client: openai.OpenAI, **fields: Any) -> Any:
    body = {"thinking_token_budget": BUDGET, "return_token_ids": True} | fields.pop("extra_body", {})
    asked = {"model": client.models.list().data[0].id, "messages": ASK, "max_tokens": 150, "seed": 5}
    return client.chat.completions.create(**asked | fields, extra_body=body)


def counted(token_ids: list[int]) -> int:
    """Return the tokens up to the end of the marker: a token of the toy model is a byte."""
    return bytes(min(token, 255) for token in token_ids).index(END) + len(END)


@pytest.mark.parametrize("drafts", [0, 7])
def test_a_chat_answer_has_its_reasoning_apart_and_counted(thinker: openai.OpenAI, drafts: int) -> None:
    asked: dict[str, Any] = {"response_format": FORMAT, "reasoning_effort": "low"}
    asked["extra_body"] = {"speculation": {"num_draft_tokens": drafts}}
    answer = create(thinker, **asked)
    (choice,) = answer.choices
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert choice.message.reasoning_content
    assert choice.message.reasoning == choice.message.reasoning_content
    spent = answer.usage.completion_tokens_details.reasoning_tokens
    assert len(END) < spent <= BUDGET
    assert spent == counted(choice.token_ids)

    chunks = list(create(thinker, **asked, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    for name in ("content", "reasoning_content", "reasoning"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == getattr(choice.message, name)
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == spent


def test_a_call_behind_reasoning_and_the_turn_that_follows_it(thinker: openai.OpenAI) -> None:
    answer = create(thinker, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert message.reasoning
    assert answer.usage.completion_tokens_details.reasoning_tokens == counted(answer.choices[0].token_ids)
    said = [*ASK, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    behind = create(thinker, messages=said, tools=TOOLS, tool_choice="none", response_format=FORMAT)
    jsonschema.validate(json.loads(behind.choices[0].message.content), SCHEMA)


def test_reasoning_is_an_item_of_the_responses_api(thinker: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": thinker.models.list().data[0].id,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "reasoning": {"effort": "high"},
        "max_output_tokens": 200,
        "extra_body": {"seed": 5},
    }
    answer = thinker.responses.create(input="A number.", **asked)
    thought, message = answer.output
    assert (thought.type, message.type) == ("reasoning", "message")
    assert thought.content is not None
    assert thought.content[0].text
    assert answer.usage is not None
    spent = answer.usage.output_tokens_details.reasoning_tokens
    assert len(END) < spent < answer.usage.output_tokens
    jsonschema.validate(json.loads(answer.output_text), SCHEMA)
    with thinker.responses.stream(input="A number.", **asked) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == thought.content[0].text
    # The items of an answer are a part of the next input.
    items = [item.model_dump(exclude_none=True) for item in answer.output]
    second: Any = [{"role": "user", "content": "A number."}, *items, {"role": "user", "content": "Another one."}]
    again = thinker.responses.create(input=second, **asked)
    jsonschema.validate(json.loads(again.output_text), SCHEMA)


@pytest.mark.parametrize("streams", [False, True])
def test_anthropic_s_api_has_the_reasoning_as_a_block(thinker: openai.OpenAI, streams: bool) -> None:
    body: dict[str, Any] = {"model": thinker.models.list().data[0].id, "messages": ASK, "max_tokens": 150}
    body |= {"thinking": {"type": "enabled", "budget_tokens": BUDGET}, "stream": streams, "temperature": 0}
    body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    text = thinker.post("/messages", cast_to=str, body=body)
    if streams:
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        thought, answer = (
            "".join(delta.get(kind, "") for delta in deltas if delta["type"] == f"{kind}_delta")
            for kind in ("thinking", "text")
        )
        assert [delta["signature"] for delta in deltas if delta["type"] == "signature_delta"] == [""]
    else:
        content = json.loads(text)["content"]
        begun = [block["type"] for block in content]
        thought, answer = content[0]["thinking"], content[1]["text"]
    assert begun == ["thinking", "text"]
    assert thought
    jsonschema.validate(json.loads(answer), SCHEMA)
    body |= {"thinking": {"type": "disabled"}, "stream": False}
    (block,) = json.loads(thinker.post("/messages", cast_to=str, body=body))["content"]
    assert block["type"] == "text"
