"""`python -m benchmarks kinds`: what each kind of GGUF file computes, and whether drafts leave its tokens as they are.

The embedded model is written in each kind (`tools/requantise.py`), and again in float32 with the numbers that the gguf
package reads from that file. Invariant: logits are compared with the second file's, so the rounding of a kind itself
is in no column. Not responsible for: how good a kind's weights are (see quantisation.py).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.harness.comparison import compare
from benchmarks.harness.flags import harness_parser, whole
from benchmarks.harness.server import ServerOptions, start_engine
from benchmarks.harness.tables import Progress, number, table
from benchmarks.quality.divergence import WindowLogits, windows
from benchmarks.quality.lossless import Variant, make_cases, run_variants
from benchmarks.quality.quantisation import TEXT
from gpu_engine.api.config import EngineConfig
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.loader import load_model
from tools.requantise import KINDS, write

EXAMPLES = """
examples:
  python -m benchmarks kinds                               every kind, about a minute each on two cores
  python -m benchmarks kinds --kinds q4_k q6_k --count 10  two kinds, ten answers each
  python -m benchmarks kinds --count 0                     logits only

reading the table:
  largest, mean   of the differences of logits from those of float32 with the gguf package's numbers
  relative        norm of the differences over the norm of the logits, less their mean
  same best       positions of the text with the same most likely token
  lossless        answers that have equal tokens without drafts one at a time, and with seven drafts in a batch of
                  eight

exit code: 0, 1 an answer differs or a model is refused, 2 a server failed
"""


@dataclass(slots=True)
class Distance:
    """How far the logits of a model are from its reference's, over the positions of a text."""

    positions: int = 0
    largest: float = 0.0
    total: float = 0.0
    numbers: int = 0
    square: float = 0.0
    reference_square: float = 0.0
    same_best: int = 0

    def add(self, logits_PV: torch.Tensor, reference_PV: torch.Tensor) -> None:
        """Count the positions of one window."""
        far_PV = (logits_PV.float() - reference_PV.float()).abs()
        self.positions += len(far_PV)
        self.largest = max(self.largest, float(far_PV.max()))
        self.total += float(far_PV.double().sum())
        self.numbers += far_PV.numel()
        self.square += float(far_PV.double().square().sum())
        centred_PV = reference_PV.double() - reference_PV.double().mean(dim=1, keepdim=True)
        self.reference_square += float(centred_PV.square().sum())
        self.same_best += int((logits_PV.argmax(-1) == reference_PV.argmax(-1)).sum())

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        relative = (self.square / self.reference_square) ** 0.5
        return [
            number(self.largest, 3),
            number(self.total / self.numbers, 4),
            f"{relative:.1e}",
            f"{self.same_best} of {self.positions}",
        ]


def distance_of(file: Path, plain: Path, args: argparse.Namespace) -> Distance:
    """Load both files in turn, and compare their logits over the text."""
    reference = load_model(_config(plain, args, dtype="float32", quantization="none"))
    ids = reference.tokenizer.backend_tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids
    texts = windows(ids[: args.positions], args.window)
    theirs = WindowLogits(reference, args.window)
    wanted = [theirs(ids_P).float().clone() for ids_P in texts]
    del reference, theirs
    ours, found = WindowLogits(load_model(_config(file, args)), args.window), Distance()
    for ids_P, want_PV in zip(texts, wanted, strict=True):
        found.add(ours(ids_P), want_PV)
    return found


def _config(file: Path, args: argparse.Namespace, dtype: str = "auto", quantization: str = "auto") -> EngineConfig:
    return EngineConfig(model=str(file), device="cpu", dtype=dtype, quantization=quantization, num_threads=args.threads)


def lossless(kind: str, file: Path, args: argparse.Namespace) -> tuple[str, bool]:
    """Return how many answers have equal tokens in both variants, and whether all do."""
    cases = make_cases(args.count, args.max_tokens)
    variants = [Variant(0, 1), Variant(7, 8)]
    options = ServerOptions(
        model=str(file),
        dtype="auto",
        num_threads=args.threads,
        prefix_cache=False,
    )
    with start_engine(options) as address:
        results = asyncio.run(run_variants(address, cases, variants))
    differences = [each for variant in variants[1:] for each in compare(results[variants[0]], results[variant])]
    for each in differences:
        print(f"{kind}: differs: {each}", file=sys.stderr)
    changed = {each.name for each in differences}
    return f"{len(cases) - len(changed)} of {len(cases)}", not changed


def rows_of(kinds: Sequence[str], args: argparse.Namespace, progress: Progress, rows: list[list[str]]) -> bool:
    """Add a row for each kind; return whether all are served with equal answers."""
    all_equal = True
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="lockstep-kinds-", dir=args.folder) as folder:
            step = partial(progress.step, kind)
            file, plain = Path(folder, f"{kind}.gguf"), Path(folder, f"{kind}-float32.gguf")
            write(kind, file, plain)
            step()
            try:
                cells = [kind.upper(), *distance_of(file, plain, args).cells()]
            except ModelNotSupported as refusal:
                print(f"{kind}: {refusal}", file=sys.stderr)
                rows.append([kind.upper(), "refused"])
                all_equal = False
                progress.total -= 2
                continue
            finally:
                plain.unlink()
            step()
            if args.count:
                answers, equal = lossless(kind, file, args)
                cells.append(answers)
                all_equal &= equal
            rows.append(cells)
            progress.step(" ".join(cells))
    return all_equal


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add(
        "--kinds",
        nargs="+",
        type=str.lower,
        choices=KINDS,
        default=KINDS,
        metavar="KIND",
        help=f"of {', '.join(KINDS)} (default all)",
    )
    add("--positions", type=whole(2), default=512, help="tokens of the text (default 512)")
    add("--window", type=whole(2), default=128, help="tokens of a window; each starts without a context (default 128)")
    add("--count", type=whole(0), default=40, help="answers to compare (default 40); 0: none")
    add("--max-tokens", type=whole(1), default=32, help="tokens per answer (default 32)")
    add(
        "--threads",
        type=whole(1),
        default=len(os.sched_getaffinity(0)),
        help="threads of a forward (default: all cores)",
    )
    add("--folder", help="where models are written, 1 GB at a time; default: a temporary folder")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    args = build_parser().parse_args(argv)
    transformers_logging.disable_progress_bar()
    header = ["kind", "largest", "mean", "relative", "same best", *(["lossless"] if args.count else [])]
    progress, rows = Progress(3 * len(args.kinds)), list[list[str]]()
    try:
        all_equal = rows_of(args.kinds, args, progress, rows)
    finally:
        progress.close()
        print(table(header, rows))
    return 0 if all_equal else 1
