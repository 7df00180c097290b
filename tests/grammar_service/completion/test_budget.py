"""Steered answers end in time and are valid; their rows do not depend on drafts or on a rebuilt matcher."""

from __future__ import annotations

import hashlib
import json
import random
from functools import partial
from typing import Any

import jsonschema
import numpy as np
import pytest

from benchmarks.quality.random_schemas import random_schema
from grammar_service.backends.backend import Compiled, Rows
from grammar_service.completion.budget import CompletionBudget
from grammar_service.completion.plan import CompletionPlan
from grammar_service.completion.texts import TokenTexts
from grammar_service.fill.matchers import MatcherTable, SlotMatcher
from grammar_service.grammar.mask_rows import Classifier, Words, token_ids
from grammar_service.grammar.value import Kind
from grammar_service.grammar.vocabulary import Vocabulary
from shared_mem.layout import STEERED, RowKind, Stage
from shared_mem.records import Record
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import PADDED, STOPS, spell

Told = tuple[int, int, int, bytes]
"""Kind, forced, need and words of a row."""

PERSON = {
    "type": "object",
    "properties": {"n": {"type": "string"}, "a": {"type": "integer"}, "t": {"type": "array", "minItems": 2}},
    "required": ["n", "a", "t"],
}
NODE = {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}, "v": {"type": "integer"}}, "required": ["l", "v"]}
TAG = {
    "type": "sequence",
    "elements": [
        {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "\n</a>\n"},
        {
            "type": "tag",
            "begin": "<n>",
            "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
            "end": "</n>",
        },
    ],
}
NO_END = {
    "type": "sequence",
    "elements": [
        {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "END"},
        {"type": "regex", "pattern": "END[ -~]+#|q!"},
    ],
}
GRAMMARS: dict[str, tuple[Kind, Any]] = {
    "required": (Kind.JSON_SCHEMA, PERSON),
    "nested": (Kind.JSON_SCHEMA, {"type": "object", "properties": {"a": {"type": "array", "items": PERSON}}}),
    "enum": (Kind.JSON_SCHEMA, {"enum": ["red", "green", "a longer value", 7]}),
    "lengths": (Kind.JSON_SCHEMA, {"type": "string", "minLength": 12, "maxLength": 40}),
    "pattern": (Kind.JSON_SCHEMA, {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"}),
    "one of": (Kind.JSON_SCHEMA, {"anyOf": [PERSON, {"type": "array", "items": {"type": "boolean"}}]}),
    "recursive": (Kind.JSON_SCHEMA, {"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [{"type": "null"}, NODE]}}}),
    "object": (Kind.JSON_OBJECT, ""),
    "choice": (Kind.CHOICE, ["yes", "no", "a third way"]),
    "regex": (Kind.REGEX, "[a-z]+-(x|yy)!"),
    "free text in a tag": (Kind.STRUCTURAL_TAG, {"type": "structural_tag", "format": TAG}),
    "an end within a value": (Kind.STRUCTURAL_TAG, {"type": "structural_tag", "format": NO_END}),
    "ebnf": (Kind.EBNF, 'root ::= "<" [a-z]+ ">" [^<]* "</end>"'),
}


def compiled_of(library: Library, name: str) -> tuple[Compiled, str]:
    kind, source = GRAMMARS[name]
    text = source if isinstance(source, str) else json.dumps(source)
    return library.compiled(kind, text), text


def plan_of(compiled: Compiled, source: str, vocabulary: Vocabulary) -> CompletionPlan:
    return CompletionPlan.of(compiled.matcher(), source, TokenTexts.of(vocabulary))


def drawn(seed: int, position: int, words: Any) -> int:
    """Draw a token as the engine does: the same one from the same row, with the same seed, at the same position."""
    legal = token_ids(words, PADDED)

    def noise(token: int) -> bytes:
        return hashlib.blake2b(f"{seed} {position} {token}".encode(), digest_size=8).digest()

    return min(legal, key=noise)


class Walk:
    """An engine's side of one slot: commits what it draws, drafts well or badly, and notes every row that it used."""

    def __init__(self, compiled: Compiled, plan: CompletionPlan, limit: int, seed: int) -> None:
        self.compiled, self.limit, self.seed = compiled, limit, seed
        self.new_budget = partial(CompletionBudget, plan, limit)
        self.classifier = Classifier(PADDED)
        self.rows = Rows(np.zeros((8, plan.texts.num_words), dtype=np.int32))
        self.tokens: list[int] = []
        self.used: list[Told] = []
        self.steered = False
        self.complete = False

    def run(self, drafts: int = 0, rebind_at: int = -1, known: list[int] | None = None) -> Walk:
        table, posted = self.bound(), 0
        luck = random.Random(drafts)
        while not self.complete and len(self.tokens) < self.limit:
            if 0 <= rebind_at <= len(self.tokens):
                table, posted, rebind_at = self.bound(), len(self.tokens), -1
            proposed = self.propose(luck, drafts, known or [])
            record = Record(0, 1, posted, tuple(self.tokens[posted:]), tuple(proposed), 0)
            answer = table.answer(record, self.rows, 0)
            posted = len(self.tokens)
            for row in range(len(proposed) + 1):
                kind, forced = answer.kinds[row], answer.forced[row]
                assert kind in (RowKind.ALL, RowKind.APPLY, RowKind.FORCED), (kind, table.slots[0].problem)
                words = self.rows.words[row]
                self.used.append((kind, forced, words.tobytes()))
                token = drawn(self.seed, len(self.tokens), words)
                self.tokens.append(token)
                self.complete, self.steered = token in STOPS, forced == STEERED
                if self.complete or len(self.tokens) == self.limit or proposed[row : row + 1] != [token]:
                    break
        return self

    def bound(self) -> MatcherTable:
        table = MatcherTable(self.classifier)
        table.bind(0, SlotMatcher.bind(1, self.compiled.matcher, self.tokens, self.new_budget))
        return table

    def propose(self, luck: random.Random, most: int, known: list[int]) -> list[int]:
        """Draft what will be drawn, and now and then another token."""
        at = len(self.tokens)
        ahead = known[at : at + luck.randint(0, most)]
        return [token if luck.random() < 0.9 else luck.randrange(3, 259) for token in ahead]


@pytest.mark.parametrize("name", GRAMMARS)
def test_an_answer_ends_within_max_tokens_when_an_end_is_known(
    library: Library, vocabulary: Vocabulary, name: str
) -> None:
    compiled, source = compiled_of(library, name)
    plan = plan_of(compiled, source, vocabulary)
    assert plan.path is not None
    assert 2 <= plan.min_tokens <= len(plan.path)
    assert compiled_takes(compiled, list(plan.path))
    assert CompletionPlan.from_wire(json.loads(json.dumps(plan.to_wire())), plan.texts) == plan
    for limit in (len(plan.path), len(plan.path) + 20):
        walk = Walk(compiled, plan, limit, seed=limit).run()
        assert walk.complete, (limit, spelled(plan, walk.tokens))
        assert compiled_takes(compiled, walk.tokens)
        if GRAMMARS[name][0] is Kind.JSON_SCHEMA:
            judge(spelled(plan, walk.tokens), GRAMMARS[name][1])


@pytest.mark.parametrize("name", ["required", "nested", "recursive", "lengths", "regex", "ebnf", "free text in a tag"])
def test_rows_are_the_same_with_drafts_and_after_a_rebind(library: Library, vocabulary: Vocabulary, name: str) -> None:
    compiled, source = compiled_of(library, name)
    plan = plan_of(compiled, source, vocabulary)
    limit = len(plan.path or ()) + 4
    alone = Walk(compiled, plan, limit, seed=limit).run()
    assert any(forced == STEERED for _, forced, _ in alone.used)
    for drafts, rebind_at in ((7, -1), (3, limit // 2), (0, limit - 4)):
        other = Walk(compiled, plan, limit, seed=limit).run(drafts, rebind_at, alone.tokens)
        assert other.tokens == alone.tokens
        assert other.used == alone.used


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 6))])
def test_answers_to_random_schemas_end_within_random_limits(
    library: Library, vocabulary: Vocabulary, seed: int
) -> None:
    schema = random_schema(seed)
    source = json.dumps(schema)
    compiled = library.compiled(Kind.JSON_SCHEMA, source)
    plan = plan_of(compiled, source, vocabulary)
    limit = random.Random(seed).randint(4, 120)
    walk = Walk(compiled, plan, limit, seed).run()
    if walk.complete:
        judge(spelled(plan, walk.tokens), schema)
    else:
        assert plan.path is None or len(plan.path) > limit


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_answers_that_open_whatever_they_can_still_end(library: Library, vocabulary: Vocabulary, first: int) -> None:
    texts = TokenTexts.of(vocabulary)
    opening = {token for token, text in enumerate(texts.texts) if any(byte in b'{[,":' for byte in text)}
    ended = 0
    for seed in range(first, first + 10):
        schema, rng = random_schema(seed), random.Random(seed)
        source = json.dumps(schema)
        compiled = library.compiled(Kind.JSON_SCHEMA, source)
        plan = plan_of(compiled, source, vocabulary)
        limit = rng.randint(4, 200)
        if plan.path is None or len(plan.path) > limit:
            continue
        matcher, tokens = compiled.matcher(), list[int]()
        budget = CompletionBudget(plan, limit, matcher)
        while not matcher.terminated and len(tokens) < limit:
            narrowed = budget.narrowed_row(len(tokens))
            legal = library.legal(matcher) if narrowed is None else set(token_ids(narrowed, PADDED))
            # A token with half of a character would not be a schema's fault; xgrammar allows halves of surrogates.
            longer = {token for token in legal - set(STOPS) if texts.texts[token].isascii()} or legal
            tokens.append(rng.choice(sorted(longer & opening if longer & opening and rng.random() < 0.7 else longer)))
            assert matcher.accept(tokens[-1])
            budget.advance(matcher, tokens)
        assert matcher.terminated, (seed, limit, spelled(plan, tokens))
        judge(spelled(plan, tokens), schema)
        ended += 1
    assert ended


@pytest.mark.parametrize(
    "change",
    [
        {"path": [PADDED]},
        {"path": [True]},
        {"path": "ab"},
        {"min_tokens": 0},
        {"margin": 1000},
        {"single_token_cost": -1},
        {"longest_way": -1},
        {"ends": [1]},
    ],
)
def test_an_invalid_plan_is_rejected(vocabulary: Vocabulary, change: dict[str, Any]) -> None:
    texts = TokenTexts.of(vocabulary)
    plain = {"path": [5], "min_tokens": 1, "margin": 12, "single_token_cost": 0, "longest_way": None}
    plain |= {"ends": ["</a>"]}
    assert CompletionPlan.from_wire(plain, texts).path == (5,)
    with pytest.raises(ValueError, match="cannot be read"):
        CompletionPlan.from_wire(plain | change, texts)


def test_min_tokens_is_exact_when_every_answer_can_be_tried(library: Library, vocabulary: Vocabulary) -> None:
    compiled = library.compiled(Kind.CHOICE, json.dumps(["zq", "zqzq"]))
    plan = plan_of(compiled, "zq", vocabulary)
    assert plan.min_tokens == len(plan.path or ()) == len(spell("zq")) + 1


def test_far_positions_cause_no_look_ahead_and_no_narrowed_row(library: Library, vocabulary: Vocabulary) -> None:
    compiled, text = compiled_of(library, "required")
    matcher = compiled.matcher()
    budget, rng, tokens = (
        CompletionBudget(plan_of(compiled, text, vocabulary), 120, matcher),
        random.Random(1),
        list[int](),
    )
    quiet = loud = 0
    while not matcher.terminated and len(tokens) < 119:
        at = len(tokens)
        said, marks = budget.is_far(at, at + 1), repr(budget)
        legal = library.legal(matcher)
        if (narrowed := budget.narrowed_row(at)) is not None:
            legal = set(token_ids(narrowed, PADDED))
        tokens.append(rng.choice(sorted(legal)))
        matcher.accept(tokens[-1])
        if said:
            assert narrowed is None
            assert budget.steered_tokens_left(at) == -1
        budget.advance(matcher, tokens)
        if said:
            assert repr(budget) == marks
        quiet, loud = quiet + said, loud + (not said)
    assert quiet
    assert loud


def test_without_spare_tokens_rows_hold_little_more_than_the_path(library: Library, vocabulary: Vocabulary) -> None:
    compiled, source = compiled_of(library, "lengths")
    plan = plan_of(compiled, source, vocabulary)
    assert plan.path is not None
    slot = SlotMatcher.bind(1, compiled.matcher, [], partial(CompletionBudget, plan, len(plan.path)))
    rows = Rows(np.zeros((1, plan.texts.num_words), dtype=np.int32))
    for token in plan.path[1:-1]:
        slot.accept(plan.path[len(slot.tokens)])
        kind, forced = slot.fill(rows, 0, Classifier(PADDED))
        assert (kind, forced) == (RowKind.APPLY, STEERED)
        assert slot.budget is not None
        assert slot.budget.steered_tokens_left(len(slot.tokens)) == len(plan.path) - len(slot.tokens)
        offered = token_ids(rows.words[0], PADDED)
        assert token in offered
        assert len(offered) < 4


def test_rows_behind_a_draft_that_leaves_no_room_are_not_filled(library: Library, vocabulary: Vocabulary) -> None:
    compiled, source = compiled_of(library, "lengths")
    plan = plan_of(compiled, source, vocabulary)
    assert plan.path is not None
    table = MatcherTable(Classifier(PADDED))
    table.bind(0, SlotMatcher.bind(1, compiled.matcher, [], partial(CompletionBudget, plan, len(plan.path))))
    rows = Rows(np.zeros((2, plan.texts.num_words), dtype=np.int32))
    head = plan.path[:3]
    other = next(t for t in spell("abc") if t != plan.path[3])
    answer = table.answer(Record(0, 1, 0, head, (other,), 0), rows, 0)
    assert answer.kinds == [RowKind.APPLY, RowKind.DEFER]
    assert table.slots[0].tokens == list(head)


def test_a_limit_below_every_answer_narrows_no_row(library: Library, vocabulary: Vocabulary) -> None:
    compiled, source = compiled_of(library, "pattern")
    plan = plan_of(compiled, source, vocabulary)
    walk = Walk(compiled, plan, plan.min_tokens - 1, seed=1).run()
    assert not walk.complete
    assert all(forced != STEERED for _, forced, _ in walk.used)


def test_a_row_cuts_only_if_a_text_cannot_be_begun(vocabulary: Vocabulary) -> None:
    texts = TokenTexts.of(vocabulary)

    def row(token: int) -> Words:
        words = np.zeros(texts.num_words, dtype=np.int32)
        words.view(np.uint32)[token >> 5] = 1 << (token & 31)
        return words

    longest = max(range(len(texts.texts)), key=lambda token: len(texts.texts[token]))
    begin = int(texts.prefixes[longest])
    assert texts.texts[longest].startswith(texts.texts[begin])
    other, half = spell("}")[0], texts.texts.index(b"\xcc")
    assert texts.begins_all(row(begin), row(longest) | row(half))
    assert not texts.begins_all(row(longest), row(begin))
    assert not texts.begins_all(row(other), row(longest))


def judge(text: str, schema: Any) -> None:
    jsonschema.validate(json.loads(text), schema)


def spelled(plan: CompletionPlan, tokens: list[int]) -> str:
    return plan.texts.text(tokens).decode()


def compiled_takes(compiled: Compiled, tokens: list[int]) -> bool:
    matcher = compiled.matcher()
    return all(matcher.accept(token) for token in tokens) and matcher.terminated


def test_the_only_way_to_the_end_is_proposed(library: Library, vocabulary: Vocabulary) -> None:
    compiled, source = compiled_of(library, "required")
    plan = plan_of(compiled, source, vocabulary)
    assert plan.path is not None
    table = MatcherTable(Classifier(PADDED))
    table.bind(0, SlotMatcher.bind(1, compiled.matcher, (), partial(CompletionBudget, plan, len(plan.path))))
    rows = Rows(np.zeros((8, plan.texts.num_words), dtype=np.int32))
    slot, whole = table.slots[0], 0
    assert slot.budget is not None
    for said in range(len(plan.path)):
        slot.proposals_to_skip = 0  # a slow proposal would skip the next ones
        proposed = table.answer(Record(0, 1, 0, plan.path[:said], (), Stage.PROPOSE, 0b111), rows, 0).forced
        way = slot.budget.only_path(said)
        assert way in (None, (), plan.path[said:])
        if way is not None:
            # A row with more than one token proposes nothing.
            assert tuple(proposed) == way[:-1][:3]
            whole += bool(way)
    assert whole > 1
