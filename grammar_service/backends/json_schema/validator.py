"""The whole of a JSON Schema, checked on values by `jsonschema-rs`: the part that no grammar can say.

Invariant: the schema is read as the libraries read it: draft 2020-12, with the older names of its keywords. Formats
that are known are asserted. No other document is ever fetched.
Not responsible for: when a value is checked (see backends/verified.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema_rs

from grammar_service.backends.json_schema.draft_3 import write_draft_3
from grammar_service.backends.json_schema.references import take_out_dialects, write_pointers
from grammar_service.backends.json_schema.walk import subschemas
from grammar_service.errors import InvalidGrammar

_FINAL = frozenset({"uniqueItems", "maxContains"})
"""Keywords that a value, once it violates one, violates however it goes on."""
_FLAGS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|(?P<flags>\(\?[A-Za-z^-])", re.DOTALL)
"""Flags of a pattern, next to what may look like them: escapes and classes."""
_DYNAMIC = frozenset({"$dynamicRef", "$recursiveRef"})
_CONDITIONS = frozenset({"then", "else"})
"""Parts of a schema that hold while a condition does; the rest of a value may change the condition."""


class Validator:
    """A schema that values are checked against. Immutable: any thread may use it.

    Raises InvalidGrammar for a schema that the validator cannot read.
    """

    def __init__(self, text: str) -> None:
        schema = _modern(json.loads(text))
        if _may_hold(text, *_DYNAMIC) and any(not _DYNAMIC.isdisjoint(node) for _, node in subschemas(schema)):
            # The target of this reference depends on the way to it, by names that pointers do not have.
            schema = _modern(json.loads(text), with_names=True)
        self.schema = schema
        """As it is read; not to be changed."""
        if _may_hold(text, "(?"):
            _refuse_flags(schema)
        try:
            self._inner = jsonschema_rs.Draft202012Validator(schema, validate_formats=True, retriever=_no_documents)
        except (ValueError, jsonschema_rs.ReferencingError) as error:
            first = str(error).splitlines()[0]
            raise InvalidGrammar(f"JSON Schema: answers cannot be verified against it: {first}") from None

    def is_valid(self, text: bytes) -> bool:
        """Return whether a JSON text satisfies the schema. A number beyond a double satisfies none."""
        try:
            return bool(self._inner.is_valid(json.loads(text)))
        except ValueError:
            return False

    def is_lost(self, text: bytes, depth: int) -> bool:
        """Return whether no text that goes on like `text` satisfies the schema. False says nothing.

        `text` is a JSON text up to the end of some value, after which its `depth` open brackets were closed.
        """
        try:
            value = json.loads(text, object_pairs_hook=in_order)
            return self.loses(value, last_path(value, depth - 1))
        except ValueError:
            return False

    def loses(self, value: Any, open_path: Sequence[str | int]) -> bool:
        """Return whether `value` has an error that remains, however the values that are still open go on.

        `open_path` leads to the innermost of them, whose last member or item is complete. Raises ValueError for
        a number beyond a double.
        """
        return any(_is_final(error, open_path) for error in self._inner.iter_errors(value))

    def __repr__(self) -> str:
        return f"<Validator {self._inner!r}>"


def in_order(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object whose last member is the one that was written last, even if its name occurred before."""
    out: dict[str, Any] = {}
    for name, value in pairs:
        out.pop(name, None)
        out[name] = value
    return out


def last_path(value: Any, length: int) -> list[str | int]:
    """Return the names and indices that lead to the value that was written last, `length` levels deep."""
    path: list[str | int] = []
    for _ in range(length):
        path.append(next(reversed(value)) if isinstance(value, dict) else len(value) - 1)
        value = value[path[-1]]
    return path


def _is_final(error: jsonschema_rs.ValidationError, open_path: Sequence[str | int]) -> bool:
    """Return whether an error remains, however the values that are still open go on.

    The value at an error's place is complete unless it is still open. The innermost open value has
    only complete items. Every error of the list is one part of a conjunction, so none of them is undone by another
    branch.
    """
    path, place = list(error.instance_path), list(error.schema_path)
    if _CONDITIONS.intersection(map(str, place)):
        return False
    if path == list(open_path):
        return bool(place) and place[-1] in _FINAL
    return path != list(open_path[: len(path)])


def _modern(schema: Any, *, with_names: bool = False) -> Any:
    """Return the schema, changed in place, with the keywords of draft 2020-12 in place of older ones.

    `with_names`: leave references as they are.
    """
    write_draft_3(schema, "")
    if not with_names:
        write_pointers(schema)
    take_out_dialects(schema, "")
    for _, node in list(subschemas(schema)):
        node.pop("$schema", None)
        items = node.get("items")
        if isinstance(items, list):
            node["prefixItems"] = items
            rest = node.pop("additionalItems", True)
            del node["items"]
            node["items"] = rest
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(node.get(exclusive), bool):
                is_exclusive = node.pop(exclusive)
                if is_exclusive and bound in node:
                    node[exclusive] = node.pop(bound)
    return schema


def _may_hold(text: str, *parts: str) -> bool:
    """Return whether one of `parts` may be in a string of a JSON text; False is certain."""
    return "\\u" in text or any(part in text for part in parts)


def _refuse_flags(schema: Any) -> None:
    """Raise InvalidGrammar for a pattern with flags such as (?i) or (?s:x).

    The validator reads them as Rust's expressions, and the dialect of JSON Schema does not have them.
    """
    for where, node in subschemas(schema):
        by_name = node.get("patternProperties")
        found = [(f"{where}/pattern", node.get("pattern"))]
        found += [(f"{where}/patternProperties", name) for name in (by_name if isinstance(by_name, dict) else ())]
        for place, pattern in found:
            if isinstance(pattern, str) and any(match["flags"] for match in _FLAGS.finditer(pattern)):
                raise InvalidGrammar(
                    f"JSON Schema: {place}: answers cannot be verified against the flags of {pattern!r}"
                )


def _no_documents(uri: str) -> Any:
    raise ValueError(f"{uri}: other documents are not read")
