"""Other clients, unmodified, against the gateway: langchain, pydantic-ai, outlines, and instructor if it is installed.

Not responsible for: OpenAI's own client (test_openai.py, test_tools.py).
"""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.model

QUESTION = "Name a city of France, and its country."


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=16)
    country: Literal["France", "Italy"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_returns_structured_output(gateway: str, model: str, method: Literal["json_schema"]) -> None:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(
        model=model, base_url=f"http://{gateway}/v1", api_key="unused", max_tokens=80, seed=1, max_retries=0
    )
    assert isinstance(chat.with_structured_output(City, method=method).invoke(QUESTION), City)


def test_langchain_binds_tools_and_streams(gateway: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(
        model=model, base_url=f"http://{gateway}/v1", api_key="unused", max_tokens=80, seed=1, max_retries=0
    )
    joined: Any = None
    for chunk in chat.bind_tools([City], tool_choice="City").stream(QUESTION):
        joined = chunk if joined is None else joined + chunk
    City.model_validate(joined.tool_calls[0]["args"])


@pytest.mark.parametrize("kind", ["tool", "native"])
async def test_pydantic_ai_returns_an_object(gateway: str, model: str, kind: str) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with openai.AsyncOpenAI(base_url=f"http://{gateway}/v1", api_key="unused", max_retries=0) as client:
        output: Any = ToolOutput(City) if kind == "tool" else NativeOutput(City)
        agent = Agent(OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client)), output_type=output)
        result = await agent.run(QUESTION, model_settings={"max_tokens": 80, "seed": 1})
    assert isinstance(result.output, City)


@pytest.mark.parametrize("kind", ["schema", "choice", "regex", "grammar"])
def test_outlines_sends_structured_outputs(client: openai.OpenAI, model: str, kind: str) -> None:
    import outlines
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
@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "JSON"])
def test_instructor_returns_an_object(client: openai.OpenAI, model: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason="needs the extra `clients`")
    patched = instructor.from_openai(client, mode=instructor.Mode[mode])
    answer = patched.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=City,
        max_tokens=80,
        max_retries=5,
        temperature=0.7,
    )
    assert isinstance(answer, City)
