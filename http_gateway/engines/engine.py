"""One engine behind the gateway: its channel, whether it serves, and the calls that run on it.

Invariant: `serves` follows the engine's own health service, which a stream reports without polling. A call that ends,
however it ends, is cancelled on the engine and leaves `running`.

Not responsible for: the choice between engines (see fleet.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Engine"].full_name
Metadata = Sequence[tuple[str, str]]

RETRY_S = 0.5
INFO_EVERY_S = 30.0
"""The description of a serving engine is read again so often: it may have been replaced after its address."""
CALL_TIMEOUT_S = 10.0
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Two channels with equal options share one connection: each engine's calls have their own.
    ("grpc.use_local_subchannel_pool", 1),
]


class Engine:
    """A connection to the engine at `address`. Made on the event loop."""

    def __init__(
        self, address: str, tls: grpc.ChannelCredentials | None, metadata: Metadata, *, with_adapters: bool = True
    ) -> None:
        """Args: see below.

        tls: credentials of the channel; None: clear text.
        metadata: the gateway's own token, sent with its own calls.
        with_adapters: clients may know of every adapter, and name it as a model.
        """
        self.address = address
        self._metadata, self._with_adapters = metadata, with_adapters
        self._channel = (
            grpc.aio.secure_channel(address, tls, options=_OPTIONS)
            if tls
            else grpc.aio.insecure_channel(address, options=_OPTIONS)
        )
        self.stub: engine_pb2_grpc.EngineAsyncStub = engine_pb2_grpc.EngineStub(self._channel)
        self.info: pb.GetModelInfoResponse | None = None
        """The last description; None: the engine never answered."""
        self.adapters: dict[str, pb.Adapter] = {}
        """Its adapters by name, as last listed."""
        self.serves = False
        self.problem = "it has not answered yet"
        """Why it does not serve."""
        self.reported = asyncio.Event()
        """Set once the health is known."""
        self.running = 0
        """Calls of this gateway."""
        self.foreign = 0
        """Sequences of other clients, as last seen."""
        self.texts: dict[int, str] = {}
        """Token id -> its text, as far as answers needed them (see answers/texts.py)."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which clients ask for its model, the preferred one first."""
        if self.info is None:
            return ()
        return tuple(self.info.served_names) or (self.info.model,)

    def has(self, model: str | None) -> bool:
        """Return whether it serves the model or adapter of that name; None: any."""
        return model is None or model in self.names or model in self.adapters

    def adapter(self, model: str | None) -> pb.Adapter | None:
        """Return the adapter of that name; None where it is none, or the name is the model's own."""
        return None if model is None or model in self.names else self.adapters.get(model)

    def virtual_tokens(self, model: str | None) -> int:
        """Return how many tokens the adapter of that name puts before a prompt."""
        adapter = self.adapter(model)
        return adapter.size if adapter is not None and adapter.kind == pb.Adapter.KIND_PROMPT else 0

    @property
    def load(self) -> float:
        """Sequences per slot, waiting ones included."""
        return (self.running + self.foreign) / max(1, self.info.max_batch_size if self.info else 1)

    async def follow(self) -> None:
        """Follow the engine's health until cancelled."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        while True:
            try:
                async for report in stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE)):
                    await self._report(report.status)
                self._fails("its health service ended the call")
            except grpc.aio.AioRpcError as error:
                self._fails(f"{error.code().name}: {error.details()}")
            await asyncio.sleep(RETRY_S)

    async def poll(self, every_s: float, info_every_s: float = INFO_EVERY_S) -> None:
        """Read the load that other clients make, and now and then the description, until cancelled."""
        passed_s = 0.0
        while True:
            await asyncio.sleep(every_s)
            passed_s += every_s
            if not self.serves:
                continue
            with contextlib.suppress(grpc.aio.AioRpcError):  # `follow` reports an engine that is gone
                before = self.running
                stats = await self.stats()
                self.foreign = max(0, stats.running + stats.waiting - before)
                if passed_s >= info_every_s:
                    passed_s = 0.0
                    await self._describe()

    async def stats(self) -> pb.GetStatsResponse:
        """Return the counters and gauges. Raises grpc.aio.AioRpcError."""
        return await self.stub.GetStats(pb.GetStatsRequest(), timeout=CALL_TIMEOUT_S, metadata=self._metadata)

    async def list_adapters(self) -> None:
        """Read its adapters, if it takes any. Raises grpc.aio.AioRpcError."""
        if self.info is None or not self.info.max_adapter_bytes or not self._with_adapters:
            self.adapters = {}
            return
        listing = self.stub.ListAdapters(pb.ListAdaptersRequest(), timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        self.adapters = {adapter.name: adapter for adapter in (await listing).adapters}

    async def open(self, request: pb.GenerateRequest, metadata: Metadata) -> Call:
        """Start a call, and wait for its first response. Raises grpc.aio.AioRpcError."""
        call = Call(self, self.stub.Generate(request, metadata=[*metadata]))
        try:
            await call.begin()
        except BaseException:
            call.close()
            raise
        return call

    async def aclose(self) -> None:
        """Close the channel."""
        await self._channel.close(None)

    async def _report(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        if status != health_pb2.HealthCheckResponse.SERVING:
            self._fails("it is starting or closing")
            return
        await self._describe()
        if not self.serves:
            log.info("engine %s serves %s", self.address, ", ".join(self.names))
        self.serves, self.problem = True, ""
        self.reported.set()

    async def _describe(self) -> None:
        info = await self.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        if self.info is not None and self.info.model != info.model:
            self.texts.clear()
        self.info = info
        await self.list_adapters()

    def _fails(self, problem: str) -> None:
        if problem != self.problem:
            log.log(logging.WARNING if self.serves else logging.INFO, "engine %s: %s", self.address, problem)
        self.serves, self.problem = False, problem
        self.reported.set()

    def __repr__(self) -> str:
        return f"<Engine {self.address} serves={self.serves} running={self.running}>"


class Call:
    """A Generate call that has begun. An async context manager; `close` frees what it holds on the engine."""

    def __init__(
        self, engine: Engine, stream: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        self.engine = engine
        self._stream = stream
        self._first: pb.GenerateResponse | None = None
        self._closed = False
        engine.running += 1

    async def begin(self) -> None:
        """Wait for the first response. Raises grpc.aio.AioRpcError."""
        first = await self._stream.read()
        if not isinstance(first, pb.GenerateResponse):
            raise RuntimeError("the engine ended a call without an answer")
        self._first = first

    async def responses(self) -> AsyncIterator[pb.GenerateResponse]:
        """Yield each response. Raises grpc.aio.AioRpcError."""
        response: object = self._first
        self._first = None
        while isinstance(response, pb.GenerateResponse):
            yield response
            response = await self._stream.read()  # grpc.aio.EOF at the end

    def close(self) -> None:
        """Cancel the call unless it has ended."""
        if not self._closed:
            self._closed = True
            self.engine.running -= 1
            self._stream.cancel()

    async def __aenter__(self) -> Call:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Call on {self.engine.address} closed={self._closed}>"
