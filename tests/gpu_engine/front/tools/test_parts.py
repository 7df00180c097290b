"""The text of an answer in parts, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_engine.api.conversation import InputKind, Tool, ToolChoice, Tools
from gpu_engine.front.tools.formats import FORMATS, HARMONY, HERMES, JSON, KIMI_K2, MISTRAL, Markers, ToolFormat
from gpu_engine.front.tools.markers import squeezed
from gpu_engine.front.tools.parts import AnswerLayout, PartKind, new_call_id, short_call_id
from tests.gpu_engine.front.tools.spelling import call_id, cuts, spelled_call, spelled_calls

THINK = Markers("<think>", "</think>")
GIVEN = json.dumps({"properties": {"a": {"type": "string"}, "b": {"type": "array"}}})
TOOLS = Tools((Tool("get"), Tool("get_x", source=GIVEN), Tool("run", input=InputKind.TEXT)))
ARGUMENTS = ('{"a": "}\\" </arg> <", "b": [1, {"c": "</arg_value></parameter>"}]}', "{}")
NAMED = {tool.name: tool for tool in TOOLS.tools}

Joined = list[tuple[str, str]]


def parts_of(layout: AnswerLayout, pieces: Sequence[str]) -> Joined:
    """Return (kind or function, text) of each part, with equal neighbours joined."""
    numbers = itertools.count()
    parser = layout.parser(lambda: f"id{next(numbers)}")
    found = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    out: Joined = []
    for part in found:
        if part.kind is PartKind.TOOL_CALL:
            assert layout.form is not None
            number = part.tool_call_index
            assert part.tool_call_id == call_id(layout.form, part.tool_name, number, f"id{number}")
            out.append((f"call {part.tool_name}", ""))
        elif out and out[-1][0] == part.kind.name:
            out[-1] = (part.kind.name, out[-1][1] + part.text)
        else:
            out.append((part.kind.name, part.text))
    return out


def spelled(form: ToolFormat, calls: Sequence[tuple[str, str]]) -> str:
    """Return the text of calls as the grammar of the format has it."""
    return spelled_calls(form, [(NAMED[name], given) for name, given in calls])


PARALLEL = [form for form in FORMATS if form.parallel]
CALLS = [("get_x", ARGUMENTS[0]), ("get", ARGUMENTS[1]), ("run", "any </text {\n")]
WANTED: Joined = [
    ("call get_x", ""),
    ("TOOL_ARGUMENTS", ARGUMENTS[0]),
    ("call get", ""),
    ("TOOL_ARGUMENTS", ARGUMENTS[1]),
    ("call run", ""),
    ("TOOL_ARGUMENTS", "any </text {\n"),
]


@pytest.mark.parametrize("form", PARALLEL, ids=lambda form: form.name)
def test_calls_of_each_format(form: ToolFormat) -> None:
    text = spelled(form, CALLS)
    for pieces in cuts(text):
        assert parts_of(AnswerLayout(TOOLS, form), pieces) == WANTED
    for pieces in cuts(f"Sure {{ <tool. \n{text}"):
        found = parts_of(AnswerLayout(TOOLS, form, triggered=True), pieces)
        assert found == [("CONTENT", "Sure { <tool."), *WANTED]


@pytest.mark.parametrize("form", [form for form in FORMATS if form.argument], ids=lambda form: form.name)
@pytest.mark.parametrize("given", ["", "\nx", "\n"])
def test_raw_input_where_arguments_are_written_one_by_one(form: ToolFormat, given: str) -> None:
    calls = [("run", given), ("get", "{}")]
    wanted = [
        ("call run", ""),
        *([("TOOL_ARGUMENTS", given)] if given else []),
        ("call get", ""),
        ("TOOL_ARGUMENTS", "{}"),
    ]
    for pieces in cuts(spelled(form, calls)):
        assert parts_of(AnswerLayout(TOOLS, form), pieces) == wanted


def test_calls_with_the_same_number_have_ids_of_their_own() -> None:
    text = KIMI_K2.first + 2 * spelled_call(KIMI_K2, NAMED["get"], "{}", number=3) + KIMI_K2.last
    parser = AnswerLayout(TOOLS, KIMI_K2).parser()
    ids = [part.tool_call_id for part in [*parser.push(text), *parser.finish()] if part.kind is PartKind.TOOL_CALL]
    assert ids == ["functions.get:3", "functions.get:0"]


@pytest.mark.parametrize("form", PARALLEL, ids=lambda form: form.name)
def test_reasoning_before_calls(form: ToolFormat) -> None:
    text = f"\nhm <tool_call> </thin\n\n</think>\n\n{spelled(form, CALLS)}"
    for first in (True, False):
        layout = AnswerLayout(TOOLS, form, markers=THINK, thinks_first=first)
        for pieces in cuts(text if first else f"<think>{text}"):
            assert parts_of(layout, pieces) == [("REASONING", "hm <tool_call> </thin"), *WANTED]


@pytest.mark.parametrize(("name", "given"), CALLS)
def test_one_call_or_a_final_message_of_harmony(name: str, given: str) -> None:
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    markers = Markers("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
    layout = AnswerLayout(TOOLS, HARMONY, markers=markers, special_text=True)
    for before, thought in (("", []), (analysis, [("REASONING", "hm")])):
        for pieces in cuts(before + spelled(HARMONY, [(name, given)])):
            assert parts_of(layout, pieces) == [*thought, (f"call {name}", ""), ("TOOL_ARGUMENTS", given)]
        for pieces in cuts(f"{before}<|channel|>final<|message|>Hi <|channel|>"):
            assert parts_of(layout, pieces) == [*thought, ("CONTENT", "Hi <|channel|>")]


GET = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
GOT: Joined = [("call get", ""), ("TOOL_ARGUMENTS", "{}")]
OTHER_NAME = GET.replace("get", "other") + " <tool"
NO_CALL = '{"text": "<tool_call>\\n{\\"name\\": \\"get\\"", "name": "get", "arguments": {}}'
SPACED = '{ "name"\n:"get_x","arguments" :  [1, "a b"] } \n {"name":"get","arguments":{ } }'
NO_CALLS = Tools(TOOLS.tools, ToolChoice.NONE)


@pytest.mark.parametrize(
    ("layout", "text", "wanted"),
    [
        (AnswerLayout(TOOLS, HERMES, triggered=True), OTHER_NAME, [("CONTENT", OTHER_NAME)]),
        (
            AnswerLayout(TOOLS, HERMES, triggered=True),
            f"a\n {GET}\n\n b {GET} \n",
            [("CONTENT", "a"), *GOT, ("CONTENT", "b"), *GOT],
        ),
        (AnswerLayout(TOOLS, HARMONY), spelled(HARMONY, [("get", "{}")]) + "\n\n b", [*GOT, ("CONTENT", "b")]),
        (AnswerLayout(TOOLS, HERMES), NO_CALL, [("CONTENT", NO_CALL)]),
        (AnswerLayout(TOOLS, JSON), NO_CALL, [("CONTENT", NO_CALL)]),
        (
            AnswerLayout(TOOLS, JSON),
            SPACED,
            [("call get_x", ""), ("TOOL_ARGUMENTS", '[1, "a b"]'), ("call get", ""), ("TOOL_ARGUMENTS", "{ }")],
        ),
        (AnswerLayout(NO_CALLS, HERMES), GET, [("CONTENT", GET)]),
        (AnswerLayout(TOOLS, HERMES), f"{GET}\n<tool", [*GOT, ("CONTENT", "<tool")]),
        (AnswerLayout(TOOLS, JSON), '{"name": "get", "arguments": 12}', [GOT[0], ("TOOL_ARGUMENTS", "12")]),
    ],
    ids=[
        "another name",
        "free text",
        "white space after",
        "no call",
        "no JSON call",
        "white space in",
        "none allowed",
        "half of a second call",
        "a number as arguments",
    ],
)
def test_calls_in_free_text(layout: AnswerLayout, text: str, wanted: Joined) -> None:
    for pieces in cuts(text):
        assert parts_of(layout, pieces) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>\nhm", [("REASONING", "hm")]),
        ("<thi", [("CONTENT", "<thi")]),
        ("<think>a</think>\n", [("REASONING", "a")]),
        ("<think>a</think>\n\nb\n", [("REASONING", "a"), ("CONTENT", "b\n")]),
        ('<tool_call>\n{"name": "get", "arguments": {"a', [("call get", ""), ("TOOL_ARGUMENTS", '{"a')]),
        ('<tool_call>\n{"name": "ge', [("CONTENT", '<tool_call>\n{"name": "ge')]),
        ('<tool_call>\n{"name": "get", "arguments": {}}\n</to', [("call get", ""), ("TOOL_ARGUMENTS", "{}")]),
    ],
)
def test_an_answer_that_was_cut_off(text: str, wanted: Joined) -> None:
    for pieces in cuts(text):
        assert parts_of(AnswerLayout(TOOLS, HERMES, markers=THINK), pieces) == wanted


CALL_HEAD = '{"name": "get", "arguments": '
FRAGMENTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL_HEAD, "{}", "}", "\n", " a"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join), st.data(), st.booleans(), st.booleans())
def test_any_split_of_a_text_gives_the_same_parts(text: str, data: st.DataObject, triggered: bool, think: bool) -> None:
    layout = AnswerLayout(TOOLS, HERMES, triggered=triggered, markers=THINK if think else None)
    pieces, at = [], 0
    while at < len(text):
        size = data.draw(st.integers(1, len(text) - at))
        pieces.append(text[at : at + size])
        at += size
    assert parts_of(layout, pieces) == parts_of(layout, [text])


def test_ids_of_calls_are_unique() -> None:
    assert len({new_call_id() for _ in range(1000)}) == 1000
    assert len({short_call_id() for _ in range(1000)}) == 1000
    part = AnswerLayout(TOOLS, MISTRAL).parser().push(spelled(MISTRAL, CALLS))[0]
    assert part.tool_call_id.isalnum()
    assert len(part.tool_call_id) == 9
    assert squeezed(' {"a b": 1}\n') == '{"a b":1}'
