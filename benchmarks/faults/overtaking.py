"""`python -m benchmarks overtaking`: how long ordinary schemas wait while other clients compile hostile grammars.

Invariant: the compiler, its queue and its worker processes are the grammar process's own, without a server next to
them. Each grammar is new, so no cache answers.
Not responsible for: streams that run meanwhile (see isolation.py).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.flags import harness_parser, whole
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
"""Between two ordinary schemas."""

EXAMPLES = """
examples:
  python -m benchmarks overtaking --tokenizer DIR                    llguidance, 1 and 4 hostile clients
  python -m benchmarks overtaking --tokenizer DIR --backend xgrammar --clients 8 --hostile properties
  python -m benchmarks overtaking --tokenizer DIR --hostile small --clients 16 --shares

hostile grammars:
  enum        20,000 strings
  recursion   a left-recursive EBNF of a few hundred bytes
  properties  4,000 required properties
  small       150 optional properties: half a second of xgrammar, and a text of the size that people write

reading the table:
  quick    ordinary schemas that were compiled meanwhile: five properties, a new one after each pause of 0.1 s
  median   and longest: from the request for one to its result
  hostile  compilations of the other clients that ended meanwhile, with or without a result
"""


def main() -> int:
    """Run the benchmark, print the table."""
    parser = harness_parser(__doc__, EXAMPLES)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json, or a directory with one")
    parser.add_argument("--backend", default="llguidance", choices=NAMES)
    parser.add_argument(
        "--workers", type=whole(1), default=1, help="compile_workers of the grammar process (default: 1)"
    )
    parser.add_argument("--clients", type=whole(1), nargs="+", default=[1, 4], help="hostile clients (default: 1 4)")
    parser.add_argument("--hostile", nargs="+", default=["properties"], choices=_HOSTILE, help="(default: properties)")
    parser.add_argument("--quick", type=whole(1), default=40, help="ordinary schemas that are timed (default: 40)")
    parser.add_argument("--shares", action="store_true", help="the server knows its clients: each has its turn")
    args = parser.parse_args()
    header = ("hostile", "clients", "quick", "median", "longest", "hostile ended")
    print(table(header, asyncio.run(_measure(args))))
    return 0


async def _measure(args: argparse.Namespace) -> list[list[str]]:
    vocabulary, rows = read_vocabulary(args.tokenizer, ()), []
    for hostile, clients in itertools.product(args.hostile, args.clients):
        print(f"{args.backend}, {clients} hostile clients: {hostile}", file=sys.stderr)
        config = GrammarConfig(dir=".", backend=args.backend, compile_workers=args.workers, cache_bytes=0)
        compiler = Compiler(config, vocabulary)
        try:
            await compiler.ready()
            await _timed(compiler, args.backend, Kind.REGEX, "warm")
            ended = [0]
            floods = [asyncio.create_task(_flood(compiler, args, hostile, client, ended)) for client in range(clients)]
            waits = await _quick(compiler, args)
            for flood in floods:
                flood.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
        finally:
            await compiler.close()
        times = (number(percentile(waits, 50) * 1e3, 0, " ms"), number(max(waits) * 1e3, 0, " ms"))
        rows.append([hostile, str(clients), str(len(waits)), *times, str(ended[0])])
    return rows


async def _flood(compiler: Compiler, args: argparse.Namespace, hostile: str, client: int, ended: list[int]) -> None:
    """Compile one hostile grammar after the other, and count them, whatever their results."""
    share = Share(f"hostile {client}") if args.shares else NO_TENANT
    for i in itertools.count():
        kind, source = _HOSTILE[hostile](f"{client}_{i}")
        await _timed(compiler, args.backend, kind, source, share)
        ended[0] += 1


async def _quick(compiler: Compiler, args: argparse.Namespace) -> list[float]:
    """Return the time of each ordinary schema."""
    waits: list[float] = []
    share = Share("quick") if args.shares else NO_TENANT
    for i in range(args.quick):
        await asyncio.sleep(PAUSE_S)
        names = ("name", "age", "tags", "city", f"key{i}")
        kinds = ({"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "string"}})
        properties = {name: kinds[at % len(kinds)] for at, name in enumerate(names)}
        schema = json.dumps({"type": "object", "properties": properties, "required": list(names)})
        waits.append(await _timed(compiler, args.backend, Kind.JSON_SCHEMA, schema, share))
    return waits


async def _timed(compiler: Compiler, backend: str, kind: Kind, source: str, share: Share = NO_TENANT) -> float:
    begun_s = time.perf_counter()
    try:
        await compiler.compile(kind, source, Whitespace.COMPACT, backend, share=share)
    except GrammarServiceError as error:
        print(f"  {error}", file=sys.stderr)
    return time.perf_counter() - begun_s


def _enum(name: str) -> tuple[Kind, str]:
    values = [f"{name}{at:x}" for at in range(20_000)]
    return Kind.JSON_SCHEMA, json.dumps({"enum": values}, separators=(",", ":"))


def _recursion(name: str) -> tuple[Kind, str]:
    rules = [f'r{at} ::= r{at} r{(at + 1) % 12} "{name}" | r{(at + 5) % 12} r{at} | "x{at}"' for at in range(12)]
    return Kind.EBNF, "\n".join(["root ::= r0", *rules])


def _properties(name: str) -> tuple[Kind, str]:
    properties = {f"p{name}_{at}": {"type": "string"} for at in range(4000)}
    return Kind.JSON_SCHEMA, json.dumps({"type": "object", "properties": properties, "required": list(properties)})


def _small(name: str) -> tuple[Kind, str]:
    properties = {f"p{name}_{at}": {"type": "string"} for at in range(150)}
    return Kind.JSON_SCHEMA, json.dumps({"properties": properties, "additionalProperties": False})


_HOSTILE: dict[str, Callable[[str], tuple[Kind, str]]] = {
    "enum": _enum,
    "recursion": _recursion,
    "properties": _properties,
    "small": _small,
}
"""A grammar that no other call has had, by a name of its own."""
