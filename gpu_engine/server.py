"""The engine process: everything built in the right order, served, and closed in the opposite one.

    sidecar starts | port bound | model loaded -> segment -> grammar client -> engine -> gRPC (health NOT_SERVING) ->
    engine warm, grammar process attached -> health SERVING ... drain -> gRPC -> engine -> grammar client -> sidecar ->
    segment

The invariant: what is closed has no user left. A request never sees a half-built server, because it waits until the
engine is warm. Not here: the command line.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gpu_engine.config import EngineConfig, ServerConfig
from gpu_engine.errors import GrammarUnavailable
from gpu_engine.grammar_client import GrammarClient
from gpu_engine.grammar_link import GrammarLink, GrammarSetup, segment_hand_over
from gpu_engine.ports import GrammarPort, Model, ServedEngine
from gpu_engine.servicer import EngineServicer
from gpu_engine.sidecar import Sidecar, grammar_command
from gpu_engine.validation import Limits
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from shared_mem.channel import EngineEnd
from shared_mem.errors import VersionSkew
from shared_mem.layout import Layout
from shared_mem.segment import Segment

log = logging.getLogger(__name__)

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
LARGEST_MESSAGE_BYTES = 64 << 20
"""Above any prompt that is allowed, so that one that is too long is refused by name and not by the transport."""
STOP_GRACE_S = 2.0
CLOSE_TIMEOUT_S = 10.0

Progress = Callable[[str, float], None]
"""Told (what is being done, share done in [0, 1]), on the loading thread."""


class HealthServicer(Protocol):
    """The asyncio implementation of the health service."""

    async def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Change what `service` is reported as."""


class ServerError(RuntimeError):
    """The server cannot start; the message says why, for the person at the terminal."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The two pieces that tests replace: the model and the engine."""

    load_model: Callable[[EngineConfig, Progress | None], Model]
    build_engine: Callable[[EngineConfig, Any, EngineEnd | None, GrammarPort | None], ServedEngine]


def real_parts() -> Parts:
    """Return the parts that need torch; imported here, so that clients and tests start without it."""
    from gpu_engine.engine import Engine
    from gpu_engine.model.loader import load_model

    return Parts(load_model, Engine)


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready for requests."""

    address: str
    """What a client connects to: "host:port" or "unix:/path"."""
    model: Model
    servicer: EngineServicer
    engine: ServedEngine
    sidecar: Sidecar | None


@asynccontextmanager
async def open_server(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    progress: Progress | None = None,
    parts: Parts | None = None,
) -> AsyncIterator[Server]:
    """Run a server for the time of the `async with` block; leaving it drains. Raises ServerError when it cannot start.

    The block's task is cancelled when the grammar process turns out to be of another release; ServerError says so.
    """
    try:
        async with AsyncExitStack() as stack:
            yield await _start(stack, engine_config, server_config, progress, parts or real_parts())
    except* VersionSkew as group:
        raise ServerError(str(group.exceptions[0])) from None


async def _start(
    stack: AsyncExitStack,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    progress: Progress | None,
    parts: Parts,
) -> Server:
    server, health_servicer, address = _bind(server_config)
    stack.push_async_callback(server.stop, None)
    background = await stack.enter_async_context(asyncio.TaskGroup())
    grammar = _Grammar(server_config, background, stack) if server_config.grammar != "none" else None
    model = await asyncio.to_thread(parts.load_model, engine_config, progress)
    _prepare_tokenizer(model)
    limits = Limits.of(engine_config, server_config, vocab_size=model.vocab_size, max_model_len=model.max_model_len)
    if grammar:
        grammar.share(stack, engine_config, model)
        engine = parts.build_engine(engine_config, model, grammar.channel, grammar.client)
        grammar.attach(stack, engine)
    else:
        engine = parts.build_engine(engine_config, model, None, None)
    client = grammar.client if grammar else None
    servicer = EngineServicer(engine, model, limits, client, version=_version())
    engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)
    await _set_health(health_servicer, health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    stack.push_async_callback(asyncio.to_thread, engine.close, CLOSE_TIMEOUT_S)
    await asyncio.to_thread(engine.start)
    if grammar:
        await grammar.first_attachment()
    servicer.warm()
    await _set_health(health_servicer, health_pb2.HealthCheckResponse.SERVING)
    stack.push_async_callback(_drain, server, servicer, health_servicer, server_config.drain_timeout_s)
    return Server(address, model, servicer, engine, grammar.sidecar if grammar else None)


async def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    progress: Progress | None,
    on_ready: Callable[[Server], None],
    parts: Parts | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. Before it is ready a signal ends the process at once."""
    async with open_server(engine_config, server_config, progress, parts) as server:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        on_ready(server)
        await stop.wait()
        log.info("shutting down: running requests get %.1f s to end", server_config.drain_timeout_s)


