"""`python -m benchmarks lossless`: are the tokens the same with speculation on or off, alone or in a batch?

Invariant: every variant is compared, token by token, with one reference: the run without drafts at concurrency 1. Any
difference fails the run, except in float32 on a GPU, where rounding depends on the number of rows.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.harness.client import Call, EngineClient, make_call
from benchmarks.harness.comparison import Difference, compare
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, list_of, whole
from benchmarks.harness.measure import Answer
from benchmarks.harness.server import engine_address
from benchmarks.harness.systems import Prompt, hf_directory, load_prompts
from benchmarks.harness.tables import Progress, number, share, table
from benchmarks.harness.workloads import Item, workload
from protos.engine.v1 import engine_pb2 as pb

PROFILES: dict[str, pb.SamplingParams] = {
    "greedy": pb.SamplingParams(temperature=0.0),
    "T=1": pb.SamplingParams(temperature=1.0),
    "T=1 top_p=0.9": pb.SamplingParams(temperature=1.0, top_p=0.9),
    "greedy repetition=1.2": pb.SamplingParams(temperature=0.0, repetition_penalty=1.2),
    "T=1 presence=0.5 frequency=0.5": pb.SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.5),
}
"""Sampling profiles; each prompt takes the next one."""

EXAMPLES = """
examples:
  python -m benchmarks lossless                        float32, exits 1 on any difference
  python -m benchmarks lossless --dtype bfloat16       the weights as they are served without quantization
  python -m benchmarks lossless --quantization q4      the file's own 4 bits
  python -m benchmarks lossless --transformers         also compares greedy free text with transformers' generate
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt with its sampling profile and seed."""

    item: Item
    profile: str
    seed: int

    @property
    def name(self) -> str:
        """What the case goes by in the output."""
        return f"{self.item.name} [{'guided' if self.item.schema else 'free'}, {self.profile}]"

    def call(self, num_draft_tokens: int) -> Call:
        """Return the request with that many drafts per step."""
        sampling = pb.SamplingParams(max_tokens=self.item.max_tokens, seed=self.seed)
        sampling.MergeFrom(PROFILES[self.profile])
        return make_call(
            self.name, self.item.messages, schema=self.item.schema, sampling=sampling, num_draft_tokens=num_draft_tokens
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run all cases."""

    drafts: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.drafts} drafts, " + ("alone" if self.concurrency == 1 else f"batch of {self.concurrency}")


