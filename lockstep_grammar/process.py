"""One grammar process, kept running for a host engine: started, attached to the segment, watched, started again.

Invariant: at most one child runs, and it dies with this process, even by SIGKILL. `attached` grows by one whenever a
process holds the segment and the vocabulary; `up` is false from its end until the next one is attached. One thread
starts and watches the child, because the kernel ties the child's life to that thread.

Not responsible for: compilations and matchers (see client.py).
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import grpc

from protos.grammar.v1 import grammar_pb2 as pb
from protos.grammar.v1 import grammar_pb2_grpc
from service_runtime.exhausted import exhausted
from service_runtime.parent_death import dying_with_us
from service_runtime.private_directory import private_directory
from shared_mem.channel import EngineEnd
from shared_mem.errors import SharedMemoryError
from shared_mem.handover import RPC_SOCKET_NAME, SOCKET_NAME, connect, hung_up, send_segment
from shared_mem.segment import Segment

log = logging.getLogger(__name__)

DIRECTORY_PREFIX = "lockstep-grammar-"
CHECK_EVERY_S = 0.02
SILENCE_S = 10.0
"""A process without a heartbeat for this long hangs, and is killed."""
START_S = 120.0
"""A process that cannot be attached for this long is killed."""
CONFIGURE_TIMEOUT_S = 60.0
FIRST_RETRY_S, LONGEST_RETRY_S, HEALTHY_S = 0.05, 5.0, 1.0
"""After the end of a process that was attached for HEALTHY_S the next one starts after FIRST_RETRY_S; otherwise each
pause is twice the last one."""
CACHE_BYTES = 64 << 20
_ROOT = str(Path(__file__).resolve().parents[1])


class GrammarProcess:
    """Keeps a grammar process attached until `close`.

    Args:
        segment: the segment to hand over; the caller closes it after `close`.
        end: the engine's end of the segment.
        setup: the vocabulary.
        flags: further flags of `python -m grammar_service`.
        python: the interpreter of the process, which must have the same release of this package; "": this one.
    """

    def __init__(
        self,
        segment: Segment,
        end: EngineEnd,
        setup: pb.ConfigureRequest,
        flags: Sequence[str] = (),
        python: str = "",
    ) -> None:
        self._segment, self._end, self._setup = segment, end, setup
        self._stack = ExitStack()
        self.directory = private_directory(self._stack, Path(tempfile.gettempdir()), DIRECTORY_PREFIX)
        self._environment = dict(os.environ)
        if not python:
            # The child finds its package next to this one, whatever its working directory is.
            self._environment["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        program = [python or sys.executable, "-m", "grammar_service"]
        # The process after a killed one finds its grammars in the cache.
        cache = ["--cache-dir", str(self.directory / "cache"), "--cache-dir-bytes", str(CACHE_BYTES)]
        self._command = [*program, "--dir", str(self.directory), *cache, *flags]
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._stub: grammar_pb2_grpc.GrammarStub | None = None
        self.attached = 0
        """Number of times that a process was attached."""
        self.problem = ""
        """Why the last attempt to attach failed."""
        self._thread = threading.Thread(target=self._run, name="grammar process", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id of the child; None: none runs."""
        child = self._child
        return None if child is None or child.returncode is not None else child.pid

    @property
    def up(self) -> bool:
        """A process is attached."""
        return self._stub is not None

    def attachment(self, timeout_s: float) -> tuple[int, grammar_pb2_grpc.GrammarStub] | None:
        """Return the number of the attached process and its stub; wait for one for at most `timeout_s`, else None."""
        with self._changed:
            self._changed.wait_for(lambda: self._stub is not None or self._closed.is_set(), max(0.0, timeout_s))
            return None if self._stub is None else (self.attached, self._stub)

    def kill(self) -> None:
        """End the child with SIGKILL; the next one starts."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """End the child and remove the sockets."""
        self._closed.set()
        self._thread.join()
        self._stack.close()

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._closed.is_set():
            attached_s = 0.0
            try:
                attached_s = self._run_once()
            except OSError as error:
                self.problem = exhausted(error)
            if self._closed.is_set():
                return
            retry_s = FIRST_RETRY_S if attached_s >= HEALTHY_S else retry_s
            log.error("the grammar process ended (%s); the next one starts in %.2f s", self.problem, retry_s)
            self._closed.wait(retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    def _run_once(self) -> float:
        """Run one child to its end; return for how long it was attached, in seconds. Raises OSError."""
        child = self._child = subprocess.Popen(
            dying_with_us(self._command),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=self._environment,
        )
        attached_s = 0.0
        try:
            found = self._attach(child)
            if found is not None:
                sock, channel = found
                with sock, channel:
                    attached_s = self._watch(child, sock, channel)
        finally:
            child.terminate() if self._closed.is_set() else child.kill()
            try:
                child.wait(3.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        return attached_s

    def _attach(self, child: subprocess.Popen[bytes]) -> tuple[socket.socket, grpc.Channel] | None:
        deadline_s = time.monotonic() + START_S
        while not self._closed.wait(CHECK_EVERY_S) and time.monotonic() < deadline_s:
            if child.poll() is not None:
                self.problem = f"exit status {child.returncode} before it was attached"
                return None
            try:
                sock = connect(self.directory / SOCKET_NAME)
            except SharedMemoryError as error:
                self.problem = str(error)
                continue
            channel = _channel(self.directory / RPC_SOCKET_NAME)
            try:
                send_segment(sock, self._segment)
                stub = grammar_pb2_grpc.GrammarStub(channel)
                stub.Configure(self._setup, timeout=CONFIGURE_TIMEOUT_S, wait_for_ready=True)
                return sock, channel
            except (SharedMemoryError, grpc.RpcError) as error:
                self.problem = str(error)
                channel.close()
                sock.close()
        return None

    def _watch(self, child: subprocess.Popen[bytes], sock: socket.socket, channel: grpc.Channel) -> float:
        """Publish the process until it ends or hangs; return for how long it was attached."""
        started_s = time.monotonic()
        with self._changed:
            self.attached += 1
            self._stub = grammar_pb2_grpc.GrammarStub(channel)
            self._end.clear_abort()
            self._changed.notify_all()
        log.info("grammar process %d is attached", child.pid)
        try:
            while not self._closed.is_set() and not hung_up(sock, CHECK_EVERY_S):
                self._end.heartbeat()
                age_ns = self._end.heartbeat_age_ns() or 0
                if min(age_ns * 1e-9, time.monotonic() - started_s) > SILENCE_S:
                    self.problem = f"it showed no life for {SILENCE_S:g} s"
                    break
            else:
                self.problem = "its socket hung up"
        finally:
            with self._changed:
                self._stub = None
                self._end.set_abort()
                self._changed.notify_all()
        return time.monotonic() - started_s

    def __repr__(self) -> str:
        return f"<GrammarProcess pid={self.pid} attached={self.attached} up={self.up}>"


def _channel(path: Path) -> grpc.Channel:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    # A new channel makes a new connection; it must not inherit the back-off of the old connection.
    return grpc.insecure_channel(f"unix:{path}", options=[*options, ("grpc.use_local_subchannel_pool", 1)])
