"""`python -m benchmarks under_vllm`: vLLM's CPU build with its own grammar libraries, and with the grammar process.

For each backend a server answers the same schemas. With the grammar process it then serves steady guided streams while
that process is killed. Invariant: an answer that ended with "stop" is judged by jsonschema; a request that the server
refuses or ends with an error is counted by its status.

Not responsible for: installing vLLM and the adapter (see lockstep_grammar/README.md); what bystanders feel under
hostile schemas (`lockstep-bench`).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.flags import harness_parser
from benchmarks.harness.measure import percentile
from benchmarks.harness.systems import SystemFailed
from benchmarks.harness.tables import number, table
from benchmarks.harness.validity import Judge, Verdict
from benchmarks.peers.server_peer import events
from benchmarks.peers.vllm_server import VllmServer
from benchmarks.quality.schemas import PROMPT_SCHEMA_CHARS, Case, read_cases, spread
from gpu_engine.model.embedded import ensure_embedded

BACKENDS = ("xgrammar", "guidance", "lockstep")
STEADY = json.dumps({
    "type": "object", "required": ["name", "tags"], "additionalProperties": False,
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
})  # fmt: skip
KILL_EVERY_S = 2.0

EXAMPLES = """
example:
  python -m tools.grammar_wheel dist && pip install --no-deps --target adapter dist/lockstep_grammar-*.whl
  python -m benchmarks under_vllm --vllm-python VENV/bin/python --adapter adapter --data maskbench_dev.jsonl

The grammar process runs in this Python; --adapter is a folder with the installed wheel, and vLLM itself is unchanged.
"""


class Server(VllmServer):
    """vLLM's server with one backend of structured outputs."""

    def __init__(self, args: argparse.Namespace, backend: str) -> None:
        self.backend = backend
        self._adapter: Path = args.adapter
        self._eager: bool = args.eager
        super().__init__(
            args.vllm_python, args.model or ensure_embedded(), dtype=args.dtype, num_threads=args.threads, batch=8
        )

    def arguments(self) -> list[str]:
        """Return further arguments of the server."""
        name = "guidance" if self.backend == "lockstep" else self.backend
        eager = ["--enforce-eager"] if self._eager else []
        return [*eager, "--structured-outputs-config", json.dumps({"backend": name})]

    def variables(self) -> dict[str, str]:
        """Return further environment variables of the server."""
        if self.backend != "lockstep":
            return {}
        return {
            "LOCKSTEP_VLLM": "1",
            "LOCKSTEP_SIDECAR_PYTHON": sys.executable,
            "PYTHONPATH": str(self._adapter.absolute()),
        }

    def grammar_process(self) -> int | None:
        """Return the process id of the grammar process; None: there is none at this moment."""
        parents: dict[int, int] = {}
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if b"grammar_service\0--dir" in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        ours = [pid for pid in found if self.pid in ancestors(pid, parents) and parents.get(pid) not in found]
        return ours[0] if ours else None


def ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    """Return the parents of a process, the nearest first."""
    found = []
    while (pid := parents.get(pid, 0)) > 0:
        found.append(pid)
    return found


@dataclass(slots=True)
class Outcome:
    """One request."""

    status: str
    """A finish reason, or the HTTP status of an error."""
    text: str = ""
    num_tokens: int = 0


def ask(
    port: int,
    prompt: str,
    constraint: dict[str, Any],
    max_tokens: int,
    *,
    gaps_ms: list[float] | None = None,
) -> Outcome:
    """Send one streamed completion, and wait for its end. `gaps_ms` grows with each piece of the answer."""
    body = {
        "model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.8, "seed": 1, "stream": True,
        "return_token_ids": True, "structured_outputs": constraint,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120.0)
    outcome = Outcome("no finish reason")
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            outcome.status = f"HTTP {response.status}"
            outcome.text = response.read().decode("utf-8", "replace")[:300]
            return outcome
        _read(events(response), outcome, [] if gaps_ms is None else gaps_ms)
    except SystemFailed as error:
        outcome.status, outcome.text = "error", str(error)
    except (OSError, http.client.HTTPException) as error:
        outcome.status = type(error).__name__
    finally:
        connection.close()
    return outcome


def _read(pieces: Iterable[dict[str, Any]], outcome: Outcome, gaps_ms: list[float]) -> None:
    last_s = 0.0
    for event in pieces:
        for choice in event["choices"]:
            outcome.text += choice["text"]
            outcome.num_tokens += len(choice.get("token_ids") or ())
            outcome.status = choice["finish_reason"] or outcome.status
            now_s = time.perf_counter()
            if last_s:
                gaps_ms.append(1e3 * (now_s - last_s))
            last_s = now_s


