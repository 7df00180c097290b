"""The time of a step by the rows of its forward, learned from the steps that ran.

The model is level * shape(rows). The level follows the load of the machine and the length of the contexts within some
ten steps, whatever rows these steps have; the shape has a value for each number of rows that was measured, is linear
between them, and changes slowly. So a number of rows that no step has had for a while is not out of date. Other work on
the machine only ever adds time: a slow step counts with half of its deviation, up to a bound. Invariant: the time is
positive, never falls with the rows, and grows at most in proportion to them. Pure: no clocks.

Not responsible for: measuring (see runner.py), what is chosen by it (see draft_budget.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping

_KNOTS = (
    *range(1, 9),
    10,
    12,
    14,
    16,
    20,
    24,
    28,
    32,
    40,
    48,
    56,
    64,
    80,
    96,
    128,
    192,
    256,
    384,
    512,
    1024,
    2048,
    4096,
)
_LEVEL_STEP = 0.15
"""Share of a step's deviation, in logarithms, that the level follows."""
_SHAPE_STEP = 0.02
"""How far one step moves the shape where there were many steps; the first ones move it by more."""
_MOST_DEVIATION = 0.3
"""A step that took longer than e^0.3 times the expected time counts as one that took just that."""
_MOST_WEIGHT = 50.0
"""Steps that a value of the shape is worth at most where two disagree; a seed is worth one."""
_MOST_STALE = 0.01
"""The curve is computed again when the shape has moved this far, in logarithms, since the last time."""
_UNMEASURED_SLOPE = 1 / 16
"""Before anything is measured, 16 more rows double the time of one row."""
_UNMEASURED = (1, 16, 256)
"""Knots that this slope is given to when the first step comes without seeds."""


class StepTimes:
    """Milliseconds by rows, for 1 to 4096 rows; more count as 4096."""

    def __init__(self) -> None:
        self._shape: dict[int, float] = {}
        """Logarithms by knot, only where something was measured."""
        self._weight: dict[int, float] = {}
        """Steps at each of these knots."""
        self._level = 0.0
        """Logarithm."""
        self._num_steps = 0
        self._moved = 0.0
        """How far the shape has moved since the curve was computed."""
        self._curve: list[float] | None = None
        """The shape at every knot, made monotone; None: to be computed again."""

    def seed(self, ms_by_rows: Mapping[int, float]) -> None:
        """Start from measured times. An empty mapping changes nothing."""
        for rows, ms in ms_by_rows.items():
            knot = _KNOTS[_between(rows)[0]]
            self._shape[knot], self._weight[knot] = math.log(max(ms, 1e-6)), 1.0
        self._curve = None

    def observe(self, rows: int, ms: float) -> None:
        """Learn from one step. A time that is not positive is ignored."""
        if ms <= 0.0:
            return
        if not self._shape:
            level = math.log(ms / self.ms(rows))
            self.seed({knot: 1 + (knot - 1) * _UNMEASURED_SLOPE for knot in _UNMEASURED})
            self._level = level
        deviation = min(_MOST_DEVIATION, math.log(ms / self.ms(rows)))
        if deviation > 0:
            deviation /= 2
        at, share = _between(rows)
        near = [(_KNOTS[at + step], weight) for step, weight in enumerate((1 - share, share)) if weight]
        for knot, _ in near:
            if knot not in self._shape:
                self._shape[knot], self._weight[knot] = math.log(self.ms(knot)) - self._level, 0.0
                self._moved = math.inf
        self._num_steps += 1
        if self._num_steps <= 3:
            self._level += deviation / self._num_steps
        else:
            known = sum(self._weight[knot] * weight for knot, weight in near)
            step = max(_SHAPE_STEP, 1 / (known + 1.5))
            self._level += _LEVEL_STEP * (1 - step) * deviation
            for knot, weight in near:
                self._shape[knot] += step * weight * deviation
            self._moved += step * abs(deviation)
        for knot, weight in near:
            self._weight[knot] = min(_MOST_WEIGHT, self._weight[knot] + weight)
        if self._moved > _MOST_STALE:
            self._curve, self._moved = None, 0.0

    def ms(self, rows: int) -> float:
        """Return the expected time of a step with `rows` rows; relative to one row before anything is known."""
        curve = self._curve  # another thread may read times while this one learns
        if curve is None:
            curve = self._curve = self._computed_curve()
        at, share = _between(rows)
        low, high = curve[at], curve[min(at + 1, len(_KNOTS) - 1)]
        return math.exp(self._level) * (low + (high - low) * share)

    def _computed_curve(self) -> list[float]:
        if not self._shape:
            return [1 + (knot - 1) * _UNMEASURED_SLOPE for knot in _KNOTS]
        measured = sorted(self._shape.items())
        rising = _rising([(math.exp(value), self._weight[knot] + 0.1) for knot, value in measured])
        points = [(knot, value) for (knot, _), value in zip(measured, rising, strict=True)]
        curve = _lines(points)
        for at in range(1, len(curve)):
            curve[at] = min(curve[at], curve[at - 1] * _KNOTS[at] / _KNOTS[at - 1])
        return curve

    def table(self, most_rows: int = 64) -> dict[int, float]:
        """Return milliseconds by rows at the knots up to `most_rows`; empty before anything was measured."""
        return {knot: self.ms(knot) for knot in _KNOTS if knot <= most_rows} if self._shape else {}

    def __repr__(self) -> str:
        return f"<StepTimes {' '.join(f'{rows}:{ms:.2f}' for rows, ms in self.table(32).items())}>"


def _between(rows: int) -> tuple[int, float]:
    """Return the knot at or below `rows`, as an index, and how far the next one is reached, in [0, 1)."""
    rows = max(_KNOTS[0], min(rows, _KNOTS[-1]))
    at = bisect_right(_KNOTS, rows) - 1
    if at + 1 == len(_KNOTS):
        return at, 0.0
    return at, (rows - _KNOTS[at]) / (_KNOTS[at + 1] - _KNOTS[at])


def _lines(points: list[tuple[int, float]]) -> list[float]:
    """Return the value at each knot of the lines through the points; outside, the slope of the upper half goes on."""
    if len(points) == 1:
        return [points[0][1]] * len(_KNOTS)
    values, at = list[float](), 1
    for rows in _KNOTS:
        while at < len(points) - 1 and points[at][0] <= rows:
            at += 1
        (x0, y0), (x1, y1) = points[at - 1], points[at]
        if rows > x1:
            # The slope of two neighbours would be mostly noise.
            x0, y0 = points[(len(points) - 1) // 2]
            values.append(y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (rows - x1))
        else:
            values.append(y0 if rows < x0 else y0 + (y1 - y0) * (rows - x0) / (x1 - x0))
    return values


def _rising(values: list[tuple[float, float]]) -> list[float]:
    """Return the closest values that never fall, from (value, weight) (pool adjacent violators, Ayer et al. 1955)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in values:
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, high_weight, high_count), (low, low_weight, low_count) = pools.pop(), pools.pop()
            weight = low_weight + high_weight
            pools.append(((low * low_weight + high * high_weight) / weight, weight, low_count + high_count))
    return [value for value, _, count in pools for _ in range(count)]
