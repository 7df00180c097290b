"""The engine process: nine numbered stages start it, and one exit stack closes it in the opposite order.

The invariant: a part is closed after every part that uses it. A request never meets a half-built server: it waits until
the engine is warm.

Not responsible for: the command line (cli/), or what any part does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from gpu_engine.api.capabilities import OF_START, Start, refuse
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.errors import RankLost
from gpu_engine.api.limits import Limits
from gpu_engine.api.ports import Model, ServedEngine, Vocabulary
from gpu_engine.api.stats import EngineStats
from gpu_engine.doors.found import Door, methods_of, wanted_doors
from gpu_engine.extensions.found import Extension, ExtensionModule, Extensions, wanted_extensions
from gpu_engine.front.calls import Calls
from gpu_engine.front.port.early import check_port
from gpu_engine.front.port.later_services import Services, add_servicer
from gpu_engine.front.port.listening import Listeners, ServerError, bind
from gpu_engine.front.servicer import EngineServicer
from gpu_engine.front.tools.formats import with_format
from gpu_engine.gateway_process import SOCKET_NAME, TOKEN_NAME, HttpGateway, gateway_command, write_token
from gpu_engine.model.embedded import cache_dir
from gpu_engine.model.names import check_name
from gpu_engine.ops.core_split import CoreSplit, fills_cores
from gpu_engine.ops.installation import installed_version, overwritten_kernels, torch_has_cuda
from gpu_engine.ops.metrics_engine import EngineCollector
from gpu_engine.ops.metrics_http import BothProcesses, MetricsServer
from gpu_engine.ops.metrics_requests import RequestWatch
from gpu_engine.ops.placement import resolve_placement
from gpu_engine.ops.tracing import open_tracing
from gpu_engine.sidecar.client import GrammarClient
from gpu_engine.sidecar.directory import DIRECTORY_PREFIX, grammar_directory
from gpu_engine.sidecar.early import KeptSetup
from gpu_engine.sidecar.process import GrammarProcess, end_task, resolved_sync
from gpu_engine.sidecar.supervisor import Sidecar
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from service_runtime.collector import importing
from service_runtime.cores import usable_cores
from service_runtime.health import HealthServicer
from service_runtime.own_thread import in_own_thread
from service_runtime.private_directory import private_directory
from shared_mem.channel import EngineEnd
from shared_mem.errors import VersionSkew

log = logging.getLogger(__name__)

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
GUIDED = f"{SERVICE}/guided"
"""Name of guided requests in the health service: NOT_SERVING while they are refused."""
STOP_GRACE_S = 2.0
CLOSE_TIMEOUT_S = 10.0

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING

SetHealth = Callable[[health_pb2.HealthCheckResponse.ServingStatus], None]
"""Sets the status of every service of the public port."""

Result = TypeVar("Result")
Progress = Callable[[str, float], None]
"""Called on the loading thread with the stage of loading and the share of it that is done, in [0, 1]."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that tests replace: the model, the engine, the number of CUDA devices, doors and extensions."""

    load_model: Callable[[EngineConfig, Progress | None], Model]
    build_engine: Callable[..., ServedEngine]
    """Called with EngineConfig, Model, EngineEnd | None and GrammarPort | None, and with `hooks` of extensions."""
    num_cuda_devices: Callable[[], int] = lambda: 0
    find_model: Callable[[EngineConfig, Progress | None], Path | None] = lambda config, progress: None
    """Returns where the model lies, or None. Raises the errors of `load_model` for a model that is not there; fetches
    one of the hub."""
    early: EarlyVocabulary = field(default_factory=lambda: EarlyVocabulary())
    """What `load_model` says of the tokens before it has read the weights."""
    doors: Sequence[Door] | None = None
    """The doors that may be served; None: the installed ones."""
    extensions: Sequence[ExtensionModule] | None = None
    """The extensions that may be opened; None: the installed ones."""


@dataclass(slots=True)
class EarlyVocabulary:
    """Hands the tokens of a model over while its weights are read."""

    known: Callable[[Vocabulary], None] = lambda vocabulary: None
    """Called on the loading thread."""


