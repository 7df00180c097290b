"""Verified answers over random walks of a toy model: valid by two validators, the same with drafts, in a batch and
after preemption, whether they may go back or not."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gpu_engine.api.request import Backtracking, FinishReason, GrammarKind, GrammarSpec
from gpu_engine.model.loader import LoadedModel
from grammar_service.backends.registry import NAMES
from grammar_service.errors import InvalidGrammar, LimitExceeded
from grammar_service.grammar.value import Kind, Reading, Whitespace, parse
from tests.fakes import byte_tokenizer
from tests.gpu_engine.harness import Answer, ask, config, tokens, with_drafts
from tests.gpu_engine.library_sidecars import PATIENT, Sidecars, compare, run
from tests.grammar_service.random_schemas import DIALECTS, MODERN, Dialect, SchemaDraw

NO_ANSWER = {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
"""No answer is valid: its two items are equal."""
SCHEMAS: list[Any] = [
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 12}, "uniqueItems": True, "maxItems": 5},
    {"type": "array", "items": {"type": "string", "maxLength": 2}, "uniqueItems": True, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"type": "boolean"}, "contains": {"const": True}, "minContains": 2, "maxItems": 6},
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "not": {"properties": {"a": {"multipleOf": 2}}},
    },
    NO_ANSWER,
]
UNLIKELY: list[Any] = [
    {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 4}, "uniqueItems": True, "minItems": 4},
    {
        "type": "array",
        "items": {"type": "string", "pattern": "^(ab|ac|d)$"},
        "uniqueItems": True,
        "minItems": 2,
        "maxItems": 2,
    },
    # What follows the value of "a" is fixed, and decides nothing.
    {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^[xyz]$"}, "b": {"enum": ["long text"]}, "c": {"const": 1}},
        "required": ["a", "b", "c"],
        "additionalProperties": False,
        "not": {"properties": {"a": {"pattern": "^[xy]"}, "c": {"multipleOf": 1}}},
    },
    NO_ANSWER,
]
"""Schemas whose answers are rarely valid without going back."""
BACK = Backtracking(8, 60)
FINISHED = (FinishReason.STOP, FinishReason.GRAMMAR_CLOSED)
DRAFTING = config(drafter="ngram", num_draft_tokens=7, jump_forward_tokens=7, overlap=True, **PATIENT)
PREEMPTED = (
    config(drafter="grammar", num_draft_tokens=7, jump_forward_tokens=15, **PATIENT),
    config(
        drafter="ngram",
        num_draft_tokens=7,
        jump_forward_tokens=3,
        max_batch_size=24,
        max_model_len=128,
        kv_cache_tokens=128,
        **PATIENT,
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A request for a verified answer."""

    seed: int
    schema: Any
    back: Backtracking | None = None
    dialect: Dialect = MODERN
    logprobs: int | None = None
    whitespace: str = "COMPACT"

    def ask(self) -> Answer:
        """Return the request, not yet submitted."""
        answer = ask(
            tokens(9, self.seed, repeat=3),
            max_tokens=90,
            seed=self.seed,
            temperature=0.0 if self.seed % 2 else 1.2,
            logprobs=self.logprobs,
            backtracking=self.back,
        )
        source = f"JSON_SCHEMA {self.whitespace} {json.dumps(self.schema)}"
        answer.change(grammar=GrammarSpec(GrammarKind.JSON_SCHEMA, source, verify=True))
        return answer

    def check(self, answer: Answer) -> None:
        """Check an answer that has ended."""
        assert answer.finish is not None
        assert answer.finish in (*FINISHED, FinishReason.GRAMMAR_INVALID, FinishReason.GRAMMAR_INCOMPLETE), answer.error
        if answer.finish in FINISHED:
            value = json.loads(byte_tokenizer().decode(answer.tokens, skip_special_tokens=True))
            assert self.dialect.is_valid(self.schema, value) == (True, True), (self, value)


@pytest.fixture(scope="module", params=NAMES)
def sidecars(request: pytest.FixtureRequest, llama: LoadedModel) -> Sidecars:
    return Sidecars(request.param, llama)


