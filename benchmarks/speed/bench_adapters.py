"""`python -m benchmarks bench_adapters`: what LoRA adapters cost in the forward of a decode step.

The adapters are random: their time does not depend on their numbers. Invariant: all columns run alternately in one
process, over the same tokens and contexts, so that the ratios hold on a shared machine.
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
from gpu_engine.model.adapters.peft_files import LoraFiles, LoraMatrices
from gpu_engine.model.adapters.pool import AdapterPool
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel, load_model

EXAMPLES = """
examples:
  python -m benchmarks bench_adapters                          the embedded model on this CPU
  python -m benchmarks bench_adapters --lanes 1,8,16 --rank 64
  python -m benchmarks bench_adapters --model /models/Qwen3-0.6B --quantization q4

reading the table:
  lanes       sequences of the step, one row each
  none        milliseconds of a model that takes no adapters, the lower quartile of the rounds
  idle        time over it of a model with eight adapters, no row of which has one
  one, eight  time over it where all rows have one adapter, and where they have eight in turn
"""

PAGE, CONTEXT = 16, 300


def random_adapter(pool: AdapterPool, rank: int, seed: int) -> LoraFiles:
    """Return an adapter of every product of the model."""
    generator = torch.Generator().manual_seed(seed)
    return LoraFiles(
        {
            path: LoraMatrices(
                torch.randn(rank, place.inputs, generator=generator) * 0.01,
                torch.randn(place.outputs, rank, generator=generator) * 0.01,
                1.0,
            )
            for path, place in pool.places.by_path.items()
        }
    )


def forward_of(model: LoadedModel, lanes: int, numbers: Sequence[int] | None) -> Callable[[], float]:
    """Return a function that runs a forward of one row a lane, with these adapters, and gives its milliseconds."""
    pages = -(-(CONTEXT + 1) // PAGE)
    table_BN = torch.arange(lanes * pages, dtype=torch.int32).view(lanes, pages)
    positions_B1 = torch.full((lanes, 1), CONTEXT, dtype=torch.int32)
    ctx = AttentionContext(model.allocate_pages(lanes * pages, PAGE), table_BN, positions_B1)
    numbers_B = None if numbers is None else torch.tensor(numbers, dtype=torch.int32)
    ids_B1 = torch.arange(lanes)[:, None] * 91 % model.vocab_size

    def run() -> float:
        ctx.adapters, ctx.adapters_B = None, numbers_B
        begin_s = time.perf_counter()
        model.logits(ids_B1, ctx)
        return (time.perf_counter() - begin_s) * 1e3

    return run


@torch.inference_mode()
def compare(plain: LoadedModel, adapted: LoadedModel, lanes: int, rounds: int) -> list[str]:
    """Return a row of the table."""
    runs = [
        forward_of(plain, lanes, None),
        forward_of(adapted, lanes, [0] * lanes),
        forward_of(adapted, lanes, [1] * lanes),
        forward_of(adapted, lanes, [1 + lane % 8 for lane in range(lanes)]),
    ]
    for run in runs * 3:
        run()
    times = []
    for turn in range(rounds):
        order = list(range(len(runs)))[:: 1 if turn % 2 else -1]
        # The second of two runs in a row: the first may find another model's weights in the caches.
        found = {which: (runs[which](), runs[which]())[1] for which in order}
        times.append([found[which] for which in range(len(runs))])
    ratios = [statistics.median(row[which] / row[0] for row in times) for which in range(1, len(runs))]
    return [str(lanes), number(sorted(row[0] for row in times)[rounds // 4], 2), *(number(r, 3) for r in ratios)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = harness_parser(__doc__, EXAMPLES)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="as the engine's setting (default: embedded)")
    parser.add_argument("--dtype", default="auto", help="as the engine's setting (default: auto)")
    parser.add_argument("--quantization", default="auto", help="as the engine's setting (default: auto)")
    parser.add_argument(
        "--lanes", type=list_of(whole(1)), default="1,8,16", help="sequences of the step (default: 1,8,16)"
    )
    parser.add_argument("--rank", type=whole(1), default=16, help="of the adapters (default: 16)")
    parser.add_argument("--rounds", type=whole(1), default=60, help="measurements of each (default: 60)")
    parser.add_argument("--threads", type=whole(0), default=0, help="threads; 0: the cores there are (default: 0)")
    args = parser.parse_args(argv)
    models = []
    for room in (0, 1 << 34):
        config = EngineConfig(
            model=args.model,
            device="cpu",
            dtype=args.dtype,
            quantization=args.quantization,
            num_threads=args.threads,
            max_adapter_bytes=room,
        )
        models.append(load_model(config, lambda stage, done: print(f"{done:4.0%} {stage}", file=sys.stderr)))
    plain, adapted = models
    assert isinstance(adapted.adapters, AdapterPool)
    files = [random_adapter(adapted.adapters, args.rank, seed) for seed in range(8)]
    for seed, each in enumerate(files):
        adapted.adapters.put(seed + 1, each)
    print(f"{plain!r}, context {CONTEXT}, adapters of rank {args.rank} and {files[0].memory_bytes >> 20} MiB")
    lines = [compare(plain, adapted, lanes, args.rounds) for lanes in args.lanes]
    print(table(["lanes", "none, ms", "idle", "one", "eight"], lines))
    return 0
