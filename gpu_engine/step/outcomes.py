"""Turns the results of a step into one `LaneOutcome` for each lane. Pure: it reads, and decides nothing.

Invariant: an outcome carries exactly the tokens that the step appended to the slot's history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gpu_engine.api.errors import LockstepError
from gpu_engine.api.request import FinishReason, Logprobs
from gpu_engine.step.output_ring import StepOutputs
from kernels.accept import STOP_LENGTH, STOP_STEERED, STOP_TOKEN
from kernels.logprobs import CLOSES, ROW_IN_ERROR, ROW_MISSING
from shared_mem.layout import RowKind

_DEFER = int(RowKind.DEFER)


class Candidates(NamedTuple):
    """The tokens that may come next in a beam."""

    tokens: tuple[tuple[int, float], ...]
    """(token, log-probability after mask, bans and penalties), best first; empty: none is legal."""
    closes: bool = False
    """The grammar process narrowed the row, so that the answer ends within `max_tokens`."""


class LaneOutcome(NamedTuple):
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
    masses: tuple[tuple[float, float], ...] = ()
    """Of an exact lane, for each token: log of its probability, and of the probability of all other tokens that are
    legal and make no known prefix (see core/exact_sampling.py)."""
    candidates: Candidates | None = None
    """Candidates of a lane that is a beam; None if its row was missing or in error."""


def outcomes(
    step: StepOutputs,
    num_lanes: int,
    *,
    guided: Sequence[bool],
    logprobs: Sequence[int | None],
    exact: Sequence[bool] = (),
) -> list[LaneOutcome]:
    """Return the outcomes of the first `num_lanes` lanes. `guided`, `logprobs` and `exact` are the handle's."""
    # It runs for each lane of each step, and most lanes have neither a finish nor a missing row.
    made = []
    for b, (emitted, count, blocked, finish) in enumerate(
        zip(step.emitted[:num_lanes], step.num_emitted, step.blocked, step.finish, strict=False)
    ):
        made.append(
            LaneOutcome(
                tuple(emitted[:count]),
                () if logprobs[b] is None else _logprobs(step, b, count, logprobs[b]),
                step.num_drafts[b],
                step.num_accepted[b],
                _finish(finish, blocked, guided[b]) if finish or blocked else None,
                blocked == _DEFER,
                blocked,
                step.num_jump_forward[b] if guided[b] else 0,
                masses=_masses(step, b) if exact and exact[b] else (),
            )
        )
    return made


def beam_outcomes(results: list[LaneOutcome], step: StepOutputs, lanes: Sequence[int]) -> list[LaneOutcome]:
    """Return `results` with the candidates of the lanes that are beams, in place of tokens."""
    logprob_BR, top_ids_BRN, top_logprobs_BRN = step.logprobs
    changed = list(results)
    for b in lanes:
        code = int(logprob_BR[b, 0])
        if code in (ROW_MISSING, ROW_IN_ERROR):
            continue
        count = code % CLOSES
        ids, values = top_ids_BRN[b, 0, :count].tolist(), top_logprobs_BRN[b, 0, :count].tolist()
        candidates = Candidates(tuple(zip(ids, values, strict=True)), code >= CLOSES)
        changed[b] = results[b]._replace(finish=None, deferred=False, blocked=RowKind.ALL, candidates=candidates)
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


def _masses(step: StepOutputs, b: int) -> tuple[tuple[float, float], ...]:
    return tuple((log_p, rest) for log_p, rest in step.masses[b, : step.num_emitted[b]].tolist())


def _logprobs(step: StepOutputs, b: int, count: int, wanted: int | None) -> tuple[Logprobs, ...]:
    logprob_BR, top_ids_BRN, top_logprobs_BRN = step.logprobs
    chosen = logprob_BR[b, :count].tolist()
    ids, values = top_ids_BRN[b, :count, :wanted].tolist(), top_logprobs_BRN[b, :count, :wanted].tolist()
    # Fewer tokens than were asked for may be legal where log-probabilities are among legal tokens.
    return tuple(
        Logprobs(chosen[j], tuple(pair for pair in zip(ids[j], values[j], strict=True) if pair[1] > -math.inf))
        for j in range(count)
    )
