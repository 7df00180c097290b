"""Answers that repeat themselves end, guided ones complete; drafts change nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gpu_engine.api.request import FinishReason, GrammarKind, GrammarSpec
from gpu_engine.model.loader import LoadedModel
from service_runtime.repetition import RepetitionLimit
from tests.fakes import byte_tokenizer
from tests.gpu_engine.harness import Answer, ask, config, tokens, with_drafts
from tests.gpu_engine.library_sidecars import EACH_LIBRARY, PATIENT, Sidecars, compare, run

TOKENIZER = byte_tokenizer()
TEXT = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
LIST = {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}, "minItems": 1}
LIMITS = [RepetitionLimit(4, 1, 6), RepetitionLimit(6, 2, 4, min_tokens=30), RepetitionLimit(1, 1, 3)]
MAX_TOKENS = 90


@dataclass(frozen=True, slots=True)
class Case:
    """A request whose answer prefers the letter a, so that free text and strings repeat it."""

    seed: int
    limit: RepetitionLimit | None
    schema: Any = None

    def ask(self) -> Answer:
        """Return the request, not yet submitted."""
        bias = tuple((byte, 9.0) for byte in b"a")
        answer = ask(
            tokens(9, self.seed, repeat=3),
            max_tokens=MAX_TOKENS,
            seed=self.seed,
            temperature=0.0 if self.seed % 2 else 0.7,
            logit_bias=bias,
            # After the end of a JSON value no token but a stop token is legal, which min_tokens would ban.
            min_tokens=0 if self.limit is None or self.schema is not None else self.limit.min_tokens,
            repetition=self.limit,
        )
        if self.schema is not None:
            answer.change(
                grammar=GrammarSpec(GrammarKind.JSON_SCHEMA, f"JSON_SCHEMA COMPACT {json.dumps(self.schema)}")
            )
        return answer

    def check(self, answer: Answer) -> None:
        """Check an answer that has ended."""
        ids, limit = answer.tokens, self.limit
        assert limit is not None
        assert answer.error is None, answer.error
        assert answer.finish is not FinishReason.GRAMMAR_ERROR
        first = next((end for end in range(1, len(ids) + 1) if limit.is_reached(ids, end)), None)
        if answer.finish is FinishReason.REPETITION:
            assert first is not None
            if self.schema is None:
                assert first == len(ids)
            else:
                assert len(ids) <= first + 24, "a short way to the end"
        elif self.schema is None:
            assert first is None or answer.finish is FinishReason.STOP
        if self.schema is not None and answer.finish is not FinishReason.GRAMMAR_INCOMPLETE:
            json.loads(TOKENIZER.decode(ids, skip_special_tokens=True))


CASES = [Case(seed, limit, schema) for seed in range(4) for limit in LIMITS for schema in (None, TEXT, LIST)]


@pytest.fixture(scope="module", params=EACH_LIBRARY)
def sidecars(request: pytest.FixtureRequest, llama: LoadedModel) -> Sidecars:
    return Sidecars(request.param, llama)


def test_repeating_answers_end_and_do_not_depend_on_drafts(sidecars: Sidecars) -> None:
    drafting = config(drafter="ngram", num_draft_tokens=7, jump_forward_tokens=7, overlap=True, **PATIENT)
    cases = CASES[:18]
    answers = compare(sidecars, cases, with_drafts(3, **PATIENT), drafting)[0]
    ended = [answer.finish is FinishReason.REPETITION for answer in answers]
    free = [end for case, end in zip(cases, ended, strict=True) if case.schema is None]
    guided = [end for case, end in zip(cases, ended, strict=True) if case.schema is TEXT]
    assert sum(free) >= len(free) // 2
    assert sum(guided) >= len(guided) // 2


def test_without_a_limit_the_same_answers_go_on(sidecars: Sidecars) -> None:
    cases = [replace(case, limit=None) for case in CASES[:9:3]]
    for answer in run(sidecars, with_drafts(0, **PATIENT), cases):
        assert len(answer.tokens) == MAX_TOKENS


@pytest.mark.slow
def test_repeating_answers_are_the_same_after_preemption(sidecars: Sidecars) -> None:
    long = [Case(seed, RepetitionLimit(6, 2, 4, min_tokens=60)) for seed in range(12)]  # so that pages run out
    tight = {"max_batch_size": 12, "max_model_len": 112, "kv_cache_tokens": 112}
    compare(
        sidecars,
        [*long, *CASES],
        config(drafter="ngram", num_draft_tokens=7, jump_forward_tokens=3, **tight, **PATIENT),
        config(drafter="grammar", num_draft_tokens=7, jump_forward_tokens=15, **PATIENT),
    )
