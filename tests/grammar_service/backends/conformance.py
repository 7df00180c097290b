"""What every grammar library must accept and refuse: tables of cases, and the known differences of one library.

Invariant: every library serves every case, except where `DIFFERENCES` says why one refuses it, or is not asked.
Not responsible for: the rows and the rollbacks of matchers (test_matchers.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grammar_service.errors import GrammarServiceError, InvalidGrammar, NotEnforced, NotSupported
from grammar_service.grammar.value import Kind, Whitespace
from tests.grammar_service.toy import SPECIAL

Schema = dict[str, Any]
NULL, BOOL, INT, NUM, STR, ARR, OBJ = (
    {"type": name} for name in ("null", "boolean", "integer", "number", "string", "array", "object")
)
COMPACT, BOUNDED, ANY = Whitespace.COMPACT, Whitespace.BOUNDED, Whitespace.ANY
ROOT = "http://x.test/a/root.json"
DRAFT = "http://json-schema.org/draft-0{}/schema#".format
OTHER_DIALECT = "http://x.test/dialect/1"
NAME = "<|start|>"
"""The text of the special token 2."""


@dataclass(frozen=True, slots=True)
class Case:
    """A grammar with texts that are answers and texts that are not."""

    name: str
    source: Any
    """The text of the grammar, or a JSON document."""
    accepted: Sequence[str]
    rejected: Sequence[str]
    kind: Kind = Kind.JSON_SCHEMA
    whitespace: Whitespace = COMPACT
    warning: str = ""
    """The beginning of the only warning."""

    @property
    def text(self) -> str:
        return self.source if isinstance(self.source, str) else json.dumps(self.source)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A grammar that no library serves."""

    kind: Kind
    source: Any
    reason: str | None = None
    """A pattern of the message."""
    error: type[GrammarServiceError] = InvalidGrammar

    @property
    def text(self) -> str:
        return self.source if isinstance(self.source, str) else json.dumps(self.source)


@dataclass(frozen=True, slots=True)
class Difference:
    """Why one library does not serve a case: the error that it gives, or None if it is not asked."""

    reason: str
    error: type[GrammarServiceError] | None = NotEnforced


def closed(**properties: Any) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def ref(target: str) -> Schema:
    return {"$ref": target}


def draft_3(**schema: Any) -> Schema:
    return {"$schema": DRAFT(3), **schema}


def const(value: str) -> Schema:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Schema, end: Any) -> Schema:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_content(schema: Any) -> Schema:
    return {"type": "json_schema", "json_schema": schema}


def structural(form: Schema) -> Schema:
    return {"type": "structural_tag", "format": form}


def triggered(trigger: str, *tags: Schema, **more: Any) -> Schema:
    return {"type": "triggered_tags", "triggers": [trigger], "tags": list(tags), **more}


# -- JSON Schema ----------------------------------------------------------------------------------------------------

CHOICES = ["a", "ab", 'q"uo\\te', "né", "two\nlines", "\x01", "/slash/", "{}", "日本"]

DIALECTS = [
    "http://json-schema.org/draft-03/schema#",
    "http://json-schema.org/draft-04/schema",
    "https://json-schema.org/draft-07/schema#",
    "http://json-schema.org/draft/2020-12/schema#",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/schema#",
]

