"""`python -m benchmarks pareto`: tokens/s of a user over tokens/s of all, by drafter, K and concurrency.

A point of the curve is a pass over all prompts of a group with so many users, each of which sends its next prompt when
the one before is answered. Invariant: every pass answers the same prompts greedily under the same grammars, and no
answer is drafted from an answer of another pass. Not responsible for: the equality of the token ids (see lossless.py),
the published tokens a step (see acceptance_plot.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.client import EngineClient
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, list_of, one_of, whole
from benchmarks.harness.measure import Run
from benchmarks.harness.server import EngineServer
from benchmarks.harness.tables import Progress, number, table
from benchmarks.quality.acceptance import Variant
from benchmarks.quality.acceptance_plot import draw_pareto, published_length
from benchmarks.quality.acceptance_prompts import OWN_GROUPS, AcceptancePrompt, own_prompts, read_prompts
from gpu_engine.api.engine_settings import MAX_DRAFT_TOKENS

EXAMPLES = """
Groups, --data and variants are those of `acceptance`. The suffix index is off: the passes have the same prompts.

examples:
  python -m benchmarks pareto --plot pareto.png
  python -m benchmarks pareto --variants ngram,eagle3:HEAD+free --drafts 3,7 --concurrency 1,4,16 --rounds 3
  python -m benchmarks pareto --data maskbench.jsonl --variants ngram,decoupled:DIR

reading the table:
  tok/s a user  tokens of an answer over the time from its call to its last token, the median of all answers
  tok/s         tokens of all users over the time of the pass, the median of the rounds
  tok/step      tokens per decode step of a sequence, bonus token included
  published     the same at K = 3 on H200, Llama 3.1 8B, by TensorRT-LLM; "-": nothing like it was published
  best          *: no other point of the group has more tok/s a user and more tok/s
