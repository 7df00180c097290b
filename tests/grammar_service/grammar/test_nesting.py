"""How deep a text is, whatever it is."""

from __future__ import annotations

import json

import pytest

from grammar_service.errors import LimitExceeded
from grammar_service.grammar.nesting import check_nesting, nesting
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
def test_levels(kind: Kind, source: str, levels: int) -> None:
    assert nesting(kind, source) == levels


def test_the_limit_is_named_with_both_numbers() -> None:
    check_nesting(Kind.REGEX, "(" * 5 + "a" + ")" * 5, 5)
    with pytest.raises(LimitExceeded, match=r"max_grammar_depth: .* 6 levels deep, the limit is 5"):
        check_nesting(Kind.REGEX, "(" * 6 + "a" + ")" * 6, 5)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("piece", ["(", '"', "\\", "/", "[", "[^", "{5", "/a\\", '"\\', "#", "?"])
def test_no_text_of_a_megabyte_is_slow_or_recursive(kind: Kind, piece: str) -> None:
    """A backtracking pattern would not end here, and a recursive walk would raise."""
    assert nesting(kind, piece * ((1 << 20) // len(piece))) >= 0


def test_a_deep_text_that_is_no_json_has_levels_too() -> None:
    assert nesting(Kind.JSON_SCHEMA, '{"pattern":' + "[" * 1000) == 1001
    assert nesting(Kind.JSON_SCHEMA, json.dumps({"pattern": ["("]})) == 2
