"""`python -m benchmarks isolation`: how do other requests' grammars and a dying sidecar change steady streams?

Invariant: every scenario is measured between two windows in which the same streams, with the same seeds, run alone;
ratios are taken against these two windows. A control loads the cores as its attack does, without the grammars.
Not responsible for: the streams (see harness/streams.py), the attacks (see attacks.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.faults.attacker import elsewhere
from benchmarks.faults.attacks import (
    BYSTANDER,
    TENANTS,
    Attack,
    Outcomes,
    Target,
    bearer,
    burners,
    compilers,
    kills,
    under,
)
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, real, some_of, whole
from benchmarks.harness.measure import percentile
from benchmarks.harness.server import EngineServer, ServerOptions
from benchmarks.harness.streams import Streams, Window, Windows
from benchmarks.harness.tables import Progress, number, table
from gpu_engine.api.engine_settings import EMBEDDED_MODEL
from gpu_engine.model.embedded import ensure_embedded
from grammar_service.compile.worker import NICENESS

ALONE = "alone"
GOAL = 1.2
WITHIN_PER_S = 0.25
"""An answer of 64 tokens and its prompt every eight seconds are less than 600 tokens a minute."""

EXAMPLES = """
what it does:
  Four streams run without a pause, two guided by a schema and two unguided, one request after the other. Gaps are
  the times between two responses of one answer, as the client sees them. Each between two windows of "alone":
    flood      distinct schemas arrive at a fixed rate and are compiled
    hostile    short requests with oneOf nested 16 deep, a 2 MB schema, a regex of many states, enums of 1000
    kills      the grammar process gets SIGKILL every two seconds
  and their controls:
    compilers  as many processes as compile grammars, equally nice, that compile the flood's schemas without a server
    burners    the same number, that only burn a core
    requests   the requests of "hostile" without their grammars

examples:
  python -m benchmarks isolation --seconds 30 --plot isolation.png --json isolation.json
  python -m benchmarks isolation --only flood,kills --seconds 10
  python -m benchmarks isolation --tenants --seconds 30

With --tenants the server has two tenants, whose one has the streams, and the scenarios are:
    tenant     the other one sends guided requests of the highest priority, and schemas, far above its limits
    within     the same as often as its limits let them through
The first compared with the second is what the flood changes, and the second what its limits allow.
"""


@dataclass(frozen=True, slots=True)
class Result:
    """A scenario and the windows around it."""

    name: str
    alone: Windows
    under: Windows
    outcomes: Outcomes


def tokenizer_of(model: str) -> Path:
    """Return the directory with the model's tokenizer.json."""
    return ensure_embedded() if model == EMBEDDED_MODEL else Path(model)


def scenarios(args: argparse.Namespace) -> dict[str, Attack]:
    """Return the attacks and controls in the order in which they run."""
    if args.tenants:
        return {"tenant": elsewhere("tenant", args.rate), "within": elsewhere("tenant", WITHIN_PER_S)}
    return {
        "flood": elsewhere("flood", args.rate),
        "compilers": compilers(args.burners, args.nice, tokenizer_of(args.model), args.grammar_backend),
        "burners": burners(args.burners, args.nice),
        "hostile": elsewhere("hostile", args.hostile_rate),
        "requests": elsewhere("requests", args.hostile_rate),
        "kills": kills(args.kill_every),
    }


async def measure(target: Target, attacks: dict[str, Attack], args: argparse.Namespace) -> list[Result]:
    """Run alone, attack, alone, attack, ..., alone."""
    streams = Streams(target.address, args.streams, args.max_tokens, bearer(BYSTANDER) if args.tenants else ())
    progress = Progress(2 * len(attacks) + 2)
    results = []
    try:
        await streams.watch(min(args.seconds, 5.0))
        progress.step("warm")
        before = await streams.watch(args.seconds)
        progress.step(ALONE)
        for name, attack in attacks.items():
            async with under(attack, target) as outcomes:
                seen = await streams.watch(args.seconds)
            progress.step(name)
            await asyncio.sleep(args.rest)
            after = await streams.watch(args.seconds)
            progress.step(ALONE)
            alone = {kind: Window() for kind in seen}
            for windows in (before, after):
                for kind, window in windows.items():
                    alone[kind].add(window)
            results.append(Result(name, alone, seen, outcomes))
            before = after
    finally:
        progress.close()
        await streams.close()
    return results


