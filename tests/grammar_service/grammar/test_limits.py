"""Limits on the nesting of a text and on the depth of its rules, for valid grammars and for any other text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grammar_service.errors import LimitExceeded
from grammar_service.grammar.limits import check_nesting, check_rule_depth, nesting, rule_depth
from grammar_service.grammar.value import Kind


@pytest.mark.parametrize(
    ("kind", "source", "levels"),
    [
        (Kind.JSON_SCHEMA, '{"a":[{"b":"[[{{"}]}', 3),
        (Kind.JSON_SCHEMA, "[" * 9, 9),
        (Kind.JSON_SCHEMA, r'{"a":"\"[[[["}', 1),
        (Kind.JSON_SCHEMA, '{"pattern":"((((a))))"}', 4),
        (Kind.JSON_SCHEMA, '{"description":"((((a))))"}', 1),
        (Kind.JSON_SCHEMA, '{"patternProperties":{"(((((a)))))":{}}}', 5),
        (Kind.STRUCTURAL_TAG, '{"format":{"pattern":"(((a)))"}}', 3),
        (Kind.REGEX, r"((a|[((((]|\()b)", 2),
        (Kind.REGEX, "[]((]", 0),
        (Kind.REGEX, "[^]((](a)", 1),
        (Kind.REGEX, "a?+*{2}", 4),
        (Kind.REGEX, "a{2,3}b?", 1),
        (Kind.EBNF, 'root ::= ("a" ([(] | "((((")) # ((((((', 2),
        (Kind.LARK, 'start: ("a" | /((b))/) // ((((', 2),
        (Kind.LARK, 'start: "a"??? "(((("', 3),
        (Kind.LARK, 'start: "/(((((/" // /(((/', 0),
        (Kind.CHOICE, '["((((("]', 1),
        (Kind.REGEX, ")))", 0),
        (Kind.JSON_OBJECT, "", 0),
    ],
)
def test_nesting_counts_brackets_groups_and_quantifiers(kind: Kind, source: str, levels: int) -> None:
    assert nesting(kind, source) == levels


def test_a_nesting_error_names_the_limit_and_the_level() -> None:
    check_nesting(Kind.REGEX, "(" * 5 + "a" + ")" * 5, 5)
    with pytest.raises(LimitExceeded, match=r"max_grammar_depth: .* 6 levels deep, the limit is 5"):
        check_nesting(Kind.REGEX, "(" * 6 + "a" + ")" * 6, 5)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("piece", ["(", '"', "\\", "/", "[", "[^", "{5", "/a\\", '"\\', "#", "?"])
def test_nesting_of_a_long_text_is_measured_without_recursion(kind: Kind, piece: str) -> None:
    """A backtracking pattern would not end here, and a recursive walk would raise."""
    assert nesting(kind, piece * ((1 << 17) // len(piece))) >= 0


def test_nesting_of_text_that_is_not_json() -> None:
    assert nesting(Kind.JSON_SCHEMA, '{"pattern":' + "[" * 1000) == 1001
    assert nesting(Kind.JSON_SCHEMA, json.dumps({"pattern": ["("]})) == 2


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
def test_rule_depth_is_the_longest_chain_from_the_start(kind: Kind, source: str, steps: int) -> None:
    assert rule_depth(kind, source) == steps


def test_a_long_chain_of_rules_is_walked_without_recursion_and_refused() -> None:
    links = "\n".join(f"r{i} ::= r{i + 1}" for i in range(20_000))
    source = f'root ::= r0\n{links}\nr20000 ::= "a"'
    check_rule_depth(Kind.EBNF, source, 20_001)
    with pytest.raises(LimitExceeded, match=r"max_rule_depth: .* a chain of 20001, the limit is 512"):
        check_rule_depth(Kind.EBNF, source, 512)
