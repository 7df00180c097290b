"""The learned time of a step follows the machine, and is never misled for ever."""

from __future__ import annotations

import random

import pytest

from gpu_engine.core.step_times import StepTimes


def line(rows: int) -> float:
    return 18.0 + 0.75 * rows


def learn(
    times: StepTimes, steps: int, scale: float = 1.0, rows: tuple[int, ...] = (1, 3, 8, 12), seed: int = 0
) -> None:
    """Observe steps with noise of 10%, and one in fifty that takes three times as long."""
    rng = random.Random(seed)
    for _ in range(steps):
        at = rng.choice(rows)
        times.observe(at, scale * line(at) * rng.lognormvariate(0.0, 0.1) * (3.0 if rng.random() < 0.02 else 1.0))


def test_seeds_are_the_times_until_steps_say_otherwise() -> None:
    times = StepTimes()
    times.seed({1: 18.75, 8: 24.0, 32: 42.0})
    assert [times.ms(rows) for rows in (1, 8, 32)] == pytest.approx([18.75, 24.0, 42.0])
    assert times.ms(20) == pytest.approx(33.0)
    assert times.ms(64) == pytest.approx(66.0), "behind the last seed the line goes on"
    assert times.table(8)[8] == pytest.approx(24.0)


def test_nothing_known_is_no_table_and_the_first_step_sets_the_level() -> None:
    times = StepTimes()
    assert times.table() == {}
    times.observe(4, 30.0)
    assert times.ms(4) == pytest.approx(30.0)
    assert times.ms(20) > times.ms(4) > times.ms(1) > 0.0


def test_noisy_steps_teach_the_shape() -> None:
    times = StepTimes()
    times.seed({1: 10.0})  # flat: every row looks free
    learn(times, 600)
    for rows in (3, 8, 12):
        assert times.ms(rows) / times.ms(1) == pytest.approx(line(rows) / line(1), rel=0.06)


@pytest.mark.parametrize("scale", [0.33, 3.0])
def test_a_faster_or_slower_machine_scales_rows_that_no_step_uses_now(scale: float) -> None:
    times = StepTimes()
    times.seed({rows: line(rows) for rows in (1, 8, 32)})
    learn(times, 300)
    learn(times, 40, scale, rows=(1,))
    for rows in (1, 8, 32):
        assert times.ms(rows) == pytest.approx(scale * line(rows), rel=0.25)


def test_the_times_rise_with_the_rows_and_at_most_in_proportion() -> None:
    times = StepTimes()
    times.seed({1: 20.0, 2: 15.0, 4: 200.0, 8: 190.0})
    values = [times.ms(rows) for rows in range(1, 70)]
    assert values == sorted(values)
    assert all(times.ms(2 * rows) <= 2.0001 * times.ms(rows) for rows in range(1, 33))


def test_a_step_without_a_time_is_ignored() -> None:
    times = StepTimes()
    times.seed({1: 20.0})
    times.observe(1, 0.0)
    assert times.ms(1) == pytest.approx(20.0)
