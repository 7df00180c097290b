"""Rewrites keywords that no library enforces into alternatives that both can express, exactly.

    dependencies, dependentRequired, dependentSchemas    the property is absent, or the rest holds
    if, then, else                                       if and then, or the complement of if and else
    not                                                  the complement
    oneOf                                                each branch with the complements of overlapping ones
    contains                                             the places of an array with a small `maxItems`
    propertyNames                                        patternProperties and additionalProperties
    uniqueItems                                          the orders of few values
    $ref to what no value satisfies                      `false`, which a library can leave out of an object

Each keyword that can be rewritten becomes a schema in `allOf` of its node, and goes. A keyword that cannot stays as it
is, and is refused by name later.
Invariant: a rewritten node accepts and rejects what it did, for every value; tests compare the two with two validators.
All clauses of a schema together have at most MAX_PARTS parts. No I/O.
Not responsible for: complements (see negation.py), what a library still cannot read (see the backends).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from grammar_service.backends.json_schema.exclusive import canonical, exclusive, facts_of
from grammar_service.backends.json_schema.negation import NoComplement, absent, all_of, any_of, complement
from grammar_service.backends.json_schema.walk import DEFINITIONS, Schema, resolve, subschemas

MAX_PARTS = 20_000
"""Objects and lists in all clauses of a schema."""
MAX_NODE_PARTS = 4_000
"""Objects and lists in one clause."""
MAX_PRODUCT = 128
"""Product of the alternatives of a node's clauses: a library intersects them with each other."""
MAX_ORDERS = 120
"""Orders of the values of a `uniqueItems`."""
MAX_PLACES = 8
"""`maxItems` up to which `contains` is written as places."""
MAX_BRANCHES = 24
"""Branches of a `oneOf` that overlap."""

_Rule = Callable[[Schema, Any], Any]


def expand(schema: Any) -> None:
    """Rewrite `schema`, the root of a document, in place."""
    pointers = [pointer.removeprefix("#") for pointer in _pointers(schema)]
    left = MAX_PARTS
    for where, node in subschemas(schema):
        if _REWRITTEN.isdisjoint(node):
            continue
        product = 1
        for keywords, rule in _RULES:
            present = [keyword for keyword in keywords if keyword in node]
            if not present or any(_is_target(f"{where}/{keyword}", pointers) for keyword in present):
                continue
            try:
                clause = rule(node, schema)
            except NoComplement:
                continue
            parts, ways = _size(clause, node), _ways(clause)
            if parts > min(left, MAX_NODE_PARTS) or product * ways > MAX_PRODUCT:
                continue
            left, product = left - parts, product * ways
            _replace(node, present, clause)
    while _write_false(schema):
        pass


def _write_false(schema: Any) -> bool:
    """Write `false` in place of references to what no value satisfies; return whether there were any."""
    nodes = [node for _, node in subschemas(schema)]
    if not any(map(_is_false, nodes)) and not any(False in _values(node, key) for node in nodes for key in DEFINITIONS):
        return False
    found = False
    for node in nodes:
        reference = node.get("$ref")
        place = resolve(schema, reference) if isinstance(reference, str) and not _is_false(node) else None
        if place is not None and (place[1] is False or (isinstance(place[1], dict) and _is_false(place[1]))):
            del node["$ref"]
            node["allOf"] = [*(node.get("allOf") or ()), False]
            found = True
    return found


def _is_false(node: Schema) -> bool:
    clauses = node.get("allOf")
    return isinstance(clauses, list) and any(clause is False for clause in clauses)


def _values(node: Schema, key: str) -> list[Any]:
    members = node.get(key)
    return [value for value in members.values() if value is False] if isinstance(members, dict) else []


def _replace(node: Schema, keywords: list[str], clause: Any) -> None:
    for keyword in keywords:
        del node[keyword]
    if clause is True or clause == {}:
        return
    others = node.get("allOf")
    clauses = clause["allOf"] if isinstance(clause, dict) and list(clause) == ["allOf"] else [clause]
    node["allOf"] = [*(others if isinstance(others, list) else ()), *clauses]


def _is_target(place: str, pointers: list[str]) -> bool:
    return any(pointer == place or pointer.startswith(f"{place}/") for pointer in pointers)


