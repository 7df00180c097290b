"""`python -m benchmarks safeguards`: tokens per second with verification, the way back, the repetition guard, bounds.

Invariant: one server answers the same prompts with a safeguard and without it, in turns of one batch each; the side
that comes first alternates, and only figures of the same turn are divided.
Not responsible for: the time of a compilation (see quality/maskbench.py and its --compile-cpu).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.client import Call, EngineClient, make_call
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, list_of, real, some_of, whole
from benchmarks.harness.measure import Answer
from benchmarks.harness.server import ServerOptions, start_engine
from benchmarks.harness.tables import Progress, number, table
from benchmarks.harness.validity import COMPLETE, Judge, Verdict
from benchmarks.harness.workloads import Item, workload
from benchmarks.speed.builds import Comparison, batched, tokens_per_s
from protos.engine.v1 import engine_pb2 as pb

EXAMPLES = """
what it does:
  One server, and for each safeguard the same prompts and schemas on both sides. A turn is one batch of both sides.

  verify-idle         UNENFORCED_VERIFY / UNENFORCED_REFUSE, schemas of which the grammar enforces all: expected 1
  verify              UNENFORCED_VERIFY / UNENFORCED_WARN, schemas whose arrays have uniqueItems; nothing is held back
  hold                the same, verified on both sides: hold_tokens = 32 / hold_tokens = 0
  way-back            max_backtracks = 8 / max_backtracks = 0, lists of few values, which often run into a dead end
  repetition          a guard against 8 repetitions of 1 to 16 tokens / no guard, guided answers
  repetition-free     the same for free text
  max-string-length, max-array-items, max-number-digits, max-whitespace
                      a bound that is wider than most answers / no bound, schemas without bounds of their own
  bounds              the four bounds together / none

examples:
  python -m benchmarks safeguards
  python -m benchmarks safeguards --only verify,way-back --concurrency 1 --rounds 5
  python -m benchmarks safeguards --rounds 1 --count 2 --max-tokens 16                     does it run at all?
  python -m benchmarks safeguards --at-least 0.9 --json safeguards.json     exit 1 where a median ratio is below 0.9

reading the table:
  without, with    tokens that were sent / wall time, the median of the turns
  ratio            with / without, of the two sides of a turn; 1 costs nothing. The prefill is part of the time
  valid            complete and valid answers without and with, of all answers of a side ("-": free text)
  backtracks       times that the answers of the side "with" went back
  equal            answers with the same token ids on both sides. Where they differ, the ratio compares other texts, too

exit code: 0, 1 a median ratio is below --at-least, 2 it could not run
"""

PATTERN_SIZE = 16
REPETITIONS = 8
"""A larger number is looked for later in an answer: the guard looks from this many tokens on."""
BOUNDS = {"max_string_length": 200, "max_array_items": 16, "max_number_digits": 9, "max_whitespace": 2}
"""Wider than what the prompts ask for, so that most answers are equal on both sides."""

Change = Callable[[pb.GenerateRequest], None]
Start = Callable[[ServerOptions], AbstractContextManager[str]]
Cell = tuple[str, int]
"""(safeguard, concurrency)."""


@dataclass(frozen=True, slots=True)
class Safeguard:
    """One line of the table: the prompts, and what the requests of each side say."""

    items: Sequence[Item]
    without: Change
    with_it: Change
    temperature: float = 0.0

    def calls(self, change: Change) -> list[Call]:
        """Return a call for each item."""
        calls = []
        for seed, item in enumerate(self.items):
            sampling = pb.SamplingParams(max_tokens=item.max_tokens, temperature=self.temperature, seed=seed)
            call = make_call(item.name, item.messages, schema=item.schema, sampling=sampling)
            change(call.request)
            calls.append(call)
        return calls


@dataclass(slots=True)
class Cost:
    """The runs of a cell."""

    comparison: Comparison = field(default_factory=Comparison)
    """Pairs of (without, with)."""

    def answers(self, side: int) -> list[Answer]:
        """Return the answers of a side; 0: without, 1: with."""
        return [answer for pair in self.comparison.pairs for answer in pair[side].answers]

    def median(self) -> float:
        """Return the median of with / without."""
        return statistics.median(self.comparison.ratios())


def nothing(request: pb.GenerateRequest) -> None:
    """Leave a request as it is."""


def grammar(**fields: Any) -> Change:
    """Return what sets fields of a request's grammar."""

    def change(request: pb.GenerateRequest) -> None:
        request.grammar.MergeFrom(pb.Grammar(**fields))

    return change