def ratio(result: Result, kind: str) -> float:
    """Return p99 of the gaps under the attack over p99 alone."""
    alone = percentile(result.alone[kind].gaps_ms, 99)
    return percentile(result.under[kind].gaps_ms, 99) / alone if alone else float("nan")


def changed(result: Result, kind: str) -> tuple[int, int]:
    """Return how many answers were finished both ways, and how many of these differ."""
    alone, seen = result.alone[kind].answers, result.under[kind].answers
    both = alone.keys() & seen.keys()
    return len(both), sum(alone[name] != seen[name] for name in both)


def late_rows(result: Result, kind: str) -> tuple[str, str]:
    """Return how often rows came too late, under the attack and in a window alone; unguided streams need none."""
    if kind != "guided":
        return "", ""
    # Alone are two windows.
    return str(result.under[kind].late_rows), number(result.alone[kind].late_rows / 2, 0)


def notes(result: Result) -> list[str]:
    """Return lines about a scenario: what was done, and what failed, the first of each kind in its own words."""
    lines = [f"{result.name}: " + ", ".join(f"{n} {what}" for what, n in result.outcomes.items())]
    for when, windows in ((result.name, result.under), (f"{result.name}, alone", result.alone)):
        for kind, window in windows.items():
            if window.failed:
                counts = ", ".join(f"{n} {status}" for status, n in window.failures.items())
                lines.append(f"{when}: {kind} streams failed: {counts}; first {window.first_failure}")
    return lines


