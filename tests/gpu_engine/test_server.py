"""The whole process without its engine: order of start and close, health, reflection, limits of the transport."""

from __future__ import annotations

import asyncio
import gc
import os
import struct
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.ports import GrammarPort
from gpu_engine.api.request import GrammarKind, GrammarSpec
from gpu_engine.front.port.listening import ServerError
from gpu_engine.ops.core_split import CoreSplit
from gpu_engine.server import GUIDED, SERVICE, EarlyVocabulary, Parts, open_server
from gpu_engine.sidecar.early import KeptSetup
from gpu_engine.sidecar.link import GrammarSetup
from protos.engine.v1 import engine_pb2 as pb
from service_runtime.cores import usable_cores
from shared_mem.handover import SOCKET_NAME, listen
from tests.fakes import ByteTokenizer, FakeEngine, FakeModel, answers_with
from tests.gpu_engine.fake_servers import ENGINE, config, parts
from tests.gpu_engine.made_requests import made
from tests.rpc_client import Client
from tests.waiting import eventually

INVALID = grpc.StatusCode.INVALID_ARGUMENT
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(address: str, service: str = SERVICE) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True)).status)


async def answer_of(client: Client) -> str:
    return "".join([r.text async for r in client.generate(pb.GenerateRequest(text="x"))])


