"""`python -m benchmarks.faults.compile_alone`: compiles the flood's schemas without a server; a control of `isolation`.

Invariant: each schema is compiled as a compile worker does it, with the worker's own functions and priority, and the
result is discarded. A stream that runs next to it is slowed only by the machine: caches, memory, cores.
Not responsible for: a worker's pipe and limits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.faults.attacks import distinct_schema
from benchmarks.quality.maskbench import read_vocabulary
from grammar_service.backends.registry import load_backend
from grammar_service.compile.proof import prove
from grammar_service.compile.worker import NICENESS, lower_priority
from grammar_service.completion.texts import TokenTexts
from grammar_service.grammar.value import Grammar, Kind, Whitespace


def main() -> None:
    """Compile until killed, or so many."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults.compile_alone", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json, or a directory with one")
    parser.add_argument("--backend", default="llguidance", choices=("llguidance", "xgrammar"))
    parser.add_argument("--nice", type=int, default=NICENESS)
    parser.add_argument("--count", type=int, default=sys.maxsize, help="end after so many (default: never)")
    args = parser.parse_args()
    lower_priority(args.nice)
    vocabulary = read_vocabulary(args.tokenizer, ())
    backend, texts = load_backend(args.backend, vocabulary), TokenTexts.of(vocabulary)
    for number in range(args.count):
        grammar = Grammar(Kind.JSON_SCHEMA, distinct_schema(number), Whitespace.BOUNDED)
        prove(backend, grammar, backend.compile(grammar, allow_unenforced=False), texts)


if __name__ == "__main__":
    main()
