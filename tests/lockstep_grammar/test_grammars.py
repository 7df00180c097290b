"""The grammar client with a real grammar process and a vocabulary of bytes."""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from grammar_service.backends.backend import Rows
from grammar_service.backends.registry import load_backend
from grammar_service.grammar.value import Grammar, Whitespace
from grammar_service.grammar.value import Kind as GrammarKind
from grammar_service.grammar.vocabulary import Vocabulary
from lockstep_grammar import Compiled, Grammars, InvalidGrammar, Kind, LimitExceeded, Matcher, MatcherFailed
from lockstep_grammar.process import DIRECTORY_PREFIX
from tests.fakes import EOS, byte_tokenizer

VOCAB = 258
TOKENIZER = byte_tokenizer().to_str().encode()
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]})
ANSWER = b'{"a": "yz"}'
Stop = Callable[..., AbstractContextManager[None]]


def legal(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def kill(grammars: Grammars) -> None:
    assert grammars.process.pid is not None
    before = grammars.process.attached
    os.kill(grammars.process.pid, signal.SIGKILL)
    while grammars.process.attached == before and grammars.process.up:
        pass


def wrote(matcher: Matcher, text: bytes) -> None:
    for token in text:
        assert matcher.accept(token)
        matcher.post()


def test_rows_equal_those_of_the_library(grammars: Grammars) -> None:
    backend = load_backend("llguidance", Vocabulary.load(TOKENIZER, VOCAB, (EOS,)))
    grammar = Grammar(GrammarKind.JSON_SCHEMA, SCHEMA, Whitespace.SPACED)
    direct = backend.load(grammar, backend.compile(grammar)).matcher()
    matcher = grammars.compile(SCHEMA).open()
    expected = Rows(np.zeros((1, grammars.num_words), dtype=np.int32))
    for token in [*ANSWER, EOS]:
        direct.fill(expected, 0)
        assert legal(matcher.row()) & set(range(VOCAB)) == legal(expected.words[0]) & set(range(VOCAB))
        assert direct.accept(token)
        assert matcher.accept(token)
        matcher.post()
    assert matcher.terminated


def test_an_illegal_token_moves_nothing(grammars: Grammars) -> None:
    matcher = grammars.compile(SCHEMA).open()
    assert not matcher.accept(ord("x"))
    assert not matcher.accept(-1)
    assert not matcher.accept(VOCAB)
    wrote(matcher, ANSWER)


def test_rows_of_drafts_end_at_the_first_illegal_one_and_are_kept(grammars: Grammars) -> None:
    matcher = grammars.compile(SCHEMA).open()
    assert len(matcher.rows(b"{x")) == 2
    assert len(matcher.rows(ANSWER)) == len(ANSWER) + 1  # more drafts than a record has
    posts = grammars.end.stats()["posts"]
    wrote(matcher, ANSWER)
    assert legal(matcher.row()) == {EOS}
    assert grammars.end.stats()["posts"] == posts


def test_rollback_to_any_position(grammars: Grammars) -> None:
    matcher = grammars.compile(SCHEMA).open()
    wrote(matcher, b'{"a": "x"}')
    matcher.rollback(3)
    assert legal(matcher.row()) >= {ord("x"), ord("y")}
    wrote(matcher, b"yz")
    matcher.rollback(len(matcher.tokens))
    wrote(matcher, ANSWER)
    assert legal(matcher.row()) == {EOS}
    with pytest.raises(ValueError, match="num_tokens: 12"):
        matcher.rollback(12)


def test_a_kill_at_every_token_changes_no_row(grammars: Grammars) -> None:
    matcher = grammars.compile(SCHEMA).open()
    rows = []
    for token in ANSWER[:9]:
        rows.append(legal(matcher.row()))
        assert matcher.accept(token)
    again = grammars.compile(SCHEMA).open()
    for at, token in enumerate(ANSWER[:9]):
        if at % 4 == 1:
            kill(grammars)
        assert legal(again.row()) == rows[at]
        assert again.accept(token)
        again.post()


def test_more_matchers_than_places(grammars: Grammars) -> None:
    matchers = [grammars.compile(SCHEMA).open() for _ in range(9)]
    for token in ANSWER:
        for matcher in matchers:
            assert matcher.accept(token)
            matcher.post()
    assert all(legal(matcher.row()) == {EOS} for matcher in matchers)
    matchers[0].close()


def test_the_answer_is_closed_at_its_limit(grammars: Grammars) -> None:
    schema = json.dumps({"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]})
    matcher = grammars.compile(schema).open(max_tokens=24)
    wrote(matcher, b'{"s": "')
    while not matcher.terminated:
        row = legal(matcher.row())
        assert matcher.accept(ord("a") if ord("a") in row else min(row))
    assert len(matcher.tokens) <= 24
    assert len(json.loads(bytes(matcher.tokens[:-1]))["s"]) >= 8


def test_a_keyword_that_is_not_enforced_is_named(grammars: Grammars) -> None:
    schema = json.dumps({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    with pytest.raises(InvalidGrammar, match="uniqueItems"):
        grammars.compile(schema)
    allowed = grammars.compile(schema, allow_unenforced=True)
    assert any("uniqueItems" in warning for warning in allowed.warnings)


def test_a_verified_answer_loses_the_tokens_that_break_the_keyword(grammars: Grammars) -> None:
    schema = json.dumps({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    verified: Compiled = grammars.compile(schema, verify=True)
    assert verified.verified
    matcher = verified.open()
    wrote(matcher, b"[1, 1")
    assert ord("]") not in legal(matcher.row())
    wrote(matcher, b"2]")


def test_hostile_grammars_end_by_name_and_others_go_on(grammars: Grammars) -> None:
    matcher = grammars.compile(SCHEMA).open()
    with pytest.raises(LimitExceeded, match="max_grammar_bytes"):
        grammars.compile(json.dumps({"enum": ["x" * 5000]}))
    with pytest.raises(InvalidGrammar):
        grammars.compile("{")
    with pytest.raises((InvalidGrammar, LimitExceeded)):
        grammars.compile("(" * 300 + "a" + ")" * 300, Kind.REGEX)
    wrote(matcher, ANSWER)


def test_a_row_that_takes_too_long_ends_its_answer(grammars: Grammars, stop: Stop) -> None:
    matcher, other = grammars.compile(SCHEMA).open(), grammars.compile(SCHEMA).open()
    assert other.row() is not None
    assert matcher.row() is not None
    assert matcher.accept(ord("{"))
    with stop(grammars), pytest.raises(MatcherFailed, match="row_timeout_s"):
        matcher.row()
    with pytest.raises(MatcherFailed):
        matcher.row()
    wrote(other, ANSWER)


def test_a_row_that_takes_long_does_not_keep_the_lock(grammars: Grammars, stop: Stop) -> None:
    matcher = grammars.compile(SCHEMA).open()
    assert matcher.row() is not None
    assert matcher.accept(ord("{"))
    posts, waits = grammars.end.stats()["posts"], []
    with ThreadPoolExecutor(1) as pool:
        with stop(grammars, row_timeout_s=60.0):
            late = pool.submit(matcher.row)
            while grammars.end.stats()["posts"] == posts and not late.done():
                time.sleep(0.001)
            for _ in range(21):
                started = time.monotonic()
                with grammars.lock:
                    waits.append(time.monotonic() - started)
                time.sleep(0.001)
            assert not late.done()
        assert legal(late.result()) == {ord('"')}
    assert statistics.median(waits) < 0.05  # a single wait may be long: either thread may stop for a while


def test_a_process_that_ends_three_times_over_a_row_ends_its_answer() -> None:
    with Grammars(TOKENIZER, VOCAB, [EOS], max_matchers=2) as made:
        matcher = made.compile(SCHEMA).open()
        made.row_timeout_s = 60.0
        assert matcher.row() is not None
        assert matcher.accept(ord("{"))
        made.end.post = lambda *arguments, **options: _ended(made)  # type: ignore[method-assign]
        with pytest.raises(MatcherFailed, match="ended 3 times"):
            matcher.row()


def test_what_a_killed_host_left_is_removed() -> None:
    left = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
    (left / "cache").mkdir()
    os.utime(left, (0, 0))
    with Grammars(TOKENIZER, VOCAB, [EOS], max_matchers=1) as made:
        assert not left.exists()
        assert made.process.directory.exists()
    assert not made.process.directory.exists()


def _ended(grammars: Grammars) -> int:
    """Post nothing: the process ends in its place."""
    kill(grammars)
    return 0