def make_cases(count: int, max_tokens: int) -> list[Case]:
    """Return `count` cases that alternate guided and free; a prompt that comes again has another profile."""
    guided = [item for pair in zip(workload("extraction"), workload("schema"), strict=False) for item in pair]
    free = workload("chat")
    profiles = list(PROFILES)
    cases = []
    for number_ in range(count):
        pool = free if number_ % 3 == 2 else guided
        rounds, place = divmod(number_ // 3 if number_ % 3 == 2 else number_ - number_ // 3, len(pool))
        item = replace(pool[place], name=pool[place].name + (f"~{rounds}" if rounds else ""))
        item = replace(item, max_tokens=min(item.max_tokens, max_tokens))
        cases.append(Case(item, profiles[number_ % len(profiles)], seed=1000 + number_))
    return cases


async def run_variants(
    address: str, cases: Sequence[Case], variants: Sequence[Variant]
) -> dict[Variant, dict[str, Answer]]:
    """Run all cases in every variant; answers by case name."""
    client = EngineClient(address)
    progress = Progress(len(cases) * len(variants))
    results = {}
    try:
        for variant in variants:
            calls = [case.call(variant.drafts) for case in cases]
            run = await client.run(calls, variant.concurrency, partial(progress.step, str(variant)))
            results[variant] = {answer.name: answer for answer in run.answers}
    finally:
        progress.close()
        await client.close()
    return results


def equality_table(
    results: Mapping[Variant, Mapping[str, Answer]], differences: Mapping[Variant, Sequence[Difference]]
) -> str:
    """Return the table of equal answers per variant."""
    header = ("variant", "equal answers", "share", "guided", "free", "tokens", "tok/step")
    rows = []
    for variant, answers in results.items():
        changed = {difference.name for difference in differences[variant]}
        parts = [(len(names), sum(name not in changed for name in names)) for names in (
            list(answers), [n for n in answers if "[guided" in n], [n for n in answers if "[free" in n])]  # fmt: skip
        (total, equal), (guided, guided_equal), (free, free_equal) = parts
        tokens = sum(len(answer.token_ids) for answer in answers.values())
        steps = sum(answer.steps for answer in answers.values())
        rows.append([
            str(variant),
            f"{equal} of {total}",
            share(equal / total) if total else "-",
            f"{guided_equal} of {guided}",
            f"{free_equal} of {free}",
            str(tokens),
            number(tokens / steps, 2) if steps else "-",
        ])  # fmt: skip
    return table(header, rows)


async def compare_with_transformers(
    address: str, prompts: Sequence[Prompt], directory: Path, args: argparse.Namespace
) -> list[Difference]:
    """Greedy free text of the engine (its default drafts) against `generate` on the same token ids."""
    from benchmarks.peers.transformers import Transformers, Weights

    client = EngineClient(address)
    progress = Progress(2 * len(prompts))
    try:
        sampling = [pb.SamplingParams(max_tokens=prompt.item.max_tokens, temperature=0.0) for prompt in prompts]
        calls = [
            make_call(prompt.item.name, prompt.item.messages, schema=None, sampling=params)
            for prompt, params in zip(prompts, sampling, strict=True)
        ]
        ours = await client.run(calls, 1, lambda: progress.step("engine"))
    finally:
        await client.close()
    peer = Transformers(Weights(directory, args.dtype, args.threads, args.device), grammar=False)
    theirs = peer.run(prompts, 1, lambda: progress.step("transformers"))
    progress.close()
    return compare({a.name: a for a in theirs.answers}, {a.name: a for a in ours.answers})


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add_engine_flags(parser, "model", "device", "threads", "grammar-backend")
    add("--hf-model", metavar="DIR", help="the same model as a Hugging Face directory, for --transformers")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--quantization", default="none", choices=("none", "int8", "q4"), help="as the engine's setting (default none)")
    add("--address", metavar="HOST:PORT", help="use a running server of that dtype instead of starting one")
    add("--count", type=whole(1), default=40, help="prompts (default 40)")
    add("--max-tokens", type=whole(1), default=64, help="tokens per answer (default 64)")
    add(
        "--drafts",
        type=list_of(whole(0)),
        default="0,3,7",
        help="drafts per step to compare; 0 is the reference (default 0,3,7)",
    )
    add("--batch", type=whole(1), default=8, help="size of the batch (default 8)")
    add("--transformers", action="store_true", help="also compare greedy free text with transformers' generate")
    return parser


def report(
    results: Mapping[Variant, Mapping[str, Answer]], peer: Sequence[Difference] | None, peer_total: int, strict: bool
) -> int:
    """Print the tables and every difference; return the exit code."""
    reference = next(iter(results))
    differences = {variant: compare(results[reference], answers) for variant, answers in results.items()}
    print(f"reference: {reference}\n\n{equality_table(results, differences)}")
    for variant, found in differences.items():
        for difference in found:
            print(f"differs: {variant}: {difference}")
    failed = any(differences.values())
    if peer is not None:
        print(f"\nequal to transformers' generate (greedy, free text): {peer_total - len(peer)} of {peer_total}")
        for difference in peer:
            print(f"differs from transformers: {difference}")
        failed = failed or bool(peer)
    if failed and strict:
        print("\nFAILED: answers differ")
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.drafts[0] != 0:
        parser.error("--drafts: the first must be 0, the reference")
    cases = make_cases(args.count, args.max_tokens)
    variants = [Variant(each, level) for level in dict.fromkeys((1, args.batch)) for each in args.drafts]
    options = engine_options(
        args, num_draft_tokens=max(args.drafts), max_batch_size=max(16, args.batch), prefix_cache=False
    )
    peer = None
    prompts: list[Prompt] = []
    directory = hf_directory(args.model, args.hf_model) if args.transformers else None
    with engine_address(args.address, options) as address:
        kind = args.dtype if args.quantization == "none" else f"{args.dtype} with {args.quantization}"
        print(f"{args.model}, {kind}, {args.threads} threads, {len(cases)} prompts, {args.max_tokens} tokens")
        results = asyncio.run(run_variants(address, cases, variants))
        if directory is not None:
            prompts = load_prompts(workload("chat", None, args.max_tokens), directory)
            compared = compare_with_transformers(address, prompts, directory, args)
            peer = asyncio.run(compared)
    exact = args.device == "cpu" or args.dtype == "bfloat16"
    return report(results, peer, len(prompts), strict=exact)
