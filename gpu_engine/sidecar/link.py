"""The connection to the grammar process: hand the segment over, configure, watch for its end, connect again.

Invariant: `up` is true only while a grammar process holds the engine's segment and tokenizer. Every loss is reported
once (`link_lost`) before the next attachment (`link_restored`). One task runs `run` and owns the sockets.

Not responsible for: compiling (see compilations.py), matchers (see client.py), the process itself (see supervisor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from gpu_engine.api.errors import GrammarUnavailable, LockstepError
from protos.grammar.v1 import grammar_pb2 as gpb
from protos.grammar.v1 import grammar_pb2_grpc
from service_runtime.owned_tasks import OwnedTasks
from shared_mem.errors import SharedMemoryError, VersionSkew
from shared_mem.handover import RPC_SOCKET_NAME, SOCKET_NAME, connect, send_segment
from shared_mem.segment import Segment

log = logging.getLogger(__name__)

CONFIGURE_TIMEOUT_S = 60.0
"""Building the token tables of a large vocabulary takes seconds."""
FIRST_RETRY_S = 0.02
LONGEST_RETRY_S = 1.0
RETRY_GROWTH = 1.2
"""A process is found at most a fifth of its start time after it has started."""
START_PATIENCE_S = 120.0
"""Longer than the slowest start: a spawned process that cannot be attached for so long is stuck, and is killed."""
RETIRE_S = 60.0
"""Grace of an old channel. Longer than the deadline of any call but a very long compilation, which is repeated."""
CHECK_EVERY_S = 0.02
"""Interval of the engine's heartbeats, and of checks of the grammar process's heartbeats (one every 10 ms)."""
SILENT_S = 0.07
"""Without a heartbeat for this long a process may be hung: guided steps pause, which loses nothing if it is not. With
the interval of the checks, the pause begins within 100 ms, unless the checks themselves are late (see `Patience`)."""
TOLD_S = 0.5
"""Only a longer silence is a warning; shorter ones are counted."""


@dataclass(frozen=True, slots=True)
class GrammarSetup:
    """What every new grammar process is configured with."""

    tokenizer_json: bytes
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    generation: int


class LinkEvents(Protocol):
    """Receives the events of the link, on the event loop."""

    def link_silent(self) -> None:
        """The attached grammar process shows no life. The next event is `link_alive` or `link_lost`."""

    def link_alive(self) -> None:
        """The grammar process shows life again, and has kept its state."""

    def link_lost(self) -> None:
        """The grammar process has ended, or is given up as hung."""

    def link_restored(self) -> None:
        """A grammar process is attached, for the first time or again."""


class Heartbeats(Protocol):
    """Heartbeats in the segment; `EngineEnd` implements this."""

    def heartbeat(self) -> None:
        """Write the engine's heartbeat."""

    def heartbeat_age_ns(self) -> int | None:
        """Return the age of the grammar process's last heartbeat; None: there was none."""


HandOver = Callable[[Path], socket.socket]
"""Connects to the segment socket in a directory, hands the segment over, returns the open socket. May block."""


def segment_hand_over(segment: Segment) -> HandOver:
    """Return the hand-over of `segment`, whose owner remains the caller."""

    def hand_over(directory: Path) -> socket.socket:
        sock = connect(directory / SOCKET_NAME)
        try:
            attachment = send_segment(sock, segment)
        except BaseException:
            sock.close()
            raise
        log.debug("grammar process %d holds the segment (generation %d)", attachment.pid, attachment.generation)
        return sock

    return hand_over


OpenChannel = Callable[[Path], grpc.aio.Channel]
"""Opens a channel to the grammar process that serves at a socket. Does not wait."""


