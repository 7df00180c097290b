"""Fields beyond OpenAI's: vLLM's and the engine's own, through OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.model

ASK: Any = [{"role": "user", "content": "Count to five."}]
PROMPT = "One, two, three,"


def complete(client: openai.OpenAI, model: str, **fields: Any) -> Any:
    known = {name: fields.pop(name) for name in ("max_tokens", "echo", "logprobs", "seed", "stream") if name in fields}
    return client.completions.create(
        model=model, prompt=PROMPT, temperature=0, **{"max_tokens": 4} | known, extra_body=fields
    )


@pytest.mark.client("openai", "completions, `echo` with `logprobs`")
def test_echo_with_log_probabilities_scores_a_prompt(client: openai.OpenAI, model: str) -> None:
    """What lm-eval asks for: the log-probability of each token of a text."""
    scored = complete(client, model, echo=True, logprobs=1, max_tokens=1).choices[0]
    assert scored.text.startswith(PROMPT)
    assert "".join(scored.logprobs.tokens) == scored.text
    assert scored.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in scored.logprobs.token_logprobs[1:])
    assert scored.logprobs.text_offset[:2] == [0, len(scored.logprobs.tokens[0])]
    for token, value, top in list(zip(
        scored.logprobs.tokens, scored.logprobs.token_logprobs, scored.logprobs.top_logprobs, strict=True
    ))[1:]:  # fmt: skip
        assert top[token] == value
        assert max(top.values()) >= value
    alone = complete(client, model, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert (alone.text, alone.logprobs.token_logprobs) == (PROMPT, scored.logprobs.token_logprobs[:-1])


def test_prompt_log_probabilities_have_vllm_s_form(client: openai.OpenAI, model: str) -> None:
    choice = complete(client, model, prompt_logprobs=2, return_token_ids=True).choices[0]
    rows, ids = choice.prompt_logprobs, choice.prompt_token_ids
    assert len(rows) == len(ids)
    assert rows[0] is None
    for row, token in zip(rows[1:], ids[1:], strict=True):
        assert str(token) in row
        assert {"logprob", "rank", "decoded_token"} == row[str(token)].keys()
    assert len(choice.token_ids) == 4
    answer: Any = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=2, extra_body={"prompt_logprobs": 1}
    )
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens


@pytest.mark.client("openai", "`logit_bias`")
def test_a_bias_and_bans_change_the_answer(client: openai.OpenAI, model: str) -> None:
    usual = complete(client, model, return_token_ids=True).choices[0]
    first = usual.token_ids[0]
    banned = complete(client, model, return_token_ids=True, bad_token_ids=[first]).choices[0]
    biased = complete(client, model, return_token_ids=True, logit_bias={str(first): -100}).choices[0]
    assert first not in banned.token_ids
    assert biased.token_ids[0] == banned.token_ids[0]


def test_every_event_may_count_its_tokens(client: openai.OpenAI, model: str) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    events = list(
        client.chat.completions.create(
            model=model, messages=ASK, max_tokens=6, temperature=0, stream=True, stream_options=options
        )
    )
    usages = [event.usage for event in events]
    counts = [usage.completion_tokens for usage in usages if usage]
    assert len(counts) == len(events)
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len({usage.prompt_tokens for usage in usages if usage}) == 1


def test_telemetry_and_token_ids_come_when_asked_for(client: openai.OpenAI, model: str) -> None:
    answer: Any = client.chat.completions.create(
        model=model,
        messages=ASK,
        max_tokens=5,
        seed=7,
        extra_body={"telemetry": True, "return_token_ids": True, "speculation": {"num_draft_tokens": 2}},
    )
    choice = answer.choices[0]
    assert choice.telemetry["seed"] == 7
    assert choice.telemetry["steps"] >= 1
    assert len(choice.token_ids) == 5
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens


def test_a_beam_search_returns_its_best_answers(client: openai.OpenAI, model: str) -> None:
    """With vLLM's fields, as a completion and as a conversation under a grammar."""
    free = complete(client, model, use_beam_search=True, best_of=4, n=3, max_tokens=6, length_penalty=0.5)
    scores = [choice.beam_score for choice in free.choices]
    assert scores == sorted(scores, reverse=True)
    assert len({choice.text for choice in free.choices}) == 3
    guided: Any = client.chat.completions.create(
        model=model,
        messages=ASK,
        n=4,
        max_tokens=12,
        extra_body={"use_beam_search": True, "structured_outputs": {"choice": ["7"]}},
    )
    assert {choice.message.content for choice in guided.choices} == {"7"}
    assert len(guided.choices) < 4, "there is one such answer, before any of the end tokens"
    for fields, problem in (
        ({"beam_width": 99}, r"beam_width: is 99, must be in \[2, "),
        ({"beam_width": 2, "n": 3}, "n: is 3, at most beam_width"),
        ({"n": 2, "early_stopping": True, "seed": 1}, "seed: is not allowed together with beam_search"),
    ):
        with pytest.raises(openai.BadRequestError, match=problem):
            complete(client, model, use_beam_search=True, **fields)


