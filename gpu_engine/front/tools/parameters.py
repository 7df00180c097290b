"""The parameters of a function, for formats in which a model writes its arguments one by one and not as JSON.

A string is written as it is, without quotation marks; any other value is written as JSON:

    <parameter=city>
    Oslo
    </parameter>

Invariant: what the grammar of an argument takes becomes, by `value`, a value that fits the parameter's schema. A schema
for which that cannot be held is refused, with the name of its parameter.
Not responsible for: the texts around an argument (see formats.py), reading them (see argument_reader.py).
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from gpu_engine.api.conversation import Tool
from gpu_engine.api.errors import InvalidRequest

_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_ASSERTING = frozenset(
    {"type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength"}
    | {"minLength", "pattern", "format", "items", "prefixItems", "additionalItems", "maxItems", "minItems", "contains"}
    | {"uniqueItems", "minContains", "maxContains", "maxProperties", "minProperties", "required", "properties", "not"}
    | {"patternProperties", "additionalProperties", "propertyNames", "dependentRequired", "dependentSchemas", "if"}
    | {"dependencies", "unevaluatedItems", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "then", "else", "$ref"}
    | {"$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy"}
)
"""Keywords that say what a value may be. All others, such as `description`, say nothing of it."""
_OF_ROOT = frozenset({"type", "properties", "required", "additionalProperties"})
OF_STRINGS = frozenset({"pattern", "format", "minLength", "maxLength"})
_UNWRITABLE = frozenset("<>\"'\n\r=")
"""Characters that a parameter's name may not have, because the texts around an argument have them."""
_MAX_REFERENCES = 32
_MAX_WORK = 5000
"""Of all parameters of a function: alternatives, listed values, and 64 bytes of definitions that one of them needs."""


class Form(enum.Enum):
    """How the value of a parameter is written."""

    TEXT = enum.auto()
    """A string, as it is."""
    VALUES = enum.auto()
    """One of listed values, or a string with a condition: a string as it is, another value as JSON."""
    JSON = enum.auto()
    EITHER = enum.auto()
    """Any string as it is, or JSON of a type that has no further condition."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a function."""

    name: str
    form: Form
    required: bool = False
    schema: Any = None
    """For JSON, whose references lead to places in it. Else that of the string, or None if no other string is legal."""
    values: tuple[Any, ...] = ()
    """For VALUES."""
    plain: frozenset[str] = frozenset()
    """For EITHER: the types of JSON that it takes next to a string."""

    def texts(self) -> tuple[str, ...]:
        """Return the texts of the listed values."""
        return tuple(value if isinstance(value, str) else json.dumps(value) for value in self.values)

    def value(self, text: str) -> str:
        """Return the JSON of the value that is written as `text`."""
        match self.form:
            case Form.JSON:
                return text.strip()
            case Form.VALUES:
                found = next((v for v, spelled in zip(self.values, self.texts(), strict=True) if spelled == text), text)
                return json.dumps(found, ensure_ascii=False)
            case Form.EITHER if _fits_text(text, self.plain):
                return text.strip()
            case _:
                return json.dumps(text, ensure_ascii=False)


@dataclass(slots=True)
class SchemaRoot:
    """A function's schema while its parameters are read, with what may still be read of it."""

    schema: Any
    left: int = _MAX_WORK
    """What may still be read. References can name the same definitions again and again."""

    def spend(self, count: int, place: str) -> None:
        """Raises InvalidRequest once that is too much."""
        self.left -= count
        if self.left < 0:
            raise InvalidRequest(place, "the function has too many alternatives, values and definitions")


def parameters_of(tool: Tool, field: str, end: str, *, strict: bool) -> tuple[Parameter, ...]:
    """Return the parameters of a function in the order of its schema.

    `field` is the place of the schema in the request, `end` the text after an argument. `strict`: a value must fit its
    schema; otherwise a string may have what the text cannot hold it to. Raises InvalidRequest.
    """
    root, needed = properties_of(tool, field, strict=strict)
    properties = root.schema.get("properties", {})
    return tuple(
        _parameter(root, name, name in needed, f"{field}/properties/{name}", end, strict=strict) for name in properties
    )


def properties_of(tool: Tool, field: str, *, strict: bool) -> tuple[SchemaRoot, set[str]]:
    """Return the schema of a function, whose `properties` are an object, and the names of the required ones."""
    source: Any = json.loads(tool.source) if tool.source else {}
    others = asserting(source) - _OF_ROOT
    if others and strict:
        raise InvalidRequest(
            field, f"has {min(others)!r} at its root, and the model's format writes arguments one by one"
        )
    properties, required = source.get("properties", {}), source.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise InvalidRequest(field, "needs an object `properties` and an array `required`")
    if missing := [name for name in required if not isinstance(name, str) or name not in properties]:
        raise InvalidRequest(field, f"requires {missing[0]!r}, which is not one of its properties")
    return SchemaRoot(source), set(required)


