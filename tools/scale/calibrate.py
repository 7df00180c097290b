"""Measures one real engine for a calibration, and holds the simulation of it against a second measurement.

The engine runs in its own process and answers the workloads of `python -m benchmarks serve`. Its own statistics of
every iteration (WatchStats) are what is fitted; times of the client are what the simulation is compared with.
Invariant: the
prompts of the comparison are not among those of the fit.
Not responsible for: the fit (see calibration.py), the simulation (see fleet.py).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean, median
from typing import Any

import grpc

from benchmarks.harness.client import make_call
from benchmarks.harness.measure import percentile
from benchmarks.harness.server import EngineServer, ServerOptions
from benchmarks.harness.tables import table
from benchmarks.harness.workloads import Item, workload
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from tools.scale.calibration import BadCalibration, Calibration, Sample, back_to_back, fit_cost, fit_drafts
from tools.scale.fleet import Fleet, Result
from tools.scale.traces import Arrival

_HISTORY = 100_000


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer as its client saw it; times in seconds."""

    prompt_tokens: int
    answer_tokens: int
    ttft_s: float
    engine_ttft_s: float
    total_s: float
    """From the first token to the last."""
    compile_s: float | None
    """None: no grammar, or one that was compiled before."""
    guided: bool
    steps: int
    """Decode steps, by the engine's own count."""

    @property
    def tpot_s(self) -> float | None:
        """Time of a token after the first; None for an answer of one token."""
        return self.total_s / (self.answer_tokens - 1) if self.answer_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Pass:
    """All answers at one concurrency, with the iterations in which they were made."""

    concurrency: int
    answers: tuple[Timed, ...]
    wall_s: float
    samples: tuple[Sample, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers over the time of the pass."""
        return sum(answer.answer_tokens for answer in self.answers) / self.wall_s


class Measured:
    """Passes over one engine that runs at `address`."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def run(self, items: Sequence[Item], concurrency: int) -> Pass:
        """Answer the items greedily, so many at a time, at least twice the concurrency in all."""
        sent = list(islice(cycle(items), max(len(items), 2 * concurrency)))
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            info = await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
            gate = asyncio.Semaphore(concurrency)

            async def one(item: Item) -> Timed:
                async with gate:
                    return await _answer(stub, item)

            began_s, since_s = time.perf_counter(), time.time()
            answers = await asyncio.gather(*(one(item) for item in sent))
            wall_s = time.perf_counter() - began_s
            seen = [each for each in await _iterations(stub) if each.time_s >= since_s]
        return Pass(concurrency, tuple(answers), wall_s, tuple(_sample(each, info.page_size) for each in seen))


async def _iterations(stub: Any) -> list[Any]:
    """Return the last iterations of an engine that had some."""
    request = pb.WatchStatsRequest(history=_HISTORY, interval_ms=10, omit_requests=True)
    async for response in stub.WatchStats(request, timeout=30):
        return list(response.iterations)
    return []


async def _answer(stub: Any, item: Item) -> Timed:
    sampling = pb.SamplingParams(max_tokens=item.max_tokens, temperature=0.0)
    call = make_call(item.name, item.messages, schema=item.schema, sampling=sampling)
    arrivals: list[float] = []
    last: Any = None
    tokens = 0
    began_s = time.perf_counter()
    async for response in stub.Generate(call.request, timeout=600):
        if response.token_ids:
            arrivals.append(time.perf_counter())
            tokens += len(response.token_ids)
        last = response
    compiled = item.schema is not None and not last.telemetry.compile_cache_hit
    return Timed(
        last.usage.prompt_tokens,
        tokens,
        arrivals[0] - began_s,
        last.telemetry.ttft_ms / 1e3,
        arrivals[-1] - arrivals[0],
        last.telemetry.compile_ms / 1e3 if compiled else None,
        item.schema is not None,
        last.telemetry.steps,
    )


def _sample(each: Any, page_size: int) -> Sample:
    return Sample(
        ended_s=each.time_s,
        seconds=each.iteration_ms / 1e3,
        lanes=each.decoding,
        draft_rows=each.draft_tokens,
        prefill_tokens=each.prefill_tokens,
        context_tokens=each.pages_used * page_size,
        generated=each.generated_tokens,
    )


def calibration_of(passes: Sequence[Pass], name: str, engine: str, settings: dict[str, Any]) -> Calibration:
    """Fit one calibration to all passes of a workload."""
    samples = [s for each in passes for s in back_to_back(each.samples) if s.seconds > 0]
    cost, noise, error = fit_cost(samples)
    drafts = fit_drafts(samples)
    answers = [answer for each in passes for answer in each.answers]
    compiles = [answer.compile_s for answer in answers if answer.compile_s is not None]
    return Calibration(
        engine=engine,
        workload=name,
        iterations=len(samples),
        mean_error=error,
        shares=cost.shares,
        noise=noise,
        lanes=drafts.lanes,
        drafts=drafts.per_lane,
        tokens=drafts.tokens,
        gains=_gains(answers),
        front_s=max(0.0, median(answer.ttft_s - answer.engine_ttft_s for answer in answers)),
        compile_s=fmean(compiles) if compiles else 0.0,
        guided_share=fmean(answer.guided for answer in answers),
        pairs=tuple((answer.prompt_tokens, answer.answer_tokens) for answer in answers),
        settings=settings,
    )


def _gains(answers: Sequence[Timed]) -> tuple[float, ...]:
    """Return each answer's tokens beyond one a step, over those of all steps."""
    steps = sum(answer.steps for answer in answers)
    mean = sum(answer.answer_tokens for answer in answers) / steps - 1
    if mean <= 0:
        return (1.0,)
    return tuple(max(0.0, (answer.answer_tokens / answer.steps - 1) / mean) for answer in answers)


def simulated(calibration: Calibration, measured: Pass, seed: int = 0) -> Result:
    """Simulate the requests of a measured pass, at its concurrency."""
    arrivals = [
        Arrival(
            at_s=0.0,
            prompt_tokens=answer.prompt_tokens,
            answer_tokens=answer.answer_tokens,
            grammar=1 + number if answer.guided and answer.compile_s is not None else int(answer.guided),
        )
        for number, answer in enumerate(measured.answers)
    ]
    return Fleet(calibration.spec(), 1, seed=seed).run_closed(arrivals, measured.concurrency)


def validation_table(name: str, calibration: Calibration, passes: Sequence[Pass]) -> str:
    """Return measured and simulated figures of each pass as Markdown, with the simulation's error."""
    header = ["workload", "at a time", "tokens/s", "TTFT p50, ms", "TTFT p90, ms", "TPOT p50, ms", "TPOT p90, ms"]
    rows = []
    for each in passes:
        result = simulated(calibration, each)
        times = [answer.ttft_s * 1e3 for answer in each.answers]
        tpots = [answer.tpot_s * 1e3 for answer in each.answers if answer.tpot_s is not None]
        pairs = [
            (each.tokens_per_s, result.tokens_per_s),
            *((percentile(times, q), result.ttft(q) * 1e3) for q in (50, 90)),
            *((percentile(tpots, q), result.tpot(q) * 1e3) for q in (50, 90)),
        ]
        cells = [f"{real:.4g} / {model:.4g} ({model / real - 1:+.0%})" for real, model in pairs]
        rows.append([name, str(each.concurrency), *cells])
    return table(header, rows)


def measure(
    names: Sequence[str],
    levels: Sequence[int],
    checked: Sequence[int],
    options: ServerOptions,
    count: int | None,
    step: Callable[[str], None] = lambda label: None,
) -> tuple[list[Calibration], str]:
    """Start an engine, calibrate it on every second item of each workload, and check it on the others.

    Returns the calibrations and the table of the check. The calibration's engine has the settings that matter here: the
    batch, and no prefix cache. Raises BadCalibration when a workload has fewer than two items.
    """
    settings = {"max_batch_size": options.max_batch_size, "prefix_cache": options.prefix_cache}
    found, tables = [], []
    with EngineServer(options) as server, asyncio.Runner() as runner:
        measured = Measured(server.address)
        for name in names:
            items = workload(name)[: None if count is None else 2 * count]
            if len(items) < 2:
                raise BadCalibration(f"count: {name} needs two items at least")
            ours, others = items[::2], items[1::2]
            runner.run(measured.run(ours[:2], 1))  # warm
            passes = []
            for level in levels:
                passes.append(runner.run(measured.run(ours, level)))
                step(f"{name}, {level} at a time")
            engine = (
                f"{options.model}, K={options.num_draft_tokens}, {options.num_threads} threads, {os.cpu_count()} cores"
            )
            calibration = calibration_of(passes, name, engine, settings)
            found.append(calibration)
            again = []
            for level in checked:
                again.append(runner.run(measured.run(others, level)))
                step(f"{name}, {level} at a time, to compare")
            if again:
                tables.append(validation_table(name, calibration, again))
    return found, "\n\n".join(tables)
