"""Calls in the way of Python, `f(city="Oslo", days=3)`, and of Gemma, `call:f{city:<|"|>Oslo<|"|>,days:3}`.

The values have a notation of their own, which is not JSON:

    value          Python's way                                Gemma's way
    string         "Oslo" as in JSON, or 'Oslo'                <|"|>Oslo<|"|>, without escapes
    true, null     True, None                                  true, null
    list, object   JSON                                        [1,2], {key:1} with strings as above

Invariant: what the grammar of a call takes becomes, by literal_reader.py, JSON that fits the function's schema. A
schema for which that cannot be held is refused, with the name of its parameter. Objects are closed.
Not responsible for: what surrounds a call (see composition.py), reading one (see literal_reader.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from gpu_engine.api.conversation import Tool
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.front.tools.formats import Literals, ToolFormat
from gpu_engine.front.tools.parameters import (
    OF_STRINGS,
    SchemaRoot,
    asserting,
    branches_of,
    listed_values,
    named_types,
    properties_of,
    resolved,
    types_of,
    with_definitions,
)

Node = dict[str, Any]

PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
_NAME = re.compile(r"[^\W\d][\w.-]*")
"""A parameter's name, as the texts around a value allow it."""
_MAX_DEPTH = 16
"""Levels of nested schemas, and references that are followed."""
_SINGLE_QUOTED: Node = {"type": "regex", "pattern": r"""'([^'\\\n\r]|\\['"\\nrt])*'"""}
_NUMBER = r"""number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?"""
_ANY_RULES = r"""value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" (pair ("," pair)*)? "}"
pair ::= [A-Za-z_] [A-Za-z0-9_-]* ":" value
array ::= "[" (value ("," value)*)? "]"
string ::= QUOTE ([^<] | "<" [^<SECOND])* QUOTE
"""
"""Any value in Gemma's way. QUOTE is the text around a string; its first two characters are `<` and SECOND."""


def literal_call(tool: Tool, form: ToolFormat, field: str, *, always_strict: bool) -> Node:
    """Return the tag of a call of `tool`. Raises InvalidRequest for a schema that the format cannot hold.

    `field` is the place of the schema in the request. `always_strict`: required arguments are also required of a
    function that is not strict.
    """
    assert form.literals is not None
    strict = tool.strict or always_strict
    root, required = properties_of(tool, field, strict=strict)
    values = _Values(root, form.literals, strict=strict)
    members = values.members(root.schema.get("properties", {}), required if strict else set(), field, 0)
    begin = form.begin_of(tool.name, raw=False)
    if members is None:
        return {"type": "tag", "begin": begin, "content": _text(form.end), "end": ""}
    return {"type": "tag", "begin": begin, "content": members, "end": form.end}