def test_text_and_conversations_become_tokens_and_text_again(client: openai.OpenAI, model: str) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        return client.post(f"{str(client.base_url).removesuffix('/v1/')}{path}", body=body, cast_to=object)

    made = post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert (made["count"], "".join(made["token_strs"])) == (len(made["tokens"]), PROMPT)
    assert post("/detokenize", {"tokens": made["tokens"]})["prompt"] == PROMPT
    answer = client.chat.completions.create(model=model, messages=ASK, max_tokens=1)
    assert answer.usage is not None
    assert post("/tokenize", {"messages": ASK})["count"] == answer.usage.prompt_tokens


def test_a_salt_keeps_prompts_apart_and_a_priority_is_accepted(client: openai.OpenAI, model: str) -> None:
    def cached(salt: str) -> int:
        long: Any = [{"role": "user", "content": "A salted prompt. " * 12}]
        answer = client.chat.completions.create(
            model=model, messages=long, max_tokens=1, extra_body={"cache_salt": salt, "priority": 3}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    cached("a")
    assert cached("a") > 0
    assert cached("b") == 0


def test_reasoning_that_the_model_does_not_know_is_named(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="reasoning"):
        client.chat.completions.create(model=model, messages=ASK, max_tokens=4, reasoning_effort="high")
    answer = client.chat.completions.create(model=model, messages=ASK, max_tokens=4, reasoning_effort="none")
    assert answer.choices[0].message.content


@pytest.mark.client("openai", "`response_format` structural_tag")
def test_a_structural_tag_guides_regions_of_free_text(client: openai.OpenAI, model: str) -> None:
    tag: Any = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<n>"],
            "tags": [{"type": "tag", "begin": "<n>", "content": {"type": "json_schema", "json_schema": {"enum": [7]}},
                      "end": "</n>"}],
        },
    }  # fmt: skip
    answer = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=20, seed=1, extra_body={"response_format": tag}
    )
    text = answer.choices[0].message.content or ""
    assert json.dumps(text)
    assert "<n>" not in text or "<n>7</n>" in text


def test_bounds_hold_over_http(client: openai.OpenAI, model: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}, "required": ["a"]}
    bounds = {"max_string_length": 5, "max_array_items": 2, "max_number_digits": 2, "max_whitespace": 1}
    options = {"json": schema | {"additionalProperties": False}, **bounds}
    answer = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=60, extra_body={"structured_outputs": options, "seed": 3}
    )
    assert answer.choices[0].finish_reason == "stop"
    items = json.loads(answer.choices[0].message.content or "")["a"]
    assert len(items) <= 2
    assert all(len(item) <= 5 for item in items)
    with pytest.raises(openai.BadRequestError, match=r"grammar\.max_array_items"):
        complete(client, model, structured_outputs={"regex": "a", "max_array_items": 2})


def test_an_answer_that_repeats_itself_ends_over_http(client: openai.OpenAI, model: str) -> None:
    first = complete(client, model, max_tokens=1, return_token_ids=True).choices[0]
    (token,) = first.token_ids
    answer = complete(
        client,
        model,
        max_tokens=40,
        logit_bias={str(token): 100},
        repetition_detection={"max_pattern_size": 3, "min_count": 4},
        return_token_ids=True,
    ).choices[0]
    assert (answer.finish_reason, answer.token_ids) == ("repetition", [token] * 4)
