"""`python -m benchmarks maskbench`: does each backend accept the schemas, and are its masks right in shared memory?

Invariant: grammars are compiled as the sidecar compiles them (in processes that are killed at their time limit), and
the sidecar's own worker fills the rows. A row that is read through a segment is compared, bit by bit, with the row of
a second matcher that is called directly; drafts are accepted and rejected, so rollbacks are covered. Nothing is tuned
to the file.
Not responsible for: models, the latency of a whole step (see speed/bench_sidecar.py and speed/serve.py).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

from benchmarks.harness.flags import harness_parser, real, whole
from benchmarks.harness.tables import Progress, number, table
from benchmarks.quality.shared_rows import SharedRows
from grammar_service.backends.backend import Compiled, Matcher, MatcherFailed, Rows
from grammar_service.backends.registry import NAMES, load_backend
from grammar_service.backends.verified import VerifiedMatcher
from grammar_service.compile.compiler import AUTO, Compiler
from grammar_service.config import GrammarConfig
from grammar_service.errors import GrammarServiceError, InternalError, LimitExceeded, NotEnforced
from grammar_service.grammar.value import Grammar, Kind, Reading, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary

EXAMPLES = """
data: one JSON object a line, as MaskBench has them: name, group, schema, tests [{description, valid, data}]

examples:
  python -m benchmarks maskbench --data maskbench.jsonl --tokenizer model/ --limit 50
  python -m benchmarks maskbench --data maskbench.jsonl --tokenizer model/ --backend llguidance --check-shm
  python -m benchmarks maskbench --data maskbench.jsonl --tokenizer model/ --backend auto --allow-unenforced
  python -m benchmarks maskbench --data maskbench.jsonl --tokenizer model/ --backend llguidance --compile-cpu

reading the table:
  compiled           schemas that the backend takes
  refused            it names the keywords that it would not enforce, or the error
  limits             a stated bound was reached: mostly killed at the end of --compile-timeout-s
  valid ok/lost      instances marked valid that the grammar accepts, its stop token included, and those it rejects
  invalid ok/let by  instances marked invalid that it rejects, and those it accepts without a warning: must be 0
  warned             invalid instances that a grammar with warnings accepts (--allow-unenforced)
  verified           schemas whose answers are verified (--verify); their instances count as those of any other
  rows, differing    rows read through shared memory, and those that differ from the backend called directly: must be 0
  mask               microseconds to fill one row, called directly from Python, at the percentiles 50 / 99 / 99.9 / 100

auto takes llguidance where it enforces the whole schema, else xgrammar where that does.
A valid instance may be lost although the grammar is right: both backends hold the properties to the order of the
schema. The exit status is 1 when an invalid instance was let by, a row differed or a compile worker crashed.
"""


@dataclass(slots=True)
class Tally:
    """One backend's counts."""

    schemas: int = 0
    compiled: int = 0
    refused: int = 0
    timeouts: int = 0
    crashed: int = 0
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    verdicts: collections.Counter[tuple[bool, bool]] = field(default_factory=collections.Counter)
    """(marked valid, accepted) -> instances."""
    chosen: collections.Counter[str] = field(default_factory=collections.Counter)
    """Backend that compiled -> schemas."""
    warned: int = 0
    """Invalid instances accepted by grammars whose warnings say that not all is enforced."""
    let_by: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    untokenised: int = 0
    uncanonical: int = 0
    """Tokens that the row forbids and the matcher accepts: another spelling of the only legal text."""
    failed: int = 0
    """Instances on which the library hit one of its limits."""
    rows: int = 0
    differing: int = 0
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    verified_us: list[float] = field(default_factory=list)
    """Times of rows whose answers are verified; they are in `mask_us` as well."""
    groups: dict[str, collections.Counter[str]] = field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    """Group of the file -> how its schemas came out."""

    def cells(self, name: str) -> list[str]:
        """Return the backend's line of the table."""
        v = self.verdicts
        return [
            name,
            f"{self.compiled} / {self.schemas}",
            str(self.refused),
            str(self.timeouts),
            str(self.crashed),
            f"{v[True, True]} / {v[True, False]}",
            f"{v[False, False]} / {v[False, True]}",
            str(self.warned),
            f"{self.rows} / {self.differing}",
            _percentiles(self.compile_ms),
            _percentiles(self.mask_us),
        ]


