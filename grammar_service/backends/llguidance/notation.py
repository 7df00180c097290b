"""A grammar in llguidance's own notation, and the library's messages about it with places added.

In the strict notation the library fails at the first keyword that it does not enforce. In the lenient notation it
ignores such keywords and names them all; it serves requests that allow unenforced parts, and error messages.
Invariant: only this module writes options of the library. A request can set none.
Not responsible for: limits and matchers (see backend.py). The library is imported only for its two converters.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from grammar_service.backends.json_schema.alternatives import expand
from grammar_service.backends.json_schema.bounds import refuse_minima, write_bounds
from grammar_service.backends.json_schema.doubles import round_bounds
from grammar_service.backends.json_schema.draft_3 import write_draft_3
from grammar_service.backends.json_schema.misspelled import misspelled_keywords, refuse_unknown_types
from grammar_service.backends.json_schema.plain import is_plain
from grammar_service.backends.json_schema.references import take_out_dialects, write_pointers
from grammar_service.backends.json_schema.rewrite import rewrite, take_out_unwritable_values
from grammar_service.backends.json_schema.shapes import check_shapes, refuse_no_schema
from grammar_service.backends.json_schema.strings.ecma_pattern import Dialect, portable, portable_regex
from grammar_service.backends.json_schema.strings.string_formats import KNOWN, exact_pattern, take_out_annotations
from grammar_service.backends.json_schema.strings.text import expressions
from grammar_service.backends.json_schema.unenforced import Unenforced
from grammar_service.backends.json_schema.walk import subschemas
from grammar_service.backends.llguidance.loosening import Loosening
from grammar_service.backends.llguidance.tags import Parts, lark_of_tag
from grammar_service.errors import InvalidGrammar, NotSupported
from grammar_service.grammar.structural_tag import modern, schemas
from grammar_service.grammar.text_grammar import (
    check_gbnf,
    embedded_schemas,
    ignored_attributes,
    lark_literal,
    refuse_token_references,
    with_schemas,
)
from grammar_service.grammar.value import Grammar, Kind, Reading

_SPACE = r"[\x20\x0A\x0D\x09]"

_ESCAPES = 'nrbtf\\"'
r"""The escapes in JSON strings. With `u`, `{"\u0061": 1}` would be an additional property although `a` is declared."""

STRING_DIALECT = Dialect(unwritable=((0, 7), (11, 11), (14, 31), (127, 127)))
r"""Patterns of JSON strings. A string can hold these control characters only as \uXXXX, which _ESCAPES excludes."""

_MAX_KNOWN = 256
"""Characters of a pattern whose portable notation is kept for the next schema."""

_PLACE = re.compile(r"^at \d+\(\d+\): |failed to compile JSON schema: ")
_TIMES = re.compile(r" \(\d+ times\)$")
_KEYS = re.compile(r"Unimplemented keys: (\[.*?\])$")
_FORMAT = re.compile(r"Unknown format: (.*)$")

_TIGHT = Loosening()


class Rounds:
    """The schemas of one grammar as they are before they are loosened, which is the same in every round."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, bool], tuple[Any, list[Unenforced]]] = {}
        """By number of the schema, and whether it has the alternatives of `expand`."""

    def rewritten(
        self, number: int, schema: Any, path: str, reading: Reading, loosening: Loosening
    ) -> tuple[Any, list[Unenforced]]:
        """Return the schema at `path`, the one of this number in the grammar, rewritten, and what was taken out."""
        key = number, not loosening.size
        if (kept := self._kept.get(key)) is not None:
            return copy.deepcopy(kept)
        found = _rewrite(schema, path, reading, with_alternatives=not loosening.size)
        if loosening != _TIGHT:  # a round that may have others after it
            self._kept[key] = copy.deepcopy((schema, found))
        return schema, found


def _rewrite(schema: Any, path: str, reading: Reading, *, with_alternatives: bool) -> list[Unenforced]:
    """Rewrite the schema at `path` in place, up to what is loosened. Return what was taken out."""
    refuse_no_schema(schema, path)
    if "x-guidance" in schema:
        raise InvalidGrammar(f"JSON Schema: {path}/x-guidance: a request may not set options of the library")
    write_draft_3(schema, path)
    write_pointers(schema)
    found = take_out_dialects(schema, path)
    check_shapes(schema, path)
    found += take_out_annotations(schema, path, strict=reading.strict_formats)
    refuse_minima(schema, path, reading)
    if with_alternatives:
        expand(schema)
    found += take_out_unwritable_values(schema, path, STRING_DIALECT.unwritable)
    found += rewrite(schema, path, _portable)
    found += round_bounds(schema, path)
    _write_exact_formats(schema)
    return found


