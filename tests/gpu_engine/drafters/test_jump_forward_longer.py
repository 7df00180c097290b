"""More jump-forward tokens than K: whatever is proposed, the tokens are those of K = 0."""

from __future__ import annotations

import pytest

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.request import FinishReason
from gpu_engine.model.loader import LoadedModel
from shared_mem.layout import Stage
from tests.fakes import EOS
from tests.gpu_engine.core.guided_requests import made
from tests.gpu_engine.drafters.proposals import Proposes, half_right, liar, prophet
from tests.gpu_engine.harness import (
    UNHURRIED_MS,
    Answer,
    answer_all,
    answer_each,
    answer_staggered,
    ask,
    config,
    tokens,
    with_drafts,
)
from tests.gpu_engine.toy_sidecar import Automaton, ToySidecar, guided_engine

PATIENT = {"row_timeout_ms": UNHURRIED_MS, "draft_timeout_ms": UNHURRIED_MS}
MAX_JUMP_FORWARD = 7
"""The largest number of jump-forward tokens (F); K is smaller."""


@pytest.fixture(scope="module")
def expected(llama: LoadedModel) -> list[list[int]]:
    """Return the answers of an engine that serves one request at a time and emits one token a step."""
    answers = made()
    with guided_engine(llama, with_drafts(0, row_timeout_ms=UNHURRIED_MS)) as (engine, _):
        answer_each(engine, answers)
    return [answer.tokens for answer in answers]


def beyond_the_end(expected: list[list[int]]) -> Proposes:
    """Return a proposer of the right tokens and of more tokens after the end of the answer."""
    knows = prophet(expected)
    return lambda automaton, emitted: [*knows(automaton, emitted), 70, 71, EOS, 72]


def wrong_late(expected: list[list[int]]) -> Proposes:
    """Return a proposer of four right tokens, a wrong one and two more, as if the target spelled the text otherwise."""
    knows = prophet(expected)
    return lambda automaton, emitted: [*knows(automaton, emitted)[:4], len(emitted) % 256, 66, 67]


def proposers(expected: list[list[int]]) -> dict[str, Proposes]:
    return {
        "forced": Automaton.forced,
        "prophet": prophet(expected),
        "beyond the end": beyond_the_end(expected),
        "wrong late": wrong_late(expected),
        "half right": half_right(expected),
        "liar": liar,
    }


def lengths(sidecar: ToySidecar) -> set[int]:
    """Return the numbers of drafts that steps verified at once."""
    return {len(record.drafts) for record in sidecar.records if record.stage == Stage.VERIFY}


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("proposes", ["forced", "prophet", "beyond the end", "wrong late", "half right", "liar"])
@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
def test_no_proposal_changes_a_token(
    llama: LoadedModel, expected: list[list[int]], num_drafts: int, proposes: str, drafter: str, overlap: bool
) -> None:
    settings = config(
        drafter=drafter,
        num_draft_tokens=num_drafts,
        jump_forward_tokens=MAX_JUMP_FORWARD,
        overlap=overlap,
        step_rows=64,
        **PATIENT,
    )
    with guided_engine(llama, settings) as (engine, grammar):
        grammar.sidecar.proposes = proposers(expected)[proposes]
        answer = answer_staggered if num_drafts == 2 else answer_all
        assert answer(engine, made()) == expected
        stats, seen = engine.stats(), lengths(grammar.sidecar)
    assert stats.deferred_rows == 0
    if proposes in ("prophet", "beyond the end", "liar"):
        assert max(seen) == MAX_JUMP_FORWARD
    if proposes == "prophet":
        assert stats.accepted_jump_forward_tokens >= 0.9 * stats.jump_forward_tokens > 100


