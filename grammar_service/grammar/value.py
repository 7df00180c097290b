"""A grammar before a backend sees it: its kind, its text, its white space, and the checks that hold for every backend.

Invariant: the text of a Grammar is well formed as far as this is known without a library (JSON is JSON, a choice list
is a list of strings), and canonical, so equal grammars have equal keys.
Not responsible for: what a backend enforces (see backends/), the names of special tokens (see vocabulary.py).
"""

from __future__ import annotations

import enum
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from grammar_service.errors import InvalidField, InvalidGrammar, LimitExceeded

MAX_WHITESPACE = 8
"""The most white space characters in a row under Whitespace.BOUNDED."""

MAX_JSON_DEPTH = 128
"""The most levels of a schema, choice list or structural tag that a server may allow."""


class Kind(enum.IntEnum):
    """Kinds of grammar, with the values of the proto enum."""

    JSON_OBJECT = 1
    JSON_SCHEMA = 2
    REGEX = 3
    EBNF = 4
    LARK = 5
    CHOICE = 6
    STRUCTURAL_TAG = 7
    COMPOSED = 8
    """A structural tag that the engine wrote from tools, reasoning and a grammar; see backends/composed.py."""


class Whitespace(enum.IntEnum):
    """White space between JSON tokens, with the values of the proto enum."""

    COMPACT = 1
    BOUNDED = 2
    ANY = 3
    SPACED = 4
    """One space after each comma and colon, none elsewhere."""


TAG_KINDS = frozenset({Kind.STRUCTURAL_TAG, Kind.COMPOSED})
"""Kinds whose text is a structural tag."""

SCHEMA_KINDS = frozenset({Kind.JSON_OBJECT, Kind.JSON_SCHEMA, Kind.LARK, *TAG_KINDS})
"""Kinds that may have JSON Schemas: `Whitespace` and `Reading` have an effect on them."""


MAX_NUMBER_DIGITS = 15
"""The most digits that a bound may leave to a number: the libraries compare numbers as doubles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of JSON values in addition to the schema's; 0: none. They apply only to JSON."""

    max_string_length: int = 0
    """Characters of a string, and of a name that no schema lists."""
    max_array_items: int = 0
    max_number_digits: int = 0
    """Digits before the point, and after it; at most MAX_NUMBER_DIGITS. With it a number has no exponent."""
    max_whitespace: int = 0
    """White space characters in a row."""

    def __post_init__(self) -> None:
        for name, most in BOUNDS.items():
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise InvalidField(name, f"{value} is not in [0, {most}]")


BOUNDS = {
    "max_string_length": 1 << 16,
    "max_array_items": 1 << 16,
    "max_number_digits": MAX_NUMBER_DIGITS,
    "max_whitespace": 1 << 10,
}
"""The fields of `Bounds`, and the largest value of each."""


@dataclass(frozen=True, slots=True)
class Reading(Bounds):
    """How the schemas of a grammar are read, in addition to their text. All values are JSON, so that it travels as
    JSON."""

    strict_formats: bool = False
    """A `format` that is not known is a part that cannot be enforced, in place of an annotation."""
    verify: bool = False
    """The parts that cannot be enforced are checked on the answer, where it is one JSON value."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that passed `parse`."""

    kind: Kind
    text: str
    """JSON kinds and choices: compact JSON. Keys keep the user's order, which is the order of properties."""
    whitespace: Whitespace
    """COMPACT for the kinds without JSON Schemas, so that they share one compilation."""
    reading: Reading = Reading()

    @property
    def separators(self) -> tuple[str, str] | None:
        """The texts between two items and after a name, where there is no other white space; None: it is free."""
        return {Whitespace.COMPACT: (",", ":"), Whitespace.SPACED: (", ", ": ")}.get(self.whitespace)

    @property
    def most_whitespace(self) -> int | None:
        """The most white space characters in a row where it is free; None: any number."""
        own = None if self.whitespace is Whitespace.ANY else MAX_WHITESPACE
        limit = self.reading.max_whitespace
        return own if not limit else limit if own is None else min(own, limit)

    def key(self, backend: str) -> str:
        """Return the id of this grammar under `backend`: a digest, equal for equal grammars."""
        head = f"{backend}\0{self.kind.name}\0{self.whitespace.name}\0{self.reading}\0"
        return hashlib.blake2b((head + self.text).encode(), digest_size=16).hexdigest()

    def __repr__(self) -> str:
        return f"<Grammar {self.kind.name} {len(self.text)} chars {self.whitespace.name}>"


