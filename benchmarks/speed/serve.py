"""`python -m benchmarks serve`: this engine and its peers on the same prompts, model, dtype and threads, in one run.

Invariant: every figure of a table comes from this run; all systems run in every round, and their order rotates.
Not responsible for: the correctness of answers beyond `jsonschema` (see quality/schemas.py and quality/lossless.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.harness.measure import Answer, GuidanceCost, Run, Summary, guidance_cost, summarize
from benchmarks.harness.plot import draw
from benchmarks.harness.report import Cell, as_json, guidance_table, result_table
from benchmarks.harness.server import ServerFailed, ServerOptions
from benchmarks.harness.systems import Lockstep, Prompt, System, SystemFailed, hf_directory, load_prompts
from benchmarks.harness.tables import Progress
from benchmarks.harness.validity import Judge
from benchmarks.harness.workloads import WORKLOADS, workload

SYSTEMS = (
    "lockstep",
    "lockstep-k0",
    "transformers",
    "transformers-lookup",
    "transformers-lookup-free",
    "vllm",
    "vllm-ngram",
)

EXAMPLES = """
examples:
  python -m benchmarks serve                                        everything that is installed, all workloads
  python -m benchmarks serve --count 4 --workloads extraction --systems lockstep,transformers   a quick look
  python -m benchmarks serve --vllm-python ~/vllm/bin/python --repeat 3 --plot serve.png        with vLLM, and a picture

reading the table:
  tok/s     generated tokens / wall time of the pass          TTFT  time to first token, at the client
  ratio     tok/s over transformers + xgrammar's processor    TPOT  time per token after the first, per answer
  tok/step  tokens per arrival (acceptance length)            valid answers that jsonschema accepts; cut-off are not
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks serve",
        description="Compare guided generation of this engine with transformers and vLLM in one run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="embedded", help="model of this engine: a directory, a GGUF file or 'embedded' (default)")
    add("--hf-model", metavar="DIR", help="the same model as a Hugging Face directory, for the peers")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add(
        "--device",
        default="cpu",
        help="device of this engine and of transformers (default cpu); vLLM takes what its build is for",
    )
    add(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of every system (default: all cores)"
    )
    add("--k", type=int, default=7, help="draft tokens per step of this engine (default 7)")
    add("--lookup", type=int, default=7, help="prompt lookup tokens of transformers (default 7)")
    add("--vllm-ngram", type=int, default=4, help="n-gram draft tokens of vLLM (default 4)")
    add("--grammar-backend", default="llguidance", choices=("llguidance", "xgrammar"), help="backend of this engine")
    add("--workloads", default=",".join(WORKLOADS), help=f"comma-separated, of {', '.join(WORKLOADS)}")
    add("--concurrency", default="1,8", help="comma-separated (default 1,8)")
    add("--systems", default=",".join(SYSTEMS), help=f"comma-separated, of {', '.join(SYSTEMS)}")
    add("--count", type=int, help="only the first COUNT prompts of every workload")
    add("--max-tokens", type=int, help="lower the token budget of every prompt")
    add("--repeat", type=int, default=1, help="rounds; each system runs once in each (default 1)")
    add(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="python of an environment with vLLM; without it vLLM is skipped",
    )
    add("--no-guidance-cost", action="store_true", help="leave out the guided / free comparison")
    add("--plot", type=Path, metavar="PNG", help="draw the tokens/s")
    add("--json", type=Path, metavar="FILE", help="write the summaries as JSON")
    return parser


