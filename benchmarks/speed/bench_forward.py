"""`python -m benchmarks bench_forward`: the forward of a decode step with fused layers, over transformers' own, or on
each vector unit of a CPU.

Invariant: what is compared has the same weights and runs in turn in one process over the same tokens and contexts, so
that the ratio holds on a shared machine.
Not responsible for: sampling, masks, the engine's loop.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.harness.flags import harness_parser, list_of, whole
from benchmarks.harness.tables import number, table
from gpu_engine.api.config import EngineConfig
from gpu_engine.api.engine_settings import EMBEDDED_MODEL
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.model.recording import distance
from kernels.vector_unit import WITH_BLOCKS, on_unit, unit_level, unit_levels, unit_name

EXAMPLES = """
examples:
  python -m benchmarks bench_forward                                        the embedded model on this CPU
  python -m benchmarks bench_forward --model /models/Qwen3-0.6B --rows 1,8,32
  python -m benchmarks bench_forward --threads 1 --cpu-time                 on a machine that others use too
  python -m benchmarks bench_forward --units --rows 1,16,225                AVX-512 and AVX2 on one machine
  python -m benchmarks bench_forward --device cuda                          as captured graphs, which is how a step runs

reading the table:
  rows      positions of one sequence in the call: 1 is plain decoding, 8 verifies 7 drafts
  fused     milliseconds, the lower quartile of the rounds; what else the machine does only adds
  ratio     as it came over fused, the median of the rounds' own ratios: above 1 fusing pays
  distance  of the logits, relative; rounding of bfloat16 is some hundredths
  argmax    share of the rows whose most likely token is the same

with --units, milliseconds on each unit, their ratio to the fastest unit's in brackets (the median of the rounds' own
ratios), and whether all units gave the same bits; the fastest one has the matrix unit's help where the CPU has one
"""

PAGE = 16

Timer = Callable[[LoadedModel, torch.Tensor, AttentionContext], Callable[[], float]]


def context_of(model: LoadedModel, start: int, rows: int) -> AttentionContext:
    """Return a context of `rows` positions after `start` tokens that were prefilled."""
    pages = -(-(start + rows) // PAGE)
    table_BN = torch.arange(pages, dtype=torch.int32, device=model.device)[None]
    cache = model.allocate_pages(pages, PAGE)
    if start:
        before = torch.arange(start, dtype=torch.int32, device=model.device)[None]
        model.prefill(before.long() * 37 % model.vocab_size, AttentionContext(cache, table_BN, before))
    return AttentionContext(
        cache, table_BN, torch.arange(start, start + rows, dtype=torch.int32, device=model.device)[None]
    )


def on_cpu(clock: Callable[[], float]) -> Timer:
    """Return what makes, of a forward, a function that runs it once and gives its milliseconds by `clock`."""

    def of(model: LoadedModel, ids_BP: torch.Tensor, ctx: AttentionContext) -> Callable[[], float]:
        def run() -> float:
            begin = clock()
            model.logits(ids_BP, ctx)
            return (clock() - begin) * 1e3

        return run

    return of


def on_cuda(model: LoadedModel, ids_BP: torch.Tensor, ctx: AttentionContext) -> Callable[[], float]:
    """Return a function that replays the forward's graph once and gives its milliseconds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.logits(ids_BP, ctx)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.logits(ids_BP, ctx)

    def run() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    return run


def in_turn(runs: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """Return the times of each run, of so many rounds; the order alternates, so that none always follows the same."""
    for run in (*runs, *runs):
        run()
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds):
        for which, run in list(enumerate(runs))[:: 1 if turn % 2 else -1]:
            times[which].append(run())
    return times


