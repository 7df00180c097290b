"""Words of a JSON Schema that are probably misspelled: keywords one edit away from one that exists, and unknown types.

JSON Schema ignores unknown keywords, so a schema with `requried` compiles and requires nothing. Such a keyword becomes
a warning and not an error, because it may be an annotation of the user's own. A type that does not exist is an error in
every draft; the libraries name the word without its place.
Invariant: a keyword that any draft or OpenAPI knows is never reported, nor one that is far from all of them.
Not responsible for: keywords that exist and are not enforced (see unenforced.py).
"""

from __future__ import annotations

import difflib
from functools import lru_cache
from typing import Any

from grammar_service.backends.json_schema.walk import subschemas
from grammar_service.errors import InvalidGrammar

MAX_NAMED = 16
"""The most misspelled keywords that warnings name. Further ones are counted."""

_DRAFTS = """
$anchor $comment $defs $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $ref $schema $vocabulary
additionalItems additionalProperties allOf anyOf const contains contentEncoding contentMediaType contentSchema default
definitions dependencies dependentRequired dependentSchemas deprecated description disallow divisibleBy else enum
examples exclusiveMaximum exclusiveMinimum extends format id if items maxContains maxItems maxLength maxProperties
maximum minContains minItems minLength minProperties minimum multipleOf not oneOf pattern patternProperties prefixItems
properties propertyNames readOnly required then title type unevaluatedItems unevaluatedProperties uniqueItems writeOnly
"""
"""The keywords of drafts 3 to 2020-12."""

_OF_DRAFT_3 = frozenset({"disallow", "divisibleBy", "extends"})
"""Keywords that only draft 3 has. In its schemas, draft_3.py rewrites them before any check."""

_OTHERS = "comment discriminator example externalDocs nullable schema xml"
"""Keywords of OpenAPI, and annotations in wide use that are close to a keyword."""

_KNOWN = frozenset([*_DRAFTS.split(), *_OTHERS.split()])
_MIN_LENGTH = 4
"""Shorter keywords (`if`, `id`, `not`) are one edit away from too many words."""

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def refuse_unknown_types(schema: Any, path: str) -> None:
    """Raise InvalidGrammar for a `type` in `schema` (at `path`) that JSON Schema does not have; it names the place."""
    for where, node in subschemas(schema, path):
        types = node.get("type")
        for name in types if isinstance(types, list) else [types]:
            if isinstance(name, str) and name not in TYPES:
                near = difflib.get_close_matches(name.lower(), TYPES, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"they are {', '.join(TYPES)}"
                raise InvalidGrammar(f"{where}/type: {name!r} is not a type of JSON Schema; {hint}")


def misspelled_keywords(schema: Any, path: str) -> list[str]:
    """Return a line for each keyword of `schema` (at `path`) that is one edit away from a known one, or of draft 3."""
    found = []
    for where, node in subschemas(schema, path):
        for key in node:
            if (meant := _meant(key)) is not None:
                why = f"is not a keyword of JSON Schema and has no effect; did you mean {meant!r}?"
                found.append(f"{where}/{key}: {why}")
            elif key in _OF_DRAFT_3:
                found.append(f"{where}/{key}: is a keyword of draft 3, which `$schema` does not name; it has no effect")
            elif key == "required" and node[key] is True:
                why = "is not an array of names, and a boolean only in draft 3, which `$schema` does not name"
                found.append(f"{where}/{key}: {why}; it has no effect")
    if len(found) > MAX_NAMED:
        return [*found[:MAX_NAMED], f"and {len(found) - MAX_NAMED} more keywords that may be misspelled"]
    return found


@lru_cache(maxsize=4096)
def _meant(key: str) -> str | None:
    if key in _KNOWN:
        return None
    candidates = (known for known in sorted(_KNOWN) if len(known) >= _MIN_LENGTH)
    return next((known for known in candidates if _is_one_edit(key, known)), None)


def _is_one_edit(a: str, b: str) -> bool:
    """Return whether one insertion, deletion, substitution or transposition of neighbours makes `a` into `b`."""
    if abs(len(a) - len(b)) > 1:
        return False
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    a, b = a[same:], b[same:]
    if len(a) == len(b):
        return a[1:] == b[1:] or (a[2:] == b[2:] and a[:2] == b[1::-1])
    return a[1:] == b if len(a) > len(b) else a == b[1:]