class _Grammar:
    """The way to the grammar process, built in three parts around the model and the engine."""

    def __init__(self, config: ServerConfig, background: asyncio.TaskGroup, stack: AsyncExitStack) -> None:
        self.config = config
        self.directory = _grammar_directory(config, stack)
        self.sidecar: Sidecar | None = None
        self.channel: EngineEnd
        self.client: GrammarClient
        self._background = background
        self._link: GrammarLink
        self._attached = False
        self._sidecar_task: asyncio.Task[None] | None = None
        if config.grammar == "spawn":
            self.sidecar = Sidecar(grammar_command(config, self.directory), self._give_up)
            self._sidecar_task = background.create_task(self.sidecar.run(), name="sidecar")

    def share(self, stack: AsyncExitStack, engine_config: EngineConfig, model: Model) -> None:
        """Make the segment and the client, which the engine is built with."""
        layout = Layout(
            num_slots=engine_config.max_batch_size,
            num_rows=engine_config.num_rows,
            vocab_size=model.vocab_size,
            # A grammar process that outlives engines tells their segments apart by this number.
            generation=time.time_ns(),
        )
        segment = stack.enter_context(Segment.create(layout))
        if self._sidecar_task:
            stack.push_async_callback(_end_task, self._sidecar_task)
        self.channel = EngineEnd(segment)
        self.client = GrammarClient(self.config, self.channel)
        setup = GrammarSetup(
            tokenizer_json=model.tokenizer.backend_tokenizer.to_str().encode(),
            vocab_size=model.vocab_size,
            stop_token_ids=model.eos_token_ids,
            generation=layout.generation,
        )
        self._link = GrammarLink(
            self.directory,
            setup,
            segment_hand_over(segment),
            self.client,
            self.channel,
            silence_s=self.config.grammar_silence_s,
            on_stuck=self.sidecar.kill if self.sidecar else lambda: None,
        )
        stack.push_async_callback(self.client.aclose)

    def attach(self, stack: AsyncExitStack, engine: ServedEngine) -> None:
        """Start to connect."""
        self.client.attach(engine, self._link)
        self._attached = True
        stack.push_async_callback(_end_task, self._background.create_task(self._link.run(), name="grammar link"))
        if self.sidecar and self.sidecar.gave_up:
            self._give_up(self.sidecar.gave_up)

    async def first_attachment(self) -> None:
        """Wait for the grammar process, in bounds: unguided requests can be served without it."""
        try:
            await self._link.ready(self.config.grammar_wait_s)
        except GrammarUnavailable as error:
            log.warning("serving without guided requests for now: %s", error)

    def _give_up(self, reason: str) -> None:
        if self._attached:  # else `attach` finds it in the sidecar
            self.client.give_up(reason)


def _bind(config: ServerConfig) -> tuple[grpc.aio.Server, HealthServicer, str]:
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", max(LARGEST_MESSAGE_BYTES, 2 * config.max_prompt_bytes)),
            # Two servers on one port would share its requests in silence.
            ("grpc.so_reuseport", 0),
        ]
    )
    try:
        port = server.add_insecure_port(config.listen)
    except RuntimeError as error:
        raise ServerError(f"listen: cannot bind {config.listen!r}: {error}") from error
    health_servicer: HealthServicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stub
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    if config.listen.startswith("unix:"):
        return server, health_servicer, config.listen
    return server, health_servicer, f"{config.listen.rpartition(':')[0]}:{port}"


async def _set_health(servicer: HealthServicer, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
    for service in (health.OVERALL_HEALTH, SERVICE):
        await servicer.set(service, status)


async def _drain(
    server: grpc.aio.Server, servicer: EngineServicer, health_servicer: HealthServicer, timeout_s: float
) -> None:
    await _set_health(health_servicer, health_pb2.HealthCheckResponse.NOT_SERVING)
    await servicer.drain(timeout_s)
    await server.stop(STOP_GRACE_S)


async def _end_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _grammar_directory(config: ServerConfig, stack: AsyncExitStack) -> Path:
    if config.grammar_dir:
        return Path(config.grammar_dir)
    path = Path(tempfile.mkdtemp(prefix="lockstep-"))
    stack.callback(shutil.rmtree, path, ignore_errors=True)
    return path


def _prepare_tokenizer(model: Model) -> None:
    # A tokenizer.json may carry these for training; here they would cut prompts without a word.
    model.tokenizer.backend_tokenizer.no_truncation()
    model.tokenizer.backend_tokenizer.no_padding()


def _version() -> str:
    try:
        return importlib.metadata.version("lockstep")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