def guard(request: pb.GenerateRequest) -> None:
    """Let the server look for repetitions after each token."""
    request.sampling.repetition_max_pattern_size = PATTERN_SIZE
    request.sampling.repetition_min_pattern_size = 1
    request.sampling.repetition_min_count = REPETITIONS


def with_unique_items(items: Sequence[Item]) -> list[Item]:
    """Return the items whose schemas have arrays, each array with `uniqueItems`."""
    return [each for each in _changed(items, _unique) if each.schema is not None and "uniqueItems" in each.schema]


def without_bounds(items: Sequence[Item]) -> list[Item]:
    """Return the items without the bounds of their own."""
    return _changed(items, _unbounded)


def dead_ends(max_tokens: int) -> list[Item]:
    """Return requests for lists of distinct values, of which there are few: after a repeated one no token is legal."""
    colours = {"type": "string", "pattern": "^(red|blue|black|brown|green|grey)$"}
    digits = {"type": "integer", "minimum": 1, "maximum": 6}
    rolls = {"type": "array", "items": digits, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    lists = {
        "colours": {"type": "array", "items": colours, "uniqueItems": True, "minItems": 5, "maxItems": 6},
        "digits": {"type": "array", "items": digits, "uniqueItems": True, "minItems": 5, "maxItems": 6},
        "rolls": {"type": "array", "items": rolls, "uniqueItems": True, "minItems": 4, "maxItems": 6},
    }
    return [
        Item(f"{name}-{at}", (("user", f"Write a JSON list of {name}."),), json.dumps(schema), min(64, max_tokens))
        for at in range(4)
        for name, schema in lists.items()
    ]


def safeguards(count: int | None, max_tokens: int | None) -> dict[str, Safeguard]:
    """Return every safeguard by its name, with at most `count` prompts each."""
    guided = [*workload("extraction", None, max_tokens), *workload("schema", None, max_tokens)]
    unique, plain, free = with_unique_items(guided)[:count], guided[:count], workload("chat", count, max_tokens)
    unbounded, lists = without_bounds(guided)[:count], dead_ends(max_tokens or 64)[:count]
    verify = pb.UNENFORCED_VERIFY
    bounds = {
        name.replace("_", "-"): Safeguard(unbounded, nothing, grammar(**{name: most})) for name, most in BOUNDS.items()
    }
    return {
        "verify-idle": Safeguard(plain, grammar(unenforced=pb.UNENFORCED_REFUSE), grammar(unenforced=verify)),
        "verify": Safeguard(unique, grammar(unenforced=pb.UNENFORCED_WARN), grammar(unenforced=verify, hold_tokens=0)),
        "hold": Safeguard(
            unique, grammar(unenforced=verify, hold_tokens=0), grammar(unenforced=verify, hold_tokens=32)
        ),
        "way-back": Safeguard(
            lists,
            grammar(unenforced=verify, max_backtracks=0),
            grammar(unenforced=verify, max_backtracks=8, hold_tokens=32),
            temperature=1.0,
        ),
        "repetition": Safeguard(plain, nothing, guard),
        "repetition-free": Safeguard(free, nothing, guard),
        **bounds,
        "bounds": Safeguard(unbounded, nothing, grammar(**BOUNDS)),
    }


async def measure(
    address: str, chosen: Mapping[str, Safeguard], levels: Sequence[int], rounds: int
) -> dict[Cell, Cost]:
    """Warm up with every prompt and schema of both sides, then run the turns.

    Raises:
        CallRefused: the server refused a request.

    """
    client, results = EngineClient(address), {(name, level): Cost() for name in chosen for level in levels}
    progress = Progress(rounds * len(levels) * sum(len(each.items) for each in chosen.values()))
    try:
        for each in chosen.values():
            for change in (each.without, each.with_it):
                await client.run(each.calls(change), max(levels))
        for (name, level), cost in results.items():
            safeguard = chosen[name]
            sides = safeguard.calls(safeguard.without), safeguard.calls(safeguard.with_it)
            for _ in range(rounds):
                for pair in zip(*(batched(calls, level) for calls in sides), strict=True):
                    order = (0, 1) if len(cost.comparison.pairs) % 2 == 0 else (1, 0)
                    runs = {side: await client.run(pair[side], level) for side in order}
                    cost.comparison.pairs.append((runs[0], runs[1]))
                    progress.step(f"{name} at {level}", by=len(pair[0]))
    finally:
        await client.close()
        progress.close()
    return results


def report(results: Mapping[Cell, Cost], chosen: Mapping[str, Safeguard]) -> str:
    """Return the table: a row for each safeguard and concurrency."""
    header = ("safeguard", "c", "without", "with", "ratio min", "median", "max", "valid", "backtracks", "equal")
    judge, rows = Judge(), []
    for (name, level), cost in results.items():
        schemas = {item.name: item.schema for item in chosen[name].items}
        pairs, ratios, (equal, total) = cost.comparison.pairs, cost.comparison.ratios(), cost.comparison.equal()
        valid = [_valid(cost.answers(side), schemas, judge) for side in (0, 1)]
        rows.append([
            name,
            str(level),
            number(statistics.median(tokens_per_s(without) for without, _ in pairs)),
            number(statistics.median(tokens_per_s(with_it) for _, with_it in pairs)),
            number(min(ratios), 3),
            number(cost.median(), 3),
            number(max(ratios), 3),
            "-" if valid[0] is None else f"{valid[0]}, {valid[1]} of {total}",
            str(sum(answer.times.backtracks for answer in cost.answers(1) if answer.times is not None)),
            f"{equal} of {total}",
        ])  # fmt: skip
    return table(header, rows)


def _valid(answers: Sequence[Answer], schemas: Mapping[str, str | None], judge: Judge) -> int | None:
    """Return how many answers are complete and valid; None: there is no schema."""
    guided = [(schema, answer) for answer in answers if (schema := schemas[answer.name]) is not None]
    if not guided:
        return None
    return sum(
        answer.finish in COMPLETE and judge.judge(schema, answer.text).verdict is Verdict.VALID
        for schema, answer in guided
    )


def _changed(items: Sequence[Item], change: Callable[[dict[str, Any]], None]) -> list[Item]:
    """Return the items with another schema, in the prompt as well. `change` is applied to each object of a schema."""
    changed = []
    for item in items:
        if item.schema is None:
            continue
        schema = json.loads(item.schema)
        waiting = [schema]
        for node in waiting:
            if isinstance(node, dict):
                change(node)
            if isinstance(node, dict | list):
                waiting.extend(node.values() if isinstance(node, dict) else node)
        text = json.dumps(schema, separators=(",", ":"))
        messages = tuple((role, content.replace(item.schema, text)) for role, content in item.messages)
        changed.append(Item(item.name, messages, text, item.max_tokens))
    return changed


def _unique(node: dict[str, Any]) -> None:
    if node.get("type") == "array":
        node["uniqueItems"] = True


def _unbounded(node: dict[str, Any]) -> None:
    for keyword in ("maxLength", "maxItems"):
        node.pop(keyword, None)


def as_json(results: Mapping[Cell, Cost]) -> list[dict[str, object]]:
    """Return the figures of every turn as plain data."""
    return [
        {"safeguard": name, "concurrency": level, "ratios": cost.comparison.ratios(), "equal": cost.comparison.equal()}
        for (name, level), cost in results.items()
    ]


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add(
        "--only",
        type=some_of(safeguards(None, None)),
        default="",
        metavar="NAMES",
        help="comma-separated (default: all of the list below)",
    )
    add("--rounds", type=whole(1), default=3, help="passes over the prompts of each safeguard (default 3)")
    add("--concurrency", type=list_of(whole(1)), default="1,8", help="comma-separated (default 1,8)")
    add("--count", type=whole(1), help="only the first COUNT prompts of every safeguard")
    add("--max-tokens", type=whole(1), help="lower the token budget of every prompt")
    add_engine_flags(parser, "model", "dtype", "device", "threads", "k", "grammar-backend")
    add("--at-least", type=real(0), metavar="RATIO", help="exit 1 where a median ratio is lower")
    add("--json", type=Path, metavar="FILE", help="write the ratios of every turn as JSON")
    return parser


def main(argv: Sequence[str] | None = None, start: Start = start_engine) -> int:
    """Run the comparison; returns the exit code."""
    args = build_parser().parse_args(argv)
    known = safeguards(args.count, args.max_tokens)
    options = engine_options(
        args,
        max_batch_size=max(16, *args.concurrency),
        # The index of earlier answers would draft the answers of the round before.
        extra=("--draft-index-bytes=0",),
    )
    chosen = {name: known[name] for name in args.only}
    print(f"{args.model}, {args.dtype} on {args.device}, {args.threads} threads, {args.grammar_backend}, K <= {args.k}")
    with start(options) as address:
        results = asyncio.run(measure(address, chosen, args.concurrency, args.rounds))
    print(f"\n{report(results, chosen)}")
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(results), indent=1) + "\n")
    slow = [cell for cell, cost in results.items() if args.at_least is not None and cost.median() < args.at_least]
    for cell in slow:
        print(f"too slow: {cell[0]} at {cell[1]}: {results[cell].median():.3f}, below {args.at_least}")
    return 1 if slow else 0
