"""`python -m benchmarks overtaking`: how long small grammars wait while other clients compile hostile ones.

Invariant: the compiler, its queue and its worker processes are the grammar process's own, without a server next to
them. Each grammar is new, so no cache answers.
Not responsible for: streams that run meanwhile (see isolation.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from benchmarks.harness.measure import percentile
from benchmarks.harness.tables import number, table
from benchmarks.quality.maskbench import read_vocabulary
from grammar_service.backends.registry import NAMES
from grammar_service.compile.compiler import Compiler
from grammar_service.compile.queue import NO_TENANT, Share
from grammar_service.config import GrammarConfig
from grammar_service.errors import GrammarServiceError
from grammar_service.grammar.value import Kind, Whitespace

PAUSE_S = 0.1
"""Between two small grammars."""

EXAMPLES = """
examples:
  python -m benchmarks overtaking --tokenizer DIR                    llguidance, 1 and 4 hostile clients
  python -m benchmarks overtaking --tokenizer DIR --backend xgrammar --clients 8
  python -m benchmarks overtaking --tokenizer DIR --properties 300 --rounds 20 --clients 16 --shares

reading the table:
  quick    small grammars that were compiled meanwhile: a new regular expression after each pause of 0.1 s
  median   and longest: from the request for one to its result
  hostile  compilations of the other clients that ended, each with so many required properties, and their median time
"""


def main() -> int:
    """Run the benchmark, print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks overtaking",
        description=__doc__.splitlines()[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json, or a directory with one")
    parser.add_argument("--backend", default="llguidance", choices=NAMES)
    parser.add_argument("--workers", type=int, default=1, help="compile_workers of the grammar process (default: 1)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4], help="hostile clients (default: 1 4)")
    parser.add_argument("--properties", type=int, default=3500, help="of a hostile schema (default: 3500)")
    parser.add_argument("--rounds", type=int, default=2, help="hostile schemas of each client (default: 2)")
    parser.add_argument("--shares", action="store_true", help="the server knows its clients: each has its turn")
    args = parser.parse_args()
    print(table(("hostile clients", "quick", "median", "longest", "hostile", "median"), asyncio.run(_measure(args))))
    return 0


async def _measure(args: argparse.Namespace) -> list[list[str]]:
    vocabulary, rows = read_vocabulary(args.tokenizer, ()), []
    for clients in args.clients:
        print(f"{args.backend}, {clients} hostile clients", file=sys.stderr)
        config = GrammarConfig(dir=".", backend=args.backend, compile_workers=args.workers, cache_bytes=0)
        compiler = Compiler(config, vocabulary)
        try:
            await compiler.ready()
            await _timed(compiler, args.backend, Kind.REGEX, "warm")
            hostile = [asyncio.create_task(_hostile(compiler, args, client)) for client in range(clients)]
            waits = await _quick(compiler, args.backend, hostile)
            took = [seconds for task in hostile for seconds in await task]
        finally:
            await compiler.close()
        quick = (number(percentile(waits, 50) * 1e3, 0, " ms"), number(max(waits) * 1e3, 0, " ms"))
        slow = (str(len(took)), number(percentile(took, 50), 1, " s"))
        rows.append([str(clients), str(len(waits)), *quick, *slow])
    return rows


async def _hostile(compiler: Compiler, args: argparse.Namespace, client: int) -> list[float]:
    """Return the time of each compilation, whatever its result."""
    took = []
    for i in range(args.rounds):
        properties = {f"p{client}_{i}_{at}": {"type": "string"} for at in range(args.properties)}
        schema = json.dumps({"type": "object", "properties": properties, "required": list(properties)})
        share = Share(f"hostile {client}") if args.shares else NO_TENANT
        took.append(await _timed(compiler, args.backend, Kind.JSON_SCHEMA, schema, share))
    return took


async def _quick(compiler: Compiler, backend: str, hostile: list[asyncio.Task[list[float]]]) -> list[float]:
    """Return the time of each small grammar, until the hostile ones have ended."""
    waits: list[float] = []
    while not waits or not all(task.done() for task in hostile):
        await asyncio.sleep(PAUSE_S)
        waits.append(await _timed(compiler, backend, Kind.REGEX, f"[a-z]{{3}}x{len(waits)}"))
    return waits


async def _timed(compiler: Compiler, backend: str, kind: Kind, source: str, share: Share = NO_TENANT) -> float:
    begun_s = time.perf_counter()
    try:
        await compiler.compile(kind, source, Whitespace.COMPACT, backend, share=share)
    except GrammarServiceError as error:
        print(f"  {error}", file=sys.stderr)
    return time.perf_counter() - begun_s


if __name__ == "__main__":
    sys.exit(main())
