"""JSON Schemas drawn at random: objects, arrays, unions, references, patterns and ranges, nested.

Invariant: equal seeds give equal schemas, and every schema has an instance.
Not responsible for: prompts, judging.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]

_NAMES = ("name", "age", "city", "tags", "items", "status", "id", "notes", "price", "address", "email", "x", "children")
_PATTERNS = ("^[A-Z]{3}-[0-9]{4}$", "^[a-z]+$", "^[0-9]{4}-[0-9]{2}-[0-9]{2}$", "^(yes|no|maybe)$")


def random_schema(seed: int) -> Json:
    """Return a schema of up to four levels."""
    rng = random.Random(seed)
    if rng.random() < 0.15:
        return _tree(rng)
    return _object(rng, rng.randint(1, 3)) if rng.random() < 0.8 else _schema(rng, 3)


def _schema(rng: random.Random, depth: int) -> Json:
    makers: list[Callable[[random.Random], Json]] = [
        _string,
        _number,
        _constant,
        _pattern,
        lambda r: {"type": "boolean"},
        lambda r: {"type": "null"},
    ]
    if depth:
        makers += [
            lambda r: _object(r, depth - 1),
            lambda r: _object(r, depth - 1),
            lambda r: _array(r, depth - 1),
            lambda r: {"anyOf": [_schema(r, depth - 1), {"type": "null"}]},
            lambda r: {"anyOf": [_object(r, depth - 1), _array(r, depth - 1)]},
        ]
    return rng.choice(makers)(rng)


def _object(rng: random.Random, depth: int) -> Json:
    names = rng.sample(_NAMES, rng.randint(1, 5))
    required = [name for name in names if rng.random() < 0.6]
    schema: Json = {"type": "object", "properties": {name: _schema(rng, depth) for name in names}, "required": required}
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> Json:
    schema: Json = {"type": "array", "items": _schema(rng, depth)}
    if rng.random() < 0.5:
        schema["minItems"] = rng.randint(1, 3)
    if rng.random() < 0.3:
        schema["maxItems"] = rng.randint(3, 6)
    return schema


def _string(rng: random.Random) -> Json:
    schema: Json = {"type": "string"}
    if rng.random() < 0.3:
        schema["minLength"] = rng.randint(1, 30)
    if rng.random() < 0.2:
        schema["maxLength"] = rng.randint(30, 80)
    return schema


def _number(rng: random.Random) -> Json:
    if rng.random() < 0.5:
        return {"type": rng.choice(("integer", "number"))}
    low = rng.randint(-50, 2000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(1, 5000)}


def _constant(rng: random.Random) -> Json:
    values = rng.sample(["red", "green", "a rather long value", "pending review", "done", 7, None, True], 3)
    return {"enum": values} if rng.random() < 0.8 else {"const": values[0]}


def _pattern(rng: random.Random) -> Json:
    return {"type": "string", "pattern": rng.choice(_PATTERNS)}


def _tree(rng: random.Random) -> Json:
    node: Json = {
        "type": "object",
        "properties": {
            "value": _schema(rng, 0),
            "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            "right": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["value", *rng.sample(["left", "right"], rng.randint(0, 2))],
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}
