"""A grammar process of our own: started, watched, started again, and never left behind.

The invariant: at most one child lives, and it dies with this process, even by SIGKILL (PR_SET_PDEATHSIG, set by the
child itself before it becomes the grammar process). It runs in a session of its own, so that Ctrl-C reaches us alone
and requests can end in order. Not here: what is said to it (`grammar_link.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_engine.api.config import ServerConfig
from gpu_engine.sidecar.child_process import ChildProcess
from service_runtime.logs import level_of

log = logging.getLogger(__name__)
output_log = logging.getLogger("grammar_service")

FAILURE_WINDOW_S = 60.0
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 5.0
HEALTHY_S = 1.0
"""A process that was of use for so long is followed by the next one at once; its end still counts as a failure."""
TERM_TIMEOUT_S = 3.0
MEMORY_LOOK_S = 0.1
_FROM_OUTSIDE = (0, -signal.SIGTERM, -signal.SIGKILL)
"""Ends that no crash of a library has."""
_PRIORITY = "LOCKSTEP_GRAMMAR_COMPILE_PRIORITY"
"""Whoever sets it means it."""
PRIVATE_CACHE_BYTES = 64 << 20
"""Of compiled grammars on disk, kept for the next grammar process of this engine."""
SPIN_ALWAYS_US = 1e6
"""Longer than any single wait of the grammar process."""

# Runs in the child: ask the kernel for SIGKILL at the parent's death, look whether it has died before that, become the
# grammar process. (A preexec_fn would do the same between fork and exec, where other threads' locks may be held.)
_DIE_WITH_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def grammar_command(
    config: ServerConfig, directory: Path, *, must_spin: bool = False, compile_idle: bool = False
) -> list[str]:
    """Return the command line of the grammar process.

    Args: `must_spin`: it never sleeps while it waits for a step; `compile_idle`: it compiles when nobody else computes.
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
        return ()  # others' directory: nothing of ours is to stay there
    # Goes with the private directory: one that follows a killed one need not wait for compile workers.
    return "--cache-dir", str(directory / "compiled"), "--cache-dir-bytes", str(PRIVATE_CACHE_BYTES)


