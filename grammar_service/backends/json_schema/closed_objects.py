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
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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
    shared = _shared(schema)
    for node, is_shared in shared.values():
        properties = node.get("properties")
        if is_shared or not isinstance(properties, dict) or not _SAYS.isdisjoint(node):
            continue
        named = _named(schema, node, set())
        least = node.get("minProperties", 0)
        if named is not None and named <= properties.keys() and not (_is_number(least) and least > len(properties)):
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


def _named(root: Any, node: Any, seen: set[int]) -> set[str] | None:
    """Return the properties that `node` and the schemas for the same value name; None: that cannot be told."""
    if not isinstance(node, dict) or id(node) in seen:
        return set()
    seen.add(id(node))
    kinds = node.get("type")
    of_draft_3 = "extends" in node or (isinstance(kinds, list) and any(isinstance(kind, dict) for kind in kinds))
    if not _UNKNOWN.isdisjoint(node) or of_draft_3 or ("$ref" in node and _target(root, node) is None):
        return None
    names: set[str] = set()
    for key in ("properties", "dependentRequired", "dependencies", "dependentSchemas"):
        value = node.get(key)
        if isinstance(value, dict):
            names |= value.keys()
            names |= {name for each in value.values() if isinstance(each, list) for name in each if _is_text(name)}
    required = node.get("required")
    names |= {name for name in required if _is_text(name)} if isinstance(required, list) else set()
    parts = [child for keys, child in child_schemas(node) if keys[0] in _IN_PLACE]
    parts.append(_target(root, node))
    for part in parts:
        more = None if isinstance(part, dict) and not _SAYS.isdisjoint(part) else _named(root, part, seen)
        if more is None:
            return None
        names |= more
    return names


def _target(root: Any, node: Schema) -> Any:
    """Return the schema to which `node` refers; None: to none that is found here."""
    reference = node.get("$ref")
    found = resolve(root, reference) if isinstance(reference, str) else None
    return found[1] if found is not None else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
