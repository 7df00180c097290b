"""`python -m benchmarks soak`: does a server stay as it was under random traffic and faults?

Invariant: the server is looked at twice at rest, after every kind of request was sent and at the end; what it holds
then is compared, so load explains no difference.
Not responsible for: the requests (see traffic.py), what is looked at (see footprint.py).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc

from benchmarks.faults.attacks import Target
from benchmarks.faults.footprint import MIB, Sample, processes
from benchmarks.faults.traffic import ADAPTER, KINDS, OK, TIMEOUT_S, Traffic
from benchmarks.harness.client import make_call
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, real, whole
from benchmarks.harness.measure import percentile
from benchmarks.harness.server import EngineServer, free_port
from benchmarks.harness.tables import Progress, number, table
from benchmarks.harness.workloads import workload
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

ADAPTERS = Path(__file__).resolve().parents[2] / "examples/executor/adapters"
CANARY = "canary"
CALM_SHARE = 1 / 3
"""Of the time, at its end: no faults, so that the last grammar process grows old enough to show a leak."""
FULL_SHARE = 0.9
"""Of the KV cache's pages."""
KV_CACHE_TOKENS = 16384
MORE_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""The largest pool of a process, asyncio's, which starts its threads as it needs them."""
REST_S = 60.0
"""Longest wait until a server without requests holds none."""
ROLES = ("engine", "grammar", "gateway")
"""The processes that are looked at; those that compile come and go."""
MAX_SLOWER = 1.5
"""Default bound of the canary's median latency, the last third over the first."""

EXAMPLES = """
what it does:
  Clients send random requests of every kind: guided in each notation, free, beams, several sequences, adapters, log
  probabilities, long prompts, HTTP, compilations, hostile grammars, invalid ones, and clients that leave, abort or
  set deadlines. In the first two thirds of the time the grammar process gets SIGKILL, or SIGSTOP for a second, now
  and then. A canary, always the same greedy request, must have the same tokens every time.

reading the table:
  at rest, first   after a few requests of every kind, with a full KV cache
  at rest, last    after all of them
  lowest memory    in the second sixth of the time, and in the last one: buffers of large steps come and go. Of the
                   grammar process from three quarters of the time to five sixths, when it has filled its caches since
                   the last fault, and in the last sixth
  verdict          what grew beyond its bound; the exit status is 1 then, or after a status that a kind of request may
                   not have, or a canary with other tokens

examples:
  python -m benchmarks soak --minutes 30 --plot soak.png
  python -m benchmarks soak --minutes 2 --clients 4 --seed 7
"""


