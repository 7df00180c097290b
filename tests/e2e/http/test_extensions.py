"""Fields beyond OpenAI's: vLLM's and the engine's own, through OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.e2e.http.conftest import Asker

pytestmark = pytest.mark.model

PROMPT = "One, two, three,"


@pytest.mark.client("openai", "completions, `echo` with `logprobs`")
def test_echo_with_log_probabilities_scores_a_prompt(ask: Asker) -> None:
    """What lm-eval asks for: the log-probability of each token of a text."""
    scored = ask.complete(PROMPT, echo=True, logprobs=1, max_tokens=1).choices[0]
    logprobs = scored.logprobs
    assert scored.text.startswith(PROMPT)
    assert "".join(logprobs.tokens) == scored.text
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset[:2] == [0, len(logprobs.tokens[0])]
    rows = list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))
    for token, value, top in rows[1:]:
        assert top[token] == value
        assert max(top.values()) >= value
    alone = ask.complete(PROMPT, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert (alone.text, alone.logprobs.token_logprobs) == (PROMPT, logprobs.token_logprobs[:-1])


def test_prompt_log_probabilities_have_vllm_s_form(ask: Asker) -> None:
    choice = ask.complete(prompt_logprobs=2, return_token_ids=True).choices[0]
    rows, ids = choice.prompt_logprobs, choice.prompt_token_ids
    assert len(rows) == len(ids)
    assert rows[0] is None
    for row, token in zip(rows[1:], ids[1:], strict=True):
        assert {"logprob", "rank", "decoded_token"} == row[str(token)].keys()
    assert len(choice.token_ids) == 4
    answer = ask.chat(max_tokens=2, prompt_logprobs=1)
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens


@pytest.mark.client("openai", "`logit_bias`")
def test_a_bias_and_bans_change_the_answer(ask: Asker) -> None:
    first = ask.complete(return_token_ids=True).choices[0].token_ids[0]
    banned = ask.complete(return_token_ids=True, bad_token_ids=[first]).choices[0]
    biased = ask.complete(return_token_ids=True, logit_bias={str(first): -100}).choices[0]
    assert first not in banned.token_ids
    assert biased.token_ids[0] == banned.token_ids[0]


def test_every_event_may_count_its_tokens(ask: Asker) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [event.usage for event in ask.chat(max_tokens=6, temperature=0, stream=True, stream_options=options)]
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len({usage.prompt_tokens for usage in usages}) == 1


def test_telemetry_and_token_ids_come_when_asked_for(ask: Asker) -> None:
    more = {"telemetry": True, "return_token_ids": True, "speculation": {"num_draft_tokens": 2}}
    answer = ask.chat(max_tokens=5, seed=7, **more)
    choice = answer.choices[0]
    assert choice.telemetry["seed"] == 7
    assert choice.telemetry["steps"] >= 1
    assert len(choice.token_ids) == 5
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens


def test_a_beam_search_returns_its_best_answers(ask: Asker) -> None:
    """With vLLM's fields, as a completion and as a conversation under a grammar."""
    free = ask.complete(use_beam_search=True, best_of=4, n=3, max_tokens=6, length_penalty=0.5)
    scores = [choice.beam_score for choice in free.choices]
    assert scores == sorted(scores, reverse=True)
    assert len({choice.text for choice in free.choices}) == 3
    guided = ask.chat(n=4, max_tokens=12, use_beam_search=True, structured_outputs={"choice": ["7"]})
    assert {choice.message.content for choice in guided.choices} == {"7"}
    assert len(guided.choices) < 4, "there is one such answer, before any of the end tokens"
    for fields, problem in (
        ({"beam_width": 99}, r"beam_width: is 99, must be in \[2, "),
        ({"beam_width": 2, "n": 3}, "n: is 3, at most beam_width"),
        ({"n": 2, "early_stopping": True, "seed": 1}, "seed: is not allowed together with beam_search"),
    ):
        with pytest.raises(openai.BadRequestError, match=problem):
            ask.complete(use_beam_search=True, **fields)


def test_an_error_names_the_prompt_at_fault(ask: Asker) -> None:
    for prompts, named in ((["a", ""], r"prompt\[1\]: is empty"), ([[1], [1, 1 << 30]], r"prompt\[1\]\[1\]: is 107")):
        with pytest.raises(openai.BadRequestError, match=named):
            ask.complete(prompts)


def test_text_and_conversations_become_tokens_and_text_again(ask: Asker) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        return ask.client.post(f"{str(ask.client.base_url).removesuffix('/v1/')}{path}", body=body, cast_to=object)

    made = post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert (made["count"], "".join(made["token_strs"])) == (len(made["tokens"]), PROMPT)
    assert post("/detokenize", {"tokens": made["tokens"]})["prompt"] == PROMPT
    turn = {"role": "user", "content": "Count to five."}
    assert post("/tokenize", {"messages": [turn]})["count"] == ask.chat([turn], max_tokens=1).usage.prompt_tokens


def test_a_salt_keeps_prompts_apart_and_a_priority_is_accepted(ask: Asker) -> None:
    def cached(salt: str) -> int:
        usage = ask.chat("A salted prompt. " * 12, max_tokens=1, cache_salt=salt, priority=3).usage
        return usage.prompt_tokens_details.cached_tokens or 0

    cached("a")
    assert cached("a") > 0
    assert cached("b") == 0


def test_reasoning_that_the_model_does_not_know_is_named(ask: Asker) -> None:
    with pytest.raises(openai.BadRequestError, match="reasoning"):
        ask.chat(max_tokens=4, reasoning_effort="high")
    assert ask.chat(max_tokens=4, reasoning_effort="none").choices[0].message.content


@pytest.mark.client("openai", "`response_format` structural_tag")
def test_a_structural_tag_guides_regions_of_free_text(ask: Asker) -> None:
    content = {"type": "json_schema", "json_schema": {"enum": [7]}}
    tag = {"type": "tag", "begin": "<n>", "content": content, "end": "</n>"}
    form = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<n>"], "tags": [tag]}}
    turns = [{"role": "user", "content": "Repeat: <n>8</n><n>8</n>"}, {"role": "assistant", "content": "<n>8</n>"}]
    text = (
        ask.chat(turns * 3 + turns[:1], max_tokens=20, temperature=0, response_format=form).choices[0].message.content
    )
    assert "<n>7</n>" in text
    assert "<n>8" not in text


def test_bounds_hold_over_http(ask: Asker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}, "required": ["a"]}
    bounds = {"max_string_length": 5, "max_array_items": 2, "max_number_digits": 2, "max_whitespace": 1}
    choice = ask.chat(structured_outputs={"json": schema | {"additionalProperties": False}, **bounds}, seed=3).choices[
        0
    ]
    assert choice.finish_reason == "stop"
    items = json.loads(choice.message.content)["a"]
    assert len(items) <= 2
    assert all(len(item) <= 5 for item in items)
    with pytest.raises(openai.BadRequestError, match=r"structured_outputs\.max_array_items"):
        ask.complete(structured_outputs={"regex": "a", "max_array_items": 2})


def test_an_answer_that_repeats_itself_ends_over_http(ask: Asker) -> None:
    (token,) = ask.complete(max_tokens=1, return_token_ids=True).choices[0].token_ids
    limits = {"max_pattern_size": 3, "min_count": 4}
    fields = {"logit_bias": {str(token): 100}, "repetition_detection": limits, "return_token_ids": True}
    answer = ask.complete(max_tokens=40, **fields).choices[0]
    assert (answer.finish_reason, answer.token_ids) == ("repetition", [token] * 4)
