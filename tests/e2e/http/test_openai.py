"""OpenAI's own client, unmodified, against the gateway."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

pytestmark = pytest.mark.model

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name a city of France, and its country."}]


class City(BaseModel):
    """An answer."""

    name: str = Field(max_length=20)
    country: Literal["France", "Italy"]


@pytest.mark.client("openai", "chat")
@pytest.mark.client("openai", "chat, streamed, with usage")
def test_a_chat_answer_and_its_stream_are_equal(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": ASK, "max_tokens": 24, "seed": 3}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].message.content
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    assert whole.usage is not None
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


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
        ({"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}, lambda text: text in ("yes", "no")),
        ({"extra_body": {"structured_outputs": {"regex": "[0-9]{4}"}}}, lambda text: len(text) == 4 and int(text) >= 0),
        ({"extra_body": {"guided_choice": ["a", "b"]}}, lambda text: text in ("a", "b")),
        ({"extra_body": {"guided_grammar": 'root ::= "x" | "y"'}}, lambda text: text in ("x", "y")),
        ({"extra_body": {"structured_outputs": {"grammar": 'start: "p" | "q"'}}}, lambda text: text in ("p", "q")),
        (
            {"extra_body": {"structured_outputs": {"json": {"enum": [1, 22]}, "whitespace": "compact"}}},
            lambda text: text in ("1", "22"),
        ),
    ],
)
def test_every_way_to_ask_for_a_grammar_is_held_to_it(
    client: openai.OpenAI, model: str, fields: dict[str, Any], fits: Any
) -> None:
    answer = client.chat.completions.create(model=model, messages=ASK, max_tokens=60, seed=2, **fields)
    assert fits(answer.choices[0].message.content), answer.choices[0].message.content


@pytest.mark.client("openai", "chat, `logprobs`")
def test_log_probabilities_name_their_tokens(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:
        assert token.top_logprobs[0].token == token.token  # greedy
        assert bytes(token.bytes or []).decode() == token.token


@pytest.mark.client("openai", "chat, `n`")
def test_sequences_have_an_index_each(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=ASK, max_tokens=6, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1


@pytest.mark.client("openai", "completions of several prompts")
@pytest.mark.client("openai", "completions, streamed")
@pytest.mark.client("openai", "completions, `logprobs`")
def test_completions_continue_several_prompts(client: openai.OpenAI, model: str) -> None:
    prompts = ["One, two,", "Monday, Tuesday,"]
    together = client.completions.create(model=model, prompt=prompts, max_tokens=5, temperature=0, logprobs=1)
    alone = [client.completions.create(model=model, prompt=p, max_tokens=5, temperature=0) for p in prompts]
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    logprobs = together.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == together.choices[0].text
    streamed: dict[int, str] = {}
    for chunk in client.completions.create(model=model, prompt=prompts, max_tokens=5, temperature=0, stream=True):
        choice = chunk.choices[0]
        streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[0], streamed[1]] == [choice.text for choice in together.choices]


@pytest.mark.client("openai", "completions, `n`")
def test_sequences_of_one_prompt_are_choices(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "One, two,", "max_tokens": 6, "seed": 5}
    greedy = client.completions.create(**asked, n=2, temperature=0).choices
    assert [choice.index for choice in greedy] == [0, 1]
    assert greedy[0].text == greedy[1].text
    assert len({choice.text for choice in client.completions.create(**asked, n=4, temperature=1.5).choices}) > 1


@pytest.mark.client("openai", "chat, `stop`")
def test_an_answer_ends_in_front_of_a_stop_string(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=ASK, max_tokens=24, temperature=0)
    text = whole.choices[0].message.content or ""
    word = text.split()[3]
    cut = client.chat.completions.create(model=model, messages=ASK, max_tokens=24, temperature=0, stop=[word])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (text[: text.index(word)], "stop")


@pytest.mark.client("openai", "chat, `seed`")
def test_a_seed_repeats_an_answer(client: openai.OpenAI, model: str) -> None:
    def ask(seed: int) -> str | None:
        asked: dict[str, Any] = {"model": model, "messages": ASK, "max_tokens": 16, "temperature": 1.5, "seed": seed}
        return client.chat.completions.create(**asked).choices[0].message.content

    assert ask(1) == ask(1) != ask(2)


@pytest.mark.client("openai", "completions, `echo`")
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_puts_the_prompt_in_front(client: openai.OpenAI, model: str, max_tokens: int) -> None:
    answer = client.completions.create(model=model, prompt="One, two,", max_tokens=max_tokens, temperature=0, echo=True)
    assert answer.choices[0].text.startswith("One, two,")
    assert (answer.choices[0].text == "One, two,") == (max_tokens == 0)
    assert answer.usage is not None
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


def test_an_unknown_model_is_named(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match=f"'nope' is not served; these are: {model}"):
        client.chat.completions.create(model="nope", messages=ASK)


@pytest.mark.client("openai", "an unknown field, refused by name")
@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"max_token": 5}, "max_token: is unknown; did you mean max_tokens?", "max_token"),
        ({"guided_jsn": {}}, "guided_jsn: is unknown; did you mean guided_json?", "guided_jsn"),
        ({"top_p": 3}, "top_p: is 3, must be in (0, 1]", "top_p"),
        ({"modalities": ["audio"]}, "modalities: is not supported: the model reads only text", "modalities"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx: is unknown; did you mean regex?", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}},
            "uniqueItems",
            None,
        ),
    ],
)
def test_a_wrong_field_is_named(
    client: openai.OpenAI, model: str, body: dict[str, Any], message: str, param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=ASK, max_tokens=4, extra_body=body)
    error: Any = refused.value.body
    assert message in error["message"]
    if param is not None:
        assert error["param"] == param