def real_parts() -> Parts:
    """Return the parts that need torch. Each imports it when it is called, so that a mistake in a setting is reported
    before, and the grammar process starts meanwhile.

    Raises ServerError if another distribution has overwritten a package of ours.
    """
    if (problem := overwritten_kernels()) is not None:
        raise ServerError(problem)
    early = EarlyVocabulary()

    def find(config: EngineConfig, progress: Progress | None) -> Path:
        from gpu_engine.model.hub import find_model

        return find_model(config, progress)

    def load(config: EngineConfig, progress: Progress | None) -> Model:
        if progress:
            progress("loading the libraries", 0.0)
        with importing():
            from gpu_engine.model.without_compiler import without_compiler

        with without_compiler():  # for a model without memory torch asks for it once more
            with importing():
                from transformers.utils import logging as transformers_logging

                from gpu_engine.core.engine import Engine  # noqa: F401  # for `build`
                from gpu_engine.model.loader import load_model

            transformers_logging.disable_progress_bar()  # `progress` shows the loading instead
            transformers_logging.set_verbosity_error()  # its advice is for its own users
            return load_model(config, progress, known=lambda vocabulary: early.known(vocabulary))

    def build(*arguments: Any, **options: Any) -> ServedEngine:
        from gpu_engine.core.engine import Engine

        return Engine(*arguments, **options)

    def num_cuda_devices() -> int:
        if not torch_has_cuda():
            return 0
        import torch

        from gpu_engine.model.loader import load_kernels_eagerly

        load_kernels_eagerly()  # CUDA reads this when it is initialised, which counting devices may do
        return torch.cuda.device_count()

    return Parts(load, build, num_cuda_devices, find, early)


@dataclass(frozen=True, slots=True, repr=False)
class Server:
    """A server that is ready for requests."""

    address: str
    """Address for clients: "host:port" or "unix:/path"."""
    model: Model
    calls: Calls
    engine: ServedEngine
    sidecar: Sidecar | None
    """The supervisor of the grammar process; None with grammar=connect and grammar=none."""
    metrics_address: str | None = None
    """"host:port" of /metrics; None without `metrics_listen`."""
    http_address: str | None = None
    """"host:port" of the gateway process; None without `http`."""

    def stats(self) -> EngineStats:
        """Return the engine's counters and gauges, at most one step old. Any thread."""
        return self.engine.stats()

    def __repr__(self) -> str:
        return f"<Server {self.address} {self.model.name} on {self.engine.config.device} {self.sidecar!r}>"