def _pointers(schema: Any) -> Iterator[str]:
    """Yield every local reference. Parts of the schema that one leads into must stay where they are."""
    for _, node in subschemas(schema):
        reference = node.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            yield reference


def _size(clause: Any, node: Schema) -> int:
    """Return the number of objects and lists in a clause for a node, one that is shared once for each place.

    More than `MAX_NODE_PARTS` for a clause that holds the node itself, as the complement of a reference to a place
    around the node does: in the node's place it would have no end.
    """
    count, waiting = 0, [clause]
    while waiting and count <= MAX_NODE_PARTS:
        each = waiting.pop()
        if each is node:
            return MAX_NODE_PARTS + 1
        if isinstance(each, dict | list):
            count += 1
            waiting.extend(each.values() if isinstance(each, dict) else each)
    return count


def _ways(clause: Any) -> int:
    """Return the number of alternatives of a clause at its own level."""
    if not isinstance(clause, dict):
        return 1
    count = math.prod(_ways(each) for each in clause.get("allOf", ()) if isinstance(each, dict))
    branches = clause.get("anyOf")
    return count * (sum(map(_ways, branches)) if isinstance(branches, list) and branches else 1)


def _dependencies(node: Schema, root: Any) -> Any:
    clauses = []
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        members = node.get(keyword, {})
        if not isinstance(members, dict):
            raise NoComplement(keyword)
        for name, wanted in members.items():
            names = [wanted] if isinstance(wanted, str) else wanted
            if isinstance(names, list):
                also: Any = {"required": [name, *(other for other in names if other != name)]} if names else True
            else:
                also = all_of([{"required": [name]}, wanted]) if wanted not in (True, {}) else True
            clauses.append(any_of([absent(name), also]))
    return all_of(clauses)


def _conditional(node: Schema, root: Any) -> Any:
    if "if" not in node:
        return True  # without it the others have no effect
    condition, then, otherwise = node["if"], node.get("then", True), node.get("else", True)
    if then in (True, {}) and otherwise in (True, {}):
        return True
    _refuse_circle(condition, node, root)
    other = complement(condition, [_without(node, "if", "then", "else")], root)
    return any_of([all_of([condition, then]), all_of([other, otherwise])])


def _not(node: Schema, root: Any) -> Any:
    _refuse_circle(node["not"], node, root)
    return complement(node["not"], [_without(node, "not")], root)


def _refuse_circle(schema: Any, node: Schema, root: Any) -> None:
    """Raise NoComplement if `schema`, whose complement `node` needs, refers to `node` itself for the same value.

    JSON Schema leaves the meaning of a circle like that open, and a double negation in it would admit any value.
    """
    waiting, seen = [schema], set[int]()
    while waiting:
        each = waiting.pop()
        if each is node:
            raise NoComplement("$ref: a circle")
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        waiting += [each[key] for key in ("not", "if", "then", "else") if key in each]
        for key in ("allOf", "anyOf", "oneOf"):
            waiting += each[key] if isinstance(each.get(key), list) else []
        reference = each.get("$ref")
        if isinstance(reference, str) and (place := resolve(root, reference)) is not None:
            waiting.append(place[1])


def _one_of(node: Schema, root: Any) -> Any:
    branches = node["oneOf"]
    if not isinstance(branches, list) or not branches:
        raise NoComplement("oneOf")
    if exclusive(branches, root):
        if "anyOf" not in node:
            raise NoComplement("oneOf")  # it becomes anyOf in its place; see rewrite.py
        return any_of(branches)
    if len(branches) > MAX_BRANCHES:
        raise NoComplement("oneOf")
    rest = _without(node, "oneOf")
    ways = []
    for i, branch in enumerate(branches):
        others = [
            complement(other, [rest, branch], root)
            for j, other in enumerate(branches)
            if j != i and not exclusive([all_of([rest, branch]), other], root)
        ]
        ways.append(all_of([branch, *others]))
    return any_of(ways)


