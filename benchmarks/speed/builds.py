"""`python -m benchmarks builds`: tokens per second of two builds (two checkouts), in turn in one run.

Invariant: both builds answer the same prompts with the same options, each from a server process that was started from
its own checkout. They answer in turns of one batch each, and the build that comes first alternates, so that a machine
that is slow for a while is slow for both. Only figures of the same turn are divided.
Not responsible for: the equality of token ids between builds with drafts and in batches (see quality/token_ids.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.harness.client import Call, EngineClient, make_call
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, list_of, one_of, real, whole
from benchmarks.harness.measure import Run, percentile
from benchmarks.harness.server import ServerOptions, start_engine
from benchmarks.harness.tables import Progress, number, table
from benchmarks.harness.workloads import ALL_WORKLOADS, WORKLOADS, Item, workload
from protos.engine.v1 import engine_pb2 as pb

EXAMPLES = """
examples:
  python -m benchmarks builds --old ../lockstep-0.2.0                     three rounds at 1 and at 8
  python -m benchmarks builds --old DIR --rounds 1 --count 2 --max-tokens 16          does it run at all?
  python -m benchmarks builds --old DIR --old-flags='--forced-draft-tokens 15' --new-flags='--jump-forward-tokens 15'
  python -m benchmarks builds --old DIR --at-least 0.98                   exit 1 where a median ratio is below 0.98

Build the native libraries of each checkout first: python setup.py build_ext --inplace

reading the table:
  tok/s   generated tokens / wall time, the median of the turns
  ratio   tok/s of the new build / tok/s of the old build in the same turn, a batch of as many prompts as run at a time
  equal   answers with the same token ids in both builds (builds older than 0.4 have other ids in a batch where a CPU
          with AMX multiplies bfloat16)
"""

ALL = "all"
"""Name of the row that sums up every workload."""

Cell = tuple[str, int]
"""(workload, concurrency)."""


@dataclass(frozen=True, slots=True)
class Build:
    """One build and how its server is started."""

    name: str
    """"old" or "new"."""
    checkout: Path
    options: ServerOptions


@dataclass(slots=True)
class Comparison:
    """The runs of both builds over one cell, one pair for each turn."""

    pairs: list[tuple[Run, Run]] = field(default_factory=list)
    """(old, new)."""

    def ratios(self) -> list[float]:
        """Tokens per second of the new build over the old one, a value for each turn."""
        return [tokens_per_s(new) / tokens_per_s(old) for old, new in self.pairs]

    def tpot_ratios(self) -> list[float]:
        """Time per token after the first of the old build over the new one, medians of each turn's answers."""
        times = [(tpot_ms(old), tpot_ms(new)) for old, new in self.pairs]
        return [old / new if new > 0 else math.nan for old, new in times]

    def equal(self) -> tuple[int, int]:
        """(answers with equal token ids, answers)."""
        same = [
            left.token_ids == right.token_ids
            for old, new in self.pairs
            for left, right in zip(old.answers, new.answers, strict=True)
        ]
        return sum(same), len(same)


Results = dict[Cell, Comparison]
Start = Callable[[Build], AbstractContextManager[str]]
"""Starts the server of a build; yields its address."""


def tokens_per_s(run: Run) -> float:
    """Generated tokens per second of wall time."""
    return sum(len(answer.token_ids) for answer in run.answers) / run.wall_s


def tpot_ms(run: Run) -> float:
    """Time per token after the first in ms, the median of the answers; NaN if none has a second token."""
    return percentile((answer.tpot_ms for answer in run.answers), 50)


def start_server(build: Build) -> AbstractContextManager[str]:
    """Run the server of a build from its checkout; yield its address."""
    return start_engine(build.options, build.checkout)


def greedy_calls(items: Sequence[Item]) -> list[Call]:
    """Return one greedy call for each item."""
    sampling = [pb.SamplingParams(max_tokens=item.max_tokens, temperature=0.0) for item in items]
    return [
        make_call(item.name, item.messages, schema=item.schema, sampling=params)
        for item, params in zip(items, sampling, strict=True)
    ]


async def run_pairs(
    addresses: tuple[str, str], results: Results, items: Mapping[str, Sequence[Item]], step: Callable[[], None]
) -> None:
    """Warm both servers up, then add their turns over every cell; `step` is called for each measured answer."""
    clients = [EngineClient(address) for address in addresses]
    try:
        for name, level in results:
            short = [replace(item, max_tokens=min(item.max_tokens, 16)) for item in items[name][:level]]
            for client in clients:
                await client.run(greedy_calls(short), level)
        for (name, level), comparison in results.items():
            for batch in batched(greedy_calls(items[name]), level):
                order = clients if len(comparison.pairs) % 2 == 0 else clients[::-1]
                runs = {client: await client.run(list(batch), level, step) for client in order}
                comparison.pairs.append((runs[clients[0]], runs[clients[1]]))
    finally:
        for client in clients:
            await client.close()


def batched(calls: Sequence[Call], size: int) -> Iterator[Sequence[Call]]:
    """Yield the calls in batches of `size`; the last one may be smaller."""
    return (calls[at : at + size] for at in range(0, len(calls), size))


def compare_builds(
    builds: tuple[Build, Build],
    items: Mapping[str, Sequence[Item]],
    levels: Sequence[int],
    rounds: int,
    start: Start = start_server,
) -> Results:
    """Run `rounds` rounds of (old, new), each with servers of its own; the build that starts first alternates.

    Raises:
        ServerFailed: a server did not become healthy.
        CallRefused: a build refused a request.

    """
    progress = Progress(2 * rounds * len(levels) * sum(len(these) for these in items.values()))
    results: Results = {(name, level): Comparison() for name in items for level in levels}
    for turn in range(rounds):
        with ExitStack() as servers:
            order = builds if turn % 2 == 0 else builds[::-1]
            started = {build.name: servers.enter_context(start(build)) for build in order}
            addresses = started[builds[0].name], started[builds[1].name]
            asyncio.run(run_pairs(addresses, results, items, partial(progress.step, f"round {turn + 1}")))
    progress.close()
    return results


