"""Drafts from earlier answers: fewer steps, and scopes are kept apart.

Not responsible for: tokens that do not change by them (see tests/gpu_engine/test_lossless.py).
"""

from __future__ import annotations

from gpu_engine.api.request import SuffixScope
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.harness import Answer, answer_each, ask, tokens, unguided_engine, with_drafts

SCOPE = SuffixScope(b"one", seeds=((65, 66, 67, 68),))


def asked(scope: SuffixScope | None, **fields: int) -> Answer:
    return ask(
        tokens(12, 5),
        **{"max_tokens": 64, "seed": 9, "temperature": 1.0, "ignore_eos": True, "suffix_scope": scope, **fields},
    )


def test_an_answer_that_comes_again_takes_few_steps(llama: LoadedModel) -> None:
    def steps(scope: SuffixScope | None, **settings: int) -> tuple[int, int]:
        first, again = asked(scope), asked(scope)
        with unguided_engine(llama, with_drafts(7, **settings)) as engine:
            answer_each(engine, [first, again])
        assert first.tokens == again.tokens
        return first.telemetry.steps, again.telemetry.steps

    first, again = steps(SCOPE)
    assert again == 64 // 8, "every step has seven drafts, including the first, and all of them are right"
    assert first > 2 * again
    assert steps(None) == steps(SCOPE, draft_index_bytes=0) == (first, first)


def test_answers_of_another_scope_or_of_none_are_not_drafted(llama: LoadedModel) -> None:
    scopes = (SuffixScope(b"one"), SuffixScope(b"two"), None, None, SuffixScope(b"three"))
    answers = [asked(scope) for scope in scopes]
    with unguided_engine(llama, with_drafts(7)) as engine:
        answer_each(engine, answers)
        assert engine.stats().index_draft_tokens == 0
    assert len({answer.telemetry.steps for answer in answers}) == 1


def test_the_limit_of_a_request_bounds_drafts_of_the_index(llama: LoadedModel) -> None:
    answers = [asked(SCOPE, drafts=2) for _ in range(2)]
    with unguided_engine(llama, with_drafts(7)) as engine:
        answer_each(engine, answers)
    assert max(len(event.token_ids) for event in answers[1].events) == 3
