"""The services of the public port over a real gRPC connection, for tenants, with a fake engine after them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from gpu_engine.api.admission import EngineAdmission
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.limits import Limits
from gpu_engine.doors.found import found_doors
from gpu_engine.doors.kserve.inference_servicer import add_to as add_kserve_to
from gpu_engine.doors.vllm_wire.vllm_servicer import add_to as add_vllm_to
from gpu_engine.extensions.tenants.access import TenantAccess
from gpu_engine.extensions.tenants.accounts import Tenants
from gpu_engine.front.calls import Calls
from gpu_engine.front.port.malformed import ParsedRequests
from gpu_engine.front.servicer import EngineServicer
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from service_runtime.tenants import tenant_file
from tests.fakes import FakeEngine, FakeGrammar, FakeModel, Script

ACME, BETA, BOSS = "acme-token-of-tests", "beta-token-of-tests", "boss-token-of-tests"
FILE = f"""
[tenants.acme]
tokens = ["{ACME}"]
max_running = 1
max_waiting = 1
[tenants.beta]
tokens = ["{BETA}"]
adapters = ["legal"]
[tenants.boss]
tokens = ["{BOSS}"]
operator = true
"""
Metadata = tuple[tuple[str, str], ...]


def bearer(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),)


AS_ACME, AS_BETA, AS_BOSS = map(bearer, (ACME, BETA, BOSS))


@dataclass
class Setup:
    channel: grpc.aio.Channel
    stub: engine_pb2_grpc.EngineAsyncStub
    engine: FakeEngine
    calls: Calls
    grammar: FakeGrammar
    tenants: Tenants
    path: Path
    """Of the tenants' file."""

    async def texts(self, request: pb.GenerateRequest, metadata: Metadata) -> str:
        return "".join([r.text async for r in self.stub.Generate(request, metadata=metadata, timeout=20)])


@asynccontextmanager
async def serving(tmp_path: Path, script: Script | None = None, file: str = FILE) -> AsyncIterator[Setup]:
    path = tmp_path / "tenants.toml"
    path.write_text(file)
    engine, grammar, model = FakeEngine(EngineConfig(max_model_len=256), script), FakeGrammar(), FakeModel()
    limits = Limits.of(engine.config, ServerConfig(max_n=8), vocab_size=320, max_model_len=256, outputs=model.outputs)
    tenants = Tenants(tenant_file(path), admission=EngineAdmission(8, 16))
    calls = Calls(engine, model, limits, grammar, accounts=tenants)
    calls.warm()
    server = grpc.aio.server(
        interceptors=[TenantAccess(tenants, [door.METHODS for door in found_doors()]), ParsedRequests()]
    )
    engine_pb2_grpc.add_EngineServicer_to_server(EngineServicer(calls, version="1.2"), server)
    add_vllm_to(server, calls, "1.2", kv_events=True)
    add_kserve_to(server, calls, "1.2")
    address = f"unix:{tmp_path}/s"
    server.add_insecure_port(address)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            yield Setup(channel, stub, engine, calls, grammar, tenants, path)
    finally:
        await server.stop(None)
        engine.close(5)


def ask(text: str = "hi", **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)  # type: ignore[arg-type]


async def refusal(call: object) -> tuple[grpc.StatusCode, str]:
    """Return the status and the message of a call that is refused."""
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall | grpc.aio.StreamStreamCall):
            async for _ in call:
                pass
        else:
            await call  # type: ignore[misc]
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    raise AssertionError("the call was not refused")
