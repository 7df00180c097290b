"""`python -m benchmarks bench_products`: products over blocks and of bfloat16 on the units of this CPU, on one thread.

Invariant: where both units compute a product, in turn, their results are equal bit for bit before a figure is printed.
Not responsible for: the choice between the units (see kernels/matrix_unit.py), a whole forward (see bench_forward.py).
"""

from __future__ import annotations

import argparse
import ctypes
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness.flags import harness_parser, list_of, one_of, pair, whole
from benchmarks.harness.tables import Progress, number, share, table
from gpu_engine.model.linear import PackedByLibrary
from kernels.blocks import BLOCK, BlockKind, LinearCall, PackedBlocks, can_multiply_blocks
from kernels.float_tiles import FloatTiles
from kernels.library import native
from kernels.matrix_unit import cpu_name, use_units

EXAMPLES = """
examples:
  python -m benchmarks bench_products                                the shapes of the embedded model
  python -m benchmarks bench_products --shapes 2048x2048,8192x2048   outputs x inputs of a model of yours
  python -m benchmarks bench_products --rows 1,4,16 --kinds q8

reading the table:
  rows      rows of activations in the call
  vector    multiplications per nanosecond of the vector unit, the best of the rounds; in brackets the share of what
            the unit's instruction reaches without memory (needs a C compiler, and x86-64)
  matrix    the same of the matrix unit, from 16 rows on, where this CPU has one that the system permits
  ratio     matrix over vector

Of bf16, "vector" is oneDNN's product, which uses the matrix unit too, in pieces of as many rows as have the same bits.
"""
PEAKS = Path(__file__).with_name("unit_peaks.c")
KINDS = {
    "q4": (BlockKind.Q4, True),
    "q4_0": (BlockKind.Q4, False),
    "f4": (BlockKind.F4, False),
    "l4": (BlockKind.L4, False),
    "q5": (BlockKind.Q5, True),
    "q6": (BlockKind.Q6, False),
    "p4": (BlockKind.P4, False),
    "q8": (BlockKind.Q8, False),
    "bf16": None,
}
"""Kind and whether it has offsets; None: not in blocks."""
EMBEDDED_SHAPES = "960x576,576x576,3072x576,576x1536"
TILE_ROWS = 16
"""As kernels/native/amx.h has it."""


def peaks() -> dict[str, float]:
    """Return MAC/ns of one core's instructions by unit; nothing without a C compiler, or where it fails."""
    compiler = shutil.which("cc")
    if compiler is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        made = f"{folder}/peaks"
        command = [compiler, "-O2", "-march=native", "-std=gnu11", str(PEAKS), "-o", made]
        try:
            subprocess.run(command, check=True)
            printed = subprocess.run([made], check=True, capture_output=True, text=True).stdout
        except subprocess.CalledProcessError as error:
            print(f"no peaks: {error}", file=sys.stderr)
            return {}
    return {name: float(value) for name, value in (line.split() for line in printed.splitlines())}


def random_blocks(kind: BlockKind, offsets: bool, shape: tuple[int, int]) -> PackedBlocks:
    """Return a matrix [outputs, inputs] of random numbers."""
    generator = torch.Generator().manual_seed(0)
    made = PackedBlocks.unfilled(kind, shape, offsets=offsets)
    made.quants.random_(0, 256, generator=generator)
    for part in (made.scales, made.offsets):
        if part is not None:
            part.copy_(torch.randn(part.shape, generator=generator))
    return made


