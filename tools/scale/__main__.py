"""`python -m tools.scale COMMAND`: memory, step time, calibration and simulation of engines and fleets.

Invariant: tables go to stdout, progress to stderr, and a wrong value ends with status 2 and a message that names it.
Not responsible for: any formula (see the modules that the commands call).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness.server import ServerFailed, ServerOptions
from benchmarks.harness.tables import Progress, number, share, table
from benchmarks.harness.workloads import WORKLOADS
from tools.scale import flags
from tools.scale.comparison import as_table, memory_figures, page, reported
from tools.scale.device import DEVICES
from tools.scale.fleet import Failure, Fleet, Result
from tools.scale.plan import Goals, Size, lose_engine, plan, run_size
from tools.scale.step_time import StepLoad, expected_tokens
from tools.scale.traces import write_trace

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- python -m tools.scale compare --write -->", "<!-- the end of what it writes -->"

EPILOG = """
examples:
  python -m tools.scale memory --model llama-70b --tp 4 --device h100 --max-batch 64 --max-model-len 8192
  python -m tools.scale step --model llama-8b --device h200 --lanes 1 8 32 128 --drafts 3 --acceptance 0.6
  python -m tools.scale compare                       the formulas against every measured figure
  python -m tools.scale compare --measure             its memory formulas against engines that it starts, half a minute
  python -m tools.scale calibrate --out DIR           measure the embedded model here, a minute on two quiet cores
  python -m tools.scale simulate --calibration DIR/chat.json --engines 3 --rate 8 --kill-engine 60
  python -m tools.scale plan --calibration DIR/chat.json --engines 1-8 --rate 12 --ttft-ms 500 --itl-ms 80 --lose-engine

COMMAND --help lists the flags of one. docs/benchmarks.md says what the numbers are worth.
"""

Command = Callable[[argparse.Namespace], int]


def memory(args: argparse.Namespace) -> int:
    """Print the memory of one rank, part by part."""
    serving = flags.serving_of(args)
    rows = [[p.name, f"{p.num_bytes / 1e6:,.1f}", p.where, "estimate" if p.estimate else ""] for p in serving.parts()]
    rows.append(["device in all", f"{serving.device_bytes() / 1e6:,.1f}", "", ""])
    shape, room = serving.shape, DEVICES[args.device].memory
    print(
        f"{shape.name}: {shape.num_weights / 1e9:.2f} billion weights, {serving.form.description}; "
        f"one of {args.tp} ranks\n"
    )
    print(table(("part", "MB", "on", ""), rows))
    print(
        f"\nKV cache: {serving.kv_token_bytes:,} bytes a token, {serving.page_bytes:,} a page, "
        f"{serving.num_pages:,} pages; "
        f"{serving.tokens_within(0.9 * room):,} tokens fit into nine tenths of a {args.device} ({room / 1e9:.0f} GB)"
    )
    if graphs := serving.num_graphs():
        print(f"Graphs: at most {graphs} are captured; their memory was not measured, and is not counted")
    return 0


def step(args: argparse.Namespace) -> int:
    """Print the time of a step by the number of sequences."""
    cost = flags.roofline_of(args)
    header = ("lanes", "ms", "products", "head", "attention", "launches", "collectives", "grammar", "tok/step", "tok/s")
    rows = []
    for lanes in args.lanes:
        load = StepLoad(
            lanes=lanes,
            draft_rows=lanes * args.drafts,
            context_tokens=lanes * args.context,
            guided_lanes=lanes * args.guided_steps,
        )
        parts = cost.parts(load)
        times = (
            parts.total,
            parts.products,
            parts.head,
            parts.attention,
            parts.launches,
            parts.collectives,
            parts.grammar,
        )
        tokens = expected_tokens(args.acceptance, args.drafts)
        rows.append([
            str(lanes),
            *(number(seconds * 1e3, 3) for seconds in times),
            number(tokens, 2),
            number(cost.tokens_per_s(load, args.acceptance), 0),
        ])  # fmt: skip
    print(f"{cost.shape.name} on {args.tp} x {args.device}; weights are read in {cost.floor_s() * 1e3:.3f} ms\n")
    print(table(header, rows))
    print(f"\n{args.device}: {cost.device.source}")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Print or write the formulas against the measured figures."""
    if args.measure:
        memory = dict(reported())
        for form, use in memory.items():
            print(f"{form}: {use!r}")
        print(as_table([*memory_figures(memory)]))
        return 0
    text = page()
    if not args.write:
        print(text)
        return 0
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0


