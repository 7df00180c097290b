"""The sections of `bench_gpu`; each runs alone, in its own process, and writes its result as JSON.

    python -m benchmarks.gpu.sections NAME --device cuda --out RESULT.json

Invariant: a section that has no meaning on a device gives the reason; an error is a line of the result or the exit
status of the process, never a figure.
Not responsible for: budgets and the report (see bench_gpu.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.guided import HEADER, FactsServer, copy_bandwidth, floor_ms, measure, rows_of
from benchmarks.harness.server import ServerOptions
from benchmarks.harness.tables import number

SYNCS = ("host_callback", "device_flag")


@dataclass(frozen=True, slots=True)
class Table:
    """A title, a header, rows."""

    title: str
    header: list[str]
    rows: list[list[str]]


@dataclass(slots=True)
class Found:
    """What a section found. `failures`: what must not be so; `left_out`: why the section, or a part, has no figure."""

    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def _syncs(device: str) -> tuple[str, ...]:
    return ("inline",) if device == "cpu" else SYNCS


def _model(device: str, quick: bool) -> dict[str, str]:
    """Whose tokens do not matter: the embedded model, or a tiny one where a quick look must be quick."""
    return {"model": "random:llama-tiny" if device == "cpu" and quick else "embedded"}


def _options(device: str, sync: str, *extra: str, **fields: Any) -> ServerOptions:
    return ServerOptions(prefix_cache=False, device=device, extra=("--sync", sync, *extra), **fields)


def hostfunc(device: str, quick: bool) -> Found:
    """Run the example of a Python function in a graph."""
    if device == "cpu":
        why = "a host function is a node of a CUDA stream; tests/kernels/test_hostfunc.py has its callbacks without one"
        return Found(left_out=[why])
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/hostfunc.py"))
    said = example["main"]().tolist()
    failures = [] if said == [20] * 10 else [f"the example gives {said}, not twenties"]
    return Found(notes=[f"examples/hostfunc.py: {said}"], failures=failures)


def pairs(device: str, quick: bool) -> Found:
    """Replay the pair of post and await; every word of every row must be its post's sequence."""
    replays = 20_000 if quick else 1_000_000
    if device == "cpu":
        from benchmarks.gpu.native_pairs import native_pairs

        found: list[Any] = [native_pairs(replays, rows=4, vocab=128_256, work_us=0.0)]
    else:
        from benchmarks.gpu.bench_sync import figures, parse

        argv = ["--replays", str(replays), "--pairs", "1", "--work-ns", "0", "--limit-s", "60"]
        found = [f for f in figures(parse(argv), SYNCS) if f.mode != "none"]
    rows = [[f.mode, str(f.pairs), number(f.us, 2), str(f.lost), str(f.wrong)] for f in found]
    table = Table("Pairs of post and await, 1 lane of 4 rows, 128256 columns", _PAIRS, rows)
    failures = [f"{f.mode}: {f.lost} rows lost, {f.wrong} words wrong" for f in found if f.lost or f.wrong]
    short = [f"{f.mode}: stopped at {f.pairs} of {replays} for the time" for f in found if f.pairs < replays]
    parts = ["device_flag is CUDA C, which no CPU runs; tests/gpu_engine/cuda replays it over fakes"]
    return Found([table], short, failures, parts if device == "cpu" else [])


_PAIRS = ["sync", "pairs", "us a pair", "rows lost", "words wrong"]


def exposed(device: str, quick: bool) -> Found:
    """What a pair adds to work that is longer than the answer, and the nodes of a step."""
    replays = 200 if quick else 2000
    if device == "cpu":
        from benchmarks.gpu.native_pairs import native_pairs

        f = native_pairs(replays, rows=4, vocab=128_256, work_us=200.0)
        rows = [[f.mode, "-", number(f.us, 2), number(f.exposed_us, 2), str(f.lost + f.wrong)]]
        left_out = ["a CPU step is no graph: no nodes; spinning dispatch and device flags are CUDA's"]
        return Found([Table("Exposed by a pair after 200 us of work", _EXPOSED, rows)], left_out=left_out)
    from benchmarks.gpu import bench_graph, bench_sync
    from kernels.cuda.host_launch import has_low_latency_dispatch

    of_pairs = list(bench_sync.figures(bench_sync.parse(["--replays", str(replays), "--limit-s", "20"])))
    rows = [
        [f.mode, number(f.nodes, 1), number(f.us, 2), number(f.exposed_us, 2), str(f.lost + f.wrong)] for f in of_pairs
    ]
    tables = [Table("Exposed by a pair after 100 us of work", _EXPOSED, rows)]
    wrong = [f"{f.mode}: {f.lost} rows lost, {f.wrong} words wrong" for f in of_pairs if f.lost or f.wrong]
    steps = []
    for mode, figures in bench_graph.all_modes(bench_graph.parse(["--steps", "100" if quick else "500"])):
        floor = figures["free graph"][0].step_us
        for name, (measured, (bad, lost)) in figures.items():
            cells = (measured.step_us, measured.step_us - floor, measured.launch_us)
            steps.append([mode, name, str(measured.nodes or "-"), *(number(us, 2) for us in cells), str(bad + lost)])
            wrong += [f"{mode}, {name}: {lost} rows lost, {bad} wrong"] if bad or lost else []
    header = ["sync", "step", "nodes", "us a step", "exposed us", "launch us", "bad rows"]
    tables.append(Table("Whole steps without a model, 4 lanes of 4 rows, 500 us of work", header, steps))
    spin = "spinning dispatch is there" if has_low_latency_dispatch() else "no spinning dispatch here: spin is blocking"
    return Found(tables, [spin], wrong)


