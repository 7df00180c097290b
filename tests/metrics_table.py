"""Writes the tables of docs/metrics.md from the code: `python -m tests.metrics_table`.

The invariant: every name, type, label and sentence between the page's markers comes from the code; a test compares the
page with `page()`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry, Metric
from starlette.types import Receive, Scope, Send

from gpu_engine.api.stats import EngineStats
from gpu_engine.extensions.tenants.accounts import Account
from gpu_engine.extensions.tenants.metrics import TenantCollector
from gpu_engine.extensions.transfer.metrics import TransferMetrics
from gpu_engine.ops.metrics_engine import EngineCollector
from gpu_engine.ops.metrics_http import about_grammar
from gpu_engine.ops.metrics_requests import RequestWatch
from grammar_service.fill.counters import WorkerCounts
from grammar_service.metrics import GrammarMetrics
from http_gateway.engines.fleet import Fleet
from http_gateway.http.metrics import GatewayMetrics
from protos.engine.v1 import engine_pb2 as pb
from service_runtime.tenants import Tenant

PAGE = Path(__file__).resolve().parents[1] / "docs/metrics.md"


class NoGrammar:
    """A `GrammarSource` without values: the table needs the names of its families alone."""

    attachments = process_starts = refused_early = silences = 0

    async def metrics(self, timeout_s: float) -> bytes | None:
        return None


def engine_families() -> list[Metric]:
    """Return the engine's families, each with a sample that carries its labels."""
    registry = CollectorRegistry()
    about = dict.fromkeys(("version", "model", "dtype", "device"), "")
    stats = EngineStats(step_ms_by_rows={False: {1: 1.0}})
    registry.register(EngineCollector(lambda: stats, drafter="ngram", page_size=16, about=about))
    watch = RequestWatch(registry)
    watch.metrics.requests.labels("OK")
    watch.metrics.sequences.labels("stop")
    TransferMetrics(registry).fallbacks.labels("gone")
    account = Account(Tenant(name="acme"), 1, 1, lambda: 0.0)
    account.requests["OK"] += 1
    account.refusals["max_waiting"] += 1
    registry.register(TenantCollector(lambda: [account]))
    return [*registry.collect(), *about_grammar(NoGrammar(), up=False)]


def sidecar_families() -> list[Metric]:
    """Return the families of the grammar process, without `process_*`."""

    class Worked:
        def counts(self) -> WorkerCounts:
            return WorkerCounts(rows_by_kind={"APPLY": 1})

    metrics = GrammarMetrics()
    metrics.attach(Worked())
    for by_backend in (metrics.compile_seconds, metrics.cache_hits, metrics.cache_misses):
        by_backend.labels("regex", "llguidance")
    metrics.refusals.labels("regex", "invalid")
    return [family for family in metrics.registry.collect() if not family.name.startswith("process_")]


class ServingEngine:
    """An `Engine` of a gateway that serves one model."""

    names: ClassVar = ("m",)
    address, serves = "", True
    info = pb.GetModelInfoResponse()

    async def stats(self) -> pb.GetStatsResponse:
        return pb.GetStatsResponse()


def gateway_families() -> list[Metric]:
    """Return the families of the gateway, each with a sample that carries its labels."""
    engine: Any = ServingEngine()
    metrics = GatewayMetrics(Fleet([engine]), frozenset())
    asyncio.run(one_request(metrics))
    return list(metrics.registry.collect())


async def one_request(metrics: GatewayMetrics) -> None:
    """Let the gateway count a request, and ask its engines."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer nothing."""

    async def nothing(*_: object) -> Any:
        """Take or give nothing."""

    await metrics.watch(answer)({"type": "http", "path": "/"}, nothing, nothing)
    await metrics.text()


def table(families: Iterable[Metric]) -> str:
    """Return a Markdown table of `families`, sorted by name."""
    lines = ["| metric | type | labels | what |", "|---|---|---|---|"]
    for family in sorted(families, key=lambda family: family.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in family.samples[0].labels if label != "le")
        lines.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(lines)


def page() -> str:
    """Return the page with its tables made from the code."""
    text = PAGE.read_text(encoding="utf-8")
    for name, families in (
        ("engine", engine_families()),
        ("sidecar", sidecar_families()),
        ("gateway", gateway_families()),
    ):
        begin, end = f"<!-- {name}:begin -->\n", f"\n<!-- {name}:end -->"
        text = text[: text.index(begin) + len(begin)] + table(families) + text[text.index(end) :]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
