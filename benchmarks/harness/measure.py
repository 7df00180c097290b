"""The measurements of one answer, and the summary of many answers as one row of a table.

Invariant: every time is taken at the client's side of a system, in `time.perf_counter()` seconds, and the same
functions summarise every system.
Not responsible for: running a system (see systems.py), formatting (see tables.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness.validity import Judge, Verdict


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """The engine's own account of one answer (the proto's Telemetry); milliseconds."""

    ttft_ms: float
    total_ms: float
    mask_wait_ms: float
    steps: int
    draft_tokens: int
    accepted_draft_tokens: int
    deferred_rows: int
    backtracks: int = 0
    """Times that a verified answer went back."""
    exact_tries: int = 0
    exact_tokens: int = 0
    """Of an exact answer: its tries, and the tokens of all of them."""

    @property
    def step_ms(self) -> float:
        """Mean time of a decode step; NaN when there was none."""
        return (self.total_ms - self.ttft_ms) / self.steps if self.steps else math.nan


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer. `steps` counts the arrivals of new tokens, a measure of decode steps."""

    name: str
    text: str
    token_ids: tuple[int, ...]
    finish: str
    """"stop", "length", "grammar_incomplete", ... in lower case."""
    started_s: float
    first_s: float
    last_s: float
    steps: int
    times: EngineTimes | None = None

    @property
    def ttft_ms(self) -> float:
        """From the call to the first token."""
        return (self.first_s - self.started_s) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first; NaN for answers of one token."""
        after_first = len(self.token_ids) - 1
        return (self.last_s - self.first_s) * 1e3 / after_first if after_first > 0 else math.nan


@dataclass(frozen=True, slots=True)
class Run:
    """One pass of a system over a workload: its answers, and the wall time from the first call to the last token."""

    answers: tuple[Answer, ...]
    wall_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One row of the table. Percentiles are over answers; NaN means "not measured"."""

    answers: int
    tokens: int
    tokens_per_s: float
    requests_per_s: float
    ttft_p50_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    acceptance_length: float
    """Tokens per arrival of tokens, over all answers."""
    valid_share: float
    stop_share: float


def percentile(values: Iterable[float], q: float) -> float:
    """Return the q-th percentile (0 <= q <= 100) by linear interpolation, ignoring NaN; NaN without values."""
    if not 0 <= q <= 100:
        raise ValueError(f"q: {q} is not in [0, 100]")
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(runs: Sequence[Run], schemas: dict[str, str | None], judge: Judge) -> Summary:
    """Sum up the passes of one system over one workload; `schemas` maps an answer's name to its schema.

    Rates are totals over totals, so a longer pass weighs more. An answer that was cut off counts as not valid.
    """
    answers = [answer for run in runs for answer in run.answers]
    wall_s = sum(run.wall_s for run in runs)
    tokens = sum(len(answer.token_ids) for answer in answers)
    steps = sum(answer.steps for answer in answers)
    guided = [(schema, answer.text) for answer in answers if (schema := schemas[answer.name]) is not None]
    valid = sum(judge.judge(schema, text).verdict is Verdict.VALID for schema, text in guided)
    return Summary(
        answers=len(answers),
        tokens=tokens,
        tokens_per_s=tokens / wall_s if wall_s else math.nan,
        requests_per_s=len(answers) / wall_s if wall_s else math.nan,
        ttft_p50_ms=percentile((answer.ttft_ms for answer in answers), 50),
        tpot_p50_ms=percentile((answer.tpot_ms for answer in answers), 50),
        tpot_p99_ms=percentile((answer.tpot_ms for answer in answers), 99),
        acceptance_length=tokens / steps if steps else math.nan,
        valid_share=valid / len(guided) if guided else math.nan,
        stop_share=sum(answer.finish == "stop" for answer in answers) / len(answers) if answers else math.nan,
    )


@dataclass(frozen=True, slots=True)
class GuidanceCost:
    """Time per decode step with and without a grammar, over pairs of answers to one prompt."""

    pairs: int
    guided_step_ms: float
    free_step_ms: float
    ratio: float
    """Median over the pairs of guided / free."""
    mask_wait_share: float
    """Share of the guided decode time that was spent waiting for masks."""
    guided_acceptance: float
    free_acceptance: float


def guidance_cost(pairs: Sequence[tuple[Answer, Answer]]) -> GuidanceCost:
    """Compare guided with free answers, pair by pair and per decode step, so that the token counts cancel.

    Answers without the engine's own times, or without a decode step, are ignored.
    """
    kept = [
        (guided, free, guided.times, free.times)
        for guided, free in pairs
        if guided.times and free.times and guided.times.steps and free.times.steps
    ]
    guided_ms = sum(g.total_ms - g.ttft_ms for _, _, g, _ in kept)
    return GuidanceCost(
        pairs=len(kept),
        guided_step_ms=percentile((g.step_ms for _, _, g, _ in kept), 50),
        free_step_ms=percentile((f.step_ms for _, _, _, f in kept), 50),
        ratio=percentile((g.step_ms / f.step_ms for _, _, g, f in kept), 50),
        mask_wait_share=sum(g.mask_wait_ms for _, _, g, _ in kept) / guided_ms if guided_ms else math.nan,
        guided_acceptance=_acceptance(guided for guided, _, _, _ in kept),
        free_acceptance=_acceptance(free for _, free, _, _ in kept),
    )


def _acceptance(answers: Iterable[Answer]) -> float:
    kept = list(answers)
    steps = sum(answer.steps for answer in kept)
    return sum(len(answer.token_ids) for answer in kept) / steps if steps else math.nan
