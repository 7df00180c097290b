"""`python -m benchmarks bench_gpu`: every test and figure that needs a GPU, in sections.

Sections run one after another, each in its own process with a deadline, all within one budget.
Invariant: a section that fails, or that has no time left, is reported with the reason, and the others still run. What
has ended is in the JSON file, and `--resume` does not run it again.
Not responsible for: the measurement of a section (see sections.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.sections import SECTIONS
from benchmarks.harness.flags import harness_parser, real
from benchmarks.harness.tables import table
from service_runtime.parent_death import dying_with_us

EXAMPLES = """
sections, in this order:
  references the tests of the kernels, on the device
  products   bits and microseconds of a model's products by the number of rows: our kernel's and cuBLAS'
  engines    the tests of whole engines and steps
  hostfunc   a Python function in a graph: the example prints twenties
  exposed    microseconds that a pair of post and await adds, nodes and microseconds of a step: host callbacks
             (blocking and spinning) and device flags
  pairs      1,000,000 replays of the pair in both ways: rows that are stale, torn or lost (0 expected)
  kill       the grammar process gets SIGKILL during replays: the graph drains, the engine goes on, tokens are the same
  tokens     answers of captured graphs equal those of eager launches, in float32, with 0 and 7 drafts
  llama      a step guided and free, 1 to 128 at a time, and over the memory's floor: Llama 3.1 8B's shapes,
             random weights made on the device
  smol       the same with SmolLM2-135M
  kernels    microseconds of each kernel

examples:
  python -m benchmarks bench_gpu --report gpu.md --json gpu.json
  python -m benchmarks bench_gpu --quick                       short sizes, a few minutes less
  python -m benchmarks bench_gpu --only exposed pairs          some sections
  python -m benchmarks bench_gpu --budget-s 2400 --json gpu.json --resume     all of them; again: what is missing
  python -m benchmarks bench_gpu --device cpu --quick          the same entry point over what a CPU has

exit status: 0; 1 when a section failed or a figure is one that must not be (a stale row, a token that differs)
"""
_BUDGET_S, _CPU_PATIENCE = 580.0, 4
"""Deadlines are for a GPU; a CPU gets so many times of each."""
_GRACE_S = 15.0
"""Between SIGTERM at a deadline and SIGKILL."""


@dataclass(frozen=True, slots=True)
class Result:
    """One section's end. `status`: "ok", "FAILED" or "left out"."""

    name: str
    status: str
    seconds: float
    found: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def run_section(command: list[str], name: str, out: Path, deadline_s: float) -> Result:
    """Run one section's process to its end, or to its deadline."""
    start_s = time.monotonic()
    out.unlink(missing_ok=True)
    process = subprocess.Popen(dying_with_us(command), start_new_session=True)
    try:
        code: int | None = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(process)
    took_s = time.monotonic() - start_s
    if code is None:
        return Result(name, "FAILED", took_s, reason=f"not over after {deadline_s:.0f} s")
    if code or not out.exists():
        return Result(name, "FAILED", took_s, reason=f"ended with status {code}; its output is above")
    found: dict[str, Any] = json.loads(out.read_text())
    if found["failures"]:
        return Result(name, "FAILED", took_s, found, "; ".join(found["failures"][:3]))
    figures = found["tables"] or found["notes"]
    return Result(name, "ok" if figures else "left out", took_s, found, "; ".join(found["left_out"]))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(
    names: list[str],
    device: str,
    quick: bool,
    budget_s: float,
    done: list[Result],
    write: Callable[[list[Result]], None],
) -> list[Result]:
    """Run the sections in order, except those that are done; `write` what there is after each."""
    results, end_s = [result for result in done if result.name in names], time.monotonic() + budget_s
    known = {result.name for result in results}
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        out = Path(folder) / "result.json"
        for place, name in enumerate(names, 1):
            if name in known:
                continue
            left_s = end_s - time.monotonic() - _GRACE_S
            deadline_s = min(SECTIONS[name][1] * (_CPU_PATIENCE if device == "cpu" else 1), left_s)
            print(f"[{place}/{len(names)}] {name}: at most {deadline_s:.0f} s", file=sys.stderr, flush=True)
            if deadline_s < 5:
                results.append(Result(name, "FAILED", 0.0, reason="no time was left for it; see --only"))
                continue
            command = [sys.executable, "-m", "benchmarks.gpu.sections", name, "--device", device, "--out", str(out)]
            results.append(run_section([*command, *(["--quick"] if quick else [])], name, out, deadline_s))
            write(results)
            print(f"    {results[-1].status} after {results[-1].seconds:.0f} s", file=sys.stderr, flush=True)
    return sorted(results, key=lambda result: names.index(result.name))


