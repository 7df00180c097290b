"""Changes to an input that keep its structure: of bytes, of JSON texts, and of protobuf messages.

Invariant: a function of the input and the random numbers alone, so a seed repeats it.
Not responsible for: which change finds something new (libFuzzer keeps the inputs that do).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    15,
    16,
    31,
    32,
    255,
    256,
    1 << 31,
    (1 << 31) - 1,
    (1 << 63) - 1,
    1 << 64,
    0.5,
    -0.0,
    1e308,
)
_TEXTS = (
    "",
    " ",
    "a",
    "\0",
    "\n",
    '"',
    "\\",
    "\x7f",
    "\u00e9",
    "\u2028",
    "\ufffd",
    "\U0001f600",
    "x" * 300,
    "<|end|>",
    "[",
    "(?i)a",
)
_DEEPEST = 60
"""Levels that `json_value` walks down."""


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Return `data` with one to four bytes, or runs of bytes, changed, removed, repeated or moved."""
    out = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(out))
        end = min(len(out), at + random.choice((1, 1, 2, 4, 16, 64)))
        match random.randrange(5):
            case 0:
                out[at:end] = bytes(random.randrange(256) for _ in range(end - at or 1))
            case 1:
                del out[at:end]
            case 2:
                out[at:at] = out[at:end] * random.randint(1, 4)
            case 3:
                other = random.randint(0, len(out))
                out[other:other] = out[at:end]
            case _:
                out[at:at] = random.choice(_TEXTS).encode()
    return bytes(out)


def mutate_text(data: bytes, random: Random, words: Sequence[str]) -> bytes:
    """Return the text `data` with one of `words` put in or in place of others; sometimes as `mutate_bytes`."""
    if not words or random.random() < 0.3:
        return mutate_bytes(data, random)
    text = data.decode("utf-8", "replace")
    for _ in range(random.randint(1, 3)):
        at = random.randint(0, len(text))
        end = min(len(text), at + random.choice((0, 0, 1, 3, 10)))
        text = text[:at] + random.choice(words) + text[end:]
    return text.encode("utf-8", "replace")


def mutate_json(data: bytes, random: Random, words: Sequence[str]) -> bytes:
    """Return the JSON text `data` with some of its values changed. `words` are names and strings that have a meaning.

    Text that is no JSON is changed as text.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_text(data, random, words)
    if random.random() < 0.1:
        return mutate_text(data, random, words)
    for _ in range(random.randint(1, 3)):
        value = _changed(value, random, words, _DEEPEST)
    return json.dumps(value, ensure_ascii=random.random() < 0.5).encode("utf-8", "replace")


def json_value(random: Random, words: Sequence[str], depth: int = 2) -> Any:
    """Return a random JSON value whose strings and names are often of `words`."""
    kind = random.randrange(8 if depth else 5)
    if kind == 0:
        return random.choice((None, True, False))
    if kind == 1:
        return random.choice(_NUMBERS)
    if kind == 2:
        return random.choice(_TEXTS)
    if kind in (3, 4):
        return random.choice(words or _TEXTS)
    count = random.choice((0, 1, 1, 2, 3))
    if kind == 5:
        return [json_value(random, words, depth - 1) for _ in range(count)]
    return {_name(random, words): json_value(random, words, depth - 1) for _ in range(count)}


def _name(random: Random, words: Sequence[str]) -> str:
    return random.choice(words) if words and random.random() < 0.9 else random.choice(_TEXTS)


def _changed(value: Any, random: Random, words: Sequence[str], depth: int) -> Any:
    """Return the value with one place at or below it changed."""
    inner = isinstance(value, dict | list) and len(value) > 0
    if inner and depth and random.random() < 0.75:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = random.choice(keys)
        if isinstance(value, dict):
            return {name: _changed(v, random, words, depth - 1) if name == key else v for name, v in value.items()}
        return [_changed(v, random, words, depth - 1) if i == key else v for i, v in enumerate(value)]
    match random.randrange(6):
        case 0 if isinstance(value, dict):
            return {**value, _name(random, words): json_value(random, words)}
        case 1 if isinstance(value, dict) and value:
            gone = random.choice(list(value))
            return {name: v for name, v in value.items() if name != gone}
        case 2 if isinstance(value, list):
            return [*value, json_value(random, words)]
        case 3:
            return {_name(random, words): value}
        case 4:
            return [value] * random.choice((1, 2))
        case _:
            return json_value(random, words)


def mutate_message(data: bytes, random: Random, kind: type[Message], words: Sequence[str]) -> bytes:
    """Return the message `data` of type `kind` with some of its fields set to other values; other bytes as bytes."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return mutate_bytes(data, random)
    if random.random() < 0.1:
        return mutate_bytes(data, random)
    for _ in range(random.randint(1, 4)):
        _set_field(message, random, words, _DEEPEST)
    # Entries of maps come in the order of a hash that each process has for itself.
    return message.SerializeToString(deterministic=True)


def _set_field(message: Message, random: Random, words: Sequence[str], depth: int) -> None:
    fields: list[FieldDescriptor] = [*message.DESCRIPTOR.fields]
    if not fields:
        return
    field = random.choice(fields)
    if random.random() < 0.15:
        message.ClearField(field.name)
        return
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_entry(getattr(message, field.name), field.message_type, random, words, depth)
        return
    if field.message_type is not None and depth:
        held = getattr(message, field.name)
        inner = held if not field.is_repeated else random.choice(held) if held and random.random() < 0.7 else held.add()
        if not field.is_repeated:
            inner.SetInParent()
        _set_field(inner, random, words, depth - 1)
    elif field.message_type is None and field.is_repeated:
        getattr(message, field.name).extend(_scalar(field, random, words) for _ in range(random.choice((1, 1, 2, 40))))
    elif field.message_type is None:
        setattr(message, field.name, _scalar(field, random, words))


def _set_entry(held: Any, entry: Descriptor, random: Random, words: Sequence[str], depth: int) -> None:
    """Set an entry of a map: one that it has, or another."""
    known = sorted(held)
    again = known and random.random() < 0.5
    key = random.choice(known) if again else _scalar(entry.fields_by_name["key"], random, words)
    value = entry.fields_by_name["value"]
    if value.message_type is None:
        held[key] = _scalar(value, random, words)
    elif depth:
        _set_field(held[key], random, words, depth - 1)


_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def _scalar(field: FieldDescriptor, random: Random, words: Sequence[str]) -> Any:
    kind = field.cpp_type
    if kind in _RANGES:
        low, high = _RANGES[kind]
        return min(high, max(low, int(random.choice((*_NUMBERS, low, high, random.randint(0, 300))))))
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return random.choice((0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan")))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return random.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        assert field.enum_type is not None
        return random.choice([*(value.number for value in field.enum_type.values), 99, -1])
    text = random.choice(words) if words and random.random() < 0.7 else random.choice(_TEXTS)
    if random.random() < 0.1:
        text = json.dumps(json_value(random, words))
    encoded = text.encode("utf-8", "replace")
    return encoded if field.type == FieldDescriptor.TYPE_BYTES else encoded.decode()
