"""Records answered in batches give the same rows as records answered one by one."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from threading import Lock

import numpy as np
import pytest

from grammar_service.backends.backend import Compiled, Matcher, Rows
from grammar_service.backends.reasoning import ReasoningCompiled, ReasoningMatcher
from grammar_service.completion.budget import CompletionBudget
from grammar_service.completion.plan import CompletionPlan
from grammar_service.completion.texts import TokenTexts
from grammar_service.fill.batch import BatchAnswerer
from grammar_service.fill.counters import Counters
from grammar_service.fill.matchers import MatcherTable, SlotMatcher
from grammar_service.fill.worker import Worker
from grammar_service.grammar.mask_rows import Classifier
from grammar_service.grammar.value import Kind, Whitespace, parse
from shared_mem.channel import EngineEnd, GrammarEnd
from shared_mem.layout import Layout, RowKind, Stage
from shared_mem.segment import Segment
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import PADDED, STOPS, VOCAB, ToyFiller, ToyMatcher, spell, tokens_in

ROWS, SLOTS, STEPS = 5, 8, 40
PATIENCE_S = 120.0
NEVER_LATE_MS = 10_000.0


def reasoning(schema: str, *, is_open: bool, budget: int) -> str:
    """Return a composed grammar of a reasoning and JSON."""
    phase = {"begin": "<th", "end": "</t", "open": is_open, "max_tokens": budget}
    return json.dumps({"format": {"type": "json_schema", "json_schema": json.loads(schema)}, "reasoning": phase})


GRAMMARS = [
    (
        Kind.JSON_SCHEMA,
        '{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"integer"}},"required":["a"]}',
    ),
    (Kind.JSON_SCHEMA, '{"enum":["true","abc","abd"]}'),
    (Kind.REGEX, "ab(c|d)?[0-9]*"),
    (Kind.REGEX, "(.|\\n)*"),
    (Kind.CHOICE, '["abcabc","abcabd","x"]'),
    (Kind.COMPOSED, reasoning('{"type":"object","properties":{"a":{"type":"string"}}}', is_open=True, budget=6)),
    (Kind.COMPOSED, reasoning('{"enum":["<ab","<thabc",12]}', is_open=False, budget=12)),
]


class Side:
    """An engine's end and a worker after it."""

    def __init__(self, segment: Segment, *, batches: bool) -> None:
        self.engine = EngineEnd(segment)
        end = GrammarEnd(Segment.attach(os.dup(segment.fileno())))
        self.worker = Worker(end, threads=2, row_deadline_ms=NEVER_LATE_MS)
        self.worker.min_batch = 2 if batches else SLOTS + 1
        self.worker.start()


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """One side with batches and one without."""
    layout = Layout(num_slots=SLOTS, num_rows=ROWS, vocab_size=PADDED)
    with ExitStack() as stack:
        made = [Side(stack.enter_context(Segment.create(layout)), batches=batches) for batches in (True, False)]
        yield made[0], made[1]
        for side in made:
            assert side.worker.stop(PATIENCE_S)