@asynccontextmanager
async def open_server(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    progress: Progress | None = None,
    parts: Parts | None = None,
) -> AsyncIterator[Server]:
    """Run a server during the `async with` block, and drain it at the end. Raises ServerError if it cannot start.

    If the grammar process turns out to be from another release, or the engine loses its device, the block's task is
    cancelled. The block then raises a ServerError that names the cause.
    """
    try:
        async with AsyncExitStack() as stack:
            # Before torch is imported, which takes seconds.
            check_port(server_config)
            if parts is None:
                check_name(engine_config.model, "model")
                check_name(engine_config.draft_model, "draft_model")
            refuse(OF_START, Start(engine_config, server_config), ServerError)
            modules = wanted_extensions(engine_config, server_config, parts.extensions if parts else None)
            for module in modules:
                server_config = module.settings(engine_config, server_config)
            doors = wanted_doors(server_config, parts.doors if parts else None)
            opened = list[Extension]()
            for module in modules:
                opened.append(module.open(engine_config, server_config, doors))
                stack.push_async_callback(opened[-1].aclose)
            extensions = Extensions(opened)
            directory = grammar_directory(server_config, stack) if server_config.grammar != "none" else None
            parts = parts or real_parts()
            yield await _start(stack, engine_config, server_config, doors, extensions, directory, progress, parts)
    except BaseExceptionGroup as group:
        # The task group wraps every error that passes through it, even a single one of the block.
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
    doors: Sequence[Door],
    extensions: Extensions,
    directory: Path | None,
    progress: Progress | None,
    parts: Parts,
) -> Server:
    # 1. Settings that depend on this machine; the threads of this process leave the model's cores to the model.
    engine_config = _resolve(engine_config, server_config, parts)
    split = _split_cores(stack, engine_config)

    # 2. Addresses are bound before the model is loaded, so that a taken one is reported at once. Clients connect;
    # health says NOT_SERVING until stage 9, doors' liveness answers, and other calls wait for stage 7.
    listeners, gateway = _bind(stack, server_config, extensions)
    listeners.health.set(health.OVERALL_HEALTH, NOT_SERVING)
    listeners.health.of_others = NOT_SERVING
    for methods in methods_of(doors):
        for name, answer in methods.loading.items():
            listeners.services.answer_early(f"/{methods.service}/{name}", answer)
    await listeners.start()
    metrics = BothProcesses()
    scrapes = _serve_metrics(stack, server_config, metrics)

    # 3. The grammar process starts while the libraries and the model are loaded, once there is a model.
    path = await in_own_thread(lambda: parts.find_model(engine_config, progress))
    background = await stack.enter_async_context(asyncio.TaskGroup())
    grammar: GrammarProcess | None = None
    if directory is not None:
        # A device that sets flags cannot wake a process that sleeps.
        idle, spin = _compiles_idle(split, engine_config), engine_config.sync == "device_flag"
        grammar = GrammarProcess(server_config, directory, background, stack, must_spin=spin, compile_idle=idle)
        parts.early.known = _preparing(grammar, path)

    # 4. The model.
    model = await in_own_thread(_on_every_core(split, lambda: parts.load_model(engine_config, progress)))
    _keep_whole(model)
    if engine_config.tool_format != "auto":
        tokenizer: Any = model.tokenizer
        tokenizer.chat_template = with_format(tokenizer.chat_template, engine_config.tool_format)

    # 5. The shared segment and the grammar client, then the engine on both.
    if grammar:
        grammar.share(stack, engine_config, model)
    channel, client = (grammar.channel, grammar.client) if grammar else (None, None)
    build = partial(_build_engine, parts, extensions, engine_config, model, channel, client)
    engine = await in_own_thread(_on_every_core(split, build))
    if grammar:
        grammar.attach(stack, engine)
        metrics.attach(grammar)

    # 6. The services on the public port.
    watch = _watch_requests(stack, metrics, engine, model, extensions)
    extensions.attach(engine, model, metrics.registry)
    calls = Calls(
        engine,
        model,
        _limits(server_config, model, engine),
        client,
        watch=watch,
        prefills=extensions.prefills,
        accounts=extensions.accounts,
        receipts=extensions.receipts,
    )
    services = _add_services(listeners.services, calls, server_config, doors, extensions)

    # 7. Calls go on.
    set_health = partial(_set_health, listeners.health, services, extensions.serves_engine)
    set_health(NOT_SERVING)
    listeners.services.complete()
    if gateway:
        gateway.start(background, stack)

    # 8. The engine warms up, and the grammar process compiles its first grammar.
    stack.push_async_callback(asyncio.to_thread, engine.close, CLOSE_TIMEOUT_S)
    await in_own_thread(_on_every_core(split, engine.start))
    if grammar:
        await grammar.first_attachment()
    await extensions.warm()

    # 9. Requests are served, and health follows the engine and the grammar process.
    _run_until_close(stack, background, _end_on_failure(engine, set_health), "engine watch")
    if grammar:
        _run_until_close(stack, background, _report_guided(grammar, listeners.health), "guided health")
    calls.warm()
    listeners.health.of_others = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    set_health(SERVING)
    stack.push_async_callback(_drain, listeners.server, calls, set_health, gateway, server_config.drain_timeout_s)
    return Server(
        address=listeners.address,
        model=model,
        calls=calls,
        engine=engine,
        sidecar=grammar.sidecar if grammar else None,
        metrics_address=scrapes.address if scrapes else None,
        http_address=gateway.address if gateway else None,
    )


def _build_engine(
    parts: Parts,
    extensions: Extensions,
    config: EngineConfig,
    model: Model,
    channel: EngineEnd | None,
    client: GrammarClient | None,
) -> ServedEngine:
    """Build the engine, with hooks only if an extension has some."""
    hooks = extensions.engine_hooks()
    build = parts.build_engine if hooks is None else partial(parts.build_engine, hooks=hooks)
    return build(config, model, channel, client)


def _limits(server_config: ServerConfig, model: Model, engine: ServedEngine) -> Limits:
    """Return the limits of requests to this model."""
    return Limits.of(
        engine.config,
        server_config,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        outputs=model.outputs,
        processors=engine.processors,
        sampling_defaults=model.sampling_defaults,
    )


