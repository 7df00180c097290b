"""Other clients, unmodified, against the gateway: langchain, pydantic-ai, outlines, and instructor if it is installed.

Not responsible for: OpenAI's own client (test_openai.py, test_tools.py), programs (test_programs.py).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.model

QUESTION = "Name a city of France, and its country."


class Remark(BaseModel):
    """Anything: where no schema holds the answer, a small model leaves fields out."""

    name: str = ""


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=16)
    country: Literal["France", "Italy"]


def langchain(gateway: str, model: str, **fields: Any) -> Any:
    from langchain_openai import ChatOpenAI

    asked: dict[str, Any] = {"max_tokens": 80, "seed": 1, "max_retries": 0} | fields
    return ChatOpenAI(model=model, base_url=f"http://{gateway}/v1", api_key="unused", **asked)


@pytest.mark.client("langchain-openai", "chat")
@pytest.mark.client("langchain-openai", "chat, streamed, with usage")
def test_langchain_answers_and_streams(gateway: str, model: str) -> None:
    chat = langchain(gateway, model, max_tokens=16, temperature=0, stream_usage=True)
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert whole.content
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 16
    assert whole.usage_metadata["output_tokens"] == 16


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(
            "json_schema",
            marks=pytest.mark.client("langchain-openai", "a pydantic model, by `response_format` (`.parse`)"),
        ),
        pytest.param(
            "function_calling", marks=pytest.mark.client("langchain-openai", "a pydantic model, by a function")
        ),
    ],
)
def test_langchain_returns_structured_output(gateway: str, model: str, method: str) -> None:
    chat = langchain(gateway, model).with_structured_output(City, method=method)
    assert isinstance(chat.invoke(QUESTION), City)


@pytest.mark.client("langchain-openai", "tools, `tool_choice` with a name")
@pytest.mark.client("langchain-openai", "tools, `tool_choice` required")
@pytest.mark.client("langchain-openai", "tool calls, streamed")
@pytest.mark.parametrize("choice", ["City", "required"])
def test_langchain_binds_tools_and_streams(gateway: str, model: str, choice: str) -> None:
    joined: Any = None
    for chunk in langchain(gateway, model).bind_tools([City], tool_choice=choice).stream(QUESTION):
        joined = chunk if joined is None else joined + chunk
    assert joined.tool_calls
    for call in joined.tool_calls:
        City.model_validate(call["args"])


@pytest.mark.client("langchain-openai", "tools, `tool_choice` auto")
@pytest.mark.client("langchain-openai", "a tool's result, sent back")
def test_langchain_goes_on_after_calls(gateway: str, model: str) -> None:
    """The model calls because it has called before."""
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    turns: list[Any] = []
    for name in ("Paris", "Rome", "Lyon"):
        call = {"name": "City", "args": {"name": name, "country": "France"}, "id": f"call_{name}"}
        turns += [HumanMessage(f"Where is {name}?"), AIMessage("", tool_calls=[call])]
        turns += [ToolMessage("found", tool_call_id=f"call_{name}"), AIMessage("It is there.")]
    chat = langchain(gateway, model, temperature=0, max_tokens=120).bind_tools([City])
    answer = chat.invoke([*turns, HumanMessage("Where is Nice?")])
    assert answer.tool_calls
    for call in answer.tool_calls:
        City.model_validate(call["args"])


@asynccontextmanager
async def pydantic_agent(gateway: str, model: str, output: Any) -> AsyncIterator[Any]:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with openai.AsyncOpenAI(base_url=f"http://{gateway}/v1", api_key="unused", max_retries=0) as client:
        yield Agent(OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client)), output_type=output)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("tool", marks=pytest.mark.client("pydantic-ai", "a pydantic model, by a function")),
        pytest.param(
            "native", marks=pytest.mark.client("pydantic-ai", "a pydantic model, by `response_format` (`.parse`)")
        ),
    ],
)
async def test_pydantic_ai_returns_an_object(gateway: str, model: str, kind: str) -> None:
    from pydantic_ai import NativeOutput, ToolOutput

    async with pydantic_agent(gateway, model, ToolOutput(City) if kind == "tool" else NativeOutput(City)) as agent:
        result = await agent.run(QUESTION, model_settings={"max_tokens": 80, "seed": 1})
    assert isinstance(result.output, City)


@pytest.mark.client("pydantic-ai", "chat")
@pytest.mark.client("pydantic-ai", "chat, streamed, with usage")
async def test_pydantic_ai_answers_and_streams(gateway: str, model: str) -> None:
    settings: Any = {"max_tokens": 16, "temperature": 0.0}
    async with pydantic_agent(gateway, model, str) as agent:
        whole = await agent.run(QUESTION, model_settings=settings)
        async with agent.run_stream(QUESTION, model_settings=settings) as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
            usage = result.usage
    assert "".join(pieces) == whole.output
    assert len(pieces) > 1
    assert usage.output_tokens == 16


@pytest.mark.client("outlines", "chat")
@pytest.mark.client("outlines", "chat, streamed, with usage")
def test_outlines_answers_and_streams(client: openai.OpenAI, model: str) -> None:
    outlines = pytest.importorskip("outlines", reason="needs outlines, which takes no Python 3.14")

    served = outlines.from_vllm(client, model)
    asked: Any = {"max_tokens": 16, "temperature": 0}
    options: Any = {"stream_options": {"include_usage": True}}
    assert "".join(served.stream(QUESTION, **asked, **options)) == served(QUESTION, **asked)


@pytest.mark.client("outlines", "`structured_outputs` of vLLM")
@pytest.mark.parametrize("kind", ["schema", "choice", "regex", "grammar"])
def test_outlines_sends_structured_outputs(client: openai.OpenAI, model: str, kind: str) -> None:
    outlines = pytest.importorskip("outlines", reason="needs outlines, which takes no Python 3.14")
    from outlines.types import CFG, Regex

    served = outlines.from_vllm(client, model)
    kinds: dict[str, Any] = {
        "schema": City,
        "choice": Literal["yes", "no"],
        "regex": Regex("[0-9]{3}"),
        "grammar": CFG('start: "a" | "bb"'),
    }
    answer: Any = served(QUESTION, kinds[kind], max_tokens=80, seed=1)
    match kind:
        case "schema":
            City.model_validate(json.loads(answer))
        case "choice":
            assert answer in ("yes", "no")
        case "regex":
            assert len(answer) == 3
            assert int(answer) >= 0
        case _:
            assert answer in ("a", "bb")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("TOOLS", marks=pytest.mark.client("instructor", "a pydantic model, by a function")),
        pytest.param(
            "JSON_SCHEMA", marks=pytest.mark.client("instructor", "a pydantic model, by `response_format` (`.parse`)")
        ),
        pytest.param("JSON", marks=pytest.mark.client("instructor", "`response_format` json_object")),
    ],
)
def test_instructor_returns_an_object(client: openai.OpenAI, model: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason="needs the extra `clients`")
    patched = instructor.from_openai(client, mode=instructor.Mode[mode])
    wanted: Any = Remark if mode == "JSON" else City
    answer = patched.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=wanted,
        max_tokens=80,
        max_retries=1,
        seed=1,
    )
    assert isinstance(answer, wanted)