def quartile(times: list[float]) -> float:
    """Return the lower quartile: what else the machine does only adds."""
    return sorted(times)[len(times) // 4]


def ratio(a: list[float], b: list[float]) -> float:
    """Return the median of the ratios of each round."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


@torch.inference_mode()
def compare_units(
    model: LoadedModel, levels: Sequence[int], rows: int, start: int, rounds: int, timer: Timer
) -> list[str]:
    """Return a row of the table of vector units, of which the last one is the fastest."""
    ids_BP, ctx = torch.arange(rows)[None] * 91 % model.vocab_size, context_of(model, start, rows)
    run, logits = timer(model, ids_BP, ctx), []

    def on(level: int) -> Callable[[], float]:
        def timed() -> float:
            with on_unit(level):
                return run()

        return timed

    for level in levels:
        with on_unit(level):
            logits.append(model.logits(ids_BP, ctx).clone())
    times = in_turn([on(level) for level in levels], rounds)
    same = all(torch.equal(each, logits[-1]) for each in logits)
    cells = (f"{number(quartile(each), 2)} ({number(ratio(each, times[-1]), 2)})" for each in times)
    return [str(rows), *cells, "same" if same else "different"]


@torch.inference_mode()
def compare(plain: LoadedModel, fused: LoadedModel, rows: int, start: int, rounds: int, timer: Timer) -> list[str]:
    """Return a row of the table."""
    ids_BP = torch.arange(rows, device=plain.device)[None] * 91 % plain.vocab_size
    runs, logits = [], []
    for model in (plain, fused):
        ctx = context_of(model, start, rows)
        logits.append(model.logits(ids_BP, ctx).clone())
        runs.append(timer(model, ids_BP, ctx))
    times = in_turn(runs, rounds)
    same = (logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean().item()
    return [
        str(rows),
        *(number(quartile(each), 2) for each in times),
        number(ratio(*times), 2),
        number(distance(logits[1], logits[0]), 4),
        number(same, 2),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = harness_parser(__doc__, EXAMPLES)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="as the engine's setting (default: embedded)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", default="auto", help="as the engine's setting (default: auto)")
    parser.add_argument("--quantization", default="auto", help="as the engine's setting (default: auto)")
    parser.add_argument(
        "--rows", type=list_of(whole(1)), default="1,8,16", help="positions of a call (default: 1,8,16)"
    )
    parser.add_argument("--context", type=whole(0), default=300, help="tokens before them (default: 300)")
    parser.add_argument("--rounds", type=whole(1), default=40, help="measurements of each (default: 40)")
    parser.add_argument(
        "--threads", type=whole(0), default=0, help="threads on a CPU; 0: the cores there are (default: 0)"
    )
    parser.add_argument("--units", action="store_true", help="compare the vector units of this CPU instead")
    parser.add_argument(
        "--cpu-time", action="store_true", help="time of the one thread on its core, not on the wall: with --threads 1"
    )
    args = parser.parse_args(argv)
    if args.cpu_time and (args.device != "cpu" or args.threads != 1):
        parser.error("--cpu-time goes with --device cpu and --threads 1")
    if args.units and args.device != "cpu":
        parser.error("--units goes with --device cpu")
    if args.device != "cpu" and not torch.cuda.is_available():
        print(f"--device {args.device}: torch sees no CUDA device", file=sys.stderr)
        return 2
    models = []
    for fuse in (True,) if args.units else (False, True):
        where = {"model": args.model, "device": args.device, "num_threads": args.threads}
        config = EngineConfig(**where, dtype=args.dtype, quantization=args.quantization, fuse_parts=fuse)
        models.append(load_model(config, lambda stage, done: print(f"{done:4.0%} {stage}", file=sys.stderr)))
    fused = models[-1]
    print(f"{models[0]!r}, context {args.context}: {fused.fused!r}", *fused.fused.left, sep="\n")
    timer = on_cuda if args.device != "cpu" else on_cpu(time.thread_time if args.cpu_time else time.perf_counter)
    if args.units:
        levels = [level for level in unit_levels() if level >= WITH_BLOCKS] or [unit_level()]
        lines = [compare_units(fused, levels, rows, args.context, args.rounds, timer) for rows in args.rows]
        print(table(["rows", *map(unit_name, levels), "bits"], lines))
        return 0
    plain = models[0]
    lines = [compare(plain, fused, rows, args.context, args.rounds, timer) for rows in args.rows]
    print(table(["rows", "as it came, ms", "fused, ms", "ratio", "distance", "argmax"], lines))
    return 0
