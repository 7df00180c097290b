"""An engine that drafts from earlier answers gives the same tokens, in fewer steps, and keeps scopes apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpu_engine.api.request import SuffixScope
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.harness import (
    UNHURRIED_MS,
    Answer,
    answer_all,
    answer_each,
    answer_staggered,
    ask,
    tokens,
    with_drafts,
)
from tests.gpu_engine.harness import unguided_engine as engine_of
from tests.gpu_engine.toy_sidecar import guided_engine

Submit = Callable[[Engine, list[Answer]], list[list[int]]]
SCOPE = SuffixScope(b"one", seeds=((65, 66, 67, 68),))
SAMPLING = ({}, {"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.9}, {"repetition_penalty": 1.3})


def asked(scope: SuffixScope | None, *, guided: bool) -> list[Answer]:
    """Return requests that come again: their answers are equal to earlier ones, or share much with them."""
    answers = []
    for seed in (1, 1, 2, 1, 3, 2):
        for number, sampling in enumerate(SAMPLING):
            grammar = str(40 + number) if guided else None
            answers.append(ask(tokens(12, number), max_tokens=60, seed=seed, grammar=grammar, **sampling))  # type: ignore[arg-type]
            answers[-1].change(suffix_scope=scope)
    return answers


def run(
    model: LoadedModel, submit: Submit, num_drafts: int, scope: SuffixScope | None, *, guided: bool, overlap: bool
) -> tuple[list[list[int]], int]:
    """Return the tokens of the answers, and the number of accepted drafts of the index."""
    settings = with_drafts(num_drafts, overlap=overlap, row_timeout_ms=UNHURRIED_MS)
    with guided_engine(model, settings) if guided else engine_of(model, settings) as made:
        engine = made if isinstance(made, Engine) else made[0]
        return submit(engine, asked(scope, guided=guided)), engine.stats().accepted_index_draft_tokens


@pytest.fixture(scope="module")
def without_index(llama: LoadedModel) -> dict[bool, list[list[int]]]:
    """Guided or not -> the tokens without drafts, one request at a time; drafts without a scope change none."""
    expected = {}
    for guided in (False, True):
        expected[guided], _ = run(llama, answer_each, 0, None, guided=guided, overlap=False)
        assert run(llama, answer_all, 7, None, guided=guided, overlap=True) == (expected[guided], 0)
    return expected


@pytest.mark.parametrize("submit", [answer_each, answer_all, answer_staggered])
@pytest.mark.parametrize("guided", [False, True])
def test_tokens_do_not_depend_on_the_index(
    llama: LoadedModel, without_index: dict[bool, list[list[int]]], submit: Submit, guided: bool, overlap: bool
) -> None:
    emitted, accepted = run(llama, submit, 7, SCOPE, guided=guided, overlap=overlap)
    assert emitted == without_index[guided]
    assert accepted > 0


def test_an_answer_that_comes_again_takes_few_steps(llama: LoadedModel) -> None:
    def steps(scope: SuffixScope | None) -> tuple[int, int]:
        first, again = (ask(tokens(12, 5), max_tokens=64, seed=9, temperature=1.0, ignore_eos=True) for _ in range(2))
        first.change(suffix_scope=scope)
        again.change(suffix_scope=scope)
        with engine_of(llama, with_drafts(7)) as engine:
            answer_each(engine, [first, again])
        assert first.tokens == again.tokens
        return first.telemetry.steps, again.telemetry.steps

    first, again = steps(SCOPE)
    assert again == 64 // 8, "every step has seven drafts, the first one too, and all of them are right"
    assert first > 2 * again
    assert steps(None) == (first, first)


def test_answers_of_another_scope_or_of_none_draft_for_nobody(llama: LoadedModel) -> None:
    scopes = (SuffixScope(b"one"), SuffixScope(b"two"), None, None, SuffixScope(b"three"))
    answers = [ask(tokens(12, 5), max_tokens=48, seed=9, temperature=1.0, ignore_eos=True) for _ in scopes]
    for answer, scope in zip(answers, scopes, strict=True):
        answer.change(suffix_scope=scope)
    with engine_of(llama, with_drafts(7)) as engine:
        answer_each(engine, answers)
        assert engine.stats().index_draft_tokens == 0
    assert len({answer.telemetry.steps for answer in answers}) == 1


def test_an_engine_without_an_index_ignores_scopes(llama: LoadedModel) -> None:
    with engine_of(llama, with_drafts(7, draft_index_bytes=0)) as engine:
        answer_each(engine, asked(SCOPE, guided=False)[:8])
        assert engine.stats().index_draft_tokens == 0
        assert engine.stats().draft_tokens > 0


def test_preempted_sequences_look_into_their_scope_again(llama: LoadedModel, overlap: bool) -> None:
    def run(**fields: int) -> tuple[list[list[int]], int, int]:
        settings = with_drafts(7, overlap=overlap, max_model_len=128, row_timeout_ms=UNHURRIED_MS, **fields)
        with guided_engine(llama, settings) as (engine, _):
            answers = [ask(tokens(20, seed % 4), grammar="70", max_tokens=80) for seed in range(8)]
            for answer in answers:
                answer.change(suffix_scope=SCOPE)
            found = answer_all(engine, answers)
            return found, engine.stats().preemptions, engine.stats().accepted_index_draft_tokens

    undisturbed, never, _ = run()
    tight, preemptions, accepted = run(kv_cache_tokens=128)
    assert tight == undisturbed
    assert never == 0 < preemptions
    assert accepted > 0


def test_the_limit_of_a_request_bounds_drafts_of_the_index(llama: LoadedModel) -> None:
    answers = [ask(tokens(12, 5), max_tokens=40, seed=9, ignore_eos=True, drafts=2) for _ in range(2)]
    for answer in answers:
        answer.change(suffix_scope=SCOPE)
    with engine_of(llama, with_drafts(7)) as engine:
        answer_each(engine, answers)
    assert max(len(event.token_ids) for event in answers[1].events) == 3
