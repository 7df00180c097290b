"""Jump-forward tokens of the real grammar libraries, in one process with a tiny model: answers are those of one token
a step."""

from __future__ import annotations

import json
from functools import partial

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
        answers.append(partial(ask, prompt, grammar=source, max_tokens=90)())
        answers.append(ask(prompt, grammar=source, max_tokens=60, temperature=0.8, seed=number))
    answers.append(ask(tokens(12, 2), max_tokens=30, ignore_eos=True))
    return answers


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


@pytest.mark.parametrize(
    ("num_drafts", "max_jump_forward"),
    [(1, 1), (2, 1), (4, 1), (7, 1), (1, 7), (2, 7), (3, 7), (3, 15)]
    + [pytest.param(number, 1, marks=pytest.mark.slow) for number in (3, 5, 6)],
)
@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
def test_tokens_do_not_depend_on_jump_forward(
    sidecars: Sidecars, expected: list[list[int]], drafter: str, num_drafts: int, max_jump_forward: int, overlap: bool
) -> None:
    settings = config(
        drafter=drafter,
        num_draft_tokens=num_drafts,
        jump_forward_tokens=max_jump_forward,
        step_rows=64,
        overlap=overlap,
        **PATIENT,
    )
    with sidecars.engine(settings) as (engine, worker):
        assert answer_all(engine, made()) == expected
        stats = engine.stats()
    assert stats.deferred_rows == 0
    # With a byte vocabulary a text has one spelling, but a steered answer may have a choice near its end.
    assert stats.jump_forward_tokens >= stats.accepted_jump_forward_tokens > 0.95 * stats.jump_forward_tokens > 100
    assert worker.stats()["proposed_tokens"] >= stats.jump_forward_tokens


@pytest.mark.parametrize("drafts_by", ["same", "trained eagle3", "random eagle3"])
@pytest.mark.parametrize(
    ("masks", "num_drafts", "max_jump_forward"), [("on", 5, 1), ("off", 5, 1), ("on", 2, 7), ("off", 3, 15)]
)
def test_draft_nets_continue_after_jump_forward_tokens(
    sidecars: Sidecars,
    expected: list[list[int]],
    draft_models: dict[str, str],
    drafts_by: str,
    masks: str,
    num_drafts: int,
    max_jump_forward: int,
) -> None:
    settings = with_drafts(
        num_drafts, draft_model=draft_models[drafts_by], jump_forward_tokens=max_jump_forward, max_batch_size=2,
        draft_masks=masks, **PATIENT,
    )  # fmt: skip
    with sidecars.engine(settings) as (engine, worker):
        assert answer_all(engine, made()) == expected
        stats = engine.stats()
        rows = worker.stats()
    assert stats.jump_forward_tokens >= stats.accepted_jump_forward_tokens > 0.95 * stats.jump_forward_tokens > 100
    assert rows["filled_rows"] > 100


@pytest.mark.parametrize(("num_drafts", "max_jump_forward"), [(7, 0), (7, 15), (1, 11)])
def test_an_answer_of_jump_forward_tokens_takes_few_steps(
    sidecars: Sidecars, expected: list[list[int]], num_drafts: int, max_jump_forward: int
) -> None:
    at, rows = 2 * SCHEMAS.index(LITERAL), max(num_drafts, max_jump_forward) + 1
    settings = config(drafter="grammar", num_draft_tokens=num_drafts, jump_forward_tokens=max_jump_forward, **PATIENT)
    with sidecars.engine(settings) as (engine, _):
        answer = made()[at]
        answer.change(jump_forward_tokens=15)
        assert answer_all(engine, [answer]) == [expected[at]]
    # The first step emits one token, each later step as many as it has rows; the last row emits the stop token.
    assert answer.telemetry.steps == 1 + -(-(len(expected[at]) - 1) // rows)