class Lane:
    """The engine's state of one slot; makes its next record."""

    def __init__(self, slot: int, rng: random.Random, bind: Callable[[Lane], None]) -> None:
        self.slot, self.rng, self.gen, self._bind = slot, rng, 0, bind
        self.new_owner()

    def new_owner(self) -> None:
        """Give the slot to a new request."""
        self.gen += 1
        self.tokens: list[int] = []
        self.drafts: list[int] = []
        self.rows: list[set[int] | None] = []
        self._bind(self)

    def take(self, kinds: list[int], rows: list[set[int]]) -> None:
        """Take an answer."""
        if RowKind.ERROR in kinds or RowKind.ALL in kinds[: len(self.drafts) + 1]:
            self.new_owner()
            return
        said = (RowKind.APPLY, RowKind.FORCED)
        self.rows = [row if kind in said else None for kind, row in zip(kinds, rows, strict=True)]

    def record(
        self, walk: Callable[[Lane, list[int], int], list[int]]
    ) -> tuple[int, int, int, list[int], list[int], int]:
        """Return gen, commit_pos, committed, drafts and wanted rows of the next record."""
        rng = self.rng
        start, committed = len(self.tokens), self._emitted()
        if any(token in STOPS for token in committed):
            self.new_owner()
            start, committed = 0, []
        chance = rng.random()
        gen = self.gen
        if chance < 0.02 and start > 1:
            # The newest token is replaced.
            start -= 1
            committed = [self.tokens[start], *committed][: ROWS - 1] if rng.random() < 0.5 else []
            self.tokens = self.tokens[:start]
        elif chance < 0.03:
            committed = [*committed[: ROWS - 1], rng.randrange(PADDED)]
        elif chance < 0.04:
            start += 2
        elif chance < 0.06:
            gen += rng.choice((-1, 1))
        elif chance < 0.10 and start + 1 < ROWS:
            # All tokens are committed once more.
            start, committed = 0, [*self.tokens, *committed][:ROWS]
        full = self.tokens[:start] + committed
        drafts = walk(self, full, rng.randrange(ROWS))
        if rng.random() < 0.2 and drafts:
            drafts[rng.randrange(len(drafts))] = rng.randrange(PADDED)
        need = (1 << ROWS) - 1
        if rng.random() < 0.15:
            need = rng.choice((need << rng.randrange(len(drafts) + 1) & need, rng.randrange(1, need + 1)))
        if gen == self.gen and start <= len(self.tokens):
            self.tokens = full
        self.drafts, self.rows = drafts, []
        return gen, start, committed, drafts, need

    def _emitted(self) -> list[int]:
        out: list[int] = []
        for at, row in enumerate(self.rows[: len(self.drafts) + 1]):
            if not row:
                break
            if at < len(self.drafts) and self.drafts[at] in row and self.rng.random() < 0.6:
                out.append(self.drafts[at])
                continue
            text = sorted(row - set(STOPS))
            ends = not text or (row & set(STOPS) and self.rng.random() < 0.1)
            out.append(self.rng.choice(sorted(row & set(STOPS)) if ends else text))
            break
        return out


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_batch_gives_the_rows_of_single_records(library: Library, sides: tuple[Side, Side], seed: int) -> None:
    rng = random.Random(seed)
    texts = TokenTexts.of(library.vocabulary)
    grammars = [library.compiled(kind, source, Whitespace.BOUNDED) for kind, source in GRAMMARS]
    answers = [compiled.answer if isinstance(compiled, ReasoningCompiled) else compiled for compiled in grammars]
    plans = [
        CompletionPlan.of(answer.matcher(), parse(kind, source, Whitespace.BOUNDED).text, texts)
        for answer, (kind, source) in zip(answers, GRAMMARS, strict=True)
    ]
    using: dict[int, Compiled] = {}

    def bind(lane: Lane) -> None:
        number = rng.randrange(len(grammars))
        compiled = using[lane.slot] = grammars[number]
        limit = rng.choice((24, 400)) if rng.random() < 0.8 else 0
        closes = partial(CompletionBudget, plans[number], limit) if limit else None
        start: Callable[[], Matcher] = compiled.matcher
        if limit and isinstance(compiled, ReasoningCompiled):
            start = partial(compiled.matcher, plans[number].closing_at(limit))
        for side in sides:
            side.worker.bind(lane.slot, SlotMatcher.bind(lane.gen, start, (), closes))

    def walk(lane: Lane, tokens: list[int], count: int) -> list[int]:
        matcher: Matcher = using[lane.slot].matcher()
        found: list[int] = []
        if all(matcher.accept(token) for token in tokens):
            while len(found) < count and not matcher.terminated:
                token = rng.choice(sorted(library.legal(matcher)))
                assert matcher.accept(token)
                found.append(token)
        return found

    lanes = [Lane(slot, rng, bind) for slot in range(SLOTS)]
    seen: set[int] = set()
    proposed = left_out = 0
    for step in range(STEPS):
        asked = [lane for lane in lanes if rng.random() < 0.9] or lanes[:1]
        records = [lane.record(walk) for lane in asked]
        if rng.random() < 0.5:
            # The record that follows commits the same tokens again.
            proposals = [(gen, start, committed, [], 0b111) for gen, start, committed, _, _ in records]
            one, other = (_ask(side.engine, asked, proposals, Stage.PROPOSE) for side in sides)
            told = [[answer[1] for answer in answers] for answers in (one, other)]
            # A side leaves proposals out after one that took long.
            assert all(a == b or -1 in {a[0], b[0]} for a, b in zip(*told, strict=True)), f"step {step}"
            proposed += sum(tokens[0] >= 0 for tokens in told[0])
            left_out += told[0] != told[1]
        answers = [_ask(side.engine, asked, records) for side in sides]
        for lane, (_, _, committed, drafts, _), one, other in zip(asked, records, *answers, strict=True):
            told = f"step {step} {lane.slot=} {lane.gen=} {committed=} {drafts=}"
            assert one == other, told
            seen.update(one[0])
            lane.take(one[0], one[2])
    for side in sides:
        assert side.worker.stop(PATIENCE_S)  # records are counted after the publication
    batched, alone = (side.worker.stats() for side in sides)
    assert alone["batched_records"] == 0
    assert batched["batched_records"] > STEPS
    assert proposed
    assert {RowKind.APPLY, RowKind.FORCED, RowKind.DEFER, RowKind.ERROR} <= seen
    for name in ("records", "late_answers"):
        assert batched[name] == alone[name], name
    # A proposal that one side left out filled its rows on the other side alone.
    assert batched["filled_rows"] == alone["filled_rows"] or left_out
    assert sides[0].worker.rows_by_kind() == sides[1].worker.rows_by_kind()


