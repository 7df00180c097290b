"""How many engines a load needs, and what a lost engine costs.

Each number of engines is simulated several times, with other traces. A number is enough when the mean of its runs holds
both goals. Traces do not depend on the number of engines, so neighbouring numbers are compared under the same load.
Not responsible for: the simulation itself (see fleet.py), drawing (see plot.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from tools.scale.fleet import Failure, Fleet, Result
from tools.scale.replica import EngineSpec
from tools.scale.traces import Arrival


@dataclass(frozen=True, slots=True)
class Goals:
    """What a fleet must hold, in seconds; inf: no goal."""

    ttft_s: float = math.inf
    itl_s: float = math.inf
    quantile: float = 99.0
    """Of the times to the first token and between responses, in percent."""


@dataclass(frozen=True, slots=True)
class Size:
    """A number of engines and what its runs gave: means, and in brackets of a table the spread over the runs."""

    num_engines: int
    ttft_s: float
    ttft_spread_s: float
    itl_s: float
    itl_spread_s: float
    tokens_per_s: float
    busy_share: float
    served_share: float
    """Requests that ended, of all."""

    def holds(self, goals: Goals) -> bool:
        """Return whether every request was served and both goals hold."""
        return self.served_share == 1 and self.ttft_s <= goals.ttft_s and self.itl_s <= goals.itl_s


def run_size(
    spec: EngineSpec,
    num_engines: int,
    traces: Sequence[Sequence[Arrival]],
    goals: Goals,
    router: str,
    *,
    warm_s: float = 0.0,
    step: Callable[[str], None] = lambda label: None,
) -> Size:
    """Simulate one number of engines over every trace."""
    results: list[Result] = []
    for seed, trace in enumerate(traces):
        results.append(Fleet(spec, num_engines, router, seed=seed).run(trace, warm_s=warm_s))
        step(f"{num_engines} engines")
    q = goals.quantile
    ttfts, itls = [r.ttft(q) for r in results], [r.itl(q) for r in results]
    ended = sum(result.outcomes["ended"] for result in results)
    return Size(
        num_engines,
        fmean(ttfts),
        stdev(ttfts) if len(ttfts) > 1 else 0.0,
        fmean(itls),
        stdev(itls) if len(itls) > 1 else 0.0,
        fmean(result.tokens_per_s for result in results),
        fmean(result.busy_share for result in results),
        ended / sum(len(result.requests) for result in results),
    )


def plan(sizes: Sequence[Size], goals: Goals) -> int | None:
    """Return the smallest number of engines that holds the goals, with all larger ones that were simulated; None:
    none."""
    enough = None
    for size in sorted(sizes, key=lambda size: -size.num_engines):
        if not size.holds(goals):
            break
        enough = size.num_engines
    return enough


@dataclass(frozen=True, slots=True)
class Loss:
    """What the end of one engine costs, against the same trace without it."""

    num_engines: int
    lost: int
    """Requests whose clients had tokens already."""
    retried: int
    """Requests that another engine answered."""
    refused: int
    during_ttft_s: float
    """Percentile of requests that came between the end and the engine's return."""
    undisturbed_ttft_s: float
    during_itl_s: float
    undisturbed_itl_s: float


def lose_engine(
    spec: EngineSpec,
    num_engines: int,
    trace: Sequence[Arrival],
    goals: Goals,
    router: str,
    *,
    at_s: float,
    detect_s: float = 1.0,
) -> Loss:
    """Simulate a trace with and without the end of engine 0 at `at_s`."""
    failure, until_s = Failure(at_s, 0), at_s + spec.start_s
    broken = Fleet(spec, num_engines, router, (failure,), detect_s=detect_s).run(trace)
    whole = Fleet(spec, num_engines, router).run(trace)
    q = goals.quantile
    outcomes = broken.outcomes
    return Loss(
        num_engines,
        outcomes["lost"],
        sum(request.attempts > 1 and request.outcome == "ended" for request in broken.requests),
        outcomes["refused"],
        broken.ttft(q, at_s, until_s),
        whole.ttft(q, at_s, until_s),
        broken.itl(q, at_s, until_s),
        whole.itl(q, at_s, until_s),
    )
