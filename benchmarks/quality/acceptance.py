"""`python -m benchmarks acceptance`: tokens per step, by drafter, drafts per step, draft masks and jump-forward tokens.

Invariant: every drafter answers the same prompts greedily under the same grammars, so the texts are equal and only the
number of steps differs; an answer that differs from the one without drafts fails the run.
Not responsible for: training a head.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.client import CallRefused, EngineClient
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, list_of, one_of, whole
from benchmarks.harness.measure import Answer
from benchmarks.harness.server import EngineServer
from benchmarks.harness.tables import Progress, number, table
from benchmarks.quality.acceptance_plot import PUBLISHED, PUBLISHED_GROUPS, draw
from benchmarks.quality.acceptance_prompts import OWN_GROUPS, AcceptancePrompt, own_prompts, read_prompts
from gpu_engine.api.engine_settings import MAX_DRAFT_TOKENS

EXAMPLES = """
Groups of prompts: "extraction", where the prompt states the facts that the answer is made of, "generation", where it
states only the schema, and "repeated", jobs and tool calls with three schemas in turn. With --data FILE.jsonl
(MaskBench's form) the first two are its JME_* schemas with the facts of a valid instance, and a spread over its other
groups, and the third is left out; without it they are the workloads of `serve` and `repeated`. Every K has a server of
its own, so that the suffix index has seen nothing but the prompts before.

A variant is a drafter with marks: +masked or +free for a network's drafts with or without masks (default: without),
+forced or +unforced for jump-forward tokens before its drafts or not ("grammar": only jump-forward tokens), +fN
for at most N of them (--jump-forward-tokens; only with the largest K, because a request that names its K has no more
drafts in all), +noindex for prompt lookup without the suffix index, +tree for a verified tree of drafts on a GPU,
+fixed for K drafts in every step, as published acceptance lengths are measured, +q4 and +int8 for a draft model with
products of so many bits:
  ngram   ngram+noindex   ngram+unforced   ngram+f15   grammar   eagle3:DIR+masked   eagle3:DIR+free   model:DIR
  decoupled:DIR   decoupled:embedded+q4 (with --dtype bfloat16: the model drafts for itself with 4 bits)

examples:
  python -m benchmarks acceptance --variants ngram+unforced,ngram+forced --drafts 1,3,7
  python -m benchmarks acceptance --data maskbench.jsonl --variants eagle3:head+masked,eagle3:head+free --plot acc.png
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to start the server."""

    name: str
    drafter: str
    draft_model: str
    flags: tuple[str, ...]
    internal: Mapping[str, Any] = field(default_factory=dict)
    """Values of the server that are no settings."""

    @staticmethod
    def parse(text: str) -> Variant:
        """Return the variant of a word on the command line; raises ValueError."""
        base, *marks = text.split("+")
        drafter, _, folder = base.partition(":")
        if not drafter:
            raise ValueError("a drafter is missing")
        known = {
            "free": ("--draft-masks", "off"),
            "masked": ("--draft-masks", "on"),
            "forced": (),
            "unforced": ("--jump-forward-tokens", "0"),
            "noindex": ("--draft-index-bytes", "0"),
            "tree": ("--draft-tree", "on"),
            "fixed": (),
            **{kind: ("--draft-quantization", kind) for kind in ("q4", "int8")},
            **{f"f{most}": ("--jump-forward-tokens", str(most)) for most in range(MAX_DRAFT_TOKENS + 1)},
        }
        if unknown := [mark for mark in marks if mark not in known]:
            names = "free, masked, forced, unforced, noindex, tree, fixed, q4, int8, fN"
            raise ValueError(f"{', '.join(unknown)} is none of {names}")
        flags = tuple(flag for mark in marks for flag in known[mark])
        name = "+".join([drafter, *marks])
        flags = ("--draft-model", folder, *flags) if folder else flags
        return Variant(name, drafter, folder, flags, {"verifies_every_draft": True} if "fixed" in marks else {})


@dataclass(frozen=True, slots=True)
class Cell:
    """A variant with K drafts on one group."""

    variant: str
    drafts: int
    group: str
    answers: tuple[Answer, ...]
    wall_s: float

    @property
    def length(self) -> float:
        """Tokens a step, bonus token included; the prefill's token counts as a step of one."""
        return sum(len(answer.token_ids) for answer in self.answers) / max(1, sum(a.steps for a in self.answers))

    @property
    def speed(self) -> float:
        """Tokens a second, end to end."""
        return sum(len(answer.token_ids) for answer in self.answers) / self.wall_s


async def answer(
    address: str,
    prompts: Sequence[AcceptancePrompt],
    drafts: int,
    max_tokens: int,
    progress: Progress,
    *,
    named: bool = True,
) -> list[Cell]:
    """Answer every prompt, one at a time; a rejected one is skipped. `named`: requests carry the number of drafts."""
    client, cells = EngineClient(address), []
    try:
        for group in dict.fromkeys(prompt.group for prompt in prompts):
            answers, wall_s = [], 0.0
            for prompt in prompts:
                if prompt.group == group:
                    try:
                        answers.append(await client.generate(prompt.call(drafts if named else None, max_tokens)))
                        wall_s += answers[-1].last_s - answers[-1].started_s
                    except CallRefused as refusal:
                        print(f"skipped: {refusal}", file=sys.stderr)
                    progress.step(f"{group} K={drafts}")
            cells.append(Cell("", drafts, group, tuple(answers), wall_s))
    finally:
        await client.close()
    return cells


def differing(cells: Sequence[Cell], reference: Sequence[Cell]) -> list[str]:
    """Return the prompts whose tokens are not those without drafts."""
    expected = {(cell.group, a.name): a.token_ids for cell in reference for a in cell.answers}
    return [a.name for cell in cells for a in cell.answers if expected.get((cell.group, a.name)) != a.token_ids]


def result_table(cells: Sequence[Cell]) -> str:
    """Return tokens a step and tokens a second, a row for each variant and K."""
    base = {cell.group: cell.speed for cell in cells if cell.drafts == 0}
    groups = list(dict.fromkeys(cell.group for cell in cells))
    header = ["drafter", "K", *[f"{group}: tok/step" for group in groups], *[f"{group}: tok/s" for group in groups]]
    header += [f"{group}: x K=0" for group in groups]
    rows = []
    for variant, drafts in dict.fromkeys((cell.variant, cell.drafts) for cell in cells):
        row = [cell for cell in cells if (cell.variant, cell.drafts) == (variant, drafts)]
        rows.append([variant, str(drafts), *[number(cell.length, 2) for cell in row], *[number(c.speed) for c in row]])
        rows[-1] += [number(cell.speed / base[cell.group], 2) if cell.group in base else "-" for cell in row]
    for name, _, *lengths in PUBLISHED:
        figures = dict(zip(PUBLISHED_GROUPS, lengths, strict=True))
        if not figures.keys() & set(groups):
            continue
        shown = [number(figures[group], 2) if group in figures else "" for group in groups]
        rows.append([f"published: {name}", "3", *shown, *[""] * (2 * len(groups))])
    return table(header, rows)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add_engine_flags(parser, "model", "dtype", "device", "threads", "grammar-backend")
    add("--data", type=Path, metavar="FILE.jsonl", help="schemas with instances, in MaskBench's form")
    add("--count", type=whole(1), default=12, help="prompts of each group, four times as many of repeated (default 12)")
    add(
        "--groups",
        type=list_of(one_of(OWN_GROUPS)),
        default=",".join(OWN_GROUPS),
        metavar="NAME,...",
        help="without --data (default: all)",
    )
    add("--max-tokens", type=whole(1), default=128)
    add(
        "--drafts",
        type=list_of(whole(1, MAX_DRAFT_TOKENS)),
        default="1,2,3,5,7",
        metavar="K,...",
        help="drafts a step to try (default 1,2,3,5,7)",
    )
    add(
        "--variants",
        type=list_of(Variant.parse),
        default="ngram+unforced,ngram+forced,grammar",
        metavar="NAME,...",
        help="see below",
    )
    add("--plot", type=Path, metavar="FILE.png")
    add("--json", type=Path, metavar="FILE.json")
    return parser


def run(args: argparse.Namespace) -> tuple[list[Cell], list[str]]:
    """Measure every variant; return the cells and what differed. Raises ValueError as read_prompts."""
    prompts = read_prompts(args.data, args.count) if args.data else own_prompts(args.count, args.groups)
    num_groups = len({prompt.group for prompt in prompts})
    progress = Progress(len(prompts) * (1 + len(args.variants) * len(args.drafts)))
    cells: list[Cell] = []
    wrong: list[str] = []
    for number_, variant in enumerate(args.variants):
        options = engine_options(
            args,
            prefix_cache=False,
            drafter=variant.drafter,
            num_draft_tokens=max(args.drafts),
            max_batch_size=4,
            extra=variant.flags,
            internal=variant.internal,
        )
        for k in [0, *args.drafts] if number_ == 0 else args.drafts:
            with EngineServer(options) as server:
                named = k != max(args.drafts)
                found = asyncio.run(answer(server.address, prompts, k, args.max_tokens, progress, named=named))
            name = variant.name if k else "no drafts"
            cells += [Cell(name, k, cell.group, cell.answers, cell.wall_s) for cell in found]
            wrong += [f"{variant.name} K={k}: {name}" for name in differing(found, cells[:num_groups])]
    progress.close()
    return cells, wrong


def main() -> int:
    """Measure and print; 1 when an answer differs from the one without drafts."""
    parser = build_parser()
    args = parser.parse_args()
    try:
        cells, wrong = run(args)
    except ValueError as error:
        parser.error(str(error))
    title = f"{args.model} {args.dtype}, greedy, one at a time, {args.threads} threads, {args.grammar_backend}"
    print(f"{title}\n\n{result_table(cells)}")
    for line in wrong:
        print(f"differs: {line}")
    if args.plot:
        draw(cells, title, args.plot)
    if args.json:
        plain = [
            {"variant": c.variant, "drafts": c.drafts, "group": c.group, "length": c.length, "speed": c.speed}
            for c in cells
        ]
        args.json.write_text(json.dumps(plain, indent=1) + "\n")
    return int(bool(wrong))
