"""Jump-forward tokens as drafts, up to K or to a larger number F: whatever tokens the grammar process proposes, in time
or not, answers are the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.request import FinishReason
from gpu_engine.model.loader import LoadedModel
from shared_mem.channel import Record
from shared_mem.layout import Stage
from tests.fakes import EOS
from tests.gpu_engine.core.guided_requests import legal, made
from tests.gpu_engine.drafters.proposals import Proposes, half_right, liar, prophet
from tests.gpu_engine.harness import (
    PATIENCE_S,
    UNHURRIED_MS,
    Answer,
    answer_all,
    answer_staggered,
    ask,
    config,
    launched_steps,
    tokens,
    with_drafts,
)
from tests.gpu_engine.tiny import VOCAB
from tests.gpu_engine.toy_sidecar import Automaton, ToySidecar, guided_engine

PATIENT = {"row_timeout_ms": UNHURRIED_MS, "draft_timeout_ms": UNHURRIED_MS}
F = 7
"""The largest number of jump-forward tokens where it is more than K."""
NUMBERS = [(2, 1), (7, 1), (1, F), (3, F)]
"""K, and the most jump-forward tokens."""


def out_of_vocabulary(expected: list[list[int]]) -> Proposes:
    """Return a proposer of an id that the model cannot embed, alone or after one right token."""
    knows = prophet(expected)

    def proposes(automaton: Automaton, emitted: list[int]) -> list[int]:
        outside = (VOCAB, -1, 2**31 - 1, -(2**31))[len(emitted) % 4]
        return [*knows(automaton, emitted)[: len(emitted) % 2], outside, 65]

    return proposes


def beyond_the_end(expected: list[list[int]]) -> Proposes:
    """Return a proposer of the right tokens and of more tokens after the end of the answer."""
    knows = prophet(expected)
    return lambda automaton, emitted: [*knows(automaton, emitted), 70, 71, EOS, 72]


def wrong_late(expected: list[list[int]]) -> Proposes:
    """Return a proposer of four right tokens, a wrong one and two more, as if the target spelled the text otherwise."""
    knows = prophet(expected)
    return lambda automaton, emitted: [*knows(automaton, emitted)[:4], len(emitted) % 256, 66, 67]


PROPOSERS: dict[str, Callable[[list[list[int]]], Proposes]] = {
    "forced": lambda expected: Automaton.forced,
    "prophet": prophet,
    "liar": lambda expected: liar,
    "half right": half_right,
    "out of vocabulary": out_of_vocabulary,
    "beyond the end": beyond_the_end,
    "wrong late": wrong_late,
}


def lengths(sidecar: ToySidecar) -> set[int]:
    """Return the numbers of drafts that steps verified at once."""
    return {len(record.drafts) for record in sidecar.records if record.stage == Stage.VERIFY}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("proposes", PROPOSERS)
@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
def test_no_proposal_changes_a_token(
    llama: LoadedModel, guided_tokens: list[list[int]], numbers: tuple[int, int], proposes: str, drafter: str
) -> None:
    (num_drafts, most), staggered = numbers, numbers in ((2, 1), (3, F))
    settings = config(
        drafter=drafter,
        num_draft_tokens=num_drafts,
        jump_forward_tokens=most,
        overlap=staggered,
        step_rows=64,
        **PATIENT,
    )
    with guided_engine(llama, settings) as (engine, grammar):
        grammar.sidecar.proposes = PROPOSERS[proposes](guided_tokens)
        assert (answer_staggered if staggered else answer_all)(engine, made()) == guided_tokens
        stats, seen = engine.stats(), lengths(grammar.sidecar)
    assert stats.deferred_rows == 0
    if most > num_drafts and proposes in ("prophet", "beyond the end", "liar"):
        assert max(seen) == most
    if proposes == "prophet":
        assert stats.accepted_jump_forward_tokens >= 0.9 * stats.jump_forward_tokens > 50
    elif proposes == "forced":
        # A step before a jump-forward token drafts it, unless the answer ends there.
        assert stats.accepted_jump_forward_tokens == stats.jump_forward_tokens > 5


@pytest.mark.parametrize("drafts_by", ["same", "other", "circle eagle3", "random eagle3"])
@pytest.mark.parametrize("proposes", ["forced", "prophet", "wrong late", "liar"])
@pytest.mark.parametrize(
    ("num_drafts", "most", "masks", "overlap"),
    [(3, 1, "on", False), (3, 1, "off", True), (1, F, "on", True), (2, F, "off", False)],
)
def test_a_draft_net_continues_after_jump_forward_tokens(
    llama: LoadedModel,
    draft_models: dict[str, str],
    guided_tokens: list[list[int]],
    drafts_by: str,
    proposes: str,
    num_drafts: int,
    most: int,
    masks: str,
    overlap: bool,
) -> None:
    fields = {"draft_model": draft_models[drafts_by], "draft_masks": masks, "jump_forward_tokens": most, **PATIENT}
    with guided_engine(llama, with_drafts(num_drafts, step_rows=64, overlap=overlap, **fields)) as (engine, grammar):
        grammar.sidecar.proposes = PROPOSERS[proposes](guided_tokens)
        assert answer_all(engine, made()) == guided_tokens
        stats = engine.stats()
        assert stats.deferred_rows == 0
        if most > num_drafts:
            assert (max(lengths(grammar.sidecar)) == most) == (proposes != "forced")
        else:
            assert (stats.accepted_jump_forward_tokens > 5) == (proposes != "liar")


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_a_draft_model_processes_jump_forward_tokens(
    llama: LoadedModel, draft_models: dict[str, str], guided_tokens: list[list[int]], num_drafts: int
) -> None:
    """Drafts of the target itself are accepted, also after six jump-forward tokens that its chain did not draw."""
    knows, fields = prophet(guided_tokens), {"draft_model": draft_models["same"], "draft_masks": "on", **PATIENT}
    settings = with_drafts(num_drafts, jump_forward_tokens=F, overlap=num_drafts == 2, step_rows=64, **fields)
    with guided_engine(llama, settings) as (engine, grammar):
        grammar.sidecar.proposes = lambda automaton, emitted: knows(automaton, emitted)[:6] if len(emitted) % 3 else []
        assert answer_all(engine, made()) == guided_tokens
        stats = engine.stats()
    # A stop token ends a step and does not count as an accepted draft.
    assert stats.accepted_jump_forward_tokens >= stats.jump_forward_tokens - 4 > 40
    assert stats.accepted_draft_tokens >= 0.95 * stats.draft_tokens
    assert stats.draft_tokens - stats.jump_forward_tokens > 30


# -- a grammar process that is late, silent or gone --------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
def test_late_proposals_are_ignored(
    llama: LoadedModel, guided_tokens: list[list[int]], drafter: str, overlap: bool
) -> None:
    with guided_engine(llama, config(drafter=drafter, overlap=overlap, **PATIENT)) as (engine, grammar):
        grammar.sidecar.proposes = prophet(guided_tokens)
        grammar.sidecar.withhold = lambda record: 0 if record.stage == Stage.PROPOSE else None
        assert answer_all(engine, made()) == guided_tokens
        assert (engine.stats().jump_forward_tokens, engine.stats().deferred_rows) == (0, 0)
        assert grammar.sidecar.withheld > 50


@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
def test_a_process_that_dies_during_a_proposal_changes_no_token(
    llama: LoadedModel, guided_tokens: list[list[int]], drafter: str, overlap: bool
) -> None:
    with guided_engine(llama, config(drafter=drafter, overlap=overlap, row_timeout_ms=20.0)) as (engine, grammar):
        reached, first = threading.Event(), grammar.sidecar
        first.proposes = prophet(guided_tokens)
        answers = made()

        def die(record: Record) -> None:
            if record.commit_pos + len(record.committed) >= 15 and record.stage == Stage.PROPOSE:
                first.stopping = True
                reached.set()

        first.before = die
        for answer in answers:
            answer.submit(engine)
        assert reached.wait(PATIENCE_S)
        grammar.kill_sidecar()
        engine.grammar_lost()
        grammar.start_sidecar().proposes = half_right(guided_tokens)
        engine.grammar_restored()
        assert [answer.wait().tokens for answer in answers] == guided_tokens
        assert first.problems == []


# -- how many ----------------------------------------------------------------------------------------------------------


def test_a_proposed_stop_token_ends_the_answer(llama: LoadedModel, overlap: bool) -> None:
    answers = [ask(tokens(9, length), grammar=str(length), max_tokens=60) for length in range(6, 14)]
    with guided_engine(llama, config(drafter="grammar", overlap=overlap, **PATIENT)) as (engine, _):
        answer_all(engine, answers)
    assert all(legal(answer) and answer.finish is FinishReason.STOP for answer in answers)


def test_no_jump_forward_tokens_are_requested_without_grammar_or_drafts(llama: LoadedModel) -> None:
    for fields in ({}, {"num_draft_tokens": 0}, {"drafter": "none"}):
        with guided_engine(llama, config(row_timeout_ms=UNHURRIED_MS, **fields)) as (engine, grammar):
            answer_all(engine, [ask(tokens(9, 1), ignore_eos=True)])
            assert grammar.sidecar.records == []
            answer_all(engine, [ask(tokens(9, 1), grammar="12", max_tokens=60, drafts=0)])
            assert {record.stage for record in grammar.sidecar.records} == {Stage.VERIFY}


def test_the_drafter_adds_drafts_only_up_to_k(llama: LoadedModel, guided_tokens: list[list[int]]) -> None:
    settings = config(num_draft_tokens=3, jump_forward_tokens=F, step_rows=64, **PATIENT)
    knows = prophet(guided_tokens)
    for count, max_drafts in ((0, 3), (2, 3), (5, 5)):
        with guided_engine(llama, settings) as (engine, grammar):
            grammar.sidecar.proposes = lambda automaton, emitted, count=count: knows(automaton, emitted)[:count]
            assert answer_all(engine, made()) == guided_tokens
            assert max(lengths(grammar.sidecar)) == max_drafts


def test_a_number_of_drafts_in_the_request_limits_all_drafts(llama: LoadedModel) -> None:
    def seen(own: int, jump_forward: int | None) -> tuple[list[int], int, set[Stage]]:
        settings = config(num_draft_tokens=3, jump_forward_tokens=F, **PATIENT)
        with guided_engine(llama, settings) as (engine, grammar):
            grammar.sidecar.proposes = liar
            answer = ask(tokens(20, 3), grammar="40", max_tokens=60, drafts=own, jump_forward_tokens=jump_forward)
            answer_all(engine, [answer])
            records = grammar.sidecar.records
            return answer.tokens, max(lengths(grammar.sidecar)), {Stage(r.stage) for r in records}

    emitted, longest, stages = seen(0, F)
    assert (longest, stages) == (0, {Stage.VERIFY}), "without speculation the engine posts no PROPOSE record"
    for own, jump_forward, max_drafts in ((2, None, 2), (3, None, 3), (3, F, F), (3, 15, F), (15, None, F)):
        assert seen(own, jump_forward) == (emitted, max_drafts, {Stage.VERIFY, Stage.PROPOSE})


@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
def test_drafts_stop_at_the_end_of_the_context(llama: LoadedModel, drafter: str) -> None:
    def run(known: list[Answer], **fields: object) -> list[Answer]:
        answers = [ask(tokens(20 + n, n), grammar="90", max_tokens=80) for n in range(3)]
        answers += [ask(tokens(9, n), grammar="90", max_tokens=20 + n) for n in range(5)]
        with guided_engine(llama, config(max_model_len=64, **PATIENT, **fields)) as (engine, grammar):
            grammar.sidecar.proposes = prophet([answer.tokens for answer in known])
            answer_all(engine, answers)
        return answers

    known = run([], drafter="none")
    for overlap in (False, True):
        fields = {"num_draft_tokens": 2, "jump_forward_tokens": 15, "step_rows": 64, "overlap": overlap}
        long = run(known, drafter=drafter, **fields)
        assert [answer.tokens for answer in long] == [answer.tokens for answer in known]
    assert [len(answer.tokens) for answer in long] == [44, 43, 42, 20, 21, 22, 23, 24]
    assert {answer.finish for answer in long} == {FinishReason.GRAMMAR_INCOMPLETE}


def test_a_cpu_step_stays_within_its_target_of_rows(llama: LoadedModel) -> None:
    def run(count: int, step_rows: int) -> set[int]:
        settings = config(num_draft_tokens=3, jump_forward_tokens=15, step_rows=step_rows, **PATIENT)
        with guided_engine(llama, settings) as (engine, grammar):
            grammar.sidecar.proposes = lambda automaton, emitted: [105] * 20
            steps = launched_steps(engine)
            answer_all(engine, [ask(tokens(9, 1), grammar="40", max_tokens=60) for _ in range(count)])
            stats, seen = engine.stats(), lengths(grammar.sidecar)
        # Most steps have `count` lanes, each with as many drafts as there is room for. Prompts are further rows.
        assert stats.step_rows <= step_rows * stats.steps + sum(step.prompt_tokens for step in steps)
        return seen

    assert max(run(1, 24)) == 15
    assert max(run(1, 10)) == 9
    assert run(4, 8) >= {0, 1}
    assert run(4, 24) >= {5}


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
def test_numbers_of_drafts_and_rows(fields: dict[str, Any], numbers: tuple[int, int, int]) -> None:
    settings = EngineConfig(**fields)
    assert (settings.num_drafts, settings.num_jump_forward, settings.num_rows) == numbers
    with pytest.raises(ValueError, match=r"jump_forward_tokens: must be in \[0, 15\]"):
        EngineConfig(**{**fields, "jump_forward_tokens": 16})
