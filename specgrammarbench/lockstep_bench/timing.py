"""Times of streams: rates and gaps. Times are in seconds, rates in tokens per second."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed (nearest rank); NaN without values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else math.nan


def gaps(arrivals: Sequence[float]) -> list[float]:
    """Return the times between the arrivals of a stream."""
    return [after - before for before, after in itertools.pairwise(arrivals)]


def rate(streams: Iterable[tuple[int, float]]) -> float:
    """Return tokens over time of some streams, each given as its tokens and its duration; NaN without time."""
    tokens, total_s = 0, 0.0
    for count, duration_s in streams:
        tokens, total_s = tokens + count, total_s + duration_s
    return tokens / total_s if total_s > 0 else math.nan
