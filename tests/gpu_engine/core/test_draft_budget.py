"""The number of drafts of each sequence follows their acceptance and the time of a row."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gpu_engine.core.draft_budget import (
    DraftBudget,
    DraftRecord,
    EveryDraft,
    Pause,
    Plan,
    Probe,
    Proposal,
    Shape,
    packed_limits,
    padded_limits,
)
from gpu_engine.core.step_times import StepTimes

DRAFTS = (1, 2, 3, 4, 5, 6, 7)


def line(base_ms: float, row_ms: float) -> dict[int, float]:
    return {rows: base_ms + row_ms * rows for rows in (1, 2, 4, 8, 16, 32, 64, 128)}


def curve(base_ms: float, row_ms: float) -> StepTimes:
    times = StepTimes()
    times.seed(line(base_ms, row_ms))
    return times


def budget_of(base_ms: float, row_ms: float, **fields: Any) -> DraftBudget:
    budget = DraftBudget(**fields)
    budget.seed(line(base_ms, row_ms))
    return budget


def results_of(drafts: Sequence[int], limit: int, right: int) -> tuple[list[int], int]:
    """Return the tokens and the accepted drafts of a lane whose first `right` drafts are right."""
    accepted = min(limit, right, len(drafts))
    bonus = drafts[accepted] if accepted < min(right, len(drafts)) else 99
    return [*drafts[:accepted], bonus], accepted


def run(
    budget: DraftBudget,
    records: Sequence[DraftRecord],
    accepted_of: Callable[[int], int],
    steps: int,
    *,
    base_ms: float = 18.0,
    row_ms: float = 0.75,
    propose_ms: float = 0.2,
    jump_forward: int = 0,
) -> list[tuple[int, ...]]:
    """Run steps whose lane b has `DRAFTS` of which `accepted_of(b)` are right; return the limits of each step."""
    chosen: list[tuple[int, ...]] = []
    drafts: tuple[int, ...] = ()
    for _ in range(steps):
        plan = budget.choose([Proposal(record, jump_forward, drafts) for record in records], None, guided=False)
        rows_next = budget.rows_to_propose(plan, 8)
        results = [results_of(drafts, limit, accepted_of(b)) for b, limit in enumerate(plan.limits)]
        rows = len(records) + sum(min(limit, len(drafts)) for limit in plan.limits)
        budget.observe(
            plan, results, rows=rows, verify_ms=base_ms + row_ms * rows, propose_ms=propose_ms, proposed_rows=rows_next
        )
        chosen.append(plan.limits)
        drafts = DRAFTS if rows_next > 1 else ()
    return chosen


def records(count: int) -> list[DraftRecord]:
    return [DraftRecord() for _ in range(count)]


# -- one choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all_choices(seed: int) -> None:
    """Of all prefixes of three lanes with four drafts each, in expected tokens per millisecond."""
    rng = random.Random(seed)
    chances = [list(itertools.accumulate([rng.random() for _ in range(4)], lambda a, b: a * b)) for _ in range(3)]
    times = curve(rng.uniform(1, 30), rng.uniform(0.01, 3))

    def rate(counts: Sequence[int]) -> float:
        tokens = 3 + sum(sum(lane[:count]) for lane, count in zip(chances, counts, strict=True))
        return tokens / times.ms(3 + sum(counts))

    best = max(map(rate, itertools.product(range(5), repeat=3)))
    assert rate(packed_limits(chances, times, 1 << 30)) == pytest.approx(best)


def test_free_rows_take_every_draft_dear_rows_none_and_the_upper_bound_holds() -> None:
    chances = [[0.5, 0.25, 0.12]] * 4
    assert packed_limits(chances, curve(10, 0.0), 1 << 30) == [3] * 4
    assert packed_limits(chances, curve(0.1, 10.0), 1 << 30) == [0] * 4
    assert sum(packed_limits([[0.9] * 7] * 4, curve(10, 0.0), 10)) == 6, "each lane keeps its own row"
    assert packed_limits([[0.9] * 7] * 4, curve(10, 0.0), 2) == [0] * 4


def test_a_padded_step_has_the_shape_with_the_best_rate() -> None:
    shapes = [Shape(1, 8), Shape(4, 32), Shape(8, 64)]
    assert padded_limits([[0.9, 0.8, 0.7, 0.6]] * 8, curve(10, 0.01), shapes) == [4] * 8
    assert padded_limits([[0.9, 0.8, 0.7, 0.6]] * 8, curve(10, 0.2), shapes) == [3] * 8
    assert padded_limits([[0.3, 0.1]] * 8, curve(5, 0.5), shapes) == [0] * 8


# -- many steps --------------------------------------------------------------------------------------------------------


def test_a_sequence_whose_drafts_fail_stops_verifying_them_until_they_are_right_again() -> None:
    # 907 steps of an answer that loops had 6,135 drafts, 93 accepted.
    budget, record = budget_of(18, 0.75), DraftRecord()
    failing = run(budget, [record], lambda b: 0, 900)
    assert sum(limit for (limit,) in failing) < 60
    assert sum(limit for (limit,) in failing[100:]) < 20
    budget, record = budget_of(18, 0.75), DraftRecord()
    run(budget, [record], lambda b: 0, 200)
    right = run(budget, [record], lambda b: 7, 120)
    assert next(step for step, limits in enumerate(right) if limits[0]) < 70
    assert right[-1] == (7,)


def test_each_sequence_has_its_own_number() -> None:
    chosen = run(budget_of(18, 0.75), records(8), lambda b: 7 if b == 3 else 0, 100)
    assert chosen[-1] == (0, 0, 0, 7, 0, 0, 0, 0)


def test_jump_forward_tokens_are_verified_where_own_drafts_fail() -> None:
    chosen = run(budget_of(5.5, 0.5), records(8), lambda b: 3, 200, jump_forward=3, base_ms=5.5, row_ms=0.5)
    assert chosen[-1] == (3,) * 8


def test_a_slower_row_ends_drafts_of_middling_chance() -> None:
    rng, budget, lanes = random.Random(1), budget_of(18, 0.05), records(8)
    many = run(budget, lanes, lambda _: int(rng.random() < 0.3), 200, row_ms=0.05)
    few = [
        limits for _ in range(60) for limits in run(budget, lanes, lambda _: int(rng.random() < 0.3), 10, row_ms=3.0)
    ]
    assert sum(map(sum, many[-50:])) > 300
    assert sum(map(sum, few[-50:])) < 100


def test_proposing_pauses_while_it_costs_more_than_it_brings_and_until_half_of_the_sequences_are_new() -> None:
    budget, old, paused = budget_of(5.5, 0.5), records(4), 0
    for _ in range(100):
        run(budget, old, lambda b: 0, 10, base_ms=5.5, row_ms=0.5, propose_ms=1.0)
        paused += budget.rows_to_propose(budget.choose([Proposal(r, 0, ()) for r in old], None, guided=False), 8) == 1
    assert paused > 50
    while "paused" not in repr(budget):
        run(budget, old, lambda b: 0, 1, base_ms=5.5, row_ms=0.5, propose_ms=1.0)
    for num_new, rows in ((1, 1), (2, 8)):
        lanes = [*old[num_new:], *records(num_new)]
        plan = budget.choose([Proposal(record, 0, ()) for record in lanes], None, guided=False)
        assert budget.rows_to_propose(plan, 8) == rows


def test_pauses_double_up_to_the_longest_and_a_gain_makes_them_short_again() -> None:
    pause = Pause()

    def length_after(gain_ms: float) -> int:
        for _ in range(Pause.TRIAL):
            assert not pause.paused
            pause.observe(gain_ms, 1.0)
        length = 0
        while pause.paused:
            pause.observe(0.0, 0.0)
            length += 1
        return length

    assert [length_after(0.0) for _ in range(5)] == [16, 32, 64, 64, 64]
    assert [length_after(2.0), length_after(0.0)] == [0, 16]


def test_probes_are_rarer_each_time_until_drafts_are_chosen() -> None:
    probe = Probe()
    due = [step for step in range(1, 2000) if probe.due(satisfied=False)]
    gaps = [after - before for before, after in itertools.pairwise([0, *due])]
    assert gaps == [16, 32, 64, 128, 256, 512, 512]
    probe.due(satisfied=True)
    assert [probe.due(satisfied=False) for _ in range(16)].index(True) == 15


def test_wrong_times_that_forbid_every_draft_are_found_out() -> None:
    budget = budget_of(0.1, 10.0)  # measured on a machine that was busy with something else
    chosen = run(budget, records(4), lambda b: 7, 400)
    assert chosen[0] == (0,) * 4
    assert sum(chosen[-1]) >= 24


def test_an_empty_step_teaches_nothing() -> None:
    budget, record = budget_of(18, 0.75), DraftRecord()
    plan = budget.choose([Proposal(record, 0, DRAFTS)], None, guided=True)
    budget.observe(plan, [([], 0)], rows=8, verify_ms=24.0, propose_ms=0.1, proposed_rows=8)
    assert set(record.tries) == {0.0}


# -- captured steps, and networks --------------------------------------------------------------------------------------


def test_drafts_that_the_host_does_not_know_are_probed() -> None:
    budget, record = budget_of(18, 3.0), DraftRecord()
    shapes = [Shape(1, 1), Shape(4, 4), Shape(8, 8)]

    def steps(num_accepted: int, count: int) -> list[int]:
        limits = []
        for _ in range(count):
            plan = budget.choose([Proposal(record, most=7)], shapes, guided=False)
            accepted = min(num_accepted, plan.limits[0])
            rows = next(s.rows for s in shapes if s.rows_per_lane > plan.limits[0])
            budget.observe(plan, [([1] * (accepted + 1), accepted)], rows=rows, verify_ms=18 + 3.0 * rows)
            limits.append(plan.limits[0])
        return limits

    assert steps(0, 60)[-1] == 0
    assert 0 < sum(limit > 0 for limit in steps(0, 1000)) < 20
    assert steps(7, 1500)[-1] == 7


def captured_steps(num_accepted: Callable[[int], int], count: int, *, propose_ms: float = 4.0) -> list[Plan]:
    """Run captured steps of four lanes and 10 ms, 0.05 ms a row, and `propose_ms` where a step proposes.

    `num_accepted(b)` of the drafts of lane b are right.
    """
    budget, lanes = budget_of(10, 0.05), records(4)
    shapes, plans, drafts = [Shape(rows, rows * 4) for rows in (1, 4, 8)], list[Plan](), 0
    for _ in range(count):
        plan = budget.choose([Proposal(record, most=7) for record in lanes], shapes, guided=True)
        proposes = budget.rows_to_propose(plan, 8) > 1
        assert proposes == plan.proposes
        rows = next(s.rows for s in shapes if s.rows_per_lane > max(*plan.limits, proposes))
        accepted = [min(num_accepted(b), limit, drafts) for b, limit in enumerate(plan.limits)]
        results = [([1] * (right + 1), right) for right in accepted]
        # What a captured step proposes is a part of its time.
        budget.observe(plan, results, rows=rows, verify_ms=10 + 0.05 * rows + propose_ms * (rows > 4))
        plans.append(plan)
        drafts = 7 if proposes else 0
    return plans


def test_a_captured_step_without_drafts_proposes_none() -> None:
    """So drafts that bring less than the time of proposing them are no loss: a chance of 0.2 is worth a row, not a
    wait."""
    rng = random.Random(1)
    dear = captured_steps(lambda _: int(rng.random() < 0.2), 900)[-600:]
    assert sum(not any(plan.limits) for plan in dear) > 570
    assert sum(plan.proposes for plan in dear) < 30, "before probes, and by them"
    cheap = captured_steps(lambda _: int(rng.random() < 0.2), 900, propose_ms=0.0)[-600:]
    assert sum(any(plan.limits) for plan in cheap) > 570


@pytest.mark.parametrize("num_accepted", [0, 1, 7])
def test_a_captured_step_verifies_drafts_only_after_one_that_proposed(num_accepted: int) -> None:
    plans = captured_steps(lambda _: num_accepted, 800)
    for before, plan in itertools.pairwise(plans):
        assert before.proposes or not any(plan.limits)
    assert not any(plans[0].limits)
    probes = sum(plan.is_probe for plan in plans)
    assert (probes > 3) == (num_accepted == 0), "a probe that has to wait for a proposal is not lost"
    assert all(any(plan.limits) for plan in plans if plan.is_probe)
    if num_accepted == 7:
        assert all(plan.proposes and any(plan.limits) for plan in plans[-600:])


def test_a_drafting_network_drafts_as_many_as_its_time_is_worth() -> None:
    def links(accepted: int) -> int:
        budget, record, rows = budget_of(20, 0.5, by_length=False, may_pause=False), DraftRecord(), 8
        for _ in range(300):
            drafts = DRAFTS[: rows - 1]
            plan = budget.choose([Proposal(record, 0, drafts)], [Shape(p, p) for p in range(1, 9)], guided=False)
            rows, verified = budget.rows_to_propose(plan, 8), 1 + plan.limits[0]
            result, times = results_of(drafts, plan.limits[0], accepted), {"propose_ms": 1.0 * (rows - 1)}
            budget.observe(plan, [result], rows=verified, verify_ms=20 + 0.5 * verified, proposed_rows=rows, **times)
        return rows - 1

    assert links(7) == 7
    assert links(0) == 1, "it sees every token, so that it can draft later"
    assert links(2) in (2, 3)


def test_a_fixed_choice_takes_all_drafts_that_have_room() -> None:
    """However dear a row is, and however bad the drafts were."""
    lanes = records(2)
    proposals = [Proposal(lanes[0], 0, DRAFTS), Proposal(lanes[1], 0, DRAFTS[:2])]
    budget = EveryDraft()
    budget.seed({1: 1.0, 64: 1000.0})
    for _ in range(50):
        plan = budget.choose(proposals, None, guided=True)
        assert plan.limits == (7, 2)
        assert budget.rows_to_propose(plan, 8) == 8
        budget.observe(plan, [([99], 0), ([99], 0)], rows=11, verify_ms=500.0, propose_ms=90.0, proposed_rows=8)
    assert EveryDraft().choose([], None, guided=False).limits == ()
    shapes = [Shape(1, 2), Shape(4, 8), Shape(8, 16)]
    unknown = [Proposal(record, most=7) for record in lanes]
    for most_rows, known, captured in ((0, (7, 2), (7, 7)), (8, (3, 2), (3, 3)), (1, (0, 0), (0, 0))):
        budget = EveryDraft(most_rows=most_rows)
        assert budget.choose(proposals, None, guided=True).limits == known
        assert budget.choose(unknown, shapes, guided=False).limits == captured
