"""The pause of a stream follows the measured cost of a response, within its bound."""

from __future__ import annotations

import pytest

from gpu_engine.front.pacing import MAX_SHARE, RESPONSES_PER_MEASUREMENT, StreamPacer


class CpuClock:
    """CPU seconds of an event loop that spends `cost_s` on each response."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def pacer_after(cost_s: float, max_pause_s: float = 10.0, measurements: int = 50) -> StreamPacer:
    clock = CpuClock()
    pacer = StreamPacer(max_pause_s, clock)
    for _ in range(measurements * RESPONSES_PER_MEASUREMENT):
        clock.now_s += cost_s
        pacer.response_sent()
    return pacer


@pytest.mark.parametrize("cost_s", [2e-5, 1e-3])
@pytest.mark.parametrize("streams", [2, 8, 128])
def test_the_responses_of_all_streams_together_take_the_stated_share_of_a_core(cost_s: float, streams: int) -> None:
    pause_s = pacer_after(cost_s).pause_s(streams)
    assert streams * cost_s / pause_s == pytest.approx(MAX_SHARE, rel=1e-3)


def test_a_pause_is_bounded_and_only_for_several_streams() -> None:
    assert pacer_after(1e-3).pause_s(1) == 0.0
    pacer = pacer_after(1e-3, max_pause_s=0.05)
    assert pacer.pause_s(128) == 0.05
    assert 0 < pacer.pause_s(2) < 0.05
    assert pacer_after(1e-3, max_pause_s=0.0).pause_s(128) == 0.0


def test_one_slow_measurement_moves_the_cost_by_a_quarter_of_the_difference() -> None:
    clock = CpuClock()
    pacer = StreamPacer(10.0, clock)
    before_s = pacer.pause_s(2)
    clock.now_s += RESPONSES_PER_MEASUREMENT * 1e-3
    for _ in range(RESPONSES_PER_MEASUREMENT):
        pacer.response_sent()
    assert pacer.pause_s(2) - before_s == pytest.approx(0.25 * (2e-3 / MAX_SHARE - before_s))
