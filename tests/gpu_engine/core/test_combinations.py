"""Features together that each have tests of their own: processors and tensors, drafts, preemption, killed sidecars.

Not responsible for: every pair on a server (see tests/docs/test_features.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from gpu_engine.api.output_tensors import LOGITS, WantedOutput
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from shared_mem.channel import Record
from tests.gpu_engine.harness import (
    PATIENCE_S,
    Answer,
    answer_all,
    answer_each,
    ask,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.processor_cases import SETTING, processed
from tests.gpu_engine.toy_sidecar import guided_engine

NAMED: dict[str, Any] = {"logits_processors": SETTING}
PATIENT: dict[str, Any] = {"row_timeout_ms": 2000.0}
USES = (("waves", '{"strength": 0.5}'),), (("batch", '{"strength": 1.5}'),), (("captured", ""), ("waves", "")), ()
FREE: list[Callable[[], Answer]] = [
    partial(ask, [*range(196, 203)] * 2, max_tokens=24),
    partial(ask, tokens(30, 1, repeat=12), max_tokens=24, temperature=0.8, seed=4, logprobs=2),
    partial(ask, tokens(20, 2, repeat=8), max_tokens=24, ignore_eos=True, repetition_penalty=1.2),
    partial(ask, tokens(12, 5), max_tokens=20, logit_bias=((7, 2.0),), bad_token_ids=(9,)),
]
GUIDED: list[Callable[[], Answer]] = [
    partial(ask, tokens(30, 1, repeat=10), grammar="40", max_tokens=80),
    partial(ask, tokens(20, 3), grammar="30", max_tokens=80, temperature=1.0, seed=3),
    partial(ask, tokens(21, 6), grammar="9", max_tokens=60, logprobs=1),
    partial(ask, tokens(12, 5), max_tokens=20, ignore_eos=True),
]


def made(engine: Engine, cases: list[Callable[[], Answer]], model: LoadedModel | None = None) -> list[Answer]:
    """Return an answer of each case with its processors; with `model`, it also asks for logits at every token."""
    answers = [processed(engine.processors, make(), *uses) for make, uses in zip(cases, USES, strict=True)]
    for answer in answers if model else ():
        assert model is not None
        answer.change(tensors=(WantedOutput(LOGITS, LOGITS, model.outputs[LOGITS], context=True, answer=True),))
    return answers


def logits(answer: Answer) -> np.ndarray[Any, Any]:
    """Return the rows of an answer; asserts that each token but the last, and each of the prompt, has one."""
    parts = [rows for event in answer.events for rows in event.outputs]
    assert [rows.start for rows in parts[1:]] == [rows.end for rows in parts[:-1]]
    cached = answer.telemetry.cached_tokens
    assert (parts[0].start, parts[-1].end) == (cached, len(answer.request.prompt_ids) + len(answer.tokens) - 1)
    return np.concatenate([rows.data for rows in parts]).view("<f4")


def assert_same(answers: list[Answer], expected: list[Answer]) -> None:
    """Assert that answers have the tokens, log-probabilities and logits of others."""
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert [answer.logprobs for answer in answers] == [answer.logprobs for answer in expected]
    for answer, other in zip(answers, expected, strict=True):
        rows, others = logits(answer), logits(other)
        both = min(len(rows), len(others))  # the prefix cache had a part of one of the prompts
        np.testing.assert_allclose(rows[-both:], others[-both:], atol=1e-4)


@pytest.fixture(scope="module")
def free(llama: LoadedModel) -> list[Answer]:
    """One request at a time, one token a step."""
    with unguided_engine(llama, with_drafts(0, **NAMED)) as engine:
        plain, answers = made(engine, FREE), made(engine, FREE, llama)
        assert answer_each(engine, plain) == answer_each(engine, answers), "tensors change no token"
    return answers


@pytest.fixture(scope="module")
def guided(llama: LoadedModel) -> list[Answer]:
    with guided_engine(llama, with_drafts(0, **NAMED, **PATIENT)) as (engine, _):
        plain, answers = made(engine, GUIDED), made(engine, GUIDED, llama)
        assert answer_each(engine, plain) == answer_each(engine, answers), "tensors change no token"
    return answers


@pytest.mark.parametrize(
    "num_drafts", [pytest.param(0, marks=pytest.mark.slow), 3, pytest.param(7, marks=pytest.mark.slow)]
)
def test_processors_and_tensors_do_not_depend_on_speculation(
    llama: LoadedModel, free: list[Answer], num_drafts: int, overlap: bool
) -> None:
    with unguided_engine(llama, with_drafts(num_drafts, overlap=overlap, **NAMED)) as engine:
        answers = made(engine, FREE, llama)
        answer_all(engine, answers)
    assert_same(answers, free)


@pytest.mark.parametrize(
    "num_drafts", [pytest.param(0, marks=pytest.mark.slow), 3, pytest.param(7, marks=pytest.mark.slow)]
)
def test_guided_processors_and_tensors_do_not_depend_on_speculation(
    llama: LoadedModel, guided: list[Answer], num_drafts: int, overlap: bool
) -> None:
    with guided_engine(llama, with_drafts(num_drafts, overlap=overlap, **NAMED, **PATIENT)) as (engine, _):
        answers = made(engine, GUIDED, llama)
        answer_all(engine, answers)
    assert_same(answers, guided)


def test_logits_are_the_models_own_whatever_a_processor_does(llama: LoadedModel) -> None:
    """A bias and a processor force the same tokens; both answers have the logits that the model had."""
    fields = {"max_tokens": 8, "ignore_eos": True}
    with unguided_engine(llama, with_drafts(3, prefix_cache=False, **NAMED)) as engine:
        by_bias = ask(tokens(9, 1), logit_bias=((7, 100.0),), **fields)
        by_processor = processed(engine.processors, ask(tokens(9, 1), **fields), ("only", '{"token": 7}'))
        spec = llama.outputs[LOGITS]
        for answer in (by_bias, by_processor):
            answer.change(tensors=(WantedOutput(LOGITS, LOGITS, spec, context=True, answer=True),))
        answer_all(engine, [by_bias, by_processor])
    assert by_processor.tokens == by_bias.tokens == [7] * 8
    np.testing.assert_allclose(logits(by_processor), logits(by_bias), atol=1e-4)
    assert logits(by_processor)[-1].argmax() != 7


def test_a_killed_grammar_process_changes_nothing_of_them(llama: LoadedModel, guided: list[Answer]) -> None:
    with guided_engine(llama, with_drafts(3, **NAMED, **PATIENT)) as (engine, grammar):
        answers, reached, first = made(engine, GUIDED, llama), threading.Event(), grammar.sidecar

        def die(record: Record) -> None:
            if record.commit_pos + len(record.committed) >= 6:
                first.stopping = True
                reached.set()

        first.before = die
        for answer in answers:
            answer.submit(engine)
        assert reached.wait(PATIENCE_S)
        grammar.kill_sidecar()
        engine.grammar_lost()
        grammar.start_sidecar()
        engine.grammar_restored()
        for answer in answers:
            answer.wait()
    assert_same(answers, guided)


@pytest.mark.parametrize("spared", [None, 1])
def test_preemption_changes_nothing_of_them(llama: LoadedModel, spared: int | None) -> None:
    """`spared`: this request is never preempted, and the others wait for its pages."""
    long = partial(ask, tokens(20, 1, repeat=8), max_tokens=70, ignore_eos=True)

    def run(**fields: Any) -> tuple[list[Answer], int]:
        settings = with_drafts(3, max_model_len=128, prefix_cache=False, **NAMED, **fields)
        with unguided_engine(llama, settings) as engine:
            answers = made(engine, [long] * 4, llama)
            if spared is not None:
                answers[spared].change(never_preempt=True)
            answer_all(engine, answers)
            return answers, engine.stats().preemptions

    expected, never = run()
    found, preemptions = run(kv_cache_tokens=128)
    assert never == 0
    assert preemptions > 0 or spared is not None
    assert_same(found, expected)
