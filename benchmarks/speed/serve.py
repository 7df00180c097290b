"""`python -m benchmarks serve`: this engine and its peers on the same prompts, model and threads, in one run.

Invariant: every figure of a table comes from this run; all systems run in every round, and their order rotates.
Not responsible for: starting systems (see serve_systems.py); the correctness of answers beyond `jsonschema` (see
quality/schemas.py and quality/lossless.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle, islice
from pathlib import Path

from benchmarks.harness import tool_calls
from benchmarks.harness.flags import engine_options, harness_parser, list_of, one_of, whole
from benchmarks.harness.measure import Answer, GuidanceCost, Run, Summary, guidance_cost, summarize
from benchmarks.harness.plot import draw
from benchmarks.harness.report import Cell, as_json, guidance_table, overview_table, result_table, skipped_line
from benchmarks.harness.rest import await_rest
from benchmarks.harness.systems import Lockstep, Prompt, System, SystemFailed, hf_directory, load_prompts
from benchmarks.harness.tables import Progress
from benchmarks.harness.validity import Judge
from benchmarks.harness.workloads import ALL_WORKLOADS, WORKLOADS, Item
from benchmarks.speed.serve_systems import (
    SYSTEMS,
    Settings,
    found_llama_server,
    gguf_file,
    makers,
    peer_names,
    start_systems,
)

DEFAULT_WORKLOADS = (*WORKLOADS, tool_calls.NAME)

EXAMPLES = """
examples:
  python -m benchmarks serve                                        everything that is installed, all workloads
  python -m benchmarks serve --count 4 --workloads extraction --systems lockstep,transformers   a quick look
  python -m benchmarks serve --openvino-python ~/peers/bin/python --bfcl-python ~/peers/bin/python \\
      --llama-server ~/llama.cpp/build/bin/llama-server --threads 2 --repeat 3 --plot serve.png
  python -m benchmarks serve --model 4b.gguf --hf-model DIR --workloads long --concurrency 1,8 --count 4
      random weights in the shape of a larger model (python -m tools.shapes --shape 4b --kind q4_0 --out 4b.gguf), with
      the tokenizer of the embedded model, which DIR has

reading the tables:
  tok/s     generated tokens / wall time of the pass          TTFT  time to first token, at the client
  ratio     tok/s over those of the fastest peer in the cell  TPOT  time per token after the first, per answer
  tok/step  tokens per arrival (acceptance length)            valid answers that jsonschema accepts; cut-off are not

A pass begins when all systems are at rest: one that has answered may poll for seconds before its threads sleep.
At concurrency c a pass has at least 2c requests; a workload with fewer prompts sends them again.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--model", default="embedded", help="model of this engine: a directory, a GGUF file or 'embedded' (default)")
    add("--hf-model", metavar="DIR", help="the same model as a Hugging Face directory, for transformers and vLLM")
    add("--gguf", type=Path, metavar="FILE", help="the same model as a GGUF file, for OpenVINO and llama.cpp")
    add(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="of transformers and vLLM, and of this engine unless --quantization is auto; OpenVINO and llama.cpp run "
        "the GGUF file as it is",
    )
    add(
        "--quantization",
        default="auto",
        choices=("auto", "none", "int8", "q4"),
        help="as this engine's setting (default auto: the blocks of a GGUF file)",
    )
    add(
        "--device",
        default="cpu",
        help="device of this engine and of transformers (default cpu); the others run on the CPU",
    )
    add(
        "--threads",
        type=whole(1),
        default=len(os.sched_getaffinity(0)),
        help="threads of every system (default: all cores)",
    )
    add("--k", type=whole(0), default=7, help="draft tokens per step of this engine (default 7)")
    add(
        "--engine-flag", action="append", default=[], metavar="FLAG", help="for this engine: --engine-flag=--name=value"
    )
    add("--lookup", type=whole(0), default=7, help="prompt lookup tokens of transformers (default 7)")
    add(
        "--openvino-lookup",
        type=whole(0),
        default=5,
        help="prompt lookup tokens of OpenVINO (default 5, as in its sample)",
    )
    add("--llama-ngram", type=whole(0), default=7, help="n-gram draft tokens of llama.cpp (default 7)")
    add("--vllm-ngram", type=whole(0), default=4, help="n-gram draft tokens of vLLM (default 4)")
    add("--grammar-backend", default="llguidance", choices=("llguidance", "xgrammar"), help="backend of this engine")
    add(
        "--workloads",
        type=list_of(one_of((*ALL_WORKLOADS, tool_calls.NAME))),
        help=f"comma-separated (default: all that are installed, of {', '.join(DEFAULT_WORKLOADS)}); "
        "also repeated and long",
    )
    add("--concurrency", type=list_of(whole(1)), default="1,4,8,16", help="comma-separated (default 1,4,8,16)")
    add(
        "--systems",
        type=list_of(one_of(SYSTEMS)),
        default=",".join(SYSTEMS),
        help=f"comma-separated, of {', '.join(SYSTEMS)}",
    )
    add("--count", type=whole(1), help="only the first COUNT prompts of every workload")
    add("--max-tokens", type=whole(1), help="lower the token budget of every prompt")
    add("--repeat", type=whole(1), default=1, help="rounds; each system runs once in each (default 1)")
    python = "python of an environment with"
    add("--openvino-python", type=Path, metavar="PATH", help=f"{python} openvino-genai; without it that is skipped")
    add("--llama-server", type=Path, metavar="PATH", help="llama.cpp's server (default: llama-server on the PATH)")
    add("--vllm-python", type=Path, metavar="PATH", help=f"{python} vLLM; without it vLLM is skipped")
    add(
        "--bfcl-python",
        type=Path,
        metavar="PATH",
        default=Path(sys.executable),
        help=f"{python} bfcl-eval, whose data the workload tools is made from (default: this one)",
    )
    add(
        "--prefix-cache",
        action="store_true",
        help="let the requests of one pass share pages (default: off in every system, so that each prefill counts); "
        "only systems that can forget an earlier pass take part",
    )
    add("--no-guidance-cost", action="store_true", help="leave out the guided / free comparison")
    add("--plot", type=Path, metavar="PNG", help="draw tokens/s and the time to the first token over the concurrency")
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


