"""`python -m benchmarks quantisation`: what a quantisation costs in quality, against the same model without one.

Invariant: the reference is `quantization: none` in the given dtype, and every figure of a row comes from the arithmetic
that serves: logits from the engine's own model code, answers from a server that was started with that setting.
Not responsible for: speed (see speed/), the arithmetic of the comparison of logits (see divergence.py).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.harness.client import Call, EngineClient, make_call
from benchmarks.harness.comparison import first_difference
from benchmarks.harness.flags import add_engine_flags, engine_options, harness_parser, list_of, real, whole
from benchmarks.harness.measure import Answer
from benchmarks.harness.server import ServerOptions, start_engine
from benchmarks.harness.tables import Progress, number, share, table
from benchmarks.harness.validity import Judge, Verdict
from benchmarks.harness.workloads import Item, workload
from benchmarks.quality.divergence import divergence, windows
from gpu_engine.api.config import EngineConfig
from gpu_engine.model.cache_size import cache_dtype
from gpu_engine.model.embedded import EmbeddedModelMissing
from gpu_engine.model.loader import LoadedModel, ModelNotSupported, load_model
from gpu_engine.ops.memory import weight_bytes
from protos.engine.v1 import engine_pb2 as pb

REFERENCE = "none"
TEXT = Path(__file__).parent / "records" / "english.txt"
"""English of many kinds, written for this benchmark, so that no model was trained on it before."""

Answers = dict[str, Answer]
"""By the name of the prompt."""

Start = Callable[[ServerOptions], AbstractContextManager[str]]
"""Starts an engine; yields its address."""

EXAMPLES = """
examples:
  python -m benchmarks quantisation                          all four settings on the embedded model, some 4 minutes
  python -m benchmarks quantisation --no-answers             only logits: no server, some 1 minute
  python -m benchmarks quantisation --quantizations auto --at-most 1.0
                                                             exit 1 when auto's perplexity is more than 1% above none's
  python -m benchmarks quantisation --quantizations auto,auto+kv-int8 --window 2048
                                                             keys and values of 8 bits (kv_cache_dtype) in the last row
  python -m benchmarks quantisation --model DIR --text FILE  another model, another text

reading the table:
  arithmetic   the dtype, and "blocks" when the products run over weights of 4 to 8 bits
  weights      bytes of the weights in memory, copies included
  load         seconds in which this process loads the model; its first load, which also imports, is not counted
  perplexity   exp of the mean surprise by a token of the text, in windows of --window tokens; lower is better
  over none    perplexity over that of none, less 100%
  KL           mean Kullback-Leibler divergence of the next token's distribution from none's, in nats
  same best    share of the text's positions with the same most likely token as none
  same tokens  of greedy answers to the chat prompts: tokens before the first that differs from none's, as a share
               of all. One token that differs changes all after it, so this falls fast while the quality stays
  equal        chat answers that are equal to none's, token by token
  valid        share of guided extraction answers that are valid under their schema
  right        share that are valid and equal the facts of the prompt, every field of them
  facts        share of the single facts that the answers state in the right place; a finer measure than right, which a
               small model reaches rarely

