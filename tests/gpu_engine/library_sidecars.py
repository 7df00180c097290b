"""Engines of one process over the real grammar libraries: a worker's threads with a real segment, without the RPCs.

Invariant: no row is filled twice, and the worker ends without an error.
Not responsible for: the grammar process itself (tests/e2e), models (see tiny.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.ports import GrammarEvents
from gpu_engine.api.request import Request
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from grammar_service.backends.backend import Backend, Compiled, Matcher, Rows, spelled_freely
from grammar_service.backends.reasoning import ReasoningCompiled
from grammar_service.backends.registry import NAMES, load_backend
from grammar_service.backends.verified import avoiding, find_way_back, is_verified
from grammar_service.completion.budget import CompletionBudget
from grammar_service.completion.plan import CompletionPlan
from grammar_service.completion.texts import TokenTexts
from grammar_service.fill.matchers import SlotMatcher
from grammar_service.fill.worker import Worker
from grammar_service.grammar.mask_rows import Classifier
from grammar_service.grammar.value import Kind, Reading, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from shared_mem.channel import EngineEnd, GrammarEnd
from shared_mem.layout import Layout, RowKind
from shared_mem.segment import Segment
from tests.fakes import EOS
from tests.gpu_engine.harness import PATIENCE_S, UNHURRIED_MS, Answer, answer_all, answer_each, running, with_drafts

PATIENT = {"row_timeout_ms": UNHURRIED_MS, "draft_timeout_ms": UNHURRIED_MS}
"""Settings of an engine in which no row is late."""
EACH_LIBRARY = [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
"""Parameters: every grammar library. All but the first are slow, in tests of what the engine does with any of them."""


class LoggedSlot(SlotMatcher):
    """A slot matcher that records every filled row, by its slot generation and the tokens before it."""

    filled: list[tuple[int, tuple[int, ...]]]

    def fill(self, rows: Rows, index: int, classifier: Classifier) -> tuple[RowKind, int]:
        self.filled.append((self.slot_gen, tuple(self.tokens)))
        return super().fill(rows, index, classifier)

    @classmethod
    def of(cls, slot: SlotMatcher, filled: list[tuple[int, tuple[int, ...]]]) -> LoggedSlot:
        """Return a copy of `slot` that records its filled rows in `filled`."""
        logged = cls(*(getattr(slot, part.name) for part in fields(slot)))
        logged.filled = filled
        return logged


@dataclass(eq=False)
class LibraryGrammar:
    """A `ports.GrammarPort` over a real worker's threads; the form of a source is "KIND WHITESPACE text"."""

    segment: Segment
    backend: Backend
    vocabulary: Vocabulary
    compiled: dict[str, tuple[Compiled, CompletionPlan]]
    logs: bool = True
    """Every filled row is recorded."""
    engine: GrammarEvents = field(init=False)
    worker: Worker = field(init=False)
    filled: dict[int, list[tuple[int, tuple[int, ...]]]] = field(default_factory=lambda: defaultdict(list))
    """slot -> (slot_gen, tokens before the row) of each filled row."""

    def open(
        self,
        slot: int,
        slot_gen: int,
        request: Request,
        committed: tuple[int, ...],
        dead_texts: tuple[bytes, ...] = (),
    ) -> None:
        start, plan, verified = self.start(request, dead_texts)
        limit, repetition = request.sampling.max_tokens, request.sampling.repetition
        budget = partial(CompletionBudget, plan, limit, repetition=repetition)
        is_steered = request.sampling.grammar_exact is None
        bound = SlotMatcher.bind(slot_gen, start, committed, budget if is_steered else None)
        self.worker.bind(slot, LoggedSlot.of(bound, self.filled[slot]) if self.logs else bound)
        self.engine.grammar_opened(
            slot, slot_gen, compile_ms=1.0, cache_hit=True, backend=1, warnings=(), verified=verified
        )

    def backtrack(
        self,
        slot: int,
        slot_gen: int,
        request: Request,
        committed: tuple[int, ...],
        first: int,
        dead_texts: tuple[bytes, ...],
    ) -> None:
        found = find_way_back(self.start(request, dead_texts)[0], committed, first)
        self.engine.grammar_backtracked(slot, slot_gen, *(found or (-1, ())))

    def start(
        self, request: Request, dead_texts: tuple[bytes, ...]
    ) -> tuple[Callable[[], Matcher], CompletionPlan, bool]:
        """Return what makes a matcher, the plan of the grammar, and whether its answers are verified."""
        assert request.grammar is not None
        source = request.grammar.source
        if source not in self.compiled:
            kind, whitespace, text = source.split(" ", 2)
            grammar = parse(Kind[kind], text, Whitespace[whitespace])
            grammar = replace(grammar, reading=Reading(verify=request.grammar.verify))
            loaded = self.backend.load(grammar, self.backend.compile(grammar))
            answer = loaded.answer if isinstance(loaded, ReasoningCompiled) else loaded
            self.compiled[source] = loaded, CompletionPlan.of(answer.matcher(), text, TokenTexts.of(self.vocabulary))
        loaded, plan = self.compiled[source]
        exact = request.sampling.grammar_exact
        freely = exact is not None and exact.any_spelling
        avoids = spelled_freely(loaded) if freely else avoiding(loaded, dead_texts)
        start = avoids.matcher
        if isinstance(avoids, ReasoningCompiled):
            start = partial(avoids.matcher, plan.closing_at(request.sampling.max_tokens))
        return start, plan, is_verified(loaded)

    def forked(self, slot: int, slot_gen: int, request: Request, before: tuple[int, int] | None) -> None:
        goes_back = request.sampling.grammar_exact is not None
        assert goes_back or not self.logs, "a copy of a slot does not record its rows"

    def close(self, slot: int, slot_gen: int) -> None:
        self.worker.release(slot, slot_gen)


