"""The loop of the engine's thread: plan, prefill, launch a step, process the outputs of an earlier one.

`EngineLoop.run_iteration` is the outline; every other method is a part of it, or the effect of a message from another
thread. Invariant: the engine thread alone calls in here; other threads use `engine.Engine`, which leaves messages.

Not responsible for: gRPC and tokenisation (see front/), compiling grammars (see sidecar/), the program that a step runs
(see step/).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import LockstepError, QueueTimeout, status_of
from gpu_engine.api.ports import AdapterAccess, GrammarPort
from gpu_engine.api.request import FinishReason, PromptLogprobs, Request, TokenEvent, TokenOrigin
from gpu_engine.api.stats import EngineStats, IterationRing
from gpu_engine.core.beams.groups import BeamGroups
from gpu_engine.core.build_executor import BuildExecutor, build_executor
from gpu_engine.core.executor import lookahead
from gpu_engine.core.grammar_slots import GrammarSlots
from gpu_engine.core.kv_cache import PageAllocator
from gpu_engine.core.outputs.streams import OutputStreams
from gpu_engine.core.runner import LaunchedStep
from gpu_engine.core.running import RunningSequence, SequenceState
from gpu_engine.core.scheduler import Chunk, GrammarState, Scheduler
from gpu_engine.model.loader import LoadedModel
from gpu_engine.ops.iterations import IterationRecorder
from gpu_engine.step.outcomes import LaneOutcome
from gpu_engine.step.prompt_scorer import SCORED_ROWS
from shared_mem.channel import EngineEnd
from shared_mem.layout import RowKind


def _tokens_of(sequence: RunningSequence) -> list[int]:
    return [*sequence.payload.request.prompt_ids, *sequence.payload.answer]


def _origins(sequence: RunningSequence, outcome: LaneOutcome) -> tuple[TokenOrigin, ...]:
    """Return how a step came to each of its tokens: the first drafts are those of the grammar."""
    accepted = min(outcome.num_accepted, len(outcome.token_ids))
    forced = min(sequence.payload.num_jump_forward, accepted)
    return (
        *[TokenOrigin.FORCED] * forced,
        *[TokenOrigin.DRAFT] * (accepted - forced),
        *[TokenOrigin.SAMPLED] * (len(outcome.token_ids) - accepted),
    )


def _ended(event: TokenEvent, request: Request, finish: FinishReason | None, error: LockstepError | None) -> TokenEvent:
    """Return the last event of a sequence, with the reason for its end."""
    ids = event.token_ids
    if finish is FinishReason.GRAMMAR_CLOSED and ids[-1] in request.sampling.stop_token_ids:
        finish = FinishReason.STOP  # a stop token of the client: the grammar may be incomplete
    matched = ids[-1] if finish in (FinishReason.STOP, FinishReason.GRAMMAR_CLOSED) and ids else None
    return replace(event, finish=finish, matched_token_id=matched, error=error)


class EngineLoop:
    """Scheduler, executor and grammar slots of one engine, and the sequences that they hold."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        channel: EngineEnd | None,
        grammar: GrammarPort | None,
        build_executor: BuildExecutor = build_executor,
        adapters: AdapterAccess | None = None,
    ) -> None:
        self.config, self._adapters = config, adapters
        S, L, max_inflight_steps = config.max_batch_size, model.max_model_len, config.max_inflight_steps
        num_lookahead = lookahead(config, max_inflight_steps)
        num_tokens, page_size = config.kv_cache_tokens or S * L, config.page_size
        num_pages = -(-num_tokens // page_size) + S * -(-num_lookahead // page_size)
        self.allocator = PageAllocator(num_pages, page_size)
        self.executor = build_executor(config, model, channel, num_pages, max_inflight_steps)
        shapes = config.prefill_shapes
        self.scheduler: Scheduler[SequenceState] = Scheduler(
            S,
            self.allocator,
            prefill_chunk=shapes.budget,
            lookahead=num_lookahead,
            shapes=shapes,
            tokens_of=_tokens_of if config.caches_prefixes else None,
            max_batched_tokens=config.max_batched_tokens or shapes.budget if self.executor.mixes else 0,
            scored_chunk=SCORED_ROWS,
            max_starvation_s=config.max_starvation_s or math.inf,
            static=config.batching == "static",
        )
        self._slot_writer, self._sync, self._runner = (
            self.executor.slot_writer,
            self.executor.sync,
            self.executor.runner,
        )
        self._answers = self.executor.answers
        self._in_flight: deque[LaunchedStep] = deque()
        self.sequences: dict[Request, RunningSequence] = {}
        self.stats = EngineStats(num_slots=S, num_pages=num_pages)
        self.iterations = IterationRing(config.iteration_history)
        self._recorder = IterationRecorder(self.stats, self.iterations)
        self.live = 0
        """Sequences submitted and not ended, for the bound of the queue. Guarded by `live_lock`."""
        self.live_lock = threading.Lock()
        self.outputs = OutputStreams(
            self.executor.tensors,
            self._slot_writer.write_pages,
            lambda sequence, finish: self.end(sequence, finish=finish),
        )
        self.grammar_slots = GrammarSlots(
            grammar, self.scheduler, self._slot_writer, self._sync, self.stats, self._in_step, self.end
        )
        self.beams = BeamGroups(
            *(self.scheduler, self._slot_writer, self._sync, self.grammar_slots, self.executor.copy_page),
            *(model.eos_token_ids, self._slot_lost),
        )

    def run_iteration(self) -> bool:
        """Plan, prefill some chunks, launch one step, process an earlier one; False when there was nothing to do.

        Where the executor mixes, the chunks share the step's forward."""
        self._recorder.begin()
        self.grammar_slots.poll()
        plan = self.scheduler.plan(time.monotonic())
        for sequence in plan.expired:
            self._expired(sequence)
        for sequence in plan.preempted:
            self._slot_lost(sequence)
        for sequence in plan.assigned:
            self._slot_assigned(sequence)
        if plan.scored is not None:
            self._score(plan.scored)
        shared = plan.prefill if plan.decode and self.executor.mixes else ()
        if plan.prefill and not shared:
            self.executor.prefill(plan.prefill)
            self._prefilled(plan.prefill)
        if plan.decode:
            beams = self.beams.hold(plan.decode) if self.beams else None
            self._in_flight.append(self._runner.launch(plan.decode, shared, beams))
            self._prefilled(shared)
        has_work = not plan.idle or bool(self._in_flight)
        processes = len(self._in_flight) > (self._runner.max_inflight_steps if plan.decode else 0)
        if processes:
            self._process_outputs(self._in_flight.popleft())
        # Outputs may let the beams of a search go on that were held at the plan.
        busy = processes or not plan.idle or bool(self._in_flight)
        if has_work:
            self._record(len(plan.decode))
        if self.outputs:
            busy |= self.outputs.run(wait=not busy)
        return busy

    def _record(self, num_decoding: int) -> None:
        """Add the iteration to the ring of the last ones."""
        running = self.scheduler.running
        parked = 0
        if num_decoding < len(running):
            parked = sum(s.guided and s.prefilled >= s.prefill_end and not s.decoding for s in running)
        self._recorder.end(
            waiting=max(self.live - len(running), 0),
            running=len(running),
            decoding=num_decoding,
            parked=parked,
            pages_used=self.allocator.num_used,
        )

    # -- one sequence ------------------------------------------------------------------------------------------------

    def _expired(self, sequence: RunningSequence) -> None:
        waited_ms = (time.monotonic() - sequence.waits_since_s) * 1e3
        most_ms = sequence.max_queue_s * 1e3
        error = QueueTimeout(
            f"max_queue_ms: waited {waited_ms:.0f} ms for a slot, at most {most_ms:.0f} ms are allowed"
        )
        self.end(sequence, error=error)

    def _slot_assigned(self, sequence: RunningSequence) -> None:
        if not sequence.length:
            return  # a beam without tokens: a fork writes its slot
        self._slot_writer.assign(sequence)
        self._sync.forget(sequence.slot)
        if self._answers is not None:
            self._answers.assign(sequence.slot, sequence.payload.request.draft_scope)
        telemetry = sequence.payload.request.telemetry
        telemetry.scheduled_s = telemetry.scheduled_s or time.monotonic()
        if sequence.guided:
            self.grammar_slots.open(sequence)

    def _slot_lost(self, sequence: RunningSequence) -> None:
        """Release the matcher of a sequence that was preempted."""
        self.stats.preemptions += 1
        if sequence.group:
            self.beams.slot_lost(sequence)
        if sequence.scored:
            self.executor.scorer.drop(sequence)
        self.grammar_slots.close(sequence)

    def _score(self, chunk: Chunk[SequenceState]) -> None:
        sequence, wanted = chunk.sequence, chunk.sequence.payload.request.prompt_logprobs
        assert wanted is not None, sequence
        self._slot_writer.write_pages(sequence)
        self.executor.scorer.launch(sequence, sequence.slot, chunk.start, chunk.end, wanted)
        self._prefilled((chunk,))

    def _prompt_logprobs(self, sequence: RunningSequence) -> PromptLogprobs | None:
        """Return what belongs to the first event with a token; does not wait, as these launches are before its step."""
        if not sequence.scored:
            return None
        sequence.scored = False
        return self.executor.scorer.take(sequence)

    def _prefilled(self, chunks: tuple[Chunk[SequenceState], ...]) -> None:
        now_s = time.monotonic()
        for chunk in chunks:
            chunk.sequence.prefilled = chunk.end
            if chunk.end == chunk.sequence.prefill_end:
                self.scheduler.index_pages(chunk.sequence)
            telemetry = chunk.sequence.payload.request.telemetry
            if not telemetry.first_token_s:  # else it was preempted, and its answer is prefilled, too
                telemetry.prefilled_s = now_s
            self.stats.prefill_tokens += chunk.end - chunk.start

    def _process_outputs(self, step: LaunchedStep) -> None:
        """Read a step's outputs, send token events, end finished sequences.

        Sequences that lost their slot after the launch are skipped.
        """
        self._runner.collect(step)
        self.stats.count_step(
            step.forward_rows + step.prompt_tokens, step.step_ms, step.waited_ms, guided=step.any_guided
        )
        for b, (sequence, outcome) in enumerate(zip(step.sequences, step.outcomes, strict=True)):
            if not step.holds(b) or sequence.ended:
                continue
            origins = _origins(sequence, outcome) if sequence.payload.request.token_origins else ()
            if outcome.error is not None:
                if outcome.token_ids:  # without drafts they were sent before the row that failed
                    self._count(sequence, outcome, step.waited_ms)
                    if sequence not in self.outputs:  # their tokens wait for their rows, which an error drops
                        self._send(sequence, outcome, origins)
                self.end(sequence, error=outcome.error)
                continue
            if outcome.candidates is not None:
                self.beams.of(sequence).found[sequence] = outcome.candidates
                sequence.payload.request.telemetry.mask_wait_ms += step.waited_ms if sequence.guided else 0.0
                if sequence.guided:
                    self.grammar_slots.rows_arrived(sequence)
                continue
            self._count(sequence, outcome, step.waited_ms)
            if outcome.deferred:
                sequence.held = False
                self.grammar_slots.defer(sequence, step.seq, advanced=bool(outcome.token_ids))
            elif sequence.guided:
                self.grammar_slots.rows_arrived(sequence)
            if sequence in self.outputs:
                self._hold(sequence, outcome, origins)
            elif outcome.finish is not None:
                self.end(sequence, outcome, finish=outcome.finish, origins=origins)
            elif outcome.token_ids:
                self._send(sequence, outcome, origins)
        if step.beams is not None:
            self._advance_beams()

    def _advance_beams(self) -> None:
        """Let every search whose beams all have candidates go on, or end it."""
        for group in self.beams.complete():
            first = group.members[0]
            group.prompt_logprobs = group.prompt_logprobs or self._prompt_logprobs(first)
            telemetry = first.payload.request.telemetry
            telemetry.steps += 1
            for _ in group.beams:
                self.stats.count_tokens(1, 0, 0)
            self._count_time(first)
            self.beams.choose(group)
            if group.search.done:
                self.end(first)

    def _send(self, sequence: RunningSequence, outcome: LaneOutcome, origins: tuple[TokenOrigin, ...]) -> None:
        """Send the tokens of a step behind which the sequence goes on."""
        request, scores = sequence.payload.request, self._prompt_logprobs(sequence)
        event = TokenEvent(request.index, outcome.token_ids, outcome.logprobs, prompt_logprobs=scores, origins=origins)
        request.sink(event)

    def _hold(self, sequence: RunningSequence, outcome: LaneOutcome, origins: tuple[TokenOrigin, ...]) -> None:
        """Have the tokens sent with their rows; a sequence that ends here holds its slot until these are computed."""
        scores = self._prompt_logprobs(sequence) if outcome.token_ids else None
        self.outputs.hold(sequence, outcome.token_ids, outcome.logprobs, scores, outcome.finish, origins)
        if outcome.finish is not None:
            sequence.ended, sequence.deferred = True, False
            sequence.guided, sequence.grammar_state = False, GrammarState.UNCONSTRAINED
            self.grammar_slots.close(sequence)

    def _count(self, sequence: RunningSequence, outcome: LaneOutcome, waited_ms: float) -> None:
        telemetry, stats, count = sequence.payload.request.telemetry, self.stats, len(outcome.token_ids)
        sequence.payload.answer.extend(outcome.token_ids)
        sequence.length += count
        # The pages hold the keys of every token but the last; those of rejected drafts are overwritten.
        sequence.prefilled = sequence.length - 1
        telemetry.steps += 1
        telemetry.mask_wait_ms += waited_ms if sequence.guided else 0.0
        stats.count_tokens(count, outcome.num_drafts, outcome.num_accepted, sequence.payload.num_jump_forward)
        if outcome.num_jump_forward >= 0:
            sequence.payload.num_jump_forward = outcome.num_jump_forward
        if count:
            telemetry.draft_tokens += outcome.num_drafts
            telemetry.accepted_draft_tokens += outcome.num_accepted
            self._count_time(sequence)
        if outcome.finish is FinishReason.GRAMMAR_ERROR:
            stats.dead_ends += outcome.blocked == RowKind.DEAD_END
            stats.matcher_errors += outcome.blocked == RowKind.ERROR

    def _count_time(self, sequence: RunningSequence) -> None:
        """Note that the sequence got tokens now."""
        telemetry, now_s = sequence.payload.request.telemetry, time.monotonic()
        if telemetry.first_token_s:
            self.stats.token_gap_seconds.observe(now_s - telemetry.last_token_s)
        else:
            telemetry.first_token_s, telemetry.cached_tokens = now_s, self._num_reused(sequence)
            if sequence.num_cached_tokens:  # a prompt of one token has no prefill, and no time of it
                telemetry.prefilled_s = telemetry.prefilled_s or telemetry.scheduled_s
        telemetry.last_token_s = now_s

    def _num_reused(self, sequence: RunningSequence) -> int:
        """Return how many tokens of the prompt the prefix cache had. Rows that were sent before a preemption say more
        than the pages that the sequence found afterwards."""
        reused = self.outputs.reused(sequence) if sequence in self.outputs else None
        return sequence.num_cached_tokens if reused is None else reused

    def _in_step(self, sequence: RunningSequence) -> bool:
        """Return whether a step with the sequence in its slot is launched and not collected."""
        return any(
            other is sequence and step.holds(b) for step in self._in_flight for b, other in enumerate(step.sequences)
        )

    def end(
        self,
        sequence: RunningSequence,
        outcome: LaneOutcome | None = None,
        *,
        finish: FinishReason | None = None,
        error: LockstepError | None = None,
        silent: bool = False,
        origins: tuple[TokenOrigin, ...] = (),
    ) -> None:
        """Release everything the sequence holds, with its group, then send its last event; `silent` sends none.

        `origins`: of the outcome's tokens, if the request asked for them.
        """
        sequence = sequence.members[0]
        request = sequence.payload.request
        del self.sequences[request]
        group = self.beams.remove(sequence) if sequence.group else None
        with self.live_lock:
            self.live -= len(sequence.members)
        self._slot_writer.release(sequence)
        self.scheduler.remove(sequence)
        request.telemetry.finished_s = time.monotonic()
        if group is not None:
            last = list(group.last_events(finish, error))
        else:
            last = [_ended(self._last_event(sequence, outcome, origins), request, finish, error)]
        if self._answers is not None and error is None:
            answer = last[0].token_ids if group else sequence.payload.answer
            self._answers.add(request.draft_scope, request.text_prompt_ids, answer)
        if error is not None:
            self.stats.failed[status_of(error).name] += 1
        for event in last if error is None else ():
            self.stats.finished["DROPPED" if silent or event.finish is None else event.finish.name] += 1
        for event in () if silent else last:
            request.sink(event)
        if sequence.scored:
            self.executor.scorer.drop(sequence)
        if adapters := request.adapters:
            assert self._adapters is not None, request
            self._adapters.release(adapters)
        for each in sequence.members:  # last: the client gets its last event even if the port fails
            self.grammar_slots.close(each)

    def _last_event(
        self, sequence: RunningSequence, outcome: LaneOutcome | None, origins: tuple[TokenOrigin, ...]
    ) -> TokenEvent:
        """Return what the client has not got yet of a sequence that ends."""
        if sequence in self.outputs:
            return self.outputs.close(sequence)
        ids, logprobs = (outcome.token_ids, outcome.logprobs) if outcome else ((), ())
        scores = self._prompt_logprobs(sequence) if ids else None
        return TokenEvent(sequence.payload.request.index, ids, logprobs, prompt_logprobs=scores, origins=origins)

    @property
    def num_index_drafts(self) -> tuple[int, int]:
        """Drafts from earlier answers that were verified, and accepted, since the start."""
        return self._answers.num_index_drafts if self._answers is not None else (0, 0)

    @property
    def step_ms_by_rows(self) -> dict[bool, dict[int, float]]:
        """See `EngineStats`. Any thread: a step that is observed meanwhile may be in a part of the values."""
        return {guided: times.table() for guided, times in self._runner.budget.times.items()}

    # -- messages ----------------------------------------------------------------------------------------------------

    def admit(self, sequence: RunningSequence) -> None:
        """Put a submitted sequence into the waiting queue."""
        self.sequences[sequence.payload.request] = sequence
        if sequence.payload.request.beams is not None:
            self.beams.add(sequence)
        self.scheduler.add(sequence)
        self.outputs.add(sequence)

    def end_request(self, request_id: str) -> None:
        """End every sequence of the request with ABORTED."""
        for request, sequence in list(self.sequences.items()):
            if request.request_id == request_id:
                self.end(sequence, finish=FinishReason.ABORTED)

    def end_every(self, *, finish: FinishReason | None = None, error: LockstepError | None = None) -> None:
        """End every sequence, running or waiting."""
        for sequence in list(self.sequences.values()):
            self.end(sequence, finish=finish, error=error)

    def drop(self, request: Request) -> None:
        """Release everything the request's sequence holds, without an event."""
        sequence = self.sequences.get(request)
        if sequence is not None:
            self.end(sequence, silent=True)

    def grammar_lost(self, binding: Collection[tuple[int, int]]) -> None:
        """Process the steps in flight, which the abort word drains, then pause guided sequences.

        `binding`: see `GrammarSlots.process_lost`.
        """
        while self._in_flight:
            self._process_outputs(self._in_flight.popleft())
        self.grammar_slots.process_lost(binding)

    def grammar_failed(self, slot: int, slot_gen: int, error: LockstepError) -> None:
        """End the sequence in the slot with `error`; an event for an earlier owner of the slot is ignored."""
        sequence = self.scheduler.sequence(slot, slot_gen)
        if sequence is not None:
            self.end(sequence, error=error)
