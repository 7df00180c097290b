"""The services of the public port over a real gRPC connection, for tenants, with a fake engine after them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from gpu_engine.api.admission import EngineAdmission
from gpu_engine.api.config import ServerConfig
from gpu_engine.doors.found import found_doors
from gpu_engine.doors.kserve.inference_servicer import add_to as add_kserve_to
from gpu_engine.doors.vllm_wire.vllm_servicer import add_to as add_vllm_to
from gpu_engine.extensions.tenants.access import TenantAccess
from gpu_engine.extensions.tenants.accounts import Tenants
from protos.engine.v1 import engine_pb2 as pb
from service_runtime.tenants import tenant_file
from tests.fakes import Script
from tests.gpu_engine.front import serving as front

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
class Setup(front.Setup):
    tenants: Tenants
    path: Path
    """Of the tenants' file."""

    async def texts(self, request: pb.GenerateRequest, metadata: Metadata) -> str:
        return "".join([r.text async for r in self.stub.Generate(request, metadata=metadata, timeout=20)])


@asynccontextmanager
async def serving(tmp_path: Path, script: Script | None = None, file: str = FILE) -> AsyncIterator[Setup]:
    path = tmp_path / "tenants.toml"
    path.write_text(file)
    tenants = Tenants(tenant_file(path), admission=EngineAdmission(8, 16))
    async with front.serving(
        tmp_path,
        script,
        server_config=ServerConfig(max_n=8),
        accounts=tenants,
        interceptors=[TenantAccess(tenants, [door.METHODS for door in found_doors()])],
        doors=[partial(add_vllm_to, version="1.2", kv_events=True), partial(add_kserve_to, version="1.2")],
    ) as made:
        yield Setup(**vars(made), tenants=tenants, path=path)


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