def with_totals(results: Results) -> Results:
    """Return `results` with one more cell for each concurrency: the turns of every workload together."""
    totals: Results = {}
    for level in dict.fromkeys(level for _, level in results):
        cells = [comparison.pairs for (_, each), comparison in results.items() if each == level]
        if len(cells) > 1:
            totals[ALL, level] = Comparison([*chain.from_iterable(cells)])
    return {**results, **totals}


def result_table(results: Results) -> str:
    """Return the table: a row for each workload and concurrency."""
    header = ("workload", "c", "old tok/s", "new tok/s", "ratio min", "median", "max", "equal")
    rows = []
    for (name, level), comparison in results.items():
        ratios = comparison.ratios()
        equal, total = comparison.equal()
        rows.append([
            name,
            str(level),
            number(statistics.median(tokens_per_s(old) for old, _ in comparison.pairs)),
            number(statistics.median(tokens_per_s(new) for _, new in comparison.pairs)),
            number(min(ratios), 3),
            number(statistics.median(ratios), 3),
            number(max(ratios), 3),
            f"{equal} of {total}",
        ])  # fmt: skip
    return table(header, rows)


def as_json(results: Results) -> list[dict[str, object]]:
    """Return the figures of every turn as plain data."""
    return [
        {
            "workload": name,
            "concurrency": level,
            "old_tokens_per_s": [tokens_per_s(old) for old, _ in comparison.pairs],
            "new_tokens_per_s": [tokens_per_s(new) for _, new in comparison.pairs],
            "ratios": comparison.ratios(),
            "equal": comparison.equal(),
        }
        for (name, level), comparison in results.items()
    ]


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, "unknown commit" outside git; "+" marks uncommitted changes."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown commit"
    return done.stdout.strip() if done.returncode == 0 else "unknown commit"


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--old", type=Path, required=True, metavar="DIR", help="checkout of the old build")
    add("--new", type=Path, default=Path.cwd(), metavar="DIR", help="checkout of the new build (default: this folder)")
    add("--rounds", type=whole(1), default=3, help="rounds; each starts both servers anew (default 3)")
    add("--concurrency", type=list_of(whole(1)), default="1,8", help="comma-separated (default 1,8)")
    add(
        "--workloads",
        type=list_of(one_of(ALL_WORKLOADS)),
        default=",".join(WORKLOADS),
        help=f"comma-separated, of {', '.join(ALL_WORKLOADS)}",
    )
    add("--count", type=whole(1), help="only the first COUNT prompts of every workload")
    add("--max-tokens", type=whole(1), help="lower the token budget of every prompt")
    add_engine_flags(parser, "model", "device", "threads", "k", "grammar-backend")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--old-flags", default="", metavar="FLAGS", help="further flags for the old server, as one string")
    add("--new-flags", default="", metavar="FLAGS", help="further flags for the new server, as one string")
    add("--at-least", type=real(0), metavar="RATIO", help="exit 1 where the median ratio over all workloads is lower")
    add("--json", type=Path, metavar="FILE", help="write the figures of every turn as JSON")
    return parser


def make_builds(args: argparse.Namespace) -> tuple[Build, Build]:
    """Return the old and the new build.

    Raises:
        ValueError: a folder is not a checkout of the engine.

    """
    builds = []
    for name, checkout, flags in (("old", args.old, args.old_flags), ("new", args.new, args.new_flags)):
        if not (checkout / "gpu_engine" / "__main__.py").is_file():
            raise ValueError(f"--{name}: {checkout} is not a checkout of the engine")
        options = engine_options(
            args, max_batch_size=max(16, *args.concurrency), prefix_cache=False, extra=tuple(shlex.split(flags))
        )
        builds.append(Build(name, checkout.resolve(), options))
    return builds[0], builds[1]


def too_slow(results: Results, at_least: float) -> list[str]:
    """Return a line for each concurrency whose median ratio over all workloads is below `at_least`."""
    single = len({name for name, _ in results}) == 1
    medians = {
        level: statistics.median(comparison.ratios())
        for (name, level), comparison in results.items()
        if single or name == ALL
    }
    return [
        f"at concurrency {level} the median ratio is {ratio:.3f}, below {at_least}"
        for level, ratio in medians.items()
        if ratio < at_least
    ]


def main(argv: Sequence[str] | None = None, start: Start = start_server) -> int:
    """Run the comparison; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        builds = make_builds(args)
    except ValueError as error:
        parser.error(str(error))
    items = {name: workload(name, args.count, args.max_tokens) for name in args.workloads}
    for build in builds:
        print(f"{build.name}: {build.checkout} at {commit_of(build.checkout)}")
    print(f"{args.model}, {args.dtype} on {args.device}, {args.threads} threads, K={args.k}, greedy")
    print(f"{args.rounds} rounds; prompts: " + ", ".join(f"{name} {len(these)}" for name, these in items.items()))
    results = with_totals(compare_builds(builds, items, args.concurrency, args.rounds, start))
    print(f"\n{result_table(results)}")
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(results), indent=1) + "\n")
    slow = too_slow(results, args.at_least) if args.at_least is not None else []
    for line in slow:
        print(f"too slow: {line}")
    return 1 if slow else 0