def _resolve(engine_config: EngineConfig, server_config: ServerConfig, parts: Parts) -> EngineConfig:
    """Return the settings with every "auto" that depends on the machine resolved."""
    cores = usable_cores()
    cuda_devices = parts.num_cuda_devices() if engine_config.device == "auto" else 0
    engine_config = resolve_placement(engine_config, server_config, cuda_devices=cuda_devices, cores=cores)
    if server_config.grammar != "none":
        engine_config = replace(engine_config, sync=resolved_sync(engine_config, server_config, cores))
    return engine_config


def _compiles_idle(split: CoreSplit | None, config: EngineConfig) -> bool:
    """Return whether a compilation would take its time from the steps or from the event loop."""
    return split is not None or fills_cores(config, usable_cores())


def _split_cores(stack: AsyncExitStack, config: EngineConfig) -> CoreSplit | None:
    split = CoreSplit.of(config, frozenset(os.sched_getaffinity(0)), usable_cores())
    if split is None or not split.confine():
        return None
    stack.callback(split.release)
    return split


def _on_every_core(split: CoreSplit | None, function: Callable[[], Result]) -> Callable[[], Result]:
    """Return `function`, to be run by a thread that may use every core, and so may the threads that it starts."""
    return function if split is None else lambda: split.on_every_core(function)


def _bind(stack: AsyncExitStack, config: ServerConfig, extensions: Extensions) -> tuple[Listeners, HttpGateway | None]:
    """Bind the addresses, and make the gateway process that is started later."""
    if not config.http:
        listeners = bind(config, access=extensions.interceptor)
        stack.push_async_callback(listeners.stop)
        return listeners, None
    path = private_directory(stack, Path(tempfile.gettempdir()), DIRECTORY_PREFIX) / SOCKET_NAME
    listeners = bind(config, path, extensions.interceptor)
    stack.push_async_callback(listeners.stop)
    assert listeners.http is not None
    token_path = Path(config.auth_token_file) if config.auth_token_file else None
    if extensions.gateway_token:
        token_path = path.with_name(TOKEN_NAME)
        write_token(token_path, extensions.gateway_token)
    command = gateway_command(config, listeners.http.fileno(), path, token_path)
    return listeners, HttpGateway(command, listeners.http, config.drain_timeout_s)


def _serve_metrics(stack: AsyncExitStack, config: ServerConfig, metrics: BothProcesses) -> MetricsServer | None:
    if not config.metrics_listen:
        return None
    scrapes = MetricsServer(config.metrics_listen, metrics)
    stack.push_async_callback(asyncio.to_thread, scrapes.close)
    return scrapes


def _watch_requests(
    stack: AsyncExitStack, metrics: BothProcesses, engine: ServedEngine, model: Model, extensions: Extensions
) -> RequestWatch:
    """Register the engine's metrics; return the watch that counts, logs and traces every Generate call."""
    config = engine.config
    about = {
        "version": installed_version(),
        "model": model.name,
        "dtype": model.dtype_name,
        "device": config.device,
    }
    metrics.registry.register(
        EngineCollector(
            engine.stats,
            drafter=config.drafter,
            page_size=config.page_size,
            about=about,
            adapters=engine.adapters.listed,
            max_adapters=config.adapter_limits.max_adapters,
        )
    )
    tracing = open_tracing(os.environ)
    if tracing is None:
        return RequestWatch(metrics.registry, ended=extensions.ended)
    stack.push_async_callback(asyncio.to_thread, tracing.close)
    return RequestWatch(metrics.registry, tracing.requests(model.name), extensions.ended)


def _run_until_close(
    stack: AsyncExitStack, background: asyncio.TaskGroup, coroutine: Coroutine[Any, Any, None], name: str
) -> None:
    stack.push_async_callback(end_task, background.create_task(coroutine, name=name))