def ends(answers: list[Answer]) -> Counter[str]:
    return Counter(answer.finish.name for answer in answers if answer.finish)


def complete(answers: list[Answer]) -> int:
    return sum(answer.finish in FINISHED for answer in answers)


def random_cases(sidecars: Sidecars, seed: int, count: int) -> list[Case]:
    """Return requests with random schemas of every keyword; the library serves them, and enforces a part of them."""
    draw, cases = random.Random(seed), list[Case]()
    while len(cases) < count:
        dialect = draw.choice(DIALECTS)
        schema = SchemaDraw(draw, dialect).schema()
        grammar = parse(Kind.JSON_SCHEMA, json.dumps(schema), Whitespace.COMPACT)
        grammar = replace(grammar, reading=Reading(verify=True))
        try:
            warnings = sidecars.backend.load(grammar, sidecars.backend.compile(grammar)).warnings
        except (InvalidGrammar, LimitExceeded):
            continue
        if any(line.startswith("verified: ") for line in warnings):
            cases.append(Case(len(cases), schema, BACK, dialect))
    return cases


def test_answers_are_valid_and_do_not_depend_on_drafts(sidecars: Sidecars) -> None:
    cases = [Case(seed, schema) for seed in range(3) for schema in SCHEMAS]
    (answers, *_) = compare(sidecars, cases, with_drafts(3, **PATIENT), DRAFTING)
    assert complete(answers) >= len(cases) // 2, ends(answers)
    assert ends(answers)["GRAMMAR_INVALID"] >= 3, ends(answers)


def test_answers_that_go_back_are_valid_and_do_not_depend_on_drafts(sidecars: Sidecars) -> None:
    cases = [Case(0, schema, BACK, whitespace="BOUNDED") for schema in UNLIKELY]
    (answers, *_) = compare(sidecars, cases, with_drafts(3, **PATIENT), DRAFTING)
    assert complete([answer for answer in answers if answer.telemetry.backtracks]) >= 2, ends(answers)
    stay = run(sidecars, with_drafts(0, **PATIENT), [replace(case, back=None) for case in cases])
    assert ends(stay)["GRAMMAR_INVALID"] > ends(answers)["GRAMMAR_INVALID"] > 0


def test_tokens_that_were_sent_stay_and_what_belongs_to_others_goes_back_with_them(sidecars: Sidecars) -> None:
    """What the client gets in pieces is the answer; with fewer held tokens an answer goes back less far."""
    cases = [
        Case(0, UNLIKELY[0], Backtracking(8, held), logprobs=2, whitespace="BOUNDED") for held in (2, BACK.hold_tokens)
    ]
    short, long = run(sidecars, with_drafts(3, **PATIENT), cases)
    assert long.finish in FINISHED
    assert long.telemetry.backtracks > 0
    assert len(long.logprobs) == len(long.tokens)
    assert short.finish is FinishReason.GRAMMAR_INVALID
    assert len(short.tokens) > len(short.events) > 2
    assert {event.num_held for event in short.events[:-1]} == {2}
    assert short.events[-1].num_held == 0


@pytest.mark.slow
@pytest.mark.parametrize("back", [None, BACK])
def test_more_answers_are_valid_after_preemption(sidecars: Sidecars, back: Backtracking | None) -> None:
    seeds, schemas = (range(8), SCHEMAS) if back is None else (range(6), UNLIKELY)
    compare(sidecars, [Case(seed, schema, back) for seed in seeds for schema in schemas], *PREEMPTED)


@pytest.mark.parametrize(("count", "valid"), [(3, 1), pytest.param(40, 7, marks=pytest.mark.slow)])
def test_answers_to_random_schemas_are_valid(sidecars: Sidecars, count: int, valid: int) -> None:
    (answers, *_) = compare(sidecars, random_cases(sidecars, 3 + (count > 8), count), DRAFTING)
    # Enough complete answers to judge. xgrammar enforces fewer keywords, so more of its answers meet a dead end.
    assert complete(answers) >= valid, ends(answers)
