"""`python -m benchmarks bench_products`: products over blocks on the vector unit and on the matrix unit, on one thread.

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
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness.tables import Progress, number, share, table
from kernels.blocks import BLOCK, BlockKind, LinearCall, PackedBlocks, can_multiply_blocks
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
  matrix    the same of the matrix unit, from 4 rows on, where this CPU has one that the system permits
  ratio     matrix over vector
"""
PEAKS = Path(__file__).with_name("unit_peaks.c")
KINDS = {"q4": (BlockKind.Q4, True), "q8": (BlockKind.Q8, False)}
EMBEDDED_SHAPES = "960x576,576x576,3072x576,576x1536"
LEAST_TILE_ROWS = 4
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


def best_ns(calls: Sequence[LinearCall], rounds: int) -> list[float]:
    """Return the shortest time of each call; they run in turn."""
    linear, best = native().lockstep_block_linear_alone, [math.inf] * len(calls)
    for _ in range(rounds):
        for at, call in enumerate(calls):
            begin = time.perf_counter_ns()
            linear(ctypes.byref(call.args))
            best[at] = min(best[at], time.perf_counter_ns() - begin)
    return best


def measure(weights: PackedBlocks, rows: int, rounds: int, *, tiles: bool) -> tuple[float, float]:
    """Return MAC/ns of the vector unit and of the matrix unit, NaN without one."""
    x_MK = torch.randn(rows, weights.num_inputs, generator=torch.Generator().manual_seed(rows))
    calls = [LinearCall(weights, x_MK, 0)]
    if tiles and rows >= LEAST_TILE_ROWS:
        calls.append(LinearCall(weights, x_MK, 1))
    times = best_ns(calls, rounds)
    for call in calls[1:]:
        if not torch.equal(call.out_MN.view(torch.int32), calls[0].out_MN.view(torch.int32)):
            raise RuntimeError(f"the units differ: {weights.num_outputs} x {weights.num_inputs}, {rows} rows")
    macs = rows * weights.num_inputs * weights.num_outputs
    return macs / times[0], macs / times[1] if len(times) > 1 else math.nan


def cell(value: float, peak: float) -> str:
    """Return a figure with its share of the peak."""
    return number(value, 0) if math.isnan(value) or math.isnan(peak) else f"{number(value, 0)} ({share(value / peak)})"


def shape_of(text: str) -> tuple[int, int]:
    """Parse OUTPUTSxINPUTS. Raises ArgumentTypeError."""
    outputs, _, inputs = text.partition("x")
    if not (outputs.isdigit() and inputs.isdigit()) or not int(outputs) or not int(inputs) or int(inputs) % BLOCK:
        raise argparse.ArgumentTypeError(f"{text!r} is not OUTPUTSxINPUTS with inputs that {BLOCK} divides")
    return int(outputs), int(inputs)


def rows_of(text: str) -> int:
    """Parse a number of rows. Raises ArgumentTypeError."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rows")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks bench_products",
        description="Time products over blocks of 4 and 8 bits on the units of this CPU, on one thread.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shapes", default=EMBEDDED_SHAPES, help=f"outputs x inputs of matrices (default: {EMBEDDED_SHAPES})"
    )
    parser.add_argument("--rows", default="1,8,16,64,256", help="rows of a call (default: 1,8,16,64,256)")
    parser.add_argument("--kinds", default="q4,q8", help="of q4, q8 (default: q4,q8)")
    parser.add_argument("--rounds", type=int, default=30, help="measurements of each, of which the best counts")
    args = parser.parse_args(argv)
    try:
        shapes, rows = [shape_of(s) for s in args.shapes.split(",")], [rows_of(r) for r in args.rows.split(",")]
        kinds = {name: KINDS[name] for name in args.kinds.split(",")}
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    except KeyError as error:
        parser.error(f"--kinds: {error} is none of {', '.join(KINDS)}")
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    if not can_multiply_blocks():
        print("this CPU has neither AVX2 nor aarch64's dot products", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        units = use_units(lambda: Path(folder) / "units.json", matrix=True)
        tops = peaks()
        bar, lines = Progress(len(kinds) * len(shapes) * len(rows)), []
        for name, (kind, offsets) in kinds.items():
            for shape in shapes:
                weights = random_blocks(kind, offsets, shape)
                for count in rows:
                    vector, matrix = measure(weights, count, args.rounds, tiles=units.matrix is not None)
                    tops_of = [cell(v, tops.get(u, math.nan)) for u, v in (("vector", vector), ("matrix", matrix))]
                    ratio = number(matrix / vector, 2)
                    lines.append([name, f"{shape[0]} x {shape[1]}", str(count), *tops_of, ratio])
                    bar.step(f"{name} {shape[0]} x {shape[1]}, {count} rows")
    print(f"{cpu_name()}: {units}; peaks in MAC/ns: {tops or 'not measured'}\n")
    print(table(["kind", "matrix", "rows", "vector, MAC/ns", "matrix, MAC/ns", "ratio"], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
