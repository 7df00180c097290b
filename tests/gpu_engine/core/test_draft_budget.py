"""The number of drafts of each sequence follows their acceptance and the time of a row."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

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


def curve(base_ms: float, row_ms: float) -> StepTimes:
    times = StepTimes()
    times.seed({rows: base_ms + row_ms * rows for rows in (1, 2, 4, 8, 16, 32, 64, 128)})
    return times


def budget_of(base_ms: float, row_ms: float, **fields: bool | int) -> DraftBudget:
    budget = DraftBudget(**fields)  # type: ignore[arg-type]
    budget.seed({rows: base_ms + row_ms * rows for rows in (1, 2, 4, 8, 16, 32, 64, 128)})
    return budget


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
        results = []
        for b, limit in enumerate(plan.limits):
            accepted = min(limit, accepted_of(b), len(drafts))
            bonus = drafts[accepted] if accepted < min(accepted_of(b), len(drafts)) else 99
            results.append(([*drafts[:accepted], bonus], accepted))
        rows = len(records) + sum(min(limit, len(drafts)) for limit in plan.limits)
        budget.observe(
            plan, results, rows=rows, verify_ms=base_ms + row_ms * rows, propose_ms=propose_ms, proposed_rows=rows_next
        )
        chosen.append(plan.limits)
        drafts = DRAFTS if rows_next > 1 else ()
    return chosen


def brute_force(chances: Sequence[Sequence[float]], times: StepTimes) -> float:
    """Return the best expected tokens per millisecond over all prefixes."""
    best = 0.0
    for counts in itertools.product(*(range(len(lane) + 1) for lane in chances)):
        tokens = len(chances) + sum(sum(lane[:count]) for lane, count in zip(chances, counts, strict=True))
        best = max(best, tokens / times.ms(len(chances) + sum(counts)))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all_choices(seed: int) -> None:
    rng = random.Random(seed)
    chances = []
    for _ in range(3):
        ps = [rng.random() for _ in range(4)]
        chances.append(list(itertools.accumulate(ps, lambda a, b: a * b)))
    times = curve(rng.uniform(1, 30), rng.uniform(0.01, 3))
    limits = packed_limits(chances, times, 1 << 30)
    tokens = 3 + sum(sum(lane[:limit]) for lane, limit in zip(chances, limits, strict=True))
    assert tokens / times.ms(3 + sum(limits)) == pytest.approx(brute_force(chances, times))


def test_free_rows_take_every_draft_and_dear_rows_none() -> None:
    chances = [[0.5, 0.25, 0.12]] * 4
    assert packed_limits(chances, curve(10, 0.0), 1 << 30) == [3] * 4
    assert packed_limits(chances, curve(0.1, 10.0), 1 << 30) == [0] * 4


def test_the_upper_bound_of_rows_holds_and_every_lane_keeps_its_own_row() -> None:
    assert sum(packed_limits([[0.9] * 7] * 4, curve(10, 0.0), 10)) == 6
    assert packed_limits([[0.9] * 7] * 4, curve(10, 0.0), 2) == [0] * 4


def test_rows_go_to_the_lane_whose_drafts_are_accepted() -> None:
    good, bad = [0.95**j for j in range(1, 8)], [0.2**j for j in range(1, 8)]
    assert packed_limits([bad, good, bad, bad, bad, bad, bad, bad], curve(18, 0.75), 1 << 30)[:3] == [0, 7, 0]


def test_a_padded_step_has_the_shape_with_the_best_rate() -> None:
    shapes = [Shape(1, 8), Shape(4, 32), Shape(8, 64)]
    assert padded_limits([[0.9, 0.8, 0.7, 0.6]] * 8, curve(10, 0.01), shapes) == [4] * 8
    assert padded_limits([[0.9, 0.8, 0.7, 0.6]] * 8, curve(10, 0.2), shapes) == [3] * 8
    assert padded_limits([[0.3, 0.1]] * 8, curve(5, 0.5), shapes) == [0] * 8


def test_a_sequence_whose_drafts_all_fail_stops_verifying_them() -> None:
    # 907 steps of an answer that loops had 6,135 drafts, 93 accepted.
    chosen = run(budget_of(18, 0.75), [DraftRecord()], lambda b: 0, 900)
    assert sum(limit for (limit,) in chosen) < 60
    assert sum(limit for (limit,) in chosen[100:]) < 20


def test_a_sequence_whose_drafts_become_right_drafts_again_without_having_verified_any() -> None:
    budget, record = budget_of(18, 0.75), DraftRecord()
    run(budget, [record], lambda b: 0, 200)
    chosen = run(budget, [record], lambda b: 7, 120)
    assert next(step for step, limits in enumerate(chosen) if limits[0]) < 70
    assert chosen[-1] == (7,)


def test_each_sequence_has_its_own_number() -> None:
    records = [DraftRecord() for _ in range(8)]
    chosen = run(budget_of(18, 0.75), records, lambda b: 7 if b == 3 else 0, 100)
    assert chosen[-1] == (0, 0, 0, 7, 0, 0, 0, 0)


def test_jump_forward_tokens_are_verified_where_own_drafts_fail() -> None:
    budget = budget_of(5.5, 0.5)
    chosen = run(budget, [DraftRecord() for _ in range(8)], lambda b: 3, 200, jump_forward=3, base_ms=5.5, row_ms=0.5)
    assert chosen[-1] == (3,) * 8


def test_a_slower_row_ends_drafts_of_middling_chance() -> None:
    records, rng = [DraftRecord() for _ in range(8)], random.Random(1)
    budget = budget_of(18, 0.05)

    def chance(b: int) -> int:
        return 1 if rng.random() < 0.3 else 0

    many = run(budget, records, chance, 200, row_ms=0.05)
    few = [limits for _ in range(60) for limits in run(budget, records, chance, 10, row_ms=3.0)]
    assert sum(map(sum, many[-50:])) > 300
    assert sum(map(sum, few[-50:])) < 100


def test_proposing_pauses_while_it_costs_more_than_its_drafts_bring() -> None:
    budget, records = budget_of(5.5, 0.5), [DraftRecord() for _ in range(4)]
    paused = 0
    for _ in range(100):
        run(budget, records, lambda b: 0, 10, base_ms=5.5, row_ms=0.5, propose_ms=1.0)
        plan = budget.choose([Proposal(record, 0, ()) for record in records], None, guided=False)
        paused += budget.rows_to_propose(plan, 8) == 1
    assert paused > 50
    assert "paused" in repr(budget) or paused < 100


def test_a_pause_ends_when_half_of_the_sequences_are_new() -> None:
    budget, old = budget_of(5.5, 0.5), [DraftRecord() for _ in range(4)]
    while "paused" not in repr(budget):
        run(budget, old, lambda b: 0, 1, base_ms=5.5, row_ms=0.5, propose_ms=1.0)
    few = budget.choose([Proposal(r, 0, ()) for r in [*old[:3], DraftRecord()]], None, guided=False)
    assert budget.rows_to_propose(few, 8) == 1
    half = budget.choose([Proposal(r, 0, ()) for r in [*old[:2], DraftRecord(), DraftRecord()]], None, guided=False)
    assert budget.rows_to_propose(half, 8) == 8


def test_pauses_double_up_to_the_longest_and_a_gain_makes_them_short_again() -> None:
    pause, lengths = Pause(), []
    for _ in range(5):
        for _ in range(Pause.TRIAL):
            assert not pause.paused
            pause.observe(0.0, 1.0)
        length = 0
        while pause.paused:
            pause.observe(0.0, 0.0)
            length += 1
        lengths.append(length)
    assert lengths == [16, 32, 64, 64, 64]
    for _ in range(Pause.TRIAL):
        pause.observe(2.0, 1.0)
    for _ in range(Pause.TRIAL):
        pause.observe(0.0, 1.0)
    length = 0
    while pause.paused:
        pause.observe(0.0, 0.0)
        length += 1
    assert length == 16


def test_probes_are_rarer_each_time_until_drafts_are_chosen() -> None:
    probe = Probe()
    due = [step for step in range(1, 2000) if probe.due(satisfied=False)]
    gaps = [after - before for before, after in itertools.pairwise([0, *due])]
    assert gaps == [16, 32, 64, 128, 256, 512, 512]
    probe.due(satisfied=True)
    assert [probe.due(satisfied=False) for _ in range(16)].index(True) == 15


def test_wrong_times_that_forbid_every_draft_are_found_out() -> None:
    budget = budget_of(0.1, 10.0)  # measured on a machine that was busy with something else
    chosen = run(budget, [DraftRecord() for _ in range(4)], lambda b: 7, 400)
    assert chosen[0] == (0,) * 4
    assert sum(chosen[-1]) >= 24


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


def captured_steps(
    budget: DraftBudget, num_accepted: Callable[[int], int], count: int, *, lanes: int = 4, propose_ms: float = 4.0
) -> list[Plan]:
    """Run captured steps of 10 ms, 0.05 ms a row, and `propose_ms` where a step proposes.

    `num_accepted(b)` of the drafts of lane b are right.
    """
    shapes = [Shape(rows, rows * lanes) for rows in (1, 4, 8)]
    records, plans = [DraftRecord() for _ in range(lanes)], []
    drafts = 0
    for _ in range(count):
        plan = budget.choose([Proposal(record, most=7) for record in records], shapes, guided=True)
        proposes = budget.rows_to_propose(plan, 8) > 1
        assert proposes == plan.proposes
        rows = next(s.rows for s in shapes if s.rows_per_lane > max(*plan.limits, proposes))
        accepted = [min(num_accepted(b), limit, drafts) for b, limit in enumerate(plan.limits)]
        results = [([1] * (right + 1), right) for right in accepted]
        # What a captured step proposes is a part of its time.
        budget.observe(plan, results, rows=rows, verify_ms=10 + 0.05 * rows + propose_ms * (rows > lanes))
        plans.append(plan)
        drafts = 7 if proposes else 0
    return plans


def test_a_captured_step_without_drafts_proposes_none() -> None:
    """So drafts that bring less than the time of proposing them are no loss: a chance of 0.2 is worth a row, not a
    wait."""
    rng = random.Random(1)
    plans = captured_steps(budget_of(10, 0.05), lambda _: int(rng.random() < 0.2), 1500)
    last = plans[-1000:]
    assert sum(not any(plan.limits) for plan in last) > 950
    assert sum(plan.proposes for plan in last) < 40, "before probes, and by them"
    cheap = captured_steps(budget_of(10, 0.05), lambda _: int(rng.random() < 0.2), 1500, propose_ms=0.0)
    assert sum(any(plan.limits) for plan in cheap[-1000:]) > 950


@pytest.mark.parametrize("num_accepted", [0, 1, 7])
def test_a_captured_step_verifies_drafts_only_behind_one_that_proposed(num_accepted: int) -> None:
    plans = captured_steps(budget_of(10, 0.05), lambda _: num_accepted, 800)
    for before, plan in itertools.pairwise(plans):
        assert before.proposes or not any(plan.limits)
    assert not any(plans[0].limits)
    probes = sum(plan.is_probe for plan in plans)
    assert (probes > 3) == (num_accepted == 0), "a probe that has to wait for a proposal is not lost"
    assert all(any(plan.limits) for plan in plans if plan.is_probe)


def test_captured_drafts_that_pay_are_proposed_in_every_step() -> None:
    plans = captured_steps(budget_of(10, 0.05), lambda _: 7, 300)
    assert all(plan.proposes and any(plan.limits) for plan in plans[-200:])


def test_a_drafting_network_drafts_as_many_as_its_time_is_worth() -> None:
    def links(link_ms: float, accepted: int) -> int:
        budget, record = budget_of(20, 0.5, by_length=False, may_pause=False), DraftRecord()
        rows = 8
        for _ in range(300):
            drafts = DRAFTS[: rows - 1]
            plan = budget.choose([Proposal(record, 0, drafts)], [Shape(p, p) for p in range(1, 9)], guided=False)
            rows = budget.rows_to_propose(plan, 8)
            right = min(accepted, plan.limits[0])
            bonus = [drafts[right] if right < min(accepted, len(drafts)) else 99]
            budget.observe(
                plan, [([*drafts[:right], *bonus], right)], rows=1 + plan.limits[0],
                verify_ms=20 + 0.5 * (1 + plan.limits[0]), propose_ms=link_ms * (rows - 1), proposed_rows=rows,
            )  # fmt: skip
        return rows - 1

    assert links(1.0, 7) == 7
    assert links(1.0, 0) == 1, "it sees every token, so that it can draft later"
    assert links(1.0, 2) in (2, 3)


def test_an_empty_step_teaches_nothing() -> None:
    budget, record = budget_of(18, 0.75), DraftRecord()
    plan = budget.choose([Proposal(record, 0, DRAFTS)], None, guided=True)
    budget.observe(plan, [([], 0)], rows=8, verify_ms=24.0, propose_ms=0.1, proposed_rows=8)
    assert set(record.tries) == {0.0}


def test_a_fixed_choice_takes_all_drafts_that_have_room() -> None:
    """However dear a row is, and however bad the drafts were."""
    records = [DraftRecord(), DraftRecord()]
    proposals = [Proposal(records[0], 0, DRAFTS), Proposal(records[1], 0, DRAFTS[:2])]
    budget = EveryDraft()
    budget.seed({1: 1.0, 64: 1000.0})
    for _ in range(50):
        plan = budget.choose(proposals, None, guided=True)
        assert plan.limits == (7, 2)
        assert budget.rows_to_propose(plan, 8) == 8
        budget.observe(plan, [([99], 0), ([99], 0)], rows=11, verify_ms=500.0, propose_ms=90.0, proposed_rows=8)
    assert EveryDraft(most_rows=8).choose(proposals, None, guided=True).limits == (3, 2)
    assert EveryDraft(most_rows=1).choose(proposals, None, guided=True).limits == (0, 0)
    assert EveryDraft().choose([], None, guided=False).limits == ()
    shapes = [Shape(1, 2), Shape(4, 8), Shape(8, 16)]
    unknown = [Proposal(record, most=7) for record in records]
    assert EveryDraft().choose(unknown, shapes, guided=False).limits == (7, 7)
    assert EveryDraft(most_rows=8).choose(unknown, shapes, guided=False).limits == (3, 3)
    assert EveryDraft(most_rows=1).choose(unknown, shapes, guided=False).limits == (0, 0)