def best_ns(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the shortest time of each call; they run in turn."""
    best = [math.inf] * len(calls)
    for _ in range(rounds):
        for at, call in enumerate(calls):
            begin = time.perf_counter_ns()
            call()
            best[at] = min(best[at], time.perf_counter_ns() - begin)
    return best


def block_calls(weights: PackedBlocks, rows: int, *, tiles: bool) -> list[LinearCall]:
    """Return the product on the vector unit and, where there is one, on the matrix unit."""
    x_MK = torch.randn(rows, weights.num_inputs, generator=torch.Generator().manual_seed(rows))
    return [LinearCall(weights, x_MK, least) for least in ((0, 1) if tiles and rows >= TILE_ROWS else (0,))]


def measure(weights: PackedBlocks, rows: int, rounds: int, *, tiles: bool) -> tuple[float, float]:
    """Return MAC/ns of the vector unit and of the matrix unit, NaN without one."""
    linear, calls = native().lockstep_block_linear_alone, block_calls(weights, rows, tiles=tiles)
    times = best_ns([partial(linear, ctypes.byref(call.args)) for call in calls], rounds)
    macs = rows * weights.num_inputs * weights.num_outputs
    return rates([call.out_MN.view(torch.int32) for call in calls], times, macs)


def measure_floats(shape: tuple[int, int], rows: int, rounds: int, *, tiles: bool) -> tuple[float, float]:
    """Return MAC/ns of oneDNN and of the matrix unit, NaN without one, in bfloat16."""
    generator = torch.Generator().manual_seed(rows)
    weight_NK, x_MK = (torch.randn(size, generator=generator).bfloat16() for size in (shape, (rows, shape[1])))
    packed: list[PackedByLibrary | FloatTiles] = [PackedByLibrary(weight_NK, None)]
    if tiles:
        packed.append(FloatTiles(weight_NK))
    times = best_ns([partial(each, x_MK) for each in packed], rounds)
    return rates([each(x_MK).view(torch.int16) for each in packed], times, rows * shape[0] * shape[1])


def rates(results: Sequence[torch.Tensor], times: Sequence[float], macs: int) -> tuple[float, float]:
    """Return MAC/ns of one way and of the other, NaN where there is none. Raises RuntimeError for results that
    differ."""
    if not all(torch.equal(result, results[0]) for result in results):
        raise RuntimeError(f"the units differ: {macs} multiplications, {len(results[0])} rows")
    return macs / times[0], macs / times[1] if len(times) > 1 else math.nan


def cell(value: float, peak: float) -> str:
    """Return a figure with its share of the peak."""
    return number(value, 0) if math.isnan(value) or math.isnan(peak) else f"{number(value, 0)} ({share(value / peak)})"


def shape_of(text: str) -> tuple[int, int]:
    """Read OUTPUTSxINPUTS. Raises ArgumentTypeError."""
    outputs, inputs = pair("OUTPUTSxINPUTS")(text)
    if inputs % BLOCK:
        raise argparse.ArgumentTypeError(f"{text!r} is not OUTPUTSxINPUTS with inputs that {BLOCK} divides")
    return outputs, inputs


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = harness_parser(__doc__, EXAMPLES)
    parser.add_argument(
        "--shapes",
        type=list_of(shape_of),
        default=EMBEDDED_SHAPES,
        help=f"outputs x inputs of matrices (default: {EMBEDDED_SHAPES})",
    )
    parser.add_argument(
        "--rows", type=list_of(whole(1)), default="1,8,16,64,256", help="rows of a call (default: 1,8,16,64,256)"
    )
    parser.add_argument(
        "--kinds",
        type=list_of(one_of(KINDS)),
        default="q4,q8",
        help=f"of {', '.join(KINDS)} (default: q4,q8); q4 and q5 with offsets",
    )
    parser.add_argument("--rounds", type=whole(1), default=30, help="measurements of each, of which the best counts")
    args = parser.parse_args(argv)
    kinds = {name: KINDS[name] for name in args.kinds}
    if not can_multiply_blocks():
        print("this CPU has neither AVX2 nor aarch64's dot products", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        units = use_units(lambda: Path(folder) / "units.json", matrix=True)
        torch.set_num_threads(1)
        tops = peaks()
        bar, lines = Progress(len(kinds) * len(args.shapes) * len(args.rows)), []
        for name, form in kinds.items():
            for shape in args.shapes:
                blocks = None if form is None else random_blocks(*form, shape)
                for count in args.rows:
                    if blocks is None:
                        found = measure_floats(shape, count, args.rounds, tiles=units.floats)
                    else:
                        found = measure(blocks, count, args.rounds, tiles=units.matrix is not None)
                    unit_peaks = [tops.get(unit, math.nan) if blocks else math.nan for unit in ("vector", "matrix")]
                    shown = [cell(value, peak) for value, peak in zip(found, unit_peaks, strict=True)]
                    ratio = number(found[1] / found[0], 2)
                    lines.append([name, f"{shape[0]} x {shape[1]}", str(count), *shown, ratio])
                    bar.step(f"{name} {shape[0]} x {shape[1]}, {count} rows")
    print(f"{cpu_name()}: {units}; peaks in MAC/ns: {tops or 'not measured'}\n")
    print(table(["kind", "matrix", "rows", "vector, MAC/ns", "matrix, MAC/ns", "ratio"], lines))
    return 0
