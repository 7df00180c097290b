"""Sections of `bench_gpu` over the real server: the cost of a grammar per step, and the distance from the memory floor.

A figure is the time of a step while a fixed number of endless answers runs: the server's counters are read twice, and
the wall time between the readings is divided by the steps between them. Guided and unguided windows alternate.
Invariant: every answer runs at both readings, or there is no figure.
Not responsible for: starting sections (see bench_gpu.py).
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.harness.server import EngineServer, ServerOptions
from benchmarks.harness.tables import number
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

_PEOPLE = 16
_PERSON: dict[str, dict[str, object]] = {
    "name": {"type": "string", "maxLength": 60},
    "age": {"type": "integer"},
    "ok": {"type": "boolean"},
}
SCHEMA = {
    "type": "object",
    "properties": {f"{key}_{number}": value for number in range(_PEOPLE) for key, value in _PERSON.items()},
    "required": [f"{key}_{number}" for number in range(_PEOPLE) for key in _PERSON],
    "additionalProperties": False,
}
"""No answer within a window ends by itself, and the shortest one is far from the token budget: near it, each row is
narrowed to tokens from which the answer still ends in time, which is another measurement (see quality/closing.py)."""
_LEAST_STEPS, _MOST_STEPS = 10, 200
"""A window ends at the latter: the answers end as well, at some 1900 tokens."""
_CALM_STEPS = 4
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Step:
    """One measured window."""

    ms: float
    tokens: float
    """Emitted by one sequence in one step."""
    deferred: int


class FactsServer(EngineServer):
    """An engine of benchmarks.gpu.server. `facts` is the JSON that it writes before it is healthy."""

    def __enter__(self) -> FactsServer:
        super().__enter__()
        return self

    def __init__(self, options: ServerOptions, ready_timeout_s: float = 180.0) -> None:
        super().__init__(options, ready_timeout_s)
        with tempfile.NamedTemporaryFile(prefix="lockstep-facts-", suffix=".json", delete=False) as file:
            self._facts = Path(file.name)
        argv = options.argv(self.address)
        self.argv = [sys.executable, "-m", "benchmarks.gpu.server", str(self._facts), *argv[argv.index("serve") + 1 :]]

    @property
    def facts(self) -> dict[str, Any]:
        """Bytes and nodes; see gpu_server.facts_of."""
        facts: dict[str, Any] = json.loads(self._facts.read_text())
        return facts

    def stop(self) -> None:
        """End the process and remove its facts."""
        super().stop()
        self._facts.unlink(missing_ok=True)


def request(seed: int, guided: bool, max_tokens: int) -> pb.GenerateRequest:
    """Return an answer that does not end within a window."""
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=seed, ignore_eos=not guided)
    asked = pb.GenerateRequest(text=f"Number {seed}. A list of people, as JSON: ", sampling=sampling)
    if guided:
        asked.grammar.json_schema = json.dumps(SCHEMA)
    return asked


@asynccontextmanager
async def load(stub: Any, count: int, guided: bool, max_tokens: int) -> AsyncIterator[Callable[[], None]]:
    """Keep `count` answers running for the time of the block. Yields a check that raises what one of them raised."""

    async def one(seed: int) -> None:
        async for _ in stub.Generate(request(seed, guided, max_tokens)):
            pass

    tasks = [asyncio.create_task(one(seed)) for seed in range(count)]

    def check() -> None:
        for task in tasks:
            if task.done():
                task.result()

    try:
        yield check
        check()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await _until(stub, lambda stats: stats.running + stats.waiting == 0)


async def _until(
    stub: Any, reached: Callable[[pb.GetStatsResponse], bool], check: Callable[[], None] = lambda: None
) -> pb.GetStatsResponse:
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        stats: pb.GetStatsResponse = await stub.GetStats(pb.GetStatsRequest(), timeout=30)
        check()
        if reached(stats):
            return stats
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the server does not come there within {_PATIENCE_S:g} s: {stats}")
        await asyncio.sleep(0.01)


async def window(stub: Any, count: int, guided: bool, *, seconds: float, max_tokens: int) -> Step:
    """Measure the step of `count` answers for about `seconds`."""
    async with load(stub, count, guided, max_tokens) as check:
        # All sequences have a slot, are prefilled, and have run their first steps.
        base = (await stub.GetStats(pb.GetStatsRequest(), timeout=30)).generated_tokens
        await _until(stub, lambda s: s.running == count and s.generated_tokens >= base + 3 * count, check)
        first = await stub.GetStats(pb.GetStatsRequest(), timeout=30)
        while True:
            # Several steps without a prefill: a look may be shorter than a step.
            begun = first
            first = await _until(stub, lambda s, begun=begun: s.steps >= begun.steps + _CALM_STEPS, check)  # type: ignore[misc]
            start_s = time.perf_counter()
            if first.prefill_tokens == begun.prefill_tokens:
                break
        while True:
            await asyncio.sleep(0.02)
            last = await stub.GetStats(pb.GetStatsRequest(), timeout=30)
            took_s = time.perf_counter() - start_s
            count_of_steps = last.steps - first.steps
            if took_s >= (seconds if count_of_steps >= _LEAST_STEPS else _PATIENCE_S) or count_of_steps >= _MOST_STEPS:
                break
    steps = last.steps - first.steps
    if first.running != count or last.running != count or not steps:
        raise RuntimeError(f"{last.running} of {count} answers ran to the end of the window; {steps} steps")
    tokens = (last.generated_tokens - first.generated_tokens) / steps / count
    return Step(took_s * 1e3 / steps, tokens, last.deferred_rows - first.deferred_rows)


async def measure(
    address: str, batches: tuple[int, ...], *, rounds: int, seconds: float, max_tokens: int
) -> dict[int, dict[str, list[Step]]]:
    """Return the windows of every batch size: "free" and "guided", alternating."""
    out: dict[int, dict[str, list[Step]]] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = engine_pb2_grpc.EngineStub(channel)
        await window(stub, 1, True, seconds=0.1, max_tokens=max_tokens)
        for count in batches:
            found: dict[str, list[Step]] = {"free": [], "guided": []}
            # A large batch takes long to fill, and its step is long enough to be measured once.
            for _ in range(rounds if count <= 32 else 1):
                for kind, steps in found.items():
                    one = await window(stub, count, kind == "guided", seconds=seconds, max_tokens=max_tokens)
                    steps.append(one)
            out[count] = found
            free, guided = (statistics.median(step.ms for step in found[kind]) for kind in ("free", "guided"))
            print(f"batch {count}: {free:.3f} ms free, {guided:.3f} ms guided", file=sys.stderr, flush=True)
    return out


def rows_of(label: str, measured: dict[int, dict[str, list[Step]]]) -> list[list[str]]:
    """Return table rows: label, batch, free and guided ms, their ratio, tokens a step, deferred rows."""
    rows = []
    for count, found in measured.items():
        free, guided = (statistics.median(step.ms for step in found[kind]) for kind in ("free", "guided"))
        tokens = [number(statistics.median(step.tokens for step in found[kind]), 2) for kind in ("free", "guided")]
        deferred = str(sum(step.deferred for step in found["guided"]))
        rows.append(
            [label, str(count), number(free, 3), number(guided, 3), number(guided / free, 3), *tokens, deferred]
        )
    return rows


HEADER = ["K", "batch", "free ms", "guided ms", "ratio", "tokens free", "tokens guided", "rows late"]


def floor_ms(facts: dict[str, Any], context: int, bytes_per_s: float) -> float:
    """Return the least time of a step of one sequence: its bytes of weights, keys and values at that bandwidth."""
    moved = facts["streamed_bytes"] + context * facts["token_bytes"]
    return float(moved) / bytes_per_s * 1e3 if bytes_per_s else math.nan


def copy_bandwidth(device: str, num_bytes: int) -> float:
    """Return the bytes a second, read and written, of a plain copy on the device; median of 20. Frees its memory."""
    import torch

    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    source.fill_(1)
    for _ in range(23):
        if device == "cpu":
            start_s = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - start_s)
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    del source, target
    if device != "cpu":
        torch.cuda.empty_cache()
    return 2 * num_bytes / statistics.median(times[3:])
