"""Closes the objects of a schema that list their properties and say nothing about other ones.

JSON Schema lets an object have any members besides `properties`. A model then writes keys that no reader expects. An
object is closed by the `additionalProperties: false` that its author left out.
Invariant: closing takes no property away that a schema names. So an object stays open where another schema for the
same value (a branch of `allOf`, a `then`, a reference with keywords next to it) names a property that the object does
not list, or where a requirement could not be met any more. Every other meaning of the schema stays.
Not responsible for: which grammars are closed (see compile/compiler.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from grammar_service.backends.json_schema.plain import close_plain, is_plain
from grammar_service.backends.json_schema.walk import Schema, child_schemas, resolve
from grammar_service.grammar.structural_tag import formats
from grammar_service.grammar.text_grammar import with_schemas
from grammar_service.grammar.value import Grammar, Kind

_TOOL = "tools."
"""The schemas of tools in a composed grammar: the name of their field in the request begins so."""

_SAYS = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"})
"""Keywords with which a schema says something about properties that it does not list."""
_OF_OBJECTS = _SAYS | {"properties", "required", "minProperties", "maxProperties", "dependentRequired"}
_ALTERNATIVES = ("anyOf", "oneOf", "allOf", "$ref")
_IN_PLACE = frozenset(
    {*_ALTERNATIVES, "not", "if", "then", "else", "dependentSchemas", "dependencies", "extends", "disallow"}
)
"""Keywords whose schemas are for the same value."""
_UNKNOWN = frozenset({"$dynamicRef", "$recursiveRef"})


def with_closed_objects(grammar: Grammar, asked: bool | None, default: bool) -> Grammar:
    """Return the grammar with its schemas closed, where that is asked for.

    Args:
        grammar: of one of SCHEMA_KINDS.
        asked: what the request says. None: the parameters of tools are closed, and `default` decides elsewhere.
        default: the server's setting.

    """
    closed = default if asked is None else asked
    if grammar.kind is Kind.COMPOSED or (closed and grammar.kind is Kind.STRUCTURAL_TAG):
        document = json.loads(grammar.text)
        for node in list(_formats(document)):
            of_tool = grammar.kind is Kind.COMPOSED and str(node.get("at")).startswith(_TOOL) and asked is None
            if "json_schema" in node and (closed or of_tool):
                close(node["json_schema"])
            elif closed and node.get("type") == "lark" and isinstance(node.get("grammar"), str):
                node["grammar"] = _closed_lark(node["grammar"])
        return replace(grammar, text=_text(document))
    if not closed:
        return grammar
    if grammar.kind is Kind.LARK:
        return replace(grammar, text=_closed_lark(grammar.text))
    schema = json.loads(grammar.text)
    close(schema)
    return replace(grammar, text=_text(schema))


def close(schema: Any) -> None:
    """Close the objects of a schema, in place."""
    if is_plain(schema):
        close_plain(schema)
        return
    shared, names = _shared(schema), _Names(schema)
    for node, is_shared in shared.values():
        properties = node.get("properties")
        if is_shared or not isinstance(properties, dict) or not _SAYS.isdisjoint(node):
            continue
        least = node.get("minProperties", 0)
        others = names.of(node) & ~names.bits(properties)
        if not others and not (_is_number(least) and least > len(properties)):
            node["additionalProperties"] = False


def _formats(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the formats of a structural tag in either notation; in the older one a structure has a `schema`."""
    for _, node in formats(document.get("format"), ""):
        yield node
    structures = document.get("structures")
    for structure in structures if isinstance(structures, list) and "format" not in document else ():
        if isinstance(structure, dict) and "schema" in structure:
            yield {"json_schema": structure["schema"]}


def _closed_lark(lark: str) -> str:
    def closed(schema: Any, _path: str) -> str:
        close(schema)
        return _text(schema)

    return with_schemas(lark, closed)