def _ask(
    engine: EngineEnd,
    lanes: list[Lane],
    records: list[tuple[int, int, int, list[int], list[int], int]],
    stage: Stage = Stage.VERIFY,
) -> list:
    arrays = engine.batch_arrays(len(lanes))
    for i, (lane, (gen, start, committed, drafts, need)) in enumerate(zip(lanes, records, strict=True)):
        arrays.slots[i], arrays.slot_gens[i], arrays.commit_pos[i] = lane.slot, gen, start
        arrays.n_commit[i], arrays.n_draft[i], arrays.need_rows[i] = len(committed), len(drafts), need
        arrays.tokens[i, : len(committed) + len(drafts)] = committed + drafts
    seq = engine.post_batch(arrays, stage=stage)
    result = engine.await_batch(arrays, seq, timeout_s=PATIENCE_S)
    assert result.num_missing == 0
    out = []
    for i, lane in enumerate(lanes):
        kinds, forced = (array[i].tolist() for array in (result.kinds, result.forced))
        words = engine.mask_rows(seq)[lane.slot, :, : -(-PADDED // 32)]
        rows = [
            tokens_in(np.ascontiguousarray(words[row])) if kind in (RowKind.APPLY, RowKind.FORCED) else set()
            for row, kind in enumerate(kinds)
        ]
        out.append((kinds, forced, rows))
    return out


@pytest.mark.parametrize(
    ("cost_ms", "most", "sizes"),
    [(0.4, 8.0, [40, 40]), (0.1, 8.0, [64, 16]), (3.9, 8.0, [4] * 10), (3.9, 80.0, [41, 9])],
)
def test_the_size_of_a_batch_is_bounded_by_its_expected_time(cost_ms: float, most: float, sizes: list[int]) -> None:
    count, layout = sum(sizes), Layout(num_slots=80, num_rows=3, vocab_size=VOCAB)
    with Segment.create(layout) as segment:
        table = MatcherTable(Classifier(VOCAB))
        for number in range(count):
            slot = SlotMatcher.bind(1, lambda: ToyMatcher([(1, 2)]), ())
            slot.filler, slot.last_fill_ns = ToyFiller(), int(cost_ms * 1e6)
            table.bind(number, slot)
        limits = 2, int(most * 1e6)
        made = BatchAnswerer(GrammarEnd(segment), table, Counters(count), Lock(), lambda task: None, *limits)
        seq = EngineEnd(segment).post(
            list(range(count)), [1] * count, [0] * count, [0] * count, [0] * count, [[0]] * count
        )
        batches, rest = made.split(GrammarEnd(segment).read(seq))
    assert [len(batch.which) for batch in batches] == sizes
    assert not rest


def test_a_slot_behind_its_reasoning_is_filled_in_batches(library: Library) -> None:
    """A rollback after the answer's first committed token, which the engine does not ask for, is no error, either."""
    source = reasoning('{"enum":[{"a":1},{"a":22}]}', is_open=True, budget=40)
    compiled = library.compiled(Kind.COMPOSED, source, Whitespace.COMPACT)
    thought, answer = spell("hm</t\n"), spell('{"a":2')
    texts, classifier = TokenTexts.of(library.vocabulary), Classifier(library.vocabulary.size)
    plan = CompletionPlan.of(compiled.answer.matcher(), source, texts)  # type: ignore[attr-defined]

    def bound(tokens: list[int]) -> SlotMatcher:
        return SlotMatcher.bind(1, compiled.matcher, tokens, partial(CompletionBudget, plan, 400))

    def row(slot: SlotMatcher) -> tuple[RowKind, set[int]]:
        words = Rows(np.zeros((1, library.num_words), dtype=np.int32))
        kind, _ = slot.fill(words, 0, classifier)
        return kind, tokens_in(words.words[0])

    assert bound([]).filler is bound(thought).filler is None
    for count in range(1, len(answer) + 1):
        slot = bound(thought + answer[:count])
        assert slot.filler is library.compiled(Kind.REGEX, "a").matcher().filler  # type: ignore[attr-defined]
        assert not isinstance(slot.matcher, ReasoningMatcher)
        assert slot.accept(answer[count]) if count < len(answer) else slot.accept(spell("2")[0])
        for length in (len(thought) + count, len(thought), 2, 0):
            slot.rollback(length)
            assert isinstance(slot.matcher, ReasoningMatcher) is (length <= len(thought))
            assert row(slot) == row(bound((thought + answer)[:length]))
        assert all(map(slot.accept, thought + answer))


@pytest.mark.parametrize("at", [0, 3, 5, 6, 7, 9])
def test_a_copy_of_a_slot_behind_its_reasoning_is_that_of_its_tokens(library: Library, at: int) -> None:
    """A fork may be read when its source has gone on, from the reasoning into the answer."""
    source = reasoning('{"enum":[{"a":1},{"a":22}]}', is_open=True, budget=40)
    compiled = library.compiled(Kind.COMPOSED, source, Whitespace.COMPACT)
    thought, answer = spell("hm</t\n"), spell('{"a":2')
    table, tokens = MatcherTable(Classifier(library.vocabulary.size)), thought + answer
    gone_on = SlotMatcher.bind(1, compiled.matcher, tokens[:8])
    assert gone_on.answer_from == 8
    assert all(map(gone_on.accept, tokens[8:]))
    gone_on.num_committed = len(tokens)
    table.bind(0, gone_on)
    twin, wanted = table.copy_of(0, 2, at), SlotMatcher.bind(2, compiled.matcher, tokens[:at])
    assert twin is not None
    assert (twin.slot_gen, twin.num_committed, twin.tokens) == (2, at, tokens[:at])
    for token in tokens[at:]:
        assert rows_of(library, twin) == rows_of(library, wanted)
        assert twin.accept(token)
        assert wanted.accept(token)
    twin.rollback(2)
    assert rows_of(library, twin) == rows_of(library, SlotMatcher.bind(2, compiled.matcher, tokens[:2]))
    assert gone_on.tokens == tokens
    assert rows_of(library, gone_on) == rows_of(library, SlotMatcher.bind(2, compiled.matcher, tokens))


def rows_of(library: Library, slot: SlotMatcher) -> tuple[RowKind, set[int]]:
    """Return kind and tokens of the slot's next row."""
    words = Rows(np.zeros((1, library.num_words), dtype=np.int32))
    kind, _ = slot.fill(words, 0, Classifier(library.vocabulary.size))
    return kind, tokens_in(words.words[0])