HEADER = ["backend", "compiled", "refused", "limits", "crash", "valid ok/lost", "invalid ok/let by", "warned"]
HEADER += ["rows, differing", "compile ms", "mask us"]


class Bench:
    """All lines against one backend."""

    def __init__(self, backend: str, vocabulary: Vocabulary, options: argparse.Namespace) -> None:
        self.tally = Tally()
        self._backend = backend
        self._stop = vocabulary.stop_ids[0]
        self._whitespace = Whitespace[options.whitespace.upper()]
        self._allow_unenforced, self._verify = options.allow_unenforced, options.verify
        separators = (",", ":") if self._whitespace is Whitespace.COMPACT else (", ", ": ")
        self._encoder = json.JSONEncoder(ensure_ascii=False, separators=separators)
        self._tokenizer = LLTokenizer(vocabulary.tokenizer_json.decode(), n_vocab=vocabulary.size)
        self._special = vocabulary.special
        self._buffer = Rows(np.zeros((1, vocabulary.num_words), dtype=np.int32))
        config = GrammarConfig(
            dir="none",
            backend=NAMES[0] if backend == AUTO else backend,
            compile_timeout_s=options.compile_timeout_s,
            max_grammar_bytes=64 << 20,
        )
        self._compiler = Compiler(config, vocabulary)
        self._shared = SharedRows(vocabulary.size) if options.check_shm else None

    async def run(self, lines: Sequence[dict[str, Any]], progress: Progress) -> None:
        """Compile each schema and try its instances."""
        try:
            await self._compiler.ready()
            for line in lines:
                progress.step(f"{self._backend} {line['name']}")
                await self._schema(line)
        finally:
            await self._compiler.close()
            if self._shared is not None:
                self._shared.close()

    async def _schema(self, line: dict[str, Any]) -> None:
        tally = self.tally
        tally.schemas += 1
        try:
            entry, _ = await self._compiler.compile(
                Kind.JSON_SCHEMA,
                json.dumps(line["schema"]),
                self._whitespace,
                self._backend,
                allow_unenforced=self._allow_unenforced,
                verify=self._verify,
            )
        except GrammarServiceError as error:
            if isinstance(error, LimitExceeded):
                tally.timeouts += 1
            elif isinstance(error, InternalError):
                tally.crashed += 1
            else:
                tally.refused += 1
            tally.groups[line.get("group", "")]["refused"] += 1
            tally.reasons[_reason(str(error))] += 1
            return
        tally.compiled += 1
        tally.groups[line.get("group", "")][_outcome(entry.warnings)] += 1
        tally.chosen[entry.backend] += 1
        tally.compile_ms.append(entry.compile_ms)
        for test in line["tests"]:
            await asyncio.to_thread(self._instance, line["name"], entry.compiled, test)

    def _instance(self, name: str, compiled: Compiled, test: dict[str, Any]) -> None:
        tally = self.tally
        text = self._encoder.encode(test["data"])
        tokens = self._tokenizer.tokenize_str(text)
        if any(token in self._special for token in tokens) or self._tokenizer.decode_str(tokens) != text:
            tally.untokenised += 1
            return
        try:
            accepted, rows = self._walk(compiled.matcher(), tokens)
        except MatcherFailed as error:
            tally.failed += 1
            tally.reasons[_reason(f"while masking: {error}")] += 1
            return
        if accepted and not test["valid"] and _outcome(compiled.warnings) == "not all enforced":
            tally.warned += 1
            return
        tally.verdicts[bool(test["valid"]), accepted] += 1
        if accepted != bool(test["valid"]):
            (tally.let_by if accepted else tally.lost).append(f"{name}: {test.get('description', '')}")
        if self._shared is not None:
            compared, differing = self._shared.compare(compiled, tokens[: len(rows) - 1], rows)
            tally.rows += compared
            tally.differing += differing

    def _walk(self, matcher: Matcher, tokens: Sequence[int]) -> tuple[bool, list[NDArray[np.int32]]]:
        """Return whether the whole text and a stop token are accepted, and the rows before each accepted token and
        after."""
        rows = []
        for token in (*tokens, self._stop):
            begun = time.perf_counter_ns()
            matcher.fill(self._buffer, 0)
            self.tally.mask_us.append((time.perf_counter_ns() - begun) / 1e3)
            if isinstance(matcher, VerifiedMatcher):
                self.tally.verified_us.append(self.tally.mask_us[-1])
            row = self._buffer.words[0].copy()
            rows.append(row)
            legal = bool(row[token >> 5] >> (token & 31) & 1)
            accepted = matcher.accept(token)
            if legal and not accepted:
                raise MatcherFailed(f"token {token} is legal in the row, and the matcher rejects it")
            if not accepted:
                return False, rows
            # A text that can go one way only is legal only in its canonical tokens, yet accepted in others.
            self.tally.uncanonical += not legal
        return True, rows


