"""Walks over every schema inside a JSON Schema that is reachable from its root, with its JSON path, each one once.

Invariant: every schema that a backend compiles is visited: all places that contain a schema, and the targets of local
references. A definition without a reference to it is skipped, unless a reference cannot be followed here; then all
definitions are visited. The values of `const`, `enum`, `default` and unknown keywords are data, until a reference
points there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from grammar_service.grammar.limits import array_index

Schema = dict[str, Any]

ONE = (
    *("items", "additionalItems", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
DEFINITIONS = ("$defs", "definitions")

_RANKS = {key: rank for rank, key in reversed([*enumerate((*ONE, *LISTS, *MAPS))])}
_RANKS_OF_TUPLES = {key: rank for rank, key in enumerate((*ONE, *LISTS, *MAPS))}
"""The order of places; a list of `items` comes after the other lists."""
_PLACES = frozenset(_RANKS)


def subschemas(root: Any, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield (path, schema) for `root`, whose path is `path`, and every schema object below it, outer schemas first."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [(path, root)]
    all_definitions = False
    for where, node in waiting:
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield where, node
        # A compilation walks a dozen times, and most schemas have nothing inside.
        if not _PLACES.isdisjoint(node):
            for keys, child in child_schemas(node):
                if isinstance(child, dict):
                    below = f"{where}/{keys[0]}"
                    waiting.append((f"{below}/{keys[1]}" if len(keys) > 1 else below, child))
        reference = node.get("$ref")
        if isinstance(reference, str):
            place = resolve(root, reference)
            if place is not None:
                waiting.append((path + place[0], place[1]))
            elif not all_definitions:
                all_definitions = True
                waiting += _all_definitions(root, path)


def child_schemas(node: Schema) -> list[tuple[tuple[str | int, ...], Any]]:
    """Return (keys, value) of each place of `node` where a schema may be, in an order that does not depend on it."""
    if _PLACES.isdisjoint(node):
        return []
    ranks = _RANKS_OF_TUPLES if isinstance(node.get("items"), list) else _RANKS
    found: list[tuple[tuple[str | int, ...], Any]] = []
    for key in sorted([key for key in node if key in ranks], key=ranks.__getitem__):
        value = node[key]
        if isinstance(value, list) and key in LISTS:
            found += [((key, i), child) for i, child in enumerate(value)]
        elif key in ONE:
            found.append(((key,), value))
        elif isinstance(value, dict) and key in MAPS:
            found += [((key, name), child) for name, child in value.items()]
    return found


def definitions(node: Schema) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield (keys, value) of each definition of `node`."""
    for key in DEFINITIONS:
        members = node.get(key)
        if isinstance(members, dict):
            yield from (((key, name), child) for name, child in members.items())


def resolve(root: Any, reference: str) -> tuple[str, Any] | None:
    """Return (path, value) of the target of a local reference in `root`, or None."""
    if not reference.startswith("#"):
        return None
    if not reference.startswith("#/"):
        return ("", root) if reference == "#" else _anchored(root, reference[1:])
    node = root
    for part in reference[2:].split("/"):
        for name in names_of(part):
            if isinstance(node, dict) and name in node:
                node = node[name]
                break
            if isinstance(node, list) and (index := array_index(name, len(node))) is not None:
                node = node[index]
                break
        else:
            return None
    return reference[1:], node


def names_of(part: str) -> tuple[str, ...]:
    """Return the names that a part of a JSON pointer in a reference may mean, the likelier one first."""
    if "%" not in part and "~" not in part:
        return (part,)
    return tuple(name.replace("~1", "/").replace("~0", "~") for name in (part, unquote(part)))


def _anchored(root: Any, name: str) -> tuple[str, Any] | None:
    waiting: list[tuple[str, Any]] = [("", root)]
    for path, node in waiting:
        if isinstance(node, dict):
            if name in (node.get("$anchor"), node.get("$dynamicAnchor")) or node.get("$id") == f"#{name}":
                return path, node
            waiting += ((f"{path}/{key}", child) for key, child in node.items())
        elif isinstance(node, list):
            waiting += ((f"{path}/{i}", child) for i, child in enumerate(node))
    return None


def _all_definitions(root: Any, path: str) -> Iterator[tuple[str, Any]]:
    waiting: list[tuple[str, Any]] = [(path, root)]
    for where, node in waiting:
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            below = f"{where}/{key}"
            if isinstance(node, dict) and key in DEFINITIONS and isinstance(child, dict):
                yield from ((f"{below}/{name}", each) for name, each in child.items())
            if isinstance(child, dict | list):
                waiting.append((below, child))
