"""Percentiles, sums over runs, and the pairwise cost of guidance."""

from __future__ import annotations

import math

import pytest

from benchmarks.harness.measure import Run, guidance_cost, percentile, summarize
from benchmarks.harness.validity import Judge
from tests.benchmarks.answers import answer, times


def test_percentile_interpolates_and_ignores_order_and_nan() -> None:
    values = [4.0, 1.0, math.nan, 3.0, 2.0]
    assert percentile(values, 0) == 1.0
    assert percentile(values, 50) == 2.5
    assert percentile(values, 99) == pytest.approx(3.97)
    assert percentile(values, 100) == 4.0


def test_percentile_of_nothing_is_nan_and_of_nonsense_an_error() -> None:
    assert math.isnan(percentile([math.nan], 50))
    with pytest.raises(ValueError, match="q: 101"):
        percentile([1.0], 101)


def test_tpot_leaves_the_first_token_out() -> None:
    assert answer(tokens=3, first_s=0.5, last_s=1.5).tpot_ms == 500.0
    assert math.isnan(answer(tokens=1).tpot_ms)
    assert answer(first_s=0.25).ttft_ms == 250.0


def test_rates_are_totals_over_totals() -> None:
    runs = [Run((answer(tokens=10, steps=5),), 1.0), Run((answer(tokens=20, steps=5),), 3.0)]
    summary = summarize(runs, {"a": None}, Judge())
    assert summary.tokens_per_s == 7.5
    assert summary.requests_per_s == 0.5
    assert summary.acceptance_length == 3.0
    assert math.isnan(summary.valid_share), "free text is not judged"


def test_a_cut_off_answer_is_not_valid() -> None:
    schema = '{"type":"object"}'
    runs = [Run((answer("a"), answer("b", text='{"x":', finish="length"), answer("c", text="[]")), 1.0)]
    summary = summarize(runs, {"a": schema, "b": schema, "c": schema}, Judge())
    assert summary.valid_share == pytest.approx(1 / 3)
    assert summary.stop_share == pytest.approx(2 / 3)


def test_guidance_cost_is_per_step_so_token_counts_cancel() -> None:
    pairs = [(answer(times=times(100, 10, 5.0)), answer(times=times(400, 50)))]
    cost = guidance_cost(pairs)
    assert cost.guided_step_ms == 10.0
    assert cost.free_step_ms == 8.0
    assert cost.ratio == 1.25
    assert cost.mask_wait_share == 0.05


def test_guidance_cost_takes_the_median_pair_and_leaves_stepless_answers_out() -> None:
    slow = (answer(times=times(1000, 10)), answer(times=times(10, 10)))
    even = (answer(times=times(10, 10)), answer(times=times(10, 10)))
    stepless = (answer(times=times(0, 0)), answer(times=times(10, 10)))
    cost = guidance_cost([slow, even, even, stepless, (answer(), answer())])
    assert cost.pairs == 3
    assert cost.ratio == 1.0


def test_guidance_cost_of_nothing_is_nan() -> None:
    cost = guidance_cost([])
    assert cost.pairs == 0
    assert math.isnan(cost.ratio)
