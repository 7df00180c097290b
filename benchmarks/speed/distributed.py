"""`python -m benchmarks distributed`: a model over several processes, against the same model in one.

First the tokens: every prompt, guided and free, with and without drafts, from a server of one rank and from servers of
more; in float32 any difference fails the run. Then the cost of a forward by part: the announcement to the other ranks,
the sums over the ranks, the logits of all ranks brought to rank 0, and the rest, which is this rank's computation.
Invariant: tokens are compared with those of one rank without drafts; forwards of all sizes run in turn in one process.
Not responsible for: sampling and masks, which only rank 0 does (see serve.py).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from benchmarks.harness.comparison import compare
from benchmarks.harness.flags import engine_options, harness_parser, list_of, pair, whole
from benchmarks.harness.measure import Answer
from benchmarks.harness.server import start_engine
from benchmarks.harness.tables import number, share, table
from benchmarks.quality.lossless import Case, Variant, equality_table, make_cases, run_variants
from gpu_engine.api.config import EngineConfig
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.model.parallel.ranks import Ranks

EXAMPLES = """
examples:
  python -m benchmarks distributed                      one and two ranks of one thread each, the embedded model
  python -m benchmarks distributed --ranks 1,2,3 --count 16
  python -m benchmarks distributed --no-tokens          only the forwards

reading the second table:
  lanes x rows   sequences of the forward, and rows of each
  ms             of a forward, the lower quartile of the rounds
  of one rank    time over that of one rank
  announce, sums, logits, compute
                 shares of the time: ids, positions and page tables to the other ranks; two sums a layer; the logits of
                 all ranks to rank 0; the rest
"""

PAGE, CONTEXT = 16, 300
PARTS = ("send", "sum", "gather")


def forward_of(model: LoadedModel, lanes: int, rows: int) -> Callable[[], list[float]]:
    """Return a function that runs a forward after `CONTEXT` tokens, and gives its seconds, whole and by `PARTS`."""
    pages = -(-(CONTEXT + rows) // PAGE)
    table_BN = torch.arange(lanes * pages, dtype=torch.int32).view(lanes, pages)
    positions_BP = (CONTEXT + torch.arange(rows, dtype=torch.int32)).expand(lanes, rows).contiguous()
    ctx = AttentionContext(model.allocate_pages(lanes * pages, PAGE), table_BN, positions_BP)
    ids_BP = torch.arange(lanes * rows).view(lanes, rows) * 91 % model.vocab_size
    ranks = model.ranks
    assert ranks is None or isinstance(ranks, Ranks)

    def spent() -> list[float]:
        if ranks is None or ranks.collectives is None:
            return [0.0] * len(PARTS)
        return [ranks.collectives.spent[part].seconds for part in PARTS]

    def run() -> list[float]:
        if ranks is not None:  # another size has its pages there
            ranks.allocate_pages(lanes * pages, PAGE)
        model.logits(ids_BP, ctx)
        before, begun_s = spent(), time.perf_counter()
        model.logits(ids_BP, ctx)
        total_s = time.perf_counter() - begun_s
        return [total_s, *(after - once for after, once in zip(spent(), before, strict=True))]

    return run


@torch.inference_mode()
def costs(models: dict[int, LoadedModel], shapes: Sequence[tuple[int, int]], rounds: int) -> str:
    """Return the table of forwards, each compared with the one over the fewest ranks."""
    lines = []
    for lanes, rows in shapes:
        runs = {size: forward_of(model, lanes, rows) for size, model in models.items()}
        found: dict[int, list[list[float]]] = {size: [] for size in runs}
        for _ in range(rounds):
            for size, run in runs.items():
                found[size].append(run())
        # The parts are those of the round whose whole time is the lower quartile.
        quartiles = {size: sorted(times)[len(times) // 4] for size, times in found.items()}
        first = quartiles[min(quartiles)][0]
        for size, (total_s, *parts) in quartiles.items():
            shares = [share(part / total_s) for part in (*parts, total_s - sum(parts))]
            figures = number(total_s * 1e3, 1), number(total_s / first, 2)
            lines.append([f"{lanes} x {rows}", str(size), *figures, *shares])
    header = ("lanes x rows", "ranks", "ms", "of one rank", "announce", "sums", "logits", "compute")
    return table(header, lines)


def tokens_of(cases: Sequence[Case], args: argparse.Namespace) -> int:
    """Print the table of equal answers and of tokens per second by number of ranks; return how many differ."""
    reference: dict[str, Answer] | None = None
    variants, failures = [Variant(each, args.batch) for each in args.drafts], 0
    for size in args.ranks:
        options = engine_options(
            args,
            dtype="float32",
            quantization="none",
            num_draft_tokens=max(args.drafts),
            prefix_cache=False,
            extra=("--tensor-parallel-size", str(size)) if size > 1 else (),
        )
        with start_engine(options) as address:
            begun_s = time.perf_counter()
            results = asyncio.run(run_variants(address, cases, variants))
            seconds = time.perf_counter() - begun_s
        reference = reference or results[variants[0]]
        differences = {variant: compare(reference, answers) for variant, answers in results.items()}
        count = sum(len(answer.token_ids) for answers in results.values() for answer in answers.values())
        steps = statistics.mean(a.times.step_ms for answers in results.values() for a in answers.values() if a.times)
        print(f"\nranks: {size}; {number(count / seconds)} tokens/s, a step of an answer takes {number(steps)} ms\n")
        print(equality_table(results, differences))
        for variant, found in differences.items():
            for difference in found:
                failures += 1
                print(f"differs: {variant}: {difference}")
    return failures


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--model", default="embedded", help="model of the engine (default 'embedded')")
    add("--ranks", type=list_of(whole(1)), default="1,2", help="numbers of ranks; 1 is the reference (default 1,2)")
    add("--threads", type=whole(1), default=1, help="threads of each rank (default 1)")
    add("--count", type=whole(1), default=8, help="prompts, two of three guided (default 8)")
    add("--max-tokens", type=whole(1), default=48, help="tokens per answer (default 48)")
    add("--drafts", type=list_of(whole(0)), default="0,7", help="drafts per step to compare (default 0,7)")
    add("--batch", type=whole(1), default=4, help="prompts at a time (default 4)")
    add(
        "--shapes",
        type=list_of(pair("LANESxROWS")),
        default="1x1,1x8,4x1,4x8",
        help="lanes x rows of the forwards (default 1x1,1x8,4x1,4x8)",
    )
    add("--rounds", type=whole(1), default=12, help="forwards of each kind (default 12)")
    add("--no-tokens", action="store_true", help="measure only the forwards")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit code."""
    args = build_parser().parse_args(argv)
    failures = 0
    try:
        if not args.no_tokens:
            failures = tokens_of(make_cases(args.count, args.max_tokens), args)
        config = EngineConfig(
            model=args.model, device="cpu", dtype="float32", quantization="none", num_threads=args.threads
        )
        with ExitStack() as stack:
            models = {}
            for size in args.ranks:
                models[size] = load_model(replace(config, tensor_parallel_size=size))
                if (ranks := models[size].ranks) is not None:
                    stack.callback(ranks.close)
            print(f"\n{args.model}, float32, {args.threads} threads a rank, after {CONTEXT} tokens\n")
            print(costs(models, args.shapes, args.rounds))
    except ValueError as failure:
        print(f"cannot run: {failure}", file=sys.stderr)
        return 2
    if failures:
        print("\nFAILED: answers differ")
    return int(failures > 0)
