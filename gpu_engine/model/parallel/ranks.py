"""The processes of ranks 1 to N-1, as rank 0 sees them: started, watched, ended.

Each has a socket to rank 0. It carries a byte every half second, so that a rank that is stopped or swapped out is
noticed as well as one that has died; then the other ranks are killed, which ends every collective that rank 0 waits in.
Invariant: no rank outlives rank 0. The kernel kills a rank when the thread that started it ends (PR_SET_PDEATHSIG), and
a rank ends itself when its socket closes (heartbeat.py). Not responsible for: the work of a rank (see worker.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import RankLost
from gpu_engine.model.parallel.collectives import Call, Collectives, open_group
from gpu_engine.model.parallel.device_collectives import Plans
from gpu_engine.model.parallel.heartbeat import FAILED, GO, READY
from kernels.kv_pages import KVPages, copy_page
from service_runtime.logs import JsonFormatter

log = logging.getLogger(__name__)

SILENCE_S = 2.5
"""A rank that has loaded its part and sends nothing for so long counts as lost."""
LOADING_SILENCE_S = 120.0
"""The same while a rank imports and loads: libraries hold the interpreter for long then."""
_CHECK_S = 0.2
_REASON_S = 3.0
"""The watch notices the cause of a broken collective within this time: a rank's death at once, its silence later."""


class RankSet(Protocol):
    """The other ranks of a model, as the engine sees them: processes of this engine (`Ranks`), or engines that share
    their experts with it (see peers.py)."""

    @property
    def plans(self) -> Plans | None:
        """What announces forwards to the hosts of ranks on devices; None: the ranks are on CPUs."""

    def allocate_pages(self, num_pages: int, page_size: int) -> None:
        """Have every other rank allocate the cache of its heads. Raises RankLost."""

    def copy_page(self, pages: list[KVPages], source: int, target: int) -> None:
        """Copy a page in `pages`, which are rank 0's, and on every other rank. Raises RankLost."""

    def watch(self, lost: Callable[[], None]) -> None:
        """Call `lost` once, on any thread, when a rank is lost; immediately if a rank is lost already."""

    def wake(self, engine: Callable[[], None]) -> None:
        """Call `engine` when another rank has begun a forward that this one has to take part in; on any thread."""

    def step_along(self) -> bool:
        """Take part in the forward that another rank has begun, unless this rank has begun one since the last call.
        Returns whether it did. On the thread of the forwards. Raises RankLost."""

    def check(self) -> None:
        """Raise RankLost if a rank was lost."""

    def close(self) -> None:
        """End the other ranks, or leave them. A second call changes nothing."""


@dataclass(slots=True, eq=False)
class _Rank:
    """One process. Only the watch uses it, except for `socket`."""

    number: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    heard_s: float
    ready: bool = False
    reason: bytes | None = None
    """The error of a load, as far as it has arrived."""

    def ending(self) -> str:
        """Return how the process ended; waits for it a moment."""
        if self.reason:
            return self.reason.decode(errors="replace")
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "has closed its socket"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit status {code}"