@dataclass(slots=True)
class Seen:
    """What the run has seen so far."""

    outcomes: dict[str, collections.Counter[str]] = field(default_factory=dict)
    """Kind -> status -> how often."""
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    samples: list[Sample] = field(default_factory=list)
    canaries: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the start, latency in milliseconds."""
    wrong_canaries: int = 0

    def count(self, kind: str, status: str) -> None:
        """Note how a request of `kind` ended."""
        self.outcomes.setdefault(kind, collections.Counter())[status] += 1

    def lowest_memory(self, role: str) -> tuple[float, float]:
        """Return the least memory of the process of `role` early and late, in MiB; NaN where no sample has it."""
        begin, end = self.samples[0].seconds, self.samples[-1].seconds
        early = (3 / 4, 5 / 6) if role == "grammar" else (1 / 6, 2 / 6)

        def least(shares: tuple[float, float]) -> float:
            first, last = (begin + (end - begin) * share for share in shares)
            found = [each.of(role) for each in self.samples if first <= each.seconds <= last]
            return min((process.memory_mib for process in found if process), default=float("nan"))

        return least(early), least((5 / 6, 1))

    def unexpected(self) -> list[str]:
        """Return a line for each status that its kind may not have."""
        return [
            f"{kind}: {times} {status}"
            for kind, counts in self.outcomes.items()
            for status, times in counts.items()
            if status not in (OK if kind == CANARY else KINDS[kind].allowed)
        ]


class Soak:
    """One run against one server. Make it and use it in one event loop.

    Args:
        server: runs, with an HTTP gateway at `http_address` and `adapter_dirs` that hold `ADAPTER`.
        args: the command line.
    """

    def __init__(self, server: EngineServer, http_address: str, args: argparse.Namespace) -> None:
        assert server.pid is not None
        self._pid, self._http, self._args = server.pid, http_address, args
        self._channel = grpc.aio.insecure_channel(server.address)
        self._stub = engine_pb2_grpc.EngineStub(self._channel)
        self._target = Target(server.address, server.pid)
        self._started_s = time.monotonic()
        self._tokens: tuple[int, ...] | None = None
        self.seen = Seen()

    async def run(self, seconds: float) -> tuple[Sample, Sample]:
        """Send one request of every kind, rest, soak for `seconds`, rest; return what was held at both rests."""
        await self._stub.LoadAdapter(pb.LoadAdapterRequest(name=ADAPTER, path=str(ADAPTERS / ADAPTER)))
        model = (await self._stub.GetModelInfo(pb.GetModelInfoRequest())).served_names[0]
        traffic = [Traffic(self._stub, self._http, model, self._args.seed + lane) for lane in range(self._args.clients)]
        for _ in range(self._args.warm_rounds):
            for kind in KINDS:
                self.seen.count(kind, await traffic[0].send(kind))
        await self._fill(traffic[0])
        first = await self.rest()
        ends_s = time.monotonic() + seconds
        calm_s = ends_s - seconds * CALM_SHARE
        jobs: list[Coroutine[None, None, None]] = [
            *(self._client(each, ends_s) for each in traffic),
            self._canary(ends_s),
            self._faults(calm_s),
            self._watch(ends_s, seconds),
        ]
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
        return first, await self.rest(first)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(None)

    async def rest(self, before: Sample | None = None) -> Sample:
        """Wait until no request is held, for at most `REST_S`, and return what is held then.

        Connections end a moment after their requests, so it also waits for descriptors that an earlier rest, `before`,
        did not have.
        """
        ends_s = time.monotonic() + REST_S
        sample = await self._sample()
        while time.monotonic() < ends_s and not (_idle(sample) and not _has_more_descriptors(sample, before)):
            await asyncio.sleep(0.5)
            sample = await self._sample()
        return sample

    async def _fill(self, traffic: Traffic) -> None:
        # A page of the KV cache is memory of the process from its first use on, so all are used before the first rest.
        stats = (await self._sample()).stats
        for _ in range(stats.num_pages):
            if stats.pages_cached > FULL_SHARE * stats.num_pages:
                return
            self.seen.count("long", await traffic.send("long"))
            stats = (await self._sample()).stats

    async def _sample(self) -> Sample:
        stats = await self._stub.GetStats(pb.GetStatsRequest(), timeout=30)
        sample = Sample(time.monotonic() - self._started_s, tuple(processes(self._pid)), stats)
        self.seen.samples.append(sample)
        return sample

    async def _client(self, traffic: Traffic, ends_s: float) -> None:
        while time.monotonic() < ends_s:
            self.seen.count(*await traffic.one())

    async def _canary(self, ends_s: float) -> None:
        item = workload("schema", max_tokens=32)[0]
        sampling = pb.SamplingParams(max_tokens=32, temperature=0.0, seed=1)
        request = make_call("canary", item.messages, schema=item.schema, sampling=sampling).request
        while time.monotonic() < ends_s:
            started_s = time.monotonic()
            tokens: list[int] = []
            try:
                async for response in self._stub.Generate(request, timeout=TIMEOUT_S):
                    tokens += response.token_ids
            except grpc.aio.AioRpcError as error:
                self.seen.count(CANARY, error.code().name)
                continue
            self.seen.count(CANARY, "OK")
            self.seen.canaries.append((time.monotonic() - self._started_s, 1e3 * (time.monotonic() - started_s)))
            if self._tokens is None:
                self._tokens = tuple(tokens)
            self.seen.wrong_canaries += self._tokens != tuple(tokens)
            await asyncio.sleep(1.0)

    async def _faults(self, ends_s: float) -> None:
        draw = random.Random(self._args.seed)
        while True:
            pause_s = draw.expovariate(1 / self._args.fault_every)
            if time.monotonic() + pause_s > ends_s:
                return
            await asyncio.sleep(pause_s)
            await self._grammar_ready()
            pid = self._target.sidecar_pid()
            if pid is None:
                self.seen.faults["no process to hit"] += 1
                continue
            with contextlib.suppress(ProcessLookupError):
                if draw.random() < 0.7:
                    os.kill(pid, signal.SIGKILL)
                    self.seen.faults["SIGKILL"] += 1
                else:
                    os.kill(pid, signal.SIGSTOP)
                    self.seen.faults["SIGSTOP for a second"] += 1
                    await asyncio.sleep(1.0)
                    os.kill(pid, signal.SIGCONT)

    async def _grammar_ready(self) -> None:
        # A server under faults that come faster than a process starts refuses guided requests, as it says it does.
        sample = await self._sample()
        while not sample.stats.grammar_ready:
            await asyncio.sleep(0.5)
            sample = await self._sample()

    async def _watch(self, ends_s: float, seconds: float) -> None:
        progress = Progress(max(1, int(seconds)))
        try:
            while (left_s := ends_s - time.monotonic()) > 0:
                await asyncio.sleep(min(self._args.sample_every, left_s))
                await self._sample()
                done = sum(map(collections.Counter.total, self.seen.outcomes.values()))
                passed = int(min(seconds, seconds - (ends_s - time.monotonic())))
                progress.step(
                    f"s: {done} requests, {self.seen.faults.total()} faults", by=max(0, passed - progress.done)
                )
        finally:
            progress.close()


def _has_more_descriptors(sample: Sample, before: Sample | None) -> bool:
    pairs = ((sample.of(role), before.of(role)) for role in ROLES) if before else ()
    return any(now and then and now.descriptors > then.descriptors for now, then in pairs)


def _idle(sample: Sample) -> bool:
    stats = sample.stats
    busy = stats.running or stats.waiting or stats.pages_used or stats.matchers
    return not busy and stats.grammar_ready


def slower(canaries: Sequence[tuple[float, float]]) -> float:
    """Return the canary's median latency in the last third over that in the first; NaN for fewer than three."""
    third = len(canaries) // 3
    if not third:
        return float("nan")
    before, after = canaries[:third], canaries[-third:]
    return statistics.median(ms for _, ms in after) / statistics.median(ms for _, ms in before)


