"""openai-python through the gateway smg, against the embedded model: what docs/gateways.md says works, does.

A feature is a function that returns what became of it: "works", "ignored" (smg answered as if it had not been asked for
it) or "refused" (an error with status 400). The page's table has a row for each, and the table of clients in
docs/http.md has some of them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.docs.pages import ROOT, rows
from tests.e2e.asking import idle_stats
from tests.e2e.conftest import RunningServer
from tests.e2e.smg import Smg, smg
from tests.rpc_client import Client
from tools.clients import FEATURES as IN_TABLE
from tools.clients import SMG

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec("smg") is None, reason="needs the gateway smg, of which there is a wheel for x86-64"
    ),
]

MODEL = "embedded"
QUESTION: list[Any] = [{"role": "user", "content": "Describe Oslo."}]


class City(pydantic.BaseModel):
    """A schema that this model fills within its limit."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=20)
    inhabitants: int = pydantic.Field(ge=0, le=9_999_999)


WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
CITY: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}


@pytest.fixture(scope="module")
def gateway(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Smg]:
    with smg([server.address], tmp_path_factory.mktemp("smg") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def client(gateway: Smg) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    """Return the only choice of a chat."""
    answer = client.chat.completions.create(
        **{"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0} | fields
    )
    return answer.choices[0]


def held(condition: object) -> str:
    return "works" if condition else "ignored"


def chats(client: openai.OpenAI) -> str:
    choice = chat(client)
    return held(choice.finish_reason == "length" and "Oslo" in choice.message.content)


def streams(client: openai.OpenAI) -> str:
    whole = chat(client).message.content
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    usage = chunks[-1].usage
    assert usage is not None
    assert (text, usage.completion_tokens) == (whole, 24)
    return held(len(chunks) > 4)


def parses(client: openai.OpenAI) -> str:
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, max_tokens=80, temperature=0, response_format=City
    )
    return held(isinstance(answer.choices[0].message.parsed, City))


def makes_json(client: openai.OpenAI) -> str:
    choice = chat(client, response_format={"type": "json_object"}, max_tokens=80)
    return held(isinstance(json.loads(choice.message.content), dict))


def called(choice: Any) -> str:
    for call in choice.message.tool_calls:
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER["parameters"])
    return held(choice.message.tool_calls)


def calls_a_tool(client: openai.OpenAI) -> str:
    return called(chat(client, tools=TOOLS, tool_choice="required", max_tokens=120))


def calls_the_named_tool(client: openai.OpenAI) -> str:
    return called(chat(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}}))


def streams_tool_calls(client: openai.OpenAI) -> str:
    arguments: dict[int, str] = {}
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=120,
        temperature=0,
        stream=True,
        tools=TOOLS,
        tool_choice="required",
    ):
        for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            assert call.function is not None
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    for text in arguments.values():
        jsonschema.validate(json.loads(text), WEATHER["parameters"])
    return held(arguments)


def tools_with_a_response_format(client: openai.OpenAI) -> str:
    """The format is that of an answer without a call."""
    choice = chat(client, tools=TOOLS, tool_choice="required", response_format=CITY, max_tokens=80)
    names = {call.function.name for call in choice.message.tool_calls or []}
    return held(names == {"get_weather"})


def conversation() -> list[Any]:
    """A conversation in which the assistant calls the function each time. The zone is one that the schema forbids."""
    turns: list[Any] = []
    for city in ("Rome", "Paris", "Berlin"):
        call = {"name": "get_weather", "arguments": {"city": f"the beautiful city of {city}"}}
        turns.append({"role": "user", "content": f"Weather in {city}?"})
        turns.append({"role": "assistant", "content": json.dumps(call)})
    return [*turns, {"role": "user", "content": "Weather in Oslo?"}]


def calls_by_itself(client: openai.OpenAI) -> str:
    """Through the engine's own API the model calls here."""
    choice = chat(client, messages=conversation(), tools=TOOLS, tool_choice="auto", max_tokens=60)
    assert "get_weather" in (choice.message.content or "")
    return held(choice.message.tool_calls)


def strict_tools_under_auto(client: openai.OpenAI) -> str:
    """The model begins a call: do its arguments keep to the schema?"""
    choice = chat(client, messages=conversation(), tools=TOOLS, tool_choice="auto", max_tokens=60)
    call = json.loads(choice.message.content)
    try:
        jsonschema.validate(call["arguments"], WEATHER["parameters"])
    except jsonschema.ValidationError:
        return "ignored"
    return "works"


def tools_under_auto_with_a_response_format(client: openai.OpenAI) -> str:
    choice = chat(client, messages=conversation(), tools=TOOLS, tool_choice="auto", response_format=CITY, max_tokens=80)
    City.model_validate_json(choice.message.content)
    return held(choice.message.tool_calls)


def parses_a_function(client: openai.OpenAI) -> str:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=QUESTION,
        max_tokens=120,
        temperature=0,
        tools=[openai.pydantic_function_tool(City)],
        tool_choice="required",
    )
    calls = answer.choices[0].message.tool_calls or []
    return held(calls and all(isinstance(call.function.parsed_arguments, City) for call in calls))


