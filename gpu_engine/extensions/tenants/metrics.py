"""Usage by tenant as Prometheus metrics, made at each scrape from the accounts.

Invariant: the label `tenant` has the names that the file of tenants has had since the start, so clients cannot make
series. A scrape reads plain numbers from another thread.

Not responsible for: the numbers (see accounts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gpu_engine.extensions.tenants.accounts import Account


class TenantCollector(Collector):
    """The accounts of one server."""

    def __init__(self, accounts: Callable[[], Collection[Account]]) -> None:
        self._accounts = accounts

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        sequences = GaugeMetricFamily(
            "lockstep_tenant_sequences", "Sequences of a tenant that run or wait", labels=("tenant",)
        )
        tokens = CounterMetricFamily(
            "lockstep_tenant_tokens",
            "Tokens of a tenant: of its prompts, cached ones included, and of its answers",
            labels=("tenant", "kind"),
        )
        requests = CounterMetricFamily(
            "lockstep_tenant_requests", "Requests of a tenant that ended, by gRPC status", labels=("tenant", "status")
        )
        refusals = CounterMetricFamily(
            "lockstep_tenant_refusals",
            "Requests of a tenant that a limit of its account refused, by limit",
            labels=("tenant", "limit"),
        )
        for account in self._accounts():
            sequences.add_metric([account.name], account.sequences)
            tokens.add_metric([account.name, "prompt"], account.prompt_tokens)
            tokens.add_metric([account.name, "answer"], account.answer_tokens)
            for status, count in account.requests.copy().items():
                requests.add_metric([account.name, status], count)
            for limit, count in account.refusals.copy().items():
                refusals.add_metric([account.name, limit], count)
        yield from (sequences, tokens, requests, refusals)
