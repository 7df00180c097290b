"""What a sidecar counts, as Prometheus metrics of one registry: compilations, the cache, matchers, rows, fill times.

Invariant: counting costs the step plane a few additions and no lock, because each row of a `FillTimes` has one writer;
everything else is written by the event loop, or read when somebody scrapes. Numbers of a worker outlive it: they are
added up when its engine goes. Not here: who scrapes (`server`, and the engine through GetMetrics).
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np
import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from grammar_service.config import GrammarConfig
from grammar_service.errors import GrammarServiceError, InvalidField, InvalidGrammar, LimitExceeded, NotSupported
from shared_mem.batch import Int32Array

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # time stamps beside every counter

FILL_BOUNDS_S = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1.0)
COMPILE_BOUNDS_S = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)

_BOUNDS_NS = tuple(int(bound * 1e9) for bound in FILL_BOUNDS_S)
_LIMITS = frozenset(setting.name for setting in fields(GrammarConfig))
"""Settings that a LimitExceeded may name; other words of a message must not become labels."""


class FillTimes:
    """A histogram of fill times with a row per slot. Fill threads share no slot, so no two write to one row."""

    def __init__(self, num_slots: int) -> None:
        self._counts = np.zeros((num_slots, len(_BOUNDS_NS) + 1), dtype=np.int64)
        self._sum_ns = np.zeros(num_slots, dtype=np.int64)

    def observe(self, slots: int | Int32Array, ns: int) -> None:
        """Count one record of `slots`, one or several different ones, that took `ns` nanoseconds."""
        self._counts[slots, bisect_left(_BOUNDS_NS, ns)] += 1
        self._sum_ns[slots] += ns

    def totals(self) -> tuple[tuple[int, ...], int]:
        """Return the counts per bucket, not cumulated, and the sum in nanoseconds."""
        return tuple(self._counts.sum(axis=0).tolist()), int(self._sum_ns.sum())

    def __repr__(self) -> str:
        return f"<FillTimes records={int(self._counts.sum())}>"


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """What a worker has counted since its start."""

    records: int = 0
    overruns: int = 0
    filled_rows: int = 0
    refilled_rows: int = 0
    gaps: int = 0
    rebuilds: int = 0
    matchers: int = 0
    """Now."""
    rows_by_kind: dict[str, int] = field(default_factory=dict)
    fill_counts: tuple[int, ...] = (0,) * (len(_BOUNDS_NS) + 1)
    fill_sum_ns: int = 0

    def plus(self, other: WorkerCounts) -> WorkerCounts:
        """Return the sum of both; of the gauge, `other`'s."""
        kinds = {*self.rows_by_kind, *other.rows_by_kind}
        return WorkerCounts(
            records=self.records + other.records,
            overruns=self.overruns + other.overruns,
            filled_rows=self.filled_rows + other.filled_rows,
            refilled_rows=self.refilled_rows + other.refilled_rows,
            gaps=self.gaps + other.gaps,
            rebuilds=self.rebuilds + other.rebuilds,
            matchers=other.matchers,
            rows_by_kind={kind: self.rows_by_kind.get(kind, 0) + other.rows_by_kind.get(kind, 0) for kind in kinds},
            fill_counts=tuple(a + b for a, b in zip(self.fill_counts, other.fill_counts, strict=True)),
            fill_sum_ns=self.fill_sum_ns + other.fill_sum_ns,
        )


class Counted(Protocol):
    """A worker, as far as metrics go."""

    def counts(self) -> WorkerCounts:
        """Return what it has counted."""


Compiled = Callable[[str, bool, float], None]
"""Told (backend, it was in the cache or on its way, milliseconds of the compilation)."""


class GrammarMetrics(Collector):
    """The registry of one sidecar. Written on the event loop; `exposition` may be called from any thread."""

    def __init__(self, cache: Callable[[], dict[str, int]] = dict) -> None:
        """Args: `cache` returns `cached_grammars` and `cache_bytes` of now, or nothing before Configure."""
        self._cache = cache
        self._state: tuple[WorkerCounts, Counted | None] = (WorkerCounts(), None)
        """Of workers that ended, and the one that runs; replaced as a whole, so that a scrape counts nothing twice."""
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
            "Grammars found in the cache or on their way there",
            by_backend,
            registry=self.registry,
        )
        self.cache_misses = Counter(
            "lockstep_grammar_cache_misses", "Grammars that had to be compiled", by_backend, registry=self.registry
        )
        self.refusals = Counter(
            "lockstep_grammar_compile_refusals",
            "Grammars refused: invalid, unsupported, internal, backend_limit, or the setting whose limit was reached",
            ("kind", "reason"),
            registry=self.registry,
        )
        self.registry.register(self)

    def attach(self, worker: Counted) -> None:
        """An engine's worker runs."""
        self._state = (self._state[0], worker)

    def detach(self) -> None:
        """It ends; what it counted stays."""
        past, worker = self._state
        if worker is not None:
            self._state = (past.plus(worker.counts()).plus(WorkerCounts()), None)

    @contextlib.contextmanager
    def compilation(self, kind: str) -> Iterator[Compiled]:
        """Count what comes of a request to compile: the block calls what it is given, or raises."""

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
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Yield what is counted elsewhere."""
        (past, worker), cache = self._state, self._cache()
        now = past.plus(worker.counts() if worker is not None else WorkerCounts())
        yield _gauge("engine_attached", "1 while an engine's segment is mapped", int(worker is not None))
        yield _gauge("matchers", "Matchers that stand in slots", now.matchers)
        yield _gauge("cached_grammars", "Compiled grammars kept", cache.get("cached_grammars", 0))
        yield _gauge("cache_bytes", "Memory of the compiled grammars kept", cache.get("cache_bytes", 0))
        yield _counter("records", "Slots answered, one per guided slot and step", now.records)
        yield _counter("overruns", "Steps that the engine had left before they were read", now.overruns)
        yield _counter("filled_rows", "Rows computed", now.filled_rows)
        yield _counter("refilled_rows", "Rows computed again behind the same tokens; 0 is right", now.refilled_rows)
        yield _counter("gaps", "Records that spoke of tokens which never came; the slot was bound again", now.gaps)
        yield _counter("rebuilds", "Matchers made anew because a draft broke them", now.rebuilds)
        rows = CounterMetricFamily(f"{_PREFIX}rows", "Rows answered, drafts' rows included, by kind", labels=("kind",))
        for name, count in sorted(now.rows_by_kind.items()):
            rows.add_metric((name.lower(),), count)
        yield rows
        fill = HistogramMetricFamily(
            f"{_PREFIX}fill_seconds", "Time to answer one slot's rows in a step: move the matcher, fill, publish"
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
            return setting if setting in _LIMITS else "backend_limit"
        case InvalidGrammar() | InvalidField():
            return "invalid"
        case NotSupported():
            return "unsupported"
    return "internal"
