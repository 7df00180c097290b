"""`python -m benchmarks drafts`: tokens per second with drafts and without, in turn in one run, by concurrency.

Invariant: two servers of this build, one with a drafter and one without, answer the same prompts in turn; the one that
comes first alternates, and only figures of the same pair are divided. Not responsible for: the equality of the token
ids (see quality/lossless.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.client import EngineClient
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, list_of, one_of, real, whole
from benchmarks.harness.measure import percentile
from benchmarks.harness.server import start_engine
from benchmarks.harness.tables import Progress, number, table
from benchmarks.harness.tool_calls import NAME, items_of
from benchmarks.harness.workloads import ALL_WORKLOADS, WORKLOADS, Item
from benchmarks.speed.builds import Comparison, Results, greedy_calls, tokens_per_s, with_totals

EXAMPLES = """
examples:
  python -m benchmarks drafts                                      all workloads at 1, 2, 4, 8 and 16
  python -m benchmarks drafts --workloads chat --concurrency 16 --rounds 5
  python -m benchmarks drafts --drafter grammar --at-least 0.98    exit 1 where a median ratio is below 0.98
  python -m benchmarks drafts --workloads tools --bfcl-python DIR/bin/python --flags=--prefix-cache=false
                                                                   every prompt is computed each time it is sent

reading the table:
  without, with   generated tokens / wall time, the median of the rounds
  ratio           with / without, of the two passes of a round
  TPOT            time per token after the first, without / with, the median of the rounds. Drafts change only this:
                  the prompt before it takes as long as without them
  tok/step        tokens per decode step of a sequence, with drafts
  drafts/step     drafts that a step verified for a sequence, with drafts
  equal           answers with the same token ids (with dtype=bfloat16, ids of a batch depend on timing)
"""


async def run_pairs(
    addresses: tuple[str, str], items: Mapping[str, Sequence[Item]], levels: Sequence[int], rounds: int
) -> Results:
    """Run every workload at every concurrency, `rounds` times on both servers: (without drafts, with drafts)."""
    clients = [EngineClient(address) for address in addresses]
    progress = Progress(2 * rounds * len(levels) * sum(len(these) for these in items.values()))
    results: Results = {(name, level): Comparison() for level in levels for name in items}
    try:
        for client in clients:
            for these in items.values():
                short = [replace(item, max_tokens=min(item.max_tokens, 16)) for item in these[: max(levels)]]
                await client.run(greedy_calls(short), max(levels))
        for (name, level), comparison in results.items():
            # At least two batches, so that the end of the last one, at a lower concurrency, weighs little.
            these = [*items[name]]
            while len(these) < 2 * level:
                these += [replace(item, name=f"{item.name}+{len(these)}") for item in items[name]]
            calls = greedy_calls(these)
            for turn in range(rounds):
                runs = {}
                for at in (0, 1) if turn % 2 == 0 else (1, 0):
                    runs[at] = await clients[at].run(calls, level)
                    progress.step(f"{name} at {level}", by=len(items[name]))
                comparison.pairs.append((runs[0], runs[1]))
    finally:
        for client in clients:
            await client.close()
        progress.close()
    return results


def result_table(results: Results) -> str:
    """Return the table: a row for each workload and concurrency."""
    speeds = ("without", "with", "ratio min", "median", "max", "TPOT")
    header = ("workload", "c", *speeds, "tok/step", "drafts/step", "equal")
    rows = []
    for (name, level), comparison in results.items():
        ratios, (equal, total) = comparison.ratios(), comparison.equal()
        answers = [answer for _, run in comparison.pairs for answer in run.answers]
        steps = sum(answer.steps for answer in answers)
        drafts = sum(answer.times.draft_tokens for answer in answers if answer.times is not None)
        rows.append([
            name,
            str(level),
            number(statistics.median(tokens_per_s(without) for without, _ in comparison.pairs)),
            number(statistics.median(tokens_per_s(drafted) for _, drafted in comparison.pairs)),
            number(min(ratios), 3),
            number(statistics.median(ratios), 3),
            number(max(ratios), 3),
            number(percentile(comparison.tpot_ratios(), 50), 3),
            number(sum(len(answer.token_ids) for answer in answers) / steps, 2),
            number(drafts / steps, 2),
            f"{equal} of {total}",
        ])  # fmt: skip
    return table(header, rows)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--rounds", type=whole(1), default=3, help="passes of each server over each cell (default 3)")
    add("--concurrency", type=list_of(whole(1)), default="1,2,4,8,16", help="comma-separated (default 1,2,4,8,16)")
    add(
        "--workloads",
        type=list_of(one_of((*ALL_WORKLOADS, NAME))),
        default=",".join(WORKLOADS),
        help=f"comma-separated, of {', '.join((*WORKLOADS, NAME))}",
    )
    add("--bfcl-python", type=Path, metavar="PATH", default=Path(sys.executable), help="as that of serve, for tools")
    add("--count", type=whole(1), help="only the first COUNT prompts of every workload")
    add("--max-tokens", type=whole(1), help="lower the token budget of every prompt")
    add_engine_flags(parser, "model", "dtype", "device", "threads", "k", "grammar-backend")
    add("--drafter", default="ngram", help="drafter of the server with drafts (default ngram)")
    add("--flags", default="", metavar="FLAGS", help="further flags for both servers, as one string")
    add("--at-least", type=real(0), metavar="RATIO", help="exit 1 where a median ratio is lower")
    add("--json", type=Path, metavar="FILE", help="write the ratios of every round as JSON")
    return parser


def main() -> int:
    """Run the comparison; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    try:
        items = {name: items_of(name, args.bfcl_python, args.count, args.max_tokens) for name in args.workloads}
    except ValueError as error:
        parser.error(str(error))
    drafted = engine_options(
        args,
        max_batch_size=max(16, *args.concurrency),
        # The index of earlier answers would draft the answers of the round before.
        extra=("--draft-index-bytes=0", *shlex.split(args.flags)),
    )
    print(f"{args.model}, {args.dtype} on {args.device}, {args.threads} threads, {args.drafter}, K <= {args.k}, greedy")
    with ExitStack() as stack:
        both = (replace(drafted, drafter="none"), drafted)
        without, with_drafts = (stack.enter_context(start_engine(options)) for options in both)
        results = with_totals(asyncio.run(run_pairs((without, with_drafts), items, args.concurrency, args.rounds)))
    print(f"\n{result_table(results)}")
    if args.json is not None:
        plain = [{"workload": name, "c": level, "ratios": c.ratios()} for (name, level), c in results.items()]
        args.json.write_text(json.dumps(plain, indent=1) + "\n")
    medians = {cell: statistics.median(comparison.ratios()) for cell, comparison in results.items()}
    slow = [cell for cell, ratio in medians.items() if args.at_least is not None and ratio < args.at_least]
    for name, level in slow:
        print(f"too slow: {name} at {level}: {medians[name, level]:.3f}, below {args.at_least}")
    return 1 if slow else 0
