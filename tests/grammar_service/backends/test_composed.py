"""Grammars that the engine composes from tools and a grammar: which calls and answers each format takes.

Not responsible for: random answers, which are read back (tests/gpu_engine/test_composed_answers.py).
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest

from gpu_engine.api.conversation import InputKind, Tool, ToolChoice, Tools
from gpu_engine.api.request import GrammarKind, GrammarSpec
from gpu_engine.front.tools.composition import composed
from gpu_engine.front.tools.formats import (
    FORMATS,
    FUNCTION_GEMMA,
    GEMMA_4,
    HARMONY,
    HERMES,
    JSON,
    LFM2,
    MISTRAL,
    PYTHONIC,
    QWEN3_CODER,
    ToolFormat,
)
from gpu_engine.front.tools.literals import spelled_value
from gpu_engine.front.tools.parameters import moved
from grammar_service.backends.backend import Compiled
from grammar_service.backends.registry import load_backend
from grammar_service.errors import InvalidGrammar, NotEnforced, NotSupported
from grammar_service.grammar.value import Kind
from grammar_service.grammar.vocabulary import Vocabulary
from tests.gpu_engine.front.tools.spelling import spelled_call
from tests.grammar_service.conftest import Library
from tests.grammar_service.toy import STOPS, spell

ITEM = {"enum": ["a", "b c"]}
ADD = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 99}, "to": {"$ref": "#/$defs/item"}},
    "required": ["x", "to"],
    "additionalProperties": False,
    "$defs": {"item": ITEM},
}
SAY = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 3}}, "additionalProperties": False}
SAY_ONE = {"type": "object", "properties": {"s": {"enum": ["abc"]}}, "additionalProperties": False}
TOOLS = (
    Tool("add", "Adds.", source=json.dumps(ADD)),
    Tool("add.2", source=json.dumps(SAY)),
    Tool("run", input=InputKind.REGEX, source="[a-f]{1,3}"),
)

WITHOUT_QUOTATION_MARKS = [
    form for form in FORMATS if form.argument or (form.literals is not None and not form.literals.is_python)
]


def compiled(library: Library, tools: Tools, form: ToolFormat, grammar: GrammarSpec | None) -> Compiled:
    spec = composed(tools, form, grammar)
    assert spec is not None
    return library.compiled(Kind(spec.kind.value), spec.source)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_each_format_takes_calls_that_fit_their_functions(library: Library, form: ToolFormat) -> None:
    # Only llguidance bounds a string without quotation marks.
    short = SAY if form not in WITHOUT_QUOTATION_MARKS or library.name == "llguidance" else SAY_ONE
    known = (TOOLS[0], Tool("add.2", source=json.dumps(short)), TOOLS[2])

    def call(name: str, arguments: str) -> str:
        return spelled_call(form, next((tool for tool in known if tool.name == name), Tool(name)), arguments)

    add, say, run = call("add", '{"x": 1, "to": "a"}'), call("add.2", '{"s": "abc"}'), call("run", "fab")
    wrong = [call("add", '{"x": 1}'), call("add.2", '{"s": "abcd"}'), call("run", "x"), call("other", "{}")]
    for tools, some, none in (
        (Tools(known), [[], [add], [add, say, run]], [[each] for each in wrong]),
        (Tools(known, parallel=False), [[], [say]], [[add, say]]),
        (Tools(known, ToolChoice.REQUIRED), [[run], [say, add]], [[], *([each] for each in wrong)]),
        (Tools(known, ToolChoice.REQUIRED, parallel=False), [[say]], [[], [add, add]]),
        (Tools(known, ToolChoice.NAMED, "add"), [[add], [add, add]], [[], [say], [run]]),
    ):
        ready = compiled(library, tools, form, None)

        def answer(calls: list[str]) -> str:
            return form.first + form.separator.join(calls) + form.last if calls else form.content_begin

        for calls in (*some, *none):
            legal = calls in some and (form.parallel or len(calls) < 2)
            assert library.accepts(ready, answer(calls)) is legal, (tools, calls)


def test_an_answer_may_be_a_call_or_fit_the_grammar_of_the_request(library: Library) -> None:
    grammar = GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]')
    call = HERMES.begin_of("add", raw=False) + '{"x": 1, "to": "a"}' + HERMES.end
    ready = compiled(library, Tools(TOOLS), HERMES, grammar)
    assert [text for text in ("yes", call, "maybe", "", "yes" + call) if library.accepts(ready, text)] == ["yes", call]
    assert composed(Tools(TOOLS, ToolChoice.NONE), HERMES, None) is None
    assert composed(Tools(TOOLS, ToolChoice.NONE), HERMES, grammar) is grammar


def test_arguments_are_any_object_where_they_are_not_strict(library: Library) -> None:
    call = HERMES.begin_of("add", raw=False) + '{"y": [1]}' + HERMES.end
    loose = (Tool("add", source=json.dumps(ADD), strict=False),)
    for tools, legal in ((Tools(loose), True), (Tools(TOOLS), False), (Tools(loose, ToolChoice.REQUIRED), False)):
        assert library.accepts(compiled(library, tools, HERMES, None), call) is legal


@pytest.mark.parametrize("form", [HERMES, JSON], ids=lambda form: form.name)
@pytest.mark.parametrize("schema", [{"type": "strin"}, {"uniqueItems": True}])
def test_an_error_of_a_schema_names_its_field(library: Library, form: ToolFormat, schema: Any) -> None:
    bad = Tool("bad", source=json.dumps({"properties": {"a": schema}}))
    with pytest.raises(InvalidGrammar, match=r"tools\.tools\[1\]\.parameters") as failed:
        compiled(library, Tools((TOOLS[0], bad), ToolChoice.REQUIRED), form, None)
    assert "add" not in str(failed.value)


@pytest.mark.parametrize(
    ("schema", "legal", "illegal"),
    [
        ({"pattern": "^[a-z]+$"}, ["a", "zz"], ["", "a1", "a\n"]),
        ({"pattern": "[0-9]"}, ["7", "<a>\n7 </"], ["", "ab"]),
        ({"pattern": "^[0-9]{2}", "format": "date"}, ["2024-02-29"], ["12", "2024-02-30"]),
        ({"minLength": 2}, ["ab", "<\n</para"], ["", "a", "a\n</parameter>\nb", "a\n</parameter>"]),
        ({"maxLength": 4}, ["", "12</"], ["12345"]),
        ({"type": ["string", "null"], "maxLength": 3}, ["", "abc", "null"], ["abcd"]),
    ],
)
def test_a_string_without_quotation_marks(library: Library, schema: Any, legal: list[str], illegal: list[str]) -> None:
    say = Tool("say", source=json.dumps({"properties": {"s": {"type": "string", **schema}}, "required": ["s"]}))
    tools = Tools((say,), ToolChoice.REQUIRED)
    if library.name == "xgrammar":
        with pytest.raises(NotEnforced, match=r"parameters/properties/s/\w+: is not enforced in a text"):
            compiled(library, tools, QWEN3_CODER, None)
        return
    ready = compiled(library, tools, QWEN3_CODER, None)
    for text in (*legal, *illegal):
        call = spelled_call(QWEN3_CODER, say, json.dumps({"s": text}))
        assert library.accepts(ready, call) is (text in legal), text


assert GEMMA_4.literals is not None
ANYTHING = {"a": [1, -2.5, {"b": None, "c-d": "t<x"}], "s": "", "t": True}
ANY_TEXT = spelled_value(ANYTHING, GEMMA_4.literals)


@pytest.mark.parametrize(
    ("form", "schema", "legal", "illegal"),
    [
        (LFM2, {"type": "string"}, [r"""'a "b\\'""", '"it\'s"', '""'], ["'a'b'", "'\n'", "a", "1"]),
        (LFM2, {"type": "string", "maxLength": 1}, ['"a"'], ["'a'", '"ab"']),
        (LFM2, {"enum": ["a", "it's", True, None, 1]}, ["'a'", '"a"', '"it\'s"', "True", "None", "1"], ["true", "'b'"]),
        (LFM2, {"type": ["integer", "boolean"]}, ["True", "-7"], ["true", "None", "1.5"]),
        (LFM2, {"type": "array", "items": {"type": "boolean"}}, ["[true]", "[]"], ["[True]", "[1]", "true"]),
        (GEMMA_4, {"type": "string"}, ['<|"|><|a"{}\n<|"|>'], ["a", '"a"']),
        (GEMMA_4, {}, [ANY_TEXT], ['{"a":1}', "a", "[1,]", "01"]),
        (GEMMA_4, {"type": "object"}, ["{}", "{a:{b:[]}}"], ["[]", "1", "{a}"]),
        (FUNCTION_GEMMA, {}, ["<escape>a<b<escape>"], ["<escape>a<escape>b<escape>"]),
        (
            GEMMA_4,
            {"type": "array", "items": {"type": ["integer", "null"]}, "minItems": 1, "maxItems": 3},
            ["[1]", "[null,2,3]"],
            ["[]", "[1,2,3,4]", "[true]"],
        ),
        (
            GEMMA_4,
            {"type": "object", "properties": {"z": {"enum": ["x"]}, "A": {}, "b": {"$ref": "#/$defs/n"}}},
            ['{A:1,b:2,z:<|"|>x<|"|>}', "{b:2}", "{}", '{A:[],z:<|"|>x<|"|>}'],
            ["{b:2,A:1}", "{b:<|'|>x<|'|>}", "{b:2,}", "{,b:2}"],
        ),
    ],
)
def test_values_with_a_notation_of_their_own(
    library: Library, form: ToolFormat, schema: Any, legal: list[str], illegal: list[str]
) -> None:
    source = {"properties": {"p": schema}, "required": ["p"], "$defs": {"n": {"type": "integer"}}}
    ready = compiled(library, Tools((Tool("f", source=json.dumps(source)),), ToolChoice.REQUIRED), form, None)
    assert form.literals is not None
    for text in (*legal, *illegal):
        call = f"{form.begin_of('f', raw=False)}p{form.literals.assign}{text}{form.end}"
        assert library.accepts(ready, form.first + call + form.last) is (text in legal), text


def test_content_does_not_hide_a_call_that_is_read_as_one(library: Library) -> None:
    ready = compiled(library, Tools(TOOLS), PYTHONIC, None)
    texts = ["", "\n", " no [1]", '[add(x=1, to="a")]', "[1]", "\n [add(x=1)]"]
    assert [text for text in texts if library.accepts(ready, text)] == texts[:4]


def test_a_lark_tool(library: Library) -> None:
    tools = Tools((Tool("sql", input=InputKind.LARK, source='start: "select " /[a-z]+/'),), ToolChoice.REQUIRED)
    if library.name == "xgrammar":
        with pytest.raises(NotSupported, match="Lark"):
            compiled(library, tools, HERMES, None)
        return
    ready = compiled(library, tools, HERMES, None)
    assert library.accepts(ready, '<tool_call>\n{"name": "sql"}\nselect ab\n</tool_call>')
    assert not library.accepts(ready, '<tool_call>\n{"name": "sql"}\ndrop ab\n</tool_call>')


def test_references_of_a_schema_that_moved_lead_to_the_same_places() -> None:
    schema: dict[str, Any] = {"$defs": {"a": {"$ref": "#"}}, "properties": {"b": {"$ref": "#/$defs/a"}}}
    assert moved(schema, "#/properties/x") == {
        "$defs": {"a": {"$ref": "#/properties/x"}},
        "properties": {"b": {"$ref": "#/properties/x/$defs/a"}},
    }


class SpecialTokens(NamedTuple):
    """A library whose tokenizer has the markers of a format as special tokens."""

    library: Library
    opened: list[int]


def with_special(library: Library, texts: list[str], *, special: bool = True) -> SpecialTokens:
    document = json.loads(library.vocabulary.tokenizer_json)
    number = len(document["model"]["vocab"])
    opened = list(range(number, number + len(texts)))
    for token, text in zip(opened, texts, strict=True):
        document["added_tokens"].append(
            {**document["added_tokens"][0], "id": token, "content": text, "special": special}
        )
    vocabulary = Vocabulary.load(json.dumps(document).encode(), library.vocabulary.size, library.vocabulary.stop_ids)
    return SpecialTokens(Library(load_backend(library.name, vocabulary), vocabulary), opened)


@pytest.mark.parametrize(
    ("form", "texts"),
    [(MISTRAL, ["[TOOL_CALLS]"]), (HARMONY, ["<|channel|>", "<|constrain|>", "<|message|>"])],
    ids=["mistral", "harmony"],
)
def test_markers_that_are_special_tokens(library: Library, form: ToolFormat, texts: list[str]) -> None:
    special, opened = with_special(library, texts)
    tools = Tools(TOOLS, ToolChoice.REQUIRED)
    spec = composed(tools, form, None, None, opened)
    assert spec is not None
    ready = special.compiled(Kind.COMPOSED, spec.source)
    matcher = ready.matcher()
    assert opened[0] in special.legal(matcher)
    assert matcher.accept(opened[0])
    rest = (form.first + form.begin_of("add", raw=False)).removeprefix(texts[0])
    pieces = re.split(f"({'|'.join(map(re.escape, texts))})", rest)
    tokens = [token for piece in pieces for token in numbers(piece, texts, opened)]
    assert all(matcher.accept(token) for token in tokens)
    assert all(matcher.accept(token) for token in spell('{"x":1,"to":"a"}' + form.end + form.last))
    assert matcher.accept(STOPS[0])
    # Any other grammar of the same backend refuses them as before.
    plain = special.compiled(Kind.STRUCTURAL_TAG, '{"format": {"type": "any_text"}}').matcher()
    assert not special.legal(plain) & set(opened)
    assert not any(plain.accept(token) for token in opened)


def numbers(text: str, texts: list[str], opened: list[int]) -> list[int]:
    return [opened[texts.index(text)]] if text in texts else spell(text)


def test_only_special_tokens_can_be_opened(library: Library) -> None:
    source = json.dumps({"format": {"type": "any_text"}, "open_tokens": [5]})
    with pytest.raises(InvalidGrammar, match="open_tokens: 5 is not a special token"):
        library.compiled(Kind.COMPOSED, source)


def test_markers_that_are_added_tokens(library: Library) -> None:
    """Qwen's `<tool_call>` is an added token that is not special: models write it as one token."""
    texts = ["<tool_call>", "</tool_call>"]
    markers, ids = with_special(library, texts, special=False)
    spec = composed(Tools(TOOLS, ToolChoice.REQUIRED), HERMES, None)
    assert spec is not None
    ready = markers.compiled(Kind.COMPOSED, spec.source)
    call = HERMES.begin_of("add", raw=False) + '{"x":1,"to":"a"}' + HERMES.end
    pieces = re.split("(</?tool_call>)", call)
    native = [token for piece in pieces for token in numbers(piece, texts, ids)]
    for tokens in (native, spell(call)):
        matcher = ready.matcher()
        assert all(matcher.accept(token) for token in tokens)
        assert matcher.accept(STOPS[0])
    matcher = ready.matcher()
    assert ids[0] in markers.legal(matcher)
    assert matcher.jump_forward_tokens(1) in ((ids[0],), ())
    free = composed(Tools(TOOLS), HERMES, None)
    assert free is not None
    matcher = markers.compiled(Kind.COMPOSED, free.source).matcher()
    assert ids[0] in markers.legal(matcher)
    assert all(matcher.accept(token) for token in native)


def test_a_text_with_a_marker_in_it_is_no_dead_end(library: Library) -> None:
    markers, _ = with_special(library, ["<tool_call>", "</tool_call>"], special=False)
    compiled = markers.compiled(Kind.CHOICE, '["<tool_call>x"]')
    matcher = compiled.matcher()
    while not matcher.terminated:
        legal = markers.legal(matcher)
        assert matcher.accept(max(legal - set(STOPS), default=STOPS[0]))
