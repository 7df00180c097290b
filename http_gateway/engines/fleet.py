"""The engines of a gateway: which one gets a request.

The rule: among the serving engines with the model, the one that has the longest beginning of the prompt, unless it
has more load than the least loaded one by more than SPARE of its slots; then the least loaded. A call that an engine
refuses as UNAVAILABLE before its first response goes to the next engine: nothing of it was sent yet.

Not responsible for: connections (see engine.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import grpc

from http_gateway.config import GatewayConfig
from http_gateway.engines.access import credentials, token
from http_gateway.engines.engine import Call, Engine, Metadata
from http_gateway.engines.prefixes import Prefixes, blocks_of
from http_gateway.wire.errors import RETRY_AFTER_S, ApiError, from_grpc
from protos.engine.v1 import engine_pb2 as pb

SPARE = 0.5
"""Of an engine's slots: how much longer a queue may be to use a cached beginning."""
POLL_S = 1.0
FIRST_REPORT_S = 2.0
"""Longest wait for the engines' first reports, before the gateway answers."""


class Fleet:
    """The engines, made on the event loop."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self._prefixes = Prefixes()

    def choose(self, model: str | None, prompt: bytes, tried: Sequence[Engine] = ()) -> Engine:
        """Return the engine for a prompt. Raises ApiError: 404 for an unknown model, 503 where no engine serves.

        Args:
            model: the name that the client gave; None: any.
            prompt: bytes that begin alike for prompts that begin alike.
            tried: engines that have refused the request.
        """
        with_model = [e for e in self.engines if model is None or model in e.names]
        if not with_model and all(e.info for e in self.engines):
            raise ApiError(
                f"model: {model!r} is not served; these are: {', '.join(self.names())}",
                status=404,
                param="model",
                code="model_not_found",
            )
        candidates = [e for e in with_model if e.serves and e not in tried]
        if not candidates:
            raise self.unavailable()
        if len(candidates) == 1:
            return candidates[0]
        blocks = blocks_of(prompt)
        owner, _ = self._prefixes.longest(blocks)
        least = min(candidates, key=lambda e: e.load)
        cached = next((e for e in candidates if e.address == owner), least)
        chosen = cached if cached.load <= least.load + SPARE else least
        self._prefixes.insert(blocks, chosen.address)
        return chosen

    async def open(self, request: pb.GenerateRequest, model: str | None, metadata: Metadata) -> Call:
        """Start a request on the engine chosen for it. Raises ApiError."""
        tried: list[Engine] = []
        while True:
            engine = self.choose(model, prompt_bytes(request), tried)
            try:
                return await engine.open(request, metadata)
            except grpc.aio.AioRpcError as error:
                tried.append(engine)
                others = any(e.serves for e in self.engines if e not in tried)
                if error.code() != grpc.StatusCode.UNAVAILABLE or not others:
                    raise from_grpc(error) from error

    def thinks(self, model: str | None) -> bool:
        """Return whether the model of that name has markers of its own for what it thinks."""
        return any(e.info and e.info.reasoning_begin for e in self.engines if model is None or model in e.names)

    def names(self) -> list[str]:
        """Return the names of all models, each once."""
        return list(dict.fromkeys(name for engine in self.engines for name in engine.names))

    def unavailable(self) -> ApiError:
        """Return the error where no engine serves, with the reason of each."""
        reasons = "; ".join(f"{e.address}: {e.problem or 'it has refused the request'}" for e in self.engines)
        return ApiError(
            f"no engine serves ({reasons})",
            status=503,
            kind="server_error",
            code="unavailable",
            headers={"Retry-After": str(RETRY_AFTER_S)},
        )

    def __repr__(self) -> str:
        return f"<Fleet {self.engines!r}>"


def prompt_bytes(request: pb.GenerateRequest) -> bytes:
    """Return bytes that begin alike for prompts that begin alike."""
    salt = f"{request.cache_salt}\0".encode()
    match request.WhichOneof("prompt"):
        case "text":
            return salt + request.text.encode()
        case "token_ids":
            return salt + b"".join(token.to_bytes(4, "little") for token in request.token_ids.ids)
        case _:
            turns = (f"{m.role}\0{m.content}{''.join(p.text for p in m.parts)}\0" for m in request.messages.messages)
            tools = "".join(tool.name + tool.parameters for tool in request.tools.tools)
            return salt + (tools + "".join(turns)).encode()


@contextlib.asynccontextmanager
async def open_fleet(config: GatewayConfig) -> AsyncIterator[Fleet]:
    """Follow the engines of the configuration for the time of the block. Raises ValueError for a wrong file."""
    tls, own = credentials(config), token(config)
    engines = [Engine(address, tls, own) for address in config.engines]
    tasks = [asyncio.create_task(engine.follow(), name=f"health of {engine.address}") for engine in engines]
    if len(engines) > 1:
        tasks += [asyncio.create_task(engine.poll(POLL_S), name=f"load of {engine.address}") for engine in engines]
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_REPORT_S):
                for engine in engines:
                    await engine.reported.wait()
        yield Fleet(engines)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in engines:
            await engine.aclose()
