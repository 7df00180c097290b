"""A text within a string that is a value, checked with one end of the string after another.

The text before the string is read once, and most strings of most schemas need no validator: it is asked where the
schema of the string's place has more than the grammar surely says. A string among the items of an array that are to be
unique is compared with them here.
Invariant: the answer equals `Validator.is_lost`, or is False: an error missed here is found at the end of the answer.
Not responsible for: what a token ends (see value_tokens.py), the validator (see json_schema/validator.py).
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grammar_service.backends.json_schema.places import BACKSLASH
from grammar_service.backends.json_schema.validator import Validator, in_order, last_path
from grammar_service.backends.json_schema.walk import resolve

Path = Sequence[str | int]

_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})
_OF_STRINGS = frozenset({"type", "enum", "const", "minLength", "maxLength"})
"""Keywords of a string that both libraries enforce."""
_STEPS = frozenset({"properties", "additionalProperties", "items", "prefixItems"})
_SIZES = frozenset({"required", "minProperties", "maxProperties", "minItems", "maxItems", "uniqueItems"})
_PLAIN = _NOTES | _OF_STRINGS | _STEPS | _SIZES | {"$ref", "allOf", "$defs", "definitions"}
"""Keywords that constrain a string below them only through the schema of its place."""
MAX_NODES = 64
"""Schemas of one place; where there are more, every string is asked for."""


class Check(enum.Enum):
    """What the end of a string at some place may violate."""

    NOTHING = enum.auto()
    UNIQUE = enum.auto()
    """It equals an earlier item."""
    ANYTHING = enum.auto()


class LastString:
    """The string that is open at the end of a text. Not thread-safe."""

    def __init__(self, validator: Validator, before: bytes, closing: bytes) -> None:
        """Args: `before` is the text before its quote; `closing` closes the brackets open there, at least one."""
        self._validator, self.before = validator, before
        self._check = Check.NOTHING  # of a text that is no JSON, however the string ends
        try:
            self._value = json.loads(before + b'""' + closing, object_pairs_hook=in_order)
        except ValueError:
            return
        *self._open_path, self._last = last_path(self._value, len(closing))
        self._within = self._value
        for step in self._open_path:
            self._within = self._within[step]
        self._check = check_of(validator.schema, self._open_path, self._last)
        self._items: set[bytes] = set()
        if self._check is Check.UNIQUE:
            self._items = {_encoded(item) for item in self._within[:-1] if isinstance(item, str)}

    @property
    def asks(self) -> bool:
        """Whether the validator is asked for each end of the string."""
        return self._check is Check.ANYTHING

    def known(self, head: bytes, ends: Mapping[int, bytes]) -> dict[int, bool]:
        """Return `is_lost` for each of `ends` after `head`, the string so far with its quote; none where `asks`."""
        if self._check is Check.ANYTHING:
            return {}
        if self._check is Check.NOTHING or not self._items:
            return dict.fromkeys(ends, False)
        if BACKSLASH in head:
            return {at: self.is_lost(head + end) for at, end in ends.items()}
        inner = head[1:]
        return {
            at: self.is_lost(head + end) if BACKSLASH in end else inner + end[:-1] in self._items
            for at, end in ends.items()
        }

    def is_lost(self, string: bytes) -> bool:
        """Return whether nothing after `string`, the whole of it with its quotes, makes the text valid."""
        if self._check is Check.NOTHING:
            return False
        try:
            value = json.loads(string)
            if self._check is Check.UNIQUE:
                return _encoded(value) in self._items
            self._within[self._last] = value
            return self._validator.loses(self._value, self._open_path)
        except ValueError:
            return False

    def __repr__(self) -> str:
        return f"<LastString after {len(self.before)} bytes, {self._check.name}>"


def _encoded(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def check_of(schema: Any, open_path: Path, last: str | int) -> Check:
    """Return what a string may violate that is the last member or item `last` of the value at `open_path`."""
    try:
        nodes = _together(schema, [schema])
        for step in open_path:
            nodes = _together(schema, [child for node in nodes for child in _below(node, step)])
        unique = isinstance(last, int) and any(node.get("uniqueItems") is True for node in nodes)
        own = _together(schema, [child for node in nodes for child in _below(node, last)])
    except _NotPlain:
        return Check.ANYTHING
    if any(not node.keys() <= _NOTES | _OF_STRINGS | {"$ref", "allOf"} for node in own):
        return Check.ANYTHING
    return Check.UNIQUE if unique else Check.NOTHING


class _NotPlain(Exception):
    """A keyword on the way may say more."""


def _together(root: Any, nodes: list[Any]) -> list[dict[str, Any]]:
    """Return the schemas that hold for one value: `nodes`, and what their `$ref` and `allOf` name."""
    found: list[dict[str, Any]] = []
    waiting = list(nodes)
    for node in waiting:
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict) or not node.keys() <= _PLAIN or len(waiting) > MAX_NODES:
            raise _NotPlain
        found.append(node)
        waiting += node.get("allOf", ())
        if "$ref" in node:
            place = resolve(root, node["$ref"])
            if place is None:
                raise _NotPlain
            waiting.append(place[1])
    return found


def _below(node: dict[str, Any], step: str | int) -> Iterator[Any]:
    """Yield the schemas that a node has for its member or item `step`."""
    if isinstance(step, int):
        first = node.get("prefixItems", [])
        if step < len(first):
            yield first[step]
        elif "items" in node:
            yield node["items"]
    elif step in node.get("properties", {}):
        yield node["properties"][step]
    elif "additionalProperties" in node:
        yield node["additionalProperties"]
