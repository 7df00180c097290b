"""The formats of a structural tag that both backends read, and what llguidance refuses of them by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grammar_service.errors import GrammarServiceError, InvalidGrammar, NotSupported
from grammar_service.grammar.value import Kind
from tests.grammar_service.conftest import Library

Node = dict[str, Any]

INTEGER = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}


def const(value: str) -> Node:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Node, end: Any) -> Node:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


SCHEMA: Node = {"type": "json_schema", "json_schema": INTEGER}
TEXT: Node = {"type": "any_text"}
CALLS = [tag("<a>", SCHEMA, "</a>"), tag("<b>", const("!"), "</b>")]

FORMATS: list[tuple[str, Node, list[str], list[str]]] = [
    ("const", const("yes"), ["yes"], ["", "ye", "yess"]),
    ("schema", SCHEMA, ['{"x":1}'], ["1", '{"x":1} ']),
    ("regex", {"type": "regex", "pattern": "[a-c]+/d"}, ["ab/d"], ["/d", "abd"]),
    ("gbnf", {"type": "grammar", "grammar": 'root ::= "{" x "}"\nx ::= [0-9]+'}, ["{12}"], ["{}", "12"]),
    ("any text", TEXT, ["", "a\nb", "{"], []),
    (
        "sequence",
        {"type": "sequence", "elements": [const("a"), {"type": "regex", "pattern": "[0-9]*"}, const("b")]},
        ["ab", "a12b"],
        ["a", "12b"],
    ),
    (
        "free text before a text",
        {"type": "sequence", "elements": [{**TEXT, "excludes": ["</t>"]}, const("</t>"), const("x")]},
        ["</t>x", "a</</t>x", "<</t>x"],
        ["x", "a</t>", "a</t>b</t>x"],
    ),
    ("or", {"type": "or", "elements": [const("ab"), const("ac"), SCHEMA]}, ["ab", "ac", '{"x":2}'], ["a", "abac"]),
    ("optional", {"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
    ("plus", {"type": "plus", "content": const("a")}, ["a", "aaa"], ["", "b"]),
    ("star", {"type": "star", "content": const("a")}, ["", "aa"], ["b"]),
    ("repeat", {"type": "repeat", "min": 2, "max": 3, "content": const("a")}, ["aa", "aaa"], ["a", "aaaa"]),
    ("tag", tag("<a>", SCHEMA, "</a>"), ['<a>{"x":1}</a>'], ["<a></a>", '<a>{"x":1}']),
    ("tag of free text", tag("<a>", TEXT, "</a>"), ["<a></a>", "<a>x<</a>"], ["<a>", "<a></a>x"]),
    ("tag of free text without an end", tag("<a>", TEXT, ""), ["<a>", "<a>x</a>"], ["", "a>"]),
    ("tag of nothing but free text", tag("", TEXT, [""]), ["", "x"], []),
    ("tag without a beginning", tag("", SCHEMA, "</a>"), ['{"x":1}</a>'], ["</a>", '{"x":1}']),
    ("tag without an end", tag("<a>", SCHEMA, ""), ['<a>{"x":1}'], ["<a>", '<a>{"x":1}</a>']),
    ("tag with two ends", tag("<a>", SCHEMA, ["</a>", "!"]), ['<a>{"x":1}!', '<a>{"x":1}</a>'], ['<a>{"x":1}']),
    ("tag in a tag", tag("<a>", tag("<b>", SCHEMA, "</b>"), "</a>"), ['<a><b>{"x":1}</b></a>'], ['<a>{"x":1}</a>']),
    (
        "tags with a separator",
        {"type": "tags_with_separator", "tags": CALLS, "separator": "\n", "at_least_one": True},
        ["<b>!</b>", '<b>!</b>\n<a>{"x":1}</a>\n<b>!</b>'],
        ["", "<b>!</b><b>!</b>", "<b>!</b>\n"],
    ),
    (
        "no tags or one",
        {"type": "tags_with_separator", "tags": CALLS, "separator": "\n", "stop_after_first": True},
        ["", "<b>!</b>"],
        ["<b>!</b>\n<b>!</b>"],
    ),
    (
        "triggered",
        {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": CALLS},
        ["", "text", 'text <a>{"x":1}</a> and <b>!</b>\nmore', "<"],
        ["<a", "<b>?</b>", 'x<a>{"x":"1"}</a>'],
    ),
    (
        "one trigger of two tags",
        {"type": "triggered_tags", "triggers": ["<"], "tags": CALLS, "stop_after_first": True},
        ["", "text", 'text <a>{"x":1}</a>', "x<b>!</b>"],
        ["<", "<c", "<b>!</b> more", "<b>!</b><b>!</b>"],
    ),
    (
        "calls or an answer",
        {
            "type": "or",
            "elements": [{"type": "tags_with_separator", "tags": CALLS, "separator": "", "at_least_one": True}, SCHEMA],
        },
        ['<a>{"x":1}</a><b>!</b>', '{"x":1}'],
        ["", '{"x":1}<b>!</b>', "text"],
    ),
]


@pytest.mark.parametrize(("form", "good", "bad"), [case[1:] for case in FORMATS], ids=[case[0] for case in FORMATS])
def test_a_format_has_one_language_on_every_backend(
    library: Library, form: Node, good: list[str], bad: list[str]
) -> None:
    compiled = library.compiled(Kind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": form}))
    assert [text for text in good if not library.accepts(compiled, text)] == []
    assert [text for text in bad if library.accepts(compiled, text)] == []


def test_a_lark_grammar_inside_a_tag(library: Library) -> None:
    lark = 'start: "{" x "}"\nx: /[0-9]+/ | %json {"type": "array", "items": {"type": "null"}, "maxItems": 1}'
    form = {"type": "sequence", "elements": [const("<"), {"type": "lark", "grammar": lark}, const(">")]}
    source = json.dumps({"type": "structural_tag", "format": form})
    if library.name == "xgrammar":
        with pytest.raises(NotSupported, match="Lark grammars need the backend llguidance"):
            library.compiled(Kind.STRUCTURAL_TAG, source)
        return
    compiled = library.compiled(Kind.STRUCTURAL_TAG, source)
    assert all(library.accepts(compiled, text) for text in ("<{12}>", "<{[null]}>"))
    assert not any(library.accepts(compiled, text) for text in ("{12}", "<{[1]}>"))


@pytest.mark.parametrize(
    ("form", "error", "message"),
    [
        ({"type": "glob"}, NotSupported, "/format/type: this backend supports any_text"),
        ({"type": "sequence"}, InvalidGrammar, "/format/elements"),
        ({"type": "sequence", "elements": [TEXT, SCHEMA]}, NotSupported, "/format/elements/0: .* after any_text"),
        ({"type": "triggered_tags", "at_least_one": True}, NotSupported, "/format/at_least_one"),
        ({"type": "triggered_tags", "triggers": []}, InvalidGrammar, "/format/triggers"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": []}, InvalidGrammar, "/format/tags"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": [1]}, InvalidGrammar, "/format/tags/0"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": ""}]}, InvalidGrammar, "/tags/0/begin"),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("a", SCHEMA, "")]},
            InvalidGrammar,
            "'a' starts with none of the triggers",
        ),
        (
            {"type": "sequence", "elements": [{"type": "triggered_tags", "triggers": ["<"], "tags": CALLS}, TEXT]},
            NotSupported,
            "/format/elements/0: this backend needs triggered_tags at the end",
        ),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": {"type": "token", "token": 5}}]},
            InvalidGrammar,
            "/format/tags/0: names tokens",
        ),
        ({**SCHEMA, "style": "qwen_xml"}, NotSupported, "/format/style"),
        ({"type": "repeat", "min": 2, "max": 1, "content": SCHEMA}, InvalidGrammar, "/format: min and max"),
    ],
)
def test_llguidance_names_the_place_of_what_it_refuses(
    libraries: Any, form: Node, error: type[GrammarServiceError], message: str
) -> None:
    with pytest.raises(error, match=message):
        libraries("llguidance").compiled(Kind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": form}))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "tag", "content": SCHEMA, "end": ""}, "/format/begin: must be a string"),
        ({"type": "tag", "begin": 1, "content": SCHEMA, "end": ""}, "/format/begin: must be a string"),
        ({"type": "tag", "begin": "a", "end": ""}, "/format/content: must be an object"),
        ({"type": "tag", "begin": "a", "content": SCHEMA}, "/format/end: must be a string or a non-empty array"),
        (tag("a", SCHEMA, []), "/format/end: must be a string or a non-empty array"),
        (tag("a", SCHEMA, ["b", 1]), "/format/end: must be a string or a non-empty array"),
        ({**tag("a", SCHEMA, ""), "ends": ["b"]}, "/format/ends: is not known; did you mean 'end'"),
        (
            tag("a", {"type": "plus", "content": {**tag("b", SCHEMA, ""), "x": 1}}, ""),
            "/format/content/content/x: is not",
        ),
    ],
)
def test_a_tag_with_a_wrong_part_is_refused_with_its_place_on_every_backend(
    library: Library, form: Node, message: str
) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        library.compiled(Kind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": form}))
