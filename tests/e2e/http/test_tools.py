"""Tool calls through OpenAI's own client, in chat and in the Responses API."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.model

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CLOCK = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASK: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
CUSTOM: Any = [
    {
        "type": "custom",
        "custom": {
            "name": "add",
            "description": "Adds.",
            "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9] \\+ [0-9]"}},
        },
    }
]


MOOD = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}


def conversation(*answers: dict[str, Any]) -> Any:
    """A conversation in which the assistant has answered for each city, and is asked once more."""
    turns: list[dict[str, Any]] = []
    for city, answer in zip(("Rome", "Paris", "Berlin"), answers, strict=True):
        turns += [{"role": "user", "content": f"Weather in {city}?"}, {"role": "assistant"} | answer]
    return [*turns, {"role": "user", "content": "Weather in Oslo?"}]


def a_call(city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.dumps({"city": city, "unit": "celsius"})}
    return {"tool_calls": [{"id": f"call_{city}", "type": "function", "function": function}]}


CALLED_BEFORE = conversation(*(a_call(city) for city in ("Rome", "Paris", "Berlin")))
"""A small model does what it did before: here it calls, with a unit that the schema does not allow."""
ANSWERED_BEFORE = conversation(*({"content": json.dumps({"mood": mood})} for mood in ("good", "bad", "good")))
"""Here it answers without a call."""


def strict_tools(strict: bool) -> Any:
    return [tool | {"function": tool["function"] | {"strict": strict}} for tool in TOOLS]


class Weather(BaseModel):
    """Tells the weather."""

    city: str = Field(max_length=12)
    unit: Literal["C", "F"]


def fits(call: Any) -> None:
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.client("openai", "tools, `tool_choice` required")
@pytest.mark.client("openai", "tools, `tool_choice` with a name")
@pytest.mark.client("openai", "tool calls, streamed")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}])
def test_calls_that_must_be_made_fit_their_schemas(client: openai.OpenAI, model: str, choice: Any) -> None:
    asked: Any = {"model": model, "messages": ASK, "tools": TOOLS, "tool_choice": choice, "max_tokens": 80, "seed": 4}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls
    for call in whole.message.tool_calls:
        fits(call)
    if choice != "required":
        assert {call.function.name for call in whole.message.tool_calls if call.type == "function"} == {"clock"}
    with client.chat.completions.stream(**asked) as stream:
        joined = stream.get_final_completion().choices[0]
    assert joined.finish_reason == "tool_calls"
    calls = [(call.function.name, call.function.arguments) for call in joined.message.tool_calls or []]
    assert calls == [(c.function.name, c.function.arguments) for c in whole.message.tool_calls if c.type == "function"]


@pytest.mark.client("openai", "tools, `tool_choice` auto")
@pytest.mark.parametrize("parallel", [True, False])
def test_under_auto_the_model_decides_whether_it_calls(client: openai.OpenAI, model: str, parallel: bool) -> None:
    asked: Any = {"model": model, "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": parallel}
    asked |= {"max_tokens": 100, "temperature": 0}
    calls = client.chat.completions.create(**asked, messages=CALLED_BEFORE).choices[0]
    assert calls.finish_reason == "tool_calls"
    assert calls.message.tool_calls
    for call in calls.message.tool_calls:
        fits(call)
    text = client.chat.completions.create(**asked, messages=[{"role": "user", "content": "Hello!"}]).choices[0]
    assert text.message.tool_calls is None
    assert text.message.content


@pytest.mark.client("openai", "strict tools, `tool_choice` auto")
def test_strict_holds_under_auto(client: openai.OpenAI, model: str) -> None:
    """Where it need not, the model repeats the unit that the schema does not allow."""
    asked: Any = {"model": model, "messages": CALLED_BEFORE, "tool_choice": "auto", "max_tokens": 100, "temperature": 0}
    (call,) = client.chat.completions.create(**asked, tools=strict_tools(True)).choices[0].message.tool_calls or []
    fits(call)
    (free,) = client.chat.completions.create(**asked, tools=strict_tools(False)).choices[0].message.tool_calls or []
    assert free.type == "function"
    assert json.loads(free.function.arguments)["unit"] == "celsius"


@pytest.mark.client("openai", "tools, `tool_choice` auto, and `response_format`")
@pytest.mark.client("openai", "tools, `tool_choice` required, and `response_format`")
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_tools_and_a_response_format_are_one_grammar(client: openai.OpenAI, model: str, temperature: float) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "mood", "schema": MOOD}}
    asked: Any = {"model": model, "tools": TOOLS, "response_format": form, "max_tokens": 100, "seed": 1}
    asked |= {"temperature": temperature}
    called = client.chat.completions.create(**asked, messages=CALLED_BEFORE).choices[0]
    assert (called.finish_reason, called.message.content) == ("tool_calls", None)
    answered = client.chat.completions.create(**asked, messages=ANSWERED_BEFORE).choices[0]
    assert (answered.finish_reason, answered.message.tool_calls) == ("stop", None)
    jsonschema.validate(json.loads(answered.message.content or ""), MOOD)
    required = client.chat.completions.create(**asked, messages=ANSWERED_BEFORE, tool_choice="required").choices[0]
    assert (required.finish_reason, required.message.content) == ("tool_calls", None)
    for call in [*(called.message.tool_calls or []), *(required.message.tool_calls or [])]:
        fits(call)


@pytest.mark.client("openai", "a pydantic model, by a function")
def test_parse_reads_strict_functions(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model,
        messages=ASK,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
        seed=1,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_no_call_is_made_where_none_may_be(client: openai.OpenAI, model: str) -> None:
    choice = client.chat.completions.create(
        model=model, messages=ASK, tools=TOOLS, tool_choice="none", max_tokens=20, seed=1
    ).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content


@pytest.mark.client("openai", "a tool's result, sent back")
def test_a_result_goes_back_into_the_conversation(client: openai.OpenAI, model: str) -> None:
    first = client.chat.completions.create(
        model=model, messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=80, seed=4
    ).choices[0]
    assert first.message.tool_calls
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"} for call in first.message.tool_calls
    ]
    turns: Any = [*ASK, first.message.model_dump(), *results]  # as users send a message back: with its nulls
    second = client.chat.completions.create(model=model, messages=turns, tools=TOOLS, max_tokens=16, seed=1)
    assert second.usage is not None
    assert second.usage.prompt_tokens > 60


@pytest.mark.client("openai", "custom tools")
def test_a_custom_tool_s_input_matches_its_grammar(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": ASK, "tools": CUSTOM, "tool_choice": "required", "max_tokens": 60}
    asked |= {"parallel_tool_calls": False, "seed": 2}
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
    assert call.type == "custom"
    assert re.fullmatch(r"[0-9] \+ [0-9]", call.custom.input)
    chunks = client.chat.completions.create(**asked, stream=True)
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    inputs = [delta.model_dump()["custom"]["input"] for delta in deltas]
    assert "".join(inputs) == call.custom.input


@pytest.mark.client("openai", "functions in `responses.create`")
def test_the_responses_api_makes_calls(client: openai.OpenAI, model: str) -> None:
    tool: Any = {"type": "function", "name": "clock", "parameters": CLOCK, "strict": True}
    asked: Any = {"model": model, "input": "What time is it?", "tools": [tool], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "max_output_tokens": 60, "extra_body": {"seed": 3}}
    answer = client.responses.create(**asked)
    (call,) = answer.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), CLOCK)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert streamed.arguments == call.arguments
    assert "response.function_call_arguments.delta" in kinds
    turns: Any = [
        {"role": "user", "content": "What time is it?"},
        call.model_dump(exclude_none=True, exclude={"parsed_arguments"}),
        {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"},
    ]
    again = client.responses.create(model=model, input=turns, tools=[tool], max_output_tokens=16)
    assert again.usage is not None
    assert again.usage.input_tokens > 40


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "'no' is none of the tools",
        ),
        ({"tool_choice": "required"}, "tool_choice: needs tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function: is required"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}]},
            "tools[0].parameters",
        ),
    ],
)
def test_a_wrong_tool_is_named(client: openai.OpenAI, model: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(message)):
        client.chat.completions.create(model=model, messages=ASK, max_tokens=8, **fields)
