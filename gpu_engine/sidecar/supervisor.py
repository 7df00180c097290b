"""Supervises a spawned grammar process: starts it, watches it, starts it again, and leaves none running.

Invariant: at most one child runs, and it dies with this process, even by SIGKILL. The child runs in a session of its
own, so that Ctrl-C reaches only this process and requests can end in order.

`Sidecar` decides when a child is started and ended; `ChildProcess` is one child.

Not responsible for: the connection to the grammar process (see link.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gpu_engine.api.config import ServerConfig
from service_runtime.exhausted import exhausted
from service_runtime.logs import level_of
from service_runtime.parent_death import dying_with_us

log = logging.getLogger(__name__)
output_log = logging.getLogger("grammar_service")

FAILURE_WINDOW_S = 60.0
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 5.0
HEALTHY_S = 1.0
"""After the end of a process that was attached for this long, the next one starts at once; it still counts as a
failure."""
TERM_TIMEOUT_S = 3.0
MEMORY_CHECK_S = 0.1
_OUTSIDE_CODES = (0, -signal.SIGTERM, -signal.SIGKILL)
"""Exit codes that no crash of a library has."""
_PRIORITY = "LOCKSTEP_GRAMMAR_COMPILE_PRIORITY"
"""An explicit environment variable overrides the default."""
PRIVATE_CACHE_BYTES = 64 << 20
"""Size of the disk cache of compiled grammars, for the next grammar process of this engine."""
SPIN_ALWAYS_US = 1e6
"""Longer than any single wait of the grammar process."""


def grammar_command(
    config: ServerConfig, directory: Path, *, must_spin: bool = False, compile_idle: bool = False
) -> list[str]:
    """Return the command line of the grammar process.

    Args:
        must_spin: the grammar process never sleeps while it waits for a step.
        compile_idle: its compile workers run only on cores that are idle otherwise.
    """
    return [
        *(sys.executable, "-m", "grammar_service"),
        *("--dir", str(directory)),
        *("--backend", config.grammar_backend),
        *("--compile-timeout-s", f"{config.compile_timeout_s:g}"),
        *("--compile-memory-mb", str(config.compile_memory_mb)),
        *_cache_flags(config, directory),
        *("--log-format", config.log_format),
        *(("--spin-us", f"{SPIN_ALWAYS_US:g}") if must_spin else ()),
        *(("--compile-priority", "idle") if compile_idle and _PRIORITY not in os.environ else ()),
    ]


def _cache_flags(config: ServerConfig, directory: Path) -> tuple[str, ...]:
    if config.grammar_cache_dir:
        return "--cache-dir", config.grammar_cache_dir
    if config.grammar_dir:
        return ()  # the directory belongs to the operator: no cache is left there
    # The cache is removed with the private directory. The process after a killed one finds its grammars there.
    return "--cache-dir", str(directory / "compiled"), "--cache-dir-bytes", str(PRIVATE_CACHE_BYTES)


class Child(Protocol):
    """A started process; `ChildProcess` implements this."""

    @property
    def output(self) -> asyncio.StreamReader:
        """Its stdout and stderr."""

    @property
    def pid(self) -> int:
        """Process id, which belongs to the child until `wait` has returned."""

    @property
    def returncode(self) -> int | None:
        """Exit status, or minus the number of a signal; None before `wait` has returned."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the child has been reaped."""

    async def wait(self) -> int:
        """Wait for the end of the child and return `returncode`."""


StartChild = Callable[[Sequence[str], Mapping[str, str]], Awaitable[Child]]
"""Starts a command with an environment. Raises OSError."""