class Sidecar:
    """Runs `command` as long as `run` runs."""

    def __init__(
        self,
        command: Sequence[str],
        give_up: Callable[[str], None],
        *,
        memory_mb: int = 0,
        max_failures: int = 8,
        cool_down_s: float = 60.0,
    ) -> None:
        """Args: see below.

        give_up: told why, each time when the process failed too often.
        memory_mb: a process with more memory of its own is killed; 0: no limit.
        max_failures: so many ends within FAILURE_WINDOW_S, with no `progress` between, are too many; 0: none are.
        cool_down_s: after it failed too often, it is tried again so much later.
        """
        self._command = list(command)
        self._memory_mb, self._cool_down_s = memory_mb, cool_down_s
        self._max_failures = max_failures or sys.maxsize
        self._killed_for = ""
        self._ordered = False
        self._give_up = give_up
        self.progress: Callable[[], int] = lambda: 0
        """Counts up while the child is of use to requests; whoever attaches an engine says how."""
        self.forgive: Callable[[], None] = lambda: None
        """Called when the child was ended from outside, before the next one is started."""
        self._process: ChildProcess | None = None
        self._failures: deque[float] = deque()
        self.term_timeout_s = TERM_TIMEOUT_S
        self.longest_retry_s = LONGEST_RETRY_S
        self.healthy_s = HEALTHY_S
        self._of_use_s = math.inf
        self.starts = 0
        self.gave_up: str | None = None
        """Why nobody waits for it at the moment: it failed too often, and the cool-down runs."""

    @property
    def pid(self) -> int | None:
        """The child's process id while it runs."""
        process = self._process
        return process.pid if process and process.returncode is None else None

    def attached(self) -> None:
        """Hear that the child serves. From `healthy_s` later on its end is no reason to wait before the next."""
        self._of_use_s = time.monotonic()

    async def run(self) -> None:
        """Start the child, and start it again whenever it ends, until cancelled.

        After too many failures it is given up for a time; then one more failure gives it up again, until one has lived.
        """
        allowed = self._max_failures
        while True:
            await self._run_until(allowed)
            allowed = 1
            reason = (
                f"the grammar process failed {self._max_failures} times within {FAILURE_WINDOW_S:g} s "
                "(grammar_max_failures); see the server's log"
            )
            log.error(
                "%s. Guided requests are refused and the others go on; it is tried again in %g s (grammar_retry_s)",
                reason,
                self._cool_down_s,
            )
            self.gave_up = reason
            self._give_up(reason)
            await asyncio.sleep(self._cool_down_s)
            self.gave_up = None
            self._failures.clear()

    async def _run_until(self, allowed: int) -> None:
        """Start it again and again, until it failed `allowed` times within the window and was of no use between."""
        retry_s, progress = FIRST_RETRY_S, self.progress()
        while True:
            started_s, self._of_use_s = time.monotonic(), math.inf
            try:
                ended = _describe(code := await self._run_once())
                # One that served nobody owed nobody an answer: what is to be taken back is of the end before.
                if code in _FROM_OUTSIDE and not self._ordered and self._of_use_s < math.inf:
                    self.forgive()
                    retry_s = FIRST_RETRY_S  # who ends one that serves wants the next; it still counts as a failure
            except OSError as error:  # no memory or no process ids left, for now
                ended = str(error)
            ended, self._killed_for = self._killed_for or ended, ""
            now_s = time.monotonic()
            if now_s - started_s > FAILURE_WINDOW_S:
                retry_s, allowed = FIRST_RETRY_S, self._max_failures
            if progress != (progress := self.progress()):
                self._failures.clear()
                retry_s, allowed = FIRST_RETRY_S, self._max_failures
            else:
                self._failures.append(now_s)
            # For the wait alone: one that serves nobody and ends every other second fails each time.
            if now_s - self._of_use_s >= self.healthy_s:
                retry_s = FIRST_RETRY_S
            while self._failures and now_s - self._failures[0] > FAILURE_WINDOW_S:
                self._failures.popleft()
            if len(self._failures) >= allowed:
                log.error("the grammar process ended (%s)", ended)
                return
            log.error("the grammar process ended (%s); it is started again in %.2f s", ended, retry_s)
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, self.longest_retry_s)

    def kill(self) -> None:
        """End a child that does not react any more; `run` starts the next one."""
        if self._process and self._process.returncode is None:
            self._ordered = True
            self._process.send(signal.SIGKILL)

    async def _run_once(self) -> int:
        process = self._process = await ChildProcess.start(
            [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *self._command],
            os.environ | {"PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"},
        )
        self.starts, self._ordered = self.starts + 1, False
        log.info("grammar process %d started", process.pid)
        watch = asyncio.create_task(self._watch_memory(process.pid), name="grammar process memory")
        try:
            await _forward(process.output)
            return await process.wait()
        finally:
            watch.cancel()
            await self._end(process)
            await asyncio.wait([watch])

    async def _watch_memory(self, pid: int) -> None:
        """Kill the child before it takes the memory of others; the kernel would choose its victim by size."""
        while self._memory_mb:
            await asyncio.sleep(MEMORY_LOOK_S)
            used_mb = private_memory_mb(pid)
            if used_mb > self._memory_mb:
                self._killed_for = f"it had {used_mb} MiB of memory, more than grammar_memory_mb = {self._memory_mb}"
                self.kill()
                return

    async def _end(self, process: ChildProcess) -> None:
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


def private_memory_mb(pid: int) -> int:
    """Return the resident memory of a process in MiB, without what it maps from files and shares; 0: it is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") >> 20


async def _forward(stream: asyncio.StreamReader) -> None:
    # By chunks and not by readline(), which raises on a line longer than its buffer.
    rest = b""
    while chunk := await stream.read(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            _log_line(line)
        rest = rest[-(1 << 16) :]
    if rest:
        _log_line(rest)


def _log_line(line: bytes) -> None:
    # As the grammar process logs; anything else is the end of it, a traceback say.
    text = line.decode("utf-8", "replace")
    level = level_of(text)
    output_log.log(level or logging.WARNING, "%s", text, extra={"formatted": level is not None})


def _python_path() -> str:
    # The child must find grammar_service where we found gpu_engine, whatever the working directory is.
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    names = {number.value: number.name for number in signal.Signals}  # not every real-time signal has one
    return f"killed by {names.get(-code, f'signal {-code}')}"