_EXPOSED = ["sync", "nodes", "us a pair", "exposed us", "bad"]


def tokens(device: str, quick: bool) -> Found:
    """Compare the tokens of graphs with those of eager launches, in float32."""
    from benchmarks.harness.comparison import compare
    from benchmarks.quality.lossless import Variant, make_cases, run_variants

    cases, variants = make_cases(4 if quick else 12, 24 if quick else 64), [Variant(0, 1), Variant(7, 8)]
    if device == "cpu":
        ways = [("inline", "overlap", "false"), ("inline", "overlap", "true")]
    else:
        ways = [(sync, "enforce-eager", value) for sync in SYNCS for value in ("true", "false")]
    reference: dict[str, Any] = {}
    rows, failures = [], []
    for sync, flag, value in ways:
        way = f"{flag} = {value}"
        with FactsServer(
            _options(
                device, sync, f"--{flag}", value, "--row-timeout-ms", "5000", dtype="float32", **_model(device, quick)
            )
        ) as server:
            results = asyncio.run(run_variants(server.address, cases, variants))
        for variant, answers in results.items():
            reference = reference or dict(answers)
            differing = compare(reference, answers)
            count = sum(len(answer.token_ids) for answer in answers.values())
            equal = f"{len(cases) - len(differing)} of {len(cases)}"
            rows.append([sync, way, str(variant), str(count), equal])
            failures += [f"{sync}, {way}, {variant}: {difference}" for difference in differing]
    header = ["sync", "way", "drafts", "tokens", "equal answers"]
    left_out = ["a CPU has no graphs: a step is launched before the last is read, or not"] if device == "cpu" else []
    return Found([Table("Answers equal to the first line's", header, rows)], [], failures, left_out)


def kill(device: str, quick: bool) -> Found:
    """Kill the grammar process in the middle of an answer."""
    from benchmarks.gpu.kill import KILLED, killed

    rows, failures = [], []
    # A step waits 50 ms for rows, and two are in flight. Without a GPU the new process starts on the model's cores.
    length, drains_ms = (60 if quick else 300, 10_000.0) if device == "cpu" else (1000, 500.0)
    for sync in _syncs(device):
        with FactsServer(_options(device, sync, num_draft_tokens=3, **_model(device, quick))) as server:
            row, problems = asyncio.run(killed(server.address, server.pid, length, drains_ms))
        rows.append([sync, *row])
        failures += [f"{sync}: {problem}" for problem in problems]
    table = Table("SIGKILL to the grammar process in mid-answer, row_timeout_ms = 50", ["sync", *KILLED], rows)
    return Found([table], failures=failures)


