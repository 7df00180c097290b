"""Strings that are written without quotation marks, up to the text that ends them.

A JSON region of a structural tag with the style `text` is such a string. Its schema has the type `string`, and may have
`pattern`, `format`, `minLength` and `maxLength`.
Invariant: a text that matches all the expressions of `expressions` is a value of the schema.
Not responsible for: where the text ends, which no expression may run over (see the backends).
"""

from __future__ import annotations

from typing import Any

from grammar_service.backends.json_schema.strings.string_formats import KNOWN, exact_pattern
from grammar_service.backends.json_schema.unenforced import Unenforced
from grammar_service.errors import InvalidGrammar

STYLE = "text"
"""The style of a region that is a string without quotation marks."""

_ANY = r"[\s\S]*"


def is_text(node: Any) -> bool:
    """Return whether a format of a structural tag is a string without quotation marks."""
    return isinstance(node, dict) and node.get("type") == "json_schema" and node.get("style") == STYLE


def expressions(
    schema: Any, place: str, *, longest: int = 0, strict: bool = False
) -> tuple[list[tuple[str, str]], list[Unenforced]]:
    """Return the expressions that a whole text must match, as (keyword, ECMA-262), and what has no effect.

    `longest` is `max_string_length`, 0 for none; `strict` is `strict_formats`. Raises InvalidGrammar with the place.
    """
    if not isinstance(schema, dict) or schema.get("type") != "string":
        raise InvalidGrammar(f"{place}: the style {STYLE!r} needs a schema of strings")
    found: list[tuple[str, str]] = []
    ignored: list[Unenforced] = []
    if (pattern := schema.get("pattern")) is not None:
        if not isinstance(pattern, str):
            raise InvalidGrammar(f"{place}/pattern: must be a string")
        found.append(("pattern", _whole(pattern)))
    if (name := schema.get("format")) is not None:
        if name in KNOWN:
            found.append(("format", _whole(exact_pattern(name, lower_case=True))))
        else:
            why = f"{name!r} is not a format that is enforced; it has no effect"
            ignored.append(Unenforced(place, "format", why, is_annotation=not strict))
    least, most = (_length(schema, key, place) for key in ("minLength", "maxLength"))
    if longest and (most is None or longest < most):
        most = longest
    if most is not None and (least or 0) > most:
        raise InvalidGrammar(f"{place}: no string of at least {least} and at most {most} characters exists")
    if least or most is not None:
        keyword = "minLength" if most is None else "maxLength"
        found.append((keyword, rf"[\s\S]{{{least or 0},{'' if most is None else most}}}"))
    return found, ignored


def _length(schema: dict[str, Any], key: str, place: str) -> int | None:
    value = schema.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise InvalidGrammar(f"{place}/{key}: must be a whole number that is not negative")
    return int(value)


def _whole(pattern: str) -> str:
    """Return a pattern, which is searched for, as an expression of the whole text; of its texts it may lose some."""
    head = "" if pattern.startswith("^") else _ANY
    before = pattern.removesuffix("$")
    is_anchored = before != pattern and (len(before) - len(before.rstrip("\\"))) % 2 == 0
    tail = "" if is_anchored else _ANY
    return f"{head}(?:{pattern}){tail}"