none is the reference: its own row compares it with itself. With --dtype bfloat16 (the default) it rounds logits to 8
bits of precision, so KL and the shares of the other rows contain that rounding as well; --dtype float32 does not.
auto runs with dtype=auto, which it needs; none, int8 and q4 run with --dtype. Answers are made one at a time without
drafts.
"""


@dataclass(slots=True)
class Quality:
    """One row of the table. Shares are in [0, 1]; NaN means "not measured"."""

    quantization: str
    arithmetic: str
    weight_bytes: int
    load_s: float
    tokens: int
    """Scored tokens of the text."""
    perplexity: float
    over_none: float
    """Perplexity over that of the reference, less 1."""
    kl: float
    same_best: float
    same_tokens: float = math.nan
    equal_answers: float = math.nan
    valid: float = math.nan
    right: float = math.nan
    facts: float = math.nan


def engine_config(quantization: str, args: argparse.Namespace) -> EngineConfig:
    """Return the settings of one row.

    Raises:
        ValueError: `quantization` is no value of that setting.

    """
    kind, kv = _parts(quantization)
    return EngineConfig(
        model=args.model, device="cpu", dtype=_dtype(kind, args.dtype), quantization=kind, kv_cache_dtype=kv,
        num_threads=args.threads,
    )  # fmt: skip


def quantization_of(text: str) -> str:
    """Return `text`, which must be a quantisation with or without that of keys and values. Raises ValueError."""
    kind, kv = _parts(text)
    EngineConfig(device="cpu", quantization=kind, kv_cache_dtype=kv)
    return text


def _parts(quantization: str) -> tuple[str, str]:
    """Return the values of quantization and of kv_cache_dtype."""
    kind, _, kv = quantization.partition("+kv-")
    return kind, kv or "auto"


def _dtype(kind: str, dtype: str) -> str:
    return "auto" if kind == "auto" else dtype


def logits_rows(quantizations: Sequence[str], args: argparse.Namespace, progress: Progress) -> list[Quality]:
    """Load each model in turn next to the reference and compare the logits over the text. The reference is first."""
    load_model(engine_config(REFERENCE, args))  # not counted: imports, and the conversion of the embedded model
    progress.step("loaded")
    started_s = time.perf_counter()
    reference = load_model(engine_config(REFERENCE, args))
    loaded_s = time.perf_counter() - started_s
    texts = _text_windows(reference, args)
    progress.total += len(texts) * len(quantizations)
    rows: list[Quality] = []
    for quantization in quantizations:
        model = reference
        if quantization != REFERENCE:
            started_s = time.perf_counter()
            model = load_model(engine_config(quantization, args))
            loaded_s = time.perf_counter() - started_s
        progress.step(f"{quantization}: loaded")
        weights = weight_bytes(model)
        kv = cache_dtype(engine_config(quantization, args), model.dtype)
        found = divergence(model, reference, texts, partial(progress.step, f"{quantization}: text"), kv)
        rows.append(
            Quality(
                quantization=quantization,
                arithmetic=model.dtype_name + (", blocks" if model.quantised else ""),
                weight_bytes=weights,
                load_s=loaded_s,
                tokens=found.tokens,
                perplexity=found.perplexity,
                over_none=found.perplexity / (rows[0].perplexity if rows else found.perplexity) - 1,
                kl=found.mean_kl,
                same_best=found.same_best_share,
            )
        )
    return rows


def _text_windows(model: LoadedModel, args: argparse.Namespace) -> list[torch.Tensor]:
    text = args.text.read_text(encoding="utf-8")
    ids = model.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    if args.window > model.max_model_len:
        raise ValueError(f"--window: {args.window} is more than the model's {model.max_model_len} tokens")
    return windows(ids, args.window)


def greedy_call(item: Item) -> Call:
    """Return the greedy request of an item, without drafts."""
    sampling = pb.SamplingParams(max_tokens=item.max_tokens, temperature=0.0)
    return make_call(item.name, item.messages, schema=item.schema, sampling=sampling, num_draft_tokens=0)


async def run_answers(address: str, items: Sequence[Item], on_answer: Callable[[], None]) -> Answers:
    """Answer every item, one at a time."""
    client = EngineClient(address)
    try:
        run = await client.run([greedy_call(item) for item in items], 1, on_answer)
    finally:
        await client.close()
    return {answer.name: answer for answer in run.answers}


def same_tokens(reference: Mapping[str, Answer], answers: Mapping[str, Answer]) -> tuple[float, float]:
    """Return the share of equal tokens and the share of equal answers, over the answers of the reference.

    A token is equal when it and all tokens before it are. Of two answers the longer one is the whole.

    Raises:
        KeyError: `answers` lacks one of the reference.

    """
    equal, total, equal_answers = 0, 0, 0
    for name, expected in reference.items():
        actual = answers[name].token_ids
        longest = max(len(expected.token_ids), len(actual))
        found = first_difference(expected.token_ids, actual)
        equal += longest if found is None else found[0]
        total += longest
        equal_answers += found is None
    return (equal / total if total else math.nan), (equal_answers / len(reference) if reference else math.nan)


@dataclass(frozen=True, slots=True)
class Extraction:
    """Shares of guided extraction answers; NaN without answers."""

    valid: float
    """Valid under the schema."""
    right: float
    """Valid, and equal to the item's facts as JSON values."""
    facts: float
    """Of the leaves of all facts: those that the answer has at the same place, as equal values."""


def extracted(items: Sequence[Item], answers: Mapping[str, Answer], judge: Judge) -> Extraction:
    """Compare the answers with the facts of the prompts. No fact of an answer that is not valid counts.

    Raises:
        KeyError: `answers` lacks one of `items`.
        ValueError: an item has no schema or no facts.

    """
    valid, right, stated, total = 0, 0, 0, 0
    for item in items:
        if item.schema is None or item.facts is None:
            raise ValueError(f"{item.name}: has no schema or no facts")
        text, facts = answers[item.name].text, json.loads(item.facts)
        wanted = dict(_leaves(facts))
        total += len(wanted)
        if judge.judge(item.schema, text).verdict is Verdict.VALID:
            found = json.loads(text)
            valid += 1
            right += found == facts
            have = dict(_leaves(found))
            stated += sum(place in have and have[place] == value for place, value in wanted.items())
    if not items:
        return Extraction(math.nan, math.nan, math.nan)
    return Extraction(valid / len(items), right / len(items), stated / total)


def _leaves(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield (place, value) of each string, number, truth value and null of a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*place, key))
    else:
        yield place, value