def verdict(first: Sample, last: Sample, seen: Seen, most_mib: float, most_slower: float = MAX_SLOWER) -> list[str]:
    """Return a line for each thing that is not as it was; none for a server that stays flat.

    Args:
        first: at rest, before.
        last: at rest, after.
        seen: what happened between them.
        most_mib: what each process may grow by.
        most_slower: what `slower` may be; infinity where other work on the machine sets the latency.
    """
    lines = seen.unexpected()
    if seen.wrong_canaries:
        lines.append(f"canary: {seen.wrong_canaries} of {len(seen.canaries)} answers have other tokens")
    held = last.stats
    for name in ("running", "waiting", "pages_used", "matchers"):
        if getattr(held, name):
            lines.append(f"at rest, {getattr(held, name)} {name} are left")
    for role in ROLES:
        before, after = first.of(role), last.of(role)
        if before is None or after is None:
            lines.append(f"{role}: there is no process")
            continue
        early, late = seen.lowest_memory(role)
        if late - early > most_mib:
            lines.append(f"{role}: {early:.0f} MiB became {late:.0f}, more than {most_mib:.0f} above")
        for name, more in (("descriptors", 0), ("threads", MORE_THREADS)):
            if getattr(after, name) > getattr(before, name) + more:
                lines.append(f"{role}: {getattr(before, name)} {name} became {getattr(after, name)}")
    if slower(seen.canaries) > most_slower:
        lines.append(f"canary: {slower(seen.canaries):.2f} times as slow in the last third as in the first")
    return lines


def report(first: Sample, last: Sample, seen: Seen) -> str:
    """Return the tables: what was held at both rests, and how requests ended."""
    rows = []
    for role in ROLES:
        before, after = first.of(role), last.of(role)
        rows.append([f"{role}: lowest memory, MiB", *(number(mib, 0) for mib in seen.lowest_memory(role))])
        for name in ("descriptors", "threads"):
            values = [str(getattr(each, name)) if each else "-" for each in (before, after)]
            rows.append([f"{role}: {name}", *values])
    for name in ("running", "waiting", "pages_used", "pages_cached", "matchers", "cached_grammars", "grammar_starts"):
        rows.append([name, str(getattr(first.stats, name)), str(getattr(last.stats, name))])
    ends = [
        [kind, str(counts.total()), ", ".join(f"{times} {status}" for status, times in counts.most_common())]
        for kind, counts in sorted(seen.outcomes.items())
    ]
    latencies = [ms for _, ms in seen.canaries]
    canary = ", ".join(f"p{share} {number(percentile(latencies, share), 0)} ms" for share in (50, 99))
    faults = ", ".join(f"{times} {what}" for what, times in seen.faults.items())
    return "\n\n".join([
        table(("held", "at rest, first", "at rest, last"), rows),
        table(("kind", "requests", "ended with"), ends),
        f"canary: {len(latencies)} answers, {canary}, last third over first {number(slower(seen.canaries), 2)}; "
        f"faults: {faults or 'none'}",
    ])  # fmt: skip