@pytest.mark.parametrize("drafts_by", ["same", "other", "trained eagle3", "random eagle3"])
@pytest.mark.parametrize("proposes", ["forced", "prophet", "wrong late", "liar"])
@pytest.mark.parametrize(
    ("num_drafts", "waits"), [(1, {"draft_masks": "on"}), (3, {}), (2, {"draft_masks": "on", "overlap": True})]
)
def test_a_draft_net_continues_after_jump_forward_tokens(
    llama: LoadedModel,
    draft_models: dict[str, str],
    expected: list[list[int]],
    drafts_by: str,
    proposes: str,
    num_drafts: int,
    waits: dict[str, object],
) -> None:
    fields = {"draft_model": draft_models[drafts_by], "jump_forward_tokens": MAX_JUMP_FORWARD, **PATIENT, **waits}
    with guided_engine(llama, with_drafts(num_drafts, step_rows=64, **fields)) as (engine, grammar):
        grammar.sidecar.proposes = proposers(expected)[proposes]
        assert answer_all(engine, made()) == expected
        assert engine.stats().deferred_rows == 0
        assert (max(lengths(grammar.sidecar)) == MAX_JUMP_FORWARD) == (proposes != "forced")


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_a_draft_model_processes_jump_forward_tokens(
    llama: LoadedModel, draft_models: dict[str, str], expected: list[list[int]], num_drafts: int, overlap: bool
) -> None:
    """Drafts of the target itself are accepted, also after six jump-forward tokens that its chain did not draw."""
    knows = prophet(expected)
    settings = with_drafts(
        num_drafts,
        draft_model=draft_models["same"],
        jump_forward_tokens=MAX_JUMP_FORWARD,
        draft_masks="on",
        overlap=overlap,
        step_rows=64,
        **PATIENT,
    )
    with guided_engine(llama, settings) as (engine, grammar):
        grammar.sidecar.proposes = lambda automaton, emitted: knows(automaton, emitted)[:6] if len(emitted) % 3 else []
        assert answer_all(engine, made()) == expected
        stats = engine.stats()
    # A stop token ends a step and does not count as an accepted draft.
    assert stats.accepted_jump_forward_tokens >= stats.jump_forward_tokens - 4 > 40
    assert stats.accepted_draft_tokens >= 0.95 * stats.draft_tokens
    assert stats.draft_tokens - stats.jump_forward_tokens > 30


def test_the_drafter_adds_drafts_only_up_to_k(llama: LoadedModel, expected: list[list[int]]) -> None:
    settings = config(num_draft_tokens=3, jump_forward_tokens=MAX_JUMP_FORWARD, step_rows=64, **PATIENT)
    knows = prophet(expected)
    for count, max_drafts in ((0, 3), (2, 3), (5, 5)):
        with guided_engine(llama, settings) as (engine, grammar):
            grammar.sidecar.proposes = lambda automaton, emitted, count=count: knows(automaton, emitted)[:count]
            assert answer_all(engine, made()) == expected
            assert max(lengths(grammar.sidecar)) == max_drafts


@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
@pytest.mark.parametrize("there", [0, 1, 5])
def test_late_rows_of_many_jump_forward_drafts_serve_the_repeated_step(
    llama: LoadedModel, expected: list[list[int]], drafter: str, there: int, overlap: bool
) -> None:
    settings = config(
        drafter=drafter,
        num_draft_tokens=2,
        jump_forward_tokens=MAX_JUMP_FORWARD,
        overlap=overlap,
        step_rows=64,
        **PATIENT,
    )
    with guided_engine(llama, settings) as (engine, grammar):
        sidecar = grammar.sidecar
        sidecar.gives, sidecar.proposes = True, wrong_late(expected)
        sidecar.withhold = lambda record: (
            there if record.stage == Stage.VERIFY and (record.commit_pos + len(record.committed)) % 2 == 0 else None
        )
        assert answer_all(engine, made()) == expected
        assert sidecar.withheld > 10