def calibrate(args: argparse.Namespace) -> int:
    """Measure an engine, write a calibration for each workload, and print how well the simulation agrees."""
    from tools.scale.calibrate import measure

    names = args.workloads.split(",")
    if unknown := set(names) - set(WORKLOADS):
        raise ValueError(f"--workloads: {', '.join(unknown)} is not one of {', '.join(WORKLOADS)}")
    options = ServerOptions(
        model=args.model,
        num_threads=args.threads,
        num_draft_tokens=args.drafts,
        max_batch_size=max(16, *args.levels, *args.check),
        prefix_cache=False,
        extra=("--draft-index-bytes=0", *args.engine_flag),
        internal={"iteration_history": 100_000},
    )
    args.out.mkdir(parents=True, exist_ok=True)
    progress = Progress(len(names) * (len(args.levels) + len(args.check)))
    found, checked = measure(names, args.levels, args.check, options, args.count, progress.step)
    progress.close()
    for calibration in found:
        path = args.out / f"{calibration.workload}.json"
        calibration.save(path)
        print(f"{path}: {calibration.iterations} iterations, mean error of the fit {share(calibration.mean_error)}")
    print(f"\nmeasured / simulated, on prompts that the calibration has not seen\n\n{checked}" if checked else "")
    return 0


def simulate(args: argparse.Namespace) -> int:
    """Print what the clients of one fleet see."""
    spec, calibration = flags.spec_of(args)
    (trace,) = flags.traces_of(args, calibration, 1)
    if args.write_trace:
        write_trace(args.write_trace, trace)
    kills = [Failure(at_s, 0) for at_s in args.kill_engine] + [
        Failure(at_s, 0, "grammar") for at_s in args.kill_grammar
    ]
    progress = Progress(len(trace))
    fleet = Fleet(
        spec,
        args.engines,
        args.router,
        kills,
        args.seed,
        args.detect_s,
        on_end=lambda: progress.step("requests"),
    )
    result = fleet.run(trace, warm_s=args.warm_s)
    progress.close()
    print(_result_table(result))
    return 0


def _result_table(result: Result) -> str:
    outcomes = result.outcomes
    times = [
        [name, *(number(figure(q) * 1e3, 1, " ms") for q in (50, 90, 99))]
        for name, figure in (
            ("time to the first token", result.ttft),
            ("between responses", result.itl),
            ("per token", result.tpot),
        )
    ]
    counts = [f"{outcomes[name]} {name}" for name in ("ended", "lost", "refused")]
    lines = [
        f"{len(result.requests)} requests: {', '.join(counts)}; {result.preempted} preemptions; "
        f"{result.cached_tokens} prompt tokens from the prefix cache",
        f"{result.tokens_per_s:.0f} tokens/s over {result.duration_s:.1f} s; "
        f"engines were busy {share(result.busy_share)} of it",
    ]
    return "\n".join([*lines, "", table(("", "p50", "p90", "p99"), times)])


def plan_fleet(args: argparse.Namespace) -> int:
    """Print both percentiles by the number of engines, and the smallest number that holds the goals."""
    spec, calibration = flags.spec_of(args)
    goals = Goals(args.ttft_ms / 1e3, args.itl_ms / 1e3, args.quantile)
    low, _, high = args.engines.partition("-")
    counts = range(int(low), int(high or low) + 1)
    traces = flags.traces_of(args, calibration, args.runs)
    progress = Progress(len(counts) * len(traces))
    sizes = [
        run_size(spec, count, traces, goals, args.router, warm_s=args.warm_s, step=progress.step) for count in counts
    ]
    progress.close()
    enough = plan(sizes, goals)
    print(_sizes_table(sizes, goals))
    said = "no simulated number of engines holds the goals" if enough is None else f"{enough} engines hold the goals"
    print(
        f"\n{said}: p{goals.quantile:g} of {args.ttft_ms:g} ms to the first token, {args.itl_ms:g} ms between responses"
    )
    if args.lose_engine:
        at_s = args.seconds / 2 if args.trace is None else traces[0][-1].at_s / 2
        for count in dict.fromkeys((enough or counts[-1], (enough or counts[-1]) + 1)):
            loss = lose_engine(spec, count, traces[0], goals, args.router, at_s=at_s, detect_s=args.detect_s)
            print(
                f"engine 0 of {count} ends at {at_s:g} s for {spec.start_s:g} s: {loss.lost} requests lost, "
                f"{loss.retried} answered by another engine, {loss.refused} refused; meanwhile p{goals.quantile:g} "
                f"{loss.during_ttft_s * 1e3:.0f} ms to the first token ({loss.undisturbed_ttft_s * 1e3:.0f} without), "
                f"{loss.during_itl_s * 1e3:.0f} ms between responses ({loss.undisturbed_itl_s * 1e3:.0f} without)"
            )
    if args.json:
        args.json.write_text(json.dumps({"enough": enough, "sizes": [asdict(s) for s in sizes]}, indent=1) + "\n")
    if args.plot:
        from tools.scale.plot import draw

        draw(sizes, goals, f"{args.rate:g} requests/s, {args.router}", args.plot)
    return 0 if enough is not None else 1


