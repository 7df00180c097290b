"""Turns the results of a step into one `LaneOutcome` for each lane. Pure: it reads, and decides nothing.

Invariant: an outcome carries exactly the tokens that the step appended to the slot's history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from gpu_engine.api.errors import LockstepError
from gpu_engine.api.request import FinishReason, Logprobs
from kernels.accept import STOP_LENGTH, STOP_STEERED, STOP_TOKEN, AcceptResult
from kernels.logprobs import CLOSES, ROW_IN_ERROR, ROW_MISSING
from shared_mem.layout import RowKind


class StepResults(Protocol):
    """The results of a step in host memory; `StepOutputs` of the output ring is one."""

    @property
    def result(self) -> AcceptResult:
        """The outcome of every lane."""

    @property
    def num_drafts_B(self) -> torch.Tensor:
        """int32, drafts that were verified."""

    @property
    def num_jump_forward_B(self) -> torch.Tensor:
        """int32, jump-forward tokens among the drafts of the next step; see `LaneBuffers`."""


class Candidates(NamedTuple):
    """The tokens that may come next in a beam."""

    tokens: tuple[tuple[int, float], ...]
    """(token, log-probability after mask, bans and penalties), best first; empty: none is legal."""
    closes: bool = False
    """The grammar process narrowed the row, so that the answer ends within `max_tokens`."""


@dataclass(frozen=True, slots=True)
class LaneOutcome:
    """The effect of one step on one lane."""

    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    num_drafts: int
    num_accepted: int
    finish: FinishReason | None
    deferred: bool
    """Its mask rows did not arrive in time; the next step requests them again."""
    blocked: int = RowKind.ALL
    """The kind of row that ended its step early: DEFER, DEAD_END, ERROR, or FAILED and a processor's number."""
    num_jump_forward: int = 0
    """Jump-forward tokens among the drafts of its next step; -1: the drafts of this step are unchanged."""
    error: LockstepError | None = None
    """Ends the sequence after `token_ids`: the step itself, or a logits processor, failed for this lane."""
    candidates: Candidates | None = None
    """Candidates of a lane that is a beam; None if its row was missing or in error."""


def outcomes(
    lane: StepResults, num_lanes: int, *, guided: Sequence[bool], logprobs: Sequence[int | None]
) -> list[LaneOutcome]:
    """Return the outcomes of the first `num_lanes` lanes. `guided` and `logprobs` are those of the step's handle."""
    r = lane.result
    counts, accepted = r.num_emitted_B[:num_lanes].tolist(), r.num_accepted_B[:num_lanes].tolist()
    finish, blocked = r.finish_B[:num_lanes].tolist(), r.blocked_B[:num_lanes].tolist()
    jump_forward = lane.num_jump_forward_B[:num_lanes].tolist()
    drafts, tokens = lane.num_drafts_B[:num_lanes].tolist(), r.emitted_BR[:num_lanes].tolist()
    return [
        LaneOutcome(
            token_ids=tuple(tokens[b][: counts[b]]),
            logprobs=_logprobs(lane, b, counts[b], logprobs[b]),
            num_drafts=drafts[b],
            num_accepted=accepted[b],
            finish=_finish(finish[b], blocked[b], guided[b]),
            deferred=blocked[b] == RowKind.DEFER,
            blocked=blocked[b],
            num_jump_forward=jump_forward[b] if guided[b] else 0,
        )
        for b in range(num_lanes)
    ]


def beam_outcomes(results: list[LaneOutcome], lane: StepResults, lanes: Sequence[int]) -> list[LaneOutcome]:
    """Return `results` with the candidates of the lanes that are beams, in place of tokens."""
    r, changed = lane.result, list(results)
    for b in lanes:
        code = int(r.logprob_BR[b, 0])
        if code in (ROW_MISSING, ROW_IN_ERROR):
            continue
        count = code % CLOSES
        ids, values = r.top_ids_BRN[b, 0, :count].tolist(), r.top_logprobs_BRN[b, 0, :count].tolist()
        candidates = Candidates(tuple(zip(ids, values, strict=True)), code >= CLOSES)
        changed[b] = replace(results[b], finish=None, deferred=False, blocked=RowKind.ALL, candidates=candidates)
    return changed


def _finish(finish: int, blocked: int, guided: bool) -> FinishReason | None:
    if blocked in (RowKind.DEAD_END, RowKind.ERROR):
        # Without a grammar the bans left nothing to draw.
        return FinishReason.GRAMMAR_ERROR if guided else FinishReason.LENGTH
    if finish == STOP_STEERED and guided:
        return FinishReason.GRAMMAR_CLOSED
    if finish in (STOP_TOKEN, STOP_STEERED):
        # STOP_STEERED of an unguided lane comes from a row of the slot's previous owner.
        return FinishReason.STOP
    if finish == STOP_LENGTH:
        return FinishReason.GRAMMAR_INCOMPLETE if guided else FinishReason.LENGTH
    return None


def _logprobs(lane: StepResults, b: int, count: int, wanted: int | None) -> tuple[Logprobs, ...]:
    if wanted is None:
        return ()
    r = lane.result
    chosen = r.logprob_BR[b, :count].tolist()
    ids, values = r.top_ids_BRN[b, :count, :wanted].tolist(), r.top_logprobs_BRN[b, :count, :wanted].tolist()
    # Fewer tokens than were asked for may be legal where log-probabilities are among legal tokens.
    return tuple(
        Logprobs(chosen[j], tuple(pair for pair in zip(ids[j], values[j], strict=True) if pair[1] > -math.inf))
        for j in range(count)
    )
