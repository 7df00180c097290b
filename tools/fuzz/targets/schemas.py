"""JSON Schemas as both libraries get them, and the patterns in them.

Invariant of the rewriting: what it takes away is in its report. Where it reports nothing, a value that the rewritten
schema admits is one that the schema admits; `jsonschema_rs` says what a schema admits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from grammar_service.backends.json_schema.strings.ecma_pattern import Dialect, NotPortable, portable, portable_regex
from grammar_service.backends.json_schema.validator import Validator
from grammar_service.backends.llguidance.notation import STRING_DIALECT as LLGUIDANCE
from grammar_service.backends.llguidance.notation import check_types, misspelled, notation
from grammar_service.backends.xgrammar.schema import REGEX_DIALECT as XGRAMMAR_REGEX
from grammar_service.backends.xgrammar.schema import STRING_DIALECT as XGRAMMAR
from grammar_service.backends.xgrammar.schema import problems
from grammar_service.completion.growth import growth_of
from grammar_service.errors import GrammarServiceError, InternalError, InvalidGrammar
from grammar_service.grammar.limits import check_nesting, check_rule_depth
from grammar_service.grammar.value import Grammar, Kind, Whitespace, parse
from tools.fuzz.mutations import mutate_json, mutate_text
from tools.fuzz.target import Target, require
from tools.fuzz.words import JSON_SCHEMA, PATTERNS

MAX_DEPTH, MAX_CHAIN = 32, 64
DIALECTS = (LLGUIDANCE, XGRAMMAR, XGRAMMAR_REGEX, Dialect())
_START = "start: %json "
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2.5, 1e20, "", "a", "ab", "A", "2024-01-31", "x y", "\u00e9"),
    *([], [1], [1, 1], ["a", {}], {}, {"a": 1}, {"b": "a"}, {"a": None, "b": []}, {"a": {"a": "a"}}),
)
"""What schemas are tried on, next to the values that they list."""


def schema_rewriting() -> Target:
    """Return the target: a JSON Schema, rewritten for each library."""

    def run(data: bytes) -> None:
        try:
            grammar = parse(Kind.JSON_SCHEMA, data.decode("utf-8", "replace"), Whitespace.BOUNDED, MAX_DEPTH)
            check_nesting(grammar.kind, grammar.text, MAX_DEPTH)
            check_rule_depth(grammar.kind, grammar.text, MAX_CHAIN)
        except InternalError:
            raise
        except GrammarServiceError:
            return
        growth_of(grammar.text, len)
        for rewritten in (_for_llguidance, _for_xgrammar):
            _check_meaning(grammar, rewritten)

    return Target(run, lambda data, random: mutate_json(data, random, JSON_SCHEMA), JSON_SCHEMA)


def _for_llguidance(grammar: Grammar) -> tuple[str, bool]:
    """Return the schema as the library reads it, and whether all of it is there."""
    text, found = notation(grammar, lenient=False)
    misspelled(grammar)
    check_types(grammar)
    require(text.startswith(_START), "a schema in Lark begins otherwise")
    return text[len(_START) :], not found


def _for_xgrammar(grammar: Grammar) -> tuple[str, bool]:
    schema = json.loads(grammar.text)
    found = problems(schema)
    return json.dumps(schema), not found


def _check_meaning(grammar: Grammar, rewrite: Callable[[Grammar], tuple[str, bool]]) -> None:
    try:
        text, complete = rewrite(grammar)
    except InternalError:
        raise
    except GrammarServiceError:
        return
    except RecursionError:  # a compile worker answers it with LimitExceeded
        return
    require(isinstance(json.loads(text), dict), "a rewritten schema is no object")
    if not complete:
        return
    try:
        before, after = Validator(grammar.text), Validator(text)
    except InvalidGrammar:
        return
    for value in (*_VALUES, *_listed(json.loads(grammar.text))):
        instance = json.dumps(value).encode()
        if after.is_valid(instance):
            require(before.is_valid(instance), f"{rewrite.__name__}: {instance!r} is admitted only after the rewriting")


def _listed(node: Any) -> Iterator[Any]:
    """Yield values that a schema names."""
    nodes = [node]
    for each in nodes:
        if isinstance(each, dict):
            yield from (each[name] for name in ("const", "default") if name in each)
            yield from each["enum"] if isinstance(each.get("enum"), list) else ()
            nodes.extend(each.values())
        elif isinstance(each, list):
            nodes.extend(each)


def pattern() -> Target:
    """Return the target: a regular expression of ECMA-262, in the notation of each library."""

    def run(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        for dialect in DIALECTS:
            try:
                once = portable(text, dialect)
            except NotPortable:
                continue
            require("\n" not in once, "a portable pattern has more than one line")
        try:
            portable_regex(text, Dialect())
        except InvalidGrammar:
            return

    return Target(run, lambda data, random: mutate_text(data, random, PATTERNS), PATTERNS, max_bytes=1024)