SCHEMAS = [
    Case(*row)
    for row in (
        ("true", "true", ["1", "null", '"a"', "[1]", '{"a":1}'], ["", "a"]),
        ("empty", {}, ["1", "null", '"a"', "[1]", '{"a":1}'], ["", "a"]),
        ("disjoint branches", {"oneOf": [STR, INT]}, ["1", '"1"'], ["null", "1.5"]),
        ("a reference in anyOf", {"anyOf": [ref("#/$defs/a"), NULL], "$defs": {"a": INT}}, ["1", "null"], ['"a"']),
        ("date-time", {**STR, "format": "date-time"}, ['"2020-01-01T00:00:00Z"'], ['"2020-13-01T00:00:00Z"']),
        ("lengths", {**STR, "minLength": 2, "maxLength": 3}, ['"ab"', '"abc"'], ['"a"', '"abcd"']),
        ("bounds", {**INT, "minimum": 3, "maximum": 5}, ["3", "5"], ["2", "6"]),
        ("counts", {**ARR, "items": INT, "minItems": 1, "maxItems": 2}, ["[1]", "[1,2]"], ["[]", "[1,2,3]"]),
        ("types and values", {"type": ["string", "null"], "enum": ["a", None]}, ['"a"', "null"], ['"b"']),
        ("patterns of names", {**closed(), "patternProperties": {"^[a-z]+$": INT}}, ['{"a":1}'], ['{"A":1}']),
        ("hundreds of names", closed(**{f"p{i}": INT for i in range(600)}), ['{"p3":1,"p599":2}'], ['{"p600":2}']),
        # Formats without effect, which schemas of real users have.
        ("a format of numbers", {**NUM, "format": "float"}, ["1.5"], ['"1.5"']),
        ("a format of integers", {**INT, "format": "int32"}, ["15"], ["1.5"]),
        ("a format of two types", {"type": ["integer", "null"], "format": "int64"}, ["null", "1"], ['"1"']),
        ("a known format", {**STR, "format": "uri-reference"}, ['"/a?b#c"'], ['"a b"']),
    )
]
SCHEMAS += [Case(dialect, {"$schema": dialect, **closed(a=INT)}, ['{"a":1}'], ['{"a":"x"}']) for dialect in DIALECTS]
SCHEMAS += [
    Case(warning, schema, [accepted], [rejected], warning=warning)
    for schema, accepted, rejected, warning in (
        (closed(a={"type": ["null", "string"], "format": "float"}), '{"a":"x"}', '{"a":1}', "/properties/a/format: "),
        ({**closed(a=INT), "requried": ["a"]}, "{}", "[]", "/requried: is not a keyword"),
        (closed(a={**INT, "required": True}), "{}", '{"a":""}', "/properties/a/required: is not an array of names"),
        (
            {**OBJ, "properties": {"a": {**INT, "divisibleBy": 2}}},
            '{"a":3}',
            "1",
            "/properties/a/divisibleBy: is a keyword of draft 3",
        ),
        (
            {"$schema": OTHER_DIALECT, **closed(a={"$schema": OTHER_DIALECT, **INT})},
            '{"a":1}',
            '{"a":"x"}',
            f"/$schema: '{OTHER_DIALECT}' is not a dialect",
        ),
    )
]

REQUIRED_INT = {**INT, "required": True}
DRAFT_3: list[tuple[Schema, list[str], list[str]]] = [
    (closed(a=REQUIRED_INT, b=INT), ['{"a":1}', '{"a":1,"b":2}'], ["{}", '{"b":2}', '{"a":""}']),
    (closed(a={**INT, "required": False}), ["{}", '{"a":1}'], ['{"a":""}']),
    (closed(a={**closed(b=REQUIRED_INT), "required": True}), ['{"a":{"b":1}}'], ["{}", '{"a":{}}']),
    ({**closed(a=ref("#/definitions/n")), "definitions": {"n": REQUIRED_INT}}, ['{"a":1}'], ["{}"]),
    (closed(a={"extends": REQUIRED_INT}), ['{"a":1}'], ["{}", '{"a":""}']),
    ({**closed(a=REQUIRED_INT, b=INT), "required": ["b", "a"]}, ['{"a":1,"b":2}'], ['{"a":1}', '{"b":2}']),
    ({"type": ["null", {**ARR, "items": INT}]}, ["null", "[]", "[1]"], ["1", '[""]']),
    ({"type": {"enum": [1]}}, ["1"], ["2"]),
    ({"type": "any", "enum": [1, "a"]}, ["1", '"a"'], ["2"]),
    ({"type": ["integer", "any"], "enum": [1, "a"]}, ["1", '"a"'], ["2"]),
    ({**INT, "divisibleBy": 3}, ["0", "12"], ["4"]),
    ({"extends": {**INT, "maximum": 5}}, ["5"], ["6", '"a"']),
    ({**STR, "format": "ip-address"}, ['"1.2.3.4"'], ['"1.2.3"']),
]
DRAFT_3_OF_LLGUIDANCE: list[tuple[Schema, list[str], list[str]]] = [
    ({**INT, "divisibleBy": 3, "multipleOf": 2}, ["12"], ["3", "2"]),
    ({**INT, "extends": {"maximum": 5, "type": "integer"}}, ["5"], ["6", '"a"']),
    ({**INT, "extends": [{**INT, "minimum": 2}], "maximum": 5}, ["2", "5"], ["1", "6"]),
    ({"type": ["integer", "string"], "disallow": "integer"}, ['"a"'], ["1"]),
    ({"type": ["integer", "boolean"], "disallow": ["integer", {"enum": [True]}]}, ["false"], ["1", "true"]),
]


def named(schema: Schema) -> str:
    """Return the name of a case of draft 3."""
    return f"draft 3: {json.dumps(schema)}"


OLD_SCHEMAS = [
    Case(named(schema), {"$schema": DRAFT(3), **schema}, accepted, rejected)
    for schema, accepted, rejected in (*DRAFT_3, *DRAFT_3_OF_LLGUIDANCE)
]


def document(properties: dict[str, tuple[Schema, Any, Any]], **more: Any) -> tuple[Schema, list[str], list[str]]:
    """Return a schema whose properties are (reference, a value that fits its target, another), and texts for each."""
    schema = {**more, **closed(**{name: reference for name, (reference, _, _) in properties.items()})}
    good, bad = (
        [json.dumps({name: row[i]}, separators=(",", ":")) for name, row in properties.items()] for i in (1, 2)
    )
    return schema, good, bad


