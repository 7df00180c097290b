"""`python -m tools.fuzz`: runs targets under coverage-guided fuzzing, and keeps each input that shows a defect.

Invariant: the corpus of the repository is read, and only inputs of defects are added to it (`--grow` adds others).
Progress goes to stderr, the report to stdout; status 1 means that a target found a defect.

Not responsible for: running inputs (child.py under atheris, native.py for C).
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tools.fuzz import corpus, native
from tools.fuzz.plain import Current
from tools.fuzz.targets import TARGETS

DESCRIPTION = """
Runs each target with inputs that libFuzzer changes to reach code that no input has reached. An input fails that raises
anything but a typed error, breaks a property, hangs, takes too much memory or crashes the process. docs/testing.md has
the targets and what each one checks.
"""
EPILOG = """
examples:
  make fuzz                                       every target for five minutes
  make fuzz ARGS="--seconds 20"                   every target for 20 s
  make fuzz ARGS="request chat --executions 1000000 --seconds 3600"
  make fuzz ARGS="pattern --max-bytes 200"        short inputs: more of them
  make fuzz ARGS="--run tools/fuzz/corpus/chat/found-1"   one input, with its traceback

Coverage of Python needs atheris: pip install --editable '.[fuzz]'. Native targets need gcc, and take clang where it is.
An input that fails is copied to tools/fuzz/corpus/TARGET/found-..., where tests/tools/fuzz runs it from then on.
"""
_PROGRESS = re.compile(r"^executions (\d+)|^#(\d+)\s.*?cov: (\d+)")
_ARTIFACT = re.compile(r"Test unit written to (\S+)")
_DONE = re.compile(r"^(?:stat::number_of_executed_units:\s+|executed )(\d+)")
_SHOWN_LINES = 40


@dataclass
class Report:
    """What a target did."""

    name: str
    executions: int = 0
    coverage: int = 0
    seconds: float = 0.0
    failed: bool = False
    found: Path | None = None
    """The input in the corpus."""
    output: str = ""

    def __str__(self) -> str:
        rate = self.executions / max(self.seconds, 1e-3)
        state = "ok" if not self.failed else f"FOUND {self.found}" if self.found else "FAILED without an input"
        done = f"{self.executions:>10,} executions {self.seconds:>6.0f} s {rate:>9,.0f}/s"
        return f"{self.name:20} {done} {self.coverage:>6} edges  {state}"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        "python -m tools.fuzz",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = (*TARGETS, *native.TARGETS)
    made.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(names)} (default: all)")
    made.add_argument("--seconds", type=int, default=300, help="of each target (default: %(default)s)")
    made.add_argument("--executions", type=int, default=0, help="end a target after so many (default: no limit)")
    made.add_argument(
        "--max-bytes", type=int, default=0, metavar="N",
        help="longest input; short ones run faster (default: the target's bound)",
    )  # fmt: skip
    made.add_argument("--seed", type=int, default=0, help="of the random numbers (default: another one each time)")
    made.add_argument("--plain", action="store_true", help="make inputs without coverage: more of them, and no atheris")
    made.add_argument("--grow", action="store_true", help="add inputs that reach more code to the corpus")
    made.add_argument("--run", type=Path, metavar="FILE", help="run one file of a target's corpus, without atheris")
    return made


def fuzz(name: str, args: argparse.Namespace, progress: Progress) -> Report:
    """Run one target for its time; return what it did."""
    report, begun_s, lines = Report(name), time.monotonic(), list[str]()
    bar = progress.add_task(name, total=args.seconds)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        with subprocess.Popen(
            _command(name, work, args), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                lines = [*lines[-_SHOWN_LINES:], line]
                _read(line, report)
                report.seconds = time.monotonic() - begun_s
                progress.update(bar, completed=report.seconds, description=f"{name}: {report.executions:,}")
        report.seconds = time.monotonic() - begun_s
        progress.remove_task(bar)
        if process.returncode:
            report.failed, report.output = True, "".join(lines)
            data = _input(work, lines)
            report.found = None if data is None else corpus.keep(name, data)
        elif args.grow and name in TARGETS:
            _grow(name, work / "new")
    return report


def _input(work: Path, lines: Sequence[str]) -> bytes | None:
    """Return the input that ended a process; None: it ended before its first input."""
    written, current = _ARTIFACT.findall("".join(lines)), work / "current"
    if written:
        return Path(written[-1]).read_bytes()
    return Current.read(current) if current.exists() else None


def _command(name: str, work: Path, args: argparse.Namespace) -> list[str]:
    """Return the command of a target. New inputs go to the folder `work`/new, those that fail to `work`."""
    new, known = work / "new", corpus.folder_of(name)
    new.mkdir()
    known.mkdir(parents=True, exist_ok=True)
    flags = [f"-max_total_time={args.seconds}", f"-artifact_prefix={work}/", "-print_final_stats=1", "-reload=0"]
    flags += [f"-runs={args.executions}"] if args.executions else []
    flags += [f"-seed={args.seed}"] if args.seed else []
    flags += [f"-max_len={args.max_bytes}"] if args.max_bytes else []
    if name in native.TARGETS:
        return [str(native.build(name, work)), *flags, str(new), str(known)]
    module = "tools.fuzz.plain" if args.plain else "tools.fuzz.child"
    return [sys.executable, "-m", module, name, *flags, str(new), str(known)]


def _read(line: str, report: Report) -> None:
    if found := _PROGRESS.match(line):
        report.executions = max(report.executions, int(found[1] or found[2]))
        report.coverage = max(report.coverage, int(found[3] or 0))
    if found := _DONE.match(line):
        report.executions = int(found[1])


def _grow(name: str, new: Path) -> None:
    """Add to the corpus the inputs of `new` that reach code which the corpus does not reach."""
    command = [sys.executable, "-m", "tools.fuzz.child", name, "-merge=1", str(corpus.folder_of(name)), str(new)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run_file(path: Path) -> int:
    """Run one file of a corpus; return the exit status, or raise what it shows."""
    # The libraries of all targets take seconds to load.
    from tools.fuzz.targets import load

    name = path.resolve().parent.name
    if name in native.TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            return subprocess.run([native.build(name, Path(folder)), path], check=False).returncode
    target = load(name)
    target.run(path.read_bytes())
    target.close()
    print(f"{path}: nothing to report")
    return 0


def _chosen(args: argparse.Namespace) -> Iterator[str]:
    """Yield the targets. Raises SystemExit for a name that is none."""
    known = (*TARGETS, *native.TARGETS)
    for name in args.targets or known:
        if name not in known:
            raise SystemExit(f"no target {name!r}; there are {', '.join(known)}")
        yield name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(arguments)
    if args.run is not None:
        return run_file(args.run)
    if not args.plain and importlib.util.find_spec("atheris") is None:
        print("atheris is not installed, so coverage guides no Python target: pip install --editable '.[fuzz]'")
        args.plain = True
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    failed = 0
    for name in _chosen(args):
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            report = fuzz(name, args, progress)
        print(report, flush=True)
        if report.failed:
            failed += 1
            print(report.output, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
