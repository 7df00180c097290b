"""The grammar process's two sockets: gRPC for the control plane, and one that receives the engine's segment.

Invariant: one engine at a time, for as long as its segment socket is open. When the socket closes, the matchers and the
mapping are dropped, compiled grammars stay, and the process waits for the next engine. A worker that cannot be stopped
ends the process, because its memory cannot be unmapped safely.

Not responsible for: the RPCs (see servicer.py), mask rows (see fill/worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from grammar_service.backends.registry import import_library
from grammar_service.config import GrammarConfig
from grammar_service.fill.channel import Channel
from grammar_service.fill.worker import Worker
from grammar_service.metrics_http import CannotListen, MetricsListener
from grammar_service.servicer import GrammarServicer
from protos.grammar.v1 import grammar_pb2, grammar_pb2_grpc
from service_runtime.aborted_calls import AbortedCalls
from service_runtime.health import HealthServicer
from service_runtime.threads import OS_THREADS, Threads
from shared_mem.channel import GrammarEnd
from shared_mem.errors import InvalidField, SharedMemoryError
from shared_mem.handover import RPC_SOCKET_NAME, SOCKET_NAME, listen, recv_segment
from shared_mem.segment import Segment

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 128 << 20
"""A tokenizer.json has tens of megabytes at most."""

EXIT_HUNG = 70
_GRACE_S = 1.0
_SERVICE = grammar_pb2.DESCRIPTOR.services_by_name["Grammar"].full_name


def run(config: GrammarConfig) -> None:
    """Run a grammar process in this thread until SIGTERM or SIGINT. Raises CannotListen, which names the setting."""
    directory = Path(config.dir)
    paths = directory / RPC_SOCKET_NAME, directory / SOCKET_NAME
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        listener = listen(paths[1])
    except InvalidField as error:
        raise CannotListen(str(error).replace(error.field, "dir", 1)) from error
    except OSError as error:
        raise CannotListen(f"dir: {directory}: {error.strerror or error}") from error
    # The file is left over: had another process listened here, `listen` above would have failed.
    paths[0].unlink(missing_ok=True)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, paths[0], listener))
    finally:
        listener.close()
        for path in paths:
            path.unlink(missing_ok=True)


async def _serve(config: GrammarConfig, path: Path, listener: socket.socket) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    servicer = GrammarServicer(config)
    scrapes = MetricsListener(config.metrics_listen, servicer.metrics.registry) if config.metrics_listen else None
    server, alive = await _start_grpc(path, servicer)
    probe = await _start_probe(config.health_listen, alive) if config.health_listen else None
    # Importing the default backend may take seconds. Configure waits for it; the sockets and the health check do not.
    importing = asyncio.create_task(asyncio.to_thread(import_library, config.backend), name="import-backend")
    engines = asyncio.create_task(serve_engines(listener, servicer, config), name="engines")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    logger.info("ready in %s: %s, %d fill threads", path.parent, config.backend, config.fill_threads)
    try:
        await asyncio.wait((engines, stopped), return_when=asyncio.FIRST_COMPLETED)
        if engines.done():
            engines.result()
    finally:
        alive.stop()
        for task in (engines, stopped, importing):
            task.cancel()
        await asyncio.gather(engines, stopped, importing, return_exceptions=True)
        await server.stop(_GRACE_S)
        if probe is not None:
            await probe.stop(None)
        await servicer.close()
        if scrapes is not None:
            await asyncio.to_thread(scrapes.close)
        logger.info("stopped")


async def _start_grpc(path: Path, servicer: GrammarServicer) -> tuple[grpc.aio.Server, HealthServicer]:
    server = grpc.aio.server(
        interceptors=[AbortedCalls()],
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ],
    )
    grammar_pb2_grpc.add_GrammarServicer_to_server(servicer, server)
    alive = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(alive, server)
    for service in ("", _SERVICE):
        alive.set(service, health_pb2.HealthCheckResponse.SERVING)
    # gRPC creates the socket file with the mode that the umask allows now.
    umask = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
    finally:
        os.umask(umask)
    await server.start()
    return server, alive


async def _start_probe(address: str, alive: HealthServicer) -> grpc.aio.Server:
    """Serve only the health service on a TCP address. Raises CannotListen."""
    # With SO_REUSEPORT, two processes on one port would share its checks without an error.
    probe = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(alive, probe)
    try:
        probe.add_insecure_port(address)
    except RuntimeError as error:
        raise CannotListen(f"health_listen: cannot bind {address!r}") from error
    await probe.start()
    return probe


RECOLLECT_S = 1.0
"""After so long the collector looks again for what an engine that has gone left behind."""


@dataclass(frozen=True, slots=True)
class Platform:
    """What serving an engine takes from the operating system."""

    receive: Callable[[socket.socket], Segment] = recv_segment
    """Receives the engine's segment over a connection, and maps it."""
    end_of: Callable[[Segment], Channel] = GrammarEnd
    exit: Callable[[int], object] = os._exit
    """Ends the process at once."""
    threads: Threads = OS_THREADS
    collect: Callable[[], object] = gc.collect
    """Finds the mapping of an engine that has gone."""


async def serve_engines(
    listener: socket.socket, servicer: GrammarServicer, config: GrammarConfig, platform: Platform = Platform()
) -> None:
    """Answer the engines that connect to `listener`, one after the other. Runs for ever."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    while True:
        connection, _ = await loop.sock_accept(listener)
        with connection:
            try:
                segment = await asyncio.to_thread(platform.receive, connection)
            except (SharedMemoryError, OSError) as error:
                logger.error("an engine connected and sent no valid segment: %s", error)
                continue
            with segment:
                await _serve_engine(connection, segment, servicer, config, platform)
            # The worker and its queues refer to each other, so the segment stays mapped until the collector finds them.
            del segment
            platform.collect()
            # A call or a thread that is ending may hold a view at this moment, and an idle process collects rarely.
            loop.call_later(RECOLLECT_S, platform.collect)


async def _serve_engine(
    connection: socket.socket, segment: Segment, servicer: GrammarServicer, config: GrammarConfig, platform: Platform
) -> None:
    """Answer one engine until its socket hangs up."""
    layout = segment.layout
    worker = Worker(
        platform.end_of(segment),
        threads=config.fill_threads,
        spin_s=config.spin_us * 1e-6,
        row_deadline_ms=config.row_deadline_ms,
        os=platform.threads,
    )
    worker.start()
    servicer.attach(worker, layout)
    logger.debug("an engine has connected: %r", layout)
    try:
        await _hang_up(connection, worker)
    finally:
        servicer.detach()
        if not await asyncio.shield(asyncio.to_thread(worker.stop)):
            logger.critical("a mask computation hangs; the process ends")
            platform.exit(EXIT_HUNG)
    if worker.error is not None:
        raise worker.error
    logger.info("the engine of generation %d has disconnected", layout.generation)


async def _hang_up(connection: socket.socket, worker: Worker) -> None:
    """Return when the peer closes `connection`, or the worker ends by itself."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    gone = asyncio.create_task(_closed(loop, connection), name="engine-hang-up")
    try:
        while not gone.done() and worker.alive:
            await asyncio.wait((gone,), timeout=0.5)
    finally:
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone


async def _closed(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while await loop.sock_recv(connection, 64):
            logger.warning("the engine wrote to its segment socket, which carries nothing after the segment")
