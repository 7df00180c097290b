"""`python -m benchmarks bench_step`: a step of the CPU's engine, guided and free in turn, and its time outside of the
forward.

The server runs in this process, with its grammar process; requests go straight to the engine. Invariant: a step counts
only when all sequences decode in it. Guided and free rounds alternate, and their prompts are cached.
Not responsible for: the forward's own time by rows (see bench_forward.py), tokens per second (see serve.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.gpu.guided import SCHEMA
from benchmarks.harness.flags import harness_parser, list_of, whole
from benchmarks.harness.tables import number, table
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.engine_settings import EMBEDDED_MODEL
from gpu_engine.api.request import GrammarKind, GrammarSpec, Request, SamplingParams, TokenEvent
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.fused_forward import DeferringForward
from gpu_engine.server import Server, open_server, real_parts
from kernels.step_tensors import StepTensors

EXAMPLES = """
examples:
  python -m benchmarks bench_step                                   the embedded model, 1, 8 and 16 sequences, no drafts
  python -m benchmarks bench_step --threads 1 --lanes 16            figures of a machine that others use too
  python -m benchmarks bench_step --num-draft-tokens 7              with drafts: a step then has more rows

reading the table:
  step      milliseconds on the wall from one forward to the next, the median of a round, the median of the rounds
  outside   processor time of the engine's thread between the forwards of two steps: Python and sampling
  guided    the step of guided sequences over the step of free ones, the median of the rounds' own ratios
"""

_SETTLE = 8
"""First and last steps of a round, not counted: prompts, and sequences that come and go one by one."""
_PROMPT = "Write the record of a person with name, age and whether it is ok, as JSON, for the archive of the town. "
_MOST_TOKENS = 1900


@dataclass(slots=True)
class TimedForward:
    """A forward that notes when it began, on the wall and on the thread, and how long it took on the thread."""

    inner: DeferringForward
    steps: list[tuple[int, float, float, float]] = field(default_factory=list)
    """(sequences, wall, thread, thread inside of the forward so far), in seconds."""
    inside_s: float = 0.0

    @property
    def skips_padding(self) -> bool:
        """The inner one's."""
        return self.inner.skips_padding

    @property
    def takes_prompts(self) -> bool:
        """The inner one's."""
        return self.inner.takes_prompts

    def logits(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        """Run the inner forward."""
        begun_s = time.thread_time()
        lanes = 0 if ctx.prompts is not None else len(ids_BP)
        self.steps.append((lanes, time.perf_counter(), begun_s, self.inside_s))
        try:
            return self.inner.logits(ids_BP, ctx)
        finally:
            self.inside_s += time.thread_time() - begun_s

    def masked_head(self, step: StepTensors, num_rows: int) -> None:
        """Run the inner head."""
        begun_s = time.thread_time()
        self.inner.masked_head(step, num_rows)
        self.inside_s += time.thread_time() - begun_s

    def fill(self, ids_BP: torch.Tensor, ctx: AttentionContext) -> None:
        """Run the inner forward."""
        self.steps.append((0, 0.0, 0.0, 0.0))
        self.inner.fill(ids_BP, ctx)


async def run_round(
    server: Server, timed: TimedForward, lanes: int, tokens: int, *, guided: bool
) -> tuple[float, float]:
    """Return a step's milliseconds on the wall, and outside of the forward on the engine's thread."""
    engine, loop, ended = server.engine, asyncio.get_running_loop(), asyncio.Event()
    name, received, running = f"{time.perf_counter()}", 0, lanes
    timed.steps.clear()

    def sink(event: TokenEvent) -> None:
        nonlocal received, running
        received += len(event.token_ids)
        if event.finish is not None or event.error is not None:
            running -= 1
            if not running:
                loop.call_soon_threadsafe(ended.set)
        elif received >= tokens * lanes:
            received = -_MOST_TOKENS * lanes
            engine.abort(name)

    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)) if guided else None
    tokenizer: Any = server.model.tokenizer
    for lane in range(lanes):
        request = Request(
            request_id=name,
            index=lane,
            prompt_ids=tokenizer.encode(f"{lane}. " + _PROMPT * 3),
            sink=sink,
            sampling=SamplingParams(seed=lane, max_tokens=_MOST_TOKENS, temperature=0.0, ignore_eos=not guided),
            grammar=grammar,
        )
        engine.submit(request)
    await ended.wait()
    found = [
        (wall - wall_before, thread - thread_before - (inside - inside_before))
        for (before, wall_before, thread_before, inside_before), (now, wall, thread, inside) in zip(
            timed.steps, timed.steps[1:], strict=False
        )
        if before == now == lanes
    ][_SETTLE:-_SETTLE]
    if len(found) < _SETTLE:
        raise SystemExit(f"bench_step: only {len(found)} steps had all {lanes} sequences; take more --tokens")
    return statistics.median(wall for wall, _ in found) * 1e3, statistics.mean(out for _, out in found) * 1e3


