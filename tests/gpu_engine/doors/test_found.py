"""Doors are found by their packages, cost nothing until they are wanted, and may be missing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.doors.found import GROUP, Door, found_doors, wanted_doors
from gpu_engine.front.port.listening import ServerError
from gpu_engine.server import Parts, open_server
from protos.kserve.v2 import inference_pb2, inference_pb2_grpc
from tests.fakes import FakeEngine, FakeModel
from tests.gpu_engine.distributions import install

UNUSED = """
import sys
from gpu_engine.doors.found import found_doors
import gpu_engine.server
assert {name for door in found_doors() for name in door.NAMES} == {"kserve", "vllm", "kv_events"}
loaded = [name for name in sys.modules if name.startswith(("smg_grpc_proto", "protos.kserve"))]
assert not loaded, loaded
"""


def test_finding_the_doors_imports_no_service() -> None:
    subprocess.run([sys.executable, "-c", UNUSED], check=True, timeout=120)


def test_a_door_that_is_left_out_is_named_if_it_is_wanted() -> None:
    kserve: Any = next(door for door in found_doors() if "kserve" in door.NAMES)
    assert wanted_doors(ServerConfig(services="kserve"), [kserve]) == [kserve]
    assert wanted_doors(ServerConfig(services="auto"), []) == []
    assert wanted_doors(ServerConfig(services=""), [kserve]) == []
    with pytest.raises(ServerError, match=r"^services: kserve is not installed$"):
        wanted_doors(ServerConfig(services="kserve"), [])


OTHER = """
from gpu_engine.doors.found import Methods

NAMES = frozenset({"other"})
METHODS = Methods("other.Service", tenants=frozenset(), requests=frozenset())
served = []


def is_wanted(names):
    return "auto" in names


def add_to(server, calls, config):
    served.append(config.listen)
    return METHODS.service
"""


async def test_a_server_serves_the_door_of_another_distribution_and_starts_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "door_of_tests", GROUP, OTHER)
    other: Any = next(door for door in found_doors() if "other" in door.NAMES)
    for doors in ([other], []):
        parts = Parts(lambda config, progress: FakeModel(), lambda config, *rest: FakeEngine(config), doors=doors)
        config = ServerConfig(listen=f"unix:{tmp_path}/s{len(doors)}", grammar="none")
        async with open_server(EngineConfig(max_model_len=256), config, parts=parts) as server:
            assert server.calls.serving
    assert other.served == [f"unix:{tmp_path}/s1"]


async def test_doors_say_that_the_server_is_live_and_not_ready_while_its_model_is_loaded(tmp_path: Path) -> None:
    loads, loaded = threading.Event(), asyncio.Event()

    def slowly(config: EngineConfig, progress: object) -> FakeModel:
        assert loads.wait(60)
        return FakeModel()

    async def serve() -> None:
        config = ServerConfig(listen=f"unix:{tmp_path}/s", grammar="none", services="kserve,vllm")
        parts = Parts(slowly, lambda config, *rest: FakeEngine(config))
        async with open_server(EngineConfig(max_model_len=256), config, parts=parts):
            loaded.set()
            await asyncio.Event().wait()

    async def says() -> list[bool]:
        live = await kserve.ServerLive(inference_pb2.ServerLiveRequest(), wait_for_ready=True, timeout=20)
        ready = await kserve.ServerReady(inference_pb2.ServerReadyRequest(), timeout=20)
        model = await kserve.ModelReady(inference_pb2.ModelReadyRequest(name="embedded"), timeout=20)
        health = await wire.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=20)
        return [live.live, ready.ready, model.ready, health.healthy]

    serving = asyncio.create_task(serve())
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        kserve: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        wire: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        assert await says() == [True, False, False, False]
        loads.set()
        await loaded.wait()
        assert await says() == [True, True, True, True]
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


def test_every_door_says_what_it_serves() -> None:
    doors: list[Door] = found_doors()
    assert len(doors) == 2
    assert all(door.NAMES and door.METHODS.requests <= door.METHODS.tenants for door in doors)
