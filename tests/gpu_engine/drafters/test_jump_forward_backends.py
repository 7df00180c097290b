"""Jump-forward tokens of the real grammar libraries, in one process with a tiny model: answers are those of one token
a step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_engine.api.request import FinishReason
from gpu_engine.model.loader import LoadedModel
from grammar_service.backends.registry import NAMES
from tests.gpu_engine.harness import Answer, answer_all, answer_each, ask, config, tokens, with_drafts
from tests.gpu_engine.library_sidecars import PATIENT, Sidecars

LITERAL = "REGEX COMPACT the whole answer is forced"
CONST = 'JSON_SCHEMA COMPACT {"const":{"name":"a const","of":[1,2,{"deep":null}]}}'
SCHEMAS = [
    'JSON_SCHEMA COMPACT {"type":"object","properties":{"first":{"enum":["customer","current","supplier"]},'
    '"second_name":{"type":"boolean"},"n":{"type":"integer"}},"required":["first","second_name","n"]}',
    'JSON_SCHEMA BOUNDED {"type":"object","properties":{"a_key":{"type":"string"},"b_key":{"type":"null"}},'
    '"required":["a_key","b_key"]}',
    'CHOICE COMPACT ["yes, of course", "yes, but", "no", "not at all"]',
    "REGEX COMPACT (ab|cd){3}end of it?",
    LITERAL,
    CONST,
]


def made() -> list[Answer]:
    """Return greedy and sampled requests; some have limits so low that budgeted completion steers the answer."""
    answers = []
    for number, source in enumerate(SCHEMAS):
        # The prompt holds words of the answer, so that the n-gram drafter proposes drafts, some of them illegal.
        prompt = list(f"{source[-40:]} customer true {number}".encode())
        answers.append(ask(prompt, grammar=source, max_tokens=90))
        answers.append(ask(prompt, grammar=source, max_tokens=60, temperature=0.8, seed=number))
    return [*answers, ask(tokens(12, 2), max_tokens=30, ignore_eos=True)]


@pytest.fixture(scope="module", params=NAMES)
def sidecars(request: pytest.FixtureRequest, llama: LoadedModel) -> Sidecars:
    return Sidecars(request.param, llama)


@pytest.fixture(scope="module")
def expected(sidecars: Sidecars) -> list[list[int]]:
    """Return the answers of an engine that serves one request at a time and emits one token a step."""
    answers = made()
    with sidecars.engine(with_drafts(0, **PATIENT)) as (engine, worker):
        answer_each(engine, answers)
        assert worker.stats()["proposed_tokens"] == 0
    for answer in answers[:-1]:
        assert answer.finish in (FinishReason.STOP, FinishReason.GRAMMAR_CLOSED), answer.request.grammar
    literal, const = answers[2 * SCHEMAS.index(LITERAL)], answers[2 * SCHEMAS.index(CONST)]
    assert bytes(literal.tokens[:-1]) == b"the whole answer is forced"
    assert json.loads(bytes(const.tokens[:-1])) == {"name": "a const", "of": [1, 2, {"deep": None}]}
    return [answer.tokens for answer in answers]


DRAFTERS: list[tuple[dict[str, Any], int, int]] = [
    ({"drafter": "ngram"}, 2, 1),
    ({"drafter": "ngram", "overlap": True}, 7, 1),
    ({"drafter": "ngram"}, 3, 15),
    ({"drafter": "grammar"}, 1, 7),
    ({"drafter": "grammar", "overlap": True}, 4, 1),
    ({"drafter": "model", "draft_model": "same", "draft_masks": "on"}, 2, 7),
    ({"drafter": "model", "draft_model": "same", "draft_masks": "off"}, 3, 15),
    ({"drafter": "eagle3", "draft_model": "circle eagle3", "draft_masks": "off"}, 5, 1),
    ({"drafter": "eagle3", "draft_model": "random eagle3", "draft_masks": "on"}, 5, 1),
]


SLOW = (1, 3, 6, 8)
"""Places in `DRAFTERS`; each of these drafters is there once more, with other drafts or masks."""


@pytest.mark.parametrize(
    "at", [pytest.param(at, marks=pytest.mark.slow) if at in SLOW else at for at in range(len(DRAFTERS))]
)
def test_tokens_do_not_depend_on_jump_forward(
    sidecars: Sidecars, expected: list[list[int]], draft_models: dict[str, str], at: int
) -> None:
    fields, num_drafts, most = DRAFTERS[at]
    named = {"draft_model": draft_models[fields["draft_model"]]} if "draft_model" in fields else {}
    settings = config(
        num_draft_tokens=num_drafts, jump_forward_tokens=most, step_rows=64, **{**fields, **named, **PATIENT}
    )
    with sidecars.engine(settings) as (engine, worker):
        assert answer_all(engine, made()) == expected
        stats, rows = engine.stats(), worker.stats()
    assert stats.deferred_rows == 0
    # With a byte vocabulary a text has one spelling, but a steered answer may have a choice near its end.
    assert stats.jump_forward_tokens >= stats.accepted_jump_forward_tokens > 0.95 * stats.jump_forward_tokens > 100
    assert rows["proposed_tokens"] >= stats.jump_forward_tokens
    assert rows["filled_rows"] > 100


@pytest.mark.parametrize(("num_drafts", "most"), [(7, 0), (7, 15), (1, 11)])
def test_an_answer_of_jump_forward_tokens_takes_few_steps(
    sidecars: Sidecars, expected: list[list[int]], num_drafts: int, most: int
) -> None:
    at, rows = 2 * SCHEMAS.index(LITERAL), max(num_drafts, most) + 1
    settings = config(drafter="grammar", num_draft_tokens=num_drafts, jump_forward_tokens=most, **PATIENT)
    with sidecars.engine(settings) as (engine, _):
        answer = made()[at]
        answer.change(jump_forward_tokens=15)
        assert answer_all(engine, [answer]) == [expected[at]]
    # The first step emits one token, each later step as many as it has rows; the last row emits the stop token.
    assert answer.telemetry.steps == 1 + -(-(len(expected[at]) - 1) // rows)
