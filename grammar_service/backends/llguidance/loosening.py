"""Takes out of a schema what the library fails on as a whole, so that the rest of it is a grammar.

    keywords next to a reference in a circle   the library follows the reference before it has read its target
    patterns of names that overlap             the library intersects no two of them
    types that alternatives repeat             the library would write them into each alternative, around the circle
    what is intersected, in a large schema     alternatives from rewriting, then the ones next to other keywords

The library names one such place at a time, so a schema is loosened in rounds.
Invariant: a loosened schema accepts all that the schema does. Each part that was taken out is returned, so it is
refused by name, named in a warning, or verified on the answer; but for a type that every alternative next to it has.
Not responsible for: the messages of keywords that the library leaves out by itself (see notation.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from grammar_service.backends.json_schema.negation import ANNOTATIONS
from grammar_service.backends.json_schema.unenforced import Unenforced
from grammar_service.backends.json_schema.walk import DEFINITIONS, Schema, resolve, subschemas

MAX_ROUNDS = 12
"""Places that are loosened in one schema."""

_CIRCLE = re.compile(r"circular references with sibling keys are not supported: [^#\s]*(#\S*)")
_TOO_LARGE = ("schema too large", "intersection stack level exceeded", "Unable to determine if regex is empty")
_SMALLEST = 4
_ALTERNATIVES = ("anyOf", "oneOf")
_OVERLAP = re.compile(r"patternProperty regexes /(.*)/ are (?:not )?disjoint", re.DOTALL)
"""That they overlap, or that the library cannot tell."""
_AND = "/ and /"
_MAX_OVERLAPS = 4
"""Patterns that go for one that they overlap, before it goes itself."""


@dataclass(frozen=True, slots=True)
class Loosening:
    """What is taken out of a schema."""

    lone: frozenset[str] = frozenset()
    """References, without their escapes, that lose the keywords next to them."""
    gone: frozenset[str] = frozenset()
    """References that go where something else holds next to them: clauses of `allOf`, and members in these. What is
    next to alternatives goes if one of them is such a reference."""
    overlaps: frozenset[str] = frozenset()
    """Pairs of patterns, as the library writes them; the second one goes."""
    size: int = 0
    """1: no keyword is rewritten into alternatives; 2: alternatives next to other keywords go; 3: `allOf` goes as
    well; 4: all clauses of an `allOf` but the first go."""

    def further(self, message: str) -> Loosening | None:
        """Return the next part to take out after the library failed with `message`, or None if none is known to
        help."""
        if circle := _CIRCLE.search(message):
            target = unquote(circle[1])
            if target not in self.lone:
                return replace(self, lone=self.lone | {target})
            return replace(self, gone=self.gone | {target}) if target not in self.gone else None
        if any(words in message for words in _TOO_LARGE):
            return replace(self, size=self.size + 1) if self.size < _SMALLEST else None
        overlap = _OVERLAP.search(message)
        if overlap and overlap[1] not in self.overlaps:
            first, _, second = overlap[1].partition(_AND)
            # There may be more patterns that one overlaps than rounds, so in the end it goes as well.
            num_overlaps = sum(pair.startswith(first + _AND) for pair in self.overlaps)
            also = {f"{second}{_AND}{first}"} if num_overlaps >= _MAX_OVERLAPS else set()
            return replace(self, overlaps=self.overlaps | {overlap[1]} | also)
        return None

    def apply(self, schema: Any, path: str) -> list[Unenforced]:
        """Loosen the schema at `path` in place. Return what was taken out."""
        found: list[Unenforced] = []
        if not (self.lone or self.overlaps or self.size > 1):
            return found
        for where, node in list(subschemas(schema, path)):
            if self.lone:
                _without_repeated_type(schema, node)
            found += self._alone(node, where)
            found += self._without_clauses(node, where)
            found += self._without_patterns(node, where)
            found += self._without_alternatives(node, where)
        return found

    def _alone(self, node: Schema, where: str) -> list[Unenforced]:
        kept = {"$ref"} if _target(node) in self.lone else set()
        for key in _ALTERNATIVES:
            if isinstance(node.get(key), list) and any(_target(branch) in self.gone for branch in node[key]):
                kept.add(key)
        if not kept:
            return []
        beside = [key for key in node if key not in kept and key not in ANNOTATIONS and key not in DEFINITIONS]
        for key in beside:
            del node[key]
        return [Unenforced(where, key, "is not enforced next to a reference in a circle") for key in beside]

    def _without_clauses(self, node: Schema, where: str) -> list[Unenforced]:
        found: list[Unenforced] = []
        clauses = node.get("allOf")
        if not isinstance(clauses, list):
            return found
        for number, clause in enumerate(clauses):
            place = f"{where}/allOf/{number}"
            if _target(clause) in self.gone:
                clauses[number] = True
                found.append(Unenforced(place, "$ref", "a reference in a circle is not followed"))
            elif self.size == _SMALLEST and number:
                clauses[number] = True
                found.append(Unenforced(place, "", f"{place}: is not enforced in a schema this large"))
            members = clause.get("properties") if isinstance(clause, dict) else None
            if not isinstance(members, dict):
                continue
            for name in [name for name, member in members.items() if _target(member) in self.gone]:
                members[name] = True
                why = "a reference in a circle is not followed"
                found.append(Unenforced(f"{place}/properties/{name}", "$ref", why))
        return found

    def _without_alternatives(self, node: Schema, where: str) -> list[Unenforced]:
        unwanted = _ALTERNATIVES if self.size == 2 else (*_ALTERNATIVES, "allOf") if self.size > 2 else ()
        if not any(key not in ANNOTATIONS and key not in unwanted for key in node):
            return []
        gone = [key for key in unwanted if node.pop(key, None) is not None]
        return [Unenforced(where, key, "is not enforced next to other keywords in a schema this large") for key in gone]

    def _without_patterns(self, node: Schema, where: str) -> list[Unenforced]:
        members = node.get("patternProperties")
        if not isinstance(members, dict):
            return []
        gone = [name for name in members if any(pair.endswith(_AND + name) for pair in self.overlaps)]
        if not gone:
            return []
        node["patternProperties"] = {name: child for name, child in members.items() if name not in gone}
        # It holds for names that no pattern matches, which the library does not know any more.
        node.pop("additionalProperties", None)
        return [Unenforced(where, "patternProperties", f"{name!r} overlaps another pattern of names") for name in gone]


def _target(node: Any) -> str | None:
    """Return the reference of a schema without its escapes."""
    reference = node.get("$ref") if isinstance(node, dict) else None
    return unquote(reference) if isinstance(reference, str) else None


def _without_repeated_type(root: Any, node: Schema) -> None:
    """Take out a type that each alternative next to it has as well."""
    for key in _ALTERNATIVES:
        branches = node.get(key)
        if (
            "type" in node
            and isinstance(branches, list)
            and all(_type(root, each) == node["type"] for each in branches)
        ):
            del node["type"]


def _type(root: Any, node: Any) -> Any:
    """Return the type of a schema or of its reference's target; None if it is not said there."""
    if isinstance(node, dict) and "type" not in node and isinstance(node.get("$ref"), str):
        target = resolve(root, node["$ref"])
        node = target[1] if target else None
    return node.get("type") if isinstance(node, dict) else None
