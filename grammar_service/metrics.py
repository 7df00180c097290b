"""The Prometheus metrics of a grammar process: compilations, the cache, matchers, rows, fill times.

Invariant: only the event loop writes here. The counters of a worker are read at each scrape, and added to the counters
of earlier workers when its engine disconnects; so a counter never decreases.

Not responsible for: the worker's own counting (see fill/counters.py), the HTTP listener (see metrics_http.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Protocol

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from grammar_service.config import GrammarConfig
from grammar_service.errors import GrammarServiceError, InvalidField, InvalidGrammar, LimitExceeded, NotSupported
from grammar_service.fill.counters import FILL_BOUNDS_S, WorkerCounts

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # no creation time for each counter

COMPILE_BOUNDS_S = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)

_LIMIT_NAMES = frozenset(setting.name for setting in fields(GrammarConfig))
"""Settings that a LimitExceeded may name. No other word of a message becomes a label."""


class Counted(Protocol):
    """The part of a worker that metrics need."""

    def counts(self) -> WorkerCounts:
        """Return a snapshot of the counters. Any thread."""


OnCompiled = Callable[[str, bool, float], None]
"""Called with (backend, whether the grammar was cached or being compiled already, milliseconds of the compilation)."""


class GrammarMetrics(Collector):
    """The registry of one grammar process. The event loop writes it; `exposition` may be called from any thread."""

    def __init__(self, cache: Callable[[], dict[str, int]] = dict) -> None:
        """Args: `cache` returns the gauges `cached_grammars` and `cache_bytes`, or {} before Configure."""
        self._cache = cache
        self._state: tuple[WorkerCounts, Counted | None] = (WorkerCounts(), None)
        """Counts of the workers that ended, and the running worker: one tuple, so that no scrape counts twice."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        by_backend = ("kind", "backend")
        self.compile_seconds = Histogram(
            "lockstep_grammar_compile_seconds",
            "Compilations that succeeded, by time in a compile worker",
            by_backend,
            buckets=COMPILE_BOUNDS_S,
            registry=self.registry,
        )
        self.cache_hits = Counter(
            "lockstep_grammar_cache_hits",
            "Grammars that were cached, or being compiled for an earlier request",
            by_backend,
            registry=self.registry,
        )
        self.cache_misses = Counter(
            "lockstep_grammar_cache_misses", "Grammars that had to be compiled", by_backend, registry=self.registry
        )
        self.refusals = Counter(
            "lockstep_grammar_compile_refusals",
            "Rejected grammars by reason: invalid, unsupported, internal, backend_limit, or the limit that was reached",
            ("kind", "reason"),
            registry=self.registry,
        )
        self.registry.register(self)

    def attach(self, worker: Counted) -> None:
        """Count the worker of an engine that has connected."""
        self._state = (self._state[0], worker)

    def detach(self) -> None:
        """Keep the counts of the worker, whose engine has disconnected."""
        past, worker = self._state
        if worker is not None:
            self._state = (past.plus(worker.counts()).plus(WorkerCounts()), None)

    @contextlib.contextmanager
    def compilation(self, kind: str) -> Iterator[OnCompiled]:
        """Count one request to compile. The block calls the yielded function, or raises GrammarServiceError."""

        def compiled(backend: str, hit: bool, compile_ms: float) -> None:
            if hit:
                self.cache_hits.labels(kind, backend).inc()
                return
            self.cache_misses.labels(kind, backend).inc()
            self.compile_seconds.labels(kind, backend).observe(compile_ms / 1e3)

        try:
            yield compiled
        except GrammarServiceError as error:
            self.refusals.labels(kind, _reason(error)).inc()
            raise

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of the worker and the cache."""
        (past, worker), cache = self._state, self._cache()
        now = past.plus(worker.counts() if worker is not None else WorkerCounts())
        yield _gauge("engine_attached", "1 while an engine's segment is mapped", int(worker is not None))
        yield _gauge("matchers", "Matchers that are bound to slots", now.matchers)
        yield _gauge("cached_grammars", "Compiled grammars in the cache", cache.get("cached_grammars", 0))
        yield _gauge("cache_bytes", "Memory of the compiled grammars in the cache", cache.get("cache_bytes", 0))
        yield _counter("records", "Answered records: one for each guided slot and step", now.records)
        yield _counter("overruns", "Steps that the engine overwrote before the grammar process read them", now.overruns)
        yield _counter("filled_rows", "Mask rows computed", now.filled_rows)
        yield _counter("gaps", "Records that assumed tokens which never arrived; the slot was bound again", now.gaps)
        yield _counter("rebuilds", "Matchers rebuilt because a draft made the library fail", now.rebuilds)
        rows = CounterMetricFamily(
            f"{_PREFIX}rows", "Answered mask rows by kind, rows after drafts included", labels=("kind",)
        )
        for name, count in sorted(now.rows_by_kind.items()):
            rows.add_metric((name.lower(),), count)
        yield rows
        fill = HistogramMetricFamily(
            f"{_PREFIX}fill_seconds", "Time to answer one record: move the matcher, fill its rows, publish"
        )
        fill.add_metric((), _cumulated(FILL_BOUNDS_S, now.fill_counts), now.fill_sum_ns / 1e9)
        yield fill

    def __repr__(self) -> str:
        past, worker = self._state
        return f"<GrammarMetrics {'attached' if worker else 'idle'} records of earlier engines={past.records}>"


_PREFIX = "lockstep_grammar_"


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, documentation, value=value)


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, documentation, value=value)


def _cumulated(bounds: tuple[float, ...], counts: tuple[int, ...]) -> list[tuple[str, float]]:
    total, pairs = 0, []
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        total += count
        pairs.append((bound, float(total)))
    return pairs


def _reason(error: GrammarServiceError) -> str:
    match error:
        case LimitExceeded():
            setting = str(error).partition(":")[0]
            return setting if setting in _LIMIT_NAMES else "backend_limit"
        case InvalidGrammar() | InvalidField():
            return "invalid"
        case NotSupported():
            return "unsupported"
    return "internal"
