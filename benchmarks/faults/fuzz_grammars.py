"""`python -m benchmarks fuzz_grammars --data FILE`: does a sidecar answer every grammar?

Invariant: the answer to a grammar is OK or a typed error, within its time limit. A sidecar that dies, hangs, answers
INTERNAL or keeps growing fails the run, and the grammars that caused it are written to a file.
Not responsible for: whether an answer is right (see quality/schemas.py and quality/maskbench.py).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from benchmarks.faults.fuzz_cases import KINDS, FuzzCase, fuzz_case
from benchmarks.harness.flags import harness_parser, list_of, one_of, real, whole
from benchmarks.harness.tables import Progress, number, table
from benchmarks.quality.schemas import read_cases
from protos.grammar.v1 import grammar_pb2 as pb
from protos.grammar.v1 import grammar_pb2_grpc as pb_grpc

EXAMPLES = """
The file is in MaskBench's form, one JSON object a line with at least "name" and "schema"; its schemas are mutated.

examples:
  python -m benchmarks fuzz_grammars --count 10000 --data maskbench.jsonl
  python -m benchmarks fuzz_grammars --count 500 --data maskbench.jsonl --seed 7 --backends llguidance
  python -m benchmarks fuzz_grammars --data maskbench.jsonl --only 4711       one case again, with its answer

exit code: 0 every grammar was answered; 1 a crash, a hang, an INTERNAL or a leak; 2 it could not run
"""

BACKENDS = {"llguidance": pb.BACKEND_LLGUIDANCE, "xgrammar": pb.BACKEND_XGRAMMAR, "auto": pb.BACKEND_AUTO}
DEFECTS = frozenset({"INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})
HANG_S = 90.0
"""Beyond the limit of a compilation: the time of the queue, and of workers that start anew."""

LEAK_SHARE = 0.25
LEAK_BYTES = 96 << 20
"""A sidecar may grow by more than both in the second half; by then its cache has been full for long."""

_START_S = 120.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Findings:
    """What came of the cases."""

    outcomes: collections.Counter[tuple[str, str, str]] = field(default_factory=collections.Counter)
    """(kind, backend, status) -> cases."""
    slowest_s: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    """By kind: the longest answer, queue included."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    restarts: int = 0
    rss: list[int] = field(default_factory=list)
    """Bytes: at the beginning, at half, at the end."""

    @property
    def leaks(self) -> bool:
        """Whether the sidecar grew in the second half."""
        _, half, end = self.rss
        return end - half > max(LEAK_BYTES, LEAK_SHARE * half)