class Sidecar:
    """Keeps one process of `command` running while `run` runs."""

    def __init__(
        self,
        command: Sequence[str],
        give_up: Callable[[str], None],
        *,
        memory_mb: int = 0,
        max_failures: int = 8,
        cool_down_s: float = 60.0,
        start: StartChild | None = None,
        memory_mb_of: Callable[[int], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: see below.

        give_up: called with the reason each time the process has failed too often.
        memory_mb: limit on the private memory of the process, in MiB. A process above it is killed; 0: no limit.
        max_failures: how many ends within FAILURE_WINDOW_S, without `progress` in between, are too many; 0: no limit.
        cool_down_s: pause after too many failures.
        start: starts a command with an environment; None: `ChildProcess.start`.
        memory_mb_of: returns the memory of a process, in MiB; None: `private_memory_mb`.
        clock: monotonic, in seconds.
        """
        self._command, self._clock = list(command), clock
        self._start = start or ChildProcess.start
        self._memory_mb_of = memory_mb_of or private_memory_mb
        self._memory_mb, self._cool_down_s = memory_mb, cool_down_s
        self._max_failures = max_failures or sys.maxsize
        self._killed_for = ""
        self._ordered = False
        self._give_up = give_up
        self.progress: Callable[[], int] = lambda: 0
        """Returns a count that grows while the child serves requests; set when an engine is attached."""
        self.on_outside_end: Callable[[], None] = lambda: None
        """Called when an attached child was ended from outside, before the next one is started."""
        self._process: Child | None = None
        self._failures: deque[float] = deque()
        self.term_timeout_s = TERM_TIMEOUT_S
        self.longest_retry_s = LONGEST_RETRY_S
        self.healthy_s = HEALTHY_S
        self._attached_s = math.inf
        self.starts = 0
        self.gave_up: str | None = None
        """The reason why requests do not wait for a process: it failed too often, and the cool-down runs."""

    @property
    def pid(self) -> int | None:
        """Process id of the child while it runs."""
        process = self._process
        return process.pid if process and process.returncode is None else None

    @property
    def was_attached(self) -> bool:
        """The child that runs has been attached."""
        return self.pid is not None and self._attached_s < math.inf

    def attached(self) -> None:
        """Note that the child is attached. If it ends `healthy_s` later or after that, the next one starts at once."""
        self._attached_s = self._clock()

    async def run(self) -> None:
        """Start the child, and start it again whenever it ends, until cancelled.

        After too many failures it pauses for `cool_down_s`. Then a single failure causes the next pause, until a child
        was of use.
        """
        allowed = self._max_failures
        while True:
            await self._run_until(allowed)
            allowed = 1
            reason = (
                f"the grammar process failed {self._max_failures} times within {FAILURE_WINDOW_S:g} s; see "
                "the server's log"
            )
            log.error(
                "%s. Guided requests are refused, others go on; the next start is in %g s",
                reason,
                self._cool_down_s,
            )
            self.gave_up = reason
            self._give_up(reason)
            await asyncio.sleep(self._cool_down_s)
            self.gave_up = None
            self._failures.clear()

    async def _run_until(self, allowed: int) -> None:
        """Start the child repeatedly; return after `allowed` failures within the window without progress in between."""
        retry_s, progress = FIRST_RETRY_S, self.progress()
        while True:
            started_s, self._attached_s = self._clock(), math.inf
            try:
                code = await self._run_once()
                reason = describe_exit(code)
                # A child that was never attached had no answer outstanding: there is nothing to forgive.
                if code in _OUTSIDE_CODES and not self._ordered and self._attached_s < math.inf:
                    self.on_outside_end()
                    retry_s = FIRST_RETRY_S
            except OSError as error:  # too little memory, or no process ids left, for now
                reason = exhausted(error)
            reason, self._killed_for = self._killed_for or reason, ""
            now_s = self._clock()
            if now_s - started_s > FAILURE_WINDOW_S:
                retry_s, allowed = FIRST_RETRY_S, self._max_failures
            if progress != (progress := self.progress()):
                self._failures.clear()
                retry_s, allowed = FIRST_RETRY_S, self._max_failures
            else:
                self._failures.append(now_s)
            # This only shortens the wait: a process that serves no request and ends every other second still fails.
            if now_s - self._attached_s >= self.healthy_s:
                retry_s = FIRST_RETRY_S
            while self._failures and now_s - self._failures[0] > FAILURE_WINDOW_S:
                self._failures.popleft()
            if len(self._failures) >= allowed:
                log.error("the grammar process ended (%s)", reason)
                return
            log.error("the grammar process ended (%s); the next one starts in %.2f s", reason, retry_s)
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, self.longest_retry_s)

    def kill(self) -> None:
        """Kill a child that does not react; `run` starts the next one."""
        if self._process and self._process.returncode is None:
            self._ordered = True
            self._process.send(signal.SIGKILL)

    async def _run_once(self) -> int:
        process = self._process = await self._start(dying_with_us(self._command), os.environ | PYTHON_ENVIRONMENT)
        self.starts, self._ordered = self.starts + 1, False
        log.info("grammar process %d started", process.pid)
        watch = asyncio.create_task(self._watch_memory(process.pid), name="grammar process memory")
        try:
            await forward(process.output, output_log)
            return await process.wait()
        finally:
            watch.cancel()
            await self._end(process)
            await asyncio.wait([watch])

    async def _watch_memory(self, pid: int) -> None:
        """Kill a child that uses more memory than allowed, before the kernel kills the largest process instead."""
        while self._memory_mb:
            await asyncio.sleep(MEMORY_CHECK_S)
            used_mb = self._memory_mb_of(pid)
            if used_mb > self._memory_mb:
                self._killed_for = f"it used {used_mb} MiB of memory, more than grammar_memory_mb = {self._memory_mb}"
                self.kill()
                return

    async def _end(self, process: Child) -> None:
        if process.returncode is not None:
            return
        process.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.term_timeout_s):
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()

    def __repr__(self) -> str:
        return f"<Sidecar pid={self.pid} starts={self.starts} failures={len(self._failures)}>"


class ChildProcess:
    """One child process, made by `start`. Used on the event loop.

    uvloop's own way to start a process forks: with a model in memory that blocks the loop for 50 ms, and the step then
    meets copied pages (docs/log/). `subprocess.Popen` uses vfork, which copies no page tables.

    Invariant: `wait`, and nothing else, reaps the child and closes its pipe; the owner calls it. Until then the process
    id belongs to the child, so a signal reaches no other process.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], output: asyncio.StreamReader, pipe: asyncio.BaseTransport
    ) -> None:
        self._process, self._pipe = process, pipe
        self.output = output
        """The child's stdout and stderr."""

    @staticmethod
    async def start(
        command: Sequence[str], environment: Mapping[str, str], *, descriptors: Sequence[int] = ()
    ) -> ChildProcess:
        """Start `command` in a new session, with an empty stdin and these open descriptors. Raises OSError."""
        process = subprocess.Popen(  # noqa: ASYNC220  # blocks the loop for less than a millisecond
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
            pass_fds=descriptors,
        )
        assert process.stdout is not None
        output = asyncio.StreamReader()
        connecting = asyncio.ensure_future(
            asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), process.stdout)
        )
        cancelled: asyncio.CancelledError | None = None
        while not connecting.done():
            try:
                await asyncio.wait([connecting])
            except asyncio.CancelledError as error:
                # The connection is completed first: interrupted half-way, the loop and the pipe would both close the
                # descriptor.
                cancelled = error
        failed = connecting.exception()
        if cancelled or failed:
            process.kill()
            process.wait()
            if failed is None:
                connecting.result()[0].close()
            else:
                with contextlib.suppress(OSError):  # the loop may have closed it when it failed
                    process.stdout.close()
            raise cancelled or failed  # type: ignore[misc]
        pipe, _ = connecting.result()
        return ChildProcess(process, output, pipe)

    @property
    def pid(self) -> int:
        """Process id, which belongs to the child until `wait` has returned."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or minus the number of the signal that ended the child; None before `wait` has returned."""
        return self._process.returncode

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the child has been reaped."""
        if self._process.returncode is None:
            os.kill(self.pid, number)  # Popen.send_signal would reap the child

    async def wait(self) -> int:
        """Wait for the end of the child and return `returncode`. Unread bytes of `output` are lost.

        After a cancellation the child may still run: call `wait` again.
        """
        if self._process.returncode is None:
            try:
                await self._ended()
            except OSError:  # no file descriptor is left; a thread needs none
                await asyncio.to_thread(os.waitid, os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._pipe.close()
        return self._process.wait()

    async def _ended(self) -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        descriptor = os.pidfd_open(self.pid)
        try:
            loop.add_reader(descriptor, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def __repr__(self) -> str:
        return f"<ChildProcess pid={self.pid} returncode={self.returncode}>"


def private_memory_mb(pid: int) -> int:
    """Return the resident memory of a process in MiB, without mapped files and shared memory; 0: it has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") >> 20


async def forward(stream: asyncio.StreamReader, log: logging.Logger) -> None:
    """Log the lines of a child until its output ends; lines that it logged keep their form."""
    # Reads chunks: readline() raises on a line that is longer than its buffer.
    rest = b""
    while chunk := await stream.read(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            _log_line(line, log)
        rest = rest[-(1 << 16) :]
    if rest:
        _log_line(rest, log)


def _log_line(line: bytes, log: logging.Logger) -> None:
    # Lines of the child's log are passed on; any other output, a traceback for example, is a warning.
    text = line.decode("utf-8", "replace")
    level = level_of(text)
    log.log(level or logging.WARNING, "%s", text, extra={"formatted": level is not None})


def _python_path() -> str:
    # The child finds its package next to this gpu_engine, whatever its working directory is.
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


PYTHON_ENVIRONMENT = {"PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"}
"""Variables of a child that runs a package of ours."""


def describe_exit(code: int) -> str:
    """Return how a process with this return code ended."""
    if code >= 0:
        return f"exit status {code}"
    names = {number.value: number.name for number in signal.Signals}  # not every real-time signal has a name
    return f"killed by {names.get(-code, f'signal {-code}')}"
