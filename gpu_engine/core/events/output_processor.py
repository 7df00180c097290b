"""From a collected step to what clients get: counters and events, lane by lane.

Each lane goes one way, in one order:

    failed        the tokens before the error are sent, and the error ends the sequence
    a beam        its candidates go to its search, and nothing else happens   (core/beams/)
    any other     count the tokens
                  grammar: rows were missing, or have arrived                 (core/grammar_slots.py)
                  tensors: the tokens wait for their rows                     (tensor_streams.py)
                  a verified answer without a legal token may go back     (held_tokens.py)
                  an exact answer may begin anew                          (core/exact_sampling.py)
                  else the tokens are sent or held, or the sequence ends with them

After the last lane, each search whose beams all have candidates goes on, or ends.

Invariant: a token is counted once, and sent once, or dropped with its sequence or when its answer goes back. Used only
by the engine thread. Not responsible for: what a sequence holds and its release (see loop.py), steps (see runner.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from gpu_engine.api.errors import LimitExceeded, LockstepError
from gpu_engine.api.request import FinishReason, PromptLogprobs, Request, TokenEvent, TokenOrigin
from gpu_engine.api.stats import EngineStats
from gpu_engine.core.beams.groups import BeamGroups
from gpu_engine.core.events.held_tokens import all_unsent, hold, may_backtrack, take_all_back
from gpu_engine.core.events.tensor_streams import OutputStreams
from gpu_engine.core.exact_sampling import ExactSampler, Verdict
from gpu_engine.core.grammar_slots import GrammarSlots
from gpu_engine.core.runner import LaunchedStep
from gpu_engine.core.running import RunningSequence
from gpu_engine.core.scheduler import GrammarState
from gpu_engine.step.outcomes import LaneOutcome
from gpu_engine.step.prompt_scorer import PromptScorer
from shared_mem.layout import RowKind


class EndSequence(Protocol):
    """Ends a sequence."""

    def __call__(
        self,
        sequence: RunningSequence,
        event: TokenEvent | None = None,
        *,
        finish: FinishReason | None = None,
        error: LockstepError | None = None,
    ) -> None:
        """Release everything the sequence holds, and send its last event, with the tokens of `event`."""


class OutputProcessor:
    """Delivers the outcomes of steps.

    Args:
        stats: the counters.
        scorer: has the log-probabilities of prompts.
        outputs: the sequences that return tensors.
        grammar_slots: learns which rows have arrived.
        beams: the searches.
        end: ends a sequence.
        begin_anew: lets an exact answer begin anew.
    """

    def __init__(
        self,
        stats: EngineStats,
        scorer: PromptScorer,
        outputs: OutputStreams,
        grammar_slots: GrammarSlots,
        beams: BeamGroups,
        end: EndSequence,
        begin_anew: Callable[[RunningSequence], None],
    ) -> None:
        self._begin_anew = begin_anew
        self._stats, self._scorer, self._outputs = stats, scorer, outputs
        self._grammar_slots, self._beams, self._end = grammar_slots, beams, end

    def deliver(self, step: LaunchedStep) -> None:
        """Deliver a collected step. Sequences that lost their slot after the launch are skipped."""
        self._stats.count_step(
            step.forward_rows + step.prompt_tokens, step.step_ms, step.waited_ms, guided=step.any_guided
        )
        now_s = time.monotonic()
        for sequence, outcome, slot, slot_gen in zip(
            step.sequences, step.outcomes, step.slots, step.slot_gens, strict=True
        ):
            lost = sequence.slot != slot or sequence.slot_gen != slot_gen
            if lost or sequence.ended or sequence.backtracking:
                continue
            if outcome.error is not None:
                self._fail(sequence, outcome, outcome.error, step, now_s)
            elif outcome.candidates is not None:
                self._beams.take(sequence, outcome.candidates, step.waited_ms)
            else:
                self._take(sequence, outcome, step, now_s)
        if step.beams is not None:
            self._advance_searches(now_s)

    def last_event(self, sequence: RunningSequence, event: TokenEvent | None) -> TokenEvent:
        """Return the tokens that the client does not have yet; the sequence ends with the tokens of `event`."""
        if sequence in self._outputs:
            return self._outputs.close(sequence)
        if sequence.exact is not None and not sequence.exact.accepted:
            take_all_back(sequence)
            event = None
        return all_unsent(sequence, event or TokenEvent(sequence.request.index))

    def _take(self, sequence: RunningSequence, outcome: LaneOutcome, step: LaunchedStep, now_s: float) -> None:
        """Deliver a lane that is not a beam, or a beam whose row is missing or in error."""
        request = sequence.request
        if request.sampling.repetition is not None and outcome.token_ids:
            outcome = _until_repeated(sequence, outcome)
        event = self._event(sequence, outcome)
        self._count(sequence, outcome, step.waited_ms, now_s)
        if outcome.deferred:
            sequence.held = False  # a beam whose row is missing asks for it again
            self._grammar_slots.defer(sequence, step.seq, advanced=bool(outcome.token_ids))
        elif sequence.guided:
            self._grammar_slots.rows_arrived(sequence)
        finish = None if outcome.finish is None else _reason(sequence, outcome)
        if request.outputs.tensors and sequence in self._outputs:
            self._hold(sequence, event, finish)
        elif sequence.exact is not None and outcome.blocked != RowKind.ERROR:
            self._take_exact(sequence, event, outcome, sequence.exact, finish)
        elif finish is FinishReason.GRAMMAR_INVALID and may_backtrack(sequence):
            hold(sequence, event)
            self._grammar_slots.backtrack(sequence)
        elif finish is not None:
            self._end(sequence, event, finish=finish)
        elif outcome.token_ids:
            hold(sequence, event)

    def _take_exact(
        self,
        sequence: RunningSequence,
        event: TokenEvent,
        outcome: LaneOutcome,
        sampler: ExactSampler,
        finish: FinishReason | None,
    ) -> None:
        """Hold the tokens of an exact answer until it is accepted, or let it begin anew."""
        hold(sequence, event)
        verdict, telemetry = sampler.take(outcome.token_ids, outcome.masses, finish), sequence.telemetry
        telemetry.exact_tries, telemetry.exact_tokens = sampler.own_tries, sampler.tokens
        telemetry.exact_log_mass = sampler.masses.log_mass
        if verdict is Verdict.AGAIN:
            self._begin_anew(sequence)
        elif verdict is Verdict.ACCEPTED:
            self._end(sequence, finish=finish)
        elif verdict is Verdict.GIVEN_UP and sampler.bound.fails:
            mass = f"the grammar has at most {math.exp(sampler.masses.log_mass):.3g} of the model's answers"
            self._end(sequence, error=LimitExceeded(f"sampling.grammar_exact: {sampler.own_tries} tries, {mass}"))
        elif verdict is Verdict.GIVEN_UP:
            self._end(sequence, finish=FinishReason.GRAMMAR_INEXACT)

    def _fail(
        self,
        sequence: RunningSequence,
        outcome: LaneOutcome,
        error: LockstepError,
        step: LaunchedStep,
        now_s: float,
    ) -> None:
        """End a lane for which the step failed. Without drafts its tokens were sent before the row that failed."""
        if outcome.token_ids:
            event = self._event(sequence, outcome)
            self._count(sequence, outcome, step.waited_ms, now_s)
            # The tokens of a sequence with tensors wait for their rows, which an error drops.
            if sequence not in self._outputs and sequence.exact is None:
                sequence.request.sink(all_unsent(sequence, event))
        self._end(sequence, error=error)

    def _hold(self, sequence: RunningSequence, event: TokenEvent, finish: FinishReason | None) -> None:
        """Send the tokens when their rows are computed; a sequence that ends here holds its slot until then."""
        self._outputs.hold(sequence, event, finish)
        if finish is not None:
            sequence.ended, sequence.deferred = True, False
            sequence.guided, sequence.grammar_state = False, GrammarState.UNCONSTRAINED
            self._grammar_slots.close(sequence)

    def _advance_searches(self, now_s: float) -> None:
        """Advance or end every search whose beams all have candidates."""
        for group in self._beams.complete():
            first = group.members[0]
            group.prompt_logprobs = group.prompt_logprobs or self._prompt_logprobs(first)
            first.telemetry.steps += 1
            for _ in group.beams:
                self._stats.count_tokens(1, 0, 0)
            self._count_time(first, now_s)
            self._beams.choose(group)
            if group.search.done:
                self._end(first)

    # -- events ------------------------------------------------------------------------------------------------------

    def _event(self, sequence: RunningSequence, outcome: LaneOutcome) -> TokenEvent:
        """Return the event of a step's tokens. Must come before they are counted, which changes what was drafted."""
        request, ids = sequence.request, outcome.token_ids
        origins = _origins(sequence, outcome) if request.outputs.token_origins else ()
        scores = self._prompt_logprobs(sequence) if ids and sequence.scored else None
        return TokenEvent(request.index, ids, outcome.logprobs, prompt_logprobs=scores, origins=origins)

    def _prompt_logprobs(self, sequence: RunningSequence) -> PromptLogprobs | None:
        """Return the log-probabilities for the first event with a token. Never waits: they were launched earlier."""
        if not sequence.scored:
            return None
        sequence.scored = False
        return self._scorer.take(sequence)

    # -- counters ----------------------------------------------------------------------------------------------------

    def _count(self, sequence: RunningSequence, outcome: LaneOutcome, waited_ms: float, now_s: float) -> None:
        telemetry, stats, count = sequence.telemetry, self._stats, len(outcome.token_ids)
        sequence.answer.extend(outcome.token_ids)
        sequence.length += count
        # The pages hold the keys of every token but the last; the keys of rejected drafts are overwritten.
        sequence.prefilled = sequence.length - 1
        telemetry.steps += 1
        telemetry.mask_wait_ms += waited_ms if sequence.guided else 0.0
        stats.count_tokens(count, outcome.num_drafts, outcome.num_accepted, sequence.num_jump_forward)
        if outcome.num_jump_forward >= 0:
            sequence.num_jump_forward = outcome.num_jump_forward
        if count:
            telemetry.draft_tokens += outcome.num_drafts
            telemetry.accepted_draft_tokens += outcome.num_accepted
            self._count_time(sequence, now_s)
        if outcome.finish is FinishReason.GRAMMAR_ERROR:
            stats.dead_ends += outcome.blocked == RowKind.DEAD_END
            stats.matcher_errors += outcome.blocked == RowKind.ERROR

    def _count_time(self, sequence: RunningSequence, now_s: float) -> None:
        """Note that the sequence got tokens at `now_s`, a time of `time.monotonic`."""
        telemetry = sequence.telemetry
        if telemetry.first_token_s:
            self._stats.token_gap_seconds.observe(now_s - telemetry.last_token_s)
        else:
            telemetry.first_token_s, telemetry.cached_tokens = now_s, self._num_reused(sequence)
            if sequence.num_cached_tokens:  # a prompt of one token has no prefill, and no time of it
                telemetry.prefilled_s = telemetry.prefilled_s or telemetry.scheduled_s
        telemetry.last_token_s = now_s

    def _num_reused(self, sequence: RunningSequence) -> int:
        """Return how many tokens of the prompt the prefix cache had. Rows that were sent before a preemption say more
        than the pages that the sequence found afterwards."""
        reused = self._outputs.reused(sequence) if sequence in self._outputs else None
        return sequence.num_cached_tokens if reused is None else reused

    def __repr__(self) -> str:
        return f"<OutputProcessor {self._stats.generated_tokens} tokens>"