class Sidecar:
    """A sidecar process of our own with a tokenizer, started again when it dies."""

    def __init__(self, directory: Path, tokenizer_json: bytes, flags: Sequence[str]) -> None:
        self._directory = directory
        self._tokenizer_json = tokenizer_json
        self._flags = flags
        self._process: subprocess.Popen[bytes]
        self._channel: grpc.aio.Channel
        self.stub: pb_grpc.GrammarAsyncStub
        self.starts = 0

    async def start(self) -> None:
        """Start it and give it the tokenizer. Raises TimeoutError or AioRpcError."""
        directory = self._directory / str(self.starts)
        self.starts += 1
        command = [sys.executable, "-m", "grammar_service", "--dir", str(directory), *self._flags]
        self._process = await asyncio.to_thread(subprocess.Popen, command, cwd=ROOT)
        options = [("grpc.max_send_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(f"unix:{directory}/grammar.sock", options=options)
        self.stub = pb_grpc.GrammarStub(self._channel)
        size = len(json.loads(self._tokenizer_json)["model"]["vocab"])
        request = pb.ConfigureRequest(tokenizer_json=self._tokenizer_json, vocab_size=size, stop_token_ids=[2])
        await self.stub.Configure(request, timeout=_START_S, wait_for_ready=True)

    @property
    def died(self) -> bool:
        """It ended by itself."""
        return self._process.poll() is not None

    @property
    def rss(self) -> int:
        """Bytes of its own memory that are in use (without its compile workers)."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS:"))

    async def close(self) -> None:
        """End it."""
        await self._channel.close(None)
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, 20)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Fuzz:
    """Sends cases, several at once, and notes what comes back."""

    def __init__(self, sidecar: Sidecar, options: argparse.Namespace, schemas: Sequence[Any]) -> None:
        self.findings = Findings()
        self._sidecar = sidecar
        self._options = options
        self._schemas = schemas
        self._reviving = asyncio.Lock()

    async def run(self, numbers: Sequence[int], progress: Progress) -> None:
        """Send the cases with these numbers in two halves."""
        await self._one(fuzz_case([{}], 0, 0), "llguidance")
        self.findings.outcomes.clear()
        self.findings.rss.append(self._sidecar.rss)
        middle = len(numbers) // 2
        for half in (numbers[:middle], numbers[middle:]):
            waiting = iter(half)
            await asyncio.gather(*(self._worker(waiting, progress) for _ in range(self._options.concurrency)))
            await self._revive()
            self.findings.rss.append(self._sidecar.rss)

    async def _worker(self, waiting: Any, progress: Progress) -> None:
        backends = self._options.backends
        for at in waiting:
            case = fuzz_case(self._schemas, self._options.seed, at)
            await self._one(case, backends[at // len(KINDS) % len(backends)])
            progress.step(f"{case.number} {case.kind}")

    async def _one(self, case: FuzzCase, backend: str) -> None:
        request = pb.CompileRequest(
            kind=cast("pb.Kind", pb.Kind.Value(f"KIND_{case.kind.upper()}")),
            source=case.source,
            whitespace=cast("pb.Whitespace", case.whitespace),
            backend=BACKENDS[backend],
            allow_unenforced=case.allow_unenforced,
        )
        begun = time.monotonic()
        status, message = "OK", ""
        try:
            await self._sidecar.stub.Compile(request, timeout=self._options.compile_timeout_s + HANG_S)
        except grpc.aio.AioRpcError as error:
            status, message = error.code().name, error.details() or ""
        took_s = time.monotonic() - begun
        findings = self.findings
        findings.outcomes[case.kind, backend, status] += 1
        findings.slowest_s[case.kind] = max(findings.slowest_s[case.kind], took_s)
        if self._options.only is not None:
            print(
                f"{case.number} {case.kind} {backend}: {status} after {took_s:.2f} s: {message}\n{case.source[:2000]}"
            )
        if status in DEFECTS or (not message and status != "OK"):
            findings.failures.append(
                {"backend": backend, "status": status, "message": message} | dataclasses.asdict(case)
            )
        if status == "UNAVAILABLE":
            await self._revive()

    async def _revive(self) -> None:
        async with self._reviving:
            if self._sidecar.died:
                self.findings.restarts += 1
                await self._sidecar.start()


def report(findings: Findings, compile_timeout_s: float) -> bool:
    """Print the tables; return whether the run failed."""
    statuses = sorted({status for _, _, status in findings.outcomes})
    rows = []
    for kind, backend in sorted({(kind, backend) for kind, backend, _ in findings.outcomes}):
        rows.append([kind, backend, *(str(findings.outcomes[kind, backend, status]) for status in statuses)])
    print(table(["kind", "backend", *statuses], rows))
    slowest = max(findings.slowest_s.values(), default=0.0)
    begin, half, end = (size / (1 << 20) for size in findings.rss)
    over = max(0.0, slowest - compile_timeout_s)
    print()
    print(f"slowest answer: {slowest:.2f} s, {over:.2f} s over the limit (the queue, and workers that start anew)")
    print(f"sidecar: {number(begin, 0)} MiB at the beginning, {number(half, 0)} at half, {number(end, 0)} at the end")
    leak = "yes" if findings.leaks else "no"
    print(f"sidecar restarts: {findings.restarts}; failures: {len(findings.failures)}; leak: {leak}")
    for failure in findings.failures[:20]:
        print("  {number} {kind} {backend} {status}: {message:.150}".format(**failure))
    return bool(findings.failures or findings.restarts or findings.leaks)


def read_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FILE", help="schemas to mutate, in MaskBench's form")
    add("--count", type=whole(1), default=10_000, help="grammars to send (default 10000)")
    add("--seed", type=int, default=1, help="another seed, other grammars (default 1)")
    add("--only", type=int, metavar="NUMBER", help="send only this case and print it")
    add(
        "--backends",
        type=list_of(one_of(BACKENDS)),
        default="llguidance,xgrammar,auto",
        help="backends, one case each in rotation (default: all three)",
    )
    add("--concurrency", type=whole(1), default=4, help="grammars in flight (default 4)")
    add("--compile-timeout-s", type=real(0), default=2.0, help="the sidecar's setting (default 2)")
    add("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json (default: the embedded model's)")
    add("--failures", type=Path, default=Path("fuzz_failures.jsonl"), metavar="FILE", help="where failures are written")
    return parser.parse_args()


async def fuzz(options: argparse.Namespace, schemas: Sequence[Any], tokenizer_json: bytes, directory: Path) -> Findings:
    """Run against its own sidecar in `directory`."""
    flags = (
        "--compile-timeout-s",
        str(options.compile_timeout_s),
        "--cache-bytes",
        str(32 << 20),
        "--log-level",
        "error",
    )
    sidecar = Sidecar(directory, tokenizer_json, flags)
    await sidecar.start()
    numbers = range(options.count) if options.only is None else [options.only]
    progress = Progress(len(numbers))
    try:
        run = Fuzz(sidecar, options, schemas)
        await run.run(numbers, progress)
    finally:
        progress.close()
        await sidecar.close()
    return run.findings


def main() -> int:
    """Run and report."""
    options = read_arguments()
    try:
        schemas = [json.loads(case.schema) for case in read_cases(options.data)]
        if options.tokenizer is None:
            from gpu_engine.model.embedded import ensure_embedded

            options.tokenizer = ensure_embedded() / "tokenizer.json"
        tokenizer_json = options.tokenizer.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as directory:
        findings = asyncio.run(fuzz(options, schemas, tokenizer_json, Path(directory)))
    failed = report(findings, options.compile_timeout_s)
    if findings.failures:
        options.failures.write_text(
            "".join(json.dumps(failure) + "\n" for failure in findings.failures), encoding="utf-8"
        )
        print(f"written to {options.failures}")
    return int(failed)
