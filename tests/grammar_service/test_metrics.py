"""What a sidecar counts: the numbers of workers that come and go, refusals by reason, and the exposition."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from grammar_service.errors import GrammarServiceError, InternalError, InvalidGrammar, LimitExceeded, NotSupported
from grammar_service.fill.counters import FILL_BOUNDS_S, FillTimes, WorkerCounts
from grammar_service.metrics import GrammarMetrics
from grammar_service.metrics_http import CannotListen, MetricsListener


def scraped(metrics: GrammarMetrics) -> dict[tuple[str, ...], float]:
    """Return value by (name, label values in the order of their names)."""
    return parsed(metrics.exposition().decode())


def parsed(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("lockstep_grammar_"), *(value for _, value in sorted(sample.labels.items()))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Worked:
    """A worker that has filled as it is told."""

    def __init__(self, *fills_ns: int, matchers: int = 1) -> None:
        self.times = FillTimes(2)
        self.matchers = matchers
        for i, ns in enumerate(fills_ns):
            self.times.observe(i % 2, ns)

    def counts(self) -> WorkerCounts:
        counts, total = self.times.totals()
        return WorkerCounts(
            records=sum(counts),
            matchers=self.matchers,
            rows_by_kind={"APPLY": 2 * sum(counts)},
            fill_counts=counts,
            fill_sum_ns=total,
        )


def test_a_fill_time_falls_into_the_bucket_that_holds_its_bound() -> None:
    times = FillTimes(1)
    for ns in (0, 5_000, 5_001, 10**10):
        times.observe(0, ns)
    counts, total = times.totals()
    assert (counts[0], counts[1], counts[-1], sum(counts)) == (2, 1, 1, 4)
    assert total == 10**10 + 10_001


def test_the_counts_of_a_worker_outlive_it() -> None:
    metrics = GrammarMetrics(lambda: {"cached_grammars": 3, "cache_bytes": 70})
    metrics.attach(Worked(6_000, 400_000))
    metrics.detach()
    between = scraped(metrics)
    assert (between["engine_attached",], between["matchers",], between["records_total",]) == (0, 0, 2)
    metrics.attach(Worked(6_000, matchers=4))
    now = scraped(metrics)
    assert (now["engine_attached",], now["matchers",], now["records_total",]) == (1, 4, 3)
    assert now["rows_total", "apply"] == 6
    assert (now["fill_seconds_bucket", "5e-06"], now["fill_seconds_bucket", "1e-05"]) == (0, 2)
    assert now["fill_seconds_bucket", "+Inf"] == now["fill_seconds_count",] == 3
    assert now["fill_seconds_sum",] == pytest.approx(412e-6)
    assert (now["cached_grammars",], now["cache_bytes",]) == (3, 70)
    assert now["process_resident_memory_bytes",] > 0
    assert len(FILL_BOUNDS_S) + 1 == sum(name[0] == "fill_seconds_bucket" for name in now)


def test_hits_misses_and_compile_times_are_by_kind_and_backend() -> None:
    metrics = GrammarMetrics()
    for backend, hit in (("llguidance", False), ("llguidance", True), ("llguidance", True), ("xgrammar", False)):
        with metrics.compilation("regex") as compiled:
            compiled(backend, hit, 3.0)
    now = scraped(metrics)
    assert now["cache_hits_total", "llguidance", "regex"] == 2
    assert now["cache_misses_total", "llguidance", "regex"] == 1
    assert now["cache_misses_total", "xgrammar", "regex"] == 1
    assert now["compile_seconds_sum", "xgrammar", "regex"] == pytest.approx(0.003)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InvalidGrammar("line 1"), "invalid"),
        (LimitExceeded("compile_timeout_s: the grammar did not compile within 5 s"), "compile_timeout_s"),
        (LimitExceeded("my own words: are no label"), "backend_limit"),
        (NotSupported("xgrammar is not installed"), "unsupported"),
        (InternalError("a worker crashed"), "internal"),
    ],
)
def test_a_rejected_grammar_is_counted_by_its_reason(error: GrammarServiceError, reason: str) -> None:
    metrics = GrammarMetrics()
    with pytest.raises(type(error)), metrics.compilation("lark"):
        raise error
    refusals = {name: value for name, value in scraped(metrics).items() if name[0] == "compile_refusals_total"}
    assert refusals == {("compile_refusals_total", "lark", reason): 1}


def test_the_metrics_listener_answers_and_closes_its_port() -> None:
    metrics = GrammarMetrics()
    listener = MetricsListener("127.0.0.1:0", metrics.registry)
    try:
        with urllib.request.urlopen(f"http://{listener.address}/metrics", timeout=20) as response:
            assert parsed(response.read().decode())["matchers",] == 0
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{listener.address}/", timeout=20)
        with pytest.raises(CannotListen, match=f"metrics_listen: cannot bind '{listener.address}'"):
            MetricsListener(listener.address, metrics.registry)
    finally:
        listener.close()
    MetricsListener(listener.address, metrics.registry).close()
