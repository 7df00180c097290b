"""Jump-forward tokens as drafts: whatever tokens the grammar process proposes, in time or not, answers are the same."""

from __future__ import annotations

import threading

import pytest

from gpu_engine.api.request import FinishReason
from gpu_engine.model.loader import LoadedModel
from shared_mem.channel import Record
from shared_mem.layout import Stage
from tests.gpu_engine.core.guided_requests import legal, made
from tests.gpu_engine.drafters.proposals import Proposes, half_right, liar, prophet
from tests.gpu_engine.harness import (
    PATIENCE_S,
    UNHURRIED_MS,
    answer_all,
    answer_each,
    answer_staggered,
    ask,
    config,
    tokens,
    with_drafts,
)
from tests.gpu_engine.tiny import VOCAB
from tests.gpu_engine.toy_sidecar import Automaton, guided_engine


@pytest.fixture(scope="module")
def expected(llama: LoadedModel) -> list[list[int]]:
    """Return the answers of an engine that serves one request at a time and emits one token a step."""
    answers = made()
    with guided_engine(llama, with_drafts(0, row_timeout_ms=UNHURRIED_MS)) as (engine, _):
        answer_each(engine, answers)
    return [answer.tokens for answer in answers]


def out_of_vocabulary(expected: list[list[int]]) -> Proposes:
    """Return a proposer of an id that the model cannot embed, alone or after one right token."""
    knows = prophet(expected)

    def proposes(automaton: Automaton, emitted: list[int]) -> list[int]:
        outside = (VOCAB, -1, 2**31 - 1, -(2**31))[len(emitted) % 4]
        return [*knows(automaton, emitted)[: len(emitted) % 2], outside, 65]

    return proposes


def proposers(expected: list[list[int]]) -> dict[str, Proposes]:
    return {
        "forced": Automaton.forced,
        "prophet": prophet(expected),
        "liar": liar,
        "half right": half_right(expected),
        "out of vocabulary": out_of_vocabulary(expected),
    }


@pytest.mark.parametrize("num_drafts", [1, 2, 7])
@pytest.mark.parametrize("proposes", ["forced", "prophet", "liar", "half right", "out of vocabulary"])
@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
def test_no_proposal_changes_a_token(
    llama: LoadedModel, expected: list[list[int]], num_drafts: int, proposes: str, drafter: str, overlap: bool
) -> None:
    settings = config(
        drafter=drafter, num_draft_tokens=num_drafts, overlap=overlap, row_timeout_ms=UNHURRIED_MS,
        draft_timeout_ms=UNHURRIED_MS,
    )  # fmt: skip
    with guided_engine(llama, settings) as (engine, grammar):
        grammar.sidecar.proposes = proposers(expected)[proposes]
        answer = answer_staggered if num_drafts == 2 else answer_all
        assert answer(engine, made()) == expected
        stats = engine.stats()
        assert stats.deferred_rows == 0
        if proposes == "prophet":
            assert stats.accepted_jump_forward_tokens > 50
            assert stats.accepted_jump_forward_tokens >= 0.9 * stats.jump_forward_tokens
        elif proposes == "forced":
            # A step before a jump-forward token drafts it, unless the answer ends there.
            assert stats.accepted_jump_forward_tokens == stats.jump_forward_tokens > 5


@pytest.mark.parametrize("drafts_by", ["same", "other", "trained eagle3", "random eagle3"])
@pytest.mark.parametrize("proposes", ["forced", "prophet", "liar"])
@pytest.mark.parametrize("waits", [{"draft_masks": "on"}, {"draft_masks": "off"}])
def test_a_draft_net_continues_after_jump_forward_tokens(
    llama: LoadedModel,
    draft_models: dict[str, str],
    expected: list[list[int]],
    drafts_by: str,
    proposes: str,
    waits: dict[str, str],
) -> None:
    settings = with_drafts(
        3, draft_model=draft_models[drafts_by], row_timeout_ms=UNHURRIED_MS,
        draft_timeout_ms=UNHURRIED_MS, **waits,
    )  # fmt: skip
    with guided_engine(llama, settings) as (engine, grammar):
        grammar.sidecar.proposes = proposers(expected)[proposes]
        assert answer_all(engine, made()) == expected
        stats = engine.stats()
        assert stats.deferred_rows == 0
        assert (stats.accepted_jump_forward_tokens > 5) == (proposes != "liar")


@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
def test_a_late_proposal_is_ignored(llama: LoadedModel, expected: list[list[int]], drafter: str, overlap: bool) -> None:
    settings = config(drafter=drafter, overlap=overlap, row_timeout_ms=UNHURRIED_MS, draft_timeout_ms=UNHURRIED_MS)
    with guided_engine(llama, settings) as (engine, grammar):
        sidecar = grammar.sidecar
        sidecar.proposes = prophet(expected)
        sidecar.withhold = lambda record: 0 if record.stage == Stage.PROPOSE else None
        assert answer_all(engine, made()) == expected
        stats = engine.stats()
        assert (stats.jump_forward_tokens, stats.deferred_rows) == (0, 0)
        assert sidecar.withheld > 50


@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
def test_tokens_are_the_same_when_the_draft_wait_times_out(
    llama: LoadedModel, expected: list[list[int]], drafter: str, overlap: bool
) -> None:
    settings = config(drafter=drafter, overlap=overlap, row_timeout_ms=UNHURRIED_MS, draft_timeout_ms=0.001)
    with guided_engine(llama, settings) as (engine, grammar):
        grammar.sidecar.proposes = prophet(expected)
        assert answer_all(engine, made()) == expected
        assert engine.stats().deferred_rows == 0


