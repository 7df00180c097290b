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
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from gpu_engine.api.checked import Limits
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.own_thread import in_own_thread
from gpu_engine.api.ports import GrammarPort, Model, ServedEngine
from gpu_engine.front.listening import HealthServicer, ServerError, bind
from gpu_engine.front.servicer import EngineServicer
from gpu_engine.ops.core_split import CoreSplit
from gpu_engine.ops.metrics_engine import EngineCollector
from gpu_engine.ops.metrics_http import BothProcesses, MetricsServer
from gpu_engine.ops.metrics_requests import RequestWatch
from gpu_engine.ops.tracing import open_tracing
from gpu_engine.sidecar.process import GrammarProcess, end_task, resolved_sync
from gpu_engine.sidecar.supervisor import Sidecar
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from service_runtime.cores import usable_cores
from shared_mem.channel import EngineEnd
from shared_mem.errors import VersionSkew

log = logging.getLogger(__name__)

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
GUIDED = f"{SERVICE}/guided"
"""Name under which health speaks of guided requests alone: NOT_SERVING while they are refused."""
STOP_GRACE_S = 2.0
CLOSE_TIMEOUT_S = 10.0

Result = TypeVar("Result")
Progress = Callable[[str, float], None]
"""Told (what is being done, share done in [0, 1]), on the loading thread."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The two pieces that tests replace: the model and the engine."""

    load_model: Callable[[EngineConfig, Progress | None], Model]
    build_engine: Callable[[EngineConfig, Any, EngineEnd | None, GrammarPort | None], ServedEngine]


def real_parts() -> Parts:
    """Return the parts that need torch; imported here, so that clients and tests start without it."""
    from transformers.utils import logging as transformers_logging

    from gpu_engine.core.engine import Engine
    from gpu_engine.model.loader import load_model

    transformers_logging.disable_progress_bar()  # `progress` is told of the loading
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
    metrics_address: str | None = None
    """"host:port" of /metrics, where there is one."""


@asynccontextmanager
async def open_server(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    progress: Progress | None = None,
    parts: Parts | None = None,
) -> AsyncIterator[Server]:
    """Run a server for the time of the `async with` block; leaving it drains. Raises ServerError when it cannot start.

    The block's task is cancelled when the grammar process turns out to be of another release, or the engine lost its
    device; ServerError says so.
    """
    try:
        async with AsyncExitStack() as stack:
            yield await _start(stack, engine_config, server_config, progress, parts or real_parts())
    except BaseExceptionGroup as group:
        # The task group wraps whatever passes through it, even when it is one error of the block.
        error = _only_error(group)
        if isinstance(error, VersionSkew):
            raise ServerError(str(error)) from error
        raise error from None


