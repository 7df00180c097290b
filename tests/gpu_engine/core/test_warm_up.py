"""The times of forwards that a CPU's warm-up measures."""

from __future__ import annotations

import time
from collections import Counter

from gpu_engine.core.cpu_executor import forward_ms


def test_quick_forwards_are_measured_three_times_and_slow_ones_twice_for_few_numbers_of_rows() -> None:
    ran: Counter[int] = Counter()

    def forward(seconds: float, waits: bool) -> float:
        if waits:
            time.sleep(seconds)
        return seconds

    def quick(num_rows: int) -> float:
        ran[num_rows] += 1
        return forward(0.001 * num_rows if ran[num_rows] > 1 else 0.002 * num_rows, waits=False)

    assert forward_ms(quick, 16) == {rows: float(rows) for rows in (1, 16, 4, 8, 2)}
    assert set(ran.values()) == {3}

    ran.clear()

    def slow(num_rows: int) -> float:
        ran[num_rows] += 1
        return forward(0.2, waits=True)

    measured = forward_ms(slow, 64)
    assert list(measured)[:2] == [1, 16], "two numbers are always measured"
    assert len(measured) < 8
    assert set(ran.values()) == {2}
