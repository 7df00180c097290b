"""`lockstep-bench`: asks a server the questions of SpecGrammarBench, and prints one table.

Not responsible for: starting servers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lockstep_bench import DATA_VERSION, VERSION
from lockstep_bench.cases import read_data
from lockstep_bench.endpoint import Endpoint
from lockstep_bench.http_endpoint import DIALECTS, HttpEndpoint
from lockstep_bench.report import read, table, write
from lockstep_bench.tracks import TRACKS, Finding, Run, as_json

EXAMPLES = """
tracks:
  valid       are guided answers valid? JSON Schema, regex, choice, GBNF
  equal       are answers with drafts those without? greedy, and drawn with a seed
  cost        the pace of guided streams over that of free ones
  drafts      the pace with drafts over that without
  bystanders  gaps of steady streams while hostile schemas arrive, over gaps without them
  keywords    for each keyword of JSON Schema: enforced, refused, weakened in silence, or not shown
  complete    is JSON whole where max_tokens ends it?

examples:
  lockstep-bench run --url http://127.0.0.1:8000 --json mine.json
  lockstep-bench run --url http://127.0.0.1:8000 --without-drafts http://127.0.0.1:8001 --tracks equal,drafts
  lockstep-bench run --grpc 127.0.0.1:50051 --json grpc.json
  lockstep-bench table mine.json theirs.json
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="lockstep-bench",
        description="SpecGrammarBench: how well a server keeps to grammars, and what they and drafts cost.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"lockstep-bench {VERSION}, data {DATA_VERSION}")
    commands = made.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="ask a server", epilog=EXAMPLES, formatter_class=made.formatter_class)
    server = run.add_mutually_exclusive_group(required=True)
    server.add_argument("--url", help="a server of OpenAI's HTTP API")
    server.add_argument("--grpc", metavar="HOST:PORT", help="a server of Lockstep's gRPC API (needs the extra grpc)")
    run.add_argument("--without-drafts", metavar="URL", help="the same model without drafts, of the same API")
    run.add_argument(
        "--dialect",
        choices=("auto", *DIALECTS),
        default="auto",
        help="the fields for grammars (default: by the list of models, else openai)",
    )
    run.add_argument("--model", help="name of the model (default: the first one served)")
    run.add_argument("--api-key-env", default="OPENAI_API_KEY", help="variable of the key (default: %(default)s)")
    run.add_argument("--tracks", default=",".join(TRACKS), help="some of them, separated by commas (default: all)")
    run.add_argument("--rounds", type=_positive, default=2, help="of the tracks cost and drafts (default: %(default)s)")
    run.add_argument("--concurrency", type=_positive, default=4, help="requests at a time (default: %(default)s)")
    run.add_argument("--attack-s", type=float, default=20.0, help="seconds of bystanders (default: %(default)s)")
    run.add_argument(
        "--attacks-per-s", type=float, default=4.0, help="hostile requests a second (default: %(default)s)"
    )
    run.add_argument("--name", help="of the column (default: what the server says of itself)")
    run.add_argument("--json", type=Path, metavar="FILE", help="write the result file")
    tables = commands.add_parser("table", help="print a table of result files")
    tables.add_argument("results", nargs="+", type=Path, metavar="FILE")
    return made


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _endpoint(args: argparse.Namespace, where: str) -> Endpoint:
    if args.grpc:
        from lockstep_bench.grpc_endpoint import GrpcEndpoint

        return GrpcEndpoint(where)
    key = os.environ.get(args.api_key_env, "")
    return HttpEndpoint(where, dialect=args.dialect, model=args.model, api_key=key)


async def _run(args: argparse.Namespace, names: Sequence[str], command: str) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        endpoint = _endpoint(args, args.grpc or args.url)
        stack.push_async_callback(endpoint.aclose)
        about = await endpoint.about()
        plain = None
        if args.without_drafts:
            plain = _endpoint(args, args.without_drafts)
            stack.push_async_callback(plain.aclose)
            await plain.about()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        task = progress.add_task(about.server, total=None)
        run = Run(
            read_data(),
            endpoint,
            plain,
            args.rounds,
            args.concurrency,
            args.attack_s,
            args.attacks_per_s,
            partial(progress.advance, task),
        )
        progress.update(task, total=run.total(names))
        findings: list[Finding] = []
        for name in names:
            progress.update(task, description=f"{about.server}: {name}")
            findings.append(await TRACKS[name](run))
    return {
        "bench_version": VERSION,
        "data_version": DATA_VERSION,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": _machine(),
        "name": args.name or about.server,
        "server": about.server,
        "model": about.model,
        "tracks": as_json(findings),
    }


def _machine() -> str:
    """Return the processor that asks, which is the server's where both run on one machine."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # no Linux, or a processor without a name: the machine's kind is all there is
    return f"{name}, {os.cpu_count()} cores"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 where there is no server or no such file, 2 for wrong arguments."""
    made = parser()
    args = made.parse_args(arguments)
    try:
        if args.command == "table":
            print(table([read(path) for path in args.results]))
            return 0
        names = [name.strip() for name in args.tracks.split(",")]
        if unknown := [name for name in names if name not in TRACKS]:
            made.error(f"--tracks: there is no {', '.join(unknown)}; tracks: {', '.join(TRACKS)}")
        command = shlex.join(["lockstep-bench", *(sys.argv[1:] if arguments is None else arguments)])
        result = asyncio.run(_run(args, names, command))
    except (ConnectionError, ValueError, ModuleNotFoundError) as error:
        print(f"lockstep-bench: {error}", file=sys.stderr)
        return 1
    for track, found in result["tracks"].items():
        for note in found["notes"][:20]:
            print(f"{track}: {note}")
    print(f"\n{result['server']}, {result['model']}, data {DATA_VERSION}, {result['machine']}\n\n{table([result])}")
    if args.json:
        write(result, args.json)
    return 0
