"""Prompts that begin like earlier ones: nothing is computed twice, and no answer changes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from gpu_engine.api.errors import InternalError
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.core.failing import FailsOnce
from tests.gpu_engine.harness import (
    Answer,
    answer_all,
    answer_each,
    ask,
    config,
    tokens,
    unguided_engine,
    until_false,
    with_drafts,
)

SYSTEM = tokens(50, 7)


def turns() -> list[Answer]:
    """Three questions after one system prompt, the first of them twice."""
    prompts = [SYSTEM + tokens(20, seed) for seed in (1, 1, 2, 3)]
    return [ask(prompt, max_tokens=30, temperature=0.7, seed=4, ignore_eos=True, logprobs=2) for prompt in prompts]


def conversation(engine: Engine) -> list[tuple[list[int], Any]]:
    """Ask one by one, and the second turn of the first conversation last."""
    answers = turns()
    answer_each(engine, answers)
    second = ask([*answers[0].request.prompt_ids, *answers[0].tokens, 5, 6, 7], logprobs=2, ignore_eos=True)
    answer_all(engine, [second])
    return [(answer.tokens, answer.logprobs) for answer in (*answers, second)]


def at_once(engine: Engine) -> list[list[int]]:
    """Ask four at once, and then their second turns at once."""
    first = [ask(SYSTEM + tokens(3, seed), max_tokens=30, seed=seed, ignore_eos=True) for seed in range(4)]
    second = [
        ask([*one.request.prompt_ids, *said, 5, 6], max_tokens=9, ignore_eos=True)
        for one, said in zip(first, answer_all(engine, first), strict=True)
    ]
    return answer_all(engine, second)


@pytest.mark.parametrize(
    ("asks", "cached"),
    [
        # Pages of 16: 48 of the system prompt, 64 of the same question, and 96 of the 99 tokens with keys.
        (conversation, 64 + 48 + 48 + 96),
        # Three find the system prompt that the first of them prefilled; then each finds 80 of its own 82 tokens.
        (at_once, 3 * 48 + 4 * 80),
    ],
)
def test_answers_are_the_same_and_what_was_there_is_not_prefilled(
    llama: LoadedModel, asks: Any, cached: int, overlap: bool
) -> None:
    with unguided_engine(llama, with_drafts(3, overlap=overlap, prefix_cache=False)) as engine:
        expected = asks(engine)
        without = engine.stats()
    with unguided_engine(llama, with_drafts(3, overlap=overlap)) as engine:
        assert asks(engine) == expected
        stats = engine.stats()
    assert without.cached_tokens == without.pages_cached == 0
    assert stats.cached_tokens == cached
    assert stats.prefill_tokens + stats.cached_tokens == without.prefill_tokens
    assert stats.pages_cached > 0


def test_a_salt_hides_pages_and_the_telemetry_has_the_cached_tokens(llama: LoadedModel) -> None:
    answers = [
        ask(SYSTEM + tokens(20, 1), max_tokens=10, temperature=0.7, ignore_eos=True, cache_salt=salt)
        for salt in ("", "a", "b", "a")
    ]
    exactly = ask(SYSTEM[:49], max_tokens=2)
    with unguided_engine(llama, with_drafts(3)) as engine:
        answer_each(engine, [*answers, exactly])
    assert [answer.telemetry.cached_tokens for answer in answers] == [0, 0, 0, 64]
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    times = exactly.telemetry
    assert times.cached_tokens == 48
    assert exactly.request.arrived_s <= times.scheduled_s == times.prefilled_s <= times.first_token_s, (
        "nothing was left to prefill"
    )


def test_cached_pages_are_evicted_when_pages_run_out(llama: LoadedModel) -> None:
    prompts = [tokens(150, seed) for seed in range(6)]
    with unguided_engine(llama, config(prefix_cache=False)) as engine:
        expected = answer_each(engine, [ask(prompt) for prompt in prompts])
    with unguided_engine(llama, config(kv_cache_tokens=256)) as engine:
        for _ in range(2):
            assert answer_each(engine, [ask(prompt) for prompt in prompts]) == expected
        stats = engine.stats()
        assert stats.preemptions == 0
        assert 0 < stats.pages_cached <= stats.num_pages


def test_a_network_that_drafts_sees_every_prompt(llama: LoadedModel, draft_models: dict[str, str]) -> None:
    settings = with_drafts(3, draft_model=draft_models["same"])
    assert not settings.caches_prefixes
    assert with_drafts(0).caches_prefixes
    assert config(drafter="grammar").caches_prefixes
    with unguided_engine(llama, settings) as engine:
        answer_each(engine, turns())
        stats = engine.stats()
    assert stats.cached_tokens == 0
    assert stats.accepted_draft_tokens == stats.draft_tokens > 5


def test_what_a_failed_step_may_have_written_is_not_found(llama: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    net = FailsOnce(llama.net)
    model = replace(llama, net=net, fused=replace(llama.fused, forward=None))
    with unguided_engine(model, config()) as engine:
        answer_all(engine, [ask(SYSTEM, max_tokens=4)])
        assert engine.stats().pages_cached > 0
        net.fails_next = True
        failed, again = ask(SYSTEM), ask(SYSTEM, max_tokens=4)
        with caplog.at_level(logging.CRITICAL):
            answer_all(engine, [failed])
        assert isinstance(failed.error, InternalError)
        until_false(lambda: engine.stats().pages_cached)  # the client gets its last event first
        answer_all(engine, [again])
        assert again.telemetry.cached_tokens == 0