def spelled_members(arguments: str, literals: Literals) -> str:
    """Return the JSON of an object as the arguments of a call; the text itself where it is none."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(value, dict):
        return arguments
    return _spelled_pairs(value, literals)


def _spelled_pairs(value: dict[str, Any], literals: Literals) -> str:
    names = sorted(value, key=str.lower) if literals.sorts else list(value)
    return literals.separator.join(f"{name}{literals.assign}{spelled_value(value[name], literals)}" for name in names)


def spelled_value(value: Any, literals: Literals) -> str:
    """Return a value of JSON in the notation of a format."""
    if literals.is_python:
        text = json.dumps(value, ensure_ascii=False)
        return PYTHON_WORDS.get(text, text)
    match value:
        case str():
            return literals.quote + value + literals.quote
        case list():
            return "[" + literals.separator.join(spelled_value(one, literals) for one in value) + "]"
        case dict():
            return "{" + _spelled_pairs(value, literals) + "}"
        case _:
            return json.dumps(value)


class _Values:
    """The grammars of the values of one function."""

    def __init__(self, root: SchemaRoot, literals: Literals, *, strict: bool) -> None:
        self._root, self._literals, self._strict = root, literals, strict

    def members(self, properties: dict[str, Any], required: set[str], place: str, depth: int) -> Node | None:
        """Return the members of an object, with the separators between them; None: it has none."""
        names = sorted(properties, key=str.lower) if self._literals.sorts else list(properties)
        parts = []
        for name in names:
            where = f"{place}/properties/{name}"
            if not _NAME.fullmatch(name):
                raise InvalidRequest(where, "the model's format cannot write this name of a parameter")
            value = self.value(properties[name], where, depth)
            parts.append((_sequence([_text(name + self._literals.assign), value]), name))
        self._root.spend(len(parts), place)
        return self._separated([(node, name in required) for node, name in parts])

    def value(self, schema: Any, place: str, depth: int) -> Node:
        """Return the values of a schema. Raises InvalidRequest."""
        if depth > _MAX_DEPTH:
            raise InvalidRequest(place, "is nested too deeply, or refers to itself, for the model's format")
        schema = resolved(schema, self._root, place)
        if (values := listed_values(schema, self._root, place)) is not None:
            return self._listed(values, place)
        if (branches := branches_of(schema, self._root, place)) is not None:
            if "oneOf" in schema:
                self._refuse_common(branches, place)
            return _either([self.value(one, place, depth + 1) for one in branches])
        types = named_types(schema.get("type"), place)
        if types >= {"number", "integer"}:
            types = types - {"integer"}
        if not self._literals.is_python and not asserting(schema):
            return self._anything("value")
        return _either([self._of_type(kind, {**schema, "type": kind}, place, depth) for kind in sorted(types)])

    def _of_type(self, kind: str, schema: dict[str, Any], place: str, depth: int) -> Node:
        match kind:
            case "boolean" | "null":
                self._refuse_others(schema, {"type"}, place)
                return self._listed([True, False] if kind == "boolean" else [None], place)
            case "string":
                return self._string(schema, place)
            case "array" | "object" if not self._literals.is_python:
                return (self._array if kind == "array" else self._object)(schema, place, depth)
            case _:
                return self._json(with_definitions(schema, self._root, place), place)

    def _string(self, schema: dict[str, Any], place: str) -> Node:
        if self._literals.is_python:
            quoted = self._json(with_definitions(schema, self._root, place), place)
            return quoted if asserting(schema) > {"type"} else _either([quoted, _SINGLE_QUOTED])
        self._refuse_others(schema, OF_STRINGS | {"type"}, place)
        kept = {key: value for key, value in schema.items() if key in OF_STRINGS | {"type"}}
        text = {"type": "json_schema", "json_schema": kept, "style": "text", "at": place}
        return {"type": "tag", "begin": self._literals.quote, "content": text, "end": self._literals.quote}

    def _array(self, schema: dict[str, Any], place: str, depth: int) -> Node:
        self._refuse_others(schema, {"type", "items", "minItems", "maxItems"}, place)
        least, most = schema.get("minItems", 0), schema.get("maxItems", -1)
        if type(least) is not int or type(most) is not int or least < 0 or -1 < most < least:
            raise InvalidRequest(place, "minItems and maxItems must be whole numbers, the first not above the second")
        if not most:
            return _text("[]")
        item = self.value(schema.get("items", True), f"{place}/items", depth + 1)
        further = _sequence([_text(self._literals.separator), item])
        more = {"type": "repeat", "content": further, "min": max(least - 1, 0), "max": most - 1 if most > 0 else -1}
        if most == 1:
            items: Node = item
        else:
            items = _sequence([item, more])
        return _sequence([_text("["), items if least else _optional(items), _text("]")])

    def _object(self, schema: dict[str, Any], place: str, depth: int) -> Node:
        self._refuse_others(schema, {"type", "properties", "required", "additionalProperties"}, place)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise InvalidRequest(place, "needs an object `properties` and an array `required`")
        if missing := [name for name in required if not isinstance(name, str) or name not in properties]:
            raise InvalidRequest(place, f"requires {missing[0]!r}, which is not one of its properties")
        others = schema.get("additionalProperties", not properties)
        if not isinstance(others, dict | bool):
            raise InvalidRequest(place, "additionalProperties must be a boolean or a JSON Schema")
        if not properties and others is not False:
            if others is True or not asserting(others):
                return self._anything("object")
            key: Node = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_-]*"}
            value = self.value(others, f"{place}/additionalProperties", depth + 1)
            pair = _sequence([key, _text(self._literals.assign), value])
            more = {"type": "star", "content": _sequence([_text(self._literals.separator), pair])}
            return _sequence([_text("{"), _optional(_sequence([pair, more])), _text("}")])
        members = self.members(properties, set(required), place, depth + 1)
        return _text("{}") if members is None else _sequence([_text("{"), members, _text("}")])

    def _separated(self, members: Sequence[tuple[Node, bool]]) -> Node | None:
        """Return some of the members in their order, those that are required among them."""
        if not members:
            return None
        separator = _text(self._literals.separator)
        first = next((at for at, (_, required) in enumerate(members) if required), None)
        if first is None:
            return _optional(self._some([node for node, _ in members]))
        before = [_optional(_sequence([node, separator])) for node, _ in members[:first]]
        return _sequence([*before, members[first][0], *self._further(members[first + 1 :])])

    def _further(self, members: Sequence[tuple[Node, bool]]) -> list[Node]:
        separator = _text(self._literals.separator)
        parts = [(_sequence([separator, node]), required) for node, required in members]
        return [part if required else _optional(part) for part, required in parts]

    def _some(self, nodes: list[Node]) -> Node:
        """Return at least one of the nodes, in their order. Halves: for n nodes it has some n log n."""
        if len(nodes) == 1:
            return nodes[0]
        half = (len(nodes) + 1) // 2
        first, second = nodes[:half], nodes[half:]
        both = _sequence([self._some(first), *self._further([(node, False) for node in second])])
        return _either([both, self._some(second)])

    def _listed(self, values: list[Any], place: str) -> Node:
        texts = []
        for value in values:
            self._refuse_unwritable(value, place)
            texts.append(spelled_value(value, self._literals))
            if isinstance(value, str) and self._literals.is_python and not set(value) & set("'\\\n\r\t\""):
                texts.append(f"'{value}'")
        if not texts:
            raise InvalidRequest(place, "allows no value")
        return _either([_text(text) for text in dict.fromkeys(texts)])

    def _refuse_unwritable(self, value: Any, place: str) -> None:
        """Refuse a value that would be read back as another one, or as none."""
        match value:
            case float() if not math.isfinite(value):
                raise InvalidRequest(place, "has a number that is too large")
            case str() if not self._literals.is_python and self._literals.quote in value:
                raise InvalidRequest(place, f"has a value with {self._literals.quote!r}, which ends a string")
            case list():
                for one in value:
                    self._refuse_unwritable(one, place)
            case dict():
                for name, one in value.items():
                    if not self._literals.is_python and not _NAME.fullmatch(name):
                        raise InvalidRequest(
                            place, f"has a value with the name {name!r}, which the format cannot write"
                        )
                    self._refuse_unwritable(one, place)

    def _anything(self, what: str) -> Node:
        quote = self._literals.quote
        rules = _ANY_RULES.replace("QUOTE", json.dumps(quote)).replace("SECOND", quote[1])
        return {"type": "grammar", "grammar": f"root ::= {what}\n{rules}{_NUMBER}\n"}

    def _json(self, schema: dict[str, Any], place: str) -> Node:
        return {"type": "json_schema", "json_schema": schema, "at": place}

    def _refuse_others(self, schema: dict[str, Any], known: set[str] | frozenset[str], place: str) -> None:
        if self._strict and (others := asserting(schema) - known):
            raise InvalidRequest(place, f"has {min(others)!r}, which the model's format cannot hold")

    def _refuse_common(self, branches: list[dict[str, Any]], place: str) -> None:
        """Refuse branches of which one value may fit two."""
        seen = set[str]()
        for one in branches:
            types, _ = types_of(one, self._root, place)
            types |= {"number"} if "integer" in types else set()
            if self._strict and seen & types:
                raise InvalidRequest(place, "has 'oneOf' of values of one type, which the model's format cannot hold")
            seen |= types


def _text(value: str) -> Node:
    return {"type": "const_string", "value": value}


def _sequence(nodes: list[Node]) -> Node:
    """Return the nodes after each other, with few nodes: a compilation walks over each of them several times."""
    flat: list[Node] = []
    for node in nodes:
        for one in node["elements"] if node["type"] == "sequence" else [node]:
            before = flat[-1] if flat else {}
            if before.get("type") == "const_string" and one["type"] in ("const_string", "tag"):
                flat[-1] = _after(before["value"], one)
            else:
                flat.append(one)
    return flat[0] if len(flat) == 1 else {"type": "sequence", "elements": flat}


def _after(text: str, node: Node) -> Node:
    """Return a constant or a tag after a text."""
    key = "value" if node["type"] == "const_string" else "begin"
    return {**node, key: text + node[key]}


def _optional(node: Node) -> Node:
    return {"type": "optional", "content": node}


def _either(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": nodes}
