"""Metrics of KV pages between engines: what was sent, what came, and the prompts that were prefilled here instead.

The invariant: used on the event loop; a scrape reads from another thread.

Not responsible for: what a fallback is (api/page_transfer.py).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from gpu_engine.api.page_transfer import Fallback
from gpu_engine.ops.metrics_requests import LATENCY_BOUNDS_S


class TransferMetrics:
    """The metrics of one engine, registered in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"lockstep_{name}", documentation, labels, registry=registry)

        self._sent_pages = counter("transfer_sent_pages", "KV pages sent to decode engines (role=prefill)")
        self._sent_bytes = counter("transfer_sent_bytes", "Bytes of the KV pages sent to decode engines")
        self._pages = counter("transfer_received_pages", "KV pages received from prefill engines (role=decode)")
        self._bytes = counter("transfer_received_bytes", "Bytes of the KV pages received from prefill engines")
        self.fallbacks = counter(
            "transfer_fallbacks",
            "Prompts whose pages, all or from some page on, were prefilled here instead of fetched, by reason",
            ("reason",),
        )
        self._seconds = Histogram(
            "lockstep_transfer_seconds",
            "Time of a fetch of KV pages, from the start of the import to the last page or the failure",
            buckets=LATENCY_BOUNDS_S,
            registry=registry,
        )

    def sent(self, pages: int, size: int) -> None:
        """Count pages that were sent."""
        self._sent_pages.inc(pages)
        self._sent_bytes.inc(size)

    def received(self, pages: int, size: int) -> None:
        """Count pages that came."""
        self._pages.inc(pages)
        self._bytes.inc(size)

    def fetched(self, seconds: float) -> None:
        """Count a fetch that has ended."""
        self._seconds.observe(seconds)

    def fell_back(self, reason: Fallback) -> None:
        """Count a prompt that is prefilled here."""
        self.fallbacks.labels(reason.value).inc()
