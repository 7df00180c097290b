"""OpenAI's own client, unmodified, against the gateway."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from tests.e2e.http.conftest import Asker

pytestmark = pytest.mark.model

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name a city of France, and its country."}]


class City(BaseModel):
    """An answer."""

    name: str = Field(max_length=20)
    country: Literal["France", "Italy"]


@pytest.mark.client("openai", "chat")
@pytest.mark.client("openai", "chat, streamed, with usage")
def test_a_chat_answer_and_its_stream_are_equal(ask: Asker) -> None:
    asked: dict[str, Any] = {"max_tokens": 24, "seed": 3}
    whole = ask.chat(**asked)
    *chunks, last = ask.chat(**asked, stream=True, stream_options={"include_usage": True})
    assert whole.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    *reasons, reason = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reason == whole.choices[0].finish_reason
    assert set(reasons) == {None}
    assert last.choices == []
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.client("openai", "a pydantic model, by `response_format` (`.parse`)")
def test_parse_returns_the_schema_s_object(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(model=model, messages=ASK, response_format=City, max_tokens=80, seed=1)
    assert isinstance(answer.choices[0].message.parsed, City)
    with client.chat.completions.stream(
        model=model, messages=ASK, response_format=City, max_tokens=80, seed=1
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


@pytest.mark.client("openai", "`response_format` json_object")
@pytest.mark.client("openai", "`structured_outputs` of vLLM")
@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, lambda text: len(text) == 4 and int(text) >= 0),
        ({"guided_choice": ["a", "b"]}, lambda text: text in ("a", "b")),
        ({"guided_grammar": 'root ::= "x" | "y"'}, lambda text: text in ("x", "y")),
        ({"structured_outputs": {"grammar": 'start: "p" | "q"'}}, lambda text: text in ("p", "q")),
        (
            {"structured_outputs": {"json": {"enum": [1, 22]}, "whitespace": "compact"}},
            lambda text: text in ("1", "22"),
        ),
    ],
)
def test_every_way_to_ask_for_a_grammar_is_held_to_it(ask: Asker, fields: dict[str, Any], fits: Any) -> None:
    text = ask.chat(seed=2, **fields).choices[0].message.content
    assert fits(text), text


@pytest.mark.client("openai", "chat, `logprobs`")
def test_log_probabilities_name_their_tokens(ask: Asker) -> None:
    choice = ask.chat(max_tokens=8, temperature=0, logprobs=True, top_logprobs=2).choices[0]
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:
        assert token.top_logprobs[0].token == token.token  # greedy
        assert bytes(token.bytes or []).decode() == token.token


@pytest.mark.client("openai", "chat, `n`")
@pytest.mark.client("openai", "completions, `n`")
def test_sequences_have_an_index_each(ask: Asker) -> None:
    chosen = ask.chat(max_tokens=6, n=3, seed=5).choices
    assert [choice.index for choice in chosen] == [0, 1, 2]
    assert len({choice.message.content for choice in chosen}) > 1
    greedy = ask.complete(max_tokens=6, seed=5, n=2).choices
    assert [choice.index for choice in greedy] == [0, 1]
    assert greedy[0].text == greedy[1].text
    assert len({choice.text for choice in ask.complete(max_tokens=6, seed=5, n=4, temperature=1.5).choices}) > 1


@pytest.mark.client("openai", "completions of several prompts")
@pytest.mark.client("openai", "completions, streamed")
@pytest.mark.client("openai", "completions, `logprobs`")
def test_completions_continue_several_prompts(ask: Asker) -> None:
    prompts = ["One, two,", "Monday, Tuesday,"]
    together = ask.complete(prompts, logprobs=1).choices
    assert [choice.text for choice in together] == [ask.complete(prompt).choices[0].text for prompt in prompts]
    assert "".join(together[0].logprobs.tokens) == together[0].text
    streamed = ["", ""]
    for chunk in ask.complete(prompts, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in together]


@pytest.mark.client("openai", "chat, `stop`")
def test_an_answer_ends_before_a_stop_string(ask: Asker) -> None:
    text = ask.chat(max_tokens=24, temperature=0).choices[0].message.content
    word = text.split()[3]
    cut = ask.chat(max_tokens=24, temperature=0, stop=[word]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (text[: text.index(word)], "stop")


@pytest.mark.client("openai", "chat, `seed`")
def test_a_seed_repeats_an_answer(ask: Asker) -> None:
    one, again, other = (
        ask.chat(max_tokens=16, temperature=1.5, seed=seed).choices[0].message.content for seed in (1, 1, 2)
    )
    assert one == again != other


@pytest.mark.client("openai", "completions, `echo`")
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_puts_the_prompt_first(ask: Asker, max_tokens: int) -> None:
    answer = ask.complete("One, two,", max_tokens=max_tokens, echo=True)
    assert answer.choices[0].text.startswith("One, two,")
    assert (answer.choices[0].text == "One, two,") == (max_tokens == 0)
    assert answer.usage.completion_tokens == max_tokens


@pytest.mark.client("openai", "`responses.create`")
@pytest.mark.client("openai", "`responses.stream`")
@pytest.mark.client("openai", "`responses.parse`")
def test_the_responses_api_answers_and_parses(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "Name a city of France.", "seed": 1}
    asked |= {"extra_body": {"seed": asked.pop("seed"), "structured_outputs": {"choice": ["Paris", "Lyon", "Nice"]}}}
    answer = client.responses.create(**asked, instructions="Be short.")
    assert (answer.status, answer.output_text in ("Paris", "Lyon", "Nice")) == ("completed", True)
    with client.responses.stream(**asked, instructions="Be short.") as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == answer.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    parsed = client.responses.parse(model=model, input="Name a city of France.", text_format=City, max_output_tokens=80)
    assert isinstance(parsed.output_parsed, City)
    short = client.responses.create(model=model, input="Tell a story.", max_output_tokens=3)
    assert short.status == "incomplete"


@pytest.mark.client("openai", "an unknown field, refused by name")
def test_a_wrong_field_or_model_is_named(ask: Asker) -> None:
    """tests/http_gateway/test_fields.py has every kind of problem."""
    unenforced = {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}
    for body, message, param in (
        ({"guided_jsn": {}}, "guided_jsn: is unknown; did you mean guided_json?", "guided_jsn"),
        ({"top_p": 3}, "top_p: is 3, must be in (0, 1]", "top_p"),
        ({"response_format": unenforced}, "uniqueItems", "response_format.json_schema.schema"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask.client.chat.completions.create(model=ask.model, messages=ASK, max_tokens=4, extra_body=body)
        error: Any = refused.value.body
        assert message in error["message"]
        assert error["param"] == param
    with pytest.raises(openai.NotFoundError, match=f"'nope' is not served; these are: {ask.model}"):
        ask.chat(model="nope")
