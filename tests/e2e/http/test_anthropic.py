"""Anthropic's unmodified client against the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

anthropic: Any = pytest.importorskip("anthropic", reason="needs anthropic, of the extra `dev`")

pytestmark = [pytest.mark.model, pytest.mark.slow]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "weather", "description": "Tell the weather of a city.", "input_schema": SCHEMA}
ASK: Any = [{"role": "user", "content": "Name a city of France."}]
PARIS: Any = [{"role": "user", "content": "How is the weather in Paris?"}]


@pytest.fixture(scope="module")
def messages(gateway: str, model: str) -> Iterator[Messages]:
    with anthropic.Anthropic(base_url=f"http://{gateway}", api_key="unused", max_retries=0, timeout=120) as client:
        yield Messages(client, model)


class Messages:
    """Greedy requests to the served model."""

    def __init__(self, client: Any, model: str) -> None:
        self.client, self.model = client, model

    def _asked(self, asked: Any, fields: dict[str, Any]) -> dict[str, Any]:
        # The client has no arguments for sampling any more; the API has the fields.
        sampling = {"temperature": 0.0} | {
            name: fields.pop(name) for name in ("temperature", "top_k") if name in fields
        }
        return {"model": self.model, "messages": asked, "max_tokens": 60, "extra_body": sampling} | fields

    def create(self, asked: Any = ASK, **fields: Any) -> Any:
        return self.client.messages.create(**self._asked(asked, fields))

    def streamed(self, asked: Any = ASK, **fields: Any) -> tuple[list[Any], Any]:
        """Return the events, and the message that the client makes from them."""
        with self.client.messages.stream(**self._asked(asked, fields)) as stream:
            events = list(stream)
            return events, stream.get_final_message()


def test_an_answer_its_stream_and_its_count_are_equal(messages: Messages) -> None:
    system: Any = [{"type": "text", "text": "Answer in one sentence."}]
    whole = messages.create(system=system, metadata={"user_id": "u"}, top_k=40)
    events, streamed = messages.streamed(system=system)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", messages.model)
    (block,), (other,) = whole.content, streamed.content
    assert block.text
    assert block.text == other.text == "".join(event.text for event in events if event.type == "text")
    assert whole.stop_reason == streamed.stop_reason != "stop_sequence"
    assert whole.usage.output_tokens == streamed.usage.output_tokens > 0
    counted = messages.client.messages.count_tokens(model=messages.model, messages=ASK, system=system).input_tokens
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_an_answer_ends_at_a_stop_sequence_or_at_max_tokens(messages: Messages) -> None:
    text = messages.create().content[0].text
    word = text.split()[2]
    stopped = messages.create(stop_sequences=["@@@", word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].text == text[: text.index(word)]
    assert messages.create(max_tokens=1).stop_reason == "max_tokens"
    # The last turn of the assistant is continued.
    (block,) = messages.create([*ASK, {"role": "assistant", "content": text[:10]}]).content
    assert text[:10] + block.text == text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_calls_fit_their_schema_and_a_result_goes_back(messages: Messages, choice: Any) -> None:
    choice = choice | {"disable_parallel_tool_use": True}
    whole = messages.create(PARIS, tools=[WEATHER], tool_choice=choice, max_tokens=100)
    events, streamed = messages.streamed(PARIS, tools=[WEATHER], tool_choice=choice, max_tokens=100)
    for made in (whole, streamed):
        assert made.stop_reason == "tool_use"
        (call,) = [block for block in made.content if block.type == "tool_use"]
        assert call.name == "weather"
        jsonschema.validate(call.input, SCHEMA)
    assert json.loads("".join(event.partial_json for event in events if event.type == "input_json")) == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "It rains."}]}
    turns = [*PARIS, {"role": "assistant", "content": streamed.content}, {"role": "user", "content": [result]}]
    answer = messages.create(turns, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block.type for block in answer.content] == ["text"]


def test_under_auto_the_model_decides(messages: Messages) -> None:
    answer = messages.create(PARIS, tools=[WEATHER], tool_choice={"type": "auto"})
    for block in answer.content:
        if block.type == "tool_use":
            jsonschema.validate(block.input, SCHEMA)
    assert (answer.stop_reason == "tool_use") <= any(block.type == "tool_use" for block in answer.content)


def test_an_output_format_is_held_to(messages: Messages) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    (block,) = messages.create(output_config=config).content
    jsonschema.validate(json.loads(block.text), SCHEMA)


def test_errors_are_those_of_the_client(messages: Messages) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature: ") as wrong:
        messages.create(temperature=-1.0)
    assert (wrong.value.type, wrong.value.status_code) == ("invalid_request_error", 400)
    with pytest.raises(anthropic.NotFoundError, match="claude") as unknown:
        messages.create(model="claude")
    assert unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.type: is not supported"):
        messages.create([{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}])
