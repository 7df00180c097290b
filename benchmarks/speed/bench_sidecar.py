"""`python -m benchmarks bench_sidecar`: the time in which the grammar process answers a step, by batch and drafts.

Invariant: the worker is the sidecar's own, in this process, with a real segment; the records are those of an engine
that accepts the first draft and then samples its own token. Time runs from the post to the last answer.
Not responsible for: a model, and the share of this time that a step hides (see gpu/bench_gpu.py).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.gpu.guided import SCHEMA
from benchmarks.gpu.models import widened
from benchmarks.harness.flags import harness_parser, real, whole
from benchmarks.harness.tables import number, table
from grammar_service.backends.backend import Compiled, Matcher, Rows
from grammar_service.backends.reasoning import ReasoningCompiled
from grammar_service.backends.registry import NAMES, load_backend
from grammar_service.completion.budget import CompletionBudget
from grammar_service.completion.plan import CompletionPlan
from grammar_service.completion.texts import TokenTexts
from grammar_service.fill.matchers import SlotMatcher
from grammar_service.fill.worker import Worker
from grammar_service.grammar.value import Grammar, Kind, Whitespace
from grammar_service.grammar.vocabulary import Vocabulary
from shared_mem.channel import EngineEnd, GrammarEnd
from shared_mem.layout import Layout, RowKind
from shared_mem.segment import Segment

MAX_TOKENS = 1900
_WALKS = 8
_WARM = 5
"""First steps, not counted: every slot is new to the worker, and is filled by itself."""

EXAMPLES = """
examples:
  python -m benchmarks bench_sidecar --tokenizer DIR                           both drafts, batches of 1 to 128
  python -m benchmarks bench_sidecar --tokenizer DIR --vocab 128256            the tokenizer filled up to a Llama's size
  python -m benchmarks bench_sidecar --tokenizer DIR --backend xgrammar --drafts 7 --batches 32 --alone
  python -m benchmarks bench_sidecar --tokenizer DIR --after-reasoning        answers after a reasoning

reading the table:
  ms a step      median from the post to the last answer; p99 next to it
  us a slot      the same, by slot
  CPU us a slot  processor time of this process, every thread of it; the engine's end is in it
  together       share of the records that were answered in batches
  deferred       answers that were not there at row_deadline_ms, of all steps
