"""The connection to the grammar process: hand the segment over, configure, watch for the end, start again.

The invariant: `up` is true only while a grammar process holds our segment and our tokenizer, and every way down is told
once (`lost`) before the next way up (`restored`). One task runs `run` and owns the sockets. Not here: compiling and
binding (`grammar_client.py`), the process itself (`sidecar.py`).
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

from gpu_engine.api.errors import GrammarUnavailable
from gpu_engine.api.owned_tasks import OwnedTasks
from gpu_engine.sidecar.silences import Silences
from protos.grammar.v1 import grammar_pb2 as gpb
from protos.grammar.v1 import grammar_pb2_grpc
from shared_mem.errors import SharedMemoryError, VersionSkew
from shared_mem.handover import SOCKET_NAME, connect, send_segment
from shared_mem.segment import Segment

log = logging.getLogger(__name__)

RPC_SOCKET_NAME = "grammar.sock"
CONFIGURE_TIMEOUT_S = 60.0
"""Building the token tables of a large vocabulary takes seconds."""
FIRST_RETRY_S = 0.02
LONGEST_RETRY_S = 1.0
RETRY_GROWTH = 1.2  # a process that is there is found within a fifth of the time that it took to come
START_PATIENCE_S = 120.0
"""Longer than the slowest start: a process that is not attached by then is stuck, and is killed if it is ours."""
RETIRE_S = 60.0
"""Longer than the deadline of any call but a very long compilation, which is then made again."""
LOOK_EVERY_S = 0.02
"""The engine's heartbeats, and looks at those of the grammar process, which come every 10 ms."""
SILENT_S = 0.07
"""Without a heartbeat for so long a process may be hung: guided steps pause, which costs nothing if it is not. With the
time between two looks it is less than 100 ms."""


@dataclass(frozen=True, slots=True)
class GrammarSetup:
    """What every new grammar process is told."""

    tokenizer_json: bytes
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    generation: int


class LinkEvents(Protocol):
    """Whom the link tells, on the event loop."""

    def link_silent(self) -> None:
        """The attached grammar process shows no life. `link_alive` or `link_lost` comes next."""

    def link_alive(self) -> None:
        """It shows life again; it has lost nothing."""

    def link_lost(self) -> None:
        """The grammar process is gone."""

    def link_restored(self) -> None:
        """A grammar process is attached, for the first time or again."""


class Heartbeats(Protocol):
    """Signs of life in the segment; an EngineEnd has them."""

    def heartbeat(self) -> None:
        """Show the grammar process that we live."""

    def heartbeat_age_ns(self) -> int | None:
        """Return how long ago it showed life; None when it never did."""


HandOver = Callable[[Path], socket.socket]
"""Connects to the segment socket in a directory, hands the segment over, and returns the open socket. May block."""


