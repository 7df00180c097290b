"""Python types as JSON Schemas, and JSON answers as values of these types.

The invariant: `Schema.parse` returns what the schema's text describes, or raises ValueError. A type that has no JSON
Schema here is a TypeError that names the place; nothing becomes "anything" silently.

A model of pydantic (or a `TypeAdapter`) is known by its methods, so that pydantic is no dependency. A model may be
within another type: `list[Model]`. Everything else is converted here: str, int, float, bool, None, `Literal`, `Enum`,
`datetime`, `date`, `time`, `UUID`, `X | Y`, `list`, `set`, `frozenset`, `tuple`, `Sequence`, `dict[str, X]`,
`Mapping[str, X]`, dataclasses, TypedDicts, `Any`, and `Annotated[X, Keywords(maxLength=40)]`, which adds keywords. A
dataclass or TypedDict inside another type goes to `$defs`, so types may be recursive.

Not responsible for: what the server enforces of a schema (docs/grammars.md of the project).
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import json
import types
import typing
import uuid
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    is_typeddict,
)

Json = dict[str, Any]
V = TypeVar("V")

_PLAIN: dict[object, Json] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    None: {"type": "null"},
    type(None): {"type": "null"},
    Any: {},
    datetime: {"type": "string", "format": "date-time"},
    date: {"type": "string", "format": "date"},
    time: {"type": "string", "format": "time"},
    uuid.UUID: {"type": "string", "format": "uuid"},
}
_FROM_TEXT: dict[object, Callable[[str], Any]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    uuid.UUID: uuid.UUID,
}
_ARRAYS: dict[object, type[Any]] = {
    list: list,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.Iterable: list,
    collections.abc.Set: set,
}
_OBJECTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_UNIONS = (Union, types.UnionType)


class Keywords:
    """Keywords of JSON Schema for `Annotated`: `Annotated[str, Keywords(maxLength=40)]`.

    A mapping does the same in some places, but Python cannot hash it, and then refuses it within `list` or `|`.
    """

    __slots__ = ("values",)

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keywords) and self.values == other.values

    def __hash__(self) -> int:
        return hash(json.dumps(self.values, sort_keys=True))

    def __repr__(self) -> str:
        return f"Keywords({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"


@dataclasses.dataclass(frozen=True, slots=True)
class Schema:
    """A JSON Schema and the way back from a JSON text to a value."""

    text: str
    """The schema, as JSON text."""
    parse: Callable[[str], Any]
    """Returns the value of a JSON text. Raises ValueError."""
    closed: bool = False
    """It was made from a type, whose objects have no other members unless the type says so."""


def schema_of(source: object) -> Schema:
    """Return the schema of a type, of a mapping that is a JSON Schema, or of a JSON Schema's text.

    Raises TypeError for a type without a schema, ValueError for a text that is no JSON.
    """
    if isinstance(source, str):
        try:
            json.loads(source)
        except ValueError as error:
            raise ValueError(f"schema: is no JSON: {error}") from None
        return Schema(source, json.loads)
    if isinstance(source, Mapping):
        return Schema(json.dumps(source), json.loads)
    for describe, validate in (("model_json_schema", "model_validate_json"), ("json_schema", "validate_json")):
        if callable(getattr(source, describe, None)) and callable(getattr(source, validate, None)):
            return Schema(json.dumps(getattr(source, describe)()), getattr(source, validate), closed=True)
    if inspect.isclass(source) and issubclass(source, dict | list | set) and not is_typeddict(source):
        raise TypeError(f"schema: {source.__name__} does not say what is in it; write {source.__name__}[...]")
    document = _Converter().document(source)
    return Schema(json.dumps(document), lambda text: value_of(json.loads(text), source, "answer"), closed=True)


def parameters_of(function: Callable[..., Any]) -> Json:
    """Return the JSON Schema of an object with a function's parameters. Raises TypeError that names a parameter."""
    hints = _hints(function)
    converter = _Converter()
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        where = f"{function.__name__}({name})"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{where}: a tool's parameters have names; *, / and ** cannot be described")
        if name not in hints:
            raise TypeError(f"{where}: has no type")
        properties[name] = converter.schema(hints[name], where)
        if parameter.default is parameter.empty:
            required.append(name)
    return converter.with_definitions(_object(properties, required))