def _sizes_table(sizes: Sequence[Size], goals: Goals) -> str:
    q = f"p{goals.quantile:g}"
    header = ("engines", f"TTFT {q}, ms", f"ITL {q}, ms", "tokens/s", "busy", "served", "")
    rows = [
        [
            str(s.num_engines),
            f"{s.ttft_s * 1e3:.0f} +- {s.ttft_spread_s * 1e3:.0f}",
            f"{s.itl_s * 1e3:.0f} +- {s.itl_spread_s * 1e3:.0f}",
            f"{s.tokens_per_s:.0f}",
            share(s.busy_share),
            share(s.served_share),
            "enough" if s.holds(goals) else "",
        ]
        for s in sizes
    ]
    return table(header, rows)


def _numbers(text: str) -> list[int]:
    values = [int(each) for each in text.split(",") if each]
    if any(value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text}: numbers of at least 1, separated by commas")
    return values


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tools.scale", description=__doc__, epilog=EPILOG, formatter_class=how
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Command) -> argparse.ArgumentParser:
        found: argparse.ArgumentParser = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        found.set_defaults(run=run)
        return found

    flags.add_model_flags(command("memory", memory))
    each = command("step", step)
    flags.add_model_flags(each)
    flags.add_speed_flags(each)
    each.add_argument("--lanes", type=int, nargs="+", default=[1, 8, 32, 128], help="(default 1 8 32 128)")
    each.add_argument("--context", type=int, default=1024, help="tokens of a sequence (default 1024)")
    each.add_argument("--guided-steps", action="store_true", help="every sequence has a grammar")
    each = command("compare", compare)
    each.add_argument("--write", action="store_true", help="write the tables to docs/benchmarks.md")
    each.add_argument("--measure", action="store_true", help="start the embedded model, and ask it for its memory")
    _add_calibrate_flags(command("calibrate", calibrate))
    each = command("simulate", simulate)
    _add_simulation_flags(each)
    each.add_argument("--engines", type=int, default=1, help="(default 1)")
    each.add_argument(
        "--kill-engine", type=float, action="append", default=[], metavar="S", help="engine 0, at this time"
    )
    each.add_argument(
        "--kill-grammar", type=float, action="append", default=[], metavar="S", help="its grammar process"
    )
    each.add_argument("--write-trace", type=Path, metavar="FILE", help="write the load as a trace")
    each = command("plan", plan_fleet)
    _add_simulation_flags(each)
    each.add_argument("--engines", default="1-8", metavar="A-B", help="numbers to simulate (default 1-8)")
    each.add_argument("--ttft-ms", type=float, default=math.inf, help="goal: time to the first token")
    each.add_argument("--itl-ms", type=float, default=math.inf, help="goal: time between two responses of an answer")
    each.add_argument("--quantile", type=float, default=99.0, help="of both goals, in percent (default 99)")
    each.add_argument("--runs", type=int, default=3, help="traces, each of its own seed (default 3)")
    each.add_argument("--lose-engine", action="store_true", help="also simulate the end of one engine at half time")
    each.add_argument("--plot", type=Path, metavar="PNG", help="draw both percentiles over the number of engines")
    each.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    return parser


def _add_simulation_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_fleet_flags(parser)
    flags.add_model_flags(parser)
    flags.add_speed_flags(parser)
    parser.add_argument(
        "--warm-s", type=float, default=10.0, help="requests before do not count in percentiles (default 10)"
    )


def _add_calibrate_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where WORKLOAD.json is written")
    add("--model", default="embedded", help="a directory, a GGUF file or 'embedded' (default)")
    add("--workloads", default="chat,extraction", help="of benchmarks serve (default chat,extraction)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the model (default: all cores)")
    add("--drafts", type=int, default=7, help="num_draft_tokens (default 7)")
    add("--levels", type=_numbers, default=[1, 2, 6, 16], help="requests at a time of the fit (default 1,2,6,16)")
    add("--check", type=_numbers, default=[1, 4, 8, 16], help="of the comparison; '' for none (default 1,4,8,16)")
    add("--count", type=int, default=6, help="prompts of the fit, and as many for the comparison (default 6)")
    add("--engine-flag", action="append", default=[], metavar="FLAG", help="for the engine: --engine-flag=--name=value")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    try:
        status: int = args.run(args)
    except (ValueError, OSError, ServerFailed) as error:
        print(f"python -m tools.scale: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
