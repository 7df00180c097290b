"""`python -m benchmarks bench_kernels`: what each GPU kernel of a step takes, inside a captured graph.

Invariant: a case is captured several times in a row and the graph is replayed, so that a figure is what the kernels
cost as nodes of the step's graph, gaps included; data larger than the L2 cache is rotated where a step would find it
cold. Not responsible for: the step, the model.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.harness.flags import harness_parser
from benchmarks.harness.tables import number, table
from kernels.accept import AcceptResult, SlotParams, StepTensors
from kernels.paged_attention import KVPages

EXAMPLES = """
examples:
  python -m benchmarks bench_kernels                        every kernel in the shapes of an 8B model
  python -m benchmarks bench_kernels --only attention       a part of them
  python -m benchmarks bench_kernels --sweep                how attention and the row kernels could be cut instead

reading the table:
  us      microseconds a call, median of the replays; a call may be several kernels
  goal    what the design asks for, where it does
  GB/s    bytes that the call must move over its time; the first line is a plain copy, the ceiling
"""

VOCAB = 128_256
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
DEVICE = "cuda"
COLD_BYTES = 256 << 20
"""More than any L2 cache: so much is rotated."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    name: str
    calls: list[Call]
    """The same work over different memory; captured one after the other."""
    num_bytes: int = 0
    """Bytes that one call must read and write."""
    goal_us: float = 0.0
    num_flops: int = 0