def _guided(device: str, quick: bool, model: str, title: str) -> Found:
    batches = (1, 8) if device == "cpu" else (1, 8, 32, 128)
    size = (64 << 20) if device == "cpu" else (1 << 30)
    rate = copy_bandwidth(device, size)
    rows, nodes, near, facts = [], [], [], dict[str, Any]()
    rounds, seconds = (1, 0.5) if quick else (2, 1.0)
    for k in (0,) if quick else (0, 7):
        drafter = "ngram" if k else "none"
        extra = ("--max-model-len", "2048", "--row-timeout-ms", "50")
        options = _options(
            *(device, "auto", *extra), model=model, num_draft_tokens=k, drafter=drafter, max_batch_size=batches[-1]
        )
        with FactsServer(options) as server:
            facts = server.facts
            measured = asyncio.run(measure(server.address, batches, rounds=rounds, seconds=seconds, max_tokens=1900))
        rows += rows_of(str(k), measured)
        nodes += [[key, str(count)] for key, count in facts["nodes"].items() if int(key.split()[0]) in batches]
        least = floor_ms(facts, 200, rate)
        for kind, steps in measured[1].items():
            took = min(step.ms for step in steps)
            near.append([str(k), kind, number(took, 3), number(least, 3), number(took / least, 2), "1.15"])
    line = f"copy of {size >> 20} MiB: {rate / 1e9:.0f} GB/s read and written; weights of a step: "
    line += f"{facts['streamed_bytes'] / 1e9:.3f} GB in {facts['dtype']}"
    tables = [
        Table(f"{title}: time of a step", HEADER, rows),
        Table(f"{title}: batch of 1 over its bytes", ["K", "step", "ms", "floor ms", "ratio", "goal"], near),
    ]
    if nodes:
        tables.append(Table(f"{title}: nodes of the captured graphs", ["graph", "nodes"], nodes))
    return Found(tables, [line])


def llama(device: str, quick: bool) -> Found:
    """Guided and free steps of a model with Llama 3.1 8B's shapes."""
    if device == "cpu":
        found = _guided(device, quick, "random:llama-tiny", "Llama, tiny")
        found.left_out.append("8B parameters are not for a CPU: a tiny model of the family takes their place")
        return found
    return _guided(device, quick, "random:llama-8b", "Llama 3.1 8B's shapes")


def smol(device: str, quick: bool) -> Found:
    """Guided and free steps of the embedded model."""
    return _guided(device, quick, "embedded", "SmolLM2-135M")


def kernels(device: str, quick: bool) -> Found:
    """What each kernel takes."""
    if device == "cpu":
        why = "Triton kernels have no time on a CPU; tests/kernels/cuda runs them in Triton's interpreter"
        return Found(left_out=[why])
    command = [sys.executable, "-m", "benchmarks", "bench_kernels", *(("--only", "copy") if quick else ())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Found(notes=["\n" + done.stdout])


def products(device: str, quick: bool) -> Found:
    """Compare the bits and the time of products by our kernel and by cuBLAS."""
    if device == "cpu":
        return Found(
            left_out=["the kernel is Triton's, and cuBLAS is a GPU's; see tests/kernels/cuda/test_products.py"]
        )
    from benchmarks.gpu.product_bits import HEADER as header
    from benchmarks.gpu.product_bits import product_rows

    rows, failures = product_rows(device, quick)
    return Found([Table("Products in bfloat16, by the number of rows", header, rows)], failures=failures)


def references(device: str, quick: bool) -> Found:
    """Compare every kernel with its reference: the tests of `tests/kernels`, on the device."""
    return _pytest(device, quick, "tests/kernels", "not slow")


def engines(device: str, quick: bool) -> Found:
    """Run whole engines and steps: the tests of `tests/gpu`."""
    return _pytest(device, quick, "tests/gpu", "gpu" if device == "cpu" or not quick else "gpu and not slow")


def _pytest(device: str, quick: bool, folder: str, marked: str) -> Found:
    if device == "cpu":
        return Found(left_out=[f"`make test` runs {folder} where there is no GPU"])
    options = ["-q", "-m", marked, "-n", "4", "-o", "faulthandler_timeout=120"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", folder, *options], stdout=subprocess.PIPE, text=True, check=False
    )
    lines = done.stdout.splitlines()
    print("\n".join(lines[-60:]), file=sys.stderr)
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return Found(notes=[f"{folder}: {lines[-1] if lines else 'no output'}"], failures=failed if done.returncode else [])


SECTIONS: dict[str, tuple[Callable[[str, bool], Found], float]] = {
    "references": (references, 200),
    "products": (products, 90),
    "engines": (engines, 420),
    "hostfunc": (hostfunc, 30),
    "exposed": (exposed, 75),
    "pairs": (pairs, 150),
    "kill": (kill, 90),
    "tokens": (tokens, 150),
    "llama": (llama, 180),
    "smol": (smol, 110),
    "kernels": (kernels, 90),
}
"""Name -> what runs, and its deadline in seconds."""


def main() -> int:
    """Run one section; exit 0 when its result was written."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.sections", description=__doc__)
    parser.add_argument("name", choices=SECTIONS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    # A deadline must end the servers as well: contexts close on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if args.device != "cpu":
        from gpu_engine.model.loader import load_kernels_eagerly

        load_kernels_eagerly()
    found = SECTIONS[args.name][0](args.device, args.quick)
    args.out.write_text(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
