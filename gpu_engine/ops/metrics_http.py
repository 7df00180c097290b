"""One /metrics for both processes: the engine's metrics, and the grammar process's, which are read through its socket.

The invariants: the label `process` of every sample says which process it is from (engine, sidecar). A grammar process
that does not answer costs a scrape at most twice `SIDECAR_TIMEOUT_S`, and only its samples are missing. The port is
read-only and has neither TLS nor a password: bind it to an address that only the scraper reaches.

Not responsible for: the metrics themselves (metrics_engine.py, metrics_requests.py).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from service_runtime.metrics_path import only_at_its_path

log = logging.getLogger(__name__)

SIDECAR_TIMEOUT_S = 0.2


class GrammarSource(Protocol):
    """The grammar process, as far as metrics are concerned."""

    @property
    def attachments(self) -> int:
        """Number of times that a grammar process was attached."""

    @property
    def silences(self) -> int:
        """How often an attached one was found silent."""

    @property
    def refused_early(self) -> int:
        """Number of grammars that the engine refused because the queue of the grammar process was full."""

    @property
    def process_starts(self) -> int:
        """Number of times that the engine started one; 0 with grammar=connect."""

    def metrics(self, timeout_s: float) -> Coroutine[Any, Any, bytes | None]:
        """Ask for its metrics as text, on the event loop; None if it does not answer in time. Never raises."""


class BothProcesses(Collector):
    """The families of `registry` and of the grammar process, merged by name. Constructed on the event loop."""

    timeout_s: float = SIDECAR_TIMEOUT_S
    """The grammar process may take so long to answer."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        """The engine's own metrics are registered here."""
        ProcessCollector(registry=self.registry)
        self._loop = asyncio.get_running_loop()
        self._grammar: GrammarSource | None = None

    def attach(self, grammar: GrammarSource) -> None:
        """Include the metrics of this grammar process from now on."""
        self._grammar = grammar

    def collect(self) -> Iterable[Metric]:
        """Return every family once. Not on the event loop, which it waits for."""
        families: dict[str, Metric] = {}
        _merge(families, self.registry.collect(), "engine")
        if self._grammar is not None:
            text = self._ask(self._grammar)
            _merge(families, about_grammar(self._grammar, up=text is not None), "engine")
            if text is not None:
                _merge(families, text_string_to_metric_families(text.decode()), "sidecar")
        return families.values()

    def _ask(self, grammar: GrammarSource) -> bytes | None:
        asking = asyncio.run_coroutine_threadsafe(grammar.metrics(self.timeout_s), self._loop)
        try:
            return asking.result(2 * self.timeout_s)  # more than the call has: the event loop may be busy
        except (TimeoutError, concurrent.futures.CancelledError):
            asking.cancel()
            return None

    def __repr__(self) -> str:
        return f"<BothProcesses grammar={self._grammar!r}>"


class CannotListen(RuntimeError):
    """The address is taken, or does not belong to this machine; the message names the setting."""


class MetricsServer:
    """Serves a collector over HTTP on its own thread, from construction to `close`."""

    def __init__(self, listen: str, collector: Collector) -> None:
        """Args: `listen` is "host:port". Raises CannotListen."""
        registry = CollectorRegistry()
        registry.register(collector)
        host, _, port = listen.rpartition(":")
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise CannotListen(f"metrics_listen: cannot bind {listen!r}: {error.strerror or error}") from error
        self._server.set_app(only_at_its_path(make_wsgi_app(registry)))
        self.address = f"{host}:{self._server.server_port}"
        log.info("metrics on http://%s/metrics", self.address)

    def close(self) -> None:
        """Close the port; may take half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __repr__(self) -> str:
        return f"<MetricsServer {self.address}>"


def about_grammar(grammar: GrammarSource, *, up: bool) -> Iterable[Metric]:
    """Yield the families that the engine itself counts about the grammar process."""
    yield GaugeMetricFamily("lockstep_grammar_up", "1 while the grammar process answers", value=int(up))
    yield CounterMetricFamily(
        "lockstep_grammar_attachments", "Times that a grammar process was attached", value=grammar.attachments
    )
    yield CounterMetricFamily(
        "lockstep_grammar_silences",
        "Times that guided requests paused because the grammar process had shown no life for 0.07 s, or for longer on "
        "a busy machine",
        value=grammar.silences,
    )
    yield CounterMetricFamily(
        "lockstep_grammar_refused_early",
        "Grammars that the engine refused because the compile_queue of the grammar process was full",
        value=grammar.refused_early,
    )
    yield CounterMetricFamily(
        "lockstep_grammar_process_starts",
        "Times that the engine started a grammar process; 0 with grammar=connect",
        value=grammar.process_starts,
    )


def _merge(families: dict[str, Metric], more: Iterable[Metric], process: str) -> None:
    for family in more:
        into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        into.samples += [sample._replace(labels=sample.labels | {"process": process}) for sample in family.samples]
