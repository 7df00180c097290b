"""The engine as other threads see it: messages in, counters out. The work is loop.py's, on a thread of its own.

One invariant: a public method returns at once and touches no sequence; it leaves a message for the engine thread. Not
here: gRPC and tokenisation (asyncio side), and everything that a turn of the loop does.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Collection

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import InternalError, LimitExceeded, LockstepError, ShuttingDown
from gpu_engine.api.ports import GrammarPort
from gpu_engine.api.request import FinishReason, Request
from gpu_engine.api.stats import EngineStats
from gpu_engine.core.executor import BuildExecutor, build_executor
from gpu_engine.core.loop import EngineLoop
from gpu_engine.core.running import RunningSequence, SequenceState
from gpu_engine.model.loader import LoadedModel
from shared_mem.channel import EngineEnd

log = logging.getLogger(__name__)

_IDLE_S = 0.1
"""An idle engine wakes this often to say that it lives."""
_DEFERRED_POLL_S = 0.001
"""With nothing else to do, deferred slots are looked at this often."""


class Engine:
    """Owns the model's thread. Every method but `start` and `close` may be called from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        channel: EngineEnd | None = None,
        grammar: GrammarPort | None = None,
        build_executor: BuildExecutor = build_executor,
    ) -> None:
        self.config, self.model = config, model
        self._channel = channel
        self._loop = EngineLoop(config, model, channel, grammar, build_executor)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._failure: Exception | None = None
        self._watchers: list[Callable[[Exception], None]] = []
        """Both under `live_lock`."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _run(self) -> None:
        try:
            self._loop.executor.enter()
            self._loop.executor.warm_up()
        except BaseException as error:  # `start` raises it on its caller's thread
            self._start_error = error
            return
        finally:
            self._started.set()
        busy = True
        while not self._closing.is_set():
            try:
                self._drain_inbox(wait=not busy)
                busy = self._loop.run_iteration()
            except Exception:
                log.exception("a turn of the engine failed; every sequence ends")
                self._end_every(error=InternalError("the engine failed in a step; see its log"))
                self._loop.allocator.clear_index()  # whatever the step has written to the pages
                busy = False
                if self._device_is_lost():
                    break
        try:
            self._drain_inbox(wait=False)
        finally:
            if self._failure is None:
                self._end_every(finish=FinishReason.ABORTED)
            else:
                self._end_every(error=InternalError("the engine lost its device; see its log"))
            self._close_executor()

    def _device_is_lost(self) -> bool:
        """Ask the device whether it can still run anything; tell who watches, and close the door, when it cannot."""
        try:
            self._loop.executor.probe()
        except Exception as error:
            log.critical("the device is lost; the engine ends", exc_info=True)
            with self._loop.live_lock:
                self._failure = error
                watchers, self._watchers = self._watchers, []
            for watcher in watchers:
                watcher(error)
            return True
        return False

    def watch(self, failed: Callable[[Exception], None]) -> None:
        """Have `failed` called once, on the engine's thread, when the device is lost; at once when it is already."""
        with self._loop.live_lock:
            failure = self._failure
            if failure is None:
                self._watchers.append(failed)
        if failure is not None:
            failed(failure)

    def _close_executor(self) -> None:
        try:
            self._loop.executor.close()
        except Exception:
            if self._failure is None:
                raise
            # Every call says what the first one said; the process ends soon, and the driver with it.
            log.warning("a lost device could not be closed", exc_info=True)

    def _end_every(self, *, finish: FinishReason | None = None, error: LockstepError | None = None) -> None:
        """End every sequence, even if something fails at one of them: each is off the list before it is told."""
        while self._loop.sequences:
            try:
                self._loop.end_every(finish=finish, error=error)
            except Exception:
                log.exception("a sequence did not end cleanly")

    def _drain_inbox(self, *, wait: bool) -> None:
        """Handle the inbox; with nothing to do, wait for its first message."""
        if self._channel is not None:
            self._channel.heartbeat()
        try:
            if wait:
                self._inbox.get(timeout=_DEFERRED_POLL_S if self._loop.grammar_slots.any_deferred else _IDLE_S)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def start(self) -> None:
        """Start the thread and let it warm up; blocks until a request can be served. Raises what that raises."""
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def submit(self, request: Request) -> None:
        """Queue a sequence.

        Raises LimitExceeded when the line is full, ShuttingDown when the engine closes, InvalidRequest when the device
        cannot hold its stops and bans.
        """
        loop, config = self._loop, self.config
        loop.executor.slot_writer.check(request)
        with loop.live_lock:
            if self._failure is not None:
                raise InternalError("the engine lost its device; see its log")
            if self._closing.is_set():
                raise ShuttingDown("the server is shutting down")
            if loop.live >= config.max_queue_size + config.max_batch_size:
                raise LimitExceeded(f"{loop.live} sequences run or wait; max_queue_size = {config.max_queue_size}")
            loop.live += 1
            sequence: RunningSequence = RunningSequence(
                SequenceState(request), len(request.prompt_ids), request.grammar is not None
            )
            self._inbox.put(lambda: loop.admit(sequence))  # under the lock: what is admitted is heard before the close

    def abort(self, request_id: str) -> bool:
        """End every sequence of the request with ABORTED; False when none was running."""
        found = any(request.request_id == request_id for request in list(self._loop.sequences))
        self._inbox.put(lambda: self._loop.end_request(request_id))
        return found

    def drop(self, request: Request) -> None:
        """Free everything the sequence holds, with no more events. Not an error when it has ended."""
        self._inbox.put(lambda: self._loop.drop(request))

    def grammar_opened(
        self,
        slot: int,
        slot_gen: int,
        *,
        compile_ms: float,
        cache_hit: bool,
        backend: int,
        warnings: tuple[str, ...] = (),
    ) -> None:
        """The slot's matcher stands at its committed tokens."""
        self._inbox.put(
            lambda: self._loop.grammar_slots.opened(slot, slot_gen, compile_ms, cache_hit, backend, warnings)
        )

    def grammar_failed(self, slot: int, slot_gen: int, error: LockstepError) -> None:
        """End the slot's sequence with `error`."""
        self._inbox.put(lambda: self._loop.grammar_failed(slot, slot_gen, error))

    def grammar_lost(self, binding: Collection[tuple[int, int]] = ()) -> None:
        """The sidecar is gone: guided slots pause and keep their pages. `binding`: whose matchers it was making."""
        self._inbox.put(lambda: self._loop.grammar_lost(binding))

    def grammar_pardoned(self) -> None:
        """The sidecar that was lost last had been ended from outside: no guided sequence is to blame."""
        self._inbox.put(self._loop.grammar_slots.pardoned)

    def grammar_silent(self) -> None:
        """The sidecar shows no life: guided slots leave the batch until it does, or is lost."""
        self._inbox.put(self._loop.grammar_slots.silent)

    def grammar_heard(self) -> None:
        """It lives, and has lost nothing: they go on where they stand."""
        self._inbox.put(self._loop.grammar_slots.heard)

    def grammar_restored(self) -> None:
        """A sidecar is attached again: every guided slot is opened at its committed tokens."""
        self._inbox.put(self._loop.grammar_slots.restored)

    def stats(self) -> EngineStats:
        """Return a copy of the counters with the gauges of now."""
        counted = self._loop.stats
        # Counters are copied in one go: the engine thread may be adding a key.
        stats = dataclasses.replace(counted, finished=counted.finished.copy(), failed=counted.failed.copy())
        stats.running = len(self._loop.scheduler.running)
        stats.waiting = max(self._loop.live - stats.running, 0)
        stats.cached_tokens = self._loop.scheduler.num_cached_tokens
        stats.pages_used, stats.pages_cached = self._loop.allocator.num_used, self._loop.allocator.num_cached
        return stats

    @property
    def grammar_progress(self) -> int:
        """Counts up whenever a sidecar was of use to a guided sequence."""
        return self._loop.grammar_slots.progress

    def check_integrity(self) -> None:
        """Assert that no slot or page is lost or held by more than it should be; meant for an idle engine."""
        self._loop.scheduler.check_integrity()

    def close(self, timeout_s: float = 5.0) -> None:
        """End running sequences with ABORTED and stop the thread. Idempotent; blocks for at most `timeout_s`."""
        with self._loop.live_lock:
            self._closing.set()
        if self._thread.ident is None:
            self._loop.executor.close()
        else:
            self._thread.join(timeout_s)

    def __repr__(self) -> str:
        return f"<Engine {self.model} {self._loop.scheduler}>"
