"""Verified answers to random schemas with every keyword: each complete one passes two independent validators."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from grammar_service.backends.backend import Compiled
from grammar_service.backends.verified import avoiding, find_way_back
from grammar_service.errors import InvalidGrammar, LimitExceeded
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.value import Kind, Reading, Whitespace, parse
from tests.grammar_service.conftest import Library
from tests.grammar_service.random_schemas import DIALECTS, Dialect, SchemaDraw, keywords
from tests.grammar_service.toy import STOPS
from tools.enforced.measure import KEYWORDS

MAX_TOKENS = 160
MAX_BACKTRACKS = 8


@dataclass(slots=True)
class Seen:
    """What random schemas and answers came to."""

    counts: Counter[str] = field(default_factory=Counter)
    """How schemas were served, and how answers ended."""
    keywords: set[str] = field(default_factory=set)
    """Those of the schemas that have a complete answer."""


def answer(library: Library, compiled: Compiled, draw: random.Random) -> tuple[str, str, int]:
    """Return (how it ended, text, backtracks) of an answer of random legal tokens."""
    texts, tokens, dead, went_back = TokenBytes.of(library.vocabulary).texts, list[int](), tuple[bytes, ...](), 0
    matcher = compiled.matcher()
    while len(tokens) < MAX_TOKENS:
        row = library.legal(matcher)
        if not row:
            found = find_way_back(avoiding(compiled, dead).matcher, tokens, 0) if went_back < MAX_BACKTRACKS else None
            if found is None:
                return "invalid", "", went_back
            dead, tokens, went_back = found.dead, tokens[: found.num_tokens], went_back + 1
            matcher = avoiding(compiled, dead).matcher()
            assert all(matcher.accept(token) for token in tokens)
            continue
        row = {token for token in row if texts[token].isascii()}
        if not row:
            return "other characters", "", went_back
        stops = sorted(row & set(STOPS))
        ends = sorted(token for token in row if not set(texts[token]).isdisjoint(b'"]}'))
        token = stops[0] if stops else draw.choice(ends if ends and draw.random() < 0.5 else sorted(row))
        assert matcher.accept(token)
        if token in STOPS:
            return "stop", b"".join(texts[token] for token in tokens).decode(), went_back
        tokens.append(token)
    return "length", "", went_back


def check(library: Library, dialect: Dialect, seed: int, count: int) -> Seen:
    """Check the answers to random schemas."""
    draw, seen = random.Random(seed), Seen()
    for _ in range(count):
        schema = SchemaDraw(draw, dialect).schema()
        grammar = parse(Kind.JSON_SCHEMA, json.dumps(schema), draw.choice([Whitespace.COMPACT, Whitespace.BOUNDED]))
        grammar = replace(grammar, reading=Reading(verify=True))
        try:
            compiled = library.backend.load(grammar, library.backend.compile(grammar))
        except (InvalidGrammar, LimitExceeded):
            seen.counts["refused"] += 1
            continue
        is_verified = any(line.startswith("verified: ") for line in compiled.warnings)
        seen.counts["verified" if is_verified else "enforced"] += 1
        for _ in range(3):
            ended, text, went_back = answer(library, compiled, draw)
            seen.counts[ended] += 1
            if ended == "stop":
                assert dialect.is_valid(schema, json.loads(text)) == (True, True), (json.dumps(schema), text)
                seen.keywords.update(keywords(schema))
                seen.counts["valid after going back"] += bool(went_back)
    return seen


@pytest.mark.parametrize("dialect", DIALECTS, ids=["2020-12", "draft-07", "draft-04"])
def test_complete_answers_are_valid(library: Library, dialect: Dialect) -> None:
    seen = check(library, dialect, 5, 20).counts
    assert seen["stop"] >= 8, seen
    assert seen["verified"] >= 2, seen


@pytest.mark.slow
def test_complete_answers_to_many_schemas_are_valid_and_have_every_keyword(library: Library) -> None:
    """The keywords are those of the page that says what is enforced; test_draft_3.py has those of draft 3 alone."""
    keywords = set[str]()
    for dialect in DIALECTS:
        seen = check(library, dialect, 6, 100)
        keywords |= seen.keywords
        assert seen.counts["stop"] >= 50, seen.counts
        assert seen.counts["verified"] >= 30, seen.counts
        if library.name == "xgrammar":  # it enforces less, so that more is left to verification
            assert seen.counts["valid after going back"] >= 2, seen.counts
    assert {case.keyword for case in KEYWORDS} - keywords == {
        "title, description, default, examples",
        "a keyword that does not exist",
        "extends",
        "disallow",
        "divisibleBy",
    }