def versions() -> str:
    """Return the versions of what takes part, as installed here."""
    found = []
    for name in ("torch", "transformers", "xgrammar", "llguidance", "grpcio", "jsonschema"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join([f"python {sys.version.split()[0]}", *found])


def cpu_name() -> str:
    """Return the processor's name as the kernel gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


def start_systems(
    args: argparse.Namespace, names: Sequence[str], directory: Path
) -> tuple[list[System], dict[str, str]]:
    """Start the systems named; return the started ones, and for each of the others the reason."""
    started: list[System] = []
    absent: dict[str, str] = {}
    batch = max(16, *(int(level) for level in args.concurrency.split(",")))
    options = ServerOptions(
        model=args.model,
        dtype=args.dtype,
        num_threads=args.threads,
        num_draft_tokens=args.k,
        max_batch_size=batch,
        grammar_backend=args.grammar_backend,
        prefix_cache=False,
        device=args.device,
    )

    def vllm(ngram: int) -> System:
        from benchmarks.peers.vllm import Vllm

        if args.vllm_python is None:
            raise SystemFailed("skipped: no --vllm-python")
        return Vllm(args.vllm_python, directory, dtype=args.dtype, num_threads=args.threads, batch=batch, ngram=ngram)

    weights = None

    def transformers(lookup: int, grammar: bool) -> System:
        nonlocal weights
        from benchmarks.peers.transformers import Transformers, Weights

        weights = weights or Weights(directory, args.dtype, args.threads, args.device)
        return Transformers(weights, lookup=lookup, grammar=grammar)

    makers: dict[str, Callable[[], System]] = {
        "lockstep": lambda: Lockstep(options),
        "lockstep-k0": lambda: Lockstep(dataclasses.replace(options, num_draft_tokens=0, drafter="none")),
        "transformers": lambda: transformers(0, True),
        "transformers-lookup": lambda: transformers(args.lookup, True),
        "transformers-lookup-free": lambda: transformers(args.lookup, False),
        "vllm": lambda: vllm(0),
        "vllm-ngram": lambda: vllm(args.vllm_ngram),
    }
    for name in names:
        print(f"starting {name} ...", file=sys.stderr)
        try:
            started.append(makers[name]())
        except (SystemFailed, ServerFailed, ImportError) as failure:
            absent[name] = str(failure)
    return started, absent


def warm_up(system: System, prompts: dict[str, list[Prompt]], levels: Sequence[int]) -> None:
    """Let a system do everything once, uncounted; its failures show up where they count."""
    for level in levels:
        for name, ready in prompts.items():
            short = [Prompt(dataclasses.replace(p.item, max_tokens=8), p.token_ids) for p in ready[:level]]
            try:
                system.run(short, level, lambda: None)
            except SystemFailed as failure:
                print(f"warm-up of {system.name} on {name} c={level}: {failure}", file=sys.stderr)


def measure(
    systems: Sequence[System], prompts: dict[str, list[Prompt]], levels: Sequence[int], repeat: int, judge: Judge
) -> dict[Cell, dict[str, Summary | str]]:
    """Run every system on every cell, `repeat` rounds, the order rotating; return a summary or a failure for each."""
    total = len(systems) * len(levels) * repeat * sum(len(ready) for ready in prompts.values())
    progress = Progress(total)
    results: dict[Cell, dict[str, Summary | str]] = {}
    for name, ready in prompts.items():
        schemas = {prompt.item.name: prompt.item.schema for prompt in ready}
        for level in levels:
            runs: dict[str, list[Run]] = {system.name: [] for system in systems}
            failures: dict[str, str] = {}
            for turn in range(repeat):
                first = turn % max(len(systems), 1)
                for system in [*systems[first:], *systems[:first]]:
                    label = f"{name} c={level} {system.name}"
                    before = progress.done
                    try:
                        if system.name not in failures:
                            runs[system.name].append(system.run(ready, level, partial(progress.step, label)))
                    except SystemFailed as failure:
                        failures[system.name] = str(failure)
                    progress.step(label, before + len(ready) - progress.done)
            results[name, level] = {
                system.name: failures.get(system.name) or summarize(runs[system.name], schemas, judge)
                for system in systems
            }
    progress.close()
    return results


def measure_guidance(
    systems: Sequence[Lockstep], prompts: list[Prompt], levels: Sequence[int], repeat: int
) -> dict[tuple[str, int], GuidanceCost | str]:
    """Compare guided with unguided decoding per decode step, per system and concurrency."""
    costs: dict[tuple[str, int], GuidanceCost | str] = {}
    progress = Progress(len(systems) * len(levels) * repeat * len(prompts))
    for system in systems:
        for level in levels:
            pairs: list[tuple[Answer, Answer]] = []
            label = f"guided / free, {system.name} c={level}"
            try:
                for _ in range(repeat):
                    pairs += system.run_guidance_pairs(prompts, level, partial(progress.step, label))
                costs[system.name, level] = guidance_cost(pairs)
            except SystemFailed as failure:
                costs[system.name, level] = str(failure)
    progress.close()
    return costs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the harness; returns the exit code (1 when no system could be started)."""
    parser = build_parser()
    args = parser.parse_args(argv)
    names = args.systems.split(",")
    levels = [int(level) for level in args.concurrency.split(",")]
    if unknown := [name for name in names if name not in SYSTEMS]:
        parser.error(f"--systems: {', '.join(unknown)} not among {', '.join(SYSTEMS)}")
    if min([args.repeat, args.threads, *levels]) < 1:
        parser.error("--repeat, --threads and --concurrency must be at least 1")
    try:
        items = {name: workload(name, args.count, args.max_tokens) for name in args.workloads.split(",")}
        directory = hf_directory(args.model, args.hf_model)
    except ValueError as error:
        parser.error(str(error))
    prompts = {name: load_prompts(these, directory) for name, these in items.items()}
    systems, absent = start_systems(args, names, directory)
    try:
        print(f"model {args.model} ({args.dtype}), {args.threads} threads on {cpu_name()}")
        print(versions())
        print(f"greedy; {args.repeat} round(s); prompts: " + ", ".join(f"{n} {len(p)}" for n, p in prompts.items()))
        for system in systems:
            print(f"- {system.name}: {system.describe()}")
        for name, reason in absent.items():
            print(f"- {name}: {reason}")
        if not systems:
            return 1
        for system in systems:
            warm_up(system, prompts, levels)
        results = measure(systems, prompts, levels, args.repeat, Judge())
        for (name, level), cell in results.items():
            print(f"\n{name}, concurrency {level}\n\n{result_table(cell)}", flush=True)
        ours = [system for system in systems if isinstance(system, Lockstep)]
        guided = next((ready for ready in prompts.values() if ready[0].item.schema), None)
        costs = {}
        if ours and guided and not args.no_guidance_cost:
            costs = measure_guidance(ours, guided, levels, args.repeat)
            print(
                f"\nguided / free, time per decode step of the same prompts and token counts\n\n{guidance_table(costs)}"
            )
    finally:
        for system in systems:
            system.close()
    if args.plot:
        title = f"{args.model}, {args.dtype}, {args.threads} threads, {cpu_name()}"
        draw(results, [system.name for system in systems], title, args.plot)
    if args.json:
        args.json.write_text(json.dumps(as_json(results, costs), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