def notation(
    grammar: Grammar,
    *,
    lenient: bool,
    with_names: bool = True,
    loosening: Loosening = _TIGHT,
    rounds: Rounds | None = None,
) -> tuple[str, list[Unenforced]]:
    """Return the grammar as text for the library, and the parts that were taken out because it would misread them.

    `with_names`: as in `write_bounds`. `loosening`: what else is taken out of its schemas. `rounds`: the rounds of this
    grammar so far."""
    rounds = rounds or Rounds()
    numbers = itertools.count()
    found: list[Unenforced] = []

    def schema_text(schema: Any, path: str) -> str:
        schema = {} if schema is True else schema
        number = next(numbers)
        if loosening != _TIGHT or not is_plain(schema):
            schema, gone = rounds.rewritten(number, schema, path, grammar.reading, loosening)
            found.extend(gone)
            found.extend(loosening.apply(schema, path))
            _write_tuples(schema)
        found.extend(write_bounds(schema, grammar.reading, with_names=with_names))
        _refuse_long_patterns(schema, path, grammar.reading.max_string_length)
        options = {**_whitespace(grammar), "json_allowed_escapes": _ESCAPES, "lenient": lenient}
        return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)

    def text_expressions(schema: Any, path: str) -> list[str]:
        reading = grammar.reading
        wanted, ignored = expressions(schema, path, longest=reading.max_string_length, strict=reading.strict_formats)
        found.extend(ignored)
        return [_lark_of_text(expression, f"{path}/{keyword}") for keyword, expression in wanted]

    match grammar.kind:
        case Kind.JSON_SCHEMA | Kind.JSON_OBJECT:
            return "start: %json " + schema_text(json.loads(grammar.text), ""), found
        case Kind.CHOICE:
            # One terminal: alternatives of a rule would be parser items, whose number is limited.
            choices = " | ".join(map(lark_literal, json.loads(grammar.text)))
            return f"start: CHOICE\nCHOICE: {choices}", found
        case Kind.REGEX:
            return _lark_of_regex(grammar.text), found
        case Kind.EBNF:
            return _lark_of_gbnf(grammar.text), found
        case Kind.LARK:
            refuse_token_references(grammar.text)
            found.extend(Unenforced("", *part) for part in ignored_attributes(grammar.text))
            return with_schemas(grammar.text, schema_text), found
        case Kind.STRUCTURAL_TAG:
            return lark_of_tag(
                modern(json.loads(grammar.text)), Parts(schema_text, _lark_of_regex, _lark_of_gbnf, text_expressions)
            ), found
        case Kind.COMPOSED:
            raise NotSupported("a composed grammar is taken apart before a library reads it")


def unforced(text: str) -> str:
    """Return a grammar in the library's notation whose masks allow all spellings of a text that is the only one to
    follow, not only the library's own tokens."""
    return text + '\n%llguidance {"no_forcing": true}\n'  # the last one of several counts


def _portable(pattern: str) -> str:
    """Return a pattern of strings in portable notation. Raises NotPortable."""
    return _short_portable(pattern) if len(pattern) <= _MAX_KNOWN else portable(pattern, STRING_DIALECT)


@functools.lru_cache(512)
def _short_portable(pattern: str) -> str:
    return portable(pattern, STRING_DIALECT)


@functools.cache
def _exact(name: str) -> str:
    """Return the pattern of a format that is known, in portable notation."""
    return portable(exact_pattern(name, lower_case=True), STRING_DIALECT)


