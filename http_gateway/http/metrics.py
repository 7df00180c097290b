"""Metrics of the gateway and, under the names that routers read, of its engines.

Invariant: a scrape asks each serving engine once, and reports what it answered; labels have a bounded number of values.

Not responsible for: the engines' own metrics (their `metrics_listen`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from http_gateway.engines.engine import Engine
from http_gateway.engines.fleet import Fleet
from http_gateway.http.stream import CLIENT_GONE, ClientGone
from protos.engine.v1 import engine_pb2 as pb
from service_runtime.aborted_calls import forget_frames

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class GatewayMetrics:
    """The metrics of one gateway."""

    def __init__(self, fleet: Fleet, paths: frozenset[str]) -> None:
        """Args: see below.

        fleet: the engines.
        paths: the paths that are told apart; all others are "other".
        """
        self._fleet, self._paths = fleet, paths
        self.registry = CollectorRegistry()
        self._seen = _EngineGauges()
        self.registry.register(self._seen)
        self._requests = Counter(
            "lockstep_gateway_requests_total",
            "Requests by path and status; 499: the client went away",
            ("path", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "lockstep_gateway_request_seconds",
            "Time from the head of a request to the end of its answer",
            ("path",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._running = Gauge(
            "lockstep_gateway_requests_running", "Requests whose answer has not ended", registry=self.registry
        )

    async def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        engines = self._fleet.engines
        stats = await asyncio.gather(*(_stats(engine) for engine in engines))
        self._seen.stats = [(e, s) for e, s in zip(engines, stats, strict=True) if s is not None]
        self._seen.up = [(e, s is not None) for e, s in zip(engines, stats, strict=True)]
        return generate_latest(self.registry)

    def watch(self, app: ASGIApp) -> ASGIApp:
        """Return the application with every request counted."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            path = scope["path"] if scope["path"] in self._paths else "other"
            began_s, status = time.monotonic(), 500

            async def noting(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            self._running.inc()
            try:
                await app(scope, receive, noting)
            except ClientGone as error:
                status = CLIENT_GONE
                forget_frames(error)  # Starlette's frames hold it, and the request
            finally:
                self._running.dec()
                self._requests.labels(path, str(status)).inc()
                self._seconds.labels(path).observe(time.monotonic() - began_s)

        return counted


async def _stats(engine: Engine) -> pb.GetStatsResponse | None:
    if not engine.serves:
        return None
    try:
        return await engine.stats()
    except grpc.aio.AioRpcError:
        return None  # a scrape in which an engine ends reports it as down


class _EngineGauges(Collector):
    """The last answers of the engines, under the names that llm-d and the Gateway API's endpoint picker read."""

    def __init__(self) -> None:
        self.stats: list[tuple[Engine, pb.GetStatsResponse]] = []
        self.up: list[tuple[Engine, bool]] = []

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        labels = ("model_name", "engine")
        running = GaugeMetricFamily("vllm:num_requests_running", "Sequences that hold a slot", labels=labels)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Sequences that wait for a slot", labels=labels)
        used = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the KV cache's pages in use", labels=labels)
        pages = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Always 1; its labels are the tokens of a KV page and the number of pages",
            labels=(*labels, "block_size", "num_gpu_blocks"),
        )
        for engine, stats in self.stats:
            values = [engine.names[0] if engine.names else "", engine.address]
            size = engine.info.page_size if engine.info else 0
            pages.add_metric([*values, str(size), str(stats.num_pages)], 1)
            running.add_metric(values, stats.running)
            waiting.add_metric(values, stats.waiting)
            used.add_metric(values, stats.pages_used / max(1, stats.num_pages))
        yield from (running, waiting, used, pages)
        up = GaugeMetricFamily("lockstep_gateway_engine_up", "Whether the engine serves", labels=("engine",))
        for engine, serves in self.up:
            up.add_metric([engine.address], float(serves))
        yield up