def asserting(schema: dict[str, Any]) -> Set[str]:
    """Return the keywords of a schema that say what a value may be."""
    return schema.keys() & _ASSERTING


def _parameter(root: SchemaRoot, name: str, required: bool, place: str, end: str, *, strict: bool) -> Parameter:
    if not name or _UNWRITABLE & set(name):
        raise InvalidRequest(place, "the model's format cannot write this name of a parameter")
    schema = resolved(root.schema["properties"][name], root, place)
    values = listed_values(schema, root, place)
    if values is not None:
        return _of_values(Parameter(name, Form.VALUES, required, values=tuple(values)), place, end)
    types, plain = types_of(schema, root, place)
    if "string" not in types:
        return Parameter(
            name, Form.JSON, required, schema=with_definitions(root.schema["properties"][name], root, place)
        )
    if types == {"string"} and "string" not in plain and asserting(schema) <= {"type"} | OF_STRINGS:
        return Parameter(name, Form.TEXT, required, schema={**schema, "type": "string"})
    if "string" in plain or not strict:
        others = plain - {"string"}
        if not others:
            return Parameter(name, Form.TEXT, required, schema={"type": "string"})
        return Parameter(name, Form.EITHER, required, schema={"type": "string"}, plain=frozenset(others))
    if (mixed := _text_or_listed(schema, root, place)) is not None:
        return _of_values(Parameter(name, Form.VALUES, required, mixed[0], tuple(mixed[1])), place, end)
    raise InvalidRequest(
        place, "may be a string with a condition or another value, which the model's format cannot tell apart"
    )


def _of_values(parameter: Parameter, place: str, end: str) -> Parameter:
    """Return a parameter of listed values. Raises InvalidRequest for a value that the model's format cannot write."""
    if any(isinstance(value, float) and not math.isfinite(value) for value in parameter.values):
        raise InvalidRequest(place, "has a number that is too large")
    texts = parameter.texts()
    if not any(texts) and parameter.schema is None:
        raise InvalidRequest(place, "allows no value that has a text")
    if any(end.strip() in text for text in texts):
        raise InvalidRequest(place, f"has a value with {end.strip()!r}, which ends an argument in the model's format")
    return parameter


