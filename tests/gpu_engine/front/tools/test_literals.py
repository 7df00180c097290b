"""Calls in the way of Python and of Gemma: read from any pieces, and schemas that they cannot hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_engine.api.conversation import Tool, ToolChoice, Tools
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.front.tools.composition import composed
from gpu_engine.front.tools.formats import FUNCTION_GEMMA, GEMMA_4, LFM2, PYTHONIC, ToolFormat
from gpu_engine.front.tools.parts import AnswerLayout, PartKind
from tests.gpu_engine.front.tools.spelling import cuts

F = Tools((Tool("f"),))


@pytest.mark.parametrize(
    ("form", "arguments", "wanted"),
    [
        (PYTHONIC, "", {}),
        (
            LFM2,
            r"""s='it\'s "a"\\\n\q', t="x\"\u00e9)", on=True, off=False"""
            """, no=None, n=-1.5e3, l=["a)", true], d={"k": [null]}""",
            {"s": 'it\'s "a"\\\n\\q', "t": 'x"\u00e9)', "on": True, "off": False, "no": None, "n": -1500.0}
            | {"l": ["a)", True], "d": {"k": [None]}},
        ),
        (LFM2, "a=1,b = 2", {"a": 1, "b ": 2}),
        (GEMMA_4, "", {}),
        (
            GEMMA_4,
            'a:<|"|>it\'s "x"\\ {},<|<|"|>,b:true,c:[1,[],{d:<|"|><|"|>,e:{}}],f:null,g:{h:-2.5}',
            {"a": 'it\'s "x"\\ {},<|', "b": True, "c": [1, [], {"d": "", "e": {}}], "f": None, "g": {"h": -2.5}},
        ),
        (FUNCTION_GEMMA, "a:<escape>x<esc<escape>", {"a": "x<esc"}),
    ],
)
def test_arguments_become_json_in_any_pieces(form: ToolFormat, arguments: str, wanted: dict[str, Any]) -> None:
    text = form.first + form.begin_of("f", raw=False) + arguments + form.end + form.last
    for pieces in cuts(text):
        parser = AnswerLayout(F, form).parser()
        parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
        assert parts[0].tool_name == "f"
        assert json.loads("".join(part.text for part in parts if part.kind is PartKind.TOOL_ARGUMENTS)) == wanted


def test_a_string_that_was_cut_off_keeps_its_text() -> None:
    for form, text, wanted in ((LFM2, "s='a\\", '{"s": "a'), (GEMMA_4, 's:<|"|>a<|', '{"s": "a<|')):
        parser = AnswerLayout(F, form).parser()
        parts = parser.push(form.first + form.begin_of("f", raw=False) + text) + parser.finish()
        assert "".join(part.text for part in parts if part.kind is PartKind.TOOL_ARGUMENTS) == wanted


SELF = {"properties": {"p": {"type": "object", "properties": {"q": {"$ref": "#/properties/p"}}}}}


@pytest.mark.parametrize(
    ("form", "schema", "problem"),
    [
        (LFM2, {"properties": {"a=b": {}}}, "/properties/a=b: the model's format cannot write this name"),
        (LFM2, {"properties": {"p": {"type": "boolean", "not": {"const": True}}}}, "/properties/p: has 'not'"),
        (LFM2, {"properties": {"p": {"enum": []}}}, "/properties/p: allows no value"),
        (GEMMA_4, SELF, r"(/properties/[pq])+: is nested too deeply, or refers to itself"),
        (GEMMA_4, {"properties": {"p": {"enum": ['<|"|>']}}}, "/properties/p: has a value with '<"),
        (FUNCTION_GEMMA, {"properties": {"p": {"enum": [["<escape>"]]}}}, "/properties/p: has a value with '<escape>'"),
        (GEMMA_4, {"properties": {"p": {"enum": [{"a:b": 1}]}}}, "/properties/p: has a value with the name 'a:b'"),
        (LFM2, {"properties": {"p": {"enum": [[1e999]]}}}, "/properties/p: has a number that is too large"),
        (GEMMA_4, {"properties": {"p": {"type": "object", "required": [[]]}}}, r"/properties/p: requires \[\], which"),
        (
            GEMMA_4,
            {"properties": {"p": {"type": "object", "additionalProperties": 1}}},
            "/properties/p: additionalProperties must be",
        ),
        (GEMMA_4, {"properties": {"p": {"type": "array", "uniqueItems": True}}}, "/properties/p: has 'uniqueItems'"),
        (GEMMA_4, {"properties": {"p": {"type": "array", "minItems": 2, "maxItems": 1}}}, "/properties/p: minItems"),
        (
            GEMMA_4,
            {"properties": {"p": {"type": "object", "required": ["q"]}}},
            "/properties/p: requires 'q', which is not",
        ),
        (
            LFM2,
            {"properties": {"p": {"oneOf": [{"type": "integer", "minimum": 1}, {"type": "number"}]}}},
            "/properties/p: has 'oneOf' of values of one type",
        ),
    ],
)
def test_what_the_notation_cannot_say_is_refused(form: ToolFormat, schema: Any, problem: str) -> None:
    tools = Tools((Tool("f", source=json.dumps(schema)),), ToolChoice.REQUIRED)
    with pytest.raises(InvalidRequest, match=rf"^tools\.tools\[0\]\.parameters{problem}"):
        composed(tools, form, None)
