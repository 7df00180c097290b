"""Composed grammars on any backend: the engine writes one from a request's tools, its reasoning and its grammar.

The text of a composed grammar is a structural tag with more members:

    format         the language of the answer, as in a structural tag
    open_tokens    ids of special tokens that the format spells as text; in this grammar they are text
    reasoning      the phase before the answer, as `ReasoningSpec.parse` reads it

Invariant: `open_tokens` come from the engine, which takes them from the model's own tool format; a request cannot name
any. A backend for each set of opened tokens is made once.
Not responsible for: the formats (see the backends and grammar/structural_tag.py), the phase (see reasoning.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from grammar_service.backends.backend import Backend, Compiled
from grammar_service.backends.json_schema.validator import Validator
from grammar_service.backends.reasoning import MarkerRows, ReasoningCompiled, ReasoningSpec, ways_out
from grammar_service.backends.value_tokens import ValueTokens
from grammar_service.backends.verified import Verification, VerifiedCompiled
from grammar_service.errors import InvalidGrammar, NotSupported
from grammar_service.grammar.structural_tag import formats
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.value import Grammar, Kind
from grammar_service.grammar.vocabulary import Vocabulary

MAX_MARKERS = 16
"""Phases whose rows are cached."""


class ComposingBackend:
    """A backend that also compiles composed grammars. Every other grammar is the inner backend's own."""

    def __init__(self, make: Callable[[Vocabulary], Backend], vocabulary: Vocabulary) -> None:
        self._make = make
        self._vocabulary = vocabulary
        self._inner = make(vocabulary)
        self._lock = threading.Lock()
        self._opened: dict[tuple[int, ...], tuple[Backend, Vocabulary]] = {}
        self._rows: dict[tuple[str, ReasoningSpec], MarkerRows] = {}
        self._value_tokens: dict[str, ValueTokens] = {}
        """By digest; only for this vocabulary and the vocabularies of `_opened`."""
        self._validator: tuple[str, Validator] | None = None
        """The last validator, and its schema: a process that compiles a grammar loads it next."""

    @property
    def name(self) -> str:
        """The inner backend's name."""
        return self._inner.name

    def compile(self, grammar: Grammar, *, allow_unenforced: bool = False) -> bytes:
        """Compile; see `Backend.compile`. An error in a part of a composed grammar names the part's field."""
        if (schema := verified_schema(grammar)) is not None:
            self._validator = schema, Validator(schema)
            allow_unenforced = True
        if grammar.kind is not Kind.COMPOSED:
            return self._inner.compile(grammar, allow_unenforced=allow_unenforced)
        document = _document(grammar)
        backend, vocabulary = self._backend(document)
        if "reasoning" in document:
            ways_out(TokenBytes.of(vocabulary), ReasoningSpec.parse(document["reasoning"]).end)
        try:
            return backend.compile(_tag(grammar, document), allow_unenforced=allow_unenforced)
        except (InvalidGrammar, NotSupported) as error:
            raise self._with_field(error, document, grammar, allow_unenforced) from None

    def load(self, grammar: Grammar, artifact: bytes) -> Compiled:
        """Return the compiled form; see `Backend.load`."""
        if grammar.kind is not Kind.COMPOSED:
            return self._verified(self._inner.load(grammar, artifact), grammar, self._vocabulary)
        document = _document(grammar)
        backend, vocabulary = self._backend(document)
        answer = self._verified(backend.load(_tag(grammar, document), artifact), grammar, vocabulary)
        if "reasoning" not in document:
            return answer
        return ReasoningCompiled(answer, self._marker_rows(vocabulary, ReasoningSpec.parse(document["reasoning"])))

    def _backend(self, document: dict[str, Any]) -> tuple[Backend, Vocabulary]:
        opened = tuple(sorted(document.get("open_tokens", ())))
        if not opened and not self._vocabulary.markers:
            return self._inner, self._vocabulary
        with self._lock:
            if opened not in self._opened:
                vocabulary = self._vocabulary.opened(opened)
                self._opened[opened] = self._make(vocabulary), vocabulary
            return self._opened[opened]

    def _marker_rows(self, vocabulary: Vocabulary, spec: ReasoningSpec) -> MarkerRows:
        """Return the rows of a phase; grammars with the same markers share them."""
        key = vocabulary.digest, spec
        with self._lock:
            rows = self._rows.get(key)
            if rows is None:
                if len(self._rows) >= MAX_MARKERS:
                    self._rows.clear()
                rows = self._rows[key] = MarkerRows(vocabulary, spec)
            return rows

    def _verified(self, compiled: Compiled, grammar: Grammar, vocabulary: Vocabulary) -> Compiled:
        schema = verified_schema(grammar)
        if schema is None:
            return compiled
        made = self._validator
        validator = made[1] if made is not None and made[0] == schema else Validator(schema)
        return VerifiedCompiled(compiled, Verification(validator, self._tokens_of(vocabulary)))

    def _tokens_of(self, vocabulary: Vocabulary) -> ValueTokens:
        """Return the rows of a vocabulary, which all its verified grammars share."""
        with self._lock:
            tokens = self._value_tokens.get(vocabulary.digest)
            if tokens is None:
                tokens = self._value_tokens[vocabulary.digest] = ValueTokens.of(vocabulary)
            return tokens

    def _with_field(
        self, error: InvalidGrammar | NotSupported, document: dict[str, Any], grammar: Grammar, allow_unenforced: bool
    ) -> InvalidGrammar | NotSupported:
        """Return the error with the name of the field whose schema is at fault, if one is."""
        for _, node in formats(document["format"], "/format"):
            field = node.get("at")
            if not isinstance(field, str) or "json_schema" not in node or node.get("style", "json") != "json":
                continue
            text = json.dumps(node["json_schema"], ensure_ascii=False)
            alone = replace(grammar, kind=Kind.JSON_SCHEMA, text=text)
            try:
                self._inner.compile(alone, allow_unenforced=allow_unenforced)
            except (InvalidGrammar, NotSupported) as found:
                return type(found)(f"{field}: {found}")
        return error

    def __repr__(self) -> str:
        return f"<ComposingBackend {self.name} opened={len(self._opened)}>"


def _document(grammar: Grammar) -> dict[str, Any]:
    """Return a composed grammar as JSON. Raises InvalidGrammar unless its members have their types."""
    document: dict[str, Any] = json.loads(grammar.text)
    if not isinstance(document.get("format"), dict):
        raise InvalidGrammar("composed grammar: /format: must be an object")
    opened = document.get("open_tokens", [])
    if not isinstance(opened, list) or not all(type(token) is int for token in opened):
        raise InvalidGrammar("composed grammar: /open_tokens: must be an array of token ids")
    return document


def verified_schema(grammar: Grammar) -> str | None:
    """Return the schema against which answers are verified; None: the request does not ask for that, or cannot.

    An answer can be verified that is one JSON value: to a schema, with or without reasoning before it.
    """
    if not grammar.reading.verify:
        return None
    if grammar.kind is Kind.JSON_SCHEMA:
        return grammar.text
    if grammar.kind is Kind.COMPOSED:
        form = json.loads(grammar.text).get("format")
        if isinstance(form, dict) and form.get("type") == "json_schema" and form.get("style", "json") == "json":
            return json.dumps(form.get("json_schema"), ensure_ascii=False)
    return None


def _tag(grammar: Grammar, document: dict[str, Any]) -> Grammar:
    """Return the format of a composed grammar as a structural tag."""
    text = json.dumps({"type": "structural_tag", "format": document["format"]}, ensure_ascii=False)
    return replace(grammar, kind=Kind.STRUCTURAL_TAG, text=text)