def result_table(results: Sequence[Result]) -> str:
    """Return the table: a row a scenario and kind of stream."""
    header = (
        "scenario", "streams", "gap p50", "alone", "gap p99", "alone", "p99 ratio", "longest", "late rows", "alone",
        "differ", "invalid", "failed",
    )  # fmt: skip
    rows = []
    for result in results:
        for kind, window in result.under.items():
            alone = result.alone[kind].gaps_ms
            both, differ = changed(result, kind)
            rows.append([
                result.name,
                kind,
                number(percentile(window.gaps_ms, 50), 1, " ms"),
                number(percentile(alone, 50), 1, " ms"),
                number(percentile(window.gaps_ms, 99), 1, " ms"),
                number(percentile(alone, 99), 1, " ms"),
                number(ratio(result, kind), 2, "x"),
                number(max(window.gaps_ms, default=float("nan")), 0, " ms"),
                *late_rows(result, kind),
                f"{differ} of {both}",
                str(window.invalid),
                str(window.failed),
            ])  # fmt: skip
    return "\n".join([table(header, rows), *(line for result in results for line in notes(result))])


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    """Write a PNG: the share of gaps that are longer than so many milliseconds, alone and under each attack."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(results), 2, figsize=(11, 2.4 * len(results) + 1), squeeze=False, sharex=True)
    for row, result in zip(axes, results, strict=True):
        for axis, kind in zip(row, ("guided", "free"), strict=True):
            for label, window in (("alone", result.alone[kind]), (result.name, result.under[kind])):
                gaps = sorted(window.gaps_ms)
                axis.plot(gaps, [1 - i / len(gaps) for i in range(len(gaps))], label=label)
            axis.axhline(0.01, color="#b0b0b0", linewidth=0.8)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_title(f"{result.name}: {kind} streams, p99 {ratio(result, kind):.2f}x", fontsize=9)
            axis.legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("gap between two responses, ms", fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def as_json(results: Sequence[Result]) -> list[dict[str, object]]:
    """Return what was measured as plain data."""
    return [
        {
            "scenario": result.name,
            "streams": kind,
            "gap_ms": {q: percentile(result.under[kind].gaps_ms, q) for q in (50, 90, 99, 99.9)},
            "alone_gap_ms": {q: percentile(result.alone[kind].gaps_ms, q) for q in (50, 90, 99, 99.9)},
            "p99_ratio": ratio(result, kind),
            "compared": changed(result, kind)[0],
            "differ": changed(result, kind)[1],
            "invalid": result.under[kind].invalid,
            "answers": len(result.under[kind].answers),
            "failed": result.under[kind].failed,
            "failures": dict(result.under[kind].failures),
            "first_failure": result.under[kind].first_failure,
            "late_rows": result.under[kind].late_rows,
            "alone_late_rows": result.alone[kind].late_rows / 2,
            "outcomes": dict(result.outcomes),
        }
        for result in results
        for kind in result.under
    ]


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    cores = len(os.sched_getaffinity(0))
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add_engine_flags(parser, "model", "dtype", "device", "grammar-backend")
    spare = max(1, cores - 1)
    add(
        "--threads",
        type=whole(1),
        default=spare,
        help=f"threads of the model (default {spare}: one core remains for the rest)",
    )
    add("--tenants", action="store_true", help="a flooding tenant in place of the other scenarios")
    add("--only", default="", metavar="NAME,...", help="scenarios to run (default all)")
    add("--seconds", type=real(0), default=20.0, help="length of a window (default 20)")
    add("--rest", type=real(0), default=3.0, help="pause after an attack, in which its queues drain (default 3)")
    add("--streams", type=whole(1), default=2, help="steady streams of each kind (default 2)")
    add("--max-tokens", type=whole(1), default=96, help="tokens of an answer (default 96)")
    add("--rate", type=real(0.01), default=100.0, help="flood: schemas a second (default 100)")
    add("--hostile-rate", type=real(0.01), default=4.0, help="hostile: requests a second (default 4)")
    add("--kill-every", type=real(0.01), default=2.0, help="kills: seconds between two (default 2)")
    add("--burners", type=whole(1), default=spare, help=f"burners: processes (default {spare}, as many as compile)")
    add("--nice", type=int, default=NICENESS, help=f"burners: their niceness (default {NICENESS}, the workers')")
    add("--server-flag", action="append", default=[], metavar="FLAG", help="a further flag of the server; repeatable")
    add("--plot", type=Path, metavar="FILE.png")
    add("--json", type=Path, metavar="FILE.json")
    return parser


def _with_tenants(options: ServerOptions, folder: str, args: argparse.Namespace) -> ServerOptions:
    """Return the options with a file of tenants, which is written into `folder`, where tenants are measured."""
    if not args.tenants:
        return options
    path = Path(folder) / "tenants.toml"
    path.write_text(TENANTS)
    return replace(options, extra=(*options.extra, "--tenant-file", str(path)))


def main() -> int:
    """Measure, print, and return 1 when an answer was invalid, differed or failed; figures decide nothing."""
    parser = build_parser()
    args = parser.parse_args()
    attacks = scenarios(args)
    try:
        names = some_of(attacks)(args.only)
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument --only: {error}")
    attacks = {name: attack for name, attack in attacks.items() if name in names}
    options = engine_options(
        args,
        prefix_cache=False,
        extra=("--stream-pace-ms", "0", *args.server_flag),
        internal={"grammar_max_failures": 0},
    )
    with tempfile.TemporaryDirectory() as folder, EngineServer(_with_tenants(options, folder, args)) as server:
        results = asyncio.run(measure(Target(server.address, server.pid), attacks, args))
    title = f"{args.model} {args.dtype}, {2 * args.streams} streams, {args.threads} threads, {args.grammar_backend}"
    print(f"{title}, windows of {args.seconds:g} s; goal: p99 within {GOAL}x\n\n{result_table(results)}")
    if args.plot:
        draw(results, title, args.plot)
    if args.json:
        args.json.write_text(json.dumps(as_json(results), indent=1) + "\n")
    return int(any(w.invalid or w.failed or changed(r, k)[1] for r in results for k, w in r.under.items()))