def _shared(root: Any) -> dict[int, tuple[Schema, bool]]:
    """Return by id each schema that is reachable from `root`, and whether another schema is for the same value."""
    found: dict[int, tuple[Schema, bool]] = {}
    waiting: list[tuple[Any, bool]] = [(root, False)]
    for node, is_shared in waiting:
        if not isinstance(node, dict):
            continue
        before = found.get(id(node))
        if before is not None and (before[1] or not is_shared):
            continue
        found[id(node)] = node, is_shared
        in_place = [key for key in node if key in _IN_PLACE]
        # One keyword by which the value is one of some schemas, and nothing else about its members.
        is_choice = (
            len(in_place) == 1
            and in_place[0] in _ALTERNATIVES
            and (in_place[0] != "allOf" or len(node["allOf"]) == 1)
            and _OF_OBJECTS.isdisjoint(node)
        )
        several = {"patternProperties", "contains", "unevaluatedProperties", "unevaluatedItems"} & node.keys()
        for keys, child in child_schemas(node):
            if keys[0] in _IN_PLACE:
                waiting.append((child, is_shared or not is_choice))
            else:
                waiting.append((child, is_shared or bool(in_place) or bool(several)))
        target = _target(root, node)
        if target is not None:
            waiting.append((target, is_shared or not is_choice))
    return found


class _Names:
    """The properties that schemas name, with the schemas for the same value: a bit of an integer for each name.

    References may form circles, and many schemas may refer to one. So all schemas that reach each other have one set
    (the components of Tarjan, "Depth-first search and linear graph algorithms", 1972), found once, without recursion.
    """

    _UNTOLD = -1
    """All bits: a schema that may name any property."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._bit: dict[str, int] = {}
        self._found: dict[int, int] = {}
        """By id of a schema, of finished components."""

    def bits(self, names: Iterable[Any]) -> int:
        """Return the bits of those of `names` that are strings."""
        found = 0
        for name in names:
            if isinstance(name, str):
                found |= 1 << self._bit.setdefault(name, len(self._bit))
        return found

    def of(self, start: Schema) -> int:
        """Return the names of a schema and of those for the same value."""
        order: dict[int, int] = {}
        low: dict[int, int] = {}
        names: dict[int, int] = {}
        component: list[int] = []
        path: list[tuple[Schema, Iterator[Schema]]] = []

        def enter(node: Schema) -> None:
            order[id(node)] = low[id(node)] = len(order)
            names[id(node)] = self._own(node)
            component.append(id(node))
            path.append((node, iter(self._parts(node))))

        if id(start) not in self._found:
            enter(start)
        while path:
            node, parts = path[-1]
            at = id(node)
            for part in parts:
                if not _SAYS.isdisjoint(part):
                    names[at] = self._UNTOLD
                elif id(part) in self._found:
                    names[at] |= self._found[id(part)]
                elif id(part) in order:
                    low[at] = min(low[at], order[id(part)])
                else:
                    enter(part)
                    break
            else:
                path.pop()
                if low[at] == order[at]:
                    members, whole = list[int](), 0
                    while at not in members[-1:]:
                        members.append(component.pop())
                        whole |= names[members[-1]]
                    self._found |= dict.fromkeys(members, whole)
                if path:
                    above = id(path[-1][0])
                    low[above] = min(low[above], low[at])
                    names[above] |= self._found.get(at, names[at])
        return self._found[id(start)]

    def _own(self, node: Schema) -> int:
        """Return the names of one schema."""
        kinds = node.get("type")
        of_draft_3 = "extends" in node or (isinstance(kinds, list) and any(isinstance(kind, dict) for kind in kinds))
        if not _UNKNOWN.isdisjoint(node) or of_draft_3 or ("$ref" in node and _target(self._root, node) is None):
            return self._UNTOLD
        found = 0
        for key in ("properties", "dependentRequired", "dependencies", "dependentSchemas"):
            value = node.get(key)
            if isinstance(value, dict):
                found |= self.bits(value)
                for each in value.values():
                    found |= self.bits(each) if isinstance(each, list) else 0
        required = node.get("required")
        return found | (self.bits(required) if isinstance(required, list) else 0)

    def _parts(self, node: Schema) -> list[Schema]:
        """Return the schemas for the same value."""
        parts = [child for keys, child in child_schemas(node) if keys[0] in _IN_PLACE]
        return [part for part in (*parts, _target(self._root, node)) if isinstance(part, dict)]


def _target(root: Any, node: Schema) -> Any:
    """Return the schema to which `node` refers; None: to none that is found here."""
    reference = node.get("$ref")
    found = resolve(root, reference) if isinstance(reference, str) else None
    return found[1] if found is not None else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