"""


@dataclass(frozen=True, slots=True)
class Point:
    """A variant with K drafts and so many users on one group: a pass for each round."""

    variant: str
    drafts: int
    users: int
    group: str
    runs: tuple[Run, ...]

    @property
    def user_speed(self) -> float:
        """Tokens/s that a user sees, from the call on, the median of all answers.

        From the first token on would be another figure: a server may send several tokens in one response.
        """
        answers = [answer for run in self.runs for answer in run.answers]
        return statistics.median(len(answer.token_ids) / (answer.last_s - answer.started_s) for answer in answers)

    @property
    def speed(self) -> float:
        """Tokens/s of all users, the median of the rounds."""
        return statistics.median(sum(len(a.token_ids) for a in run.answers) / run.wall_s for run in self.runs)

    @property
    def length(self) -> float:
        """Tokens a step."""
        answers = [answer for run in self.runs for answer in run.answers]
        return sum(len(answer.token_ids) for answer in answers) / max(1, sum(answer.steps for answer in answers))


def front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other one of their group beats in both speeds, by the speed of a user."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (each.user_speed, each.speed), reverse=True):
        if all(other.group != point.group or other.speed < point.speed for other in best):
            best.append(point)
    return best


def result_table(points: Sequence[Point]) -> str:
    """Return the table: a row for each point."""
    best, rows = front(points), []
    for point in points:
        published = published_length(point.variant, point.group) if point.drafts == 3 else None
        rows.append([
            point.group, point.variant, str(point.drafts), str(point.users),
            number(point.user_speed), number(point.speed), number(point.length, 2),
            "-" if published is None else number(published, 2), "*" if point in best else "",
        ])  # fmt: skip
    return table(("group", "drafter", "K", "users", "tok/s a user", "tok/s", "tok/step", "published", "best"), rows)


async def measure(
    address: str,
    prompts: Sequence[AcceptancePrompt],
    cells: Sequence[tuple[str, int]],
    levels: Sequence[int],
    rounds: int,
    max_tokens: int,
    stepped: Callable[[str], None],
) -> list[Point]:
    """Run every pass on one server; `cells` are (variant, K). The rounds take the cells in turn."""
    client = EngineClient(address)
    runs: dict[tuple[str, int, int, str], list[Run]] = {}
    groups = list(dict.fromkeys(prompt.group for prompt in prompts))
    try:
        warm = [prompt.call(0, 16) for prompt in prompts]
        await client.run(warm[: max(levels)], max(levels))
        for _ in range(rounds):
            for group in groups:
                for users in levels:
                    for variant, drafts in cells:
                        calls = [prompt.call(drafts, max_tokens) for prompt in prompts if prompt.group == group]
                        while len(calls) < 2 * users:  # at least two batches, so that the end of the last weighs little
                            calls = [*calls, *calls]
                        run = await client.run(calls, users)
                        runs.setdefault((variant, drafts, users, group), []).append(run)
                        stepped(f"{group}: {variant} K={drafts} at {users}")
    finally:
        await client.close()
    return [Point(*key, tuple(found)) for key, found in runs.items()]


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add_engine_flags(parser, "model", "dtype", "device", "threads", "grammar-backend")
    add("--data", type=Path, metavar="FILE.jsonl", help="schemas with instances, in MaskBench's form")
    add("--count", type=whole(1), default=8, help="prompts of each group (default 8)")
    add(
        "--groups",
        type=list_of(one_of(OWN_GROUPS)),
        default="extraction,generation",
        metavar="NAME,...",
        help="without --data",
    )
    add("--max-tokens", type=whole(1), default=96)
    add(
        "--drafts",
        type=list_of(whole(1, MAX_DRAFT_TOKENS)),
        default="3,7",
        metavar="K,...",
        help="drafts a step to try (default 3,7)",
    )
    add(
        "--variants",
        type=list_of(Variant.parse),
        default="ngram",
        metavar="NAME,...",
        help="as in acceptance (default ngram)",
    )
    add(
        "--concurrency",
        type=list_of(whole(1)),
        default="1,2,4,8,16",
        metavar="USERS,...",
        help="(default 1,2,4,8,16)",
    )
    add("--rounds", type=whole(1), default=1, help="passes over each cell (default 1)")
    add("--plot", type=Path, metavar="FILE.png")
    add("--json", type=Path, metavar="FILE.json")
    return parser


def run(args: argparse.Namespace) -> list[Point]:
    """Measure every variant on its own server, the first one also without drafts. Raises ValueError as read_prompts."""
    prompts = read_prompts(args.data, args.count) if args.data else own_prompts(args.count, args.groups)
    groups = len({prompt.group for prompt in prompts})
    passes_of_a_cell = args.rounds * groups * len(args.concurrency)
    progress = Progress(passes_of_a_cell * (1 + len(args.variants) * len(args.drafts)))
    points: list[Point] = []
    for variant in args.variants:
        options = engine_options(
            args,
            prefix_cache=False,
            drafter=variant.drafter,
            num_draft_tokens=max(args.drafts),
            max_batch_size=max(args.concurrency),
            extra=("--draft-index-bytes=0", *variant.flags),
            internal=variant.internal,
        )
        cells = [(variant.name, k) for k in args.drafts]
        with EngineServer(options) as server:
            points += asyncio.run(
                measure(
                    server.address,
                    prompts,
                    [("no drafts", 0), *cells] if not points else cells,
                    args.concurrency,
                    args.rounds,
                    args.max_tokens,
                    progress.step,
                )
            )
    progress.close()
    return points


def main() -> int:
    """Measure, print and draw; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    try:
        points = run(args)
    except ValueError as error:
        parser.error(str(error))
    title = f"{args.model} {args.dtype} on {args.device}, greedy, {args.threads} threads, {args.grammar_backend}"
    print(f"{title}\n\n{result_table(points)}")
    if args.plot:
        draw_pareto(points, title, args.plot)
    if args.json:
        plain = [
            {
                **{"variant": p.variant, "drafts": p.drafts, "users": p.users, "group": p.group},
                **{"user_speed": p.user_speed, "speed": p.speed, "length": p.length},
            }
            for p in points
        ]
        args.json.write_text(json.dumps(plain, indent=1) + "\n")
    return 0