def ended(event: TokenEvent, request: Request, finish: FinishReason | None, error: LockstepError | None) -> TokenEvent:
    """Return the last event of a sequence, with the reason for its end."""
    ids = event.token_ids
    if finish is FinishReason.GRAMMAR_CLOSED and ids[-1] in request.sampling.stop_token_ids:
        finish = FinishReason.STOP  # a stop token of the client: the grammar may be incomplete
    stopped = finish in (FinishReason.STOP, FinishReason.GRAMMAR_CLOSED)
    stopped = stopped or (finish is FinishReason.REPETITION and request.grammar is not None)
    matched = ids[-1] if stopped and ids else None
    return replace(event, finish=finish, matched_token_id=matched, error=error)


def _until_repeated(sequence: RunningSequence, outcome: LaneOutcome) -> LaneOutcome:
    """Return the outcome, cut after the token that completes a repetition.

    A guided answer is not cut: the grammar process sees the same repetition and steers the answer to its end.
    """
    ids = outcome.token_ids
    limit = sequence.request.sampling.repetition
    if limit is None or sequence.repeats:
        return outcome
    recent = (*sequence.answer[-limit.num_tokens :], *ids)
    before = len(sequence.answer) + len(ids) - len(recent)
    for end in range(len(recent) - len(ids) + 1, len(recent) + 1):
        if limit.is_reached(recent, end, before):
            break
    else:
        return outcome
    sequence.repeats = True
    count = end - (len(recent) - len(ids))
    if sequence.request.grammar is not None or (count == len(ids) and outcome.finish is FinishReason.STOP):
        return outcome
    return outcome._replace(
        token_ids=ids[:count],
        logprobs=outcome.logprobs[:count],
        num_accepted=min(outcome.num_accepted, count),
        finish=FinishReason.REPETITION,
        deferred=False,
    )


def _reason(sequence: RunningSequence, outcome: LaneOutcome) -> FinishReason | None:
    """Return why a lane ends. Where answers are verified, no token is legal when none leads to a valid answer."""
    grammar = sequence.request.grammar
    if outcome.finish is FinishReason.GRAMMAR_CLOSED and sequence.repeats:
        by_client = outcome.token_ids[-1] in sequence.request.sampling.stop_token_ids
        return outcome.finish if by_client else FinishReason.REPETITION
    is_lost = outcome.finish is FinishReason.GRAMMAR_ERROR and outcome.blocked == RowKind.DEAD_END
    return FinishReason.GRAMMAR_INVALID if is_lost and grammar is not None and grammar.verify else outcome.finish


def _origins(sequence: RunningSequence, outcome: LaneOutcome) -> tuple[TokenOrigin, ...]:
    """Return how a step came to each of its tokens: the grammar made the first drafts."""
    accepted = min(outcome.num_accepted, len(outcome.token_ids))
    forced = min(sequence.num_jump_forward, accepted)
    return (
        *[TokenOrigin.FORCED] * forced,
        *[TokenOrigin.DRAFT] * (accepted - forced),
        *[TokenOrigin.SAMPLED] * (len(outcome.token_ids) - accepted),
    )