def unix_channel(path: Path) -> grpc.aio.Channel:
    """Return a channel to the unix socket at `path`."""
    return grpc.aio.insecure_channel(
        f"unix:{path}",
        options=[
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            # A new channel makes a new connection; it must not inherit the back-off of the old connection.
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )


def configure_request(setup: GrammarSetup) -> gpb.ConfigureRequest:
    """Return the message of a setup."""
    return gpb.ConfigureRequest(
        tokenizer_json=setup.tokenizer_json,
        vocab_size=setup.vocab_size,
        stop_token_ids=setup.stop_token_ids,
        generation=setup.generation,
    )


class Patience:
    """How long a grammar process may show no life before it counts as silent.

    On a busy machine its heartbeats are late, and so are the checks of this process, which show how late.
    """

    def __init__(self) -> None:
        self._late_s = 0.0

    def checked(self, late_s: float) -> None:
        """Note by how much the last check was late. What was seen is forgotten by half within some 15 checks."""
        self._late_s = max(late_s, 0.95 * self._late_s)

    @property
    def seconds(self) -> float:
        """The longest silence that is none: SILENT_S, and four times the lateness of the checks, at most TOLD_S."""
        return min(SILENT_S + 4 * self._late_s, TOLD_S)

    def __repr__(self) -> str:
        return f"<Patience {self.seconds:.3f} s>"


class GrammarLink:
    """Keeps one grammar process attached. `stub` may be used while `up`."""

    def __init__(
        self,
        directory: Path,
        setup: GrammarSetup,
        hand_over: HandOver,
        events: LinkEvents,
        heartbeats: Heartbeats,
        *,
        silence_s: float,
        on_stuck: Callable[[], None],
        on_attached: Callable[[], None] = lambda: None,
        was_attached: Callable[[], bool] = lambda: False,
        open_channel: OpenChannel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: see below.

        silence_s: a process without a heartbeat for this long counts as hung, and the link as lost.
        on_stuck: kills the process. Called when it is hung, or when none could be attached for `start_patience_s`.
        on_attached: called each time a process has been attached.
        was_attached: returns whether the running process was attached before. Such a process needs no time to start, so
            it counts as hung if it cannot be attached again within `silence_s`.
        open_channel: opens a gRPC channel to a socket; None: `unix_channel`.
        clock: monotonic, in seconds.
        """
        self._heartbeats, self._clock = heartbeats, clock
        self._open_channel = open_channel or unix_channel
        self._silence_s = silence_s
        self._on_stuck, self._on_attached, self._was_attached = on_stuck, on_attached, was_attached
        self._directory = directory
        self._setup = setup
        self._hand_over = hand_over
        self._events = events
        self._up = asyncio.Event()
        self._given_up: GrammarUnavailable | None = None
        self._changed = asyncio.Event()
        self._tasks = OwnedTasks(LockstepError)
        self._channel: grpc.aio.Channel | None = None
        self.stub: grammar_pb2_grpc.GrammarAsyncStub
        self.backends: tuple[int, ...] = ()
        self.versions: tuple[str, ...] = ()
        """The version of each of `backends`."""
        self.defaults = ""
        """The settings that say which answers a grammar has where a request leaves it open."""
        self.max_compilations = 0
        """Compilations that one backend of the last attached process takes at once; 0: the process gave no limit."""
        self.attempt_limit_s = 0.0
        """Longest time of one attempt to compile by the limits of the last attached process; 0: it stated none."""
        self.compile_timeout_s = 0.0
        """Time limit of one compilation in the last attached process; 0: it stated none."""
        self.start_patience_s = START_PATIENCE_S
        self.retire_s = RETIRE_S
        self.attached = 0
        """Number of attachments so far; the number of the current grammar process."""
        self.silences = 0
        """Number of times that an attached process was found silent."""

    @property
    def up(self) -> bool:
        """A grammar process is attached and configured."""
        return self._up.is_set()

    async def ready(self, timeout_s: float) -> None:
        """Wait until `up`. Raises GrammarUnavailable after `timeout_s`, or at once when the process is given up."""
        await self._until(lambda: self.up, timeout_s)

    async def attached_after(self, attached: int, timeout_s: float) -> None:
        """Wait until a process with a higher number than `attached` is up. Raises as `ready` does."""
        await self._until(lambda: self.up and self.attached > attached, timeout_s)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    if self._given_up:
                        raise self._given_up
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise GrammarUnavailable(f"the grammar process did not answer within {timeout_s:g} s; try again") from None

    def give_up(self, reason: str) -> None:
        """Fail all waiters, and later ones until a process is attached, with GrammarUnavailable."""
        self._given_up = GrammarUnavailable(reason)
        self._changed.set()

    async def run(self) -> None:
        """Attach, watch, and attach again, for ever. Raises VersionSkew, which no retry resolves."""
        try:
            while True:
                with await self._attach() as sock:
                    self._up.set()
                    self.attached += 1
                    self._given_up = None
                    self._changed.set()
                    self._on_attached()
                    self._events.link_restored()
                    reason = await self._watch(sock)
                self._up.clear()
                log.warning("the grammar process %s; guided requests pause", reason)
                self._events.link_lost()
        finally:
            self._up.clear()
            await self._tasks.aclose()
            if self._channel is not None:
                await self._channel.close(grace=None)

    async def _watch(self, sock: socket.socket) -> str:
        """Report silences; return the reason when the process has ended or hangs."""
        hang_up = asyncio.create_task(_hang_up(sock), name="segment socket")
        attached_at_s, silent, told, patience = self._clock(), False, False, Patience()
        try:
            while True:
                self._heartbeats.heartbeat()
                looked_s = self._clock()
                await asyncio.wait([hang_up], timeout=CHECK_EVERY_S)
                if hang_up.done():
                    return "hung up"
                age_ns = self._heartbeats.heartbeat_age_ns()
                silent_s = self._clock() - attached_at_s
                if age_ns is not None:  # the word may still hold the last heartbeat of the process before this one
                    silent_s = min(age_ns * 1e-9, silent_s)
                patience.checked(self._clock() - looked_s - CHECK_EVERY_S)
                # Only a heartbeat ends a silence.
                if silent != (silent_s > (SILENT_S if silent else patience.seconds)):
                    silent = not silent
                    self._silence_changed(silent)
                if told != (silent and silent_s > TOLD_S):
                    told = not told
                    does = "shows no life; guided requests pause" if told else "shows life again"
                    log.warning("the grammar process %s", does)
                if silent_s > self._silence_s:
                    self._on_stuck()
                    return f"showed no life for {silent_s:.1f} s"
        finally:
            hang_up.cancel()

    def _silence_changed(self, silent: bool) -> None:
        if silent:
            self.silences += 1
            self._events.link_silent()
        else:
            self._events.link_alive()

    async def _attach(self) -> socket.socket:
        retry_s, since_s, refusal = FIRST_RETRY_S, self._clock(), ""
        # A timer, since one attempt to attach a hung process may last longer than `silence_s`.
        hung = asyncio.get_running_loop().call_later(self._silence_s, self._end_hung)
        try:
            while True:
                try:
                    return await self._attach_once()
                except VersionSkew:
                    raise
                except grpc.aio.AioRpcError as error:
                    refusal = self._refused(error, refusal)
                except (SharedMemoryError, OSError) as error:
                    log.debug("no grammar process yet: %s", error)
                if self._clock() > since_s + self.start_patience_s:
                    log.warning("no grammar process could be attached for %g s", self.start_patience_s)
                    since_s = self._clock()
                    self._on_stuck()
                await asyncio.sleep(retry_s)
                retry_s = min(retry_s * RETRY_GROWTH, LONGEST_RETRY_S)
        finally:
            hung.cancel()

    def _end_hung(self) -> None:
        """End a process that was attached before, and cannot be attached again."""
        if self._was_attached():
            log.warning("the grammar process could not be attached again within %g s", self._silence_s)
            self._on_stuck()

    @staticmethod
    def _refused(error: grpc.aio.AioRpcError, before: str) -> str:
        """Log why Configure failed, and an equal reason once; return the reason."""
        reason = f"{error.code().name}: {error.details()}"
        if error.code() is grpc.StatusCode.UNAVAILABLE or reason == before:
            log.debug("no grammar process yet: %s", reason)
        else:
            log.error("the grammar process cannot be configured, and is asked again: %s", reason)
        return reason

    async def _attach_once(self) -> socket.socket:
        handing = asyncio.get_running_loop().run_in_executor(None, self._hand_over, self._directory)
        try:
            sock = await asyncio.shield(handing)
        except asyncio.CancelledError:
            # The thread goes on, and its socket would stay open.
            handing.add_done_callback(_close_unwanted)
            raise
        try:
            self._retire_channel()
            self._channel = self._open_channel(self._directory / RPC_SOCKET_NAME)
            self.stub = grammar_pb2_grpc.GrammarStub(self._channel)
            await self._configure(self.stub.Configure)
            return sock
        except BaseException:
            sock.close()
            raise

    async def _configure(self, call: Callable[..., Awaitable[gpb.ConfigureResponse]]) -> None:
        response = await call(configure_request(self._setup), timeout=CONFIGURE_TIMEOUT_S, wait_for_ready=True)
        self.backends = tuple(int(backend) for backend in response.backends)
        self.versions, self.defaults = tuple(response.versions), response.defaults
        self.max_compilations = response.max_compilations
        self.attempt_limit_s = response.attempt_limit_s
        self.compile_timeout_s = response.compile_timeout_s
        names = ", ".join(gpb.Backend.Name(backend) for backend in response.backends)
        log.info("grammar process %d is configured: %s", response.pid, names)

    def _retire_channel(self) -> None:
        # Not closed at once: closing cancels its calls, and each call must end with the right status.
        channel, self._channel = self._channel, None
        if channel is not None:
            self._tasks.background(channel.close(grace=self.retire_s), "close the channel to the last grammar process")

    def __repr__(self) -> str:
        return f"<GrammarLink {'up' if self.up else 'down'} attached={self.attached} {self._directory}>"


def _close_unwanted(handing: asyncio.Future[socket.socket]) -> None:
    if not handing.cancelled() and handing.exception() is None:
        handing.result().close()


async def _hang_up(sock: socket.socket) -> None:
    """Return when the peer has closed its end, or has died."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # a reset connection also counts as a hang-up
        while await asyncio.get_running_loop().sock_recv(sock, 64):
            log.warning("the grammar process sent bytes on the segment socket, which carries none")