REFERENCES = [
    Case(name, *parts)
    for name, parts in {
        "2020-12": document(
            {
                "an_anchor": (ref("#i"), 1, "x"),
                "a_relative_id": (ref("item.json"), 1, "x"),
                "a_id_from_the_root": (ref("/a/item.json"), 1, "x"),
                "the_URL_of_the_document": (ref(f"{ROOT}#/$defs/i"), 1, "x"),
                "the_document": (ref(ROOT), {"an_anchor": 1}, {"an_anchor": "x"}),
                "a_URN": (ref("urn:x:i"), 1, "x"),
                "a_dynamic_reference_to_an_anchor": ({"$dynamicRef": "#i"}, 1, "x"),
                "a_dynamic_reference": ({"$dynamicRef": "#node"}, {"an_anchor": 1}, {"an_anchor": "x"}),
                "an_id_in_a_value_names_nothing": ({"enum": [{"$id": "item.json"}]}, {"$id": "item.json"}, {}),
                "an_unknown_keyword": (ref("#/components/one"), 1, "x"),
                "below_an_id": ({"$id": "sub.json", **ref("#/$defs/v"), "$defs": {"v": STR}}, "x", 1),
                "a_place_that_only_a_pointer_makes_a_schema": (ref("parts.json#/list"), ["x"], [1]),
                "such_a_place_leads_on": (ref("parts.json#/one"), {"c": "x"}, {"c": 1}),
                "the_nearest_parent_changes_the_base": (ref("http://x.test/b/d.json"), 1, "x"),
                "a_folder_as_the_base": ({"$id": "sub/", **ARR, "items": ref("item.json")}, [1], ["x"]),
                "id_counts_before_the_ref_next_to_it": ({"$id": "/c/", **ref("item.json")}, 1, "x"),
                "an_anchor_of_one_resource": (ref("b.json#n"), True, 1),
                "the_same_anchor_of_another": (ref("parts.json#n"), "x", True),
                "resources_that_refer_to_each_other": (ref("loop.json"), {"v": {"a_URN": 1}}, {"v": {"a_URN": "x"}}),
            },
            **{"$id": ROOT, "$dynamicAnchor": "node", "components": {"one": ref("item.json"), "two": INT}, "user": INT},
            **{
                "$defs": {
                    "i": {"$anchor": "i", **INT},
                    "v": INT,
                    "item": {"$id": "item.json", **INT},
                    "urn": {"$id": "urn:x:i", **INT},
                    "parts": {
                        "$id": "parts.json",
                        **{"list": {**ARR, "items": ref("#/user")}, "user": STR, "one": ref("#/two")},
                        "two": ref("c.json#/three"),
                        "$defs": {"n": {"$anchor": "n", **STR}},
                    },
                    "c": {"$id": "c.json", "three": closed(c=ref("#/four")), "four": STR},
                    "x": {"$id": "http://x.test/b/c.json", "not": {}, "$defs": {"y": {"$id": "d.json", **INT}}},
                    "sub": {"$id": "/a/sub/item.json", **INT},
                    "next": {"$id": "/c/item.json", **INT},
                    "wrong": {"$id": "/b/item.json", **STR},
                    "b": {"$id": "b.json", "$anchor": "n", **BOOL},
                    "loop": {"$id": "loop.json", **closed(v=ref("root.json"))},
                }
            },
        ),
        "2019-09": document(
            {"a": ({"$recursiveRef": "#"}, {"a": {}}, 1)},
            **{"$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveAnchor": True},
        ),
        "draft 7": document(
            {
                "id_as_an_anchor": (ref("#i"), 1, "x"),
                "id_does_not_count_next_to_ref": ({"$id": "/b/", **ref("item.json")}, 1, "x"),
                "an_empty_fragment": (ref("b.json"), 1, "x"),
                "the_same_fragment_in_the_reference": (ref("b.json#"), 1, "x"),
            },
            **{"$schema": DRAFT(7), "$id": f"{ROOT}#"},
            definitions={
                "i": {"$id": "#i", **INT},
                "wrong": {"$id": "/b/item.json", **STR},
                "right": {"$id": "/a/item.json", **INT},
                "b": {"$id": "b.json#", **INT},
            },
        ),
        "draft 4": document(
            {"a": (ref("item.json"), 1, "x"), "b": ({"id": "other.json", **ref("#/definitions/v")}, 1, "x")},
            **{"$schema": DRAFT(4), "id": ROOT},
            definitions={"x": {"id": "item.json", **INT}, "v": INT},
        ),
        "a URN with a pointer and an anchor": document(
            {"a": (ref("urn:uuid:deadbeef-1234-ffff-ffff-4321feebdaed#/$defs/i"), 1, "x"), "b": (ref("#s"), "x", 1)},
            **{
                "$id": "urn:uuid:deadbeef-1234-ffff-ffff-4321feebdaed",
                "$defs": {"i": INT, "s": {"$anchor": "s", **STR}},
            },
        ),
        "a URL of a file": document(
            {"a": (ref("#/$defs/i"), 1, "x")}, **{"$id": "file:///c:/folder/f.json", "$defs": {"i": INT}}
        ),
        "properties that are called as keywords": document(
            {"$ref": (STR, "x", 1), "$id": (ref("#/$defs/i"), 1, "x")}, **{"$defs": {"i": INT}}
        ),
        "escapes in a pointer": document(
            {to: (ref(f"#/$defs/{to}"), 1, "x") for to in ("t~0e", "s~1h", "p%25t", "q%22t")},
            **{"$defs": {"t~e": INT, "s/h": INT, "p%t": INT, 'q"t': INT}},
        ),
        "empty names in a pointer": document(
            {"a": (ref("#/$defs//$defs/"), 1, "x")}, **{"$defs": {"": {"$defs": {"": INT}}}}
        ),
        "a root that is a reference, in draft 6": (
            {
                **{"$schema": DRAFT(6), "$id": "http://x.test/root.json", **ref("parts.json#/definitions/o")},
                "definitions": {
                    "x": {
                        "$id": "http://x.test/parts.json",
                        "definitions": {"o": closed(a=ref("#/definitions/i")), "i": INT},
                    }
                },
            },
            ['{"a":1}', "{}"],
            ['{"a":"x"}', "1"],
        ),
    }.items()
]

