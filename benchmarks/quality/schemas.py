"""`python -m benchmarks schemas --data FILE.jsonl`: does every complete answer satisfy its schema?

Invariant: an answer that ended with STOP and that the independent judge finds invalid fails the run. Rejected schemas
are counted by status and reason; a rejection does not fail the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.client import Call, CallRefused, EngineClient, make_call
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, list_of, real, whole
from benchmarks.harness.measure import Answer
from benchmarks.harness.server import engine_address
from benchmarks.harness.tables import Progress, table
from benchmarks.harness.validity import Judge, Tally
from protos.engine.v1 import engine_pb2 as pb

PROMPT_SCHEMA_CHARS = 1200
"""A longer schema is cut in the prompt (never in the grammar), so that the prompt fits the context."""

DEFECTS = ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED")
"""Statuses that are the server's fault and fail the run."""

EXAMPLES = """
The file is in MaskBench's form, one JSON object a line with at least "name", "group" and "schema".

examples:
  python -m benchmarks schemas --data maskbench.jsonl --count 100
  python -m benchmarks schemas --data maskbench.jsonl --grammar-backend xgrammar --temperatures 0.8
  python -m benchmarks schemas --data maskbench.jsonl --address 127.0.0.1:50051 --group Github_easy

exit code: 0 every complete answer is valid, 1 one is not or the server failed, 2 it could not run
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One schema of the file; `schema` is JSON text."""

    name: str
    group: str
    schema: str


def read_cases(path: Path, group: str | None = None) -> list[Case]:
    """Read a MaskBench-style file.

    Raises:
        ValueError: a line is not such an object; the message names it.

    """
    cases = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            case = Case(str(raw["name"]), str(raw.get("group", "")), json.dumps(raw["schema"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: not an object with name, group and schema: {error!r}") from error
        if group is None or case.group == group:
            cases.append(case)
    return cases


def spread(cases: Sequence[Case], count: int) -> list[Case]:
    """Return `count` cases taken evenly from the whole list; all of them when there are fewer."""
    if count >= len(cases):
        return list(cases)
    return [cases[number * len(cases) // count] for number in range(count)]


def make_calls(cases: Sequence[Case], temperature: float, max_tokens: int) -> list[Call]:
    """One call per case, seeded by its place."""
    calls = []
    for number, case in enumerate(cases):
        sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=number)
        hint = case.schema[:PROMPT_SCHEMA_CHARS]
        messages = [("user", f"Write one realistic JSON value that follows this JSON schema:\n{hint}")]
        calls.append(make_call(case.name, messages, schema=case.schema, sampling=sampling))
    return calls


async def ask(address: str, calls: Sequence[Call], concurrency: int, progress: Progress) -> list[Answer | CallRefused]:
    """Run every call; a refusal is a result, in its place."""
    client = EngineClient(address)
    gate = asyncio.Semaphore(concurrency)

    async def one(call: Call) -> Answer | CallRefused:
        async with gate:
            try:
                return await client.generate(call)
            except CallRefused as refusal:
                return refusal
            finally:
                progress.step(call.name)

    try:
        return list(await asyncio.gather(*(one(call) for call in calls)))
    finally:
        await client.close()


def count(tally: Tally, case: Case, outcome: Answer | CallRefused, judge: Judge) -> None:
    """Enter one outcome into a tally."""
    if isinstance(outcome, CallRefused):
        tally.refused(outcome.status, outcome.reason.splitlines()[0][:100] if outcome.reason else "no reason given")
    else:
        tally.answered(case.name, outcome.finish, outcome.text, case.schema, judge)


def endings_table(tallies: dict[str, Tally]) -> str:
    """Return endings per group, with a line of totals."""
    endings = sorted({ending for tally in tallies.values() for ending in tally.endings})
    rows = [[name, *(str(tally.endings[ending]) for ending in endings)] for name, tally in tallies.items()]
    totals = [str(sum(tally.endings[ending] for tally in tallies.values())) for ending in endings]
    return table(["group", *endings], [*rows, ["all", *totals]])


def report(tallies: dict[str, Tally], top: int = 15) -> bool:
    """Print the tables, every invalid answer and the refusals; return whether the run failed."""
    print(endings_table(tallies))
    refusals = sum((tally.refusals for tally in tallies.values()), start=Tally().refusals)
    for reason, times in refusals.most_common(top):
        print(f"refused {times}x {reason}")
    for tally in tallies.values():
        for name, reason in tally.unjudged:
            print(f"unjudged {name}: {reason[:160]}")
        for name, reason, text in tally.invalid:
            print(f"INVALID {name}: {reason}\n        {text[:400]}")
    defects = sum(tally.endings[f"refused {status}"] for tally in tallies.values() for status in DEFECTS)
    valid = sum(tally.endings["stop/valid"] for tally in tallies.values())
    if defects:
        print(f"FAILED: {defects} requests ended with a status that is the server's fault")
    if not valid:
        print("FAILED: not one complete and valid answer, so nothing was shown")
    return bool(defects) or not valid or any(tally.failed for tally in tallies.values())


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FILE.jsonl")
    add("--count", type=whole(1), default=100, help="schemas, taken evenly from the file (default 100)")
    add("--group", help="only schemas of this group")
    add("--temperatures", type=list_of(real(0)), default="0,0.8", help="comma-separated (default 0,0.8)")
    add("--max-tokens", type=whole(1), default=256)
    add("--concurrency", type=whole(1), default=8)
    add("--formats", action="store_true", help="let the judge assert `format`; without, it is an annotation (2020-12)")
    add("--address", metavar="HOST:PORT", help="use a running server instead of starting one")
    add_engine_flags(parser, "model", "dtype", "device", "threads", "k", "grammar-backend")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        cases = spread(read_cases(args.data, args.group), args.count)
    except (OSError, ValueError) as error:
        parser.error(f"--data: {error}")
    if not cases:
        parser.error("--data: the file has no schema")
    options = engine_options(args, max_batch_size=max(16, args.concurrency))
    judge = Judge(formats=args.formats)
    strict = Judge(formats=True)
    print(f"{len(cases)} schemas, {args.grammar_backend}, K={args.k}, up to {args.max_tokens} tokens")
    print(f"judge: jsonschema, `format` {'asserted' if args.formats else 'not asserted'}")
    failed = False
    progress = Progress(len(cases) * len(args.temperatures))
    try:
        with engine_address(args.address, options) as address:
            for temperature in args.temperatures:
                calls = make_calls(cases, temperature, args.max_tokens)
                outcomes = asyncio.run(ask(address, calls, args.concurrency, progress))
                tallies: dict[str, Tally] = {case.group: Tally() for case in sorted(cases, key=lambda case: case.group)}
                with_formats = Tally()
                for case, outcome in zip(cases, outcomes, strict=True):
                    count(tallies[case.group], case, outcome, judge)
                    count(with_formats, case, outcome, strict)
                print(f"\ntemperature {temperature}\n")
                failed |= report(tallies)
                print(f"with `format` asserted: {with_formats.endings['stop/INVALID']} invalid")
    finally:
        progress.close()
    return int(failed)