def _contains(node: Schema, root: Any) -> Any:
    if "contains" not in node:
        return True  # without it the others have no effect
    wanted, least, most = node["contains"], node.get("minContains", 1), node.get("maxContains")
    if least == 0 and most is None:
        return True
    if wanted in (True, {}):
        return {"minItems": least} if most is None else {"minItems": least, "maxItems": most}
    if most is None and "prefixItems" not in node and "items" in node and canonical(node["items"]) == canonical(wanted):
        return {"minItems": least}
    longest = node.get("maxItems")
    if most == 0 and least == 0:
        return {"items": complement(wanted, (), root)}
    if most is not None or least != 1 or not isinstance(longest, int) or longest > MAX_PLACES:
        raise NoComplement("contains")
    if longest < 1:
        return any_of([{"type": ["boolean", "null", "number", "object", "string"]}])
    return any_of({"prefixItems": [*[True] * i, wanted], "minItems": i + 1} for i in range(longest))


def _names(node: Schema, root: Any) -> Any:
    return _names_of(node["propertyNames"], root, 4)


def _names_of(names: Any, root: Any, depth: int) -> Any:
    """Return a schema of the objects whose names satisfy `names`. Other values also satisfy it."""
    if isinstance(names, bool):
        return names or {"properties": {}, "additionalProperties": False}
    if not isinstance(names, dict) or depth == 0:
        raise NoComplement("propertyNames")
    types = names.get("type", "string")
    if types != "string" and not (isinstance(types, list) and "string" in types):
        return {"properties": {}, "additionalProperties": False}
    clauses: list[Any] = []
    for keyword, value in names.items():
        if keyword == "$ref":
            place = resolve(root, value) if isinstance(value, str) else None
            clauses.append(_names_of(place[1] if place else None, root, depth - 1))
        elif keyword == "allOf" and isinstance(value, list):
            clauses += [_names_of(each, root, depth - 1) for each in value]
        elif keyword == "not":
            clauses.append(_names_of(complement(value, [{"type": "string"}], root), root, depth - 1))
        elif keyword == "pattern" and isinstance(value, str):
            clauses.append(_matching(value))
        elif keyword in ("enum", "const"):
            listed = value if keyword == "enum" else [value]
            members = {text: True for text in listed if isinstance(text, str)} if isinstance(listed, list) else {}
            clauses.append({"properties": members, "additionalProperties": False})
        elif keyword in _OTHER_NAMES or keyword in ("allOf", "pattern"):
            raise NoComplement("propertyNames")
    least, most = names.get("minLength", 0), names.get("maxLength")
    if not isinstance(least, int) or not isinstance(most, int | None):
        raise NoComplement("propertyNames")
    if least or most is not None:
        clauses.append(_matching(f"^[\\s\\S]{{{least},{'' if most is None else most}}}$"))
    return all_of(clauses)


def _matching(pattern: Any) -> Schema:
    return {"patternProperties": {pattern: True}, "additionalProperties": False}


_OTHER_NAMES = frozenset({"anyOf", "oneOf", "if", "format", "$dynamicRef", "$recursiveRef"})


def _unique(node: Schema, root: Any) -> Any:
    if node["uniqueItems"] is not True:
        return True
    if "prefixItems" in node or isinstance(node.get("items"), list):
        raise NoComplement("uniqueItems")
    longest = node.get("maxItems")
    if (isinstance(longest, int) and longest <= 1) or "array" not in facts_of([node], root).types:
        return True
    values = facts_of([node.get("items")], root).values
    if values is None:
        raise NoComplement("uniqueItems")
    places = min(len(values), longest) if isinstance(longest, int) else len(values)
    if math.perm(len(values), places) > MAX_ORDERS:
        raise NoComplement("uniqueItems")
    listed = [json.loads(text) for text in sorted(values)]
    orders = itertools.permutations(listed, places)
    return any_of({"prefixItems": [{"const": value} for value in order], "items": False} for order in orders)


def _without(node: Schema, *keywords: str) -> Schema:
    return {keyword: value for keyword, value in node.items() if keyword not in keywords}


_RULES: tuple[tuple[tuple[str, ...], _Rule], ...] = (
    (("dependencies", "dependentRequired", "dependentSchemas"), _dependencies),
    (("if", "then", "else"), _conditional),
    (("not",), _not),
    (("oneOf",), _one_of),
    (("contains", "minContains", "maxContains"), _contains),
    (("propertyNames",), _names),
    (("uniqueItems",), _unique),
)
"""Keywords that go together, and what they become. Raises NoComplement where they must stay."""
_REWRITTEN = frozenset(keyword for keywords, _ in _RULES for keyword in keywords)
