"""Whether a server serves vLLM's service: the setting, the package, and what protects the public port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from gpu_engine.api.config import ServerConfig
from gpu_engine.doors.vllm_wire.door import is_wanted
from gpu_engine.doors.vllm_wire.vllm_servicer import SERVICE
from gpu_engine.front.port.listening import ServerError
from tests.fakes import EOS, answers_with
from tests.gpu_engine.fake_servers import serving as serving_fake

TOKEN = "0123456789abcdef"
serving = partial(serving_fake, answers_with("yes"))


async def answer(channel: grpc.aio.Channel, **call: Any) -> list[int]:
    request = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1]))
    stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    (response,) = [response async for response in stub.Generate(request, timeout=20, **call)]
    return list(response.complete.output_ids)


async def refusal(channel: grpc.aio.Channel, **call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(channel, **call)
    return caught.value.code()


async def services(channel: grpc.aio.Channel) -> set[str]:
    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    async for response in stub.ServerReflectionInfo(ask()):  # type: ignore[attr-defined]  # the stub is not for asyncio
        return {service.name for service in response.list_services_response.service}
    raise AssertionError("no response")


@pytest.mark.parametrize("setting", ["auto", "vllm", "kv_events", ""])
async def test_the_service_is_on_the_public_port_with_a_health_name_and_reflection(setting: str) -> None:
    async with serving(services=setting) as server, grpc.aio.insecure_channel(server.address) as channel:
        assert (SERVICE in await services(channel)) == bool(setting)
        if not setting:
            assert await refusal(channel) is grpc.StatusCode.UNIMPLEMENTED
            return
        assert await answer(channel) == [*b"yes", EOS]
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=20)
        assert (await check).status == health_pb2.HealthCheckResponse.SERVING


async def test_tokens_protect_it(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(TOKEN)
    async with serving(auth_token_file=str(path)) as server, grpc.aio.insecure_channel(server.address) as channel:
        assert await refusal(channel) is grpc.StatusCode.UNAUTHENTICATED
        assert await answer(channel, metadata=(("authorization", f"Bearer {TOKEN}"),)) == [*b"yes", EOS]


def raising(error: Exception) -> Callable[[str], ModuleType]:
    def load(name: str) -> ModuleType:
        raise error

    return load


def test_a_package_that_is_missing_or_cannot_be_used_is_named_where_the_service_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    absent = raising(ModuleNotFoundError("no", name="smg_grpc_proto"))
    with pytest.raises(ServerError) as caught:
        is_wanted(["vllm"], absent)
    install = "services: vllm needs the package smg-grpc-proto: pip install 'lockstep-engine[vllm-wire]'"
    assert str(caught.value) == install
    assert not is_wanted(["auto", "kv_events"], absent)
    assert not is_wanted(["kserve"], raising(AssertionError("nothing is imported")))
    too_new = raising(RuntimeError("the runtime 7.0 is older\n than the code 8.0"))
    with pytest.raises(ServerError, match=r"is older than the code 8\.0$"):
        is_wanted(["vllm"], too_new)
    assert not is_wanted(["auto"], too_new)
    assert "smg-grpc-proto cannot be used: the runtime 7.0 is older than the code 8.0" in caplog.text
    with pytest.raises(ModuleNotFoundError):
        is_wanted(["auto"], raising(ModuleNotFoundError("no", name="google")))
    with pytest.raises(ValueError, match=r"^services: 'yes' is not one of kserve, vllm, kv_events, auto$"):
        ServerConfig(services="yes")