def calls_a_custom_tool(client: openai.OpenAI) -> str:
    tool = {"type": "custom", "custom": {"name": "add", "description": "Adds."}}
    return held(chat(client, tools=[tool], tool_choice="required").message.tool_calls)


def takes_a_result(client: openai.OpenAI) -> str:
    message = chat(client, tools=TOOLS, tool_choice="required", max_tokens=120).message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 degrees"} for call in message.tool_calls]
    return held(chat(client, messages=[*QUESTION, message.model_dump(), *results], tools=TOOLS).message.content)


def completes(client: openai.OpenAI) -> str:
    answer = client.completions.create(model=MODEL, prompt="Oslo is", max_tokens=8, temperature=0, n=2)
    return held(len(answer.choices) == 2 and answer.choices[0].text == answer.choices[1].text)


def completes_several(client: openai.OpenAI) -> str:
    prompts = ["Oslo is", "One, two,"]
    together = client.completions.create(model=MODEL, prompt=prompts, max_tokens=8, temperature=0).choices
    alone = [client.completions.create(model=MODEL, prompt=p, max_tokens=8, temperature=0).choices[0] for p in prompts]
    return held([choice.text for choice in together] == [choice.text for choice in alone])


def completes_in_a_stream(client: openai.OpenAI) -> str:
    whole = client.completions.create(model=MODEL, prompt="Oslo is", max_tokens=8, temperature=0).choices[0].text
    stream = client.completions.create(model=MODEL, prompt="Oslo is", max_tokens=8, temperature=0, stream=True)
    return held("".join(chunk.choices[0].text for chunk in stream) == whole)


def completes_with_logprobs(client: openai.OpenAI) -> str:
    answer = client.completions.create(model=MODEL, prompt="Oslo is", max_tokens=4, temperature=0, logprobs=2)
    return held(answer.choices[0].logprobs)


def completes_with_echo(client: openai.OpenAI) -> str:
    answer = client.completions.create(model=MODEL, prompt="Oslo is", max_tokens=4, temperature=0, echo=True)
    return held(answer.choices[0].text.startswith("Oslo is"))


def responds(client: openai.OpenAI) -> str:
    return held(client.responses.create(model=MODEL, input="Describe Oslo.", max_output_tokens=24).output_text)


def echoes_with_logprobs(client: openai.OpenAI) -> str:
    answer = client.completions.create(
        model=MODEL, prompt="Oslo is", max_tokens=4, temperature=0, echo=True, logprobs=1
    )
    return held(answer.choices[0].logprobs)


def responds_in_a_stream(client: openai.OpenAI) -> str:
    asked: Any = {"model": MODEL, "input": "Describe Oslo.", "max_output_tokens": 24, "temperature": 0}
    events = list(client.responses.create(**asked, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    return held(text == client.responses.create(**asked).output_text and len(events) > 6)


def responds_with_a_call(client: openai.OpenAI) -> str:
    function: Any = WEATHER | {"type": "function"}
    answer = client.responses.create(
        model=MODEL, input="Weather in Oslo?", tools=[function], tool_choice="required", max_output_tokens=120
    )
    for call in answer.output:
        assert call.type == "function_call"
        jsonschema.validate(json.loads(call.arguments), WEATHER["parameters"])
    return held(answer.output)


def responds_parsed(client: openai.OpenAI) -> str:
    answer = client.responses.parse(model=MODEL, input="Describe Oslo.", text_format=City, max_output_tokens=80)
    return held(isinstance(answer.output_parsed, City))


def has_logprobs(client: openai.OpenAI) -> str:
    choice = chat(client, logprobs=True, top_logprobs=2, max_tokens=3)
    return held(choice.logprobs and [len(token.top_logprobs) for token in choice.logprobs.content] == [2, 2, 2])


def stops(client: openai.OpenAI) -> str:
    choice = chat(client, stop=["Norway"])
    return held(choice.finish_reason == "stop" and "Norway" not in choice.message.content)


def repeats_with_a_seed(client: openai.OpenAI) -> str:
    answers = {chat(client, seed=seed, temperature=1.5).message.content for seed in (1, 1, 2)}
    return held(len(answers) == 2)


def has_several_choices(client: openai.OpenAI) -> str:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, n=3, temperature=0)
    return held([choice.index for choice in answer.choices] == [0, 1, 2])


def counts_drafts(client: openai.OpenAI) -> str:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Repeat: one two three one two three one two three"}],
        max_tokens=48,
        temperature=0,
    )
    details = answer.usage.completion_tokens_details if answer.usage else None
    return held(details and details.accepted_prediction_tokens)


def extra(**fields: Any) -> Callable[[openai.OpenAI], str]:
    """Return a feature: does the answer match `[abc]{5}`, as a field outside OpenAI's API asks?"""

    def ask(client: openai.OpenAI) -> str:
        text = chat(client, extra_body=fields).message.content
        return held(len(text) == 5 and set(text) <= set("abc"))

    return ask