def load_items(args: argparse.Namespace) -> tuple[dict[str, list[Item]], dict[str, str]]:
    """Return the items of each workload, and the workloads whose data is not installed, with the reason.

    Raises:
        ValueError: a workload was asked for by name and its data is not installed.

    """
    items: dict[str, list[Item]] = {}
    absent: dict[str, str] = {}
    for name in args.workloads or DEFAULT_WORKLOADS:
        try:
            items[name] = tool_calls.items_of(name, args.bfcl_python, args.count, args.max_tokens)
        except tool_calls.ToolDataMissing as missing:
            if args.workloads is not None:
                raise ValueError(f"--workloads: {name}: {missing}") from missing
            absent[f"workload {name}"] = str(missing)
    return items, absent


def settings_of(args: argparse.Namespace, directory: Path) -> Settings:
    """Return what the systems are started with.

    The prefix caches of all systems are off: every round sends the same prompts, and each prefill is measured. With
    `--prefix-cache` the requests of one pass share pages, and nothing is left of the pass before. The index of this
    engine's earlier answers is off: it would draft the answers of the round before. `--engine-flag` can turn it on.

    Raises:
        ValueError: `--gguf` is not a file.

    """
    batch = max(16, *args.concurrency)
    engine = engine_options(
        args,
        dtype="auto" if args.quantization == "auto" else args.dtype,
        max_batch_size=batch,
        extra=("--draft-index-bytes=0", *args.engine_flag),
    )
    return Settings(
        engine=engine,
        dtype=args.dtype,
        directory=directory,
        gguf=gguf_file(args.model, args.gguf),
        batch=batch,
        lookup=args.lookup,
        vllm_ngram=args.vllm_ngram,
        openvino_lookup=args.openvino_lookup,
        llama_ngram=args.llama_ngram,
        openvino_python=args.openvino_python,
        llama_server=found_llama_server(args.llama_server),
        vllm_python=args.vllm_python,
    )


def requests(prompts: Sequence[Prompt], level: int) -> list[Prompt]:
    """Return the requests of one pass: all prompts, and again from the first until there are at least 2 per slot."""
    return list(islice(cycle(prompts), max(len(prompts), 2 * level)))


def warm_up(system: System, prompts: dict[str, list[Prompt]], levels: Sequence[int]) -> None:
    """Let a system do everything once, uncounted; its failures show up where they count."""
    for level in levels:
        for name, ready in prompts.items():
            short = [Prompt(dataclasses.replace(p.item, max_tokens=8), p.token_ids) for p in requests(ready, level)]
            try:
                system.run(short[:level], level, lambda: None)
            except SystemFailed as failure:
                print(f"warm-up of {system.name} on {name} c={level}: {failure}", file=sys.stderr)


