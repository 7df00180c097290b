"""The engines of a gateway: which one gets a request.

The rule considers the serving engines with the model. A request goes to the one that last got the longest prefix of the
prompt. If that engine's load (sequences per slot) exceeds the lowest load by more than SPARE, the request goes to the
least loaded engine instead. A call that an engine refuses as UNAVAILABLE before its first response goes to the next
engine, because nothing of the answer was sent yet. A request may name an adapter as its model; the engine then gets a
request for its own model with that adapter.

Not responsible for: connections (see engine.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

import grpc

from http_gateway.config import GatewayConfig
from http_gateway.engines.access import credentials, token
from http_gateway.engines.engine import Call, Engine, Metadata
from http_gateway.engines.prefixes import Prefixes, blocks_of
from http_gateway.wire.errors import RETRY_AFTER_S, ApiError, from_grpc
from protos.engine.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)

SPARE = 0.5
"""Of an engine's slots: how much longer a queue may be to use a cached beginning."""
POLL_S = 1.0
FIRST_REPORT_S = 2.0
"""Longest wait for the engines' first reports, before the gateway answers."""
_FIELDS = {pb.Adapter.KIND_LORA: "lora", pb.Adapter.KIND_PROMPT: "prompt_adapter"}
"""Kind of an adapter -> the request's field for its name."""


class Fleet:
    """The engines, made on the event loop."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self._prefixes = Prefixes()

    def choose(self, model: str | None, prompt: bytes, tried: Sequence[Engine] = ()) -> Engine:
        """Return the engine for a prompt. Raises ApiError: 404 for an unknown model, 503 where no engine serves.

        Args:
            model: the name that the client gave, of a model or of an adapter; None: any.
            prompt: bytes that begin alike for prompts that begin alike.
            tried: engines that have refused the request.
        """
        with_model = [e for e in self.engines if model is None or model in e.names]
        with_model = with_model or [e for e in self.engines if e.has(model)]
        if not with_model and all(e.info for e in self.engines):
            raise self.unknown(model)
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

    async def open(
        self, request: pb.GenerateRequest, model: str | None, metadata: Metadata, lost: Sequence[Engine] = ()
    ) -> Call:
        """Start a request on the engine chosen for it, which is none of `lost`. Raises ApiError."""
        tried = [*lost]
        # Pages of the prompt are shared by requests with one adapter.
        adapted = model is not None and model not in self.names()
        prompt = f"{model}\0".encode() * adapted + prompt_bytes(request)
        while True:
            engine = self.choose(model, prompt, tried)
            adapter = engine.adapter(model)
            try:
                return await engine.open(with_adapter(request, adapter), metadata)
            except grpc.aio.AioRpcError as error:
                tried.append(engine)
                if adapter is not None and _lost(error, adapter):
                    await self.list_adapters()
                    if engine.adapter(model) is not None:
                        raise from_grpc(error) from error  # it is there, and refused for another reason
                    continue
                others = any(e.serves for e in self.engines if e not in tried)
                if error.code() != grpc.StatusCode.UNAVAILABLE or not others:
                    raise from_grpc(error) from error

    def thinks(self, model: str | None) -> bool:
        """Return whether the model of that name has markers of its own for what it thinks."""
        return any(e.info and e.info.reasoning_begin for e in self.engines if e.has(model))

    def names(self) -> list[str]:
        """Return the names of all models, each once."""
        return list(dict.fromkeys(name for engine in self.engines for name in engine.names))

    def adapters(self) -> dict[str, Engine]:
        """Return the names of all adapters, each with the first engine that has it. A model's own name comes first."""
        found: dict[str, Engine] = {}
        for engine in self.engines:
            for name in engine.adapters:
                found.setdefault(name, engine)
        return {name: found[name] for name in sorted(found.keys() - set(self.names()))}

    async def learn(self, model: str | None) -> None:
        """Ask the engines for their adapters if no engine is known to have this name."""
        if not any(engine.has(model) for engine in self.engines):
            await self.list_adapters()

    async def list_adapters(self) -> None:
        """Ask the serving engines for their adapters."""
        engines = [engine for engine in self.engines if engine.serves]
        listings = await asyncio.gather(*(engine.list_adapters() for engine in engines), return_exceptions=True)
        for engine, problem in zip(engines, listings, strict=True):
            if isinstance(problem, grpc.aio.AioRpcError):  # its last list holds; `follow` reports one that is gone
                log.info("engine %s did not list its adapters: %s", engine.address, problem.details())
            elif problem is not None:
                raise problem

    def unknown(self, model: str | None) -> ApiError:
        """Return the error for a name that is neither a model's nor an adapter's, with those that exist."""
        names = ", ".join((*self.names(), *self.adapters()))
        return ApiError(
            f"model: {model!r} is not served; these are: {names}", status=404, param="model", code="model_not_found"
        )

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


def with_adapter(request: pb.GenerateRequest, adapter: pb.Adapter | None) -> pb.GenerateRequest:
    """Return the request with that adapter."""
    if adapter is None:
        return request
    named = pb.GenerateRequest()
    named.CopyFrom(request)
    setattr(named, _FIELDS[adapter.kind], adapter.name)
    return named


def _lost(error: grpc.aio.AioRpcError, adapter: pb.Adapter) -> bool:
    """Return whether the engine has unloaded the adapter since it was listed."""
    named = (error.details() or "").startswith(f"{_FIELDS[adapter.kind]}: ")
    return named and error.code() == grpc.StatusCode.INVALID_ARGUMENT


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
    # An adapter belongs to some of the tenants, and this list is seen by all of them.
    with_adapters = not config.tenant_file
    engines = [Engine(address, tls, own, with_adapters=with_adapters) for address in config.engines]
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
