"""Grammars as text, of every kind: the checks before a library, and structural tags as Lark.

The first byte of an input is the kind. Invariant: no library compiles here, so that a million inputs take minutes.
"""

from __future__ import annotations

import itertools
import json
from random import Random
from typing import Any

from grammar_service.backends.json_schema.strings.text import expressions
from grammar_service.backends.llguidance.tags import Parts, lark_of_tag
from grammar_service.errors import GrammarServiceError, InternalError, InvalidGrammar
from grammar_service.grammar.limits import check_nesting, check_rule_depth
from grammar_service.grammar.structural_tag import modern, schemas
from grammar_service.grammar.text_grammar import (
    check_gbnf,
    count_alternatives,
    embedded_schemas,
    gbnf_literal,
    ignored_attributes,
    lark_literal,
    refuse_token_references,
    with_fixed_escapes,
    with_schemas,
)
from grammar_service.grammar.value import TAG_KINDS, Grammar, Kind, Whitespace, parse
from tools.enforced.bytes_vocabulary import bytes_vocabulary
from tools.fuzz.mutations import mutate_json, mutate_text
from tools.fuzz.target import Target, require
from tools.fuzz.words import JSON_SCHEMA, NOTATIONS, TAGS

KINDS = tuple(Kind)
MAX_DEPTH, MAX_CHAIN = 128, 512


def kind_and_text(data: bytes) -> tuple[Kind, str]:
    """Return the kind that the first byte chooses, and the text after it as gRPC would hand it on."""
    return KINDS[data[0] % len(KINDS)] if data else Kind.REGEX, data[1:].decode("utf-8", "replace")


def mutate_grammar(data: bytes, random: Random) -> bytes:
    """Return another grammar, most often of the same kind."""
    kind, _ = kind_and_text(data)
    head = data[:1] if data and random.random() < 0.95 else bytes([random.randrange(48, 48 + len(KINDS))])
    if kind in TAG_KINDS:
        return head + mutate_json(data[1:], random, TAGS + JSON_SCHEMA)
    if kind in (Kind.JSON_SCHEMA, Kind.JSON_OBJECT, Kind.CHOICE):
        return head + mutate_json(data[1:], random, JSON_SCHEMA)
    return head + mutate_text(data[1:], random, NOTATIONS)


def grammar_text() -> Target:
    """Return the target: a grammar of any kind, up to the library."""
    vocabulary = bytes_vocabulary()

    def run(data: bytes) -> None:
        kind, text = kind_and_text(data)
        try:
            grammar = parse(kind, text, Whitespace.BOUNDED, MAX_DEPTH)
            check_nesting(grammar.kind, grammar.text, MAX_DEPTH)
            check_rule_depth(grammar.kind, grammar.text, MAX_CHAIN)
            vocabulary.refuse_special(grammar)
            if grammar.kind is Kind.LARK:
                _check_lark(grammar.text)
            elif grammar.kind is Kind.EBNF:
                _check_gbnf(grammar.text)
        except InternalError:
            raise
        except GrammarServiceError:
            return
        _check_canonical(grammar)

    return Target(run, mutate_grammar, (*NOTATIONS, *JSON_SCHEMA, *TAGS))


def _check_canonical(grammar: Grammar) -> None:
    again = parse(grammar.kind, grammar.text, grammar.whitespace, MAX_DEPTH)
    require(again == grammar, "a grammar in canonical form changes when it is parsed again")
    require(again.key("x") == grammar.key("x"), "equal grammars have different keys")
    if grammar.kind is Kind.CHOICE:
        for choice in json.loads(grammar.text):
            require(json.loads(lark_literal(choice)) == choice, "a choice is another one as a Lark literal")
            require("\n" not in gbnf_literal(choice), "a choice ends the line of its GBNF literal")


def _check_lark(text: str) -> None:
    refuse_token_references(text)
    ignored_attributes(text)
    count_alternatives(text)
    found = list(embedded_schemas(text))
    require(
        with_schemas(text, lambda schema, path: json.dumps(schema)).count("%json") >= len(found), "a schema is lost"
    )
    places = [place for _, _, place in found]
    require(all(a[1] <= b[0] for a, b in itertools.pairwise(places)), "two schemas overlap")


def _check_gbnf(text: str) -> None:
    check_gbnf(text)
    count_alternatives(text)
    fixed = with_fixed_escapes(text)
    require(with_fixed_escapes(fixed) == fixed, "escapes change when they are fixed again")


def structural_tag() -> Target:
    """Return the target: a structural tag, in the newer notation and as Lark."""

    def schema_text(schema: Any, path: str) -> str:
        if not isinstance(schema, dict | bool):
            raise InvalidGrammar(f"{path}: is no schema")
        return json.dumps(schema)

    def run(data: bytes) -> None:
        try:
            grammar = parse(Kind.STRUCTURAL_TAG, data.decode("utf-8", "replace"), Whitespace.BOUNDED, MAX_DEPTH)
            check_nesting(grammar.kind, grammar.text, MAX_DEPTH)
            check_rule_depth(grammar.kind, grammar.text, MAX_CHAIN)
            document = modern(json.loads(grammar.text))
            require(modern(json.loads(json.dumps(document))) == document, "a tag in the newer notation changes again")
            list(schemas(document))
            lark = lark_of_tag(
                document,
                Parts(
                    schema_text,
                    regex=lambda text: f"start: /{len(text)}/",
                    gbnf=lambda text: "start: X\nX: /x/",
                    text=lambda schema, path: [f"/{len(schema)}/" for _ in expressions(schema, path)[0]],
                ),
            )
        except InternalError:
            raise
        except GrammarServiceError:
            return
        require("start:" in lark, "a tag that is accepted has no start rule")

    return Target(run, lambda data, random: mutate_json(data, random, TAGS + JSON_SCHEMA), TAGS)
