"""The fit: it finds the shares that made the iterations, and a simulation from it gives the times that went in."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tools.scale.calibrate import Pass, Timed, calibration_of, simulated
from tools.scale.calibration import BadCalibration, Calibration, Sample, back_to_back, fit_cost, fit_drafts, nonnegative
from tools.scale.step_time import StepLoad

SHARES = (2e-3, 3e-4, 1e-4, 2e-4, 1e-3, 1e-6)


def samples(count: int, noise: float, seed: int = 0) -> list[Sample]:
    rng, found, now = random.Random(seed), [], 0.0
    for _ in range(count):
        lanes = rng.randint(1, 16)
        drafts, prefill, context = rng.randint(0, 2 * lanes), rng.choice((0, 0, 0, 100, 250)), rng.randint(100, 4000)
        values = (1, lanes, drafts, prefill, prefill > 0, context)
        seconds = sum(share * value for share, value in zip(SHARES, values, strict=True)) * rng.lognormvariate(0, noise)
        now += seconds
        found.append(
            Sample(
                ended_s=now,
                seconds=seconds,
                lanes=lanes,
                draft_rows=drafts,
                prefill_tokens=prefill,
                context_tokens=context,
                generated=lanes + drafts // 2,
            )
        )
    return found


def test_the_fit_finds_the_shares() -> None:
    cost, noise, error = fit_cost(samples(3000, 0.05))
    assert cost.shares == pytest.approx(SHARES, rel=0.25)
    assert error < 0.06
    assert noise[50] == pytest.approx(1, abs=0.02)
    load = StepLoad(lanes=4, draft_rows=3, prefill_tokens=100, context_tokens=500)
    assert cost.seconds(load) == pytest.approx(2e-3 + 12e-4 + 3e-4 + 2e-2 + 1e-3 + 5e-4, rel=0.05)


def test_no_share_is_negative_and_unused_features_have_none() -> None:
    features = np.array([[1.0, 0.0, 1.0], [1.0, 0.0, 2.0], [1.0, 0.0, 3.0]])
    found = nonnegative(features, np.array([3.0, 2.0, 1.0]))
    assert (found >= 0).all()
    assert found[1] == 0
    assert found[0] == pytest.approx(2.0), "the best constant, as the slope may not fall"


def test_pauses_do_not_count_and_the_time_between_iterations_does() -> None:
    first, second, third = samples(3, 0)
    shifted = [
        first,
        Sample(
            **{**{n: getattr(second, n) for n in Sample.__slots__}, "ended_s": first.ended_s + second.seconds + 0.001}
        ),
        Sample(**{**{n: getattr(third, n) for n in Sample.__slots__}, "ended_s": first.ended_s + 9.0}),
    ]
    found = back_to_back(shifted)
    assert found[1].seconds == pytest.approx(second.seconds + 0.001)
    assert found[2].seconds == third.seconds


def test_drafts_are_averaged_by_the_batch() -> None:
    drafts = fit_drafts(samples(2000, 0))
    assert list(drafts.lanes) == sorted(drafts.lanes)
    assert drafts.at(8)[0] == pytest.approx(1.0, abs=0.15)
    assert drafts.at(8)[1] == pytest.approx(1.5, abs=0.15)
    assert drafts.at(1000) == (drafts.per_lane[-1], drafts.tokens[-1])


def test_a_simulation_of_the_measured_requests_takes_the_measured_time() -> None:
    """Requests of one lane and no drafts: each step's time is known, and so is the pass."""
    steps, found, now = 60, [], 0.0
    for number in range(40 * steps):
        prefill = 30 if number % steps == 0 else 0
        now += 4e-3 + prefill * 2e-4
        seconds = 4e-3 + prefill * 2e-4
        found.append(
            Sample(
                ended_s=now,
                seconds=seconds,
                lanes=1,
                draft_rows=0,
                prefill_tokens=prefill,
                context_tokens=100,
                generated=1,
            )
        )
    answer = Timed(31, steps, 10e-3, 10e-3, (steps - 1) * 4e-3, None, False, steps)
    one = Pass(1, (answer,) * 40, now, tuple(found))
    calibration = calibration_of([one], "test", "an engine", {"prefix_cache": False})
    result = simulated(calibration, one)
    assert result.tokens_per_s == pytest.approx(one.tokens_per_s, rel=0.02)
    assert result.ttft(50) == pytest.approx(10e-3, rel=0.05)
    assert result.tpot(50) == pytest.approx(4e-3, rel=0.02)


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    answer = Timed(31, 20, 10e-3, 8e-3, 0.1, 0.02, True, 15)
    one = Pass(1, (answer,), 1.0, tuple(samples(100, 0.1)))
    calibration = calibration_of([one], "test", "an engine", {"max_batch_size": 8})
    path = tmp_path / "one.json"
    calibration.save(path)
    assert Calibration.load(path) == calibration
    assert calibration.spec(max_queue_size=3).config.max_queue_size == 3
    assert calibration.front_s == pytest.approx(2e-3)
    path.write_text("{}")
    with pytest.raises(BadCalibration, match="shares"):
        Calibration.load(path)


def test_too_few_iterations_are_refused() -> None:
    with pytest.raises(BadCalibration, match="49 iterations"):
        fit_cost(samples(49, 0))
