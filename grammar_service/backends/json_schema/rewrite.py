"""Rewrites a JSON Schema so that every library reads it alike.

Patterns are written in portable notation, keywords without effect are removed, and `oneOf` becomes `anyOf` where its
branches exclude each other.
Invariant: the rewritten schema has the same meaning, except for the parts that are returned: a pattern that cannot be
rewritten is taken out, and a count of members that repeated names would bypass remains.
Not responsible for: keywords that one library ignores (see that backend).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grammar_service.backends.json_schema.doubles import unwritable_number
from grammar_service.backends.json_schema.exclusive import exclusive
from grammar_service.backends.json_schema.strings.ecma_pattern import NotPortable
from grammar_service.backends.json_schema.unenforced import Unenforced
from grammar_service.backends.json_schema.walk import Schema, subschemas

_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
_NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keyword -> the keyword without which it has no effect."""
_SOMETIMES_WITHOUT = frozenset({*_WITHOUT_EFFECT, *_NEEDS})


def rewrite(schema: Any, path: str, portable: Callable[[str], str]) -> list[Unenforced]:
    """Rewrite the schema at `path` in place. Return the parts that would not be enforced.

    `portable` returns a pattern in portable notation or raises NotPortable.
    """
    found: list[Unenforced] = []
    for where, node in list(subschemas(schema, path)):
        _remove_without_effect(node)
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            try:
                node["pattern"] = portable(pattern)
            except NotPortable as problem:
                found.append(Unenforced(where, "pattern", f"{pattern!r}: {problem}"))
                del node["pattern"]
        members = node.get("patternProperties")
        if isinstance(members, dict):
            node["patternProperties"] = _names(members, where, portable, found)
        found += _repeated(where, node)
        branches = node.get("oneOf")
        if isinstance(branches, list) and branches and "anyOf" not in node and exclusive(branches, schema):
            # At the same position, because the order of a schema's keys has a meaning.
            items = [("anyOf" if key == "oneOf" else key, value) for key, value in node.items()]
            node.clear()
            node.update(items)
    return found


def take_out_unwritable_values(schema: Any, path: str, unwritable: Sequence[tuple[int, int]]) -> list[Unenforced]:
    """Take out of `const` and `enum` the values with a string or a number that a library cannot write.

    Return what was taken out. Names of members are not looked at: the library that needs this can write any name.
    `unwritable`: as in `Dialect`.
    """
    found: list[Unenforced] = []
    wanted = re.compile("[" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in unwritable) + "]")

    def problem(value: Any) -> str | None:
        char = next((place[0] for text in _strings(value) if (place := wanted.search(text))), None)
        if char is None:
            return unwritable_number(value)
        return f"holds the character U+{ord(char):04X}, which this backend does not write in a string"

    for where, node in list(subschemas(schema, path)):
        if "const" in node and (why := problem(node["const"])):
            found.append(Unenforced(where, "const", why))
            del node["const"]
        values = node.get("enum")
        if isinstance(values, list):
            problems = [problem(value) for value in values]
            found += [Unenforced(where, f"enum/{i}", why) for i, why in enumerate(problems) if why]
            kept = [value for value, why in zip(values, problems, strict=True) if not why]
            if kept or not values:
                node["enum"] = kept
            else:
                del node["enum"]
    return found


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for child in value if isinstance(value, list) else value.values():
            yield from _strings(child)


def _remove_without_effect(node: Schema) -> None:
    if _SOMETIMES_WITHOUT.isdisjoint(node):
        return
    for keyword, values in _WITHOUT_EFFECT.items():
        # The types are compared too: in Python 0 equals False, but it is another value to a library.
        if keyword in node and any(type(node[keyword]) is type(each) and node[keyword] == each for each in values):
            del node[keyword]
    for keyword, other in _NEEDS.items():
        if other not in node:
            node.pop(keyword, None)


def _names(
    members: dict[str, Any], where: str, portable: Callable[[str], str], found: list[Unenforced]
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for pattern, child in members.items():
        try:
            out[portable(pattern)] = child
        except NotPortable as problem:
            found.append(Unenforced(where, "patternProperties", f"{pattern!r}: {problem}"))
    return out


def _repeated(where: str, node: Schema) -> list[Unenforced]:
    """Find counts of members that repeated names bypass: a JSON reader counts a repeated name once."""
    least, required = node.get("minProperties"), node.get("required")
    distinct = 1 + (len(required) if isinstance(required, list) else 0)
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if isinstance(least, int | float) and least > distinct and not closed:
        return [Unenforced(where, "minProperties", f"above {distinct} is not enforced, because a name may occur twice")]
    return []