def knows_its_fields(client: openai.OpenAI) -> str:
    chat(client, extra_body={"no_such_field": 1})
    return "ignored"


def biases(client: openai.OpenAI) -> str:
    """Ban the tokens of the unbiased answer, one after the other."""
    before = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=4, temperature=0, logprobs=True
    ).choices[0]
    after = chat(client, max_tokens=4, logit_bias={str(token): -100 for token in range(20_000)})
    return held(before.message.content != after.message.content)


FEATURES: dict[str, Callable[[openai.OpenAI], str]] = {
    "chat": chats,
    "chat, streamed, with usage": streams,
    "a pydantic model, by `response_format` (`.parse`)": parses,
    "a pydantic model, by a function": parses_a_function,
    "`response_format` json_object": makes_json,
    "`response_format` structural_tag": lambda client: held(
        chat(client, response_format={"type": "structural_tag", "format": {}})
    ),
    "tools, `tool_choice` auto": calls_by_itself,
    "tools, `tool_choice` required": calls_a_tool,
    "tools, `tool_choice` with a name": calls_the_named_tool,
    "tool calls, streamed": streams_tool_calls,
    "strict tools, `tool_choice` auto": strict_tools_under_auto,
    "tools, `tool_choice` required, and `response_format`": tools_with_a_response_format,
    "tools, `tool_choice` auto, and `response_format`": tools_under_auto_with_a_response_format,
    "custom tools": calls_a_custom_tool,
    "a tool's result, sent back": takes_a_result,
    "completions, `n`": completes,
    "completions of several prompts": completes_several,
    "completions, streamed": completes_in_a_stream,
    "completions, `logprobs`": completes_with_logprobs,
    "completions, `echo`": completes_with_echo,
    "completions, `echo` with `logprobs`": echoes_with_logprobs,
    "`responses.create`": responds,
    "`responses.stream`": responds_in_a_stream,
    "`responses.parse`": responds_parsed,
    "functions in `responses.create`": responds_with_a_call,
    "chat, `logprobs`": has_logprobs,
    "chat, `stop`": stops,
    "chat, `seed`": repeats_with_a_seed,
    "chat, `n`": has_several_choices,
    "accepted drafts in the usage": counts_drafts,
    "`logit_bias`": biases,
    "`regex` of smg": extra(regex="[abc]{5}"),
    "`ebnf` of smg": extra(ebnf="root ::= [abc] [abc] [abc] [abc] [abc]"),
    "`structured_outputs` of vLLM": extra(structured_outputs={"regex": "[abc]{5}"}),
    "an unknown field, refused by name": knows_its_fields,
}
ROWS = rows(ROOT / "docs/gateways.md", "What works through smg")


def in_table(feature: str, outcome: str) -> list[pytest.MarkDecorator]:
    """Return the mark of a row that the table of clients has as well."""
    return [pytest.mark.client(SMG, feature, {"works": "yes"}.get(outcome, outcome))] if feature in IN_TABLE else []


def test_the_page_has_every_feature() -> None:
    assert [name for name, *_ in ROWS] == list(FEATURES)


@pytest.mark.parametrize("row", [pytest.param(row, id=row[0], marks=in_table(row[0], row[1])) for row in ROWS])
def test_a_feature_works_as_the_page_says(client: openai.OpenAI, row: list[str]) -> None:
    try:
        became = FEATURES[row[0]](client)
    except openai.BadRequestError:
        became = "refused"
    assert became == row[1]


def test_errors_name_the_field_and_the_limit(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match=r"sampling_params\.json_schema: .*/uniqueItems: is not enforced"):
        chat(client, response_format=schema)


async def test_a_client_that_leaves_frees_its_slot(server: RunningServer, client: openai.OpenAI) -> None:
    def leave() -> None:
        stream = client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=450, stream=True, extra_body={"ignore_eos": True}
        )
        with stream:
            next(iter(stream))

    async with Client(server.address) as grpc_client:
        before = await idle_stats(grpc_client)
        await asyncio.to_thread(leave)
        after = await idle_stats(grpc_client)
    assert after.running == after.pages_used == 0
    assert after.generated_tokens - before.generated_tokens < 400


async def test_a_killed_grammar_process_changes_no_answer(server: RunningServer, client: openai.OpenAI) -> None:
    def ask(trouble: Callable[[], None]) -> str:
        text = ""
        schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}
        for chunk in client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=80,
            temperature=0.8,
            seed=3,
            response_format=schema,  # type: ignore[arg-type]
            stream=True,
        ):
            if chunk.choices and chunk.choices[0].delta.content:
                if not text:
                    trouble()
                text += chunk.choices[0].delta.content
        return text

    undisturbed = await asyncio.to_thread(ask, lambda: None)
    killed = await asyncio.to_thread(ask, lambda: os.kill(server.grammar_process().pid, signal.SIGKILL))
    assert killed == undisturbed
    City.model_validate_json(killed)
    async with Client(server.address) as grpc_client:
        assert (await idle_stats(grpc_client)).grammar_ready
