"""Tool calls through OpenAI's own client, in chat and in the Responses API."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.http.conftest import Asker

pytestmark = pytest.mark.model


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


CLOCK = closed(zone={"enum": ["UTC", "CET"]})
MOOD = closed(mood={"enum": ["good", "bad"]})
SCHEMAS = {"weather": closed(city={"type": "string", "maxLength": 12}, unit={"enum": ["C", "F"]}), "clock": CLOCK}
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
def test_calls_that_must_be_made_fit_their_schemas(ask: Asker, choice: Any) -> None:
    asked: Any = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200, "seed": 4}
    whole = ask.chat(ASK, **asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls
    for call in whole.message.tool_calls:
        fits(call)
    if choice != "required":
        assert {call.function.name for call in whole.message.tool_calls if call.type == "function"} == {"clock"}
    with ask.client.chat.completions.stream(model=ask.model, messages=ASK, **asked) as stream:
        joined = stream.get_final_completion().choices[0]
    assert joined.finish_reason == "tool_calls"
    calls = [(call.function.name, call.function.arguments) for call in joined.message.tool_calls or []]
    assert calls == [(c.function.name, c.function.arguments) for c in whole.message.tool_calls if c.type == "function"]


@pytest.mark.client("openai", "tools, `tool_choice` auto")
@pytest.mark.parametrize("parallel", [True, False])
def test_under_auto_the_model_decides_whether_it_calls(ask: Asker, parallel: bool) -> None:
    asked: Any = {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": parallel, "temperature": 0}
    calls = ask.chat(CALLED_BEFORE, **asked, max_tokens=100).choices[0]
    assert calls.finish_reason == "tool_calls"
    assert calls.message.tool_calls
    for call in calls.message.tool_calls:
        fits(call)
    text = ask.chat("Hello!", **asked).choices[0]
    assert text.message.tool_calls is None
    assert text.message.content


@pytest.mark.client("openai", "strict tools, `tool_choice` auto")
def test_strict_holds_under_auto(ask: Asker) -> None:
    """Where it need not, the model repeats the unit that the schema does not allow."""
    asked: Any = {"tool_choice": "auto", "max_tokens": 100, "temperature": 0}
    (call,) = ask.chat(CALLED_BEFORE, **asked, tools=strict_tools(True)).choices[0].message.tool_calls
    fits(call)
    (free,) = ask.chat(CALLED_BEFORE, **asked, tools=strict_tools(False)).choices[0].message.tool_calls
    assert json.loads(free.function.arguments)["unit"] == "celsius"


@pytest.mark.client("openai", "tools, `tool_choice` auto, and `response_format`")
@pytest.mark.client("openai", "tools, `tool_choice` required, and `response_format`")
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_tools_and_a_response_format_are_one_grammar(ask: Asker, temperature: float) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "mood", "schema": MOOD}}
    asked: Any = {"tools": TOOLS, "response_format": form, "max_tokens": 100, "seed": 1, "temperature": temperature}
    called = ask.chat(CALLED_BEFORE, **asked).choices[0]
    assert (called.finish_reason, called.message.content) == ("tool_calls", None)
    answered = ask.chat(ANSWERED_BEFORE, **asked).choices[0]
    assert (answered.finish_reason, answered.message.tool_calls) == ("stop", None)
    jsonschema.validate(json.loads(answered.message.content or ""), MOOD)
    required = ask.chat(ANSWERED_BEFORE, **asked, tool_choice="required").choices[0]
    assert (required.finish_reason, required.message.content) == ("tool_calls", None)
    for call in [*(called.message.tool_calls or []), *(required.message.tool_calls or [])]:
        fits(call)


@pytest.mark.client("openai", "a pydantic model, by a function")
def test_parse_reads_strict_functions(ask: Asker) -> None:
    answer = ask.client.chat.completions.parse(
        model=ask.model,
        messages=ASK,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
        seed=1,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


@pytest.mark.client("openai", "a tool's result, sent back")
def test_a_result_goes_back_and_no_call_is_made_where_none_may_be(ask: Asker) -> None:
    first = ask.chat(ASK, tools=TOOLS, tool_choice="required", max_tokens=80, seed=4).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 degrees"} for call in first.tool_calls]
    turns = [*ASK, first.model_dump(), *results]  # as users send a message back: with its nulls
    second = ask.chat(turns, tools=TOOLS, tool_choice="none", max_tokens=16, seed=1)
    assert second.usage.prompt_tokens > 60
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].message.content


@pytest.mark.client("openai", "custom tools")
def test_a_custom_tool_s_input_matches_its_grammar(ask: Asker) -> None:
    asked: Any = {"tools": CUSTOM, "tool_choice": "required", "parallel_tool_calls": False, "seed": 2}
    (call,) = ask.chat(ASK, **asked).choices[0].message.tool_calls
    assert call.type == "custom"
    assert re.fullmatch(r"[0-9] \+ [0-9]", call.custom.input)
    chunks = ask.chat(ASK, **asked, stream=True)
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    inputs = [delta.model_dump()["custom"]["input"] for delta in deltas]
    assert "".join(inputs) == call.custom.input


@pytest.mark.client("openai", "functions in `responses.create`")
def test_the_responses_api_makes_calls(ask: Asker) -> None:
    tool: Any = {"type": "function", "name": "clock", "parameters": CLOCK, "strict": True}
    asked: Any = {"model": ask.model, "input": "What time is it?", "tools": [tool], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "max_output_tokens": 60, "extra_body": {"seed": 3}}
    answer = ask.client.responses.create(**asked)
    (call,) = answer.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), CLOCK)
    with ask.client.responses.stream(**asked) as stream:
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
    again = ask.client.responses.create(model=ask.model, input=turns, tools=[tool], max_output_tokens=16)
    assert again.usage is not None
    assert again.usage.input_tokens > 40


def test_a_wrong_tool_is_named(ask: Asker) -> None:
    wrong = [{"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}]
    named = {"type": "function", "function": {"name": "no"}}
    for fields, message in (
        ({"tools": TOOLS, "tool_choice": named}, "'no' is none of the tools"),
        ({"tool_choice": "required"}, "tool_choice: needs tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function: is required"),
        ({"tools": wrong}, "tools[0].function.parameters: "),
    ):
        with pytest.raises(openai.BadRequestError, match=re.escape(message)):
            ask.chat(ASK, **fields)
