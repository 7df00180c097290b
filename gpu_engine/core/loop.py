"""The loop of the engine's thread: plan, prefill, launch a step, process the outputs of an earlier one.

`EngineLoop.run_iteration` is the outline; every other method is a part of it, or the effect of a message from another
thread. Invariant: only the engine thread calls this; other threads use `engine.Engine`, which leaves messages.

Not responsible for: gRPC and tokenisation (see front/), compiling grammars (see sidecar/), the program that a step runs
(see step/), what its outcomes are to clients (see events/output_processor.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.errors import LockstepError, QueueTimeout, status_of
from gpu_engine.api.ports import AdapterAccess, GrammarPort
from gpu_engine.api.request import FinishReason, Request, TokenEvent
from gpu_engine.api.stats import EngineStats, IterationRing
from gpu_engine.core.beams.groups import BeamGroups
from gpu_engine.core.build_executor import BuildExecutor, build_executor
from gpu_engine.core.events.held_tokens import go_back, take_all_back
from gpu_engine.core.events.output_processor import OutputProcessor, ended
from gpu_engine.core.events.tensor_streams import OutputStreams
from gpu_engine.core.exact_sampling import ExactSampler
from gpu_engine.core.executor import lookahead
from gpu_engine.core.grammar_slots import GrammarSlots
from gpu_engine.core.hooks import NO_HOOKS, EngineHooks, TransferParts, Transfers
from gpu_engine.core.kv_cache import PageAllocator
from gpu_engine.core.runner import LaunchedStep
from gpu_engine.core.running import RunningSequence
from gpu_engine.core.scheduler import Chunk, GrammarState, Plan, Scheduler
from gpu_engine.core.state_snapshots import StateSnapshots
from gpu_engine.drafters.decoupled import DraftModel
from gpu_engine.model.cache_size import num_snapshots, pool_tokens, snapshot_interval
from gpu_engine.model.loaded_model import LoadedModel
from gpu_engine.ops.iterations import IterationRecorder
from gpu_engine.ops.memory import with_draft_model
from gpu_engine.step.prompt_scorer import SCORED_ROWS
from shared_mem.channel import EngineEnd

_OPENING_S = 0.2
"""Longest wait for the message that a matcher is open whose rows have come."""


def _tokens_of(sequence: RunningSequence) -> list[int]:
    return [*sequence.request.prompt_ids, *sequence.answer]


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
        clock: Callable[[], float] = time.monotonic,
        hooks: EngineHooks = NO_HOOKS,
        *,
        hear: Callable[[], None],
    ) -> None:
        """Args: `hear` waits a moment for messages of other threads, and handles all that have come."""
        self.config, self._adapters, self._clock, self._hear = config, adapters, clock, hear
        S, page_size, max_inflight_steps = config.max_batch_size, config.page_size, config.max_inflight_steps
        num_lookahead = lookahead(config, max_inflight_steps)
        num_tokens = pool_tokens(config, model.max_model_len, model.room_tokens)
        num_pages = -(-num_tokens // page_size) + S * -(-num_lookahead // page_size)
        places, shapes = num_snapshots(config, model, num_pages), config.prefill_shapes
        snapshots = StateSnapshots(places) if model.recurrent else None
        self.allocator = PageAllocator(num_pages, page_size, snapshots)
        self.executor = build_executor(config, model, channel, num_pages, max_inflight_steps)
        self._states = self.executor.states
        self.scheduler: Scheduler[RunningSequence] = Scheduler(
            S,
            self.allocator,
            prefill_chunk=shapes.budget,
            lookahead=num_lookahead,
            shapes=shapes,
            tokens_of=_tokens_of if config.caches_prefixes else None,
            max_batched_tokens=max(shapes.budget, S) if self.executor.mixes else 0,
            scored_chunk=SCORED_ROWS,
            max_starvation_s=config.max_starvation_s or math.inf,
            slot_order=hooks.slot_order() if hooks.slot_order is not None else None,
            snapshot_interval=snapshot_interval(model.max_model_len, places, shapes.budget),
        )
        self._slot_writer, self._sync = self.executor.slot_writer, self.executor.sync
        self._runner, self._suffix = self.executor.runner, self.executor.suffix
        self._in_flight: deque[LaunchedStep] = deque()
        self.sequences: dict[Request, RunningSequence] = {}
        self.stats = EngineStats(self.executor.memory, num_slots=S, num_pages=num_pages)
        if self.executor.decoupled is not None:
            self.count_draft_model(self.executor.decoupled.draft)
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
            port=grammar,
            scheduler=self.scheduler,
            slot_writer=self._slot_writer,
            sync=self._sync,
            stats=self.stats,
            in_step=self._in_step,
            end=self.end,
            clock=clock,
        )
        self.beams = BeamGroups(
            scheduler=self.scheduler,
            slot_writer=self._slot_writer,
            sync=self._sync,
            grammar_slots=self.grammar_slots,
            copy_page=self.executor.copy_page,
            copy_state=self._states.copy if self._states is not None else None,
            eos_token_ids=model.eos_token_ids,
            slot_lost=self._slot_lost,
        )
        self._output_processor = OutputProcessor(
            self.stats, self.executor.scorer, self.outputs, self.grammar_slots, self.beams, self.end, self._begin_anew
        )
        self.transfers: Transfers | None = None
        if hooks.transfers is not None:
            self.transfers = hooks.transfers(TransferParts(config, model, self.executor, self.allocator, self._enqueue))
        assert self.transfers is not None or not config.transfer.moves_pages, "the role needs a hook for transfers"

    def warm_up(self) -> None:
        """Run everything once. Before the first request, on the engine's thread."""
        self.executor.warm_up()
        if self.transfers is not None:
            self.transfers.warm_up()

    def run_iteration(self) -> bool:
        """Plan, prefill some chunks, launch one step, process an earlier one; False when there was nothing to do.

        Where the executor mixes, the chunks share the step's forward."""
        self._recorder.begin()
        self.grammar_slots.poll()
        plan = self.scheduler.plan(self._clock())
        plan = self._change_slots(plan)
        goes_on = self._release_exact()
        self._launch(plan)
        has_work = not plan.idle or bool(self._in_flight)
        processes = len(self._in_flight) > (self._runner.max_inflight_steps if plan.decode else 0)
        if processes:
            self._process_outputs(self._in_flight.popleft())
        # Outputs may let the beams of a search go on that were held at the plan.
        busy = processes or goes_on or not plan.idle or bool(self._in_flight)
        if has_work:
            self._record(len(plan.decode))
        if self.transfers:
            self.transfers.serve()
        if self.outputs:
            busy |= self.outputs.run(wait=not busy)
        return busy

    def _change_slots(self, plan: Plan[RunningSequence]) -> Plan[RunningSequence]:
        """Assign and release slots as the plan says; return it without the steps of sequences that found no grammar
        process."""
        for sequence in plan.expired:
            self._expired(sequence)
        for sequence in plan.preempted:
            self._slot_lost(sequence)
        for sequence in plan.assigned:
            self._slot_assigned(sequence)
        if self._states is not None:
            for sequence in self.scheduler.running:
                if sequence.restores >= 0:
                    self._states.restore(sequence.restores, sequence.slot, sequence.prefilled)
                    sequence.restores = -1
        if any(sequence.grammar_state is GrammarState.LOST for sequence in plan.assigned):
            decode = tuple(sequence for sequence in plan.decode if sequence.grammar_state is not GrammarState.LOST)
            return replace(plan, decode=decode)
        return plan

    def _launch(self, plan: Plan[RunningSequence]) -> None:
        """Launch the plan's forwards: prompts, and a step."""
        if plan.scored is not None:
            self._score(plan.scored)
        shared = plan.prefill if plan.decode and self.executor.mixes else ()
        if plan.prefill and not shared:
            self.executor.prefill(plan.prefill)
            self._prefilled(plan.prefill)
        if plan.decode:
            self.grammar_slots.post_forks()
            beams = self.beams.hold(plan.decode) if self.beams else None
            self._in_flight.append(self._runner.launch(plan.decode, shared, beams))
            self._prefilled(shared)

    def _process_outputs(self, step: LaunchedStep) -> None:
        """Wait for a step, send token events, end finished sequences."""
        self._runner.collect(step)
        self._hear_openings(step)
        self._output_processor.deliver(step)

    def _hear_openings(self, step: LaunchedStep) -> None:
        """Handle messages until each answer that ends here is known to be open, because they say how its grammar was
        compiled. Its rows have come, so the message is on its way. An answer that goes on needs no message yet. No step
        runs meanwhile, so a message finds what it finds between two iterations."""
        ending = [b for b in step.late_lanes if step.outcomes[b].finish is not None]
        ends_s = self._clock() + _OPENING_S
        while any(self._is_opening(step, b) for b in ending) and self._clock() < ends_s:
            self._hear()

    def _is_opening(self, step: LaunchedStep, b: int) -> bool:
        return step.holds(b) and step.sequences[b].grammar_state is GrammarState.OPENING

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
        waited_ms = (self._clock() - sequence.waits_since_s) * 1e3
        most_ms = sequence.scheduling.max_queue_s * 1e3
        error = QueueTimeout(
            f"max_queue_ms: waited {waited_ms:.0f} ms for a slot, at most {most_ms:.0f} ms are allowed"
        )
        self.end(sequence, error=error)

    def _slot_assigned(self, sequence: RunningSequence) -> None:
        if not sequence.length:
            return  # a beam without tokens: a fork writes its slot
        if sequence.exact is not None:
            self._hold_exact(sequence, sequence.exact)
        self._write_slot(sequence)
        telemetry = sequence.telemetry
        telemetry.scheduled_s = telemetry.scheduled_s or self._clock()
        if sequence.guided:
            self.grammar_slots.open(sequence)

    def _hold_exact(self, sequence: RunningSequence, sampler: ExactSampler) -> None:
        """Hold an exact answer while another sequence makes the shared tries that it wants."""
        if not sequence.request.prefill_only:
            sequence.held = not sampler.may_run(sequence)

    def _release_exact(self) -> bool:
        """Let exact answers go on that need not be held any more. True: the next plan has them."""
        held = [sequence for sequence in self.scheduler.running if sequence.held]
        for sequence in held:
            if sequence.exact is not None:
                self._hold_exact(sequence, sequence.exact)
                if not sequence.held:
                    self._slot_writer.write_draws(sequence)
        return any(not sequence.held for sequence in held)

    def _write_slot(self, sequence: RunningSequence) -> None:
        self._slot_writer.assign(sequence)
        self._sync.forget(sequence.slot)
        if self._suffix is not None:
            self._suffix.assign(sequence.slot, sequence.request.suffix_scope)

    def _slot_lost(self, sequence: RunningSequence) -> None:
        """Release the matcher of a sequence that was preempted."""
        self.stats.preemptions += 1
        if sequence.group:
            self.beams.slot_lost(sequence)
        if sequence.scored:
            self.executor.scorer.drop(sequence)
        self.grammar_slots.close(sequence)

    def _begin_anew(self, sequence: RunningSequence) -> None:
        """Let an exact answer begin anew."""
        if self._cut(sequence, 0, lambda: take_all_back(sequence)) and sequence.guided:
            self.grammar_slots.begin_anew(sequence)

    def _cut(self, sequence: RunningSequence, num_tokens: int, take_back: Callable[[], None]) -> bool:
        """Let an answer go on after its first `num_tokens` tokens; `take_back` removes the others from the sequence.

        True: the sequence keeps its slot and pages, and its matcher is the caller's. False: it comes back like a
        preempted one, with fewer tokens; its pages were indexed before that.
        """
        length = len(sequence.request.prompt_ids) + num_tokens
        keeps_slot = self.scheduler.cut(sequence, length)
        if not keeps_slot:
            self.grammar_slots.close(sequence)
            self.scheduler.preempt(sequence, self._clock())
        take_back()
        if keeps_slot:
            self._write_slot(sequence)
        else:
            sequence.length = length
        return keeps_slot

    def _score(self, chunk: Chunk[RunningSequence]) -> None:
        sequence, wanted = chunk.sequence, chunk.sequence.request.outputs.prompt_logprobs
        assert wanted is not None, sequence
        self._slot_writer.write_pages(sequence)
        self.executor.scorer.launch(sequence, sequence.slot, chunk.start, chunk.end, wanted)
        self._prefilled((chunk,))

    def _prefilled(self, chunks: tuple[Chunk[RunningSequence], ...]) -> None:
        now_s = self._clock()
        for chunk in chunks:
            chunk.sequence.prefilled = chunk.end
            if self._states is not None:
                pages = list(chunk.sequence.pages)
                place = self.scheduler.place_of_snapshot(chunk.sequence)
                if place is not None:
                    self._states.store(chunk.sequence.slot, place, chunk.end)
                if pages != chunk.sequence.pages:
                    chunk.sequence.pages_written = 0
            if chunk.end == chunk.sequence.prefill_end:
                self.scheduler.index_pages(chunk.sequence)
            telemetry = chunk.sequence.telemetry
            if not telemetry.first_token_s:  # else it was preempted, and its answer is prefilled as well
                telemetry.prefilled_s = now_s
            self.stats.prefill_tokens += chunk.end - chunk.start

    def _in_step(self, sequence: RunningSequence) -> bool:
        """Return whether a step with the sequence in its slot is launched and not collected."""
        return any(
            other is sequence and step.holds(b) for step in self._in_flight for b, other in enumerate(step.sequences)
        )

    def end(
        self,
        sequence: RunningSequence,
        event: TokenEvent | None = None,
        *,
        finish: FinishReason | None = None,
        error: LockstepError | None = None,
        silent: bool = False,
    ) -> None:
        """Release everything the sequence holds, with its group, then send its last event; `silent` sends none.

        `event`: tokens that are not sent yet.
        """
        sequence = sequence.members[0]
        request = sequence.request
        del self.sequences[request]
        group = self.beams.remove(sequence) if sequence.group else None
        with self.live_lock:
            self.live -= len(sequence.members)
        if self.transfers is None or not self.transfers.ended(sequence):
            self._slot_writer.release(sequence)
            self.scheduler.remove(sequence)
        if sequence.exact is not None:
            sequence.exact.end(sequence)
        sequence.telemetry.finished_s = self._clock()
        if group is not None:
            last = list(group.last_events(finish, error))
        else:
            last = [ended(self._output_processor.last_event(sequence, event), request, finish, error)]
        if self._suffix is not None and error is None:
            answer = last[0].token_ids if group else sequence.answer
            self._suffix.add(request.suffix_scope, request.text_prompt_ids, answer)
        if error is not None:
            self.stats.failed[status_of(error).name] += 1
        for each in last if error is None and not request.prefill_only else ():
            self.stats.finished["DROPPED" if silent or each.finish is None else each.finish.name] += 1
        for each in () if silent else last:
            request.sink(each)
        if sequence.scored:
            self.executor.scorer.drop(sequence)
        if adapters := request.adapters:
            assert self._adapters is not None, request
            self._adapters.release(adapters)
        for member in sequence.members:  # last: the client gets its last event even if the port fails
            self.grammar_slots.close(member)

    @property
    def num_inflight_steps(self) -> int:
        """See `Engine`."""
        return len(self._in_flight)

    @property
    def num_index_drafts(self) -> tuple[int, int]:
        """Drafts from earlier answers that were verified, and accepted, since the start."""
        return self._suffix.num_index_drafts if self._suffix is not None else (0, 0)

    @property
    def step_ms_by_rows(self) -> dict[bool, dict[int, float]]:
        """See `EngineStats`. Any thread: a step that is observed meanwhile may be in a part of the values."""
        return {guided: times.table() for guided, times in self._runner.budget.times.items()}

    def count_draft_model(self, draft: DraftModel) -> None:
        """Count the memory of the model that drafts from now on."""
        assert self.executor.decoupled is not None, "no other drafter has such a model"
        buffers = self.executor.decoupled.buffers
        self.stats.memory = with_draft_model(self.stats.memory, draft.model, draft.pages, buffers)

    # -- messages ----------------------------------------------------------------------------------------------------

    def admit(self, sequence: RunningSequence, *, awaits_pages: bool) -> None:
        """Put a submitted sequence into the waiting queue, now or when its pages have come."""
        request = sequence.request
        self.sequences[request] = sequence
        if request.beams is not None:
            self.beams.add(sequence)
        if awaits_pages:
            assert self.transfers is not None, sequence
            self.transfers.await_pages(sequence)
        else:
            self._enqueue(sequence)

    def _enqueue(self, sequence: RunningSequence) -> None:
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

    def grammar_backtracked(self, slot: int, slot_gen: int, num_tokens: int, dead_texts: tuple[bytes, ...]) -> None:
        """Let the answer in the slot go on after its first `num_tokens` tokens; -1: it ends with GRAMMAR_INVALID.

        An event for an earlier owner of the slot is ignored.
        """
        sequence = self.scheduler.sequence(slot, slot_gen)
        if sequence is None or not sequence.backtracking:
            return
        if num_tokens < 0:
            self.end(sequence, finish=FinishReason.GRAMMAR_INVALID)
            return
        if self._cut(sequence, num_tokens, lambda: go_back(sequence, num_tokens, dead_texts)):
            self.grammar_slots.close(sequence)
            self.grammar_slots.open(sequence)

    def grammar_failed(self, slot: int, slot_gen: int, error: LockstepError) -> None:
        """End the sequence in the slot with `error`; an event for an earlier owner of the slot is ignored."""
        sequence = self.scheduler.sequence(slot, slot_gen)
        if sequence is not None:
            self.end(sequence, error=error)