def _outcome(warnings: Sequence[str]) -> str:
    """Return how much of a compiled schema holds, by the warnings of its grammar."""
    if any(line.startswith("verified: ") for line in warnings):
        return "verified"
    if any(line.startswith("not enforced by ") for line in warnings):
        return "not all enforced"
    return "enforced, with a warning" if warnings else "enforced"


def _groups_table(groups: Mapping[str, collections.Counter[str]]) -> str:
    """Return the outcomes by group, with a line of totals."""
    total = sum(groups.values(), start=collections.Counter[str]())
    outcomes = sorted(total)
    lines = [[name, *(str(each[outcome]) for outcome in outcomes)] for name, each in sorted(groups.items())]
    return table(["group", *outcomes], [*lines, ["all", *(str(total[outcome]) for outcome in outcomes)]])


def _reason(message: str) -> str:
    """Return a message without the parts that are specific to one schema."""
    message = re.sub(r"would not enforce all of it: \S*/", "would not enforce all of it: .../", message)
    message = re.sub(r"'[^']*'|\"[^\"]{12,}\"|\d+", "..", message.splitlines()[0])
    return message[:110]


def _percentiles(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return " / ".join(number(float(value), 1) for value in np.percentile(values, (50, 99, 99.9, 100)))


def _draw(benches: Mapping[str, Tally], path: Path) -> None:
    """Write a PNG: which share of compilations and of masks took at most how long."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for name, tally in benches.items():
        for axis, values in zip(axes, (tally.compile_ms, tally.mask_us), strict=True):
            ordered = np.sort(values)
            axis.plot(ordered, np.arange(1, len(ordered) + 1) / max(len(ordered), 1), label=name)
    for axis, label in zip(axes, ("compilation, ms", "mask of one row, us"), strict=True):
        axis.set_xscale("log")
        axis.set_xlabel(label)
        axis.set_ylabel("share that took at most this")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def compile_cpu_ms(
    name: str, vocabulary: Vocabulary, lines: Sequence[dict[str, Any]], options: argparse.Namespace
) -> tuple[list[float], list[float], int]:
    """Compile and load each schema on this thread; return the CPU times of the served ones, and how many were not.

    The times are those of compilation and load together, then those of the load, in ms. There are no processes and no
    time limit, so that other work on the machine adds nothing but misses of its caches. As in the server, a schema is
    read as a verified one after it was refused as another, and a backend that did not compile it loads it.
    """
    backend, loader = (load_backend(name, vocabulary) for _ in range(2))
    whitespace, served, refused = Whitespace[options.whitespace.upper()], list[float](), 0
    loads: list[float] = []

    def one(grammar: Grammar) -> None:
        artifact = backend.compile(grammar, allow_unenforced=options.allow_unenforced)
        compiled = time.thread_time()
        loader.load(grammar, artifact)
        loads.append((time.thread_time() - compiled) * 1e3)

    for line in lines:
        begun = time.thread_time()
        try:
            grammar = parse(Kind.JSON_SCHEMA, json.dumps(line["schema"]), whitespace)
            try:
                one(grammar)
            except NotEnforced:
                if not options.verify:
                    raise
                one(replace(grammar, reading=Reading(verify=True)))
        except GrammarServiceError:
            refused += 1
            continue
        served.append((time.thread_time() - begun) * 1e3)
    return served, loads, refused


def _differences(sums: Sequence[float], parts: Sequence[float]) -> list[float]:
    return [total - part for total, part in zip(sums, parts, strict=True)]


def _lines(path: Path, limit: int) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    return lines[:limit] if limit else lines


def read_vocabulary(path: Path, stop_ids: Sequence[int]) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json, or of the one in a directory."""
    file = path / "tokenizer.json" if path.is_dir() else path
    content = file.read_bytes()
    document = json.loads(content)
    size = 1 + max(*document["model"]["vocab"].values(), *(token["id"] for token in document["added_tokens"]))
    if not stop_ids:
        config = file.with_name("config.json")
        found = json.loads(config.read_text())["eos_token_id"] if config.exists() else None
        stop_ids = found if isinstance(found, list) else [found] if found is not None else []
    return Vocabulary.load(content, size, tuple(stop_ids))


@contextmanager
def _bar(total: int) -> Iterator[Progress]:
    progress = Progress(total)
    try:
        yield progress
    finally:
        progress.close()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = harness_parser(__doc__, EXAMPLES)
    parser.add_argument("--data", type=Path, required=True, help="the schemas, one JSON object a line")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json, or a directory with one")
    parser.add_argument("--stop-id", type=int, action="append", default=[], help="default: eos_token_id of config.json")
    parser.add_argument("--backend", choices=[*NAMES, AUTO, "both"], default="both")
    parser.add_argument(
        "--allow-unenforced",
        action="store_true",
        help="accept schemas with keywords that are not enforced, with warnings",
    )
    parser.add_argument("--verify", action="store_true", help="verify the answers to schemas that are not all enforced")
    parser.add_argument("--limit", type=whole(0), default=0, help="only the first N schemas")
    parser.add_argument("--whitespace", choices=["compact", "spaced", "bounded", "any"], default="any")
    parser.add_argument("--compile-timeout-s", type=real(0), default=5.0)
    parser.add_argument(
        "--compile-cpu",
        action="store_true",
        help="try no instance: compile each schema in this process, and show the CPU time of its thread",
    )
    parser.add_argument("--check-shm", action="store_true", help="compare every row with one through shared memory")
    parser.add_argument("--plot", type=Path, help="draw compile and mask times as a PNG (needs matplotlib)")
    parser.add_argument("--details", action="store_true", help="list the instances that were lost or let by")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the harness; return the exit status."""
    options = _parse(arguments)
    lines = _lines(options.data, options.limit)
    vocabulary = read_vocabulary(options.tokenizer, options.stop_id)
    backends = NAMES if options.backend == "both" else (options.backend,)
    if options.compile_cpu:
        if options.backend == AUTO:
            raise SystemExit("--compile-cpu: name a backend; auto tries both")
        rows = [(name, *compile_cpu_ms(name, vocabulary, lines, options)) for name in backends]
        cells = [
            [name, str(len(served)), str(refused), _percentiles(served), _percentiles(_differences(served, loads))]
            for name, served, loads, refused in rows
        ]
        print(table(["backend", "served", "refused", "CPU ms p50 / p99 / p99.9 / most", "without the load"], cells))
        return 0
    benches: dict[str, Tally] = {}

    async def run_all(progress: Progress) -> None:
        for backend in backends:
            bench = Bench(backend, vocabulary, options)
            benches[backend] = bench.tally
            await bench.run(lines, progress)

    with _bar(len(lines) * len(backends)) as progress:
        asyncio.run(run_all(progress))
    print(table(HEADER, [tally.cells(name) for name, tally in benches.items()]))
    for name, tally in benches.items():
        print(f"\n{name}: {tally.untokenised} instances not tokenised, {tally.failed} failed while masking,")
        print(f"compiled by {', '.join(f'{each} {count}' for each, count in tally.chosen.items()) or 'none'},")
        print(f"{tally.uncanonical} tokens accepted that the row before them did not allow (another spelling)")
        if tally.verified_us:
            print(f"rows of verified answers, us: {_percentiles(tally.verified_us)}")
        print(_groups_table(tally.groups))
        print(table(["schemas", "not compiled because"], [[str(n), why] for why, n in tally.reasons.most_common(25)]))
        if options.details:
            print("\n".join([*(f"let by: {each}" for each in tally.let_by), *(f"lost: {each}" for each in tally.lost)]))
    if options.plot:
        _draw(benches, options.plot)
    return int(any(tally.differing or tally.crashed or tally.let_by for tally in benches.values()))
