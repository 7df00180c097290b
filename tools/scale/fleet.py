"""A fleet of simulated engines with a router, and what its clients see.

A request whose engine dies before its first token is sent to another one, as a gateway does; one that has tokens is
lost,
because its client has them. A router takes an engine that died for a living one until `detect_s` have passed.
Invariant: every request of a trace ends once: ended, lost or refused. Equal arguments and seeds give equal results.
Not responsible for: one engine (see replica.py), how many engines a load needs (see plan.py).
"""

from __future__ import annotations

import random
from array import array
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from benchmarks.harness.measure import percentile
from tools.scale.replica import EngineSpec, QueueFull, Replica, Request
from tools.scale.routers import ROUTERS, Router
from tools.scale.traces import Arrival

MOST_ATTEMPTS = 3
"""Engines that a request is sent to before it counts as lost."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of one process by SIGKILL."""

    at_s: float
    engine: int
    what: str = "engine"
    """"engine", or "grammar" for its grammar process."""

    def __post_init__(self) -> None:
        if self.what not in ("engine", "grammar"):
            raise ValueError(f"failure: {self.what!r} is not engine or grammar")
        if self.at_s < 0:
            raise ValueError(f"failure: at_s {self.at_s} is negative")


@dataclass(slots=True)
class Result:
    """What the clients of one run saw. Times are in seconds."""

    requests: list[Request]
    duration_s: float
    """From the start to the last token."""
    gaps: array[float]
    """Between two responses of one answer, of all answers."""
    gap_ends: array[float]
    """When each of `gaps` ended."""
    busy_share: float
    """Share of the time that engines were in an iteration, on average."""
    preempted: int
    cached_tokens: int
    warm_s: float = 0.0
    """Requests that came earlier do not count in percentiles."""

    @property
    def outcomes(self) -> Counter[str]:
        """Requests by outcome."""
        return Counter(request.outcome for request in self.requests)

    def ttft(self, q: float, after_s: float = 0.0, until_s: float = float("inf")) -> float:
        """Return a percentile of the time to the first token, over the requests that came in a window."""
        start = max(self.warm_s, after_s)
        times = [r.first_s - r.arrival.at_s for r in self.requests if r.emitted and start <= r.arrival.at_s < until_s]
        return percentile(times, q)

    def itl(self, q: float, after_s: float = 0.0, until_s: float = float("inf")) -> float:
        """Return a percentile of the time between two responses of an answer that ended in a window."""
        start = max(self.warm_s, after_s)
        pairs = zip(self.gaps, self.gap_ends, strict=True)
        return percentile([gap for gap, end in pairs if start <= end < until_s], q)

    def tpot(self, q: float) -> float:
        """Return a percentile of an answer's mean time of a token after its first."""
        ended = (r for r in self.requests if r.outcome == "ended" and r.emitted > 1 and r.arrival.at_s >= self.warm_s)
        return percentile([(r.last_s - r.first_s) / (r.emitted - 1) for r in ended], q)

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(request.emitted for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers over the whole time."""
        return self.tokens / self.duration_s if self.duration_s else 0.0


@dataclass(slots=True)
class Fleet:
    """Runs one simulation; use it once."""

    spec: EngineSpec
    num_engines: int
    router: str = "least-loaded"
    failures: Sequence[Failure] = ()
    seed: int = 0
    detect_s: float = 1.0
    """From the end of an engine to the moment at which the router knows, and so do its clients."""
    retries: bool = True
    """A request without a token is sent to another engine."""
    on_end: Callable[[], None] = lambda: None
    env: simpy.Environment = field(default_factory=simpy.Environment)
    replicas: list[Replica] = field(init=False, default_factory=list)
    _unseen: dict[int, list[Request]] = field(init=False, default_factory=dict)
    """By engine: requests at an engine that is dead, and that the router takes for a living one."""
    _gaps: array[float] = field(init=False, default_factory=lambda: array("d"))
    _gap_ends: array[float] = field(init=False, default_factory=lambda: array("d"))
    _next: Callable[[], None] | None = field(init=False, default=None)
    _open: int = field(init=False, default=0)
    _router: Router = field(init=False)

    def __post_init__(self) -> None:
        if self.num_engines < 1:
            raise ValueError(f"num_engines: {self.num_engines} is not at least 1")
        if self.router not in ROUTERS:
            raise ValueError(f"router: {self.router!r} is not one of {', '.join(ROUTERS)}")
        for failure in self.failures:
            if not 0 <= failure.engine < self.num_engines:
                raise ValueError(f"failure: there is no engine {failure.engine} of {self.num_engines}")
        self._router = ROUTERS[self.router](random.Random(f"{self.seed} router"), self.spec.config.max_batch_size)
        self.replicas = [
            Replica(self.env, number, self.spec, str(self.seed), self._tokens, self._ended)
            for number in range(self.num_engines)
        ]

    def run(self, arrivals: Sequence[Arrival], *, warm_s: float = 0.0) -> Result:
        """Send every request at its time; return when the last one has ended."""
        requests = self._requests(arrivals)
        self.env.process(self._arrive(requests))
        return self._finish(requests, warm_s)

    def run_closed(self, arrivals: Sequence[Arrival], concurrency: int) -> Result:
        """Send the requests in order, so many at a time, whatever their times; `at_s` becomes when one was sent."""
        requests = self._requests(arrivals)
        waiting = deque(requests)

        def send_next() -> None:
            if waiting:
                request = waiting.popleft()
                request.arrival = _at(request.arrival, self.env.now)
                self._send(request)

        self._next = send_next
        for _ in range(concurrency):
            send_next()
        return self._finish(requests, 0.0)

    def _requests(self, arrivals: Sequence[Arrival]) -> list[Request]:
        rng = random.Random(f"{self.seed} gains")
        requests = [Request(number, arrival) for number, arrival in enumerate(arrivals, 1)]
        for request in requests:
            request.gain = rng.choice(self.spec.drafts.gains)
        return requests

    def _finish(self, requests: list[Request], warm_s: float) -> Result:
        self._open = len(requests)
        for failure in self.failures:
            self.env.process(self._fail(failure))
        while self._open:
            self.env.step()
        now = self.env.now
        busy_s = sum(replica.busy_s for replica in self.replicas)
        return Result(
            requests,
            now,
            self._gaps,
            self._gap_ends,
            busy_s / (now * self.num_engines) if now else 0.0,
            sum(replica.preempted for replica in self.replicas),
            sum(replica.cached_tokens for replica in self.replicas),
            warm_s,
        )

    def _arrive(self, requests: Sequence[Request]) -> Generator[simpy.Event, Any, None]:
        for request in requests:
            yield self.env.timeout(max(0.0, request.arrival.at_s - self.env.now))
            self._send(request)

    def _send(self, request: Request) -> None:
        """Send a request on its way; it reaches the chosen engine's waiting queue after `front_s`."""
        way = self.env.timeout(self.spec.front_s)
        way.callbacks.append(lambda _: self._deliver(request))

    def _deliver(self, request: Request) -> None:
        targets = [r for r in self.replicas if r.alive or r.number in self._unseen]
        if not targets:
            self._close(request, "refused")
            return
        target = self._router.choose(targets, request.arrival)
        request.attempts += 1
        if target.number in self._unseen:
            self._unseen[target.number].append(request)
            self.replicas[target.number].unanswered += 1
            return
        try:
            self.replicas[target.number].submit(request)
        except QueueFull:
            self._close(request, "refused")

    def _fail(self, failure: Failure) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(failure.at_s)
        replica = self.replicas[failure.engine]
        if not replica.alive:
            return
        if failure.what == "grammar":
            replica.kill_grammar()
            return
        began_s = self.env.now
        self._unseen[replica.number] = held = replica.kill()
        replica.unanswered = len(held)
        yield self.env.timeout(self.detect_s)
        replica.unanswered = 0
        for request in self._unseen.pop(replica.number):
            if request.emitted or not self.retries or request.attempts >= MOST_ATTEMPTS:
                self._close(request, "lost")
            else:
                self._send(request)
        yield self.env.timeout(max(0.0, began_s + self.spec.start_s - self.env.now))
        replica.restart()

    def _tokens(self, request: Request) -> None:
        now = self.env.now + self.spec.reply_s
        if request.last_s == request.last_s:  # not its first
            self._gaps.append(now - request.last_s)
            self._gap_ends.append(now)
        else:
            request.first_s = now
        request.last_s = now

    def _ended(self, request: Request) -> None:
        self._close(request, "ended")

    def _close(self, request: Request, outcome: str) -> None:
        assert not request.outcome, request
        request.outcome = outcome
        self._open -= 1
        self.on_end()
        if self._next is not None:
            self._next()


def _at(arrival: Arrival, at_s: float) -> Arrival:
    values = {name: getattr(arrival, name) for name in Arrival.__slots__}
    return Arrival(**{**values, "at_s": at_s})