# -- other kinds ----------------------------------------------------------------------------------------------------

ARABIC_DIGIT, E_ACUTE, NEXT_LINE, NO_BREAK_SPACE, LINE_SEPARATOR = "\u0663", "\u00e9", "\u0085", "\u00a0", "\u2028"

REGEXES = [
    Case(regex, regex, accepted, rejected, Kind.REGEX)
    for regex, accepted, rejected in (
        ("[a-c]{2,3}|x\\d+", ["ab", "cab", "x1", "x99"], ["a", "abca", "x", "zab", "abz", ""]),
        (r"\d+", ["1", "12"], [ARABIC_DIGIT, "1" + ARABIC_DIGIT, ""]),
        (r"\w+", ["aZ_9"], [E_ACUTE, ARABIC_DIGIT, "-"]),
        (r"\s", [" ", "\t", NO_BREAK_SPACE, LINE_SEPARATOR, "\ufeff"], [NEXT_LINE, "a"]),
        (".", ["a", E_ACUTE, "\x01"], ["\n", "\r", LINE_SEPARATOR, "ab"]),
        ("[^a]", ["\n", "b", "\0"], ["a"]),
        ("[^]", ["\n", "\r", "a", "\U0001f600"], ["", "ab"]),
        (r"a\x2db", ["a-b"], ["a\u02db"]),
        (r"a\0b", ["a\0b"], ["ab"]),
        (r"[\^]", ["^"], ["a", "\\"]),
        (r"[\^-`]", ["^", "_", "`"], ["]", "a"]),
        ("[a&&[^b]", ["a", "&", "[", "b"], ["c"]),
        ("(?<year>[0-9]{4})", ["2024"], ["24"]),
        ("^ab$", ["ab"], ["abc"]),
        ("(^a$|^b)", ["a", "b"], ["ab"]),
        ("^$", [""], ["a"]),
        (r"a\p{L}", [f"a{E_ACUTE}"], ["a1"]),
        ("(?i)ab", ["aB"], ["ac"]),
    )
]
"""Regular expressions mean in every library what ECMA-262 says with the flag `u`; test_ecma_pattern.py has more."""

OBJECTS = ["{}", '{"a":1}', '{"a":{"b":[1,null,true,-1.5e3,"x"]},"c":{}}']
NO_OBJECTS = ["[]", "1", '"a"', '{"a":01}', "{a:1}", '{"a":1,}']
LIST = 'root ::= "[" item ("," item)* "]"  # a list\nitem ::= [0-9]+ | "\\"" [^"\\\\]* "\\"" | root\n'
MANY = " | ".join(f'"item{i}"' for i in range(5000))
MANY_TEXTS = (["aaaaaaaaaitem4999"], ["aaaaaaaaaitem5000"])
LARK_IN_A_TAG = 'start: "{" x "}"\nx: /[0-9]+/ | %json {"type": "array", "items": {"type": "null"}, "maxItems": 1}'

