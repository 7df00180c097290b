"""The engine as other threads see it: they leave messages and read counters; the engine's thread does the work.

Invariant: a public method of `Engine` returns at once and touches no sequence; it leaves a message in the inbox, which
the engine thread drains before each iteration, and once more where an answer ends before its opening is known (see
loop.py).

Not responsible for: gRPC and tokenisation (see front/), the content of an iteration (see loop.py).
"""

from __future__ import annotations

import dataclasses
import logging
import queue
from collections.abc import Callable, Collection
from functools import partial

from gpu_engine.api.admission import EngineAdmission
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import (
    InternalError,
    InvalidRequest,
    LockstepError,
    RankLost,
    ShuttingDown,
)
from gpu_engine.api.page_transfer import PageAccess
from gpu_engine.api.ports import GrammarPort, PageEvents
from gpu_engine.api.processors import Processors
from gpu_engine.api.request import BeamParams, FinishReason, Request, Telemetry
from gpu_engine.api.stats import EngineStats, IterationRing, SequenceStats, Stage
from gpu_engine.core.build_executor import BuildExecutor, build_executor
from gpu_engine.core.exact_sampling import ExactSampler, question_of
from gpu_engine.core.hooks import NO_HOOKS, EngineHooks
from gpu_engine.core.loop import EngineLoop
from gpu_engine.core.prefix_masses import SharedMasses
from gpu_engine.core.running import RunningSequence
from gpu_engine.drafters.exchange import DraftModels
from gpu_engine.model.adapters.registry import AdapterRegistry
from gpu_engine.model.loader import LoadedModel
from kernels.step_tensors import MAX_LOGPROBS
from service_runtime.threads import OS_THREADS, Queue, Threads
from shared_mem.channel import EngineEnd

log = logging.getLogger(__name__)

_DEFERRED_POLL_S = 0.001
"""An idle engine polls deferred sequences this often."""


