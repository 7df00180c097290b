"""The counters of the engine's thread as Prometheus metrics, made at each scrape.

The invariant: a scrape reads plain numbers, and never makes the engine's thread wait.

Not responsible for: the numbers (api/stats.py), or the metrics of calls (metrics_requests.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from gpu_engine.api.adapters import MAX_ADAPTERS, AdapterKind, AdapterUse
from gpu_engine.api.stats import EngineStats, Histogram

_GAUGES = (
    ("sequences_running", "Sequences with a slot", "running"),
    ("sequences_waiting", "Sequences that wait for a slot", "waiting"),
    ("slots", "Number of slots", "num_slots"),
    ("kv_pages_used", "KV pages in use", "pages_used"),
    ("kv_pages_cached", "KV pages without an owner, reusable by prefix match", "pages_cached"),
    ("kv_pages", "Number of KV pages", "num_pages"),
    ("state_snapshots", "Recurrent states that the prefix cache resumes from", "snapshots"),
    (
        "state_snapshots_max",
        "Most recurrent states that the prefix cache keeps; 0: the model has no recurrent layers, or the cache is off",
        "max_snapshots",
    ),
)
_OF_VLLM: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:num_requests_running", "lockstep_sequences_running under vLLM's name", lambda stats: stats.running),
    ("vllm:num_requests_waiting", "lockstep_sequences_waiting under vLLM's name", lambda stats: stats.waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the KV pages that are in use, in [0, 1], under vLLM's name",
        lambda stats: stats.pages_used / stats.num_pages if stats.num_pages else 0.0,
    ),
)
"""Gauges that routers read from any engine."""
_COUNTERS = (
    (
        "prompt_tokens",
        "Prompt tokens prefilled; the last one is part of the first decode step",
        "prefill_tokens",
    ),
    (
        "prefix_cached_tokens",
        "Prompt tokens that were not prefilled: their KV pages were cached, by another sequence or before a preemption",
        "cached_tokens",
    ),
    ("generation_tokens", "Tokens generated", "generated_tokens"),
    ("step_rows", "Rows of the steps' forwards: the batch's, padding included, and those of prompts", "step_rows"),
    ("deferred_rows", "Times that a step deferred a sequence because its mask rows were late", "deferred_rows"),
    ("dead_ends", "Sequences that ended because no token was legal", "dead_ends"),
    ("matcher_errors", "Sequences that ended because their matcher failed", "matcher_errors"),
    ("preemptions", "Times that a sequence lost its slot to make room", "preemptions"),
)
_BY_DRAFTER = (
    ("draft_tokens", "Drafts verified", "draft_tokens"),
    ("accepted_draft_tokens", "Drafts that were equal to the target's own token", "accepted_draft_tokens"),
    ("jump_forward_tokens", "Jump-forward tokens verified; they count as drafts as well", "jump_forward_tokens"),
    (
        "accepted_jump_forward_tokens",
        "Jump-forward tokens that were equal to the target's own token",
        "accepted_jump_forward_tokens",
    ),
    (
        "index_draft_tokens",
        "Drafts from earlier answers that were verified; they count as drafts as well",
        "index_draft_tokens",
    ),
    (
        "accepted_index_draft_tokens",
        "Drafts from earlier answers that were equal to the target's own token",
        "accepted_index_draft_tokens",
    ),
)
_HISTOGRAMS = (
    ("step_seconds", "Time of a decode step", "step_seconds"),
    ("mask_wait_seconds", "Time that a step with guided sequences waited for mask rows", "mask_wait_seconds"),
    (
        "inter_token_latency_seconds",
        "Time between two steps in a row that gave a sequence tokens",
        "token_gap_seconds",
    ),
    ("tokens_per_step", "Tokens that a step gave a sequence; 0: the sequence was deferred", "tokens_per_step"),
    ("drafts_per_step", "Drafts of a sequence that a step verified", "drafts_per_step"),
)


class EngineCollector(Collector):
    """Collects the families from `stats` at every scrape."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        *,
        drafter: str,
        page_size: int,
        about: Mapping[str, str],
        adapters: Callable[[], Sequence[AdapterUse]] = tuple,
        max_adapters: int = MAX_ADAPTERS,
    ) -> None:
        """Args: see below.

        stats: thread-safe.
        page_size: in tokens.
        about: the labels of `lockstep_info`.
        adapters: the loaded adapters; thread-safe.
        max_adapters: that may be loaded of each kind.
        """
        self._stats, self._adapters, self._max_adapters = stats, adapters, max_adapters
        self._page_size = page_size
        self._drafter = drafter
        self._about = dict(about)

    def collect(self) -> Iterable[Metric]:
        """Yield every family."""
        stats = self._stats()
        info = GaugeMetricFamily("lockstep_info", "Always 1; its labels describe the server", labels=tuple(self._about))
        info.add_metric(tuple(self._about.values()), 1)
        yield info
        for name, documentation, attribute in _GAUGES:
            yield GaugeMetricFamily(f"lockstep_{name}", documentation, value=getattr(stats, attribute))
        for name, documentation, value in _OF_VLLM:
            yield GaugeMetricFamily(name, documentation, value=value(stats))
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Always 1; its labels are the tokens of a KV page and the number of pages, under vLLM's names",
            labels=("block_size", "num_gpu_blocks"),
        )
        cache.add_metric((str(self._page_size), str(stats.num_pages)), 1)
        yield cache
        yield self._lora()
        for name, documentation, attribute in _COUNTERS:
            yield CounterMetricFamily(f"lockstep_{name}", documentation, value=getattr(stats, attribute))
        for name, documentation, attribute in _BY_DRAFTER:
            drafted = CounterMetricFamily(f"lockstep_{name}", documentation, labels=("drafter",))
            drafted.add_metric((self._drafter,), getattr(stats, attribute))
            yield drafted
        expected = GaugeMetricFamily(
            "lockstep_expected_step_seconds",
            "Expected time of a decode step by the rows of its forward, from which the number of drafts is chosen",
            labels=("guided", "rows"),
        )
        for guided, by_rows in stats.step_ms_by_rows.items():
            for rows, ms in by_rows.items():
                expected.add_metric((str(guided).lower(), str(rows)), ms / 1e3)
        yield expected
        for name, documentation, attribute in _HISTOGRAMS:
            yield _family(f"lockstep_{name}", documentation, getattr(stats, attribute))

    def _lora(self) -> GaugeMetricFamily:
        """Return vLLM's gauge of LoRA adapters: routers send a request where its adapter is used already."""
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Time of the scrape; its labels are the LoRA adapters that sequences use, waiting or running, and the most"
            " that may be loaded, under vLLM's names",
            labels=("running_lora_adapters", "waiting_lora_adapters", "max_lora"),
        )
        used = [use.adapter.name for use in self._adapters() if use.in_use and use.adapter.kind is AdapterKind.LORA]
        family.add_metric((",".join(used), "", str(self._max_adapters)), time.time())
        return family

    def __repr__(self) -> str:
        return f"<EngineCollector {self._about}>"


def _family(name: str, documentation: str, histogram: Histogram) -> HistogramMetricFamily:
    total, pairs = 0, []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        pairs.append((bound, float(total)))
    family = HistogramMetricFamily(name, documentation)
    family.add_metric((), pairs, histogram.total)
    return family
