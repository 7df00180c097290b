"""Spans of calls, exported into memory; no test opens a connection."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.limits import Limits
from gpu_engine.api.request import Request, Telemetry
from gpu_engine.front.calls import Calls
from gpu_engine.front.servicer import EngineServicer
from gpu_engine.ops.access import CallRecord
from gpu_engine.ops.metrics_requests import RequestWatch
from gpu_engine.ops.tracing import RequestTracer, open_tracing
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from tests.fakes import FakeEngine, FakeGrammar, FakeModel, answers_with

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def tracer(spans: InMemorySpanExporter) -> RequestTracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return RequestTracer(provider.get_tracer("test"), "tiny")


def measure(request: Request, times: Telemetry) -> None:
    at = request.arrived_s
    times.scheduled_s, times.prefilled_s, times.first_token_s, times.last_token_s = at + 1, at + 3, at + 4, at + 9
    times.steps, times.accepted_draft_tokens, times.compile_cache_hit = 4, 2, True


async def called(tmp_path: Path, spans: InMemorySpanExporter, request: pb.GenerateRequest) -> list[ReadableSpan]:
    engine = FakeEngine(EngineConfig(max_model_len=256), answers_with("answer"))
    engine.measure = measure
    limits = Limits.of(engine.config, ServerConfig(), vocab_size=320, max_model_len=256)
    grammar = FakeGrammar({"bad": InvalidRequest("grammar", "line 1: no")})
    watch = RequestWatch(CollectorRegistry(), tracer(spans).record)
    calls = Calls(engine, FakeModel(), limits, grammar, watch=watch)
    servicer = EngineServicer(calls, version="1")
    calls.warm()
    server = grpc.aio.server()
    engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
            call = engine_pb2_grpc.EngineStub(channel).Generate(request, metadata=(("traceparent", PARENT),))
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert [response async for response in call]
    finally:
        await server.stop(None)
        engine.close(5)
    return list(spans.get_finished_spans())


def lasts_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def test_a_call_is_a_span_of_its_caller_with_its_parts_below(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    ask = pb.GenerateRequest(
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="secret")]),
        request_id="r-1",
        client_id="team",
        grammar=pb.Grammar(json_schema="{}"),
        sampling=pb.SamplingParams(max_tokens=20, seed=2**64 - 1),
    )
    *parts, whole = await called(tmp_path, spans, ask)
    assert whole.parent is not None
    assert f"{whole.context.trace_id:032x}-{whole.parent.span_id:016x}" == PARENT[3:-3]
    assert (whole.name, whole.kind, whole.status.status_code) == ("chat tiny", SpanKind.SERVER, StatusCode.UNSET)
    seen = dict(whole.attributes or {})
    assert seen["gen_ai.operation.name"] == "chat"
    assert (seen["gen_ai.response.id"], seen["lockstep.client_id"]) == ("r-1", "team")
    assert seen["gen_ai.request.max_tokens"] == 20
    assert seen["lockstep.seed"] == str(2**64 - 1), "whole, though an integer of a span has 63 bits"
    assert not [name for name, value in seen.items() if isinstance(value, int) and value >= 2**63]
    assert (seen["gen_ai.output.type"], seen["lockstep.grammar.kind"]) == ("json", "json_schema")
    assert seen["gen_ai.response.finish_reasons"] == ("stop",)
    assert (seen["gen_ai.usage.input_tokens"], seen["gen_ai.usage.output_tokens"]) == (23, 7)
    assert not [value for value in map(str, seen.values()) if "secret" in value]
    assert [part.name for part in parts] == ["compile", "queue", "prefill", "decode"]
    assert all(part.parent is not None and part.parent.span_id == whole.context.span_id for part in parts)
    assert [lasts_s(part) for part in parts[1:]] == pytest.approx([1, 2, 6], abs=1e-5)
    assert (parts[0].attributes or {})["lockstep.compile.cache_hit"] is True
    assert (parts[3].attributes or {})["lockstep.accepted_draft_tokens"] == 2
    (first,) = parts[3].events
    assert (first.timestamp - (parts[3].start_time or 0)) / 1e9 == pytest.approx(1, abs=1e-5)


async def test_the_span_of_a_rejected_call_has_the_reason_and_is_no_server_error(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    (whole,) = await called(tmp_path, spans, pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=-1)))
    assert (whole.attributes or {})["error.type"] == "INVALID_ARGUMENT"
    assert whole.status.status_code is StatusCode.UNSET
    spans.clear()
    tracer(spans).record(CallRecord(status="INTERNAL", ended_s=1.0))
    (whole,) = spans.get_finished_spans()
    assert whole.status.status_code is StatusCode.ERROR, "an internal error is one of the server"


def test_a_failure_to_trace_does_not_reach_the_call(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def start_span(self, *_: object, **__: object) -> None:
            raise ZeroDivisionError

    RequestTracer(Broken(), "tiny").record(CallRecord(status="OK"))  # type: ignore[arg-type]
    assert "the spans of a call could not be made" in caplog.text


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "x"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"},
    ],
)
def test_tracing_is_off_unless_the_environment_enables_it(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert open_tracing(environ) is None
    assert caplog.text == ""


def test_a_missing_exporter_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    wanted = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "carrier-pigeon"}
    assert open_tracing(wanted) is None
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert (
        line.getMessage() == "no traces: no exporter carrier-pigeon is installed (pip install 'lockstep-engine[otel]')"
    )


PROGRAM = """
import os
from gpu_engine.ops.access import CallRecord
from gpu_engine.ops.tracing import open_tracing
tracing = open_tracing(os.environ)
tracing.requests("tiny")(CallRecord(arrived_s=1.0, ended_s=2.0, status="OK"))
tracing.close()
"""


def test_the_exporter_of_the_environment_gets_the_spans(root: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=root,
        env=environ | {"OTEL_TRACES_EXPORTER": "console"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    span = json.loads(done.stdout)
    assert span["name"] == "text_completion tiny"
    assert span["resource"]["attributes"]["service.name"] == "lockstep"