def segment_hand_over(segment: Segment) -> HandOver:
    """Return the real hand-over of `segment`, which stays the caller's."""

    def hand_over(directory: Path) -> socket.socket:
        sock = connect(directory / SOCKET_NAME)
        try:
            attachment = send_segment(sock, segment)
        except BaseException:
            sock.close()
            raise
        log.info("grammar process %d holds the segment (generation %d)", attachment.pid, attachment.generation)
        return sock

    return hand_over


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
    ) -> None:
        """Args: after `silence_s` without a heartbeat `on_stuck` is called, to kill it, and the link counts as lost.

        It is called, too, whenever a process could not be attached for `start_patience_s`; `on_attached` when one was.
        """
        self._heartbeats = heartbeats
        self._silence_s = silence_s
        self._on_stuck, self._on_attached = on_stuck, on_attached
        self._directory = directory
        self._setup = setup
        self._hand_over = hand_over
        self._events = events
        self._up = asyncio.Event()
        self._given_up: GrammarUnavailable | None = None
        self._changed = asyncio.Event()
        self._tasks = OwnedTasks()
        self._channel: grpc.aio.Channel | None = None
        self.stub: grammar_pb2_grpc.GrammarAsyncStub
        self.backends: tuple[int, ...] = ()
        self.max_compilations = 0
        """Of one backend at once, in the process that was attached last; 0: it did not say."""
        self.start_patience_s = START_PATIENCE_S
        self.retire_s = RETIRE_S
        self.attached = 0
        """How many times a grammar process was attached."""
        self.silences = Silences()

    @property
    def up(self) -> bool:
        """A grammar process is attached and configured."""
        return self._up.is_set()

    async def ready(self, timeout_s: float) -> None:
        """Wait until `up`; raises GrammarUnavailable after `timeout_s`, or at once when the link was given up."""
        await self._until(lambda: self.up, timeout_s)

    async def attached_after(self, attached: int, timeout_s: float) -> None:
        """Wait until another process than the `attached`-th is up; raises as `ready`."""
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
        """None will come soon: who waits, and who asks before one is attached all the same, gets GrammarUnavailable."""
        self._given_up = GrammarUnavailable(reason)
        self._changed.set()

    async def run(self) -> None:
        """Attach, watch, and attach again, for ever. Raises VersionSkew: no retry helps against another release."""
        try:
            while True:
                with await self._attach() as sock:
                    self._up.set()
                    self.attached += 1
                    self._given_up = None  # one came after all
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
        """Tell of silence, and return, with the reason, when the process is dead or stuck."""
        hang_up = asyncio.create_task(_hang_up(sock), name="segment socket")
        attached_at_s, silent = time.monotonic(), False
        try:
            while True:
                self._heartbeats.heartbeat()
                await asyncio.wait([hang_up], timeout=LOOK_EVERY_S)
                if hang_up.done():
                    return "hung up"
                age_ns = self._heartbeats.heartbeat_age_ns()
                silent_s = time.monotonic() - attached_at_s
                if age_ns is not None:  # the word may still hold the last beat of the process before this one
                    silent_s = min(age_ns * 1e-9, silent_s)
                if silent != (silent_s > SILENT_S):
                    silent = not silent
                    if silent:
                        self._fell_silent(silent_s)
                    else:
                        self._heard()
                if line := self.silences.line():
                    log.info("the grammar process %s", line)
                if silent_s > self._silence_s:
                    self._on_stuck()
                    return f"showed no life for {silent_s:.1f} s"
        finally:
            hang_up.cancel()
            self.silences.lost()

    def _fell_silent(self, silent_s: float) -> None:
        self.silences.begin(silent_s)
        log.debug("the grammar process is silent for %.2f s", silent_s)
        self._events.link_silent()

    def _heard(self) -> None:
        log.debug("the grammar process is heard again after %.2f s", self.silences.end())
        self._events.link_alive()

    async def _attach(self) -> socket.socket:
        retry_s, since_s = FIRST_RETRY_S, time.monotonic()
        while True:
            try:
                return await self._attach_once()
            except VersionSkew:
                raise
            except (SharedMemoryError, grpc.aio.AioRpcError, OSError) as error:
                log.debug("no grammar process yet: %s", error)
            if time.monotonic() > since_s + self.start_patience_s:
                log.warning("no grammar process could be attached for %g s", self.start_patience_s)
                since_s = time.monotonic()
                self._on_stuck()
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * RETRY_GROWTH, LONGEST_RETRY_S)

    async def _attach_once(self) -> socket.socket:
        sock = await asyncio.to_thread(self._hand_over, self._directory)
        try:
            self._retire_channel()
            self._channel = grpc.aio.insecure_channel(
                f"unix:{self._directory / RPC_SOCKET_NAME}",
                options=[
                    ("grpc.max_send_message_length", -1),
                    ("grpc.max_receive_message_length", -1),
                    # A new channel must make a new connection, not inherit the back-off of the one to the dead process.
                    ("grpc.use_local_subchannel_pool", 1),
                ],
            )
            self.stub = grammar_pb2_grpc.GrammarStub(self._channel)
            await self._configure(self.stub.Configure)
            return sock
        except BaseException:
            sock.close()
            raise

    async def _configure(self, call: Callable[..., Awaitable[gpb.ConfigureResponse]]) -> None:
        setup = self._setup
        request = gpb.ConfigureRequest(
            tokenizer_json=setup.tokenizer_json,
            vocab_size=setup.vocab_size,
            stop_token_ids=setup.stop_token_ids,
            generation=setup.generation,
        )
        response = await call(request, timeout=CONFIGURE_TIMEOUT_S, wait_for_ready=True)
        self.backends = tuple(int(backend) for backend in response.backends)
        self.max_compilations = response.max_compilations
        names = ", ".join(gpb.Backend.Name(backend) for backend in response.backends)
        log.info("grammar process %d is configured: %s", response.pid, names)

    def _retire_channel(self) -> None:
        # Not closed at once: that would cancel the calls on it, which must end with a status of their own.
        channel, self._channel = self._channel, None
        if channel is not None:
            self._tasks.background(channel.close(grace=self.retire_s), "close the channel to the last grammar process")

    def __repr__(self) -> str:
        return f"<GrammarLink {'up' if self.up else 'down'} attached={self.attached} {self._directory}>"


async def _hang_up(sock: socket.socket) -> None:
    """Return when the peer closed its end or died."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # a reset is a hang-up, too
        while await asyncio.get_running_loop().sock_recv(sock, 64):
            log.warning("the grammar process sent bytes on the segment socket, where nothing is to be said")
