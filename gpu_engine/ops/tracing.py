"""OpenTelemetry spans of Generate calls, if OpenTelemetry's SDK and an exporter are installed.

    chat MODEL (server)           the whole call, below the client's `traceparent`
      compile                     the grammar, at the same time as the spans below
      queue, prefill, decode      of each sequence, one after the other

The invariant: the spans of a call are made when it has ended, from its record; tracing costs a running call nothing.
Settings are OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT, ...). Attributes follow the semantic
conventions for generative AI; prompts and answers are never among them.

Not responsible for: the times in a record (access.py, api/request.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from gpu_engine.ops.access import CallRecord, Ended

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

_ENABLING = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
_PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_LARGEST_INTEGER = 2**63 - 1
"""The largest integer of an attribute; an exporter fails on a larger one."""
_SERVERS_FAULT = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Statuses that the conventions count as errors of the server; the others are errors of the client."""


class RequestTracer:
    """Makes the spans of calls. Used on the event loop; the SDK exports them on another thread."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        """Args: `model` is the name of the model in every span."""
        self._tracer = tracer
        self._model = model

    def record(self, call: CallRecord) -> None:
        """Make the spans of a call that has ended. A failure is logged and does not reach the call."""
        try:
            self._record(call)
        except Exception:
            log.exception("the spans of a call could not be made")

    def _record(self, call: CallRecord) -> None:
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        carrier = {key: value for key, value in call.metadata if isinstance(value, str)}
        clock = _Clock()
        span = self._tracer.start_span(
            f"{call.operation} {self._model}",
            context=extract(carrier),
            kind=SpanKind.SERVER,
            attributes=self._attributes(call),
            start_time=clock.ns(call.arrived_s),
        )
        if call.status in _SERVERS_FAULT:
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        if call.compiled_s:
            telemetry = call.ended[0].telemetry if call.ended else None
            hit = {"lockstep.compile.cache_hit": telemetry.compile_cache_hit} if telemetry else {}
            self._child("compile", inside, clock, call.arrived_s, call.compiled_s, hit)
        for ended in call.ended:
            self._sequence(ended, inside, clock)
        span.end(clock.ns(call.ended_s))

    def _sequence(self, ended: Ended, inside: Context, clock: _Clock) -> None:
        times = ended.telemetry
        which = {"lockstep.sequence.index": ended.request.index}
        parts: tuple[tuple[str, float, float, dict[str, Any]], ...] = (
            ("queue", ended.request.arrived_s, times.scheduled_s, {}),
            ("prefill", times.scheduled_s, times.prefilled_s, {}),
            ("decode", times.prefilled_s, times.last_token_s, _decoding(ended)),
        )
        for name, begin_s, end_s, attributes in parts:
            if begin_s and end_s:
                first_token_s = times.first_token_s if name == "decode" else 0.0
                self._child(name, inside, clock, begin_s, end_s, which | attributes, first_token_s)

    def _child(
        self,
        name: str,
        inside: Context,
        clock: _Clock,
        begin_s: float,
        end_s: float,
        attributes: Mapping[str, Any],
        first_token_s: float = 0.0,
    ) -> None:
        span = self._tracer.start_span(name, inside, attributes=attributes, start_time=clock.ns(begin_s))
        if first_token_s:
            span.add_event("first token", timestamp=clock.ns(first_token_s))
        span.end(clock.ns(max(begin_s, end_s)))

    def _attributes(self, call: CallRecord) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": call.operation,
            "gen_ai.provider.name": "lockstep",
            "gen_ai.request.model": self._model,
            "rpc.system": "grpc",
            "rpc.service": "lockstep.engine.v1.Engine",
            "rpc.method": call.method,
        }
        if call.status != "OK":
            attributes["error.type"] = call.status
        if call.tenant:
            attributes["lockstep.tenant"] = call.tenant
        if valid := call.validated:
            sampling, grammar = valid.params.sampling, valid.params.grammar
            attributes |= {
                "gen_ai.response.id": valid.request_id,
                "gen_ai.request.choice.count": valid.n,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                # A seed has 64 bits without a sign; an integer of OpenTelemetry has a sign, and cannot hold every seed.
                "lockstep.seed": str(sampling.seed),
                "gen_ai.output.type": "json" if grammar and "JSON" in grammar.kind.name else "text",
            }
            if sampling.seed <= _LARGEST_INTEGER:
                attributes["gen_ai.request.seed"] = sampling.seed
            if client_id := valid.params.scheduling.client_id:
                attributes["lockstep.client_id"] = client_id
            if valid.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = valid.max_tokens
            if grammar:
                attributes["lockstep.grammar.kind"] = grammar.kind.name.lower()
        if call.ended:
            attributes |= {
                "gen_ai.response.model": self._model,
                "gen_ai.response.finish_reasons": [ended.finish.name.lower() for ended in call.ended],
                "gen_ai.usage.input_tokens": call.prompt_tokens,
                "gen_ai.usage.output_tokens": call.completion_tokens,
            }
        return attributes

    def __repr__(self) -> str:
        return f"<RequestTracer {self._model}>"


class Tracing:
    """A tracer provider configured by the environment; it takes spans until `close`."""

    def __init__(self, environ: Mapping[str, str], exporters: list[str]) -> None:
        """Args: `exporters` are names of installed exporters. Raises the exporter's error for a wrong setting."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        # A service name given here would override the environment's.
        self.provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "lockstep"}))
        for name in exporters:
            (exporter,) = entry_points(group="opentelemetry_traces_exporter", name=name)
            self.provider.add_span_processor(BatchSpanProcessor(exporter.load()()))

    def requests(self, model: str) -> Callable[[CallRecord], None]:
        """Return the function that makes the spans of a call to `model`."""
        return RequestTracer(self.provider.get_tracer("lockstep"), model).record

    def close(self) -> None:
        """Export the remaining spans. Blocks until the exporter has sent them or given up."""
        self.provider.shutdown()


def open_tracing(environ: Mapping[str, str]) -> Tracing | None:
    """Return the tracing that OpenTelemetry's variables configure; None if they enable none, or without an exporter."""
    wanted = environ.get("OTEL_TRACES_EXPORTER", "otlp")
    if (
        not any(environ.get(name) for name in _ENABLING)
        or environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or wanted in ("", "none")
    ):
        return None
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"))
    names = [_PROTOCOLS.get(protocol, protocol) if name == "otlp" else name for name in wanted.split(",")]
    missing = [name for name in names if not entry_points(group="opentelemetry_traces_exporter", name=name)]
    if missing:
        log.info("no traces: no exporter %s is installed (pip install 'lockstep-engine[otel]')", " and ".join(missing))
        return None
    return Tracing(environ, names)


class _Clock:
    """Converts `time.monotonic()` seconds to nanoseconds since 1970."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def ns(self, monotonic_s: float) -> int:
        """Return the time in nanoseconds since 1970."""
        return int(monotonic_s * 1e9) + self._offset_ns


def _decoding(ended: Ended) -> dict[str, Any]:
    times = ended.telemetry
    return {
        "lockstep.steps": times.steps,
        "lockstep.draft_tokens": times.draft_tokens,
        "lockstep.accepted_draft_tokens": times.accepted_draft_tokens,
        "lockstep.mask_wait_ms": times.mask_wait_ms,
        "lockstep.deferred_rows": times.deferred_rows,
    }
