"""One scrape reports both processes: first with a fake engine and a fake grammar process, then with real ones."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from gpu_engine.api.adapters import AdapterUse
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.request import FinishReason, Request, Telemetry, TokenEvent
from gpu_engine.api.stats import EngineStats, Histogram
from gpu_engine.front.port.listening import ServerError
from gpu_engine.ops.metrics_engine import EngineCollector
from gpu_engine.ops.metrics_http import BothProcesses, MetricsServer
from gpu_engine.ops.metrics_requests import RequestWatch
from gpu_engine.server import Parts, open_server
from protos.engine.v1 import engine_pb2 as pb
from tests import metrics_table
from tests.fakes import FakeAdapters, FakeEngine, FakeModel, Script, answers_with
from tests.rpc_client import Client
from tests.waiting import eventually

ENGINE = EngineConfig(max_model_len=256, num_draft_tokens=3)
Scrape = Mapping[tuple[str, ...], float]


async def scrape(address: str) -> Scrape:
    """Return value by (name without lockstep_, label values in the order of their names)."""

    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
            return str(response.read().decode())

    return {
        (sample.name.removeprefix("lockstep_"), *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(await asyncio.to_thread(read))
        for sample in family.samples
    }


class Grammar:
    """A `GrammarSource` that answers with `text`; with `hangs` and no text it never answers."""

    attachments = 2
    process_starts = 1
    silences = 9
    refused_early = 4

    def __init__(self, text: str | None, *, hangs: bool = False) -> None:
        self.text = text
        self.hangs = hangs

    def metrics(self, timeout_s: float) -> Coroutine[Any, Any, bytes | None]:
        return self._metrics()

    async def _metrics(self) -> bytes | None:
        if self.hangs:
            await asyncio.Event().wait()
        return None if self.text is None else self.text.encode()


SIDECAR = """\
# HELP lockstep_grammar_records_total Slots answered
# TYPE lockstep_grammar_records_total counter
lockstep_grammar_records_total 7.0
# HELP process_open_fds Open
# TYPE process_open_fds gauge
process_open_fds 12.0
"""


@pytest.mark.parametrize(("grammar", "up"), [(Grammar(SIDECAR), 1), (Grammar(None), 0), (Grammar(None, hangs=True), 0)])
async def test_a_scrape_has_both_processes_or_reports_that_one_does_not_answer(grammar: Grammar, up: int) -> None:
    both = BothProcesses()
    Counter("lockstep_things", "Of the engine", registry=both.registry).inc(3)
    both.attach(grammar)
    if up:
        both.timeout_s = 60.0
    server = MetricsServer("127.0.0.1:0", both)
    try:
        seen = await scrape(server.address)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            await asyncio.to_thread(urllib.request.urlopen, f"http://{server.address}/v1/models", timeout=20)
    finally:
        await asyncio.to_thread(server.close)
    assert seen["things_total", "engine"] == 3
    assert seen["grammar_up", "engine"] == up
    assert (seen["grammar_attachments_total", "engine"], seen["grammar_process_starts_total", "engine"]) == (2, 1)
    assert seen["grammar_silences_total", "engine"] == 9
    assert seen["grammar_refused_early_total", "engine"] == 4
    assert seen["process_open_fds", "engine"] > 0
    assert seen.get(("grammar_records_total", "sidecar")) == (7 if up else None)
    assert seen.get(("process_open_fds", "sidecar")) == (12 if up else None)


def test_a_step_is_counted_once_and_its_wait_only_when_it_was_guided() -> None:
    histogram, stats = Histogram((1.0, 2.0)), EngineStats()
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 1, 1], 12.0), "a bound is in its own bucket"
    stats.count_step(24, 20.0, 0.0, guided=False)
    stats.count_step(8, 30.0, 1.5, guided=True)
    assert (stats.steps, stats.step_rows, stats.step_ms, stats.mask_wait_ms) == (2, 32, 50.0, 1.5)
    assert (sum(stats.step_seconds.counts), stats.step_seconds.total) == (2, pytest.approx(0.05))
    assert (sum(stats.mask_wait_seconds.counts), stats.mask_wait_seconds.total) == (1, pytest.approx(0.0015))


def test_a_call_that_ends_by_an_error_without_a_status_was_cancelled() -> None:
    registry = CollectorRegistry()
    watch = RequestWatch(registry)
    for error in (None, asyncio.CancelledError()):
        try:
            with watch.call(()):
                if error:
                    raise error
        except asyncio.CancelledError:
            assert error is not None
    assert registry.get_sample_value("lockstep_requests_total", {"status": "OK"}) == 1
    assert registry.get_sample_value("lockstep_requests_total", {"status": "CANCELLED"}) == 1


def parts(script: Script | None = None) -> Parts:
    def measure(request: Request, times: Telemetry) -> None:
        if len(request.prompt_ids) < 5:
            times.scheduled_s = times.first_token_s = request.arrived_s + 0.25

    def build_engine(config: EngineConfig, *_: object) -> FakeEngine:
        engine = FakeEngine(config, script)
        engine.measure = measure
        return engine

    return Parts(lambda config, progress: FakeModel(), build_engine)


def config(tmp_path: Path, **fields: Any) -> ServerConfig:
    return ServerConfig(**{"listen": f"unix:{tmp_path}/s", "metrics_listen": "127.0.0.1:0", "grammar": "none"} | fields)


async def test_calls_are_counted_by_their_outcome(tmp_path: Path) -> None:
    def script(request: Any) -> Any:
        if len(request.prompt_ids) < 5:
            return answers_with("answer")(request)
        return [TokenEvent(request.index, (65,))]

    async with open_server(ENGINE, config(tmp_path), parts=parts(script)) as server, Client(server.address) as client:
        for n in (1, 2):
            request = pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(n=n))
            assert [response async for response in client.generate(request)]
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(client.generate(pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(temperature=-1))))
        async with aclosing(client.generate(pb.GenerateRequest(text="goes on", request_id="mine"))) as call:
            await anext(call)
        assert server.metrics_address is not None
        seen: Scrape = {}
        while ("requests_total", "engine", "CANCELLED") not in seen:
            seen = await scrape(server.metrics_address)
    assert seen["requests_total", "engine", "OK"] == 2
    assert seen["requests_total", "engine", "INVALID_ARGUMENT"] == 1
    assert seen["sequences_total", FinishReason.STOP.name.lower(), "engine"] == 3
    assert seen["time_to_first_token_seconds_bucket", "0.2", "engine"] == 0
    assert seen["time_to_first_token_seconds_bucket", "0.3", "engine"] == 3
    assert seen["request_queue_seconds_sum", "engine"] == pytest.approx(0.75)
    assert seen["request_prompt_tokens_sum", "engine"] == 6
    assert seen["request_generation_tokens_sum", "engine"] == 21
    assert seen["e2e_request_latency_seconds_count", "engine"] == 3
    assert seen["slots", "engine"] == 4


async def test_a_taken_address_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    def load(*_: object) -> Any:
        raise AssertionError

    async with open_server(ENGINE, config(tmp_path, metrics_listen=""), parts=parts()) as server:
        assert server.metrics_address is None, "without the setting nothing listens"
    async with open_server(ENGINE, config(tmp_path), parts=parts()) as server:
        taken = server.metrics_address
        assert taken is not None
        late = config(tmp_path, listen=f"unix:{tmp_path}/t", metrics_listen=taken)
        with pytest.raises(ServerError, match=f"metrics_listen: cannot bind '{taken}'"):
            await open_server(ENGINE, late, parts=Parts(load, parts().build_engine)).__aenter__()


@pytest.mark.parametrize("value", ["9464", ":9464", "host:", "host:99999"])
def test_a_malformed_address_is_rejected(value: str) -> None:
    with pytest.raises(ValueError, match=f"metrics_listen: '{value}' is not host:port"):
        ServerConfig(metrics_listen=value)


def documented(page: str) -> set[str]:
    return {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}


def families_of(seen: Scrape) -> set[str]:
    names = {name[0].removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in seen}
    return {name if ":" in name else f"lockstep_{name}" for name in names if not name.startswith("process_")}


async def test_both_real_processes_are_in_one_scrape_and_a_stopped_one_is_left_out(
    tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    spawned = config(tmp_path, grammar="spawn", grammar_silence_s=600.0, log_format="json")
    async with open_server(ENGINE, spawned, parts=parts()) as server, Client(server.address) as client:
        address, sidecar = server.metrics_address, server.sidecar
        assert address is not None
        assert sidecar is not None
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(client.generate(pb.GenerateRequest(text="hi", grammar=pb.Grammar(regex="("))))
        async with asyncio.timeout(60):
            while not (seen := await scrape(address))["grammar_up", "engine"]:  # noqa: ASYNC110 - late, it is left out
                await asyncio.sleep(0.05)
        assert (seen["grammar_up", "engine"], seen["grammar_engine_attached", "sidecar"]) == (1, 1)
        # The engine warms the grammar process up with one grammar.
        assert seen["grammar_cache_misses_total", "llguidance", "regex", "sidecar"] == 1
        assert seen["grammar_compile_seconds_count", "llguidance", "regex", "sidecar"] == 1
        assert seen["grammar_compile_refusals_total", "regex", "sidecar", "invalid"] == 1
        assert (seen["grammar_process_starts_total", "engine"], seen["grammar_attachments_total", "engine"]) == (1, 1)
        assert seen["grammar_refused_early_total", "engine"] == 0
        for process in ("engine", "sidecar"):
            assert seen["process_resident_memory_bytes", process] > 0
        # A family without any label values yet is not in a scrape.
        assert families_of(seen) <= documented((root / "docs/metrics.md").read_text())
        assert sidecar.pid is not None
        os.kill(sidecar.pid, signal.SIGSTOP)
        try:
            away = await scrape(address)
        finally:
            os.kill(sidecar.pid, signal.SIGCONT)
        assert away["grammar_up", "engine"] == 0
        assert not [name for name in away if "sidecar" in name]
        assert away["requests_total", "engine", "INVALID_ARGUMENT"] == 1

        def loggers() -> set[str]:
            lines = [json.loads(line.getMessage()) for line in caplog.records if line.name == "grammar_service"]
            return {line["logger"] for line in lines}

        await eventually(lambda: loggers() == {"grammar_service.server"})


def test_the_page_lists_every_metric(root: Path) -> None:
    page = (root / "docs/metrics.md").read_text()
    assert page == metrics_table.page(), "run: python -m tests.metrics_table"


def test_routers_find_the_load_under_the_names_of_vllm() -> None:
    stats = EngineStats(num_pages=8, pages_used=2, running=3, waiting=4)
    registry = CollectorRegistry()
    adapters = FakeAdapters()
    for name, path, in_use in (("busy", "a", 2), ("idle", "b", 0), ("virtual", "prompt", 1), ("also-busy", "c", 1)):
        adapters.loaded[name] = AdapterUse(adapters.load(name, path), in_use)
    collector = EngineCollector(
        lambda: stats, drafter="none", page_size=32, about={"model": "m"}, adapters=adapters.listed
    )
    registry.register(collector)
    began_s = time.time()
    gauges = {family.name: family.samples[0] for family in registry.collect() if family.name.startswith("vllm:")}
    lora = gauges.pop("vllm:lora_requests_info")
    assert lora.value >= began_s, "the latest series counts"
    assert lora.labels == {"running_lora_adapters": "also-busy,busy", "waiting_lora_adapters": "", "max_lora": "255"}
    assert {name: sample.value for name, sample in gauges.items()} == {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 4,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:cache_config_info": 1,
    }
    assert gauges["vllm:cache_config_info"].labels == {"block_size": "32", "num_gpu_blocks": "8"}