GRAMMARS = [
    Case("any object", "", OBJECTS, NO_OBJECTS, Kind.JSON_OBJECT),
    Case("choice", json.dumps(CHOICES), CHOICES, ["", "b", "aba", "two", "n", "["], Kind.CHOICE),
    Case("3000", json.dumps([f"item {i}" for i in range(3000)]), ["item 0", "item 2999"], ["item 3000"], Kind.CHOICE),
    Case("recursion", LIST, ["[1]", '[1,"a",[22]]'], ["[]", "[1,]", "1"], Kind.EBNF),
    Case("hexadecimal escape of two digits", r'root ::= "a\x2db"', ["a-b"], ["a\u02db"], Kind.EBNF),
    Case("hexadecimal escape in a class", r"root ::= [a] [\x2d] [b]", ["a-b"], ["a\u02db"], Kind.EBNF),
    Case("5000 alternatives inside", f'root ::= "a"{{9}} r\nr ::= {MANY}', *MANY_TEXTS, Kind.EBNF),
    Case("5000 alternatives inside Lark", f'start: "a"~9 r\nr: {MANY}', *MANY_TEXTS, Kind.LARK),
]

CLOSED_X = {**closed(x=INT), "required": ["x"]}
X, TEXT = json_content(CLOSED_X), {"type": "any_text"}
CALLS = [tag("<a>", X, "</a>"), tag("<b>", const("!"), "</b>")]
SEPARATED: Schema = {"type": "tags_with_separator", "tags": CALLS}
DIGITS = {"type": "regex", "pattern": "[0-9]*"}
OLD_TAGS = {"structures": [{"begin": "<f=a>", "schema": CLOSED_X, "end": "</f>"}], "triggers": ["<f="]}
LARK_FORMAT = {"type": "sequence", "elements": [const("<"), {"type": "lark", "grammar": LARK_IN_A_TAG}, const(">")]}
REGEX_FORMAT = {"type": "regex", "pattern": r"\s\x2db"}
TAG_OF_DRAFT_3 = json_content(draft_3(**closed(a={"type": "any", "enum": [1], "required": True})))
MISSPELLED_TAG = triggered("<f", tag("<f>", json_content({**OBJ, "requried": ["a"]}), "</f>"))

