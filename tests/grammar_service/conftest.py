"""Both backends over a small vocabulary. Grammars are compiled in the test process."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from grammar_service.backends.backend import Backend, Compiled, Matcher, Rows
from grammar_service.backends.registry import NAMES, load_backend
from grammar_service.grammar.value import Kind, Reading, Whitespace, parse
from grammar_service.grammar.vocabulary import Vocabulary
from tests.grammar_service.toy import PADDED, STOPS, spell, tokenizer_json, tokens_in


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary.load(tokenizer_json(), PADDED, STOPS)


class Library:
    """A backend with helper methods for the tests."""

    def __init__(self, backend: Backend, vocabulary: Vocabulary) -> None:
        self.name = backend.name
        self.backend, self.vocabulary = backend, vocabulary
        self.rows = Rows(np.zeros((2, vocabulary.num_words + 3), dtype=np.int32))
        self.num_words = vocabulary.num_words

    def compiled(self, kind: Kind, source: str, whitespace: Whitespace = Whitespace.BOUNDED) -> Compiled:
        grammar = parse(kind, source, whitespace)
        return self.backend.load(grammar, self.backend.compile(grammar))

    def read(
        self, source: Any, whitespace: Whitespace = Whitespace.COMPACT, kind: Kind = Kind.JSON_SCHEMA, **reading: Any
    ) -> Compiled:
        """Return a grammar, a text or a JSON document, that is read with the fields `reading` of Reading."""
        text = source if isinstance(source, str) else json.dumps(source)
        grammar = replace(parse(kind, text, whitespace), reading=Reading(**reading))
        return self.backend.load(grammar, self.backend.compile(grammar))

    def legal(self, matcher: Matcher) -> set[int]:
        """Fill a row that had other bits, and return its tokens, including any beyond the vocabulary."""
        self.rows.words[1] = -1
        matcher.fill(self.rows, 1)
        return tokens_in(self.rows.words[1, : self.num_words])

    def accepts(self, compiled: Compiled, text: str) -> bool:
        """Return whether `text` and then a stop token are accepted."""
        matcher = compiled.matcher()
        return all(matcher.accept(token) for token in spell(text)) and matcher.accept(STOPS[0])


@pytest.fixture(scope="session")
def libraries(vocabulary: Vocabulary) -> Callable[[str], Library]:
    made: dict[str, Library] = {}

    def library(name: str) -> Library:
        if name not in made:
            made[name] = Library(load_backend(name, vocabulary), vocabulary)
        return made[name]

    return library


@pytest.fixture(params=NAMES)
def library(request: pytest.FixtureRequest, libraries: Callable[[str], Library]) -> Library:
    name: str = request.param
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return libraries(name)
