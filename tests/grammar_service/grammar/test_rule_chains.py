"""How far rules and references lead."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grammar_service.errors import LimitExceeded
from grammar_service.grammar.rule_chains import chain_length, check_chains
from grammar_service.grammar.value import Kind


def schema_chain(length: int, definitions: str = "$defs") -> dict[str, Any]:
    links = {f"d{i}": {"properties": {"a": {"$ref": f"#/{definitions}/d{i + 1}"}}} for i in range(length - 1)}
    return {"$ref": f"#/{definitions}/d0", definitions: {**links, f"d{length - 1}": {"type": "null"}}}


@pytest.mark.parametrize(
    ("kind", "source", "steps"),
    [
        (Kind.EBNF, 'root ::= "a"', 0),
        (Kind.EBNF, 'root ::= a\na ::= b | c\nb ::= "c"\nc ::= [a-z]', 2),
        (Kind.EBNF, 'root ::= "a" root | "root"', 0),
        (Kind.EBNF, 'a ::= b\nb ::= "x"\nroot ::= "a"', 0),
        (Kind.LARK, 'start: a B?\n!a: "x" c\nB.2: /start/\n?c[lazy]: B // d\n', 3),
        (Kind.LARK, "start: start", 0),
        (Kind.JSON_SCHEMA, '{"properties":{"a":{"$ref":"#"}}}', 0),
        (Kind.JSON_SCHEMA, json.dumps(schema_chain(7)), 7),
        (Kind.JSON_SCHEMA, json.dumps(schema_chain(7, "definitions")), 7),
        (Kind.JSON_SCHEMA, '{"$ref":"#/a~1b/0","a/b":[{"$ref":"#/c%20d"}],"c d":{}}', 2),
        (Kind.JSON_SCHEMA, '{"$ref":"https://example.org/s"}', 0),
        (Kind.JSON_SCHEMA, '{"$ref":"#/missing"}', 1),
        (Kind.STRUCTURAL_TAG, json.dumps({"format": {"content": {"json_schema": schema_chain(5)}}}), 5),
        (Kind.STRUCTURAL_TAG, json.dumps({"structures": [{"schema": schema_chain(4)}]}), 4),
        (Kind.REGEX, "$ref", 0),
        (Kind.EBNF, "no rule", 0),
        (Kind.LARK, "", 0),
    ],
)
def test_steps(kind: Kind, source: str, steps: int) -> None:
    assert chain_length(kind, source) == steps


def test_a_long_chain_is_walked_without_recursion_and_refused() -> None:
    links = "\n".join(f"r{i} ::= r{i + 1}" for i in range(20_000))
    source = f'root ::= r0\n{links}\nr20000 ::= "a"'
    check_chains(Kind.EBNF, source, 20_001)
    with pytest.raises(LimitExceeded, match=r"max_rule_depth: .* a chain of 20001, the limit is 512"):
        check_chains(Kind.EBNF, source, 512)
