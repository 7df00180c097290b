"""openai-python through the gateway smg, against the embedded model: what docs/gateways.md says works, does.

A feature is a function that returns whether it holds: "works", or "ignored", where smg answered as if it had not been
asked for it. An error with status 400 is "refused". The page's table has a row for each, and the table of clients in
docs/http.md has some of them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.docs.pages import ROOT, rows
from tests.e2e.asking import idle_stats, left_idle
from tests.e2e.conftest import RunningServer
from tests.e2e.http.conftest import Asker
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
QUESTION = "Describe Oslo."


class City(pydantic.BaseModel):
    """A schema that this model fills within its limit."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=20)
    inhabitants: int = pydantic.Field(ge=0, le=9_999_999)


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"name": "get_weather", "parameters": PARAMETERS, "strict": True}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CITY: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}


class Feature:
    """Asks a gateway as a feature does, greedy and for few tokens."""

    def __init__(self, client: openai.OpenAI) -> None:
        self.client, self._asker = client, Asker(client, MODEL)

    def chat(self, messages: Any = QUESTION, **fields: Any) -> Any:
        """Return an answer or a stream."""
        return self._asker.chat(messages, **{"max_tokens": 24, "temperature": 0} | fields)

    def choice(self, messages: Any = QUESTION, **fields: Any) -> Any:
        return self.chat(messages, **fields).choices[0]

    def complete(self, prompt: Any = "Oslo is", **fields: Any) -> Any:
        return self._asker.complete(prompt, **{"max_tokens": 8} | fields)

    def parse(self, **fields: Any) -> Any:
        asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        return self.client.chat.completions.parse(**asked, **fields).choices[0].message

    def respond(self, **fields: Any) -> Any:
        return self.client.responses.create(**{"model": MODEL, "input": QUESTION, "max_output_tokens": 24} | fields)