"""


@dataclass(frozen=True, slots=True)
class Walk:
    """One answer: its tokens, and at every position the drafts that are asked there, the first of which is right."""

    tokens: list[int]
    drafts: list[list[int]]


def main() -> None:
    """Run the benchmark, print the table."""
    parser = harness_parser(__doc__, EXAMPLES)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json (BPE), or a directory with one")
    parser.add_argument("--vocab", type=whole(1), default=49152, help="fill it up to so many tokens (default: 49152)")
    parser.add_argument("--stop", type=int, default=2, help="its stop token (default: 2)")
    parser.add_argument("--backend", default="llguidance", choices=NAMES)
    parser.add_argument("--drafts", type=whole(0), nargs="+", default=[0, 7], metavar="K", help="(default: 0 7)")
    parser.add_argument("--batches", type=whole(1), nargs="+", default=[1, 8, 32, 128], metavar="B")
    parser.add_argument("--steps", type=whole(1), default=60, help="of every pair of those (default: 60)")
    parser.add_argument("--threads", type=whole(1), default=3, help="the sidecar's `threads` (default: 3)")
    parser.add_argument("--row-deadline-ms", type=real(0), default=2.0, help="the sidecar's (default: 2)")
    parser.add_argument("--alone", action="store_true", help="answer every record by itself, to compare")
    parser.add_argument("--after-reasoning", action="store_true", help="answers whose reasoning has just ended")
    args = parser.parse_args()
    vocabulary = _vocabulary(args.tokenizer, args.vocab, args.stop)
    grammar = Grammar(Kind.JSON_SCHEMA, json.dumps(SCHEMA), Whitespace.BOUNDED)
    if args.after_reasoning:
        grammar = Grammar(Kind.COMPOSED, _after_reasoning(SCHEMA), Whitespace.BOUNDED)
    backend = load_backend(args.backend, vocabulary)
    compiled = backend.load(grammar, backend.compile(grammar))
    thought: list[int] = []
    answer = compiled
    if isinstance(compiled, ReasoningCompiled):
        answer, thought = compiled.answer, list(compiled.rows.rests[0])
    plan = CompletionPlan.of(answer.matcher(), grammar.text, TokenTexts.of(vocabulary))
    rows = []
    for drafts in args.drafts:
        most = min(drafts, 1) + 1
        walks = [_walk(answer, vocabulary, seed, args.steps * most + most, drafts) for seed in range(_WALKS)]
        for batch in args.batches:
            print(f"{args.backend}, {drafts} drafts, batch {batch}", file=sys.stderr)
            rows.append(_measure(args, vocabulary, compiled, plan, walks, drafts, batch, thought))
    header = ("drafts", "batch", "ms a step", "p99", "us a slot", "CPU us a slot", "together", "deferred")
    print(table(header, rows))


def _after_reasoning(schema: object) -> str:
    """Return the text of a grammar of a reasoning and JSON."""
    phase = {"begin": "<think>", "end": "</think>", "open": True, "max_tokens": None}
    return json.dumps({"format": {"type": "json_schema", "json_schema": schema}, "reasoning": phase})


def _vocabulary(path: Path, size: int, stop: int) -> Vocabulary:
    document = json.loads((path / "tokenizer.json" if path.is_dir() else path).read_text())
    if size > len(document["model"]["vocab"]) + len(document["added_tokens"]):
        document = widened(document, size)
    return Vocabulary.load(json.dumps(document).encode(), size, (stop,))


def _walk(compiled: Compiled, vocabulary: Vocabulary, seed: int, length: int, num_drafts: int) -> Walk:
    rng, matcher, tokens, drafts = random.Random(seed), compiled.matcher(), list[int](), []
    for _ in range(length):
        twin = matcher.copy()
        tokens.append(_next(matcher, vocabulary, rng))
        # The drafts after the right token are legal, and differ from the right ones where there is a choice.
        if num_drafts and twin.accept(tokens[-1]):
            drafts.append([tokens[-1], *(_next(twin, vocabulary, rng) for _ in range(num_drafts - 1))])
        else:
            drafts.append([])
    return Walk(tokens, drafts)


def _next(matcher: Matcher, vocabulary: Vocabulary, rng: random.Random) -> int:
    rows = Rows(np.zeros((1, vocabulary.num_words), dtype=np.int32))
    matcher.fill(rows, 0)
    ids = np.flatnonzero(np.unpackbits(rows.words[0].view(np.uint8), bitorder="little"))
    token = int(ids[rng.randrange(len(ids))])
    if not matcher.accept(token):
        raise RuntimeError(f"token {token} is in a row and is refused")
    return token


def _measure(
    args: argparse.Namespace,
    vocabulary: Vocabulary,
    compiled: Compiled,
    plan: CompletionPlan,
    walks: Sequence[Walk],
    drafts: int,
    batch: int,
    thought: Sequence[int],
) -> list[str]:
    most = min(drafts, 1) + 1
    layout = Layout(num_slots=batch, num_rows=drafts + 1, vocab_size=vocabulary.size)
    with Segment.create(layout) as segment:
        engine, times, cpu, deferred = EngineEnd(segment), [], [], 0
        worker = Worker(GrammarEnd(segment), threads=args.threads, row_deadline_ms=args.row_deadline_ms)
        if args.alone:
            worker.min_batch = batch + 1
        worker.start()
        for slot in range(batch):
            budget = partial(CompletionBudget, plan, MAX_TOKENS)
            worker.bind(slot, SlotMatcher.bind(1, compiled.matcher, thought, budget))
        arrays = engine.batch_arrays(batch)
        arrays.slots[:], arrays.slot_gens[:] = range(batch), 1
        known, ends = [0] * batch, [0] * batch
        for _ in range(args.steps):
            for b in range(batch):
                walk = walks[b % _WALKS]
                said, guessed = walk.tokens[known[b] : ends[b]], walk.drafts[ends[b]] if drafts else []
                arrays.commit_pos[b] = len(thought) + known[b]
                arrays.n_commit[b], arrays.n_draft[b] = len(said), len(guessed)
                arrays.tokens[b, : len(said) + len(guessed)] = said + guessed
            cpu_ns, begun_ns = time.process_time_ns(), time.perf_counter_ns()
            result = engine.await_batch(arrays, engine.post_batch(arrays), timeout_s=5)
            times.append((time.perf_counter_ns() - begun_ns) / 1e6)
            cpu.append((time.process_time_ns() - cpu_ns) / 1e3)
            for b, kind in enumerate(result.kinds[:, 0].tolist()):
                known[b] = ends[b]
                if kind == RowKind.DEFER:
                    deferred += 1
                else:
                    ends[b] += most
            time.sleep(0.002)
        stats = worker.stats()
        worker.stop()
    middle, tail = statistics.median(times[_WARM:]), float(np.percentile(times[_WARM:], 99))
    shares = number(middle * 1e3 / batch), number(statistics.median(cpu[_WARM:]) / batch)
    together = number(100 * stats["batched_records"] / (batch * args.steps), 0, "%")
    return [str(drafts), str(batch), number(middle, 2), number(tail, 2), *shares, together, str(deferred)]
