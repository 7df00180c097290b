"""Numbers of a JSON Schema for a library that reads each as a double, and an integer's bounds into 64 bits.

Invariant: what the library accepts under a bound written here, the schema's own bound accepts. A bound or a value that
cannot be written so is a part that is not enforced.

Not responsible for: bounds with a fraction, which may be read as the next double.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

from grammar_service.backends.json_schema.unenforced import Unenforced
from grammar_service.backends.json_schema.walk import Schema, subschemas

_EXACT = 1 << 53
"""Doubles hold every integer up to here."""
_END = 1 << 63
_LEAST = -_END + 1024
"""The least double that the library can negate in 64 bits."""


def unwritable_number(value: Any) -> str | None:
    """Return why a number, or one within `value`, would be written as another one; None if none is."""
    if isinstance(value, list | dict):
        within = value if isinstance(value, list) else value.values()
        return next((why for child in within if (why := unwritable_number(child))), None)
    if isinstance(value, float) and _as_read(value) != value:
        return f"this backend reads {value} as {_as_read(value)}"
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) <= _EXACT:
        return None
    try:
        double = float(value)
    except OverflowError:
        return None  # the library refuses it
    if int(double) == value and (abs(value) < _END or Fraction(repr(double)) == value):
        return None
    return f"the integer {value} is none that this backend can write: it reads numbers as doubles"


def _as_read(value: float) -> float:
    """Return the double that the library reads: it rounds the digits, and then the digits times a power of ten."""
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int), "JSON has no infinity"
    read, power = float(int("".join(map(str, digits)))), float(f"1e{abs(exponent)}")
    return math.copysign(read * power if exponent >= 0 else read / power, -1 if sign else 1)


def round_bounds(schema: Any, path: str) -> list[Unenforced]:
    """Round the bounds of integers in the schema at `path` to doubles within them. Return those that are none.

    The schema has no complements that a smaller bound would make larger.
    """
    found: list[Unenforced] = []
    for where, node in subschemas(schema, path):
        for keyword, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1), ("minimum", 1), ("maximum", -1)):
            value = node.get(keyword)
            if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) <= _EXACT:
                continue
            if not _is_integer(node):
                node[keyword] = _inwards(value, sign)
                continue
            if sign * value >= _END:
                found.append(Unenforced(where, keyword, f"{value} is beyond the 64 bits of this backend's bounds"))
                del node[keyword]
            elif keyword.startswith("exclusive"):
                del node[keyword]
                inclusive, least = ("minimum", max) if sign > 0 else ("maximum", min)
                node[inclusive] = least(node.get(inclusive, int(value) + sign), int(value) + sign)
            elif sign > 0:
                node[keyword] = max(_inwards(value, sign), _LEAST)
            elif value < _END - 1:  # the library takes a larger one as this one
                node[keyword] = _inwards(value, sign)
    return found


def _inwards(value: float, sign: int) -> float:
    """Return the nearest double that is not below `value`, or not above it where `sign` is -1."""
    try:
        double = float(value)
    except OverflowError:
        return value  # the library refuses it
    if double == value:
        return value
    return int(double if sign * double > sign * value else math.nextafter(double, sign * math.inf))


def _is_integer(node: Schema) -> bool:
    kinds = node.get("type", ())
    return "integer" in kinds and "number" not in kinds