def add_answers(rows: Sequence[Quality], args: argparse.Namespace, start: Start, progress: Progress) -> None:
    """Start a server for each row in turn and fill in the shares of its answers. The reference is first."""
    chat, extraction = (workload(name, args.count) for name in ("chat", "extraction"))
    reference: Answers = {}
    judge = Judge()
    for row in rows:
        kind, kv = _parts(row.quantization)
        own = {"dtype": _dtype(kind, args.dtype), "quantization": kind, "extra": (f"--kv-cache-dtype={kv}",)}
        options = engine_options(args, drafter="none", prefix_cache=False, **own)
        with start(options) as address:
            on_answer = partial(progress.step, f"{row.quantization}: answers")
            answers = asyncio.run(run_answers(address, [*chat, *extraction], on_answer))
        own_chat = {item.name: answers[item.name] for item in chat}
        reference = reference or own_chat
        row.same_tokens, row.equal_answers = same_tokens(reference, own_chat)
        found = extracted(extraction, answers, judge)
        row.valid, row.right, row.facts = found.valid, found.right, found.facts


def result_table(rows: Sequence[Quality]) -> str:
    """Return the table: a row for each quantisation."""
    header = (
        "quantization", "arithmetic", "weights", "load", "perplexity", "over none", "KL", "same best",
        "same tokens", "equal", "valid", "right", "facts",
    )  # fmt: skip
    lines = [
        [
            row.quantization,
            row.arithmetic,
            number(row.weight_bytes / 1e6, 0, " MB"),
            number(row.load_s, 1, " s"),
            number(row.perplexity, 3),
            f"{row.over_none:+.2%}",
            number(row.kl, 5),
            *(share(each) for each in (row.same_best, row.same_tokens, row.equal_answers)),
            *(share(each) for each in (row.valid, row.right, row.facts)),
        ]
        for row in rows
    ]
    return table(header, lines)


def as_json(rows: Sequence[Quality], args: argparse.Namespace) -> dict[str, object]:
    """Return the rows as plain data; NaN becomes None."""
    plain = [
        {key: None if isinstance(each, float) and math.isnan(each) else each for key, each in fields.items()}
        for fields in map(dataclasses.asdict, rows)
    ]
    return {"model": args.model, "dtype": args.dtype, "text": args.text.name, "window": args.window, "rows": plain}


def too_high(rows: Sequence[Quality], at_most: float | None) -> str:
    """Return why the run fails: the perplexity of auto is more than `at_most` percent above none's. Empty: it is not.

    A perplexity that is not a number fails as well.
    """
    for row in rows:
        if at_most is not None and row.quantization == "auto" and not row.over_none <= at_most / 100:
            return f"too high: auto's perplexity is {row.over_none:+.2%} over none's, and --at-most is {at_most}%"
    return ""


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add(
        "--quantizations",
        type=list_of(quantization_of),
        default="none,auto,int8,q4",
        help="comma-separated; none always runs (default all four). NAME+kv-int8: with kv_cache_dtype=int8",
    )
    add_engine_flags(parser, "model", "threads", "grammar-backend")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of none, int8 and q4 (default bfloat16)")
    add("--text", type=Path, default=TEXT, metavar="FILE", help="text in UTF-8 (default: some 3,800 tokens of English)")
    add("--window", type=whole(1), default=512, help="tokens of a window; each starts without a context (default 512)")
    add("--count", type=whole(1), help="only the first COUNT prompts of chat and of extraction (default: 12 and 24)")
    add("--no-answers", action="store_true", help="start no servers; leaves out the columns from 'same tokens' on")
    add("--at-most", type=real(0), metavar="PERCENT", help="exit 1 when auto's perplexity is further above none's")
    add("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    return parser


def main(argv: Sequence[str] | None = None, start: Start = start_engine) -> int:
    """Run the comparison; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    quantizations = list(dict.fromkeys([REFERENCE, *args.quantizations]))
    if args.at_most is not None and "auto" not in quantizations:
        parser.error("--at-most: needs auto among --quantizations")
    transformers_logging.disable_progress_bar()
    prompts = 0 if args.no_answers else sum(len(workload(name, args.count)) for name in ("chat", "extraction"))
    progress = Progress(1 + len(quantizations) * (1 + prompts))
    try:
        rows = logits_rows(quantizations, args, progress)
        if not args.no_answers:
            add_answers(rows, args, start, progress)
    except (OSError, ValueError, EmbeddedModelMissing, ModelNotSupported) as failure:
        print(f"cannot run: {failure}", file=sys.stderr)
        return 2
    finally:
        progress.close()
    print(f"{args.model}, reference in {args.dtype}, {rows[0].tokens} tokens scored in windows of {args.window}")
    print(f"\n{result_table(rows)}")
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(rows, args), indent=1) + "\n")
    failure_line = too_high(rows, args.at_most)
    if failure_line:
        print(failure_line)
    return 1 if failure_line else 0
