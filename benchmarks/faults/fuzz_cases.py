"""Grammars that no user would write, of every kind: mutated schemas, random bytes, deep nests, huge repeats.

Invariant: a case is a function of (schemas, seed, number) alone, so a failure can be reproduced. A case has no
expected answer: every answer of a sidecar is acceptable, no answer is not.
Not responsible for: sending the grammars (see fuzz_grammars.py).
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("json_object", "json_schema", "regex", "ebnf", "lark", "choice", "structural_tag")

_KEYWORDS: list[tuple[str, Any]] = [
    ("type", ["string", "null"]),
    ("enum", [1, None, "x", {"a": []}]),
    ("const", "\u20ac\U0001f600"),
    ("minLength", 10**9),
    ("maxLength", -1),
    ("minItems", 100_000),
    ("maxItems", 3),
    ("uniqueItems", True),
    ("multipleOf", 1e-30),
    ("minimum", 1e308),
    ("maximum", -(10**40)),
    ("pattern", "(?=a)((a*)*)*$"),
    ("pattern", "^(a{1,900}){1,900}$"),
    ("format", "date-time"),
    ("format", "no-such"),
    ("$ref", "#"),
    ("$ref", "#/$defs/missing"),
    ("$ref", "https://example.org/s.json"),
    ("additionalProperties", {"$ref": "#"}),
    ("patternProperties", {"^[a-z]+$": {"$ref": "#"}}),
    ("propertyNames", {"pattern": "["}),
    ("allOf", [{}, {"type": "object"}, {"required": ["zz"]}]),
    ("anyOf", []),
    ("oneOf", [{"$ref": "#"}, {"not": {}}]),
    ("not", {"type": "string"}),
    ("if", {"type": "object"}),
    ("dependentRequired", {"a": ["b"]}),
    ("prefixItems", [{"$ref": "#"}] * 5),
    ("properties", {"": {}, "a\u0000b": {}, "\u202e": {"$ref": "#"}}),
    ("required", ["a", "a", ""]),
    ("x-guidance", {"lenient": True}),
    ("$defs", {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}),
]
_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1e308,
    10**30,
    "",
    "\u00e9\U0001f600",
    [],
    {},
    [[]],
    {"type": "nonsense"},
]
_REGEX = ["a", "b", "[a-z]", "[^\\n]", ".", "\\d", "\\w+", "\\p{L}", "\\x41", "\\u00e9", "\u20ac", "(", ")", "(?:", "|"]
_REGEX += ["*", "+", "?", "{2}", "{3,}", "{1,500}", "^", "$", "\\b", "(?=", "(?<!", "\\1", "(?i)", "[", "]", "\\", "/"]
_RULES = [
    '"a"',
    '"\\n"',
    "[a-z]",
    "[^x]",
    "(",
    ")",
    "*",
    "+",
    "?",
    "|",
    "{3}",
    "{1,200}",
    "a",
    "b",
    "c",
    '""',
    '"\u00e9"',
]
_LARK = [
    '"a"',
    "/[a-z]+/",
    "/(a|b)*/",
    "(",
    ")",
    "*",
    "+",
    "?",
    "|",
    "~ 3",
    "~ 1..99",
    "a",
    "b",
    "T",
    '"\u00e9"',
    "%json {}",
]
_RANDOM_BYTES = 400


@dataclass(frozen=True, slots=True)
class FuzzCase:
    """One grammar and the options that go with it. `kind` is one of KINDS."""

    number: int
    kind: str
    source: str
    whitespace: int
    allow_unenforced: bool


def fuzz_case(schemas: Sequence[Any], seed: int, number: int) -> FuzzCase:
    """Return case `number`; kinds alternate. `schemas` are JSON values to mutate, at least one."""
    rng = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)]
    source = _MAKERS[kind](rng, schemas)
    # A protobuf string holds no lone surrogates.
    source = source.encode("utf-8", "replace").decode("utf-8")
    return FuzzCase(number, kind, source, rng.randrange(4), rng.random() < 0.3)


def _schema(rng: random.Random, schemas: Sequence[Any]) -> str:
    roll = rng.random()
    if roll < 0.6:
        return json.dumps(_mutated(rng, rng.choice(schemas)))
    if roll < 0.7:
        depth = rng.choice([5, 30, 64, 127, 500, 20_000])
        opening, closing = rng.choice(
            [('{"items":', "}"), ('{"properties":{"a":', "}}"), ('{"anyOf":[', "]}"), ("[", "]")]
        )
        return opening * depth + "{}" + closing * rng.choice([depth, depth, 0])
    if roll < 0.8:
        return json.dumps(_chain(rng.choice([3, 100, 511, 513, 4000]), rng.random() < 0.5))
    if roll < 0.85:
        size = rng.choice([10, 1000, 8000])
        return json.dumps({"enum": [f"{rng.random()}" for _ in range(size)]})
    return _damaged(rng, json.dumps(rng.choice(schemas)))


def _chain(length: int, wide: bool) -> Any:
    def link(i: int) -> Any:
        ref = {"$ref": f"#/$defs/d{i + 1}"}
        return {"type": "object", "properties": {"a": ref, "b": ref}, "required": ["a"]} if wide else ref

    return {"$ref": "#/$defs/d0", "$defs": {f"d{i}": link(i) for i in range(length)} | {f"d{length}": {"type": "null"}}}


def _mutated(rng: random.Random, schema: Any) -> Any:
    schema = copy.deepcopy(schema)
    for _ in range(rng.randrange(1, 5)):
        places: list[Any] = []
        waiting = [schema]
        for node in waiting:
            if isinstance(node, dict | list) and node:
                places.append(node)
                waiting.extend(node.values() if isinstance(node, dict) else node)
        if not places:
            break
        node = rng.choice(places)
        name = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        roll = rng.random()
        if roll < 0.5 and isinstance(node, dict):
            key, value = rng.choice(_KEYWORDS)
            node[key] = copy.deepcopy(value)
        elif roll < 0.7:
            node[name] = copy.deepcopy(rng.choice(_VALUES))
        elif roll < 0.85:
            node[name] = copy.deepcopy(rng.choice(places))
        else:
            del node[name]
    return schema


def _regex(rng: random.Random, schemas: Sequence[Any]) -> str:
    roll = rng.random()
    if roll < 0.6:
        return "".join(rng.choice(_REGEX) for _ in range(rng.randrange(1, 40)))
    if roll < 0.7:
        depth = rng.choice([20, 127, 129, 50_000])
        return "(" * depth + "a" + rng.choice([")", ")?", ")*", "){1,3}"]) * depth
    if roll < 0.8:
        return rng.choice(
            ["(a{1,1000}){1,1000}", "((ab?){9}c*){99999}", "(.{0,999}x){50}", "a{2147483648}", "(a|a)*" * 500]
        )
    if roll < 0.9:
        return "|".join(f"{rng.random()}" for _ in range(rng.choice([2, 500, 9000])))
    return _noise(rng)


def _rules(start: str, arrow: str, atoms: list[str]) -> Callable[[random.Random, Sequence[Any]], str]:
    def make(rng: random.Random, schemas: Sequence[Any]) -> str:
        roll = rng.random()
        if roll < 0.6:
            names = [start, "a", "b", "c"][: rng.randrange(1, 5)]
            if arrow == ":":
                names.append("T")
            body = [
                f"{name} {arrow} " + " ".join(rng.choice(atoms) for _ in range(rng.randrange(1, 9))) for name in names
            ]
            return "\n".join(body) + "\n"
        if roll < 0.7:
            length = rng.choice([100, 511, 600, 8000])
            links = [
                f"{start} {arrow} r0",
                *(f'r{i} {arrow} r{i + 1} "x"' for i in range(length)),
                f'r{length} {arrow} "a"',
            ]
            return "\n".join(links)
        if roll < 0.8:
            depth = rng.choice([5, 12, 127, 129, 40_000])
            return f"{start} {arrow} " + "(" * depth + '"a"' + ")" * depth
        if roll < 0.9:
            return _damaged(rng, f'{start} {arrow} a | b\na {arrow} "x" a | "y"\nb {arrow} ("z" b){{1,9}} | ""\n')
        return _noise(rng)

    return make


def _choice(rng: random.Random, schemas: Sequence[Any]) -> str:
    roll = rng.random()
    if roll < 0.7:
        size = rng.choice([1, 2, 50, 5000])
        return json.dumps(
            ["".join(chr(rng.randrange(1, 0x3000)) for _ in range(rng.randrange(1, 12))) for _ in range(size)]
        )
    if roll < 0.8:
        return json.dumps(["x" * rng.choice([1000, 100_000, 300_000])])
    return rng.choice(["[]", '[""]', '["a", 1]', "{}", "[" * 3000, '["\\ud800"]', '["a"', "null", _noise(rng)])


def _tag(rng: random.Random, schemas: Sequence[Any]) -> str:
    schema = _mutated(rng, rng.choice(schemas))
    tag = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
    form: Any = {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}
    roll = rng.random()
    if roll < 0.3:
        return json.dumps({"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f"]})
    if roll < 0.5:
        for _ in range(rng.choice([1, 3, 40, 200])):
            form = {"type": rng.choice(["sequence", "or", "optional", "nonsense"]), "elements": [form], "content": form}
            if len(str(form)) > 50_000:
                break
    document = _mutated(rng, {"type": "structural_tag", "format": form}) if roll < 0.8 else {"format": form}
    return json.dumps(document)


def _object(rng: random.Random, schemas: Sequence[Any]) -> str:
    return "" if rng.random() < 0.7 else _noise(rng)


def _noise(rng: random.Random) -> str:
    noise = rng.randbytes(rng.randrange(1, _RANDOM_BYTES))
    return noise.decode("utf-8", "replace") if rng.random() < 0.5 else noise.decode("latin-1")


def _damaged(rng: random.Random, text: str) -> str:
    """Cut, repeat or overwrite a few places of `text`."""
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(text) + 1)
        to = min(len(text), at + rng.randrange(1, 30))
        middle = rng.choice(["", text[at:to] * rng.choice([2, 50]), chr(rng.randrange(1, 0x2FF)), '"', "\\", "{"])
        text = text[:at] + middle + text[to:]
    return text


_MAKERS: dict[str, Callable[[random.Random, Sequence[Any]], str]] = {
    "json_object": _object,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _rules("root", "::=", _RULES),
    "lark": _rules("start", ":", _LARK),
    "choice": _choice,
    "structural_tag": _tag,
}