def draw(seen: Seen, path: Path) -> None:
    """Write a PNG with memory, descriptors, threads, slots and the canary's latency over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(5, 1, figsize=(10, 11), sharex=True)
    for axis, name, label in zip(
        axes, ("memory_mib", "descriptors", "threads"), ("MiB", "descriptors", "threads"), strict=False
    ):
        for role in ROLES:
            points = [(each.seconds / 60, getattr(each.of(role), name)) for each in seen.samples if each.of(role)]
            axis.plot(*zip(*points, strict=True), label=role) if points else None
        axis.set_ylabel(label)
        axis.legend(fontsize=7)
    minutes = [each.seconds / 60 for each in seen.samples]
    for name in ("running", "waiting", "matchers"):
        axes[3].plot(minutes, [getattr(each.stats, name) for each in seen.samples], label=name, linewidth=0.8)
    axes[3].set_ylabel("requests, matchers")
    axes[3].legend(fontsize=7)
    axes[4].plot([at / 60 for at, _ in seen.canaries], [ms for _, ms in seen.canaries], ".", markersize=3)
    axes[4].set_yscale("log")
    axes[4].set_ylabel("canary, ms")
    axes[4].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--minutes", type=real(0), default=30.0, help="time under traffic (default 30)")
    add("--clients", type=whole(1), default=12, help="requests at a time (default 12)")
    add("--seed", type=int, default=1, help="of requests and faults (default 1)")
    add("--fault-every", type=real(0.01), default=20.0, metavar="SECONDS", help="mean time between faults (default 20)")
    add("--sample-every", type=real(0.01), default=2.0, metavar="SECONDS", help="time between two samples (default 2)")
    add("--warm-rounds", type=whole(1), default=3, help="requests of every kind before the first rest (default 3)")
    add(
        "--growth-mib", type=real(0, endless=True), default=48.0, metavar="MIB",
        help="what a process may grow by (default 48); inf where growth is not asked about",
    )  # fmt: skip
    add(
        "--max-slower", type=real(0, endless=True), default=MAX_SLOWER, metavar="RATIO",
        help=f"of the canary's latency, the last third over the first (default {MAX_SLOWER}); "
        "inf where other work runs on the machine",
    )  # fmt: skip
    add_engine_flags(parser, "model", "threads", "grammar-backend")
    add("--plot", type=Path, metavar="FILE.png")
    add("--json", type=Path, metavar="FILE.json", help="write what was held at every sample")
    return parser


def as_json(seen: Seen) -> list[dict[str, object]]:
    """Return the samples as plain data."""
    counts = ("running", "waiting", "pages_used", "pages_cached", "matchers", "cached_grammars")
    return [
        {
            "seconds": sample.seconds,
            "processes": [asdict(process) for process in sample.processes],
            **{name: getattr(sample.stats, name) for name in counts},
        }
        for sample in seen.samples
    ]


async def _soak(server: EngineServer, http_address: str, args: argparse.Namespace) -> tuple[Sample, Sample, Seen]:
    soak = Soak(server, http_address, args)
    try:
        return *await soak.run(60 * args.minutes), soak.seen
    finally:
        await soak.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print, and return 1 where something was left or went wrong. `arguments` None: the process's."""
    args = build_parser().parse_args(arguments)
    http_address = f"127.0.0.1:{free_port()}"
    options = engine_options(
        args,
        extra=(
            "--http", http_address, "--adapter-dir", str(ADAPTERS), "--kv-cache-tokens", str(KV_CACHE_TOKENS),
            # Full at the first rest as well.
            "--draft-index-bytes", str(MIB),
            # Where the cores are busy a process may take longer to start than a server waits by default.
            "--grammar-wait-s", "120",
        ),
    )  # fmt: skip
    with EngineServer(options) as server:
        first, last, seen = asyncio.run(_soak(server, http_address, args))
    print(report(first, last, seen))
    found = verdict(first, last, seen, args.growth_mib, args.max_slower)
    print("\nverdict: " + ("flat" if not found else "\n  ".join(["not flat:", *found])))
    if args.plot:
        draw(seen, args.plot)
    if args.json:
        args.json.write_text(json.dumps(as_json(seen), indent=1) + "\n")
    return int(bool(found))