class _Converter:
    """The schema of one document, with the definitions that it refers to."""

    def __init__(self) -> None:
        self._names: dict[type[Any], str] = {}
        self._definitions: Json = {}

    def document(self, source: object) -> Json:
        schema = self.schema(source, getattr(source, "__name__", str(source)))
        name = self._names.get(cast(type[Any], source)) if inspect.isclass(source) else None
        if name is not None and json.dumps(self._definitions).count(json.dumps(_reference(name))) == 0:
            schema = self._definitions.pop(name)  # nothing refers to the outermost type
        return self.with_definitions(schema)

    def with_definitions(self, schema: Json) -> Json:
        return schema | ({"$defs": self._definitions} if self._definitions else {})

    def schema(self, source: Any, where: str) -> Json:
        """Return the schema of a type; `where` names its place in an error."""
        origin, arguments = get_origin(source), get_args(source)
        if origin in (Annotated, Required, NotRequired):
            schema = self.schema(arguments[0], where)
            for extra in arguments[1:]:
                if isinstance(extra, Keywords | Mapping):
                    schema = schema | dict(extra.values if isinstance(extra, Keywords) else extra)
            return schema
        plain = _known(_PLAIN, source)
        if plain is not None:
            return dict(plain)
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin in _UNIONS:
            return {"anyOf": [self.schema(each, where) for each in arguments]}
        if inspect.isclass(source) and issubclass(source, enum.Enum):
            return {"enum": [member.value for member in source]}
        if origin is tuple or origin in _ARRAYS:
            return self._array(origin, arguments, where)
        if origin in _OBJECTS:
            if arguments[0] is not str:
                raise TypeError(f"{where}: the keys of a JSON object are str, not {_name(arguments[0])}")
            return {"type": "object", "additionalProperties": self.schema(arguments[1], where)}
        if _is_model(source):
            return self._model(source, where)
        if inspect.isclass(source) and (dataclasses.is_dataclass(source) or is_typeddict(source)):
            return self._named(source)
        raise TypeError(f"{where}: {_name(source)} has no JSON Schema")

    def _array(self, origin: object, arguments: tuple[Any, ...], where: str) -> Json:
        if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
            items = [self.schema(each, f"{where}[{i}]") for i, each in enumerate(arguments)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        unique = {"uniqueItems": True} if _ARRAYS.get(origin) in (set, frozenset) else {}
        return {"type": "array", "items": self.schema(arguments[0], f"{where}[]")} | unique

    def _model(self, source: Any, where: str) -> Json:
        schema = dict(source.model_json_schema())
        for name, definition in schema.pop("$defs", {}).items():
            if self._definitions.setdefault(name, definition) != definition:
                raise TypeError(f"{where}: another type of the schema is named {name} as well")
        return schema

    def _named(self, source: type[Any]) -> Json:
        if source not in self._names:
            name = source.__name__
            while name in self._definitions:
                name += "_"
            self._names[source] = name
            self._definitions[name] = {}  # keeps the order of first use, and ends a recursion
            properties, required = {}, []
            for field, kind, needed in _fields(source):
                properties[field] = self.schema(kind, f"{source.__name__}.{field}")
                if needed:
                    required.append(field)
            self._definitions[name] = _object(properties, required)
        return _reference(self._names[source])


def value_of(value: Any, source: Any, where: str) -> Any:
    """Return a JSON value as a value of a type. Raises ValueError that names the place."""
    origin, arguments = get_origin(source), get_args(source)
    if origin in (Annotated, Required, NotRequired):
        return value_of(value, arguments[0], where)
    if origin in _UNIONS:
        return _first_that_fits(value, arguments, where)
    from_text = _known(_FROM_TEXT, source)
    if from_text is not None and isinstance(value, str):
        return from_text(value)
    if inspect.isclass(source) and issubclass(source, enum.Enum):
        return source(value)
    if (origin is tuple or origin in _ARRAYS) and isinstance(value, list):
        return _array_of(value, origin, arguments, where)
    if origin in _OBJECTS and isinstance(value, dict):
        return {key: value_of(each, arguments[1], f"{where}.{key}") for key, each in value.items()}
    if _is_model(source):
        return source.model_validate_json(json.dumps(value))
    if inspect.isclass(source) and (dataclasses.is_dataclass(source) or is_typeddict(source)):
        return _named_of(value, source, where)
    if not _fits(value, source):
        raise ValueError(f"{where}: {json.dumps(value)} is no {_name(source)}")
    return float(value) if source is float else value


def _is_model(source: Any) -> bool:
    """Return whether a type is a model of pydantic."""
    methods = ("model_json_schema", "model_validate_json")
    return inspect.isclass(source) and all(callable(getattr(source, name, None)) for name in methods)


def _fits(value: Any, source: Any) -> bool:
    if get_origin(source) is Literal:
        return any(value == each and type(value) is type(each) for each in get_args(source))
    if source is float:
        return type(value) in (int, float)
    if source in (None, type(None)):
        return value is None
    return source is Any or type(value) is source


def _first_that_fits(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    problems = []
    for kind in kinds:
        try:
            return value_of(value, kind, where)
        except (ValueError, KeyError) as error:
            problems.append(str(error))
    raise ValueError("; ".join(problems))


def _array_of(value: list[Any], origin: Any, arguments: tuple[Any, ...], where: str) -> Any:
    if origin is not tuple:
        return _ARRAYS[origin](value_of(each, arguments[0], f"{where}[{i}]") for i, each in enumerate(value))
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(value_of(each, arguments[0], f"{where}[{i}]") for i, each in enumerate(value))
    if len(value) != len(arguments):
        raise ValueError(f"{where}: has {len(value)} items, not {len(arguments)}")
    pairs = zip(value, arguments, strict=True)
    return tuple(value_of(each, kind, f"{where}[{i}]") for i, (each, kind) in enumerate(pairs))


def _named_of(value: Any, source: type[Any], where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {json.dumps(value)} is no {source.__name__}")
    fields = {name: (kind, needed) for name, kind, needed in _fields(source)}
    for name, (_, needed) in fields.items():
        if needed and name not in value:
            raise ValueError(f"{where}: has no {name}")
    if unknown := sorted(set(value) - set(fields)):
        raise ValueError(f"{where}: {source.__name__} has no {unknown[0]}")
    return source(**{name: value_of(each, fields[name][0], f"{where}.{name}") for name, each in value.items()})


def _fields(source: type[Any]) -> list[tuple[str, Any, bool]]:
    """Return (name, type, whether it must be given) of each field of a dataclass or a TypedDict."""
    hints = _hints(source)
    if is_typeddict(source):
        # `__required_keys__` does not see Required and NotRequired where annotations are strings.
        marked = {Required: True, NotRequired: False}
        return [
            (name, kind, marked.get(get_origin(kind), name in source.__required_keys__)) for name, kind in hints.items()
        ]
    return [
        (
            field.name,
            Annotated[hints[field.name], Keywords(**field.metadata)] if field.metadata else hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(source)
        if field.init
    ]


def _known(table: Mapping[object, V], source: object) -> V | None:
    try:
        return table.get(source)
    except TypeError:  # a type with a mapping in its Annotated has no hash
        return None


def _hints(source: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(source, include_extras=True)
    except NameError as error:
        raise TypeError(f"{source.__name__}: {error}; types that are annotated by name stand in the module") from error


def _object(properties: Json, required: list[str]) -> Json:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _reference(name: str) -> Json:
    return {"$ref": f"#/$defs/{name}"}


def _name(source: object) -> str:
    return source.__name__ if inspect.isclass(source) else str(source)
