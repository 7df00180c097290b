"""`compile`: send a grammar to a running server ahead of time, print its id and what it costs.

The invariant: the id alone goes to stdout, so that a script can pass it on; everything else goes to stderr. Not here:
the flags that make a grammar (`request_flags.py`).
"""

from __future__ import annotations

import argparse
import sys

from gpu_engine.cli.client import Client
from gpu_engine.cli.client_access import Access
from gpu_engine.cli.request_flags import add_grammar_flags, build_grammar, seconds
from protos.engine.v1 import engine_pb2 as pb

HELP = """\
Compile a grammar ahead of time: its id goes to stdout, its cost and warnings to stderr.

Examples:
  compile --schema city.json
  generate --chat "Describe Paris." --grammar-id "$(lockstep compile --schema city.json)"
  compile --lark query.lark --backend auto       the first library that enforces all of it

Exit status: 0 it compiled; 1 the server refused it and says why; 2 wrong usage.
"""


def add_compile_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a grammar and `--timeout`."""
    add_grammar_flags(parser, "What to compile; one is required.")
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help="give up after this long")


async def compile_grammar(flags: argparse.Namespace, grammar: pb.Grammar, access: Access) -> None:
    """Compile and print. Raises AioRpcError."""
    async with Client(flags.server, access) as client:
        response = await client.compile(grammar, timeout_s=flags.timeout)
    print(response.grammar_id)
    print(cost(response), file=sys.stderr)
    for warning in response.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def grammar_of(flags: argparse.Namespace) -> pb.Grammar:
    """Return the grammar that the flags make. Raises ValueError without one, OSError for an unreadable file."""
    grammar = build_grammar(flags)
    if grammar is None:
        raise ValueError("a grammar is required: --schema, --regex, --choice, --json, --ebnf, --lark, --structural-tag")
    return grammar


def cost(response: pb.CompileResponse) -> str:
    """Return one line on what a grammar costs."""
    backend = pb.Backend.Name(response.backend).removeprefix("BACKEND_").lower()
    when = "compiled before" if response.cache_hit else f"compiled in {response.compile_ms:.1f} ms"
    least = f"no answer below {response.min_tokens} tokens" if response.min_tokens else "shortest answer not known"
    closing = response.closing_tokens
    ends = f"led to its end from max_tokens {closing} on" if closing else "no way to its end was found"
    return f"{backend}, {when}, {response.memory_bytes / 1024:.0f} KiB, {least}, {ends}"