@dataclass(eq=False)
class Ranks:
    """Ranks 1 to N-1 of one model. Any thread may call it; `collectives` belongs to the thread of the forwards."""

    config: EngineConfig
    collectives: Collectives | None = None
    """Set by `connect`."""
    plans: Plans | None = None
    """None: the ranks of this version are on CPUs."""
    _directory: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="lockstep-ranks-"))
    _ranks: list[_Rank] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _lost: RankLost | None = None
    _watchers: list[Callable[[], None]] = field(default_factory=list)
    """`_lost`, `_watchers` and `_closing` are guarded by `_changed`."""
    _closing: bool = False
    _watch_thread: threading.Thread | None = None

    @classmethod
    def start(cls, config: EngineConfig) -> Ranks:
        """Start the processes; they load their parts while this one loads its own. Raises OSError."""
        ranks = cls(config)
        started: list[OSError | None] = []
        # The kernel ends a child with the thread that started it. The watch lives as long as the ranks do.
        ranks._watch_thread = threading.Thread(target=ranks._run, args=(started,), name="ranks", daemon=True)
        ranks._watch_thread.start()
        with ranks._changed:
            ranks._changed.wait_for(lambda: started)
        if (error := started[0]) is not None:
            ranks.close()
            raise error
        return ranks

    def connect(self, device: torch.device) -> Collectives:
        """Wait until every rank has loaded its part; return rank 0's end of their process group. Raises RankLost."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or all(rank.ready for rank in self._ranks))
            if self._lost is not None:
                raise self._lost
        try:
            for rank in self._ranks:
                rank.socket.sendall(GO)
            group = open_group(self.store, 0, self.size)
        except (OSError, RuntimeError) as error:
            raise self._reason(error) from error
        self.collectives = Collectives(group, 0, self.size, device, self._reason)
        self.collectives.rendezvous()
        shutil.rmtree(self._directory, ignore_errors=True)  # now, so that a killed process leaves none
        return self.collectives

    @property
    def size(self) -> int:
        """The number of ranks, this process included."""
        return self.config.tensor_parallel_size

    @property
    def store(self) -> Path:
        """The file by which the ranks find each other."""
        return Path(self._directory) / "store"

    @property
    def process_ids(self) -> list[int]:
        """The processes of ranks 1 to N-1."""
        return [rank.process.pid for rank in self._ranks]

    def allocate_pages(self, num_pages: int, page_size: int) -> None:
        """Have every other rank allocate the cache of its heads. Raises RankLost."""
        assert self.collectives is not None, "the ranks are connected"
        self.collectives.send(Call.ALLOCATE, num_pages, page_size)

    def copy_page(self, pages: list[KVPages], source: int, target: int) -> None:
        """Copy a page in `pages`, which are rank 0's, and on every other rank. Raises RankLost."""
        assert self.collectives is not None, "the ranks are connected"
        self.collectives.send(Call.COPY, source, target)
        copy_page(pages, source, target)

    def watch(self, lost: Callable[[], None]) -> None:
        """Call `lost` once when a rank is lost: on the thread of the watch, or here if a rank is lost already."""
        with self._changed:
            if self._lost is None:
                self._watchers.append(lost)
                return
        lost()

    def wake(self, engine: Callable[[], None]) -> None:
        """Do nothing: rank 0 begins every forward."""

    def step_along(self) -> bool:
        """Return False: rank 0 begins every forward."""
        return False

    def check(self) -> None:
        """Raise RankLost if a rank was lost."""
        with self._changed:
            if self._lost is not None:
                raise self._lost

    def close(self) -> None:
        """End the other ranks. A second call changes nothing."""
        with self._changed:
            self._closing = True
        self.collectives = None
        if self._watch_thread is not None:
            self._watch_thread.join()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _reason(self, error: Exception) -> RankLost:
        """Return why a collective failed: the watch notices within a moment, or nothing but the collective has."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, timeout=_REASON_S)
            if self._lost is None:
                self._lost = RankLost(f"the ranks of the model lost each other: {error}")
            return self._lost

    def _run(self, started: list[OSError | None]) -> None:
        """Start the ranks, and watch them until `close` or until one is lost. On the watch's thread."""
        error: OSError | None = None
        try:
            for number in range(1, self.size):
                self._ranks.append(self._spawn(number))
        except OSError as failure:
            error = failure
        with self._changed:
            started.append(error)
            self._changed.notify_all()
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.socket, selectors.EVENT_READ, rank)
            checked_s = time.monotonic()
            while True:
                events = selector.select(_CHECK_S)
                now_s = time.monotonic()
                if now_s - checked_s > 1.0:  # this process was stopped itself, as by control-Z
                    for rank in self._ranks:
                        rank.heard_s = now_s
                checked_s = now_s
                problem = next(filter(None, (self._hear(key.data) for key, _ in events)), None)
                with self._changed:
                    if self._closing:
                        break
                if problem := problem or next(filter(None, map(partial(self._silence, now_s), self._ranks)), None):
                    self._lose(problem)
                    break
        self._end_all()

    def _hear(self, rank: _Rank) -> str | None:
        """Read what a rank has sent; return how it was lost, or None."""
        try:
            sent = rank.socket.recv(4096)
        except OSError:
            sent = b""
        rank.heard_s = time.monotonic()
        if not sent:
            return f"{self._name(rank)} {rank.ending()}"
        if rank.reason is not None:
            rank.reason += sent
        elif FAILED in sent:
            rank.reason = sent[sent.index(FAILED) + 1 :]
        elif READY in sent:
            with self._changed:
                rank.ready = True
                self._changed.notify_all()
        return None

    def _silence(self, now_s: float, rank: _Rank) -> str | None:
        """Return that a rank is silent for too long, or None."""
        limit_s = SILENCE_S if rank.ready else LOADING_SILENCE_S
        if now_s - rank.heard_s <= limit_s:
            return None
        return f"{self._name(rank)} has sent no heartbeat for {limit_s:g} s"

    def _name(self, rank: _Rank) -> str:
        return f"rank {rank.number} of {self.size} (process {rank.process.pid})"

    def _lose(self, problem: str) -> None:
        with self._changed:
            if self._lost is None:
                self._lost = RankLost(problem)
        self._end_all()  # before anything waits for a collective with them
        with self._changed:
            watchers, self._watchers = self._watchers, []
            self._changed.notify_all()
        for watcher in watchers:
            watcher()

    def _end_all(self) -> None:
        """Kill and reap every other rank: they have no state to save."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            with contextlib.suppress(OSError):
                rank.socket.close()

    def _spawn(self, number: int) -> _Rank:
        ours, theirs = socket.socketpair()
        # What only rank 0 uses is not loaded again, or was refused.
        config = {name: value for name, value in asdict(self.config).items() if name not in _RANK_0_ALONE}
        command = [sys.executable, "-m", "gpu_engine.model.parallel.worker"]
        command += [json.dumps(config), str(number), str(self.store), str(theirs.fileno()), str(os.getpid())]
        command += _log_settings()
        with theirs:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[theirs.fileno()]
            )
        return _Rank(number, process, ours, time.monotonic())

    def __repr__(self) -> str:
        return f"<Ranks {self.process_ids} of {self.size}, lost={self._lost}>"


_RANK_0_ALONE = (
    *("logits_processors", "adapters", "adapter_dirs", "drafter", "draft_model", "draft_index_bytes"),
    *("draft_quantization", "draft_dirs", "draft_device", "transfer"),
)


def _log_settings() -> list[str]:
    """Return the level and the format of this process's log lines."""
    root = logging.getLogger()
    as_json = any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)
    return [logging.getLevelName(root.getEffectiveLevel()).lower(), "json" if as_json else "text"]