def time_us(calls: list[Call], *, least: int = 20, replays: int = 15) -> float:
    """Return the median time of one call inside a graph of at least `least` of them."""
    rounds = -(-least // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:1] * 2 + calls:  # compiles, and fills the caches of the allocator
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def ints(*shape: int) -> torch.Tensor:
    """Zeros on the device."""
    return torch.zeros(shape, dtype=torch.int32, device=DEVICE)


def copy_cases() -> Iterator[Case]:
    """The ceiling."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    yield Case("copy of 1 GiB", [copy], 2 << 30)


def step_tensors(
    B: int, P: int, *, kind: int = 0, block: int = 2048, filters: bool = True, logprobs: bool = True
) -> StepTensors:
    """Return lanes with greedy slots whose drafts are never accepted, so that a replay changes little."""
    from kernels.cuda.row_state import DeviceRows, RowScratch, SlotRows

    masks = torch.full((B, P, VOCAB // 32), -2, dtype=torch.int32, device=DEVICE)
    rows = SlotRows.allocate(B, VOCAB, masks, torch.zeros(B, dtype=torch.bool, device=DEVICE))
    params = SlotParams.allocate(B, DEVICE)
    params.top_p_S.fill_(1.0)
    params.repetition_S.fill_(1.0)
    params.num_logprobs_S.fill_(-1)
    params.max_length_S.fill_(1 << 30)
    params.prompt_length_S.fill_(10)
    scratch = RowScratch.allocate(B * P, VOCAB, DEVICE, block=block)
    return StepTensors(
        slots_B=torch.arange(B, dtype=torch.int32, device=DEVICE),
        drafts_BR=ints(B, P) - 1,
        num_drafts_B=ints(B) + P - 1,
        kinds_BR=torch.full((B, P), kind, dtype=torch.uint8, device=DEVICE),
        forced_BR=ints(B, P),
        mask_address=0,
        mask_strides=(0, 0),
        history_SL=ints(B, 8192),
        length_S=ints(B) + 10,
        params=params,
        result=AcceptResult.allocate(B, P, VOCAB, DEVICE),
        device=DeviceRows(rows, scratch, filters=filters, logprobs=logprobs),
    )


def accept_cases() -> Iterator[Case]:
    """Verification: rows of logits that the head has just written, so they are warm."""
    from kernels.cuda.accept import accept, draw_drafts

    modes: dict[str, tuple[dict[str, float], float]] = {
        "greedy": ({}, 25.0),
        "sampled": ({"temperature": 0.8}, 60.0),
        "top-p": ({"temperature": 0.8, "top_p": 0.9}, 300.0),
        "top-k and top-p": ({"temperature": 0.8, "top_k": 40, "top_p": 0.95}, 300.0),
        "min-p": ({"temperature": 0.8, "min_p": 0.05}, 300.0),
        "penalties": ({"repetition": 1.2}, 0.0),
        "20 logprobs": ({"num_logprobs": 20}, 0.0),
    }
    for (B, P), (mode, (fields, goal)) in itertools.product(((1, 4), (32, 4), (128, 1)), modes.items()):
        logits = (torch.randn(B * P, VOCAB, device=DEVICE) * 3).bfloat16()
        lean = mode in ("greedy", "sampled", "penalties")
        step = step_tensors(B, P, filters=not lean, logprobs=mode == "20 logprobs")
        for name, value in fields.items():
            getattr(step.params, f"{name}_S").fill_(value)

        def verify(logits: torch.Tensor = logits, step: StepTensors = step, P: int = P) -> None:
            accept(logits, step, num_rows=P)
            step.length_S.fill_(10)  # one node more, so that history never fills up

        yield Case(f"accept {B}x{P} {mode}", [verify], 2 * logits.numel(), goal if B == 1 else 0.0)
    logits, step = torch.randn(4, VOCAB, device=DEVICE).bfloat16(), step_tensors(1, 4, kind=1, filters=False)
    step = replace(step, device=replace(step.device, logprobs=False)) if step.device else step
    yield Case("accept 1x4 greedy, masked", [lambda: accept(logits, step, num_rows=4)], 2 * logits.numel(), 25.0)
    idle = step_tensors(1, 4)
    yield Case("accept 1x4 greedy, all kernels there", [lambda: accept(logits, idle, num_rows=4)], 2 * logits.numel())
    yield Case("draft 1 greedy, masked", [lambda: draw_drafts(logits[:1], step, 1)], 2 * VOCAB, 25.0)


def attention_cases() -> Iterator[Case]:
    """Decode at several batch sizes, and prefill, over caches that are cold."""
    for B, P, context in ((1, 1, 2048), (1, 4, 2048), (1, 4, 8000), (8, 4, 2048), (32, 4, 2048), (128, 4, 2048)):
        calls, num_bytes = attention(B, P, context)
        yield Case(f"attention {B}x{P}, context {context}", calls, num_bytes)
    for P, start in ((128, 0), (512, 0), (512, 2048), (512, 7500)):
        calls, num_bytes = attention(1, P, start + P)
        pairs = P * start + P * (P + 1) // 2
        flops = 4 * HEADS * HEAD_DIM * pairs
        yield Case(f"prefill of {P} at {start}", calls, num_bytes, num_flops=flops)


def attention(B: int, P: int, context: int, **options: object) -> tuple[list[Call], int]:
    """Return calls over as many caches as the L2 cannot hold, and the bytes of one."""
    from kernels.cuda.attention.paged import paged_attention

    pages = -(-context // PAGE) * B
    num_bytes = 2 * 2 * B * context * KV_HEADS * HEAD_DIM
    copies = min(16, max(1, COLD_BYTES // num_bytes))
    width = 8192 // PAGE
    table_BN = torch.zeros(B, width, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(pages, device=DEVICE).int().view(B, -1)
    table_BN[:, : order.shape[1]] = order
    positions_BP = (torch.arange(context - P, context, device=DEVICE).int()).expand(B, P).contiguous()
    q = torch.randn(B, P, HEADS, HEAD_DIM, device=DEVICE).bfloat16()
    k, v = (torch.randn(B, P, KV_HEADS, HEAD_DIM, device=DEVICE).bfloat16() for _ in range(2))

    def call(cache: KVPages) -> Call:
        def attend() -> None:
            paged_attention(q, k, v, cache, table_BN, positions_BP, scale=HEAD_DIM**-0.5, **options)  # type: ignore[arg-type]

        return attend

    caches = []
    for _ in range(copies):
        cache = KVPages.allocate(pages, KV_HEADS, HEAD_DIM, PAGE, torch.bfloat16, torch.device(DEVICE))
        cache.k.normal_()
        cache.v.normal_()
        caches.append(cache)
    return [call(cache) for cache in caches], num_bytes


def small_cases() -> Iterator[Case]:
    """What stands around the model in a step."""
    from kernels.cuda.ngram import propose_ngram
    from kernels.cuda.posting import CachedRows, PostTensors, cache_rows, pack_post
    from kernels.cuda.step_inputs import load_step

    for B, P in ((1, 4), (32, 4)):
        step, gens, limit = step_tensors(B, P, kind=1), ints(B), ints(B) + P - 1
        slots, flags = step.slots_B, torch.ones(B, dtype=torch.bool, device=DEVICE)
        words = VOCAB // 32
        masks = torch.full((2, B, P, words), -2, dtype=torch.int32, pin_memory=DEVICE == "cuda")
        kept = CachedRows(
            *(ints(B, P, words), step.kinds_BR.clone(), ints(B, P), torch.zeros(B, P, dtype=torch.bool, device=DEVICE))
        )
        lanes = [ints(B) for _ in range(6)]
        answers = step.kinds_BR.clone(), ints(B, P)
        out = PostTensors(lanes[0], lanes[1], lanes[2], lanes[3], lanes[4], lanes[5], ints(B, 2 * P), *answers)
        out.need_rows_B.fill_((1 << P) - 1)
        counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        posted, ids, table_BN = ints(B), torch.zeros(B, P, dtype=torch.int64, device=DEVICE), ints(B, 512)
        history, length = step.history_SL, ints(B) + 2048
        history.copy_(torch.randint(0, 1000, history.shape, device=DEVICE))
        drafts, num = ints(B, P), ints(B)
        done = torch.zeros(B, dtype=torch.bool, device=DEVICE)
        inputs = (slots, history, length, drafts, num, done, table_BN, ids, ints(B, P), ints(B, P), ints(B))
        post = (slots, flags, flags, gens, drafts, num, history, length, length, posted, kept, out)
        keep = (slots, flags, flags, out, counter, masks, kept, step.kinds_BR, step.forced_BR)
        lookup = (slots, history, length, length // 2, limit, step.params.max_length_S, drafts, num)
        row_bytes = B * P * words * 4

        def call(function: Callable[..., None], *arguments: object, **options: object) -> list[Call]:
            return [lambda: function(*arguments, **options)]

        yield Case(f"load_step {B}x{P}", call(load_step, *inputs, ints(B, 512)))
        yield Case(f"pack_post {B}x{P}", call(pack_post, *post))
        yield Case(f"cache_rows {B}x{P}, all over the bus", call(cache_rows, *keep), row_bytes)
        yield Case(f"ngram {B}, history 2048", call(propose_ngram, *lookup, ngram_max=4))


def sweep_cases() -> Iterator[Case]:
    """Other cuts of the kernels that matter."""
    from kernels.cuda.accept import accept
    from kernels.cuda.attention.paged import DecodeTuning

    cuts = itertools.product(((1, 4), (32, 4)), (128, 256, 512), (32, 64, 128), (4, 8), (2, 3))
    for (B, P), split, block, warps, stages in cuts:
        tuning = DecodeTuning(block_n=block, num_warps=warps, num_stages=stages)
        calls, num_bytes = attention(B, P, 2048, split_len=split, tuning=tuning)
        yield Case(f"attention {B}x{P} split {split} block {block} warps {warps} stages {stages}", calls, num_bytes)
    for (B, P), block, temperature in itertools.product(((1, 4), (32, 4)), (1024, 2048, 4096), (0.0, 0.8)):
        step = step_tensors(B, P, block=block, filters=False, logprobs=False)
        step.params.temperature_S.fill_(temperature)
        logits = torch.randn(B * P, VOCAB, device=DEVICE).bfloat16()

        def verify(logits: torch.Tensor = logits, step: StepTensors = step, P: int = P) -> None:
            accept(logits, step, num_rows=P)
            step.length_S.fill_(10)

        yield Case(f"accept {B}x{P} T={temperature} tile {block}", [verify], 2 * logits.numel())


PARTS: dict[str, Callable[[], Iterator[Case]]] = {
    "copy": copy_cases,
    "accept": accept_cases,
    "attention": attention_cases,
    "small": small_cases,
}


def main() -> int:
    """Run the cases and print the table."""
    parser = harness_parser(__doc__, EXAMPLES)
    parser.add_argument("--only", choices=PARTS, help="one part of the table")
    parser.add_argument("--sweep", action="store_true", help="other cuts of attention and of the row kernel")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_kernels: no CUDA device here; nothing is measured", file=sys.stderr)
        return 1
    parts = [sweep_cases] if options.sweep else [PARTS[options.only]] if options.only else list(PARTS.values())
    lines = []
    for case in itertools.chain.from_iterable(part() for part in parts):
        try:
            us = time_us(case.calls)
        except Exception as error:  # a cut that does not fit the chip must not end the sweep
            if not options.sweep:
                raise
            lines.append([case.name, type(error).__name__, "", "", ""])
            continue
        goal = number(case.goal_us, 0) if case.goal_us else ""
        rate = number(case.num_bytes / us / 1e3, 0) if case.num_bytes else ""
        flops = number(case.num_flops / us / 1e6, 0) if case.num_flops else ""
        lines.append([case.name, number(us, 1), goal, rate, flops])
        print(f"{case.name}: {us:.1f} us", file=sys.stderr, flush=True)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(table(["kernel", "us", "goal", "GB/s", "TFLOP/s"], lines))
    return 0
