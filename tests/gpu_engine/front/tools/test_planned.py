"""What grammar and what layout a request with tools or reasoning gets."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.request import GrammarKind, ValidatedRequest
from gpu_engine.front.tools.chat import render
from gpu_engine.front.tools.composition import planned
from gpu_engine.front.validation import check
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import ByteTokenizer
from tests.gpu_engine.front import serving

LIMITS = replace(serving.LIMITS, max_prompt_bytes=2000)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
QWEN = PLAIN + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
R1 = PLAIN + "<think>\n{# reasoning_effort #}"
CHAT = serving.conversation(("user", "hi"))
SCHEMA = '{"properties": {"a": {"type": "integer"}}}'


def checked(**fields: Any) -> ValidatedRequest:
    prompt = {} if {"text", "token_ids", "messages"} & fields.keys() else {"messages": CHAT}
    return check(pb.GenerateRequest(**prompt, **fields), LIMITS, ())  # type: ignore[arg-type]


def reasoning_of(template: str, **fields: Any) -> Any:
    made, _ = planned(checked(**fields), ByteTokenizer(template))
    return json.loads(made.params.grammar.source).get("reasoning") if made.params.grammar else None


BUDGET, OFF = pb.Reasoning(max_tokens=9), pb.Reasoning(enabled=False)


@pytest.mark.parametrize(
    ("template", "is_open", "fields"),
    [
        (QWEN, False, {}),
        (R1, True, {}),
        (R1, False, {"text": "x"}),
        (R1, True, {"text": "x <think> \n"}),
        (R1, True, {"token_ids": pb.TokenIds(ids=b"x<think>\n")}),
        (R1, False, {"token_ids": pb.TokenIds(ids=b"x<think>\n.")}),
    ],
)
def test_the_end_of_the_prompt_says_whether_the_phase_has_begun(
    template: str, is_open: bool, fields: dict[str, Any]
) -> None:
    wanted = {"begin": "<think>", "end": "</think>", "open": is_open, "max_tokens": 9}
    assert reasoning_of(template, reasoning=BUDGET, **fields) == wanted
    _, layout = planned(checked(reasoning=BUDGET, **fields), ByteTokenizer(template))
    assert layout is not None
    assert layout.thinks_first is is_open


def test_the_requests_own_markers_come_before_the_templates() -> None:
    own = pb.Reasoning(begin="<a>", end="</a>", max_tokens=5)
    assert reasoning_of(QWEN, reasoning=own) == {"begin": "<a>", "end": "</a>", "open": False, "max_tokens": 5}
    assert reasoning_of(PLAIN, reasoning=own) is not None
    assert reasoning_of(PLAIN, reasoning=BUDGET) is None


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"reasoning": pb.Reasoning()}, None),
        ({"reasoning": BUDGET}, GrammarKind.COMPOSED),
        ({"reasoning": pb.Reasoning(), "grammar": pb.Grammar(json_schema=SCHEMA)}, GrammarKind.COMPOSED),
        ({"reasoning": OFF, "grammar": pb.Grammar(json_schema=SCHEMA)}, GrammarKind.JSON_SCHEMA),
        ({"grammar": pb.Grammar(json_schema=SCHEMA)}, GrammarKind.JSON_SCHEMA),
        ({"reasoning": pb.Reasoning(), "grammar": pb.Grammar(backend=pb.BACKEND_XGRAMMAR)}, None),
        ({"tools": pb.Tools(tools=[pb.Tool(name="f")])}, GrammarKind.COMPOSED),
        ({"tools": pb.Tools(tools=[pb.Tool(name="f")], choice=pb.TOOL_CHOICE_NONE)}, None),
    ],
)
def test_a_grammar_is_composed_only_where_it_must_be(fields: dict[str, Any], kind: GrammarKind | None) -> None:
    made, layout = planned(checked(**fields), ByteTokenizer(QWEN))
    assert (made.params.grammar.kind if made.params.grammar else None) is kind
    assert (layout is None) is (not {"tools", "reasoning"} & fields.keys())


def test_options_of_the_grammar_hold_for_the_composed_one() -> None:
    options = pb.Grammar(backend=pb.BACKEND_XGRAMMAR, whitespace=pb.WHITESPACE_ANY, allow_unenforced=True)
    made, _ = planned(checked(tools=pb.Tools(tools=[pb.Tool(name="f")]), grammar=options), ByteTokenizer())
    spec = made.params.grammar
    assert spec is not None
    assert (spec.backend, spec.whitespace, spec.allow_unenforced) == (1, 3, True)


ONE_CHOICE = pb.Choice(choices=["a"])
TAG = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": {}}, "end": ">"}


@pytest.mark.parametrize(
    ("spec", "form"),
    [
        ({"json_object": True}, {"type": "json_schema", "json_schema": {"type": "object"}}),
        ({"json_schema": SCHEMA}, {"type": "json_schema", "json_schema": json.loads(SCHEMA), "at": "grammar"}),
        ({"regex": "a+"}, {"type": "regex", "pattern": "a+"}),
        ({"ebnf": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        ({"lark": 'start: "a"'}, {"type": "lark", "grammar": 'start: "a"'}),
        ({"choice": ONE_CHOICE}, {"type": "or", "elements": [{"type": "const_string", "value": "a"}]}),
        ({"structural_tag": '{"format": {"type": "any_text"}}'}, {"type": "any_text"}),
        (
            {"structural_tag": '{"structures": [{"begin": "<", "schema": {}, "end": ">"}], "triggers": ["<"]}'},
            {"type": "triggered_tags", "triggers": ["<"], "tags": [TAG]},
        ),
    ],
)
def test_each_kind_of_grammar_after_reasoning(spec: dict[str, Any], form: dict[str, Any]) -> None:
    made, _ = planned(checked(reasoning=BUDGET, grammar=pb.Grammar(**spec)), ByteTokenizer(QWEN))
    assert made.params.grammar is not None
    assert json.loads(made.params.grammar.source)["format"] == form


IGNORE_EOS = pb.SamplingParams(ignore_eos=True)
BAD: list[tuple[str, str, str, dict[str, Any]]] = [
    ("reasoning.enabled", "no reasoning", PLAIN, {"reasoning": pb.Reasoning(enabled=True)}),
    ("reasoning.enabled", "false", QWEN, {"reasoning": pb.Reasoning(enabled=False, max_tokens=5)}),
    ("reasoning.max_tokens", "at least 1", QWEN, {"reasoning": pb.Reasoning(max_tokens=0)}),
    ("reasoning.end", "empty", QWEN, {"reasoning": pb.Reasoning(begin="<a>")}),
    ("reasoning.begin", "empty", QWEN, {"reasoning": pb.Reasoning(end="<a>")}),
    ("reasoning.begin", "at most 64", QWEN, {"reasoning": pb.Reasoning(begin="<" * 65, end="<")}),
    ("reasoning.effort", "messages", QWEN, {"reasoning": pb.Reasoning(effort="low"), "text": "x"}),
    ("sampling.ignore_eos", "reasoning.max_tokens", QWEN, {"reasoning": BUDGET, "sampling": IGNORE_EOS}),
    ("grammar", "occurs twice", QWEN, {"reasoning": BUDGET, "grammar": pb.Grammar(json_schema='{"a":1,"a":2}')}),
    ("grammar", "not JSON", QWEN, {"reasoning": BUDGET, "grammar": pb.Grammar(json_schema="{")}),
    ("grammar.structural_tag", "format", QWEN, {"reasoning": BUDGET, "grammar": pb.Grammar(structural_tag="[]")}),
]


@pytest.mark.parametrize(("field", "problem", "template", "fields"), BAD, ids=[f"{c[0]} {c[1]}" for c in BAD])
def test_wrong_reasoning_names_its_field(field: str, problem: str, template: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=problem) as refused:
        planned(checked(**fields), ByteTokenizer(template))
    assert str(refused.value).startswith(f"{field}: ")


def test_the_template_reads_whether_to_think_and_how_hard() -> None:
    def text(template: str, **fields: Any) -> str:
        prompt = checked(reasoning=pb.Reasoning(**fields)).prompt
        assert not isinstance(prompt, str)
        return render(prompt, ByteTokenizer(template))  # type: ignore[arg-type]

    assert text(QWEN, enabled=False).endswith("<think></think>")
    assert text(QWEN, enabled=True).endswith("assistant:")
    assert text(R1, enabled=False).endswith("<think>\n\n</think>\n\n")
    assert text(R1).endswith("<think>\n")
    assert text(PLAIN + "{{ reasoning_effort }}", effort="high").endswith("high")
    with pytest.raises(InvalidRequest, match=r"^reasoning.effort: the model's chat template does not"):
        text(PLAIN, effort="high")