def _whitespace(grammar: Grammar) -> dict[str, Any]:
    """Return the library's options for the white space of a grammar."""
    if grammar.separators is not None:
        item, key = grammar.separators
        return {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    if grammar.most_whitespace is None:
        return {"whitespace_flexible": True}
    return {"whitespace_flexible": True, "whitespace_pattern": f"{_SPACE}{{1,{grammar.most_whitespace}}}"}


def _refuse_long_patterns(schema: Any, path: str, longest: int) -> None:
    """Raise InvalidGrammar for a pattern that no string of at most `longest` characters (0: any length) matches."""
    for where, node in subschemas(schema, path) if longest else ():
        pattern = node.get("pattern")
        if isinstance(pattern, str) and _is_longer(pattern, longest):
            raise InvalidGrammar(f"max_string_length: {where}: no string of at most {longest} characters matches")


@functools.lru_cache(1024)
def _is_longer(pattern: str, longest: int) -> bool:
    alone = json.dumps({"type": "string", "pattern": pattern, "maxLength": longest})
    return "Unsatisfiable" in LLMatcher.validate_grammar(f"start: %json {alone}")


def misspelled(grammar: Grammar) -> tuple[str, ...]:
    """Return a warning for each keyword in the grammar's schemas that is probably misspelled."""
    written = ((path, schema) for path, schema in _schemas(grammar) if not is_plain(schema))
    return tuple(line for path, schema in written for line in misspelled_keywords(schema, path))


def check_types(grammar: Grammar) -> None:
    """Raise InvalidGrammar, with the place, for a type in the grammar's schemas that JSON Schema does not have."""
    for path, schema in _schemas(grammar):
        refuse_unknown_types(schema, path)


def _write_exact_formats(schema: Any) -> None:
    """Replace formats by exact patterns. The library reads some too leniently and ignores others."""
    for _, node in list(subschemas(schema)):
        name = node.get("format")
        if not isinstance(name, str) or name not in KNOWN:
            continue
        exact = _exact(name)
        if "pattern" not in node:
            node["pattern"] = exact
        elif isinstance(node.setdefault("allOf", []), list):
            node["allOf"] = [*node["allOf"], {"pattern": exact}]
        else:
            continue
        del node["format"]


def _write_tuples(schema: Any) -> None:
    """Write the first items of arrays as the library reads them.

    Below an older dialect it passes over `prefixItems`, which is what rewriting writes; and it reads `additionalItems`
    only if no keyword such as `anyOf` is between it and `items`.
    """
    dialect = schema.get("$schema")
    is_old = isinstance(dialect, str) and "2020-12" not in dialect
    for _, node in list(subschemas(schema)):
        first, items = node.get("prefixItems"), node.get("items", True)
        if is_old and isinstance(first, list) and not isinstance(items, list):
            first, rest = node.pop("prefixItems"), items
        elif isinstance(items, list) and "additionalItems" in node:
            first, rest = items, node["additionalItems"]
        else:
            continue
        node.pop("items", None)
        node.pop("additionalItems", None)
        node |= {"items": first, "additionalItems": rest}


def _lark_of_regex(regex: str) -> str:
    """Return the same language in Lark. Raises InvalidGrammar with the place."""
    grammars = json.loads(LLMatcher.grammar_from_regex(portable_regex(regex, Dialect())))["grammars"]
    return str(grammars[0]["lark_grammar"])


def _lark_of_text(expression: str, place: str) -> str:
    """Return an expression of a whole text as a literal of Lark. Raises InvalidGrammar with the place."""
    try:
        lark = _lark_of_regex(expression)
    except InvalidGrammar as error:
        raise InvalidGrammar(f"JSON Schema: {place}: {error}") from None
    return lark.removeprefix("start: ").strip()


def _lark_of_gbnf(gbnf: str) -> str:
    """Return the same language in Lark. Raises InvalidGrammar with the place."""
    check_gbnf(gbnf)
    try:
        return str(gbnf_to_lark(gbnf))
    except RecursionError:
        raise InvalidGrammar("EBNF: nested too deeply") from None
    except Exception as error:  # the library's converter raises bare Exception
        raise InvalidGrammar(f"EBNF: {error}") from None


def has_schemas(grammar: Grammar) -> bool:
    """Return whether JSON Schemas are part of the grammar."""
    return next(_schemas(grammar), None) is not None


def readable(message: str, kind: Kind) -> str:
    """Return the library's message without places in text that the user did not write."""
    if kind is Kind.LARK:
        return message.strip()
    return _PLACE.sub("", message.splitlines()[0] if kind is not Kind.REGEX else message.split("\n   1 |")[0]).strip()


def parts(messages: Sequence[str], grammar: Grammar) -> list[Unenforced]:
    """Return the parts that the library's messages name. They have no places, so every possible place is returned."""
    return [part for message in messages for part in _part(_TIMES.sub("", message), grammar)]


def _part(message: str, grammar: Grammar) -> list[Unenforced]:
    keys, unknown = _KEYS.search(message), _FORMAT.search(message)
    if keys:
        wanted, value, why = tuple(json.loads(keys[1])), None, "is not enforced"
    elif unknown:
        wanted, value, why = ("format",), unknown[1], f"{unknown[1]!r} is not enforced"
    elif message.startswith("oneOf"):
        wanted, value, why = ("oneOf",), None, "is taken as anyOf where its branches overlap or may overlap"
    elif message.startswith("min/maxProperties "):
        wanted, value = ("minProperties", "maxProperties"), None
        why = "is not enforced where a name of properties is not required"
    else:
        return [Unenforced("", "", message)]
    found = [
        Unenforced(path, key, why)
        for root, schema in _schemas(grammar)
        for path, node in subschemas(schema, root)
        for key in wanted
        if key in node and (value is None or node[key] == value)
    ]
    return found or [Unenforced("", "", message)]


def _schemas(grammar: Grammar) -> Iterator[tuple[str, Any]]:
    for path, schema in _written_schemas(grammar):
        write_draft_3(schema, path)
        yield path, schema


def _written_schemas(grammar: Grammar) -> Iterator[tuple[str, Any]]:
    if grammar.kind is Kind.STRUCTURAL_TAG:
        yield from schemas(modern(json.loads(grammar.text)))
    elif grammar.kind is Kind.LARK:
        yield from ((path, schema) for path, schema, _ in embedded_schemas(grammar.text))
    elif grammar.kind in (Kind.JSON_SCHEMA, Kind.JSON_OBJECT):
        yield "", json.loads(grammar.text)