def test_a_number_of_drafts_in_the_request_limits_all_drafts(llama: LoadedModel) -> None:
    settings = config(num_draft_tokens=3, jump_forward_tokens=MAX_JUMP_FORWARD, **PATIENT)

    def seen(own: int, jump_forward: int | None) -> tuple[list[int], int, set[Stage]]:
        with guided_engine(llama, settings) as (engine, grammar):
            grammar.sidecar.proposes = liar
            answer = ask(tokens(20, 3), grammar="40", max_tokens=60, drafts=own)
            answer.change(jump_forward_tokens=jump_forward)
            answer_all(engine, [answer])
            records = grammar.sidecar.records
            return answer.tokens, max(lengths(grammar.sidecar)), {Stage(r.stage) for r in records}

    emitted, longest, stages = seen(0, MAX_JUMP_FORWARD)
    assert (longest, stages) == (0, {Stage.VERIFY}), "without speculation the engine posts no PROPOSE record"
    for own, jump_forward, max_drafts in (
        (2, None, 2),
        (3, None, 3),
        (3, MAX_JUMP_FORWARD, MAX_JUMP_FORWARD),
        (3, 15, MAX_JUMP_FORWARD),
        (15, None, MAX_JUMP_FORWARD),
    ):
        assert seen(own, jump_forward) == (emitted, max_drafts, {Stage.VERIFY, Stage.PROPOSE})


@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
def test_drafts_stop_at_the_end_of_the_context(llama: LoadedModel, drafter: str, overlap: bool) -> None:
    def run(**fields: object) -> list[Answer]:
        settings = config(max_model_len=64, overlap=overlap, **PATIENT, **fields)
        answers = [ask(tokens(20 + n, n), grammar="90", max_tokens=80) for n in range(3)]
        answers += [ask(tokens(9, n), grammar="90", max_tokens=20 + n) for n in range(5)]
        with guided_engine(llama, settings) as (engine, grammar):
            grammar.sidecar.proposes = prophet([answer.tokens for answer in known])
            answer_all(engine, answers)
        return answers

    known: list[Answer] = []
    known = run(drafter="none")
    long = run(drafter=drafter, num_draft_tokens=2, jump_forward_tokens=15, step_rows=64)
    assert [answer.tokens for answer in long] == [answer.tokens for answer in known]
    assert [len(answer.tokens) for answer in long] == [44, 43, 42, 20, 21, 22, 23, 24]
    assert {answer.finish for answer in long} == {FinishReason.GRAMMAR_INCOMPLETE}


def test_a_cpu_step_stays_within_its_target_of_rows(llama: LoadedModel) -> None:
    def run(count: int, step_rows: int) -> tuple[int, set[int]]:
        settings = config(num_draft_tokens=3, jump_forward_tokens=15, step_rows=step_rows, **PATIENT)
        with guided_engine(llama, settings) as (engine, grammar):
            grammar.sidecar.proposes = lambda automaton, emitted: [105] * 20
            answer_all(engine, [ask(tokens(9, 1), grammar="40", max_tokens=60) for _ in range(count)])
            stats, seen = engine.stats(), lengths(grammar.sidecar)
        # All steps but the last ones have `count` lanes, each with as many drafts as there is room for.
        assert stats.step_rows <= step_rows * stats.steps
        return max(seen), seen

    assert run(1, 24)[0] == 15
    assert run(1, 10)[0] == 9
    assert run(4, 8)[1] >= {0, 1}
    assert run(4, 24)[1] >= {5}


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({}, (7, 15, 16)),
        ({"num_draft_tokens": 3, "jump_forward_tokens": 7}, (3, 7, 8)),
        ({"num_draft_tokens": 5, "jump_forward_tokens": 2}, (5, 5, 6)),
        ({"jump_forward_tokens": 0}, (7, 7, 8)),
        ({"jump_forward_tokens": 0, "drafter": "grammar"}, (7, 7, 8)),
        ({"drafter": "none"}, (0, 0, 1)),
        ({"num_draft_tokens": 0}, (0, 0, 1)),
    ],
)
def test_numbers_of_drafts_and_rows(fields: dict[str, object], numbers: tuple[int, int, int]) -> None:
    settings = EngineConfig(**fields)  # type: ignore[arg-type]
    assert (settings.num_drafts, settings.num_jump_forward, settings.num_rows) == numbers


def test_more_jump_forward_tokens_than_a_record_holds_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"jump_forward_tokens: must be in \[0, 15\]"):
        EngineConfig(jump_forward_tokens=16)