@pytest.fixture(scope="module")
def gateway(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Smg]:
    with smg([server.address], tmp_path_factory.mktemp("smg") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def feature(gateway: Smg) -> Iterator[Feature]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield Feature(client)


def chats(ask: Feature) -> object:
    choice = ask.choice()
    return choice.finish_reason == "length" and "Oslo" in choice.message.content


def streams(ask: Feature) -> object:
    """Does an answer come in more than one piece? A server that was stopped for a while sends all it has as one."""
    whole = ask.choice().message.content

    def num_chunks() -> int:
        chunks = list(ask.chat(stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert (text, chunks[-1].usage.completion_tokens) == (whole, 24)
        return len(chunks)

    return any(num_chunks() > 4 for _ in range(5))  # the role, one piece, the end and the usage are four


def parses(ask: Feature) -> object:
    return isinstance(ask.parse(response_format=City, max_tokens=80).parsed, City)


def parses_a_function(ask: Feature) -> object:
    tools = [openai.pydantic_function_tool(City)]
    calls = ask.parse(tools=tools, tool_choice="required", max_tokens=120).tool_calls
    return calls and all(isinstance(call.function.parsed_arguments, City) for call in calls)


def makes_json(ask: Feature) -> object:
    text = ask.choice(response_format={"type": "json_object"}, max_tokens=80).message.content
    return isinstance(json.loads(text), dict)


def calls_a_tool(ask: Feature, choice: Any = "required") -> object:
    calls = ask.choice(tools=TOOLS, tool_choice=choice, max_tokens=120).message.tool_calls
    for call in calls:
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    return calls


def streams_tool_calls(ask: Feature) -> object:
    arguments: dict[int, str] = {}
    for chunk in ask.chat(tools=TOOLS, tool_choice="required", max_tokens=120, stream=True):
        for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    for text in arguments.values():
        jsonschema.validate(json.loads(text), PARAMETERS)
    return arguments


def tools_with_a_response_format(ask: Feature) -> object:
    """The format is that of an answer without a call."""
    message = ask.choice(tools=TOOLS, tool_choice="required", response_format=CITY, max_tokens=80).message
    return {call.function.name for call in message.tool_calls or []} == {"get_weather"}


def under_auto(ask: Feature, **fields: Any) -> Any:
    """Return the answer in a conversation in which the assistant calls each time, with a city too long for the schema.

    Through the engine's own API the model calls here.
    """
    turns: list[Any] = []
    for city in ("Rome", "Paris", "Berlin"):
        call = {"name": "get_weather", "arguments": {"city": f"the beautiful city of {city}"}}
        turns.append({"role": "user", "content": f"Weather in {city}?"})
        turns.append({"role": "assistant", "content": json.dumps(call)})
    turns.append({"role": "user", "content": "Weather in Oslo?"})
    return ask.choice(turns, tools=TOOLS, tool_choice="auto", max_tokens=80, **fields).message


def calls_by_itself(ask: Feature) -> object:
    message = under_auto(ask)
    assert "get_weather" in (message.content or "")
    return message.tool_calls


def strict_tools_under_auto(ask: Feature) -> object:
    """The model begins a call: do its arguments keep to the schema?"""
    arguments = json.loads(under_auto(ask).content)["arguments"]
    return jsonschema.Draft202012Validator(PARAMETERS).is_valid(arguments)


def tools_under_auto_with_a_response_format(ask: Feature) -> object:
    message = under_auto(ask, response_format=CITY)
    City.model_validate_json(message.content)
    return message.tool_calls


def calls_a_custom_tool(ask: Feature) -> object:
    tool = {"type": "custom", "custom": {"name": "add", "description": "Adds."}}
    return ask.choice(tools=[tool], tool_choice="required").message.tool_calls


def takes_a_result(ask: Feature) -> object:
    message = ask.choice(tools=TOOLS, tool_choice="required", max_tokens=120).message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 degrees"} for call in message.tool_calls]
    turns = [{"role": "user", "content": QUESTION}, message.model_dump(), *results]
    return ask.choice(turns, tools=TOOLS).message.content


def completes(ask: Feature) -> object:
    one, other = ask.complete(n=2).choices
    return one.text == other.text


def completes_several(ask: Feature) -> object:
    prompts = ["Oslo is", "One, two,"]
    alone = [ask.complete(prompt).choices[0].text for prompt in prompts]
    return [choice.text for choice in ask.complete(prompts).choices] == alone


def completes_in_a_stream(ask: Feature) -> object:
    return "".join(chunk.choices[0].text for chunk in ask.complete(stream=True)) == ask.complete().choices[0].text


def responds_in_a_stream(ask: Feature) -> object:
    events = list(ask.respond(temperature=0, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    return text == ask.respond(temperature=0).output_text and len(events) > 6


def responds_with_a_call(ask: Feature) -> object:
    function: Any = WEATHER | {"type": "function"}
    answer = ask.respond(input="Weather?", tools=[function], tool_choice="required", max_output_tokens=120)
    for call in answer.output:
        assert call.type == "function_call"
        jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    return answer.output


def responds_parsed(ask: Feature) -> object:
    answer = ask.client.responses.parse(model=MODEL, input=QUESTION, text_format=City, max_output_tokens=80)
    return isinstance(answer.output_parsed, City)


def has_logprobs(ask: Feature) -> object:
    found = ask.choice(logprobs=True, top_logprobs=2, max_tokens=3).logprobs
    return found and [len(token.top_logprobs) for token in found.content] == [2, 2, 2]


def stops(ask: Feature) -> object:
    choice = ask.choice(stop=["Norway"])
    return choice.finish_reason == "stop" and "Norway" not in choice.message.content


def repeats_with_a_seed(ask: Feature) -> object:
    return len({ask.choice(seed=seed, temperature=1.5).message.content for seed in (1, 1, 2)}) == 2


def counts_drafts(ask: Feature) -> object:
    answer = ask.chat("Repeat: one two three one two three one two three", max_tokens=48)
    details = answer.usage.completion_tokens_details
    return details and details.accepted_prediction_tokens


def biases(ask: Feature) -> object:
    """Ban tokens, those of the unbiased answer among them."""
    biased = ask.choice(max_tokens=4, logit_bias={str(token): -100 for token in range(20_000)})
    return biased.message.content != ask.choice(max_tokens=4).message.content


def extra(**fields: Any) -> Callable[[Feature], object]:
    """Return a feature: does the answer match `[abc]{5}`, as a field outside OpenAI's API asks?"""

    def matches(ask: Feature) -> object:
        text = ask.choice(**fields).message.content
        return len(text) == 5 and set(text) <= set("abc")

    return matches


FEATURES: dict[str, Callable[[Feature], object]] = {
    "chat": chats,
    "chat, streamed, with usage": streams,
    "a pydantic model, by `response_format` (`.parse`)": parses,
    "a pydantic model, by a function": parses_a_function,
    "`response_format` json_object": makes_json,
    "`response_format` structural_tag": lambda ask: ask.chat(response_format={"type": "structural_tag", "format": {}}),
    "tools, `tool_choice` auto": calls_by_itself,
    "tools, `tool_choice` required": calls_a_tool,
    "tools, `tool_choice` with a name": lambda ask: calls_a_tool(ask, NAMED),
    "tool calls, streamed": streams_tool_calls,
    "strict tools, `tool_choice` auto": strict_tools_under_auto,
    "tools, `tool_choice` required, and `response_format`": tools_with_a_response_format,
    "tools, `tool_choice` auto, and `response_format`": tools_under_auto_with_a_response_format,
    "custom tools": calls_a_custom_tool,
    "a tool's result, sent back": takes_a_result,
    "completions, `n`": completes,
    "completions of several prompts": completes_several,
    "completions, streamed": completes_in_a_stream,
    "completions, `logprobs`": lambda ask: ask.complete(logprobs=2).choices[0].logprobs,
    "completions, `echo`": lambda ask: ask.complete(echo=True).choices[0].text.startswith("Oslo is"),
    "completions, `echo` with `logprobs`": lambda ask: ask.complete(echo=True, logprobs=1).choices[0].logprobs,
    "`responses.create`": lambda ask: ask.respond().output_text,
    "`responses.stream`": responds_in_a_stream,
    "`responses.parse`": responds_parsed,
    "functions in `responses.create`": responds_with_a_call,
    "chat, `logprobs`": has_logprobs,
    "chat, `stop`": stops,
    "chat, `seed`": repeats_with_a_seed,
    "chat, `n`": lambda ask: [choice.index for choice in ask.chat(n=3).choices] == [0, 1, 2],
    "accepted drafts in the usage": counts_drafts,
    "`logit_bias`": biases,
    "`regex` of smg": extra(regex="[abc]{5}"),
    "`ebnf` of smg": extra(ebnf="root ::= [abc] [abc] [abc] [abc] [abc]"),
    "`structured_outputs` of vLLM": extra(structured_outputs={"regex": "[abc]{5}"}),
    "an unknown field, refused by name": lambda ask: not ask.chat(no_such_field=1),
}
ROWS = rows(ROOT / "docs/gateways.md", "What works through smg")


def in_table(feature: str, outcome: str) -> list[pytest.MarkDecorator]:
    """Return the mark of a row that the table of clients has as well."""
    return [pytest.mark.client(SMG, feature, {"works": "yes"}.get(outcome, outcome))] if feature in IN_TABLE else []


def test_the_page_has_every_feature() -> None:
    assert [name for name, *_ in ROWS] == list(FEATURES)


@pytest.mark.parametrize("row", [pytest.param(row, id=row[0], marks=in_table(row[0], row[1])) for row in ROWS])
def test_a_feature_works_as_the_page_says(feature: Feature, row: list[str]) -> None:
    try:
        became = "works" if FEATURES[row[0]](feature) else "ignored"
    except openai.BadRequestError:
        became = "refused"
    assert became == row[1]


def test_errors_name_the_field_and_the_limit(feature: Feature) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match=r"sampling_params\.json_schema: .*/uniqueItems: is not enforced"):
        feature.chat(response_format=schema)


async def test_a_client_that_leaves_frees_its_slot(server: RunningServer, feature: Feature) -> None:
    def leave() -> None:
        with feature.chat(max_tokens=450, stream=True, ignore_eos=True) as stream:
            next(iter(stream))

    async with Client(server.address) as client:
        before = await idle_stats(client)
        await asyncio.to_thread(leave)
        after = await left_idle(client)
    assert after.generated_tokens - before.generated_tokens < 400


@pytest.mark.slow
async def test_a_killed_grammar_process_changes_no_answer(server: RunningServer, feature: Feature) -> None:
    def ask(trouble: Callable[[], None]) -> str:
        text = ""
        for chunk in feature.chat(max_tokens=80, temperature=0.8, seed=3, response_format=CITY, stream=True):
            if chunk.choices and chunk.choices[0].delta.content:
                if not text:
                    trouble()
                text += chunk.choices[0].delta.content
        return text

    undisturbed = await asyncio.to_thread(ask, lambda: None)
    killed = await asyncio.to_thread(ask, server.kill_grammar_process)
    assert killed == undisturbed
    City.model_validate_json(killed)
    async with Client(server.address) as client:
        assert (await idle_stats(client)).grammar_ready