def with_definitions(schema: dict[str, Any], root: SchemaRoot, place: str) -> Any:
    """Return a schema in `root` with what its references lead to: some definitions, else the whole schema."""
    whole = root.schema
    wanted, known = list(dict.fromkeys(_references(schema))), set[str]()
    kept: dict[str, Any] = {}
    while wanted:
        pointer = wanted.pop()
        home, key = pointer[2:].rpartition("/")[::2]
        there = whole.get(home) if home in ("$defs", "definitions") and home not in schema else None
        if not pointer.startswith("#/") or not isinstance(there, dict) or key not in there:
            root.spend(len(json.dumps(whole)) // 64, place)
            return {"$defs": {"parameters": moved(whole, "#/$defs/parameters")}, **moved(schema, "#/$defs/parameters")}
        known.add(pointer)
        kept.setdefault(home, {})[key] = there[key]
        root.spend(1 + len(json.dumps(there[key])) // 64, place)
        wanted += dict.fromkeys(one for one in _references(there[key]) if one not in known and one not in wanted)
    return {**schema, **kept}


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for one in schema:
            yield from _references(one)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                yield value
            else:
                yield from _references(value)


def moved(schema: Any, to: str) -> Any:
    """Return a schema whose references lead to the same places after it has moved to the pointer `to`."""
    if isinstance(schema, list):
        return [moved(one, to) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: to + value[1:] if key == "$ref" and isinstance(value, str) and value.startswith("#") else moved(value, to)
        for key, value in schema.items()
    }


def resolved(schema: Any, root: SchemaRoot, place: str) -> dict[str, Any]:
    """Return a schema as an object that is no reference. Raises InvalidRequest."""
    for _ in range(_MAX_REFERENCES):
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise InvalidRequest(place, "must be a JSON Schema that is an object")
        pointer, parts = schema.get("$ref"), schema.get("allOf")
        if isinstance(parts, list) and len(parts) == 1 and asserting(schema) == {"allOf"}:
            schema = parts[0]
            continue
        if pointer is None:
            return schema
        if not isinstance(pointer, str) or asserting(schema) != {"$ref"}:
            raise InvalidRequest(place, "has keywords next to $ref, which the model's format cannot hold")
        schema = _at(pointer, root, place)
    raise InvalidRequest(place, "refers to itself")


def _at(pointer: str, root: SchemaRoot, place: str) -> Any:
    found = root.schema
    for step in pointer[1:].split("/")[1:] if pointer == "#" or pointer.startswith("#/") else [pointer]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            raise InvalidRequest(place, f"refers to {pointer!r}, which is not in the schema")
    return found


def branches_of(schema: dict[str, Any], root: SchemaRoot, place: str) -> list[dict[str, Any]] | None:
    """Return the branches of a schema that is nothing but a choice; None: it is something else."""
    keys = asserting(schema)
    if keys not in ({"anyOf"}, {"oneOf"}):
        return None
    branches = schema[min(keys)]
    if not isinstance(branches, list) or not branches:
        raise InvalidRequest(place, f"{min(keys)} must be a non-empty array")
    root.spend(len(branches), place)
    return [resolved(one, root, place) for one in branches]


def listed_values(schema: dict[str, Any], root: SchemaRoot, place: str, depth: int = 0) -> list[Any] | None:
    """Return the values that a schema lists; None: it is no list of values."""
    keys = asserting(schema)
    given = [schema["const"]] if "const" in keys else schema.get("enum")
    if isinstance(given, list) and keys - {"const", "enum"} <= {"type", "minLength", "maxLength"}:
        root.spend(len(given), place)
        allowed, bounds = (
            named_types(schema.get("type"), place),
            (schema.get("minLength", 0), schema.get("maxLength", math.inf)),
        )
        if not all(isinstance(bound, int | float) for bound in bounds):
            raise InvalidRequest(place, "minLength and maxLength must be numbers")
        also = schema.get("enum", given)
        return [
            value
            for value in given
            if _fits(value, allowed)
            and (not isinstance(value, str) or bounds[0] <= len(value) <= bounds[1])
            and any(type(one) is type(value) and one == value for one in (also if "const" in keys else [value]))
        ]
    if keys == {"type"} and schema["type"] in ("null", "boolean"):
        return [None] if schema["type"] == "null" else [True, False]
    branches = branches_of(schema, root, place) if depth < _MAX_REFERENCES else None
    if branches is None:
        return None
    found = [listed_values(one, root, place, depth + 1) for one in branches]
    if any(one is None for one in found):
        return None
    values = [value for one in found for value in one or ()]
    # Python takes True for 1, JSON Schema does not.
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


def _text_or_listed(schema: dict[str, Any], root: SchemaRoot, place: str) -> tuple[dict[str, Any], list[Any]] | None:
    """Return a schema of strings and listed values that are no strings, if `schema` allows just these."""
    types = schema.get("type")
    if isinstance(types, list) and asserting(schema) <= {"type"} | OF_STRINGS:
        text = {**schema, "type": "string"}
        branches = [text, *({"type": one} for one in types if one != "string")]
    else:
        branches = branches_of(schema, root, place) or []
    texts = [one for one in branches if one.get("type") == "string" and asserting(one) <= {"type"} | OF_STRINGS]
    listed = [listed_values(one, root, place) for one in branches if one not in texts]
    if len(texts) != 1 or any(one is None for one in listed):
        return None
    values = [value for one in listed for value in one or ()]
    return None if any(isinstance(value, str) for value in values) else (texts[0], values)


def types_of(schema: dict[str, Any], root: SchemaRoot, place: str, depth: int = 0) -> tuple[set[str], set[str]]:
    """Return the types that a schema may allow, and those whose values it allows all."""
    branches = branches_of(schema, root, place) if depth < _MAX_REFERENCES else None
    if branches is not None:
        types, plain, twice = set[str](), set[str](), set[str]()
        for one in branches:
            some, all_of = types_of(one, root, place, depth + 1)
            numbers = {"number", "integer"}  # an integer is both
            twice |= (some & types) | (numbers if some & numbers and types & numbers else set())
            types |= some
            plain |= all_of
        return types, plain - twice if "oneOf" in schema else plain
    types = named_types(schema.get("type"), place)
    return types, types if asserting(schema) <= {"type"} else set()


def named_types(types: Any, place: str) -> set[str]:
    """Return the types that the keyword `type` names; all for None."""
    if types is None:
        return set(_TYPES)
    named = {types} if isinstance(types, str) else {str(one) for one in types} if isinstance(types, list) else set()
    if not named or not named <= _TYPES:
        raise InvalidRequest(place, f'has "type": {json.dumps(types)}, which JSON Schema does not know')
    return named


def _fits(value: Any, types: Set[str]) -> bool:
    kind = _type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _fits_text(text: str, types: frozenset[str]) -> bool:
    """Return whether a text is the JSON of one of `types`, which are not strings."""
    try:
        return _fits(json.loads(text, parse_constant=_no_constant), types)
    except (ValueError, RecursionError):
        return False


def _no_constant(name: str) -> Any:
    raise ValueError(name)
