"""Verified answers over random walks of a toy model: valid by two validators, lossless with drafts and preemption."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.request import Backtracking, FinishReason, GrammarKind, GrammarSpec
from gpu_engine.model.loader import LoadedModel
from grammar_service.backends.registry import NAMES
from grammar_service.errors import InvalidGrammar, LimitExceeded
from grammar_service.grammar.value import Kind, Reading, Whitespace, parse
from tests.fakes import byte_tokenizer
from tests.gpu_engine.harness import Answer, answer_all, answer_each, ask, config, tokens, with_drafts
from tests.gpu_engine.library_sidecars import PATIENT, Sidecars
from tests.grammar_service.random_schemas import DIALECTS, MODERN, Dialect, SchemaDraw

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
    # No answer is valid: its two items are equal.
    {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2, "uniqueItems": True},
]
TOKENIZER = byte_tokenizer()
FINISHED = (FinishReason.STOP, FinishReason.GRAMMAR_CLOSED)


@dataclass(frozen=True, slots=True)
class Case:
    """A request for a verified answer."""

    seed: int
    schema: Any
    dialect: Dialect = MODERN
    back: Backtracking | None = None

    def ask(self) -> Answer:
        """Return the request, not yet submitted."""
        answer = ask(
            tokens(9, self.seed, repeat=3), max_tokens=80, seed=self.seed, temperature=0.0 if self.seed % 2 else 1.2
        )
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, f"JSON_SCHEMA COMPACT {json.dumps(self.schema)}", verify=True)
        answer.change(grammar=spec)
        answer.change(backtracking=self.back)
        return answer

    def check(self, answer: Answer) -> None:
        """Check an answer that has ended."""
        assert answer.finish is not None
        assert answer.finish in (*FINISHED, FinishReason.GRAMMAR_INVALID, FinishReason.GRAMMAR_INCOMPLETE), answer.error
        if answer.finish in FINISHED:
            value = json.loads(TOKENIZER.decode(answer.tokens, skip_special_tokens=True))
            assert self.dialect.is_valid(self.schema, value) == (True, True), (self, value)


@pytest.fixture(scope="module", params=NAMES)
def sidecars(request: pytest.FixtureRequest, llama: LoadedModel) -> Sidecars:
    return Sidecars(request.param, llama)


def run(sidecars: Sidecars, settings: EngineConfig, cases: list[Case], *, alone: bool = False) -> list[Answer]:
    answers = [case.ask() for case in cases]
    with sidecars.engine(settings) as (engine, _):
        (answer_each if alone else answer_all)(engine, answers)
    return answers


def compare(sidecars: Sidecars, cases: list[Case], others: list[EngineConfig]) -> Counter[str]:
    """Check every answer, and that the engines of `others` have its tokens; return how the answers ended."""
    plain = run(sidecars, with_drafts(0, **PATIENT), cases, alone=True)
    for case, answer in zip(cases, plain, strict=True):
        case.check(answer)
    for settings in others:
        for case, one, other in zip(cases, plain, run(sidecars, settings, cases), strict=True):
            assert (other.tokens, other.finish) == (one.tokens, one.finish), (case, settings)
    return Counter(answer.finish.name for answer in plain if answer.finish)


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
            cases.append(Case(len(cases), schema, dialect, Backtracking(8, 60)))
    return cases


def test_answers_are_valid_and_do_not_depend_on_drafts(sidecars: Sidecars) -> None:
    cases = [Case(seed, schema) for seed in range(3) for schema in SCHEMAS]
    ends = compare(
        sidecars,
        cases,
        [
            with_drafts(3, **PATIENT),
            config(drafter="ngram", num_draft_tokens=7, jump_forward_tokens=7, overlap=True, **PATIENT),
        ],
    )
    assert ends["STOP"] + ends["GRAMMAR_CLOSED"] >= len(cases) // 2, ends
    assert ends["GRAMMAR_INVALID"] >= 3, ends


@pytest.mark.slow
def test_more_answers_are_valid_after_preemption(sidecars: Sidecars) -> None:
    cases = [Case(seed, schema) for seed in range(20) for schema in SCHEMAS]
    compare(
        sidecars,
        cases,
        [
            config(drafter="grammar", num_draft_tokens=7, jump_forward_tokens=15, **PATIENT),
            config(drafter="ngram", num_draft_tokens=7, jump_forward_tokens=3, kv_cache_tokens=320, **PATIENT),
        ],
    )


def test_answers_to_random_schemas_are_valid(sidecars: Sidecars) -> None:
    ends = compare(sidecars, random_cases(sidecars, 3, 8), [with_drafts(3, **PATIENT)])
    assert ends["STOP"] + ends["GRAMMAR_CLOSED"] >= 3, ends


@pytest.mark.slow
def test_answers_to_many_random_schemas_are_valid(sidecars: Sidecars) -> None:
    drafting = config(drafter="ngram", num_draft_tokens=7, jump_forward_tokens=7, overlap=True, **PATIENT)
    ends = compare(sidecars, random_cases(sidecars, 4, 80), [drafting])
    # Enough complete answers to judge. xgrammar enforces fewer keywords, so more of its answers meet a dead end.
    assert ends["STOP"] + ends["GRAMMAR_CLOSED"] >= 15, ends