async def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    progress: Progress | None,
    on_ready: Callable[[Server], None],
    parts: Parts | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain and return.

    Until the server is ready, SIGTERM ends the process at once, and SIGINT waits for the thread that loads the model.
    """
    if os.getpid() == 1:
        # The kernel keeps signals without a handler from the first process of a container.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, os._exit, 128 + signal.SIGTERM)
    async with open_server(engine_config, server_config, progress, parts) as server:
        stop = asyncio.Event()
        # A terminal that is closed sends SIGHUP. `nohup` makes the process ignore it, and that is kept.
        hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        on_ready(server)
        await stop.wait()
        log.info("shutting down: running requests get %.1f s to end", server_config.drain_timeout_s)


def _add_services(
    services: Services, calls: Calls, config: ServerConfig, doors: Sequence[Door], extensions: Extensions
) -> list[str]:
    """Add the services of the public port; return the names of the services that have their own health."""
    # Calls that the service does not implement are UNIMPLEMENTED.
    servicer = EngineServicer(calls, version=installed_version())
    add_servicer(services, engine_pb2_grpc.add_EngineServicer_to_server, servicer)
    names = [SERVICE, *(door.add_to(services, calls, config) for door in doors), *extensions.add_to(services, calls)]
    listed = [*names, health.SERVICE_NAME, reflection.SERVICE_NAME]
    servicer_of_names = reflection.aio.ReflectionServicer(listed)  # type: ignore[attr-defined]  # the stub lacks it
    add_servicer(services, reflection_pb2_grpc.add_ServerReflectionServicer_to_server, servicer_of_names)
    return names


def _set_health(
    servicer: HealthServicer,
    services: Sequence[str],
    serves_engine: bool,
    status: health_pb2.HealthCheckResponse.ServingStatus,
) -> None:
    """Set the status of the server and its services; `serves_engine`: the service Engine may ever be SERVING."""
    for service in (health.OVERALL_HEALTH, *services):
        servicer.set(service, NOT_SERVING if service == SERVICE and not serves_engine else status)


async def _end_on_failure(engine: ServedEngine, set_health: SetHealth) -> None:
    """Wait for the engine's failure; then report NOT_SERVING and end the server. Raises ServerError."""
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[Exception] = loop.create_future()

    def set_failed(error: Exception) -> None:
        if not failed.done():
            failed.set_result(error)

    def report_failure(error: Exception) -> None:  # on the engine's thread
        loop.call_soon_threadsafe(set_failed, error)

    engine.watch(report_failure)
    error = await failed
    set_health(NOT_SERVING)
    lost = "lost a rank" if isinstance(error, RankLost) else "lost its device"
    raise ServerError(f"the engine {lost}: {error}") from error


async def _report_guided(grammar: GrammarProcess, health_servicer: HealthServicer) -> None:
    """Report under the name GUIDED whether guided requests are served. Runs until it is cancelled."""

    async def report(serves: bool) -> None:
        health_servicer.set(GUIDED, SERVING if serves else NOT_SERVING)

    await grammar.report(report)


async def _drain(
    server: grpc.aio.Server, calls: Calls, set_health: SetHealth, gateway: HttpGateway | None, timeout_s: float
) -> None:
    """Report NOT_SERVING, then refuse new requests, and wait up to `timeout_s` for the running ones and the gateway.

    Health comes first: a router that watches it sends no request that would be refused.
    """
    set_health(NOT_SERVING)
    await asyncio.gather(calls.drain(timeout_s), *((gateway.stop(),) if gateway else ()))
    await server.stop(STOP_GRACE_S)


def _preparing(grammar: GrammarProcess, model: Path | None) -> Callable[[Vocabulary], None]:
    """Have the grammar process prepare for the vocabulary that the model had at its last start, if that is kept. Return
    a function for the loading thread, which does the same for the vocabulary that the model has, and keeps that."""
    loop, kept, expected = asyncio.get_running_loop(), None, None
    with contextlib.suppress(OSError, RuntimeError):  # the model's files are gone; there is no home directory
        kept = None if model is None else KeptSetup.of(cache_dir() / "vocabularies", model)
    if kept is not None and (expected := kept.read()) is not None:
        grammar.prepare(expected)

    def prepare(vocabulary: Vocabulary) -> None:
        _keep_whole(vocabulary)
        setup = grammar.setup_of(vocabulary)
        loop.call_soon_threadsafe(grammar.prepare, setup)
        if kept is not None and setup != expected:
            kept.write(setup)

    return prepare


def _keep_whole(vocabulary: Vocabulary) -> None:
    """Have the tokenizer cut and pad no prompt: a tokenizer.json may say so for training."""
    tokenizer: Any = vocabulary.tokenizer
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
