"""How much longer one token can make the way to the end of an answer, read from a JSON Schema.

Invariant: the result is a function of only the schema's text and the vocabulary. A schema with a keyword that is not
read here has no result.

How it works: a token of an answer chooses. It opens an optional property, an item, a branch of an anyOf, a value of an
enum. The way to the end then grows by the shortest text of what was opened. In one token a choice may hold further
ones inside it (`[{"`), which add up, to _MAX_NESTED levels; a choice after another one does not add, because the text
of the other one is written by then.

    shortest(value)   tokens of the shortest text: a least fixed point over the $refs (Knuth 1977), at most an estimate
    opening(value)    growth by the choices that a token can make where the value begins
    by one token      the largest of: opening(value), a further property and a further item, with what they open
    longest way       what an object or array needs at most, and after that the longest way within one member

Not responsible for: the shortest way itself, which is found with the matcher (see search.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from grammar_service.backends.json_schema.walk import resolve

Json = dict[str, Any]

_MAX_NESTED = 4
"""Levels that one token opens."""
_MAX_CHARS, _MAX_NODES, _MAX_ROUNDS = 1 << 16, 512, 32
"""A schema with a longer text, with more schemas inside it, or with longer chains of $refs has no result: rounds of a
fixed point over the nodes take time."""
_MAX_VALUES, _MAX_SPELLED = 32, 256
"""Of more values of an enum, the shortest and the longest represent all; the rest of a longer text counts as its
beginning."""
_LONG = 1 << 20
"""Tokens of a text that is not known yet, or that never ends; more than any answer has."""
_ANY_GROWTH = 6
"""Growth by one token at the start of an arbitrary JSON value."""
_TEXT_GROWTH, _NUMBER_GROWTH = 2, 2
"""Growth by an escape or half of a character in a text, and by a sign, a point or an exponent in a number."""
_FORMAT_TOKENS = 40
"""Upper estimate for a text with a `format`."""

_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_ANNOTATIONS |= {"$schema", "$id", "$comment", "$defs", "definitions"}
_COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "maxProperties"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_ALONE = {"$ref", "anyOf", "oneOf", "enum", "const"}
"""A schema with one of these has no other keyword here except annotations, and `type` next to values."""
_TYPED = {"properties", "required", "additionalProperties", "items", "prefixItems", "pattern", "format"}
_TYPED |= _COUNTS | _BOUNDS
_KNOWN = _ANNOTATIONS | _ALONE | _TYPED | {"type"}
_TYPES = ("object", "array", "string", "number", "boolean", "null")
_EMPTY = {"object": "{}", "array": "[]", "string": '""'}
_CHOICE_OF_PATTERN = re.compile(r"[|*+?]|\{\d*,")
_COUNT_OF_PATTERN = re.compile(r"\{(\d{1,6})")


class Growth(NamedTuple):
    """Upper estimates for the shortest way to the end of an answer, in tokens."""

    by_one_token: int
    """One token of an answer makes the way longer by at most so many."""
    longest_way: int | None
    """From no state of an answer is the way longer; None: there is no such bound, as with nested values."""


def growth_of(source: str, num_tokens: Callable[[str], int]) -> Growth | None:
    """Return the estimates of a JSON Schema.

    Args:
        source: the text of the grammar.
        num_tokens: returns the fewest tokens that spell a text.

    Returns None where `source` is no JSON Schema, or one with keywords or $refs that are not read here.
    """
    if len(source) > _MAX_CHARS:
        return None
    try:
        reader = _Reader(json.loads(source), num_tokens)
        return Growth(reader.by_one_token(), reader.longest_way())
    except (ValueError, RecursionError):
        return None


class _NotReadError(ValueError):
    """The schema has something that is not estimated here."""


class _Reader:
    """Estimates for every schema that an answer to `root` can reach."""

    def __init__(self, root: Any, num_tokens: Callable[[str], int]) -> None:
        self._root = root
        self._num_tokens = num_tokens
        self._values: dict[int, list[int]] = {}
        self._names: dict[str, int] = {}
        self._empty = {kind: num_tokens(text) for kind, text in _EMPTY.items()}
        self._nodes: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._add(root)
        # The list grows while its nodes are read.
        for node in self._nodes:
            for child in self._children(node):
                self._add(child)
            if len(self._nodes) > _MAX_NODES:
                raise _NotReadError
        self._high, self._low = self._shortest(low=False), self._shortest(low=True)
        self._opening = [0] * len(self._nodes)
        for _ in range(_MAX_NESTED):
            self._opening = [self._opened(node) for node in self._nodes]

    def by_one_token(self) -> int:
        """Return `Growth.by_one_token`. Raises _NotReadError where no text of the schema ends."""
        if self._high[0] >= _LONG:
            raise _NotReadError
        most = max(self._opening)
        for node in self._nodes:
            for kind in _types(node):
                if kind == "array":
                    most = max(most, *(self._further(item) for item in _items(node)))
                elif kind == "object":
                    most = max(most, *(self._name(name) + self._further(value) for name, value in _optional(node)), 0)
        return most

    def longest_way(self) -> int | None:
        """Return `Growth.longest_way`."""
        ways = [0] * len(self._nodes)
        for _ in range(_MAX_ROUNDS):
            found = [min(_LONG, max(self._ways(node, ways))) for node in self._nodes]
            if found == ways:
                return ways[0] if ways[0] < _LONG else None
            ways = found
        return None

    def _ways(self, node: Any, ways: Sequence[int]) -> list[int]:
        """Return the longest way from a state within each alternative of a node, from the results of its children."""
        if isinstance(node, bool):
            return [_LONG if node else 0]
        if "$ref" in node:
            return [ways[self._numbers[id(self._target(node))]]]
        if _values(node):
            return self._value_tokens(node)
        if branches := _branches(node):
            return [ways[self._numbers[id(branch)]] for branch in branches]
        return [self._way_within(kind, node, ways) for kind in _types(node)]

    def _way_within(self, kind: str, node: Json, ways: Sequence[int]) -> int:
        # What a value still needs at most, and the longest way within one of its members.
        whole = self._typed(kind, node, self._high, False)
        if kind == "object":
            members = [*node.get("properties", {}).items(), *_optional(node)]
            return whole + max(
                (2 + self._name(name) + ways[self._numbers[id(value)]] for name, value in members), default=1
            )
        if kind == "array":
            return whole + 2 + max(ways[self._numbers[id(item)]] for item in _items(node))
        return whole + 1 + self._opening_of(kind, node)

    def _further(self, node: Any) -> int:
        """Return the growth by a comma and a value after it, with what a token opens there."""
        number = self._numbers[id(node)]
        return 0 if self._high[number] >= _LONG else 1 + self._high[number] + self._opening[number]

    # -- the nodes ----------------------------------------------------------------------------------------------------

    def _add(self, node: Any) -> None:
        if id(node) not in self._numbers:
            _check(node)
            self._numbers[id(node)] = len(self._nodes)
            self._nodes.append(node)

    def _children(self, node: Any) -> list[Any]:
        found = [] if isinstance(node, bool) else [*_branches(node), *node.get("properties", {}).values()]
        found += [value for kind in _types(node) if kind == "object" for _, value in _optional(node)]
        found += [item for kind in _types(node) if kind == "array" for item in _items(node)]
        if not isinstance(node, bool) and "$ref" in node:
            found.append(self._target(node))
        return found

    def _target(self, node: Json) -> Any:
        place = resolve(self._root, node["$ref"])
        if place is None:
            raise _NotReadError
        return place[1]

    # -- lengths ------------------------------------------------------------------------------------------------------

    def _shortest(self, *, low: bool) -> list[int]:
        """Return the tokens of each node's shortest text, as an upper estimate, or with `low` as a lower one."""
        lengths = [_LONG] * len(self._nodes)
        for _ in range(_MAX_ROUNDS):
            found = [min(_LONG, *self._alternatives(node, lengths, low)) for node in self._nodes]
            if found == lengths:
                return lengths
            lengths = found
        raise _NotReadError

    def _alternatives(self, node: Any, lengths: Sequence[int], low: bool) -> list[int]:
        """Return the tokens of the shortest text of each alternative of a node, from the results of its children."""
        if isinstance(node, bool):
            return [1 if node else _LONG]
        if "$ref" in node:
            return [lengths[self._numbers[id(self._target(node))]]]
        if _values(node):
            return self._value_tokens(node)
        if branches := _branches(node):
            return [lengths[self._numbers[id(branch)]] for branch in branches]
        return [self._typed(kind, node, lengths, low) for kind in _types(node)]

    def _typed(self, kind: str, node: Json, lengths: Sequence[int], low: bool) -> int:
        if kind == "object":
            known = node.get("properties", {})
            values = (
                lengths[self._numbers[id(known[name])]] if name in known else 1 for name in node.get("required", ())
            )
            members = sum(1 + self._name(name) for name in node.get("required", ()))
            return self._empty[kind] + sum(values) + members
        if kind == "array":
            wanted: int = node.get("minItems", 0)
            *first, last = (lengths[self._numbers[id(item)]] for item in _items(node))
            return self._empty[kind] + wanted + sum(first[:wanted]) + max(0, wanted - len(first)) * last
        if kind == "string":
            extra = _FORMAT_TOKENS if "format" in node and not low else 0
            if not low or not _CHOICE_OF_PATTERN.search(node.get("pattern", "")):
                extra += _pattern_tokens(node)
            least: int = node.get("minLength", 0)
            return self._empty[kind] + max(least, extra)
        bounds = [] if low or kind != "number" else [self._count(_text(node[name])) for name in _BOUNDS & node.keys()]
        return 1 + max(bounds, default=0)

    def _value_tokens(self, node: Json) -> list[int]:
        """Return the tokens of the values of an `enum` or `const`, or of the shortest and the longest of them."""
        number = self._numbers[id(node)]
        if number not in self._values:
            texts = sorted({_text(value) for value in _values(node)}, key=len)
            kept = texts if len(texts) <= _MAX_VALUES else [texts[0], texts[-1]]
            self._values[number] = [self._count(text) for text in kept]
        return self._values[number]

    def _count(self, text: str) -> int:
        if len(text) <= _MAX_SPELLED:
            return self._num_tokens(text)
        return -(-self._num_tokens(text[:_MAX_SPELLED]) * len(text) // _MAX_SPELLED)

    def _name(self, name: str) -> int:
        if name not in self._names:
            self._names[name] = self._count(_text(name) + ":")
        return self._names[name]

    # -- growth -------------------------------------------------------------------------------------------------------

    def _opened(self, node: Any) -> int:
        """Return the growth by the choices that one token can make at the start of a node."""
        if node is True:
            return _ANY_GROWTH
        high, low = self._alternatives(node, self._high, False), self._alternatives(node, self._low, True)
        opened = [length + more for length, more in zip(high, self._openings(node), strict=True) if length < _LONG]
        return max(0, max(opened, default=0) - min(low))

    def _openings(self, node: Any) -> list[int]:
        """Return what one token can open in each of the alternatives of a node."""
        if isinstance(node, bool):
            return [0]
        if "$ref" in node:
            return [self._opening[self._numbers[id(self._target(node))]]]
        if _values(node):
            return [0] * len(self._value_tokens(node))
        if branches := _branches(node):
            return [self._opening[self._numbers[id(branch)]] for branch in branches]
        return [self._opening_of(kind, node) for kind in _types(node)]

    def _opening_of(self, kind: str, node: Json) -> int:
        if kind == "object":
            # A token seldom ends a name and opens its value; a value like that counts as a start.
            lengths = (self._name(name) + self._high[self._numbers[id(value)]] for name, value in _optional(node))
            return max((length for length in lengths if length < _LONG), default=0)
        if kind == "array":
            number = self._numbers[id(_items(node)[0])]
            return self._opening[number] if node.get("minItems", 0) else self._further(_items(node)[0])
        return _TEXT_GROWTH if kind == "string" else _NUMBER_GROWTH if kind == "number" else 0


def _check(node: Any) -> None:
    """Raise _NotReadError for a schema with keywords, or values of keywords, that are not estimated here."""
    if isinstance(node, bool):
        return
    if not isinstance(node, dict) or not node.keys() <= _KNOWN or len(node.keys() & _ALONE) > 1:
        raise _NotReadError
    if node.keys() & _ALONE and node.keys() & _TYPED:
        raise _NotReadError
    if "type" in node and node.keys() & {"$ref", "anyOf", "oneOf"}:
        raise _NotReadError
    fits = (
        isinstance(node.get("properties", {}), dict)
        and all(isinstance(node.get(name, []), list) for name in ("required", "prefixItems", "enum", "anyOf", "oneOf"))
        and all(isinstance(name, str) for name in node.get("required", ()))
        and all(type(node.get(name, 0)) is int for name in _COUNTS)
        and isinstance(node.get("$ref", ""), str)
        and isinstance(node.get("pattern", ""), str)
        and not isinstance(node.get("items"), list)
        and all(node.get(name, True) for name in ("enum", "anyOf", "oneOf"))
    )
    if not fits or not all(kind in (*_TYPES, "integer") for kind in _listed(node.get("type", []))):
        raise _NotReadError


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _types(node: Any) -> list[str]:
    """Return the types of a node's values, with "number" for "integer"; none where other keywords say what they are."""
    if isinstance(node, bool) or node.keys() & _ALONE:
        return []
    named = ["number" if kind == "integer" else kind for kind in _listed(node.get("type", []))]
    return list(dict.fromkeys(named)) or list(_TYPES)


def _values(node: Json) -> list[Any]:
    return [node["const"]] if "const" in node else node.get("enum", [])


def _branches(node: Json) -> list[Any]:
    return [*node.get("anyOf", ()), *node.get("oneOf", ())]


def _items(node: Json) -> list[Any]:
    """Return the schemas of the first items, and at last the one of all others."""
    return [*node.get("prefixItems", ()), node.get("items", True)]


def _optional(node: Json) -> list[tuple[str, Any]]:
    """Return (name, schema) of each property that is not required; an additional one has a short name."""
    required = node.get("required", ())
    named = [(name, value) for name, value in node.get("properties", {}).items() if name not in required]
    more = node.get("additionalProperties", True)
    return named if more is False else [*named, ("", more)]


def _pattern_tokens(node: Json) -> int:
    """Return an upper estimate of the tokens of the shortest text of a `pattern`."""
    pattern = node.get("pattern", "")
    return len(pattern) + sum(map(int, _COUNT_OF_PATTERN.findall(pattern)))