@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
@pytest.mark.parametrize("there", [0, 1, 3])
def test_late_rows_of_jump_forward_drafts_serve_the_repeated_step(
    llama: LoadedModel, expected: list[list[int]], drafter: str, there: int, overlap: bool
) -> None:
    settings = config(drafter=drafter, overlap=overlap, row_timeout_ms=UNHURRIED_MS, draft_timeout_ms=UNHURRIED_MS)
    with guided_engine(llama, settings) as (engine, grammar):
        sidecar = grammar.sidecar
        sidecar.gives = True
        sidecar.proposes = half_right(expected)

        def now_and_then(record: Record) -> int | None:
            place = record.commit_pos + len(record.committed)
            return None if place % 2 or record.stage != Stage.VERIFY else there

        sidecar.withhold = now_and_then
        assert answer_all(engine, made()) == expected
        assert sidecar.withheld > 10
        assert len(grammar.opened) == 5


@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
def test_consecutive_deferred_answers_reopen_the_matcher(
    llama: LoadedModel, expected: list[list[int]], drafter: str, overlap: bool
) -> None:
    settings = config(drafter=drafter, overlap=overlap, row_timeout_ms=UNHURRIED_MS)
    with guided_engine(llama, settings) as (engine, grammar):
        sidecar = grammar.sidecar
        sidecar.proposes = prophet(expected)
        sidecar.refuse = lambda record: (
            record.commit_pos + len(record.committed) > 10 and len(grammar.opened) <= 5 and record.slot == 0
        )
        assert answer_all(engine, made()) == expected
        assert len(grammar.opened) > 5
        grammar.opened[:] = list({(slot, gen): (slot, gen, emitted) for slot, gen, emitted in grammar.opened}.values())


@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
@pytest.mark.parametrize("during_a_proposal", [False, True])
def test_a_restart_changes_no_token(
    llama: LoadedModel, expected: list[list[int]], drafter: str, during_a_proposal: bool, overlap: bool
) -> None:
    settings = config(drafter=drafter, overlap=overlap, row_timeout_ms=20.0)
    with guided_engine(llama, settings) as (engine, grammar):
        reached, first = threading.Event(), grammar.sidecar
        first.proposes = prophet(expected)
        answers = made()

        def die(record: Record) -> None:
            asks = record.stage == Stage.PROPOSE
            if record.commit_pos + len(record.committed) >= 15 and asks == during_a_proposal:
                first.stopping = True
                reached.set()

        first.before = die
        for answer in answers:
            answer.submit(engine)
        assert reached.wait(PATIENCE_S)
        grammar.kill_sidecar()
        engine.grammar_lost()
        grammar.start_sidecar().proposes = half_right(expected)
        engine.grammar_restored()
        assert [answer.wait().tokens for answer in answers] == expected
        assert first.problems == []


@pytest.mark.parametrize("trouble", ["dead", "error"])
def test_a_dead_end_after_jump_forward_drafts_ends_only_its_request(
    llama: LoadedModel, expected: list[list[int]], trouble: str, overlap: bool
) -> None:
    settings = config(overlap=overlap, row_timeout_ms=UNHURRIED_MS, draft_timeout_ms=UNHURRIED_MS)
    with guided_engine(llama, settings) as (engine, grammar):
        grammar.sidecar.proposes = prophet(expected)
        answers = made()
        broken = ask(answers[0].request.prompt_ids, grammar=f"50 {trouble} 20", max_tokens=90)
        assert answer_all(engine, [*answers, broken])[:-1] == expected
    assert broken.finish is FinishReason.GRAMMAR_ERROR
    assert broken.tokens == expected[0][:20]


def test_a_preempted_request_continues_with_the_same_tokens(llama: LoadedModel, overlap: bool) -> None:
    def run(**fields: int | str | bool) -> tuple[list[list[int]], int]:
        settings = config(overlap=overlap, max_model_len=128, row_timeout_ms=UNHURRIED_MS, **fields)
        with guided_engine(llama, settings) as (engine, grammar):
            grammar.sidecar.proposes = liar
            answers = [ask(tokens(20, seed), grammar="70", max_tokens=80) for seed in range(4)]
            return answer_all(engine, answers), engine.stats().preemptions

    undisturbed, preemptions_with_room = run(drafter="none")
    preempted, preemptions = run(kv_cache_tokens=128)
    assert preempted == undisturbed
    assert preemptions_with_room == 0 < preemptions


def test_a_proposed_stop_token_ends_the_answer(llama: LoadedModel, overlap: bool) -> None:
    settings = config(drafter="grammar", overlap=overlap, row_timeout_ms=UNHURRIED_MS, draft_timeout_ms=UNHURRIED_MS)
    answers = [ask(tokens(9, length), grammar=str(length), max_tokens=60) for length in range(6, 14)]
    with guided_engine(llama, settings) as (engine, _):
        answer_all(engine, answers)
    assert all(legal(answer) and answer.finish is FinishReason.STOP for answer in answers)


def test_no_jump_forward_tokens_are_requested_without_grammar_or_drafts(llama: LoadedModel) -> None:
    for fields in ({}, {"num_draft_tokens": 0}, {"drafter": "none"}):
        settings = config(row_timeout_ms=UNHURRIED_MS, **fields)
        with guided_engine(llama, settings) as (engine, grammar):
            answer_all(engine, [ask(tokens(9, 1), ignore_eos=True)])
            assert grammar.sidecar.records == []
            answer_all(engine, [ask(tokens(9, 1), grammar="12", max_tokens=60, drafts=0)])
            assert {record.stage for record in grammar.sidecar.records} == {Stage.VERIFY}
