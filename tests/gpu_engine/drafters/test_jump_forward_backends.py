"""Jump-forward tokens of the real grammar libraries, in one process with a tiny model: answers are those of one token
a step."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import pytest

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.ports import GrammarEvents
from gpu_engine.api.request import FinishReason, Request
from gpu_engine.core.engine import Engine
from gpu_engine.model.loader import LoadedModel
from grammar_service.backends.backend import Backend, Compiled, Rows
from grammar_service.backends.registry import NAMES, load_backend
from grammar_service.completion.budget import CompletionBudget
from grammar_service.completion.plan import CompletionPlan
from grammar_service.completion.texts import TokenTexts
from grammar_service.fill.matchers import SlotMatcher
from grammar_service.fill.worker import Worker
from grammar_service.grammar.mask_rows import Classifier
from grammar_service.grammar.value import Kind, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from shared_mem.channel import EngineEnd, GrammarEnd
from shared_mem.layout import Layout, RowKind
from shared_mem.segment import Segment
from tests.fakes import EOS
from tests.gpu_engine.harness import Answer, answer_all, answer_each, ask, config, running, tokens, with_drafts

LITERAL = "REGEX COMPACT the whole answer is forced"
CONST = 'JSON_SCHEMA COMPACT {"const":{"name":"a const","of":[1,2,{"deep":null}]}}'
SCHEMAS = [
    'JSON_SCHEMA COMPACT {"type":"object","properties":{"first":{"enum":["customer","current","supplier"]},'
    '"second_name":{"type":"boolean"},"n":{"type":"integer"}},"required":["first","second_name","n"]}',
    'JSON_SCHEMA BOUNDED {"type":"object","properties":{"a_key":{"type":"string"},"b_key":{"type":"null"}},'
    '"required":["a_key","b_key"]}',
    'CHOICE COMPACT ["yes, of course", "yes, but", "no", "not at all"]',
    "REGEX COMPACT (ab|cd){3}end of it?",
    LITERAL,
    CONST,
]


def made() -> list[Answer]:
    """Return greedy and sampled requests; some have limits so low that budgeted completion steers the answer."""
    answers = []
    for number, source in enumerate(SCHEMAS):
        # The prompt holds words of the answer, so that the n-gram drafter proposes drafts, some of them illegal.
        prompt = list(f"{source[-40:]} customer true {number}".encode())
        answers.append(partial(ask, prompt, grammar=source, max_tokens=90)())
        answers.append(ask(prompt, grammar=source, max_tokens=60, temperature=0.8, seed=number))
    answers.append(ask(tokens(12, 2), max_tokens=30, ignore_eos=True))
    return answers


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
    engine: GrammarEvents = field(init=False)
    worker: Worker = field(init=False)
    filled: dict[int, list[tuple[int, tuple[int, ...]]]] = field(default_factory=lambda: defaultdict(list))
    """slot -> (slot_gen, tokens before the row) of each filled row."""

    def open(self, slot: int, slot_gen: int, request: Request, committed: tuple[int, ...]) -> None:
        assert request.grammar is not None
        source = request.grammar.source
        if source not in self.compiled:
            kind, whitespace, text = source.split(" ", 2)
            grammar = parse(Kind[kind], text, Whitespace[whitespace])
            loaded = self.backend.load(grammar, self.backend.compile(grammar))
            self.compiled[source] = loaded, CompletionPlan.of(loaded.matcher(), text, TokenTexts.of(self.vocabulary))
        loaded, plan = self.compiled[source]
        new_budget = partial(CompletionBudget, plan, request.sampling.max_tokens)
        bound = SlotMatcher.bind(slot_gen, loaded.matcher, committed, new_budget)
        self.worker.bind(slot, LoggedSlot.of(bound, self.filled[slot]))
        self.engine.grammar_opened(slot, slot_gen, compile_ms=1.0, cache_hit=True, backend=1)

    def forked(self, slot: int, slot_gen: int, request: Request, before: tuple[int, int] | None) -> None:
        raise NotImplementedError("these requests have no beams")

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
    def engine(self, settings: EngineConfig) -> Iterator[tuple[Engine, Worker]]:
        """Run an engine with a worker of the library; at the end no row was filled twice."""
        layout = Layout(settings.max_batch_size, settings.num_rows, self.model.vocab_size)
        with Segment.create(layout) as segment:
            grammar = LibraryGrammar(segment, self.backend, self.vocabulary, self.compiled)
            grammar.worker = Worker(GrammarEnd(segment), row_deadline_ms=1000.0)
            model = replace(self.model, max_model_len=settings.max_model_len)
            grammar.engine = engine = Engine(settings, model, EngineEnd(segment), grammar)
            grammar.worker.start()
            try:
                with running(engine):
                    yield engine, grammar.worker
                assert grammar.worker.error is None
                for slot, filled in grammar.filled.items():
                    assert len(filled) == len(set(filled)), f"slot {slot}: a row was filled twice"
                stats = grammar.worker.stats()
                # Rows that are filled for several slots in one call are not recorded by the slots.
                alone = sum(map(len, grammar.filled.values()))
                assert stats["filled_rows"] >= alone > 0 if stats["batched_records"] else stats["filled_rows"] == alone
            finally:
                assert grammar.worker.stop()


@pytest.fixture(scope="module", params=NAMES)
def sidecars(request: pytest.FixtureRequest, llama: LoadedModel) -> Sidecars:
    return Sidecars(request.param, llama)


PATIENT = {"row_timeout_ms": 5000.0, "draft_timeout_ms": 5000.0}


@pytest.fixture(scope="module")
def expected(sidecars: Sidecars) -> list[list[int]]:
    """Return the answers of an engine that serves one request at a time and emits one token a step."""
    answers = made()
    with sidecars.engine(with_drafts(0, **PATIENT)) as (engine, worker):
        answer_each(engine, answers)
        assert worker.stats()["proposed_tokens"] == 0
    for answer in answers[:-1]:
        assert answer.finish in (FinishReason.STOP, FinishReason.GRAMMAR_CLOSED), answer.request.grammar
    literal, const = answers[2 * SCHEMAS.index(LITERAL)], answers[2 * SCHEMAS.index(CONST)]
    assert bytes(literal.tokens[:-1]) == b"the whole answer is forced"
    assert json.loads(bytes(const.tokens[:-1])) == {"name": "a const", "of": [1, 2, {"deep": None}]}
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize(
    ("num_drafts", "max_jump_forward"),
    [(1, 0), (2, 0), (4, 0), (7, 0), (1, 7), (2, 7), (3, 7), (3, 15)]
    + [pytest.param(number, 0, marks=pytest.mark.slow) for number in (3, 5, 6)],
)
@pytest.mark.parametrize("drafter", ["ngram", "grammar"])
def test_tokens_do_not_depend_on_jump_forward(
    sidecars: Sidecars, expected: list[list[int]], drafter: str, num_drafts: int, max_jump_forward: int, overlap: bool
) -> None:
    settings = config(
        drafter=drafter,
        num_draft_tokens=num_drafts,
        jump_forward_tokens=max_jump_forward,
        step_rows=64,
        overlap=overlap,
        **PATIENT,
    )
    with sidecars.engine(settings) as (engine, worker):
        assert answer_all(engine, made()) == expected
        stats = engine.stats()
    assert stats.deferred_rows == 0
    # With a byte vocabulary a text has one spelling, but a steered answer may have a choice near its end.
    assert stats.jump_forward_tokens >= stats.accepted_jump_forward_tokens > 0.95 * stats.jump_forward_tokens > 100
    assert worker.stats()["proposed_tokens"] >= stats.jump_forward_tokens


@pytest.mark.parametrize("drafts_by", ["same", "trained eagle3", "random eagle3"])
@pytest.mark.parametrize(
    ("masks", "num_drafts", "max_jump_forward"), [("on", 5, 0), ("off", 5, 0), ("on", 2, 7), ("off", 3, 15)]
)
def test_draft_nets_continue_after_jump_forward_tokens(
    sidecars: Sidecars,
    expected: list[list[int]],
    draft_models: dict[str, str],
    drafts_by: str,
    masks: str,
    num_drafts: int,
    max_jump_forward: int,
) -> None:
    settings = with_drafts(
        num_drafts, draft_model=draft_models[drafts_by], jump_forward_tokens=max_jump_forward, max_batch_size=2,
        draft_masks=masks, **PATIENT,
    )  # fmt: skip
    with sidecars.engine(settings) as (engine, worker):
        assert answer_all(engine, made()) == expected
        stats = engine.stats()
        rows = worker.stats()
    assert stats.jump_forward_tokens >= stats.accepted_jump_forward_tokens > 0.95 * stats.jump_forward_tokens > 100
    assert rows["filled_rows"] > 100


@pytest.mark.parametrize(("num_drafts", "max_jump_forward"), [(7, 0), (7, 15), (1, 11)])
def test_an_answer_of_jump_forward_tokens_takes_few_steps(
    sidecars: Sidecars, expected: list[list[int]], num_drafts: int, max_jump_forward: int
) -> None:
    at, rows = 2 * SCHEMAS.index(LITERAL), max(num_drafts, max_jump_forward) + 1
    settings = config(drafter="grammar", num_draft_tokens=num_drafts, jump_forward_tokens=max_jump_forward, **PATIENT)
    with sidecars.engine(settings) as (engine, _):
        answer = made()[at]
        answer.request.jump_forward_tokens = 15
        assert answer_all(engine, [answer]) == [expected[at]]
    # The first step emits one token, each later step as many as it has rows; the last row emits the stop token.
    assert answer.request.telemetry.steps == 1 + -(-(len(expected[at]) - 1) // rows)