def measure(
    systems: Sequence[System],
    prompts: dict[str, list[Prompt]],
    levels: Sequence[int],
    repeat: int,
    judge: Judge,
    on_cell: Callable[[dict[Cell, dict[str, Summary | str]]], None] = lambda results: None,
    rest: Callable[[], object] = lambda: None,
) -> dict[Cell, dict[str, Summary | str]]:
    """Run every system on every cell, `repeat` rounds, the order rotating; return a summary or a failure for each.

    `rest` is called before each pass and returns when the other systems are at rest (see harness/rest.py).
    `on_cell` gets the results so far after each cell, the newest last: a long run that is ended early has left them.
    """
    passes = {(name, level): requests(ready, level) for name, ready in prompts.items() for level in levels}
    progress = Progress(len(systems) * repeat * sum(len(sent) for sent in passes.values()))
    results: dict[Cell, dict[str, Summary | str]] = {}
    for (name, level), sent in passes.items():
        schemas = {prompt.item.name: prompt.item.schema for prompt in sent}
        runs: dict[str, list[Run]] = {system.name: [] for system in systems}
        failures: dict[str, str] = {}
        for turn in range(repeat):
            first = turn % max(len(systems), 1)
            for system in [*systems[first:], *systems[:first]]:
                label = f"{name} c={level} {system.name}"
                before = progress.done
                try:
                    if system.name not in failures:
                        rest()
                        runs[system.name].append(system.run(sent, level, partial(progress.step, label)))
                except SystemFailed as failure:
                    failures[system.name] = str(failure)
                progress.step(label, before + len(sent) - progress.done)
        results[name, level] = {
            system.name: failures.get(system.name) or summarize(runs[system.name], schemas, judge) for system in systems
        }
        on_cell(results)
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


def measure_and_report(
    args: argparse.Namespace,
    systems: Sequence[System],
    prompts: dict[str, list[Prompt]],
    absent: dict[str, str],
) -> None:
    """Warm up, measure, print the tables, and write the files that were asked for."""
    for system in systems:
        warm_up(system, prompts, args.concurrency)
    peers = {name: peer_names(systems, ready[0].item.schema is not None) for name, ready in prompts.items()}
    costs: dict[Cell, GuidanceCost | str] = {}

    def report(so_far: dict[Cell, dict[str, Summary | str]]) -> None:
        (name, level), cell = list(so_far.items())[-1]
        print(f"\n{name}, concurrency {level}\n\n{result_table(cell, peers[name])}", flush=True)
        write(so_far)

    def write(so_far: dict[Cell, dict[str, Summary | str]]) -> None:
        if args.json:
            args.json.write_text(json.dumps(as_json(so_far, costs, peers, absent), indent=1))

    results = measure(systems, prompts, args.concurrency, args.repeat, Judge(), report, await_rest)
    print(
        f"\nall: tokens/s, TTFT p50, tokens/s over the best peer's (*)\n\n{overview_table(results, peers)}", flush=True
    )
    ours = [system for system in systems if isinstance(system, Lockstep)]
    guided = next((ready for ready in prompts.values() if ready[0].item.schema), None)
    if ours and guided and not args.no_guidance_cost:
        costs = measure_guidance(ours, guided, args.concurrency, args.repeat)
        print(f"\nguided / free, time per decode step of the same prompts and token counts\n\n{guidance_table(costs)}")
        write(results)
    if args.plot:
        title = f"{args.model}, {args.threads} threads, {cpu_name()}"
        try:
            draw(results, [system.name for system in systems], title, args.plot)
        except ImportError as missing:
            print(f"no plot: {missing}: pip install matplotlib", file=sys.stderr)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the systems are closed and none of their processes stays behind."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the harness; returns the exit code (1 when no system could be started)."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        items, no_data = load_items(args)
        directory = hf_directory(args.model, args.hf_model)
        settings = settings_of(args, directory)
    except ValueError as error:
        parser.error(str(error))
    prompts = {name: load_prompts(these, directory) for name, these in items.items()}
    with exit_on_sigterm(), ExitStack() as running:
        systems, not_started = start_systems(args.systems, makers(settings), running)
        absent = not_started | no_data
        print(f"model {args.model}, {args.threads} threads on {cpu_name()}")
        print(versions())
        print(f"greedy; {args.repeat} round(s); prompts: " + ", ".join(f"{n} {len(p)}" for n, p in prompts.items()))
        for system in systems:
            print(f"- {system.name}: {system.describe()}")
        if absent:
            print(skipped_line(absent))
        if not systems:
            return 1
        measure_and_report(args, systems, prompts, absent)
    return 0
