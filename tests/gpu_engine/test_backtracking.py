"""Verified answers that go back: valid by two validators, and the same with drafts, in a batch and after preemption."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import jsonschema_rs
import pytest

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.request import Backtracking, FinishReason, GrammarKind, GrammarSpec
from gpu_engine.model.loader import LoadedModel
from tests.fakes import byte_tokenizer
from tests.gpu_engine.harness import Answer, answer_all, answer_each, ask, config, tokens, with_drafts
from tests.gpu_engine.library_sidecars import EACH_LIBRARY, PATIENT, Sidecars

TOKENIZER = byte_tokenizer()
FINISHED = (FinishReason.STOP, FinishReason.GRAMMAR_CLOSED)
SCHEMAS: list[Any] = [
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
    # No answer is valid: its two items are equal.
    {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2, "uniqueItems": True},
]
BACK = Backtracking(8, 60)
SPACES = ("BOUNDED", "COMPACT")


@dataclass(frozen=True, slots=True)
class Case:
    """A request for a verified answer that may go back."""

    seed: int
    schema: Any
    back: Backtracking | None = BACK
    logprobs: int | None = None
    whitespace: str = "BOUNDED"

    def ask(self) -> Answer:
        """Return the request, not yet submitted."""
        answer = ask(
            tokens(9, self.seed, repeat=3),
            max_tokens=90,
            seed=self.seed,
            temperature=0.0 if self.seed % 2 else 1.2,
            logprobs=self.logprobs,
        )
        source = f"JSON_SCHEMA {self.whitespace} {json.dumps(self.schema)}"
        answer.change(grammar=GrammarSpec(GrammarKind.JSON_SCHEMA, source, verify=True))
        answer.change(backtracking=self.back)
        return answer

    def check(self, answer: Answer) -> None:
        """Check an answer that has ended."""
        assert answer.finish is not None
        assert answer.finish in (*FINISHED, FinishReason.GRAMMAR_INVALID, FinishReason.GRAMMAR_INCOMPLETE), answer.error
        if answer.finish in FINISHED:
            value = json.loads(TOKENIZER.decode(answer.tokens, skip_special_tokens=True))
            assert jsonschema.Draft202012Validator(self.schema).is_valid(value), (self, value)
            assert jsonschema_rs.Draft202012Validator(self.schema).is_valid(value), (self, value)


@pytest.fixture(scope="module", params=EACH_LIBRARY)
def sidecars(request: pytest.FixtureRequest, llama: LoadedModel) -> Sidecars:
    return Sidecars(request.param, llama)


def run(sidecars: Sidecars, settings: EngineConfig, cases: list[Case], *, alone: bool = False) -> list[Answer]:
    answers = [case.ask() for case in cases]
    with sidecars.engine(settings) as (engine, _):
        (answer_each if alone else answer_all)(engine, answers)
    return answers


def outcome(answer: Answer) -> tuple[list[int], FinishReason | None, int]:
    return answer.tokens, answer.finish, answer.telemetry.backtracks


def compare(sidecars: Sidecars, cases: list[Case], others: list[EngineConfig]) -> list[Answer]:
    """Check every answer, and that the engines of `others` have the same; return the answers."""
    plain = run(sidecars, with_drafts(0, **PATIENT), cases, alone=True)
    for case, answer in zip(cases, plain, strict=True):
        case.check(answer)
    for settings in others:
        for case, one, other in zip(cases, plain, run(sidecars, settings, cases), strict=True):
            assert outcome(other) == outcome(one), (case, settings)
    return plain


def ends(answers: list[Answer]) -> Counter[str]:
    return Counter(answer.finish.name for answer in answers if answer.finish)


def test_answers_that_go_back_are_valid_and_do_not_depend_on_drafts(sidecars: Sidecars) -> None:
    cases = [Case(seed, schema) for seed in range(1) for schema in SCHEMAS]
    drafting = config(drafter="ngram", num_draft_tokens=7, jump_forward_tokens=7, overlap=True, **PATIENT)
    answers = compare(sidecars, cases, [with_drafts(3, **PATIENT), drafting])
    went_back = [answer for answer in answers if answer.telemetry.backtracks]
    assert sum(answer.finish in FINISHED for answer in went_back) >= 2, [outcome(answer) for answer in answers]
    stay = run(sidecars, with_drafts(0, **PATIENT), [replace(case, back=None) for case in cases])
    assert ends(stay)["GRAMMAR_INVALID"] > ends(answers)["GRAMMAR_INVALID"] > 0


def test_tokens_that_were_sent_stay(sidecars: Sidecars) -> None:
    """What the client gets in pieces is the answer; with fewer held tokens an answer goes back less far."""
    answers = run(sidecars, with_drafts(3, **PATIENT), [Case(0, SCHEMAS[0], Backtracking(8, held)) for held in (2, 60)])
    short, long = answers
    assert long.finish in FINISHED
    assert long.telemetry.backtracks > 0
    assert short.finish is FinishReason.GRAMMAR_INVALID
    assert len(short.tokens) > len(short.events) > 2
    assert {event.num_held for event in short.events[:-1]} == {2}
    assert short.events[-1].num_held == 0


def test_what_belongs_to_tokens_goes_back_with_them(sidecars: Sidecars) -> None:
    (answer,) = run(sidecars, with_drafts(3, **PATIENT), [Case(0, SCHEMAS[0], logprobs=2)])
    assert answer.telemetry.backtracks > 0
    assert len([each for event in answer.events for each in event.logprobs]) == len(answer.tokens)


@pytest.mark.slow
def test_more_answers_go_back_to_the_same_places_after_preemption(sidecars: Sidecars) -> None:
    cases = [Case(seed, schema, whitespace=space) for seed in range(3) for schema in SCHEMAS for space in SPACES]
    compare(
        sidecars,
        cases,
        [
            config(drafter="grammar", num_draft_tokens=7, jump_forward_tokens=15, **PATIENT),
            config(drafter="ngram", num_draft_tokens=7, jump_forward_tokens=3, kv_cache_tokens=320, **PATIENT),
        ],
    )
