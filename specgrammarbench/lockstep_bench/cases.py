"""The cases of the benchmark, from a data file that is fixed by its version.

Invariant: equal versions have equal cases. A change of the data or of a generated schema is a new version.
Not responsible for: judging answers (judge.py), asking (tracks.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

DATA_VERSION = "1"

Json = dict[str, Any]
Kind = Literal["json", "regex", "choice", "ebnf"]
KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "ebnf")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar: a JSON Schema, a regular expression, texts to choose from, or a grammar in GBNF."""

    kind: Kind
    source: Any
    matches: str = ""
    """For GBNF: a regular expression of Python that matches the same texts."""


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt with a grammar."""

    name: str
    prompt: str
    grammar: Grammar
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Keyword:
    """A trap for a server that ignores a keyword of JSON Schema.

    The prompt asks to repeat `bad`, which `base` allows and `base` with `added` does not. A server for which the model
    does repeat it under `base` shows by its answer to the whole schema what it does with the keyword.
    """

    name: str
    base: Json
    added: Json
    bad: Any

    @property
    def whole(self) -> Json:
        """The schema with the keyword."""
        return _merged(self.base, self.added)

    @property
    def prompt(self) -> str:
        """What the model is asked."""
        text = json.dumps(self.bad)
        return f"Repeat this JSON exactly as it is, three times, one in each line.\n{text}\n{text}\n{text}"


@dataclass(frozen=True, slots=True)
class Data:
    """All cases of a version."""

    guided: Sequence[Case]
    keywords: Sequence[Keyword]
    long: Sequence[Case]
    """Answers that do not fit into a small max_tokens."""
    steady: Sequence[Case]
    """Streams whose gaps are measured; also the prompts of free answers."""


def read_data() -> Data:
    """Return the cases of DATA_VERSION."""
    text = resources.files("lockstep_bench").joinpath(f"data/v{DATA_VERSION}.json").read_text(encoding="utf-8")
    data = json.loads(text)
    return Data(
        guided=[_case(each) for each in data["guided"]],
        keywords=[Keyword(each["name"], each["base"], each["added"], each["bad"]) for each in data["keywords"]],
        long=[_case(each) for each in data["long"]],
        steady=[_case(each) for each in data["steady"]],
    )


def hostile_schema(number: int) -> Json:
    """Return a valid schema that is dear to compile or to mask; each number gives another one."""
    salt = f"n{number}"
    alternatives = [{"type": "object", "properties": {f"{salt}_{i}": {"type": "string"}}} for i in range(200)]
    makers: tuple[Json, ...] = (
        {"type": "array", "items": {"type": "string", "maxLength": 4000 + number}, "maxItems": 4000 + number},
        {"enum": [f"{salt} value {i}" for i in range(4000)]},
        {"type": "object", "properties": {f"{salt}_{i}": {"type": "integer"} for i in range(1500)}},
        {"type": "string", "pattern": f"^(({salt}|a|b|ab)*c){{1,40}}(d|e){{0,2000}}$"},
        {"anyOf": alternatives},
        _nested(salt, 60),
    )
    return makers[number % len(makers)]


def _nested(salt: str, depth: int) -> Json:
    schema: Json = {"type": "string", "maxLength": 500}
    for level in range(depth):
        schema = {"type": "object", "properties": {f"{salt}_{level}": schema, "other": {"type": ["string", "null"]}}}
    return schema


def _case(fields: Mapping[str, Any]) -> Case:
    (kind,) = (kind for kind in KINDS if kind in fields)
    grammar = Grammar(kind, fields[kind], fields.get("matches", ""))
    return Case(fields["name"], fields["prompt"], grammar, fields["max_tokens"])


def _merged(base: Json, added: Json) -> Json:
    merged = dict(base)
    for name, value in added.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
