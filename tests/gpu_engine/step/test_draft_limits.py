"""Any number of drafts in any step gives the same tokens: alone, in a batch, guided, deferred, with a network."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpu_engine.core.draft_budget import DraftBudget, EveryDraft, Plan, Proposal, Shape
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from tests.gpu_engine.beams import BeamAnswer, search, search_all
from tests.gpu_engine.core.guided_requests import made as guided_requests
from tests.gpu_engine.harness import (
    UNHURRIED_MS,
    answer_all,
    answer_staggered,
    config,
    held,
    launched_steps,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.step.random_budget import RandomBudget
from tests.gpu_engine.step.step_requests import made
from tests.gpu_engine.toy_sidecar import guided_engine


def by_chance(engine: Engine, seed: int) -> RandomBudget:
    engine.executor.runner.budget = budget = RandomBudget(seed)
    return budget


@pytest.mark.parametrize("drafter", ["", "same", "circle eagle3"])
def test_tokens_do_not_depend_on_the_limits(
    llama: LoadedModel, draft_models: dict[str, str], step_tokens: list[list[int]], drafter: str, overlap: bool
) -> None:
    with unguided_engine(llama, with_drafts(7, overlap=overlap, draft_model=draft_models.get(drafter, ""))) as engine:
        budget, steps = by_chance(engine, seed=3), launched_steps(engine)
        assert answer_all(engine, made()) == step_tokens
        assert answer_staggered(engine, made()) == step_tokens
        stats = engine.stats()
    assert len(budget.limits) > 20
    assert 0 < stats.accepted_draft_tokens <= stats.draft_tokens
    num_rows = sum(stats.drafts_per_step.counts) + int(stats.drafts_per_step.total)
    assert stats.step_rows >= num_rows
    if drafter != "circle eagle3" and not overlap:
        # A packed forward has a row for each verified draft, one for each lane, those of prompts, and no others.
        assert stats.step_rows == num_rows + sum(step.prompt_tokens for step in steps)


@pytest.mark.parametrize("drafter", ["", "model", "decoupled"])
def test_a_fixed_choice_verifies_every_draft(
    llama: LoadedModel, draft_models: dict[str, str], step_tokens: list[list[int]], drafter: str, overlap: bool
) -> None:
    fields = {"drafter": drafter or "ngram", "draft_model": draft_models["same"] if drafter else ""}
    settings = config(num_draft_tokens=3, overlap=overlap, verifies_every_draft=True, **fields)
    with unguided_engine(llama, settings) as engine:
        assert answer_all(engine, made()) == step_tokens
        stats = engine.stats()
    if drafter:  # right about every draft: each step but an answer's first and its last ones takes four tokens
        assert stats.drafts_per_step.counts[3] > sum(stats.drafts_per_step.counts) / 2
    assert stats.draft_tokens > 0


@pytest.mark.parametrize("drafter", ["ngram", "model", pytest.param("decoupled", marks=pytest.mark.slow)])
def test_the_measured_choice_gives_the_same_tokens_and_shows_its_times(
    llama: LoadedModel, draft_models: dict[str, str], step_tokens: list[list[int]], drafter: str
) -> None:
    """The budget may pause proposing: a model apart then reads what came meanwhile."""
    computes = drafter != "ngram"
    settings = config(drafter=drafter, draft_model=draft_models["same"] if computes else "")
    with unguided_engine(llama, settings) as engine:
        engine.executor.runner.budget = DraftBudget(
            by_length=not computes, may_pause=drafter != "model", computes=computes
        )
        assert engine.stats().step_ms_by_rows == {False: {}, True: {}}, "without seeds nothing is known"
        for _ in range(3):
            assert answer_all(engine, made()) == step_tokens
        stats = engine.stats()
    times = list(stats.step_ms_by_rows[False].values())
    assert times == sorted(times)
    assert times[0] > 0.0
    assert stats.step_ms_by_rows[True] == {}, "no sequence was guided"
    assert sum(stats.drafts_per_step.counts) == sum(stats.tokens_per_step.counts)


class EverySecondStep(EveryDraft):
    """Lets every second step propose, and records what the drafter had for the step after it."""

    def __init__(self) -> None:
        super().__init__()
        self.drafts: dict[bool, list[int]] = {True: [], False: []}
        """By whether the step before proposed: the numbers of drafts of its lanes."""
        self._proposes = False

    def choose(self, proposals: Sequence[Proposal], shapes: Sequence[Shape] | None, *, guided: bool) -> Plan:
        self.drafts[self._proposes] += [proposal.num_drafts for proposal in proposals]
        return super().choose(proposals, shapes, guided=guided)

    def rows_to_propose(self, plan: Plan, most: int) -> int:
        self._proposes = not self._proposes
        return most if self._proposes else 1


@pytest.mark.parametrize("drafter", ["", "same"])
def test_a_step_that_proposes_nothing_leaves_no_drafts(
    llama: LoadedModel, draft_models: dict[str, str], step_tokens: list[list[int]], drafter: str
) -> None:
    with unguided_engine(llama, with_drafts(7, draft_model=draft_models.get(drafter, ""))) as engine:
        engine.executor.runner.budget = budget = EverySecondStep()
        assert answer_all(engine, made()) == step_tokens
    assert sum(budget.drafts[True]) > 20
    assert not any(budget.drafts[False])


def test_beams_read_their_own_rows_among_lanes_with_drafts(llama: LoadedModel, step_tokens: list[list[int]]) -> None:
    def searches() -> list[BeamAnswer]:
        return [search(tokens(9, 1), 2, max_tokens=12), search(tokens(20, 2), 3, max_tokens=12)]

    with unguided_engine(llama, with_drafts(0)) as engine:
        alone = [search_all(engine, [each])[0].tokens for each in searches()]
    with unguided_engine(llama, with_drafts(7, max_batch_size=8)) as engine:
        answers, together = made(), searches()
        with held(engine):
            for each in (*answers[:3], *together):
                each.submit(engine)
        assert [each.wait().tokens for each in together] == alone
        assert [each.wait().tokens for each in answers[:3]] == step_tokens[:3]
        assert engine.stats().accepted_draft_tokens > 0


def test_the_warm_up_measures_the_forward(llama: LoadedModel) -> None:
    engine = Engine(with_drafts(7), llama)
    engine.start()
    try:
        assert len(engine.stats().step_ms_by_rows[True]) > 5
    finally:
        engine.close()


@pytest.mark.parametrize("row_timeout_ms", [UNHURRIED_MS, 0.5])
def test_guided_tokens_do_not_depend_on_the_limits(
    llama: LoadedModel, guided_tokens: list[list[int]], row_timeout_ms: float, overlap: bool
) -> None:
    with guided_engine(llama, with_drafts(7, overlap=overlap, row_timeout_ms=row_timeout_ms)) as (engine, _):
        # A deferred step is repeated with another limit, over the rows that are cached.
        by_chance(engine, seed=5)
        assert answer_all(engine, guided_requests()) == guided_tokens