def _only_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def _start(
    stack: AsyncExitStack,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    progress: Progress | None,
    parts: Parts,
) -> Server:
    cores = usable_cores()
    if server_config.grammar != "none":
        engine_config = replace(engine_config, sync=resolved_sync(engine_config, server_config, cores))
    split = _split_cores(stack, engine_config, cores)
    listeners = bind(server_config)
    server, health_servicer = listeners.server, listeners.health
    stack.push_async_callback(listeners.stop)
    metrics = BothProcesses()
    scrapes = MetricsServer(server_config.metrics_listen, metrics) if server_config.metrics_listen else None
    if scrapes:
        stack.push_async_callback(asyncio.to_thread, scrapes.close)
    background = await stack.enter_async_context(asyncio.TaskGroup())
    grammar: GrammarProcess | None = None
    if server_config.grammar != "none":
        # The flags of a device wake nobody.
        spins = engine_config.sync == "device_flag"
        grammar = GrammarProcess(server_config, background, stack, must_spin=spins, compile_idle=split is not None)
    model = await in_own_thread(_at_large(split, lambda: parts.load_model(engine_config, progress)))
    _prepare_tokenizer(model)
    limits = Limits.of(engine_config, server_config, vocab_size=model.vocab_size, max_model_len=model.max_model_len)
    if grammar:
        grammar.share(stack, engine_config, model)
    channel, client = (grammar.channel, grammar.client) if grammar else (None, None)
    engine = await in_own_thread(_at_large(split, lambda: parts.build_engine(engine_config, model, channel, client)))
    if grammar:
        grammar.attach(stack, engine)
        metrics.attach(grammar)
    about = {"version": _version(), "model": model.name, "dtype": model.dtype_name, "device": engine_config.device}
    metrics.registry.register(EngineCollector(engine.stats, drafter=engine_config.drafter, about=about))
    tracing = open_tracing(os.environ)
    if tracing:
        stack.push_async_callback(asyncio.to_thread, tracing.close)
    watch = RequestWatch(metrics.registry, tracing.requests(model.name) if tracing else None)
    servicer = EngineServicer(engine, model, limits, client, version=_version(), watch=watch)
    engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)
    reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    await _set_health(health_servicer, health_pb2.HealthCheckResponse.NOT_SERVING)
    await listeners.start()
    stack.push_async_callback(asyncio.to_thread, engine.close, CLOSE_TIMEOUT_S)
    await in_own_thread(_at_large(split, engine.start))
    if grammar:
        await grammar.first_attachment()
    stack.push_async_callback(end_task, background.create_task(_watch(engine, health_servicer), name="engine watch"))
    if grammar:

        async def tell_guided(serves: bool) -> None:
            status = health_pb2.HealthCheckResponse.SERVING if serves else health_pb2.HealthCheckResponse.NOT_SERVING
            await health_servicer.set(GUIDED, status)

        watch_guided = background.create_task(grammar.tell(tell_guided), name="guided health")
        stack.push_async_callback(end_task, watch_guided)
    servicer.warm()
    await _set_health(health_servicer, health_pb2.HealthCheckResponse.SERVING)
    stack.push_async_callback(_drain, server, servicer, health_servicer, server_config.drain_timeout_s)
    metrics_address = scrapes.address if scrapes else None
    return Server(listeners.address, model, servicer, engine, grammar.sidecar if grammar else None, metrics_address)


def _split_cores(stack: AsyncExitStack, config: EngineConfig, usable: int) -> CoreSplit | None:
    split = CoreSplit.of(config, frozenset(os.sched_getaffinity(0)), usable)
    if split is None or not split.confine():
        return None
    stack.callback(split.release)
    return split


def _at_large(split: CoreSplit | None, function: Callable[[], Result]) -> Callable[[], Result]:
    """Return `function`, for a thread of its own that runs the model or starts who does."""
    return function if split is None else lambda: split.at_large(function)


async def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    progress: Progress | None,
    on_ready: Callable[[Server], None],
    parts: Parts | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain and return. Until it is ready SIGTERM ends the process at once.

    SIGINT then waits for the thread that loads the model.
    """
    async with open_server(engine_config, server_config, progress, parts) as server:
        stop = asyncio.Event()
        # A terminal that is closed sends SIGHUP; `nohup` has it ignored, and it stays so.
        hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        on_ready(server)
        await stop.wait()
        log.info("shutting down: running requests get %.1f s to end", server_config.drain_timeout_s)


async def _set_health(servicer: HealthServicer, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
    for service in (health.OVERALL_HEALTH, SERVICE):
        await servicer.set(service, status)


async def _watch(engine: ServedEngine, health_servicer: HealthServicer) -> None:
    """Wait for the engine's failure; then nobody is to come any more, and the server ends. Raises ServerError."""
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[Exception] = loop.create_future()

    def tell(error: Exception) -> None:
        if not failed.done():
            failed.set_result(error)

    def hear(error: Exception) -> None:
        loop.call_soon_threadsafe(tell, error)

    engine.watch(hear)
    error = await failed
    await _set_health(health_servicer, health_pb2.HealthCheckResponse.NOT_SERVING)
    raise ServerError(f"the engine lost its device: {error}") from error


async def _drain(
    server: grpc.aio.Server, servicer: EngineServicer, health_servicer: HealthServicer, timeout_s: float
) -> None:
    await _set_health(health_servicer, health_pb2.HealthCheckResponse.NOT_SERVING)
    await servicer.drain(timeout_s)
    await server.stop(STOP_GRACE_S)


def _prepare_tokenizer(model: Model) -> None:
    # A tokenizer.json may carry these for training; here they would cut prompts without a word.
    model.tokenizer.backend_tokenizer.no_truncation()
    model.tokenizer.backend_tokenizer.no_padding()


def _version() -> str:
    try:
        return importlib.metadata.version("lockstep-engine")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
