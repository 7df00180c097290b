"""Metrics of Generate calls, counted when a call ends: status, finish reasons, latencies, lengths.

The invariant: every call is counted once, under the status that its client received. Used on the event loop; a scrape
reads from another thread.

Not responsible for: the counters of the engine's thread (metrics_engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram

from gpu_engine.ops.access import CallRecord, Ended

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # no time stamp next to every counter

LATENCY_BOUNDS_S = (
    5e-3,
    1e-2,
    2e-2,
    5e-2,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
QUEUE_BOUNDS_S = (1e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0)
PER_TOKEN_BOUNDS_S = (1e-3, 2e-3, 5e-3, 1e-2, 1.5e-2, 2e-2, 3e-2, 4e-2, 5e-2, 7.5e-2, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
LENGTH_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class RequestMetrics:
    """The metrics of calls to one server, registered in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, documentation: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(f"lockstep_{name}", documentation, buckets=bounds, registry=registry)

        self.requests = Counter(
            "lockstep_requests", "Generate calls that ended, by gRPC status", ("status",), registry=registry
        )
        self.sequences = Counter(
            "lockstep_sequences", "Sequences that ended, by finish reason", ("finish_reason",), registry=registry
        )
        self.ttft = histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to a sequence's first token",
            LATENCY_BOUNDS_S,
        )
        self.latency = histogram(
            "e2e_request_latency_seconds",
            "Time from a request's arrival to a sequence's end",
            LATENCY_BOUNDS_S,
        )
        self.queue = histogram(
            "request_queue_seconds", "Time from a request's arrival until a sequence has a slot", QUEUE_BOUNDS_S
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Time of a sequence after its first token, divided by the number of its other tokens",
            PER_TOKEN_BOUNDS_S,
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a sequence", LENGTH_BOUNDS)
        self.generation_tokens = histogram("request_generation_tokens", "Tokens of a sequence's answer", LENGTH_BOUNDS)

    def count(self, record: CallRecord) -> None:
        """Count one call, which has ended."""
        self.requests.labels(record.status).inc()
        for each in record.ended:
            self._count_sequence(each)

    def _count_sequence(self, ended: Ended) -> None:
        times, arrived_s = ended.telemetry, ended.request.arrived_s
        self.sequences.labels(ended.finish.name.lower()).inc()
        self.latency.observe(ended.finished_s - arrived_s)
        self.prompt_tokens.observe(len(ended.request.prompt_ids))
        self.generation_tokens.observe(ended.completion_tokens)
        if times.scheduled_s:
            self.queue.observe(times.scheduled_s - arrived_s)
        if times.first_token_s:
            self.ttft.observe(times.first_token_s - arrived_s)
            if ended.completion_tokens > 1:
                took_s = max(times.last_token_s - times.first_token_s, 0.0)
                self.per_token.observe(took_s / (ended.completion_tokens - 1))


class RequestWatch:
    """Counts and logs every Generate call, and passes it to the tracer."""

    def __init__(
        self,
        registry: CollectorRegistry,
        trace: Callable[[CallRecord], None] | None = None,
        ended: Callable[[CallRecord], None] | None = None,
    ) -> None:
        """Args: `trace` and `ended` are called with each call when it has ended, and must not raise."""
        self.registry = registry
        self.metrics = RequestMetrics(registry)
        self._trace, self._ended = trace, ended

    @contextmanager
    def call(self, metadata: Sequence[tuple[str, str | bytes]], tenant: str = "") -> Iterator[CallRecord]:
        """Record one call, the body of the `with` block; `tenant` is its caller's, if the server has tenants.

        The body sets the status of an error. Any other exception counts as CANCELLED.
        """
        record = CallRecord(metadata, tenant)
        try:
            yield record
            record.status = record.status or "OK"
        finally:
            record.status = record.status or "CANCELLED"
            record.ended_s = monotonic()
            self.metrics.count(record)
            record.log()
            if self._trace is not None:
                self._trace(record)
            if self._ended is not None:
                self._ended(record)

    def __repr__(self) -> str:
        return f"<RequestWatch traced={self._trace is not None}>"
