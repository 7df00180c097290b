"""`python -m benchmarks closing`: does every answer end, valid, within a `max_tokens` drawn at random?

Invariant: an answer that ended with STOP or GRAMMAR_CLOSED and that the independent judge finds invalid fails the run.
GRAMMAR_INCOMPLETE is counted, and so is a request that is rejected because every answer of its grammar is longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.client import Call, CallRefused, make_call
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, whole
from benchmarks.harness.server import engine_address
from benchmarks.harness.tables import Progress, table
from benchmarks.harness.validity import COMPLETE, Judge, Verdict
from benchmarks.quality.random_schemas import random_schema
from benchmarks.quality.schemas import DEFECTS, PROMPT_SCHEMA_CHARS, Case, ask, read_cases, spread
from protos.engine.v1 import engine_pb2 as pb

LIMITS = range(4, 121)
"""`max_tokens` is drawn from here."""

EXAMPLES = """
examples:
  python -m benchmarks closing --count 200
  python -m benchmarks closing --count 200 --data maskbench.jsonl --grammar-backend xgrammar

exit code: 0 every complete answer is valid, 1 one is not or the server failed, 2 it could not run
"""


def pairs(count: int, seed: int, cases: Sequence[Case]) -> list[tuple[Case, int]]:
    """Return schemas with their `max_tokens`: all from `cases` where there are some, else made at random."""
    rng = random.Random(seed)
    made = cases or [Case(f"random-{i}", "random", json.dumps(random_schema(seed + i))) for i in range(count)]
    return [(case, rng.choice(LIMITS)) for case in made]


def calls_of(drawn: Sequence[tuple[Case, int]]) -> list[Call]:
    """One call a pair, every other one greedy."""
    calls = []
    for number, (case, limit) in enumerate(drawn):
        sampling = pb.SamplingParams(max_tokens=limit, temperature=0.8 * (number % 2), seed=number)
        hint = case.schema[:PROMPT_SCHEMA_CHARS]
        messages = [("user", f"Write one realistic JSON value that follows this JSON schema:\n{hint}")]
        calls.append(make_call(case.name, messages, schema=case.schema, sampling=sampling))
    return calls


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--count", type=whole(1), default=200, help="pairs (default 200)")
    add("--seed", type=int, default=0, help="of schemas and limits (default 0)")
    add("--data", type=Path, metavar="FILE.jsonl", help="schemas from a file in MaskBench's form")
    add("--concurrency", type=whole(1), default=8)
    add("--address", metavar="HOST:PORT", help="use a running server instead of starting one")
    add_engine_flags(parser, "model", "dtype", "threads", "k", "grammar-backend")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        cases = spread(read_cases(args.data), args.count) if args.data else []
    except (OSError, ValueError) as error:
        parser.error(f"--data: {error}")
    drawn = pairs(args.count, args.seed, cases)
    options = engine_options(args, max_batch_size=max(8, args.concurrency))
    print(f"{len(drawn)} (schema, max_tokens) pairs, {args.grammar_backend}, K={args.k}")
    progress = Progress(len(drawn))
    try:
        with engine_address(args.address, options) as address:
            outcomes = asyncio.run(ask(address, calls_of(drawn), args.concurrency, progress))
    finally:
        progress.close()
    endings: Counter[str] = Counter()
    judge, failed = Judge(), False
    for (case, limit), outcome in zip(drawn, outcomes, strict=True):
        if isinstance(outcome, CallRefused):
            at_once = "sampling.max_tokens" in (outcome.reason or "")
            endings["refused at once: max_tokens" if at_once else f"refused {outcome.status}"] += 1
            failed |= outcome.status in DEFECTS
            if not at_once:
                print(f"refused {case.name}: {outcome.status} {(outcome.reason or '')[:140]}")
            continue
        if outcome.finish not in COMPLETE:
            endings[outcome.finish] += 1
            print(f"{outcome.finish} {case.name} max_tokens={limit}: {outcome.text[:160]!r}")
            failed |= outcome.finish not in ("grammar_incomplete",)
            continue
        judgement = judge.judge(case.schema, outcome.text)
        endings[f"{outcome.finish}/{judgement.verdict.value}"] += 1
        if judgement.verdict is Verdict.INVALID:
            failed = True
            print(f"INVALID {case.name} max_tokens={limit}: {judgement.reason}\n        {outcome.text[:400]}")
    print(table(["ending", "answers"], [[name, str(times)] for name, times in sorted(endings.items())]))
    return int(failed)