TAGS = [
    Case(name, structural(form), accepted, rejected, Kind.STRUCTURAL_TAG)
    for name, form, accepted, rejected in (
        ("const", const("yes"), ["yes"], ["", "ye", "yess"]),
        ("schema", X, ['{"x":1}'], ["1", '{"x":1} ']),
        ("regex", REGEX_FORMAT, [f"{LINE_SEPARATOR}-b"], [f"{NEXT_LINE}-b"]),
        ("gbnf", {"type": "grammar", "grammar": 'root ::= "{" x "}"\nx ::= [0-9]+'}, ["{12}"], ["{}", "12"]),
        ("any text", TEXT, ["", "a\nb", "{"], []),
        ("sequence", {"type": "sequence", "elements": [const("a"), DIGITS, const("b")]}, ["ab", "a12b"], ["a", "12b"]),
        (
            "free text before a text",
            {"type": "sequence", "elements": [{**TEXT, "excludes": ["</t>"]}, const("</t>"), const("x")]},
            ["</t>x", "a</</t>x", "<</t>x"],
            ["x", "a</t>", "a</t>b</t>x"],
        ),
        ("or", {"type": "or", "elements": [const("ab"), const("ac"), X]}, ["ab", "ac", '{"x":2}'], ["a", "abac"]),
        ("optional", {"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
        ("plus", {"type": "plus", "content": const("a")}, ["a", "aaa"], ["", "b"]),
        ("star", {"type": "star", "content": const("a")}, ["", "aa"], ["b"]),
        ("repeat", {"type": "repeat", "min": 2, "max": 3, "content": const("a")}, ["aa", "aaa"], ["a", "aaaa"]),
        ("tag", tag("<a>", X, "</a>"), ['<a>{"x":1}</a>'], ["<a></a>", '<a>{"x":1}']),
        ("tag of free text", tag("<a>", TEXT, "</a>"), ["<a></a>", "<a>x<</a>"], ["<a>", "<a></a>x"]),
        ("tag of free text without an end", tag("<a>", TEXT, ""), ["<a>", "<a>x</a>"], ["", "a>"]),
        ("tag of nothing but free text", tag("", TEXT, [""]), ["", "x"], []),
        ("tag without a beginning", tag("", X, "</a>"), ['{"x":1}</a>'], ["</a>", '{"x":1}']),
        ("tag without an end", tag("<a>", X, ""), ['<a>{"x":1}'], ["<a>", '<a>{"x":1}</a>']),
        ("tag with two ends", tag("<a>", X, ["</a>", "!"]), ['<a>{"x":1}!', '<a>{"x":1}</a>'], ['<a>{"x":1}']),
        ("tag in a tag", tag("<a>", tag("<b>", X, "</b>"), "</a>"), ['<a><b>{"x":1}</b></a>'], ['<a>{"x":1}</a>']),
        (
            "tags with a separator",
            {**SEPARATED, "separator": "\n", "at_least_one": True},
            ["<b>!</b>", '<b>!</b>\n<a>{"x":1}</a>\n<b>!</b>'],
            ["", "<b>!</b><b>!</b>", "<b>!</b>\n"],
        ),
        (
            "no tags or one",
            {**SEPARATED, "separator": "\n", "stop_after_first": True},
            ["", "<b>!</b>"],
            ["<b>!</b>\n<b>!</b>"],
        ),
        (
            "two triggers",
            {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": CALLS},
            ["", "text", 'text <a>{"x":1}</a> and <b>!</b>\nmore', "<"],
            ["<a", "<b>?</b>", 'x<a>{"x":"1"}</a>', '<a>{"x":1}', f'<a>{{"x":{" " * 9}1}}</a>'],
        ),
        (
            "one trigger of two tags",
            triggered("<", *CALLS, stop_after_first=True),
            ["", "text", 'text <a>{"x":1}</a>', "x<b>!</b>"],
            ["<", "<c", "<b>!</b> more", "<b>!</b><b>!</b>"],
        ),
        (
            "calls or an answer",
            {"type": "or", "elements": [{**SEPARATED, "separator": "", "at_least_one": True}, X]},
            ['<a>{"x":1}</a><b>!</b>', '{"x":1}'],
            ["", '{"x":1}<b>!</b>', "text"],
        ),
        ("draft 3 in a tag", TAG_OF_DRAFT_3, ['{"a":1}'], ["{}"]),
        ("Lark in a tag", LARK_FORMAT, ["<{12}>", "<{[null]}>"], ["{12}", "<{[1]}>"]),
    )
]
TAGS += [
    Case(
        "the older notation",
        OLD_TAGS,
        ["", "hi", 'hi <f=a>{"x":1}</f> there <f=a>{"x": 2}</f>'],
        ["<f=b>", '<f=a>{"x":"s"}</f>', '<f=a>{"x":1}', f'<f=a>{{"x":{" " * 9}1}}</f>'],
        Kind.STRUCTURAL_TAG,
        BOUNDED,
    ),
    Case(
        "a misspelled keyword in a tag",
        structural(MISSPELLED_TAG),
        ["<f>{}</f>"],
        ["<f>[]</f>"],
        Kind.STRUCTURAL_TAG,
        warning="/format/tags/0/content/json_schema/requried: is not a keyword of JSON Schema and has no effect; "
        "did you mean 'required'",
    ),
    Case(
        "divisibleBy elsewhere, in a tag",
        structural(json_content({"properties": {"a": {**INT, "divisibleBy": 2}}, **OBJ})),
        ['{"a":3}'],
        ['{"a":""}'],
        Kind.STRUCTURAL_TAG,
        warning="/format/json_schema/properties/a/divisibleBy: is a keyword of draft 3",
    ),
]

CASES = [*SCHEMAS, *OLD_SCHEMAS, *REFERENCES, *REGEXES, *GRAMMARS, *TAGS]

NO_LARK = Difference("Lark grammars need the backend llguidance", NotSupported)
DIFFERENCES = {
    ("hundreds of names", "xgrammar"): Difference("xgrammar compiles this too slowly", None),
    **{(named(schema), "xgrammar"): Difference("is not enforced") for schema, _, _ in DRAFT_3_OF_LLGUIDANCE},
    ("escapes in a pointer", "xgrammar"): Difference("Cannot find field t~0e", InvalidGrammar),
    ("empty names in a pointer", "xgrammar"): Difference("Cannot find field", InvalidGrammar),
    (r"a\p{L}", "xgrammar"): Difference(r"character 2: the category '\\\\p{L}'", InvalidGrammar),
    ("(?i)ab", "xgrammar"): Difference(r"character 1: the flag", InvalidGrammar),
    ("5000 alternatives inside Lark", "xgrammar"): NO_LARK,
    ("Lark in a tag", "xgrammar"): NO_LARK,
}
"""(name of a case, library) -> why it is refused there."""

# -- refusals -------------------------------------------------------------------------------------------------------

NO_POINTER_TARGET = {"properties": {"a": {"$id": "http://x.test/b", **ref("#/$defs/v")}}, "$defs": {"v": STR}}
TWO_TARGETS = {
    **{"$id": "http://x.test/a", "$dynamicAnchor": "n", "properties": {"a": {"$dynamicRef": "b#n"}}},
    "$defs": {"b": {"$id": "b", "$dynamicAnchor": "n", **STR}},
}

REFUSALS = [
    *(
        Refusal(Kind.JSON_SCHEMA, source, reason)
        for source, reason in (
            ({"properties": {"a": {"type": "strng"}}}, "/properties/a/type: 'strng' .*; did you mean 'string'"),
            ({"items": {"type": ["Integer", "null"]}}, "/items/type: 'Integer' .*; did you mean 'integer'"),
            ({"type": "zork"}, "/type: 'zork' .*; they are array, boolean, integer"),
            (ref("#/$defs/nowhere"), None),
            (ref("http://localhost/x"), None),
            (ref("#nowhere"), None),
            ({"$id": "http://x.test/a", "$ref": "b"}, None),
            (NO_POINTER_TARGET, None),
            (TWO_TARGETS, None),
            ({"enum": []}, None),
            ({**STR, "format": {"a": 1}}, None),
            ({**ARR, "uniqueItems": True, "x-guidance": {"lenient": True}}, None),
            (draft_3(extends=1), "/extends: must be a schema or an array of schemas"),
            (draft_3(**closed(a={"disallow": [1]})), "/properties/a/disallow: must be a type or an array of types"),
            (draft_3(divisibleBy=0), "/divisibleBy: must be a number above 0"),
            (draft_3(type=["text"]), "/type: 'text' is not a type of JSON Schema"),
            (closed(a=draft_3(**INT)), r"/properties/a/\$schema: draft 3 inside another dialect"),
        )
    ),
    Refusal(
        Kind.JSON_SCHEMA,
        {**OBJ, "properties": {"a": {"uniqueItems": True}, "b": {**ARR, "contains": INT}}},
        "(?=.*/properties/a/uniqueItems: )(?=.*/properties/b/contains: )",
        NotEnforced,
    ),
    *(
        Refusal(Kind.REGEX, source, f"^regex: {reason}")
        for source, reason in (
            ("a(?=b)", r"character 2: look-around '\(\?=b'"),
            (r"(a)\1", r"character 4: the escape '\\\\1'"),
            ("a^b", "character 2: an anchor inside the expression"),
            ("(a$)b", "character 3: an anchor inside the expression"),
            ("(^a)+", "character 2: an anchor inside the expression"),
            ("ab)", r"character 3: a '\)' without its group"),
            ("a(b", "character 2: a group without its end"),
            ("a|*", "character 3: a quantifier with nothing to repeat"),
            ("a{3,2}", r"character 2: the bounds of \{3,2\} are out of order"),
        )
    ),
    *(Refusal(Kind.EBNF, source) for source in ('root ::= "a', "root ::= nowhere", 'start ::= "a"')),
    Refusal(Kind.STRUCTURAL_TAG, {}),
    *(
        Refusal(Kind.STRUCTURAL_TAG, structural(form), reason)
        for form, reason in (
            ({"type": "triggered_tags", "triggers": [], "tags": []}, None),
            ({"type": "regex", "pattern": r"a\b"}, "^regex: character 2: a word boundary"),
            ({"type": "tag", "content": X, "end": ""}, "/format/begin: must be a string"),
            ({"type": "tag", "begin": 1, "content": X, "end": ""}, "/format/begin: must be a string"),
            ({"type": "tag", "begin": "a", "end": ""}, "/format/content: must be an object"),
            ({"type": "tag", "begin": "a", "content": X}, "/format/end: must be a string or a non-empty array"),
            (tag("a", X, []), "/format/end: must be a string or a non-empty array"),
            (tag("a", X, ["b", 1]), "/format/end: must be a string or a non-empty array"),
            ({**tag("a", X, ""), "ends": ["b"]}, "/format/ends: is not known; did you mean 'end'"),
            (
                tag("a", {"type": "plus", "content": {**tag("b", X, ""), "x": 1}}, ""),
                "/format/content/content/x: is not",
            ),
        )
    ),
    # A special token is no text of a grammar, by number and by name.
    *(
        Refusal(kind, source, error=GrammarServiceError)
        for kind, source in (
            (Kind.LARK, "start: <|start|>"),
            (Kind.LARK, "start: <[2]>"),
            (Kind.LARK, "start: <[0-5]>"),
            (Kind.LARK, "start: <[^5]>"),
            (Kind.LARK, "start: <any_token>"),
            (Kind.LARK, 'start: %lark {\nstart: "a" <[2]>\n}'),
            (Kind.LARK, f'start: "{NAME}"'),
            (Kind.LARK, "start: x\nx: <tool>"),
            (Kind.LARK, 'start: "a"\n  %llguidance {"no_forcing": true}'),
            (Kind.LARK, "start: /a[/]/ <[5]>"),
            (Kind.LARK, 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'),
            (Kind.EBNF, "root ::= Token(2)"),
            (Kind.EBNF, 'root ::= "a" Token(5)'),
            (Kind.EBNF, 'root ::= "a" <|end|>'),
            (Kind.EBNF, 'root ::= "a" # x\n  ExcludeToken\n(2)'),
            (Kind.EBNF, 'root ::= ["] AnyTokens(2) ["]'),
            (Kind.EBNF, "root ::= TokenTagDispatch((2, root))"),
            (Kind.EBNF, f'root ::= "{NAME}"'),
            (Kind.STRUCTURAL_TAG, {"format": {"type": "token", "token": 2}}),
            (Kind.STRUCTURAL_TAG, {"format": {"type": "exclude_token", "token": 2}}),
            (Kind.STRUCTURAL_TAG, {"format": {"type": "token_triggered_tags", "trigger_tokens": [2], "tags": []}}),
            (
                Kind.STRUCTURAL_TAG,
                {"format": {"type": "sequence", "elements": [{"type": "token", "token": SPECIAL[2]}]}},
            ),
            (Kind.STRUCTURAL_TAG, {"format": {"type": "grammar", "grammar": "root ::= Token(2)"}}),
        )
    ),
]

WEAKENED: list[tuple[Schema, list[Any]]] = [
    ({"type": []}, [1, "a", None]),
    ({**STR, "maxLength": -1}, ["a"]),
    ({**ARR, "maxItems": -1}, [[1]]),
    ({**OBJ, "maxProperties": -1}, [{"a": 1}]),
    ({"oneOf": [STR, {"const": "a"}]}, ["a"]),
    ({"allOf": [STR, {"minLength": 2}]}, ["a", 1]),
    ({"allOf": [{"minLength": 2}], **STR}, ["a", 1]),
    ({"allOf": [{"required": ["a"]}], **OBJ, "properties": {"a": INT}}, [{}]),
    ({"anyOf": [STR, INT], "minLength": 2}, ["a"]),
    ({**OBJ, "properties": {"a": INT, "b": INT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{}]),
    ({**STR, "pattern": "^a+$", "minLength": 2}, ["a"]),
    ({**STR, "pattern": "^a+$", "maxLength": 2}, ["aaa"]),
    ({**STR, "format": "date", "maxLength": 2}, ["2020-01-01"]),
    ({**STR, "pattern": "^a.*$", "format": "email"}, ["b@c.co"]),
    ({**STR, "pattern": "^(?!x)a"}, ["xa"]),
    ({**STR, "format": "idn-email"}, ["x"]),
    ({**INT, "multipleOf": 3}, [4]),
    ({**INT, "multipleOf": 3, "minimum": 4}, [3, 5]),
    ({**NUM, "multipleOf": 0.5}, [1.7]),
    ({"minimum": 3}, [2]),
    ({"minItems": 1}, [[]]),
    ({"pattern": "^a$"}, ["b"]),
    ({**ARR, "items": INT, "uniqueItems": True}, [[1, 1]]),
    ({**ARR, "contains": INT}, [["a"]]),
    ({"not": STR}, ["a"]),
    ({**INT, "not": {"const": 1}}, [1]),
    ({**OBJ, "properties": {"a": INT}, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, [{"a": 1}]),
    ({**OBJ, "properties": {"a": INT, "b": INT}, "dependentRequired": {"a": ["b"]}}, [{"a": 1}]),
    ({**OBJ, "properties": {"a": INT}, "dependentSchemas": {"a": {"required": ["b"]}}}, [{"a": 1}]),
    ({**OBJ, "properties": {"a": INT, "b": INT}, "dependencies": {"a": ["b"]}}, [{"a": 1}]),
    ({**OBJ, "properties": {"a": INT}, "patternProperties": {"^x": INT}}, [{"xa": "s"}]),
    ({**OBJ, "properties": {"a": INT}, "patternProperties": {"^a": {"maximum": 3}}}, [{"a": 5}]),
    ({**OBJ, "patternProperties": {"^[a-z]+$": INT}, "required": ["a"]}, [{}, {"b": 1}]),
    ({**OBJ, "properties": {"a": INT, "bbb": INT}, "propertyNames": {"maxLength": 2}}, [{"bbb": 1}]),
    ({**OBJ, "properties": {"a": INT}, "unevaluatedProperties": False}, [{"b": 1}]),
    ({**OBJ, "required": ["a"]}, [{}]),
    ({**OBJ, "properties": {"b": INT}, "required": ["a"]}, [{"b": 1}]),
    ({**closed(a=INT), "required": ["b"]}, [{"a": 1}]),
    ({**STR, "enum": ["a", 1]}, [1]),
    ({"type": ["string", "integer"], "enum": ["a", 1, None]}, [None]),
    ({**STR, "const": 1}, [1]),
    ({"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": INT}}, [1]),
    ({"$ref": "#/odd/place", "odd": {"place": {**ARR, "uniqueItems": True}}}, [[1, 1]]),
    ({**OBJ, "properties": {"a": {**ARR, "items": {"not": INT}}}}, [{"a": [1]}]),
    ({**ARR, "prefixItems": [INT], "maxItems": 2, "items": STR}, [[1, 2], [1, "a", "b"]]),
    ({**OBJ, "minProperties": 1, "maxProperties": 2}, [{}, {"a": 1, "b": 1, "c": 1}]),
    ({**NUM, "minimum": 0.5, "exclusiveMaximum": 5}, [0.4, 5, 11]),
]
"""Schemas with values that they exclude: a library refuses the schema or rejects the values."""