class Engine:
    """Owns the engine's thread. Every method may be called from any thread; `start` and `close` block."""

    heartbeat_s: float = 0.1
    """An idle engine wakes this often to send its heartbeat."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        channel: EngineEnd | None = None,
        grammar: GrammarPort | None = None,
        build_executor: BuildExecutor = build_executor,
        threads: Threads = OS_THREADS,
        hooks: EngineHooks = NO_HOOKS,
    ) -> None:
        self.config, self.model, self._clock = config, model, threads.monotonic
        self._admission = EngineAdmission.of(config)
        self._channel = channel
        self.adapters = AdapterRegistry.open(config, model.adapters)
        """The adapters that requests may name. Thread-safe."""
        parts = (config, model, channel, grammar, build_executor, self.adapters, self._clock, hooks)
        self._loop = EngineLoop(*parts, hear=partial(self._drain_inbox, wait=True))
        self.executor = self._loop.executor
        """What runs the steps. Only the engine's thread uses it, once that runs."""
        self.grammar_slots = self._loop.grammar_slots
        """The guided slots. Only the engine's thread changes them."""
        self.shared_masses = SharedMasses()
        """What the shared tries of exact answers have taught. Only the engine's thread uses it."""
        self._inbox: Queue = threads.queue()
        self.draft_models = DraftModels(
            config=config,
            target=model,
            drafter=self.executor.decoupled,
            post=self._inbox.put,
            exchanged=self._loop.count_draft_model,
        )
        """The draft model, which clients may exchange. Thread-safe."""
        if self.executor.adapter_copies is not None:
            self.executor.adapter_copies.open(self._inbox.put)
        self._closing = threads.event()
        self._started = threads.event()
        self._start_error: BaseException | None = None
        self._failure: Exception | None = None
        self._watchers: list[Callable[[Exception], None]] = []
        """`_failure` and `_watchers` are guarded by the loop's `live_lock`."""
        transfers, find = self._loop.transfers, self._loop.sequences.get
        self._pages = transfers.access(self._inbox.put, find) if transfers is not None else None
        self._thread = threads.thread(self._run, "engine")
        if model.ranks is not None:  # an idle engine meets a lost rank in its inbox, others in a step
            model.ranks.watch(lambda: self._inbox.put(self._meet_loss))
            model.ranks.wake(lambda: self._inbox.put(lambda: None))

    def _run(self) -> None:
        try:
            self.executor.enter()
            self._loop.warm_up()
        except BaseException as error:  # `start` raises it on the thread of its caller
            self._start_error = error
            return
        finally:
            self._started.set()
        busy = True
        while not self._closing.is_set():
            try:
                self._drain_inbox(wait=not busy)
                busy = self._loop.run_iteration()
                if self.model.ranks is not None:
                    busy |= self.model.ranks.step_along()
            except Exception as error:
                # The watch of the ranks has the whole reason in one line.
                if not isinstance(error, RankLost):
                    log.exception("an iteration of the engine failed; every sequence ends")
                self._end_every(error=InternalError("the engine failed in a step; see its log"))
                if self._loop.transfers is not None:
                    self._loop.transfers.reset()
                self._loop.allocator.clear_index()  # the step may have written anything to the pages
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

    def _meet_loss(self) -> None:
        """Raise RankLost, unless a step has met the lost rank before."""
        if self._failure is None and self.model.ranks is not None and not self._closing.is_set():
            self.model.ranks.check()

    def _device_is_lost(self) -> bool:
        """Probe the device. When it cannot run anything, refuse new requests and call the watchers."""
        try:
            self.executor.probe()
        except Exception as error:
            if isinstance(error, RankLost):
                log.critical("the engine ends: %s", error)
            else:
                log.critical("the device is lost; the engine ends", exc_info=True)
            with self._loop.live_lock:
                self._failure = error
                watchers, self._watchers = self._watchers, []
            for watcher in watchers:
                watcher(error)
            return True
        return False

    def watch(self, failed: Callable[[Exception], None]) -> None:
        """Call `failed` once when the device is lost: on the engine's thread, or at once if it is lost already."""
        with self._loop.live_lock:
            failure = self._failure
            if failure is None:
                self._watchers.append(failed)
        if failure is not None:
            failed(failure)

    def _close_executor(self) -> None:
        try:
            self.executor.close()
        except Exception:
            if self._failure is None:
                raise
            # Every call on a lost device fails the same way; the process ends soon, which frees its memory.
            log.warning("a lost device could not be closed", exc_info=True)

    def _end_every(self, *, finish: FinishReason | None = None, error: LockstepError | None = None) -> None:
        """End every sequence, even if ending one of them fails: each leaves `sequences` before its last event."""
        while self._loop.sequences:
            try:
                self._loop.end_every(finish=finish, error=error)
            except Exception:
                log.exception("a sequence did not end cleanly")

    def _drain_inbox(self, *, wait: bool) -> None:
        """Handle every message of the inbox; with `wait`, first wait a moment for one."""
        if self._channel is not None:
            self._channel.heartbeat()
        try:
            if wait:
                self._inbox.get(timeout=self._idle_s())()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _idle_s(self) -> float:
        """Return how long an idle engine may wait for a message."""
        if self.grammar_slots.any_deferred:
            return _DEFERRED_POLL_S
        return min(self.heartbeat_s, max(self._loop.scheduler.next_due_s - self._clock(), _DEFERRED_POLL_S))

    @property
    def processors(self) -> Processors:
        """The logits processors that requests may name."""
        return self.executor.processors

    def start(self) -> None:
        """Start the thread; block until it is warm and a request can be served. Raises the error of the warm-up."""
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error
        log.info("memory: %s", self._loop.stats.memory)

    def submit(self, request: Request, *, awaits_pages: bool = False) -> Telemetry:
        """Queue a sequence; return its telemetry, which the engine's thread writes.

        `awaits_pages`: it comes into the waiting queue when `pages.close` names it.
        Raises LimitExceeded when the waiting queue is full, ShuttingDown when the engine closes, InternalError when the
        device is lost, InvalidRequest when the device cannot hold the request's stop and banned tokens, or the KV cache
        its beams, or when its adapter was unloaded.
        """
        loop = self._loop
        self.executor.slot_writer.check(request)
        width = 1 if request.beams is None else request.beams.width
        if request.beams is not None:
            self._check_beams(request, request.beams)
        with loop.live_lock:
            if self._failure is not None:
                raise InternalError("the engine lost its device; see its log")
            if self._closing.is_set():
                raise ShuttingDown("the server is shutting down")
            self._admission.admit(loop.live)
            if adapters := request.adapters:
                self.adapters.acquire(adapters)
            loop.live += width
            sequence = self._sequence_of(request)
            # Under the lock: a sequence that is counted is in the inbox before `close` sets the flag.
            self._inbox.put(lambda: loop.admit(sequence, awaits_pages=awaits_pages))
        return sequence.telemetry

    def _sequence_of(self, request: Request) -> RunningSequence:
        length = len(request.prompt_ids)
        longest = min(length + request.sampling.max_tokens, self.model.max_model_len)
        # An opening says whether tokens of a verified answer are held. Beams and exact answers wait for each other. The
        # step must be over when the next message is handled.
        plain = request.grammar is not None and not request.grammar.verify
        early = plain and request.sampling.grammar_exact is None and request.beams is None
        early = early and self.config.max_inflight_steps == 0
        return RunningSequence(
            length,
            request.grammar is not None,
            scheduling=request.scheduling,
            salt=request.salt,
            scored=request.outputs.prompt_logprobs is not None,
            waits_since_s=self._clock(),
            reserved=longest if request.scheduling.never_preempt else 0,
            held=request.prefill_only,
            early=early,
            request=request,
            exact=self._sampler_of(request),
        )

    def _sampler_of(self, request: Request) -> ExactSampler | None:
        exact = request.sampling.grammar_exact
        if exact is None:
            return None
        question = question_of(request) if exact.shared_tries else None
        return ExactSampler(request.sampling.seed, exact, self._clock, self.shared_masses, question)

    def _check_beams(self, request: Request, params: BeamParams) -> None:
        """Raise InvalidRequest when the beams cannot all run at once, at full length and without a shared page."""
        if params.width > self.config.max_batch_size:
            raise InvalidRequest(
                "beam_search.beam_width", f"is {params.width}, max_batch_size = {self.config.max_batch_size}"
            )
        stops = len({*request.sampling.stop_token_ids, *self.model.eos_token_ids})
        if params.width + stops > MAX_LOGPROBS:
            problem = f"is {params.width}; with {stops} stop tokens at most {MAX_LOGPROBS - stops} beams can be ranked"
            raise InvalidRequest("beam_search.beam_width", problem)
        longest = min(len(request.prompt_ids) + request.sampling.max_tokens, self.model.max_model_len)
        allocator = self._loop.allocator
        needed = params.width * allocator.pages_for(longest + self._loop.scheduler.lookahead)
        if needed > allocator.num_pages:
            raise InvalidRequest(
                "beam_search.beam_width",
                f"is {params.width}: {params.width} beams of up to {longest} tokens may need {needed} pages, and the "
                f"KV cache has {allocator.num_pages} (kv_cache_tokens); set max_tokens",
            )

    def abort(self, request_id: str) -> bool:
        """End every sequence of the request with ABORTED; False when none was running."""
        known = any(request.request_id == request_id for request in list(self._loop.sequences))
        self._inbox.put(lambda: self._loop.end_request(request_id))
        return known

    def drop(self, request: Request) -> None:
        """Release everything the sequence holds, without an event. Not an error when it has ended."""
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
        verified: bool = False,
    ) -> None:
        """Let the slot's sequence decode: its matcher is at its committed tokens."""
        opened = partial(
            self.grammar_slots.opened,
            slot,
            slot_gen,
            compile_ms=compile_ms,
            cache_hit=cache_hit,
            backend=backend,
            warnings=warnings,
            verified=verified,
        )
        self._inbox.put(opened)

    def grammar_backtracked(self, slot: int, slot_gen: int, num_tokens: int, dead_texts: tuple[bytes, ...]) -> None:
        """Let the slot's answer go back, or end it."""
        self._inbox.put(lambda: self._loop.grammar_backtracked(slot, slot_gen, num_tokens, dead_texts))

    def grammar_failed(self, slot: int, slot_gen: int, error: LockstepError) -> None:
        """End the slot's sequence with `error`."""
        self._inbox.put(lambda: self._loop.grammar_failed(slot, slot_gen, error))

    def grammar_lost(self, binding: Collection[tuple[int, int]] = ()) -> None:
        """Pause guided sequences, which hold their slots and pages: the grammar process is gone.

        `binding`: (slot, slot_gen) of the matchers that it was building.
        """
        self._inbox.put(lambda: self._loop.grammar_lost(binding))

    def forgive_grammar_end(self) -> None:
        """Blame no sequence for the last end of the grammar process, which was ended from outside."""
        self._inbox.put(self.grammar_slots.forgive)

    def grammar_silent(self) -> None:
        """Take guided sequences out of the batch: the grammar process shows no life."""
        self._inbox.put(self.grammar_slots.process_silent)

    def grammar_alive(self) -> None:
        """Let guided sequences go on: the grammar process shows life again, and has every matcher."""
        self._inbox.put(self.grammar_slots.process_alive)

    def grammar_restored(self) -> None:
        """Open every guided sequence at its committed tokens: a grammar process is attached again."""
        self._inbox.put(self.shared_masses.clear)  # another process may have another library, which allows other tokens
        self._inbox.put(self.grammar_slots.process_restored)

    def stats(self) -> EngineStats:
        """Return a copy of the counters, with the current gauges."""
        counted = self._loop.stats
        # `copy` is atomic: the engine thread may be adding a key.
        stats = dataclasses.replace(counted, finished=counted.finished.copy(), failed=counted.failed.copy())
        stats.step_ms_by_rows = self._loop.step_ms_by_rows
        stats.running = len(self._loop.scheduler.running)
        stats.waiting = max(self._loop.live - stats.running, 0)
        stats.cached_tokens = self._loop.scheduler.num_cached_tokens
        stats.pages_used, stats.pages_cached = self._loop.allocator.num_used, self._loop.allocator.num_cached
        if (snapshots := self._loop.allocator.snapshots) is not None:
            stats.snapshots, stats.max_snapshots = len(snapshots), snapshots.num_places
        stats.index_draft_tokens, stats.accepted_index_draft_tokens = self._loop.num_index_drafts
        return stats

    @property
    def iterations(self) -> IterationRing:
        """The last iterations of the loop. Any thread may read it."""
        return self._loop.iterations

    def sequence_stats(self) -> list[SequenceStats]:
        """Return what each sequence that waits or runs is doing; the engine's thread may be changing some of it."""
        return [_stats_of(sequence) for sequence in list(self._loop.sequences.values())]

    @property
    def pages(self) -> PageAccess:
        """The KV pages, of an engine that transfers some. Thread-safe."""
        assert self._pages is not None, "role is both"
        return self._pages

    def watch_pages(self, events: PageEvents | None) -> None:
        """Report the prefix index to `events` on the engine's thread: its pages, then each change. None: stop."""
        self._inbox.put(lambda: self._loop.allocator.watch(events))

    @property
    def grammar_progress(self) -> int:
        """Counts up whenever a grammar process gave rows to a guided sequence, or a crash was attributed."""
        return self.grammar_slots.progress

    @property
    def num_inflight_steps(self) -> int:
        """Steps that were launched and whose outputs are not processed. Any thread may read it."""
        return self._loop.num_inflight_steps

    def check_integrity(self) -> None:
        """Assert that every slot and page is owned as the sequences say; for tests, on an idle engine."""
        transfers = self._loop.transfers
        self._loop.scheduler.check_integrity(transfers.owned if transfers is not None else None)

    def close(self, timeout_s: float = 5.0) -> None:
        """End running sequences with ABORTED and stop the thread. Idempotent; blocks for at most `timeout_s`."""
        with self._loop.live_lock:
            self._closing.set()
        self._inbox.put(lambda: None)  # wakes an idle thread
        if self._thread.ident is None:
            self.executor.close()
        else:
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self.adapters.close()
            self.draft_models.close()

    def __repr__(self) -> str:
        return f"<Engine {self.model} {self._loop.scheduler} inflight={self.num_inflight_steps}>"


def _stats_of(sequence: RunningSequence) -> SequenceStats:
    request, slot = sequence.request, sequence.slot
    prompt = len(request.prompt_ids)
    if slot < 0:
        stage = Stage.WAITING
    elif sequence.prefilled < sequence.prefill_end:
        stage = Stage.PREFILL
    else:
        stage = Stage.DECODE if sequence.decoding else Stage.PARKED
    return SequenceStats(
        request.request_id,
        request.index,
        request.scheduling.client_id,
        stage,
        prompt,
        min(sequence.prefilled, prompt),
        len(sequence.answer),
        slot if slot >= 0 else None,
        len(sequence.pages),
    )