async def measure(server: Server, timed: TimedForward, lanes: int, args: argparse.Namespace) -> list[str]:
    """Return a row of the table."""
    rounds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for turn in range(args.rounds + 1):
        for guided in (False, True) if turn % 2 else (True, False):
            found = await run_round(server, timed, lanes, args.tokens, guided=guided)
            if turn:  # the first one compiles the grammar and fills the prefix cache
                rounds[guided].append(found)
    free, guided_ones = rounds[False], rounds[True]
    ratio = statistics.median(one[0] / other[0] for one, other in zip(guided_ones, free, strict=True))
    figures = [statistics.median(each[at] for each in rounds[guided]) for at in (0, 1) for guided in (False, True)]
    return [str(lanes), *(number(figure, 2) for figure in figures), number(ratio, 2, "x")]


async def run(args: argparse.Namespace) -> list[list[str]]:
    """Start the server, and measure."""
    timed: list[TimedForward] = []
    parts = real_parts()

    def load(config: EngineConfig, progress: Any) -> Any:
        model: Any = parts.load_model(config, progress)
        if not isinstance(model.fused.forward, DeferringForward):
            raise SystemExit(f"bench_step: {args.model} has no native forward on this CPU")
        timed.append(TimedForward(model.fused.forward))
        forward: DeferringForward = timed[0]  # by this type mypy checks its members
        model.fused = replace(model.fused, forward=forward)
        return model

    config = EngineConfig(
        model=args.model,
        max_batch_size=max(args.lanes),
        num_draft_tokens=args.num_draft_tokens,
        num_threads=args.threads,
    )
    with tempfile.TemporaryDirectory() as directory:
        settings = ServerConfig(listen=f"unix:{directory}/engine")
        async with open_server(config, settings, parts=replace(parts, load_model=load)) as server:
            return [await measure(server, timed[0], count, args) for count in args.lanes]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--model", default=EMBEDDED_MODEL, help="as the engine's setting (default: embedded)")
    add("--lanes", type=list_of(whole(1)), default="1,8,16", help="sequences at once (default: 1,8,16)")
    add("--num-draft-tokens", type=whole(0), default=0, help="drafts per step (default: 0)")
    add("--tokens", type=whole(1), default=96, help="tokens of each sequence in a round (default: 96)")
    add("--rounds", type=whole(1), default=5, help="rounds of each kind (default: 5)")
    add("--threads", type=whole(0), default=0, help="threads of the model; 0: the cores there are (default: 0)")
    args = parser.parse_args(argv)
    rows = asyncio.run(run(args))
    heads = ("sequences", "step, ms", "guided, ms", "outside, ms", "guided outside, ms", "guided")
    print(f"{args.model}, {torch.get_num_threads()} threads, K = {args.num_draft_tokens}\n\n{table(heads, rows)}")
    return 0