def parse(kind: Kind, source: str, whitespace: Whitespace, max_depth: int = MAX_JSON_DEPTH) -> Grammar:
    """Check a grammar as it came over the wire and return it in canonical form.

    Raises InvalidGrammar for text that is not JSON where it must be (with line and column), a schema that is neither an
    object nor a boolean, and an empty choice list or regex. Raises LimitExceeded for JSON nested deeper than
    `max_depth` levels.
    """
    if kind not in SCHEMA_KINDS:
        whitespace = Whitespace.COMPACT
    if kind is Kind.JSON_OBJECT:
        if source:
            raise InvalidGrammar("source: must be empty for a JSON object; use a JSON Schema for constraints")
        return Grammar(Kind.JSON_SCHEMA, '{"type":"object"}', whitespace)
    # A blank is a valid regular expression.
    if not (source if kind is Kind.REGEX else source.strip()):
        raise InvalidGrammar(f"source: is empty; {_WANTED[kind]} is required")
    if kind is Kind.JSON_SCHEMA:
        return Grammar(kind, _compact(_schema(source, max_depth)), whitespace)
    if kind is Kind.CHOICE:
        return Grammar(kind, _compact(_choices(source, max_depth)), whitespace)
    if kind in TAG_KINDS:
        tag = _load(source, "structural tag", max_depth)
        if not isinstance(tag, dict):
            raise InvalidGrammar(f"structural tag: must be a JSON object, not {_type_name(tag)}")
        return Grammar(kind, _compact(tag), whitespace)
    return Grammar(kind, source, whitespace)


_WANTED = {
    Kind.JSON_SCHEMA: "a JSON Schema",
    Kind.REGEX: "a regular expression",
    Kind.EBNF: "a GBNF grammar with a rule `root`",
    Kind.LARK: "a Lark grammar with a rule `start`",
    Kind.CHOICE: "a JSON array of strings",
    Kind.STRUCTURAL_TAG: "a structural tag as JSON",
    Kind.COMPOSED: "a structural tag as JSON",
}


def _schema(source: str, max_depth: int) -> Any:
    schema = _load(source, "JSON Schema", max_depth)
    if schema is True:
        return {}
    if schema is False:
        raise InvalidGrammar("JSON Schema: `false` admits no answer")
    if not isinstance(schema, dict):
        raise InvalidGrammar(f"JSON Schema: must be an object or a boolean, not {_type_name(schema)}")
    return schema


def _choices(source: str, max_depth: int) -> list[str]:
    choices = _load(source, "choice", max_depth)
    if not isinstance(choices, list):
        raise InvalidGrammar(f"choice: must be a JSON array of strings, not {_type_name(choices)}")
    if not choices:
        raise InvalidGrammar("choice: the list is empty")
    for i, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise InvalidGrammar(f"choice[{i}]: must be a string, not {_type_name(choice)}")
        if not choice:
            raise InvalidGrammar(f"choice[{i}]: is empty")
    return list(dict.fromkeys(choices))


def _load(source: str, what: str, max_depth: int) -> Any:
    too_deep = LimitExceeded(f"max_grammar_depth: the {what} is nested deeper than {max_depth} levels")

    def no_constant(name: str) -> Any:
        raise InvalidGrammar(f"{what}: {name} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidGrammar(f"{what}: the key {twice!r} occurs twice in one object")
        return out

    try:
        value = json.loads(source, parse_constant=no_constant, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise InvalidGrammar(f"{what}: not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except ValueError:
        raise InvalidGrammar(f"{what}: contains a number of too many digits") from None
    except RecursionError:
        raise too_deep from None
    if _deeper_than(value, max_depth):
        raise too_deep
    return value


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return True


def _compact(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise InvalidGrammar("source: contains a lone surrogate (\\ud800-\\udfff), which is not a character") from None
    except ValueError:
        raise InvalidGrammar("source: contains a number beyond the range of a double") from None
    return text


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    return {bool: "a boolean", str: "a string", list: "an array", dict: "an object"}[type(value)]