async def refusal_of(client: Client, code: grpc.StatusCode, **fields: Any) -> str:
    """Return the message of a request that is refused with this code."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(client.generate(pb.GenerateRequest(**fields)))
    assert caught.value.code() is code
    return str(caught.value.details())


async def until_health(address: str, status: int, service: str = GUIDED) -> None:
    async with asyncio.timeout(60):
        while await health_of(address, service) != status:  # noqa: ASYNC110 - told by a background task
            await asyncio.sleep(0.01)


async def test_a_server_answers_reports_serving_and_lists_its_service(tmp_path: Path) -> None:
    engines: list[FakeEngine] = []
    async with open_server(ENGINE, config(tmp_path), parts=parts(answers_with("yes"), engines)) as server:
        async with Client(server.address) as client:
            assert await answer_of(client) == "yes"
        assert await health_of(server.address) == SERVING
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            response = await anext(aiter(call))
        assert SERVICE in {service.name for service in response.list_services_response.service}
    assert engines[0].closed


async def test_a_call_waits_for_the_model_on_a_connection_that_is_made_at_once(tmp_path: Path) -> None:
    """A client's connection has a limit of its own, which a large model's loading may exceed."""
    loads = threading.Event()

    def slowly(config: EngineConfig, progress: object) -> FakeModel:
        assert loads.wait(60)
        return FakeModel()

    async def serve() -> None:
        async with open_server(ENGINE, config(tmp_path), parts=replace(parts(answers_with("yes")), load_model=slowly)):
            await finished.wait()

    finished, address = asyncio.Event(), f"unix:{tmp_path}/s"
    async with asyncio.TaskGroup() as group, Client(address) as client:
        group.create_task(serve())
        for service in (SERVICE, "", GUIDED, "inference.GRPCInferenceService"):
            assert await health_of(address, service) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await anext(client.generate(pb.GenerateRequest(text="x"), timeout_s=0.2))
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        answer = group.create_task(answer_of(client))
        async with grpc.aio.insecure_channel(address) as channel:
            unknown = asyncio.ensure_future(channel.unary_unary("/nobody/Knows")(b""))
            done, _ = await asyncio.wait({answer, unknown}, timeout=0.2)
            assert not done
            loads.set()
            assert await answer == "yes"
            with pytest.raises(grpc.aio.AioRpcError) as nowhere:
                await unknown
            assert nowhere.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await health_of(address) == SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="there is no 'nobody'"):
            await health_of(address, "nobody")
        finished.set()


async def test_no_grammar_process_starts_for_a_model_that_is_not_there(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def missing(config: EngineConfig, progress: object) -> None:
        raise FileNotFoundError(f"model: {config.model} is nowhere")

    there = replace(parts(answers_with("yes")), find_model=missing)
    spawning = config(tmp_path, grammar="spawn", grammar_dir=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="model: a/b is nowhere"):
        async with open_server(replace(ENGINE, model="a/b"), spawning, parts=there):
            pass
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert not (tmp_path / SOCKET_NAME).exists()


@pytest.mark.parametrize(("num_devices", "device"), [(0, "cpu"), (1, "cuda")])
async def test_the_engine_gets_the_device_that_auto_resolves_to(tmp_path: Path, num_devices: int, device: str) -> None:
    engines: list[FakeEngine] = []
    on_device = replace(parts(answers_with("yes"), engines), num_cuda_devices=lambda: num_devices)
    async with open_server(ENGINE, config(tmp_path), parts=on_device):
        assert ENGINE.device == "auto"
        assert engines[0].config.device == device


async def test_the_model_has_cores_of_its_own_while_it_serves(tmp_path: Path) -> None:
    seen: list[tuple[str, list[int]]] = []

    def look(who: str) -> None:
        seen.append((who, sorted(os.sched_getaffinity(0))))

    class Placed(FakeEngine):
        def start(self) -> None:
            look("engine")
            super().start()

    def load(config: EngineConfig, progress: object) -> FakeModel:
        look("load")
        return FakeModel()

    def build(config: EngineConfig, model: Any, channel: object, grammar: GrammarPort | None) -> FakeEngine:
        look("build")
        return Placed(config, answers_with("yes"))

    every = sorted(os.sched_getaffinity(0))
    engine_config = EngineConfig(device="cpu", max_model_len=256, num_threads=max(1, len(every) - 1))
    if CoreSplit.of(engine_config, frozenset(every), usable_cores()) is None:
        pytest.skip("needs two cores and no quota")
    async with open_server(engine_config, config(tmp_path), parts=Parts(load, build)):
        look("loop")
        await asyncio.to_thread(look, "another thread")
    look("after")
    assert seen == [
        *((who, every) for who in ("load", "build", "engine")),
        ("loop", every[-1:]),
        ("another thread", every[-1:]),
        ("after", every),
    ]


async def test_the_grammar_process_is_prepared_while_the_weights_are_read_and_at_once_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    model, early = tmp_path / "model.gguf", EarlyVocabulary()
    model.write_bytes(b"weights")
    stops, prepared = [(2,)], list[bool]()

    def preparing() -> bool:
        return any(task.get_name() == "prepare the grammar process" for task in asyncio.all_tasks(loop))

    def load(config: EngineConfig, progress: object) -> FakeModel:
        loaded = FakeModel(eos_token_ids=stops[0])
        prepared.append(preparing())
        early.known(loaded)
        return loaded

    loop = asyncio.get_running_loop()
    build = parts().build_engine
    ours = Parts(load, build, find_model=lambda config, progress: model, early=early)
    for stop, at_once in (((2,), False), ((2,), True), ((5,), True), ((5,), True)):
        stops[0] = stop
        async with open_server(ENGINE, config(tmp_path, grammar="spawn"), parts=ours):
            pass
        assert prepared[-1] is at_once
    (kept,) = (tmp_path / "cache" / "vocabularies").iterdir()
    assert KeptSetup(kept).read() == GrammarSetup(ByteTokenizer().backend_tokenizer.to_str().encode(), 320, (5,), 0)


async def test_health_is_not_serving_during_the_warm_up(tmp_path: Path) -> None:
    warming, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    class Cold(FakeEngine):
        def start(self) -> None:
            loop.call_soon_threadsafe(warming.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(20)

    cold = Parts(lambda config, progress: FakeModel(), lambda c, m, channel, grammar: Cold(c, answers_with("ok")))
    asked: list[pb.GenerateResponse] = []

    async def look() -> None:
        await warming.wait()
        address = f"unix:{tmp_path}/s"
        async with Client(address) as client:
            early = asyncio.create_task(anext(client.generate(pb.GenerateRequest(text="x"))))
            assert await health_of(address) == NOT_SERVING
            go_on.set()
            asked.append(await early)

    looking = asyncio.create_task(look())
    async with open_server(ENGINE, config(tmp_path), parts=cold):
        await looking
    assert asked


async def test_a_prompt_of_ten_megabytes_is_refused_by_name(tmp_path: Path) -> None:
    async with open_server(ENGINE, config(tmp_path), parts=parts()) as server, Client(server.address) as client:
        refusal = await refusal_of(client, INVALID, text="x" * (10 << 20))
    assert refusal == "text: has 10485760 bytes, at most 4194304 (max_prompt_bytes) are allowed"


async def test_a_refused_request_is_freed_at_once(tmp_path: Path) -> None:
    """Its grammar may have megabytes, and the collector of Python finds a cycle of old objects minutes later."""

    def held() -> int:
        return sum(type(each) is GrammarSpec and each.source == "re[f]used" for each in gc.get_objects())

    started = open_server(ENGINE, config(tmp_path), parts=parts(answers_with("yes")))
    async with started as server, Client(server.address) as client:
        gc.collect()
        gc.disable()
        try:
            grammar = pb.Grammar(regex="re[f]used")
            refusal = await refusal_of(client, grpc.StatusCode.FAILED_PRECONDITION, text="x", grammar=grammar)
            assert "runs without a grammar process" in refusal
            await eventually(lambda: not held())
        finally:
            gc.enable()


@pytest.mark.parametrize("method", ["Generate", "GenerateMany", "Compile", "Abort", "GetStats"])
@pytest.mark.parametrize("content", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe"])
async def test_malformed_bytes_are_an_invalid_argument(
    tmp_path: Path, method: str, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    if method == "GetStats" and content[0] == 0x0A:
        content = b"\x0b"  # a message without fields takes any field, and no group that does not end
    async with (
        open_server(ENGINE, config(tmp_path), parts=parts(answers_with("yes"))) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SERVICE}/{method}", bytes, bytes)(content)
        async with Client(server.address) as client:
            assert await answer_of(client) == "yes"
    assert caught.value.code() is INVALID
    assert "is malformed: " in str(caught.value.details())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_taken_port_is_reported_at_once() -> None:
    loopback = ServerConfig(listen="127.0.0.1:0", grammar="none")
    async with open_server(ENGINE, loopback, parts=parts()) as server:
        assert not server.address.endswith(":0")
        with pytest.raises(ServerError, match=f"listen: cannot bind '{server.address}'"):
            async with open_server(ENGINE, ServerConfig(listen=server.address, grammar="none"), parts=parts()):
                pass


LISTENER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("prefix", ["unix:", "unix://"])
async def test_a_unix_socket_of_another_process_is_left_alone(tmp_path: Path, prefix: str) -> None:
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LISTENER, str(tmp_path / "s")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert other.stdout is not None
    await other.stdout.readline()
    try:
        with pytest.raises(ServerError, match=rf"listen: another process \({other.pid}\) listens on {tmp_path}/s"):
            async with open_server(ENGINE, config(tmp_path, listen=f"{prefix}{tmp_path}/s"), parts=parts()):
                pass
    finally:
        other.kill()
        await other.wait()
    async with open_server(ENGINE, config(tmp_path), parts=parts()) as server:  # the file is still there
        assert await health_of(server.address) == SERVING


async def test_a_model_that_fails_to_load_closes_every_part(tmp_path: Path) -> None:
    def broken(config: EngineConfig, progress: object) -> FakeModel:
        raise FileNotFoundError("model: nowhere")

    broken_parts = Parts(broken, parts().build_engine)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        async with open_server(ENGINE, config(tmp_path, grammar="spawn"), parts=broken_parts):
            pass
    async with open_server(ENGINE, config(tmp_path), parts=parts()):
        pass


async def test_it_spawns_and_uses_a_grammar_process(tmp_path: Path) -> None:
    engines: list[FakeEngine] = []
    ports: list[GrammarPort] = []
    spawn = config(tmp_path, grammar="spawn", grammar_dir=str(tmp_path / "g"))
    async with (
        open_server(ENGINE, spawn, parts=parts(None, engines, ports)) as server,
        Client(server.address) as client,
    ):
        assert server.sidecar is not None
        assert pb.BACKEND_LLGUIDANCE in (await client.info()).backends
        spec = GrammarSpec(GrammarKind.REGEX, "[ab]+")
        request = made([1], max_tokens=4, grammar=spec)
        ports[0].open(0, 1, request, (ord("a"),))
        await eventually(lambda: engines[0].opened or engines[0].failed)
        assert engines[0].failed == []
        async with asyncio.timeout(20):
            # The matcher is handed to the worker thread, which counts it at its next look.
            while (stats := await client.stats()).matchers == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (stats.grammar_ready, stats.grammar_starts, stats.matchers, stats.cached_grammars) == (True, 1, 1, 2)
        refusal = await refusal_of(client, INVALID, text="x", grammar=pb.Grammar(regex="("))
        assert refusal.startswith("grammar: ")
        server.sidecar.kill()
        await eventually(lambda: engines[0].outages[-2:] == ["lost", "restored"])
        pid = server.sidecar.pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_grammar_process_of_another_release_stops_the_start(tmp_path: Path) -> None:
    version_skew = struct.pack("<8sIIQIH", b"LKSTPSEG", 1, 99, 0, 1, 0)
    listener = listen(tmp_path / SOCKET_NAME)
    listener.setblocking(False)

    async def refuse() -> None:
        loop = asyncio.get_running_loop()
        peer, _ = await loop.sock_accept(listener)
        with peer:
            await loop.sock_recv(peer, 64)  # or a close would meet the hello on its way, and be a hang-up
            await loop.sock_sendall(peer, version_skew)

    refusing = asyncio.create_task(refuse())
    connect = config(tmp_path, grammar="connect", grammar_dir=str(tmp_path))
    with listener, pytest.raises(ServerError, match=r"version \d+ here, 99 in the peer"):
        async with open_server(ENGINE, connect, parts=parts()):
            await asyncio.sleep(20)
    await refusing


async def test_health_reports_guided_service_separately(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "g").mkdir()
    elsewhere = config(tmp_path, grammar="connect", grammar_dir=str(tmp_path / "g"), grammar_wait_s=0.2)
    async with open_server(ENGINE, elsewhere, parts=parts()) as server:
        assert await health_of(server.address) == SERVING
        (warning,) = (r.message for r in caplog.records if r.message.startswith("serving before"))
        assert "within 0.2 s" in warning
        assert warning.endswith("is another attached?")
        await until_health(server.address, NOT_SERVING)
        command = [sys.executable, "-m", "grammar_service", "--dir", str(tmp_path / "g")]
        child = await asyncio.create_subprocess_exec(*command, cwd=root)
        try:
            await until_health(server.address, SERVING)
            child.kill()
            await until_health(server.address, NOT_SERVING)
            assert await health_of(server.address) == SERVING
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()
