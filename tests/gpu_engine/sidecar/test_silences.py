"""What a grammar process that goes silent again and again may write into the log."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from gpu_engine.sidecar.silences import Silences


@dataclass
class Clock:
    """A clock that a test sets, and all that was said by it."""

    now_s: float = 1000.0
    silences: Silences = field(init=False)
    said: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.silences = Silences(lambda: self.now_s, every_s=30.0)

    def look_until(self, until_s: float) -> None:
        """Look every second, as somebody who watches does, only rarer."""
        while self.now_s < until_s:
            self.now_s = min(self.now_s + 1.0, until_s)
            if line := self.silences.line():
                self.said.append((self.now_s, line))

    def silent(self, for_s: float) -> None:
        """One silence, found after 0.07 s."""
        self.silences.begin(0.07)
        self.now_s += for_s - 0.07
        self.silences.end()


def test_the_first_silence_is_told_when_it_is_over() -> None:
    clock = Clock()
    clock.silences.begin(0.07)
    clock.look_until(1002.0)
    assert clock.said == []
    assert round(clock.silences.end(), 2) == 2.07
    clock.look_until(1003.0)
    assert clock.said == [(1003.0, "was silent for 2.07 s; guided requests paused for so long")]


def test_a_flood_of_silences_is_a_line_now_and_then_that_counts_all_of_them() -> None:
    clock = Clock()
    while clock.now_s < 1100.0:
        clock.silent(0.1 if clock.silences.count != 50 else 0.8)
        clock.look_until(clock.now_s + 0.4)
    clock.look_until(1200.0)
    assert clock.silences.count > 190
    times = [at for at, _ in clock.said]
    assert len(times) == 5
    assert all(later >= earlier + 30.0 for earlier, later in itertools.pairwise(times))
    counted = [int(line.split(" times")[0].split()[-1]) for _, line in clock.said if " times in the last" in line]
    assert 1 + sum(counted) == clock.silences.count
    assert "for 0.80 s at most" in clock.said[1][1]


def test_a_single_silence_long_after_another_is_told_at_once() -> None:
    clock = Clock()
    clock.silent(0.1)
    clock.look_until(1500.0)
    clock.silent(0.2)
    clock.look_until(1501.0)
    assert [line.split(";")[0] for _, line in clock.said] == ["was silent for 0.10 s", "was silent for 0.20 s"]


def test_a_silence_that_ends_with_the_process_is_told_by_somebody_else() -> None:
    clock = Clock()
    clock.silences.begin(0.07)
    clock.silences.lost()
    clock.look_until(1100.0)
    assert clock.said == []
    assert clock.silences.end() == 0.0
    assert clock.silences.count == 1
