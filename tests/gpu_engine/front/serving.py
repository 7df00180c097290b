"""The public service over a real gRPC connection, with a fake engine after it: for the tests of its calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.limits import Limits
from gpu_engine.api.processors import Processors
from gpu_engine.front.calls import Calls
from gpu_engine.front.pacing import StreamPacer
from gpu_engine.front.servicer import EngineServicer
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from tests.fakes import FakeEngine, FakeGrammar, FakeModel, Script
from tests.rpc_client import Client


@dataclass
class Setup:
    client: Client
    engine: FakeEngine
    calls: Calls
    grammar: FakeGrammar
    address: str


@asynccontextmanager
async def serving(
    tmp_path: Path,
    script: Script | None = None,
    *,
    with_grammar: bool = True,
    pacer: StreamPacer | None = None,
    model: FakeModel | None = None,
    server_config: ServerConfig | None = None,
    processors: Processors | None = None,
    **engine_fields: Any,
) -> AsyncIterator[Setup]:
    engine = FakeEngine(EngineConfig(**{"max_model_len": 256, **engine_fields}), script)
    model, grammar = model or FakeModel(), FakeGrammar({"bad": InvalidRequest("grammar", "line 1: no")})
    limits = Limits.of(
        engine.config,
        server_config or ServerConfig(max_n=4, max_prompt_bytes=10_000),
        vocab_size=320,
        max_model_len=engine.config.max_model_len,
        outputs=model.outputs,
        processors=processors,
    )
    access = grammar if with_grammar else None
    calls = Calls(engine, model, limits, access, pacer=pacer)
    calls.warm()
    server = grpc.aio.server()
    engine_pb2_grpc.add_EngineServicer_to_server(EngineServicer(calls, version="1.2"), server)
    address = f"unix:{tmp_path}/s"
    server.add_insecure_port(address)
    await server.start()
    try:
        async with Client(address) as client:
            yield Setup(client, engine, calls, grammar, address)
    finally:
        await server.stop(None)
        engine.close(5)


def ask(text: str = "hi", **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)  # type: ignore[arg-type]


async def answer(client: Client, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in client.generate(request, timeout_s=20)]