class Sidecars:
    """A library with the tiny model's vocabulary, and the grammars that it has compiled."""

    def __init__(self, name: str, model: LoadedModel) -> None:
        tokenizer = (Path(model.name) / "tokenizer.json").read_bytes()
        self.vocabulary = Vocabulary.load(tokenizer, model.vocab_size, (EOS,))
        self.backend, self.model = load_backend(name, self.vocabulary), model
        self.compiled: dict[str, tuple[Compiled, CompletionPlan]] = {}

    @contextmanager
    def engine(self, settings: EngineConfig, *, logs: bool = True) -> Iterator[tuple[Engine, Worker]]:
        """Run an engine with a worker of the library; at the end no row was filled twice.

        `logs`: look at the rows; False where slots are copied, as those of beams are.
        """
        layout = Layout(settings.max_batch_size, settings.num_rows, self.model.vocab_size)
        with Segment.create(layout) as segment:
            grammar = LibraryGrammar(segment, self.backend, self.vocabulary, self.compiled, logs)
            grammar.worker = Worker(GrammarEnd(segment), row_deadline_ms=UNHURRIED_MS)
            model = replace(self.model, max_model_len=settings.max_model_len)
            grammar.engine = engine = Engine(settings, model, EngineEnd(segment), grammar)
            grammar.worker.start()
            try:
                with running(engine):
                    yield engine, grammar.worker
                assert grammar.worker.error is None
                if not logs:
                    return
                for slot, filled in grammar.filled.items():
                    assert len(filled) == len(set(filled)), f"slot {slot}: a row was filled twice"
                stats = grammar.worker.stats()
                # Rows that are filled for several slots in one call are not recorded by the slots.
                alone = sum(map(len, grammar.filled.values()))
                assert stats["filled_rows"] >= alone > 0 if stats["batched_records"] else stats["filled_rows"] == alone
            finally:
                assert grammar.worker.stop(PATIENCE_S)


class Case(Protocol):
    """A request, and what its answer must be like."""

    def ask(self) -> Answer:
        """Return the request, not yet submitted."""

    def check(self, answer: Answer) -> object:
        """Check an answer that has ended."""


def run(sidecars: Sidecars, settings: EngineConfig, cases: Sequence[Case], *, alone: bool = False) -> list[Answer]:
    """Return the answers to all cases, asked together or one by one; a small cache must have preempted some."""
    answers = [case.ask() for case in cases]
    with sidecars.engine(settings) as (engine, _):
        (answer_each if alone else answer_all)(engine, answers)
        assert engine.stats().preemptions > 0 or not settings.kv_cache_tokens
    return answers


def compare(sidecars: Sidecars, cases: Sequence[Case], *others: EngineConfig) -> list[list[Answer]]:
    """Check every answer, and that the engines of `others` have the same; return the answers of each engine."""
    plain = run(sidecars, with_drafts(0, **PATIENT), cases, alone=True)
    for case, answer in zip(cases, plain, strict=True):
        case.check(answer)
    found = [plain]
    for settings in others:
        found.append(run(sidecars, settings, cases))
        for case, one, other in zip(cases, plain, found[-1], strict=True):
            assert (other.tokens, other.finish) == (one.tokens, one.finish), (case, settings)
            assert other.telemetry.backtracks == one.telemetry.backtracks, (case, settings)
    return found
