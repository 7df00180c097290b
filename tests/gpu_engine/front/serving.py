"""The public service over a real gRPC connection with a fake engine, and what the tests of its calls share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.limits import Limits
from gpu_engine.api.processors import Processors
from gpu_engine.api.request import PromptLogprobs
from gpu_engine.api.stats import Iteration, IterationRing
from gpu_engine.front.calls import Calls
from gpu_engine.front.pacing import StreamPacer
from gpu_engine.front.port.malformed import ParsedRequests
from gpu_engine.front.servicer import EngineServicer
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from tests.fakes import FakeEngine, FakeGrammar, FakeModel, Script
from tests.rpc_client import Client

LIMITS = Limits(
    vocab_size=320,
    max_model_len=64,
    num_draft_tokens=7,
    jump_forward_tokens=15,
    max_n=4,
    max_prompt_bytes=1000,
    max_beam_width=6,
)
"""Limits for tests without a server."""


@dataclass
class Setup:
    client: Client
    stub: engine_pb2_grpc.EngineAsyncStub
    engine: FakeEngine
    calls: Calls
    grammar: FakeGrammar
    channel: grpc.aio.Channel
    address: str
    stop: Callable[[], Awaitable[None]]
    """Ends the server at once."""


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
    accounts: Any = None,
    interceptors: Sequence[Any] = (),
    doors: Sequence[Callable[[grpc.aio.Server, Calls], object]] = (),
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
    calls = Calls(engine, model, limits, access, pacer=pacer, accounts=accounts)
    calls.warm()
    server = grpc.aio.server(interceptors=[*interceptors, ParsedRequests()])
    engine_pb2_grpc.add_EngineServicer_to_server(EngineServicer(calls, version="1.2"), server)
    for add_to in doors:
        add_to(server, calls)
    address = f"unix:{tmp_path}/s"
    server.add_insecure_port(address)
    await server.start()
    try:
        async with Client(address) as client, grpc.aio.insecure_channel(address) as channel:
            stub: engine_pb2_grpc.EngineAsyncStub = engine_pb2_grpc.EngineStub(channel)  # type: ignore[assignment]
            yield Setup(client, stub, engine, calls, grammar, channel, address, lambda: server.stop(None))
    finally:
        await server.stop(None)
        engine.close(5)


def ask(text: str = "hi", **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)  # type: ignore[arg-type]


async def answer(client: Client, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in client.generate(request, timeout_s=20)]


async def refusal(client: Client, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(client, request)
    return caught.value


def conversation(*pairs: tuple[str, str], **fields: Any) -> pb.ChatMessages:
    """Return messages of these roles and contents."""
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content) for role, content in pairs], **fields)


def prompt_scores(count: int, wanted: int) -> PromptLogprobs:
    """Return log-probabilities of `count` tokens of a prompt, with `wanted` alternatives each."""
    ids = np.tile(np.arange(wanted, dtype=np.int32), (count, 1))
    return PromptLogprobs(np.linspace(-1, 0, count, dtype=np.float32), ids, -ids.astype(np.float32))


def ran(ring: IterationRing, count: int) -> None:
    """Add iterations that differ in each number."""
    for _ in range(count):
        n = ring.total
        ring.add(Iteration(n, 1e9 + n, n / 1e3, *(n + i for i in range(1, 11))))


class FakeContext:
    """The context of a call without a connection."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer_identities(self) -> None:
        return None

    def cancelled(self) -> bool:
        return False

    done = cancelled