def answers(server: Server, cases: list[Case], args: argparse.Namespace) -> list[str]:
    """Answer every schema; return the row of the table."""
    judge, counts, tokens, started_s = Judge(), Counter[str](), 0, time.perf_counter()

    def one(case: Case) -> Outcome:
        prompt = f"Write one realistic JSON value that follows this JSON schema:\n{case.schema[:PROMPT_SCHEMA_CHARS]}\n"
        return ask(server.port, prompt, {"json": json.loads(case.schema)}, args.max_tokens)

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(one, cases))
    for case, outcome in zip(cases, outcomes, strict=True):
        tokens += outcome.num_tokens
        verdict = judge.judge(case.schema, outcome.text).verdict
        if outcome.status == "stop":
            counts[verdict.value] += 1
        elif outcome.status == "length":
            counts["length"] += 1
        else:
            counts["refused"] += 1
            print(f"{server.backend}: {case.name}: {outcome.status}: {outcome.text}", file=sys.stderr)
    elapsed_s = time.perf_counter() - started_s
    names = (Verdict.VALID.value, Verdict.INVALID.value, Verdict.UNJUDGED.value, "length", "refused")
    return [server.backend, *(str(counts[name]) for name in names), number(tokens / elapsed_s)]


@dataclass(slots=True)
class Streams:
    """Guided streams without a pause, two at a time, until `stop` is set."""

    port: int
    stop: threading.Event = field(default_factory=threading.Event)
    gaps_ms: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    def run(self, judge: Judge) -> None:
        """Send one request after the other."""
        while not self.stop.is_set():
            constraint = {"json": json.loads(STEADY)}
            outcome = ask(self.port, "Describe a person as JSON.\n", constraint, 64, gaps_ms=self.gaps_ms)
            valid = outcome.status == "stop" and judge.judge(STEADY, outcome.text).verdict is Verdict.VALID
            self.outcomes["valid" if valid else f"not valid: {outcome.status}"] += 1
            if outcome.status not in ("stop", "length"):
                time.sleep(0.2)


def watched(server: Server, during: Callable[[Streams], None]) -> Streams:
    """Run two streams for as long as `during` takes."""
    streams, judge = Streams(server.port), Judge()
    threads = [threading.Thread(target=streams.run, args=(judge,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        during(streams)
    finally:
        streams.stop.set()
        for thread in threads:
            thread.join()
    return streams


def kills(server: Server, args: argparse.Namespace) -> str:
    """Kill the grammar process `args.kills` times under the streams; return what came of it."""
    killed = 0

    def attack(streams: Streams) -> None:
        nonlocal killed
        while killed < args.kills:
            # The streams go on first: a kill of a process that is starting shows nothing.
            pid, seen = server.grammar_process(), len(streams.gaps_ms)
            time.sleep(KILL_EVERY_S)
            if pid is not None and len(streams.gaps_ms) > seen:
                with contextlib.suppress(ProcessLookupError):  # it was found at its end, after the last kill
                    os.kill(pid, signal.SIGKILL)
                    killed += 1

    streams = watched(server, attack)
    p99, most = percentile(streams.gaps_ms, 99), max(streams.gaps_ms, default=0.0)
    ends = ", ".join(f"{count} {name}" for name, count in sorted(streams.outcomes.items()))
    return f"{killed} kills: answers {ends}; gaps p99 {number(p99)} ms, longest {number(most)} ms"


def main() -> None:
    """Run the benchmark, print the tables."""
    parser = harness_parser(__doc__, EXAMPLES)
    parser.add_argument("--vllm-python", type=Path, required=True, help="the Python of an environment with vLLM")
    parser.add_argument("--adapter", type=Path, required=True, help="a folder with the installed lockstep-grammar")
    parser.add_argument("--data", type=Path, required=True, help="schemas in MaskBench's form")
    parser.add_argument("--model", type=Path, help="a model folder (default: the embedded model)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="start vLLM without its compilation, which takes minutes")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--count", type=int, default=200, help="schemas (default: 200)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer (default: 128)")
    parser.add_argument("--kills", type=int, default=20, help="of the grammar process (default: 20)")
    args = parser.parse_args()
    cases = spread(read_cases(args.data), args.count)
    answered, killed = [], []
    for backend in args.backends:
        server = Server(args, backend)
        print(f"{backend}: {server.describe()}, log {server.log}", file=sys.stderr)
        try:
            if cases:
                answered.append(answers(server, cases, args))
                print(answered[-1], file=sys.stderr)
            if backend == "lockstep" and args.kills:
                killed.append(kills(server, args))
                print(killed[-1], file=sys.stderr)
        finally:
            server.close()
    if answered:
        print(table(("backend", "valid", "invalid", "unjudged", "length", "refused", "tokens/s"), answered))
    print("\n".join(killed))
