"""`python -m benchmarks token_ids`: records the token ids of a build, and compares another build with the record.

Invariant: every answer of the record is compared, token by token and by finish reason; an answer that is missing on one
side is a difference. Not responsible for: the prompts (see lossless.py), starting the engine (see server.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.harness.client import Call, EngineClient, make_call
from benchmarks.harness.comparison import first_difference
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, list_of, one_of, whole
from benchmarks.harness.measure import Answer
from benchmarks.harness.server import ServerOptions, start_engine
from benchmarks.harness.tables import Progress
from benchmarks.harness.workloads import workload
from benchmarks.quality.lossless import make_cases
from protos.engine.v1 import engine_pb2 as pb

Ids = dict[str, dict[str, dict[str, Any]]]
"""Variant -> name of the answer -> {"ids": [...], "finish": "..."}."""

Start = Callable[[ServerOptions], AbstractContextManager[str]]
"""Starts an engine; yields its address."""

EXAMPLES = """
examples:
  python -m benchmarks token_ids --record ids.json             run this build, write the file
  python -m benchmarks token_ids --compare ids.json            run this build, exit 1 where an answer differs
  python -m benchmarks token_ids --compare ids.json --dtypes float32 --drafts 7
"""


def sampled_calls(count: int, max_tokens: int, drafts: int) -> list[Call]:
    """Return `count` guided calls that are sampled at temperature 1, each with its own seed."""
    pool = [*workload("extraction"), *workload("schema")]
    calls = []
    for number in range(count):
        rounds, place = divmod(number, len(pool))
        item = pool[place]
        sampling = pb.SamplingParams(
            max_tokens=min(item.max_tokens, max_tokens), temperature=1.0, top_p=0.95, seed=7000 + number
        )
        name = f"{item.name}~{rounds} [sampled]"
        call = make_call(name, item.messages, schema=item.schema, sampling=sampling, num_draft_tokens=drafts)
        calls.append(_laid_out(call))
    return calls


def _laid_out(call: Call) -> Call:
    """Give a guided call the white space of the records: older builds do not know `spaced`."""
    if call.request.HasField("grammar"):
        call.request.grammar.whitespace = pb.WHITESPACE_BOUNDED
    return call


async def run_build(address: str, dtype: str, args: argparse.Namespace) -> Ids:
    """Run every variant against one server."""
    cases = make_cases(args.count, args.max_tokens)
    variants: list[tuple[str, int, list[Call]]] = [
        (
            f"{dtype}, {k} drafts, {'alone' if level == 1 else f'batch of {level}'}",
            level,
            [_laid_out(c.call(k)) for c in cases],
        )
        for level in dict.fromkeys((1, args.batch))
        for k in args.drafts
    ]
    sampled = sampled_calls(args.count, args.max_tokens, max(args.drafts))
    variants.append((f"{dtype}, sampled, {max(args.drafts)} drafts, alone", 1, sampled))
    client = EngineClient(address)
    progress = Progress(sum(len(calls) for _, _, calls in variants))
    ids: Ids = {}
    try:
        for name, level, calls in variants:
            run = await client.run(calls, level, partial(progress.step, name))
            ids[name] = {answer.name: _entry(answer) for answer in run.answers}
    finally:
        progress.close()
        await client.close()
    return ids


def _entry(answer: Answer) -> dict[str, Any]:
    return {"ids": list(answer.token_ids), "finish": answer.finish}


def differences(recorded: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one line for each answer of a variant that is not the same on both sides."""
    lines = []
    for name in sorted({*recorded, *now}):
        if name not in recorded or name not in now:
            lines.append(f"{name}: only in {'the record' if name in recorded else 'this run'}")
            continue
        found = first_difference(recorded[name]["ids"], now[name]["ids"])
        if found is not None:
            lines.append(f"{name}: token {found[0]} was {found[1]}, is {found[2]}")
        elif recorded[name]["finish"] != now[name]["finish"]:
            lines.append(f"{name}: finish was {recorded[name]['finish']}, is {now[name]['finish']}")
    return lines


def report(recorded: Ids, now: Ids, count: int | None = None) -> int:
    """Print a line for each variant and each difference; return the number of differences.

    A variant of the record that this run left out is named and not counted: `--dtypes` and `--drafts` choose variants.
    `count` is the number of prompts of this run: the record has its answers in the order of the prompts, and those
    after are not compared. None: all of them are.
    """
    counted = 0
    for variant in now:
        lines = differences(dict(islice(recorded.get(variant, {}).items(), count)), now[variant])
        print(f"{variant}: {len(now[variant]) - len(lines)} of {len(now[variant])} equal")
        for line in lines:
            print(f"  differs: {line}")
        counted += len(lines)
    for variant in recorded:
        if variant not in now:
            print(f"not run: {variant}")
    return counted


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--record", type=Path, metavar="FILE", help="write the ids of this build to FILE")
    where.add_argument("--compare", type=Path, metavar="FILE", help="compare this build with FILE")
    add = parser.add_argument
    add_engine_flags(parser, "model", "threads", "grammar-backend")
    add(
        "--dtypes",
        type=list_of(one_of(("auto", "bfloat16", "float32"))),
        default="float32,bfloat16",
        help="dtypes of the engine (default float32,bfloat16)",
    )
    add("--count", type=whole(1), default=40, help="prompts (default 40)")
    add("--max-tokens", type=whole(1), default=64, help="tokens per answer (default 64)")
    add("--drafts", type=list_of(whole(0)), default="0,3,7", help="drafts per step (default 0,3,7)")
    add("--batch", type=whole(1), default=8, help="size of the batch (default 8)")
    return parser


def main(argv: Sequence[str] | None = None, start: Start = start_engine) -> int:
    """Run the build; returns the exit code."""
    args = build_parser().parse_args(argv)
    ids: Ids = {}
    for dtype in args.dtypes:
        options = engine_options(
            args,
            dtype=dtype,
            num_draft_tokens=max(args.drafts),
            max_batch_size=max(16, args.batch),
            prefix_cache=False,
        )
        with start(options) as address:
            ids |= asyncio.run(run_build(address, dtype, args))
    if args.record is not None:
        args.record.write_text(json.dumps({"machine": platform.processor() or platform.machine(), "answers": ids}))
        print(f"{sum(len(answers) for answers in ids.values())} answers written to {args.record}")
        return 0
    count = report(json.loads(args.compare.read_text())["answers"], ids, args.count)
    print(f"{count} differences")
    return 1 if count else 0
