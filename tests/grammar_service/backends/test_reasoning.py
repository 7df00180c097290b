"""A reasoning phase before an answer: its markers, its budget, rollback, and rows that depend only on the prefix."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from grammar_service.backends.backend import Compiled, Matcher
from grammar_service.backends.reasoning import MarkerRows, Phase, ReasoningMatcher, ReasoningSpec
from grammar_service.errors import InvalidGrammar
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.value import Kind
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import STOPS, spell, tokens_in

ANSWER: dict[str, Any] = {"type": "json_schema", "json_schema": {"enum": [{"a": 1}, {"a": 22}]}}
STOP = STOPS[0]


def document(*, is_open: bool, budget: int | None = None, form: dict[str, Any] | None = None) -> str:
    reasoning = {"begin": "<think>", "end": "</think>", "open": is_open, "max_tokens": budget}
    return json.dumps({"type": "structural_tag", "format": form or ANSWER, "reasoning": reasoning})


def ready(library: Library, **fields: Any) -> Compiled:
    return library.compiled(Kind.COMPOSED, document(**fields))


def accepts(matcher: Matcher, text: str) -> bool:
    return all(matcher.accept(token) for token in spell(text))


@pytest.mark.parametrize(
    ("text", "legal"),
    [
        ("<think>a<b</thin</think>{", True),
        ("<think></think>\n\n{", True),
        ("<think>\n</think>\n{", True),
        ("{", True),
        ("<think></think>\n\n\n", False),
        ("<think></think> ", False),
        ("<think></think>x", False),
        ("<th{", False),
        ("x", False),
        ("\n<think>", False),
    ],
)
def test_an_answer_may_begin_with_the_phase(library: Library, text: str, legal: bool) -> None:
    matcher = ready(library, is_open=False).matcher()
    assert accepts(matcher, text) is legal
    closed = ready(library, is_open=True).matcher()
    assert accepts(closed, text.removeprefix("<think>")) is (legal or "</think>" not in text)


def test_no_stop_and_no_special_token_within_the_phase(library: Library) -> None:
    matcher = ready(library, is_open=True).matcher()
    for text in ("", "ab", "</thin", "k>", "\n"):
        assert accepts(matcher, text)
        legal = library.legal(matcher)
        assert not legal & {0, 1, 2}
        assert max(legal) < len(TokenBytes.of(library.vocabulary).texts)
        assert not any(matcher.accept(token) for token in (0, 1, 2, 300, 301, -1))
    assert accepts(matcher, '{"a":22}')
    assert library.legal(matcher) == set(STOPS)
    assert matcher.accept(STOP)
    assert matcher.terminated
    matcher.rollback(1)
    assert not matcher.terminated


def test_an_answer_that_begins_like_the_marker(library: Library) -> None:
    text = {"type": "regex", "pattern": "<(think>|t|th|x)y"}
    for answer in ("<ty", "<thy", "<xy"):
        matcher = ready(library, is_open=False, form=text).matcher()
        assert accepts(matcher, answer), answer
        assert matcher.accept(STOP)
    matcher = ready(library, is_open=False, form=text).matcher()
    assert accepts(matcher, "<think>y</think><think>y")
    assert matcher.accept(STOP)


@pytest.mark.parametrize("budget", [1, 5, 9, 20])
@pytest.mark.parametrize("is_open", [True, False])
def test_the_budget_ends_the_phase(library: Library, budget: int, is_open: bool) -> None:
    matcher = ready(library, is_open=is_open, budget=budget).matcher()
    assert isinstance(matcher, ReasoningMatcher)
    used = 0
    out = b""
    texts = TokenBytes.of(library.vocabulary).texts
    if not is_open:
        assert accepts(matcher, "<think>")
        used = len("<think>")
    while matcher.phase is Phase.REASONING:
        legal = library.legal(matcher)
        forced = matcher.jump_forward_tokens(99)
        wanted = spell("<")[0]
        token = wanted if wanted in legal else min(legal)
        assert len(legal) == 1 if forced else len(legal) > 1
        assert matcher.accept(token)
        out += texts[token]
        used += 1
    assert out.endswith(b"</think>")
    marker = len(spell("</think>"))
    assert used <= max(budget, marker + (0 if is_open else len("<think>")))
    assert used >= min(budget, marker) - 1
    assert accepts(matcher, '{"a":1}')


def test_rows_depend_on_the_tokens_before_them_alone(library: Library) -> None:
    """Random walks with drafts that are taken back: each row equals the row of a new matcher over the same tokens."""
    for seed in range(6):
        rng = random.Random(seed)
        compiled = ready(library, is_open=bool(seed % 2), budget=rng.choice([None, 12, 30]))
        matcher = compiled.matcher()
        tokens: list[int] = []
        for _ in range(60):
            drafted: list[int] = []
            for _ in range(rng.randrange(8)):
                token = choose(library.legal(matcher), rng)
                if matcher.terminated or not matcher.accept(token):
                    break
                drafted.append(token)
                if matcher.terminated:
                    break
            kept = rng.randrange(len(drafted) + 1)
            if rng.random() < 0.3:
                matcher = matcher.copy()
            matcher.rollback(len(drafted) - kept)
            tokens += drafted[:kept]
            if matcher.terminated:
                break
            again = compiled.matcher()
            assert all(again.accept(token) for token in tokens)
            assert library.legal(matcher) == library.legal(again), tokens
        assert tokens


def choose(legal: set[int], rng: random.Random) -> int:
    end = [token for token in spell("</think>\n{") if token in legal]
    return rng.choice(end) if end and rng.random() < 0.7 else rng.choice(sorted(legal))


def test_a_token_with_other_text_behind_the_end_is_illegal(vocabulary: Vocabulary) -> None:
    spec = ReasoningSpec(b"<", b'{"', True, None)
    rows = MarkerRows(vocabulary, spec)
    texts = rows.tokens.texts
    legal = tokens_in(rows.reasoning_row(0))
    assert texts.index(b'{"') in legal
    tail = [token for token, text in enumerate(texts) if text == b'":']
    assert tail
    assert tail[0] in legal
    assert tail[0] not in tokens_in(rows.reasoning_row(1))
    assert spell('"')[0] in tokens_in(rows.reasoning_row(1))


def test_a_phase_that_is_cut_short_says_so(library: Library) -> None:
    compiled = ready(library, is_open=True, budget=40)
    matcher = compiled.matcher(20)  # type: ignore[call-arg]
    assert accepts(matcher, "abcd")
    assert not matcher.cut_short  # type: ignore[attr-defined]
    assert accepts(matcher, "efghijkl")
    assert matcher.cut_short  # type: ignore[attr-defined]
    other = compiled.matcher(50)  # type: ignore[call-arg]
    assert accepts(other, "a" * 32)
    assert other.jump_forward_tokens(1)
    assert not other.cut_short  # type: ignore[attr-defined]


def test_wrong_reasoning_is_refused(library: Library) -> None:
    for reasoning in ({}, {"begin": "<", "end": "", "open": True, "max_tokens": None}):
        with pytest.raises(InvalidGrammar, match="reasoning"):
            library.compiled(Kind.COMPOSED, json.dumps({"format": ANSWER, "reasoning": reasoning}))