def read_done(path: Path | None, head: str) -> list[Result]:
    """Return the sections of a JSON file that ended well on this machine; none where there is no file."""
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text())
    if found["machine"] != head:
        raise ValueError(f"--resume: {path} is of another machine or other versions: {found['machine']}")
    return [Result(**section) for section in found["sections"] if section["status"] == "ok"]


def report(results: list[Result], head: str) -> str:
    """Return the Markdown report."""
    lines = [f"# GPU figures\n\n{head}\n"]
    lines.append(
        table(["section", "status", "s", ""], [[r.name, r.status, f"{r.seconds:.0f}", r.reason] for r in results])
    )
    for result in results:
        if not result.found:
            continue
        lines.append(f"\n## {result.name}\n")
        for one in result.found["tables"]:
            lines.append(f"{one['title']}\n\n{table(one['header'], one['rows'])}\n")
        lines += [f"{note}\n" for note in result.found["notes"]]
        lines += [f"Left out: {why}\n" for why in result.found["left_out"]]
        lines += [f"FAILED: {why}\n" for why in result.found["failures"]]
    return "\n".join(lines)


def describe(device: str) -> str:
    """Return the machine and the versions in a line."""
    import torch

    from benchmarks.speed.serve import cpu_name, versions

    if device == "cpu":
        return f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, no GPU. {versions()}."
    props = torch.cuda.get_device_properties(device)
    memory = f"{props.total_memory / 2**30:.0f} GiB, {props.multi_processor_count} multiprocessors"
    return f"{props.name}, {memory}, CUDA {torch.version.cuda}. {cpu_name()}. {versions()}."


def main() -> int:
    """Run, print the report, write the files."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--device", default="cuda", help="cuda, cuda:N or cpu (default cuda)")
    add("--quick", action="store_true", help="short sizes: to see that everything runs")
    add("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"some of: {', '.join(SECTIONS)}")
    add("--budget-s", type=real(0), help="the whole run ends within this many seconds (default 580; on a CPU 2320)")
    add("--report", type=Path, metavar="FILE.md", help="write the report, which goes to stdout too")
    add("--json", type=Path, metavar="FILE.json", help="write everything as JSON, after each section")
    add("--resume", action="store_true", help="leave out the sections that ended well in the JSON file")
    args = parser.parse_args()
    if args.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            print("bench_gpu: no CUDA device here; --device cpu runs what there is without one", file=sys.stderr)
            return 2
    names = [name for name in SECTIONS if args.only is None or name in args.only]
    head = describe(args.device)
    budget_s = args.budget_s or _BUDGET_S * (_CPU_PATIENCE if args.device == "cpu" else 1)
    try:
        done = read_done(args.json, head) if args.resume else []
    except ValueError as error:
        print(f"bench_gpu: {error}", file=sys.stderr)
        return 2

    def write(results: list[Result]) -> None:
        if args.report:
            args.report.write_text(report(results, head) + "\n")
        if args.json:
            sections = [asdict(result) for result in results]
            # A run that is cut off here leaves the file of the section before, never a part of one.
            part = args.json.with_name(f"{args.json.name}.part")
            part.write_text(json.dumps({"machine": head, "sections": sections}, indent=1) + "\n")
            part.replace(args.json)

    results = run(names, args.device, args.quick, budget_s, done, write)
    write(results)
    print(report(results, head))
    return 1 if any(r.status == "FAILED" for r in results) else 0
