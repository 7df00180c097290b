"""Values and items of a JSON answer, from the events of its stream.

The invariant: pure, and the same for both clients. A value that has ended is the one that the whole answer has at its
place, unless its key occurs again in the same object.

Not responsible for: reading the stream (see client.py and async_client.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin

from lockstep_client.answers import Delta, ValueEvent, ValueEventKind
from lockstep_client.errors import NotParsed
from lockstep_client.schemas import schema_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a JSON answer that begins, or has ended and is final."""

    kind: ValueEventKind
    pointer: str
    """The value's place, as a JSON Pointer (RFC 6901)."""
    type: str
    """"object", "array", "string", "number", "boolean" or "null"."""
    value: Any
    """The value; None while it only begins."""
    index: int
    """Which of the n sequences, from 0."""
    logprob: float | None
    """The sum over the value's tokens; None unless log-probabilities were asked for and the value has ended."""
    tokens: int
    """The number of those tokens."""


class Values:
    """Makes values of the events of one request."""

    def __init__(self) -> None:
        self._open: dict[int, list[tuple[str, Any]]] = {}
        """By sequence: the pointers and values of the containers that have begun and not ended."""

    def take(self, delta: Delta) -> list[Value]:
        """Return the values of a delta's events. Raises NotParsed, for a number with more digits than Python reads."""
        return [
            Value(each.kind, each.pointer, each.type, self._value(each, delta.index), delta.index, each.logprob,
                  each.tokens)
            for each in delta.value_events
        ]  # fmt: skip

    def _value(self, event: ValueEvent, index: int) -> Any:
        containers = self._open.setdefault(index, [])
        is_container = event.type in ("object", "array")
        if event.kind is ValueEventKind.STARTED:
            if is_container:
                containers.append((event.pointer, {} if event.type == "object" else []))
            return None
        if event.kind is ValueEventKind.ITEM:
            return item_of(json.loads, event.value_json or "")
        built = containers.pop()[1] if is_container else None
        value = built if event.value_json is None else item_of(json.loads, event.value_json)
        if containers:
            pointer, parent = containers[-1]
            if isinstance(parent, dict):
                parent[event.pointer[len(pointer) + 1 :].replace("~1", "/").replace("~0", "~")] = value
            else:
                parent.append(value)
        return value


def parser_of_items(schema: object, item: object, items_of: str) -> Callable[[str], Any]:
    """Return what makes an item of its JSON text. Raises TypeError that names a wrong argument.

    Args:
        schema: the schema of the whole answer, or None.
        item: the type of the items; None: they are `schema`'s, or JSON.
        items_of: the JSON Pointer of the array.

    """
    if item is not None:
        return schema_of(item).parse
    array = get_args(schema)[0] if get_origin(schema) is Annotated else schema
    if not items_of and get_origin(array) is list:
        return schema_of(get_args(array)[0]).parse
    if schema is not None and schema_of(schema).closed:
        raise TypeError(
            "item: is required, the type of the items, unless the schema is list[...] and items_of is empty"
        )
    return json.loads


def item_of(parse: Callable[[str], T], text: str) -> T:
    """Return a value or an item. Raises NotParsed."""
    try:
        return parse(text)
    except ValueError as error:
        raise NotParsed(f"a value of the answer is none of its type: {error}") from error
