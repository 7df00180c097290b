"""The conversation as the chat template's text: functions, calls, results, names, parts, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gpu_engine.api.conversation import TOOL_FORMATS, Chat
from gpu_engine.api.errors import InvalidRequest
from gpu_engine.front.tools.chat import render
from gpu_engine.front.tools.composition import planned
from gpu_engine.front.tools.fields import MAX_MESSAGES
from gpu_engine.front.tools.formats import (
    DEEPSEEK,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    FORMATS,
    FUNCTION_GEMMA,
    GEMMA_4,
    GLM,
    GLM_47,
    GRANITE,
    HARMONY,
    HERMES,
    JSON,
    KIMI_K2,
    LFM2,
    LLAMA3,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_ARGS,
    PHI_4,
    PYTHONIC,
    QWEN3_CODER,
    SEED_OSS,
    opened_tokens,
    reasoning_markers,
    tool_format,
    with_format,
)
from gpu_engine.front.validation import check
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import ByteTokenizer
from tests.gpu_engine.front import serving
from tests.gpu_engine.harness import config

LIMITS = replace(serving.LIMITS, max_prompt_bytes=100_000)
QWEN = (
    "{% if tools %}TOOLS{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments.x }}</tool_call>{% endfor %}{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}\n"
    "{% endfor %}{% if role_tool == 'tool' %}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
JOINS = QWEN.replace("c.function.arguments.x", "'' + c.function.arguments")


def chat(*messages: pb.ChatMessage, tools: pb.Tools | None = None, **fields: Any) -> Chat:
    request = pb.GenerateRequest(messages=pb.ChatMessages(messages=messages, **fields), tools=tools)
    prompt = check(request, LIMITS, ()).prompt
    assert isinstance(prompt, Chat)
    return prompt


def user(text: str = "hi") -> pb.ChatMessage:
    return pb.ChatMessage(role="user", content=text)


CALLED = (
    user(),
    pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="c1", name="f", arguments='{"x": 7}')]),
    pb.ChatMessage(role="tool", content="seven", tool_call_id="c1"),
)
TOOLS = pb.Tools(
    tools=[
        pb.Tool(name="f", description="Does f.", parameters='{"properties": {"x": {"type": "integer"}}}'),
        pb.Tool(name="raw", regex="a+"),
    ]
)


def test_a_template_with_functions_gets_them_and_the_calls() -> None:
    text = render(chat(*CALLED, tools=TOOLS), ByteTokenizer(QWEN))
    shown = [json.loads(line) for line in text.split("\n")[1:3]]
    assert [one["function"]["name"] for one in shown] == ["f", "raw"]
    assert shown[0]["function"]["parameters"] == {"properties": {"x": {"type": "integer"}}}
    assert '<tool_call>\n{"name": "raw"}\nINPUT\n</tool_call>' in shown[1]["function"]["description"]
    assert text.endswith("user:hi\nassistant:<tool_call>f 7</tool_call>\ntool:seven#c1\nassistant:")


def test_a_template_that_joins_arguments_gets_them_as_text() -> None:
    assert '<tool_call>f {"x": 7}</tool_call>' in render(chat(*CALLED), ByteTokenizer(JOINS))


def test_a_template_without_functions_gets_them_as_text() -> None:
    text = render(chat(pb.ChatMessage(role="system", content="Be brief."), *CALLED, tools=TOOLS), ByteTokenizer())
    assert text.startswith("system: Be brief.\n\nYou may call these functions:\n")
    assert '"name": "f", "description": "Does f."' in text
    assert text.endswith(
        'user: hi\nassistant: {"name": "f", "arguments": {"x": 7}}\nuser: Result of f: seven\nassistant:'
    )
    assert render(chat(user(), tools=TOOLS), ByteTokenizer()).startswith("system: You may call")


def test_parts_names_reasoning_and_arguments_of_the_template() -> None:
    parts = [pb.ContentPart(text="a"), pb.ContentPart(text="b")]
    turns = (pb.ChatMessage(role="user", parts=parts), pb.ChatMessage(role="assistant", content="c", reasoning="hm"))
    text = render(chat(*turns, user(), template_arguments='{"enable_thinking": false}'), ByteTokenizer(QWEN))
    assert text == "user:ab\nassistant:c<think>hm</think>\nuser:hi\nassistant:<think></think>"
    turns = (user(), pb.ChatMessage(role="assistant", content="Sure"))
    text = render(chat(*turns, continue_final_message=True), ByteTokenizer(QWEN))
    assert text == "user:hi\nassistant:Sure\n", "the last message goes on"


F = pb.Tool(name="f")
BAD_TOOLS: list[tuple[str, str, pb.Tools]] = [
    ("tools.tools", "empty", pb.Tools()),
    ("tools.tools", "at most 512", pb.Tools(tools=[pb.Tool(name=f"f{i}") for i in range(513)])),
    ("tools.tools[0].name", "1 to 64", pb.Tools(tools=[pb.Tool(name="a b")])),
    ("tools.tools[0].name", "1 to 64", pb.Tools(tools=[pb.Tool(name="a" * 65)])),
    ("tools.tools[1].name", "function 0", pb.Tools(tools=[F, F])),
    ("tools.tools[0].parameters", "not JSON", pb.Tools(tools=[pb.Tool(name="f", parameters="{")])),
    ("tools.tools[0].parameters", "an object", pb.Tools(tools=[pb.Tool(name="f", parameters="[]")])),
    ("tools.tools[0].parameters", '"array"', pb.Tools(tools=[pb.Tool(name="f", parameters='{"type": "array"}')])),
    ("tools.tools[0].parameters", "'a' occurs twice", pb.Tools(tools=[pb.Tool(name="f", parameters='{"a":1,"a":2}')])),
    ("tools.tools[0].text", "true", pb.Tools(tools=[pb.Tool(name="f", text=False)])),
    ("tools.tools[0].lark", "empty", pb.Tools(tools=[pb.Tool(name="f", lark="")])),
    ("tools.name", "'g' is not", pb.Tools(tools=[F], choice=pb.TOOL_CHOICE_NAMED, name="g")),
    ("tools.name", "NAMED", pb.Tools(tools=[F], name="f")),
    ("tools.choice", "9", pb.Tools(tools=[F], choice=9)),  # type: ignore[arg-type]
]
MESSAGE = "messages.messages[0]"


def one(role: str = "", **fields: Any) -> dict[str, Any]:
    return {"messages": [pb.ChatMessage(role=role, **fields)]}


BAD: list[tuple[str, str, dict[str, Any]]] = [
    (f"{MESSAGE}.role", "empty", one(content="x")),
    (f"{MESSAGE}.parts", "without content", one("user", content="x", parts=[pb.ContentPart(text="y")])),
    (f"{MESSAGE}.parts[0].part", "required", one("user", parts=[pb.ContentPart()])),
    (f"{MESSAGE}.tool_calls", "assistant", one("user", tool_calls=[pb.ToolCall(name="f")])),
    (f"{MESSAGE}.tool_calls[0].name", "empty", one("assistant", tool_calls=[pb.ToolCall()])),
    ("messages.template_arguments", "not JSON", {"template_arguments": "{"}),
    ("messages.template_arguments", "JSON object", {"template_arguments": "[]"}),
    ("messages.template_arguments", "'tools' is set by the server", {"template_arguments": '{"tools": []}'}),
    ("messages.continue_final_message", "assistant", {"continue_final_message": True}),
    *((field, problem, {"tools": tools}) for field, problem, tools in BAD_TOOLS),
]


@pytest.mark.parametrize(("field", "problem", "fields"), BAD, ids=[f"{case[0]} {case[1]}" for case in BAD])
def test_a_wrong_conversation_names_its_field(field: str, problem: str, fields: dict[str, Any]) -> None:
    others = {name: value for name, value in fields.items() if name != "messages"}
    with pytest.raises(InvalidRequest, match=problem) as refused:
        chat(*fields.get("messages", [user()]), **others)
    assert str(refused.value).startswith(f"{field}: ")


def test_the_bytes_of_functions_and_the_turns_count() -> None:
    assert len(chat(*[pb.ChatMessage(role="user")] * MAX_MESSAGES).turns) == MAX_MESSAGES
    with pytest.raises(InvalidRequest, match=f"^messages.messages: has {MAX_MESSAGES + 1} turns, at most"):
        chat(*[pb.ChatMessage(role="user")] * (MAX_MESSAGES + 1))
    with pytest.raises(InvalidRequest, match="max_prompt_bytes"):
        chat(user(), tools=pb.Tools(tools=[pb.Tool(name="f", description="x" * 100_000)]))


@pytest.mark.parametrize(
    ("conversation", "template", "problem"),
    [
        (chat(*CALLED), "<tool_call> tool{{ raise_exception('no') }}", "messages: .*no"),
        (chat(*CALLED), "<tool_call> tool{{ 1 + 'a' }}", "messages: .*raised an error"),
        (
            chat(user(), pb.ChatMessage(role="critic", content="x")),
            QWEN,
            r"messages.messages\[1\].role: 'critic' is not known",
        ),
    ],
)
def test_an_error_of_the_template_is_the_requests(conversation: Chat, template: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{problem}"):
        render(conversation, ByteTokenizer(template))


@pytest.mark.parametrize(
    ("template", "form", "marker"),
    [
        (QWEN, HERMES, "</think>"),
        ("{{ messages }}", JSON, None),
        ({"default": "{{ messages }}", "tool_use": QWEN}, HERMES, "</think>"),
        (QWEN + "<function=", QWEN3_CODER, "</think>"),
        (QWEN + "</arg_key>\n<arg_value><arg_key>", GLM, "</think>"),
        (QWEN + "</arg_key><arg_value><arg_key>", GLM_47, "</think>"),
        ("<minimax:tool_call>\n<think>", MINIMAX_M2, "</think>"),
        ("<seed:tool_call><seed:think>", SEED_OSS, "</seed:think>"),
        ('{% set dsml_token = "\uff5cDSML\uff5c" %}', DEEPSEEK_V32, None),
        ("<|tool_calls_section_begin|>", KIMI_K2, None),
        ("<|tool_call|> followed by a JSON list", GRANITE, None),
        ("<|tool_call|>{}<|/tool_call|>", PHI_4, None),
        ('<|header_start|>{"name": x, "parameters": y}', LLAMA3, None),
        ('<|start_header_id|>{"name": x, "parameters": y}', LLAMA3, None),
        ("[TOOL_CALLS][", MISTRAL, None),
        ("[TOOL_CALLS][ARGS][THINK]", MISTRAL_ARGS, "[/THINK]"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>```json", DEEPSEEK, None),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c></think>", DEEPSEEK_V31, "</think>"),
        ("<|start|><|channel|>analysis<|message|>", HARMONY, "<|end|><|start|>assistant"),
        ("<|start_header_id|> [func_name1(a=1)]", PYTHONIC, None),
        ("<|tool_call_start|>[f()]<|tool_call_end|><think>", LFM2, "</think>"),
        ("<|tool_list_start|>", LFM2, None),
        ("<|tool_call>call:<|channel>thought\n<channel|>", GEMMA_4, "<channel|>"),
        ("<start_function_call>call:", FUNCTION_GEMMA, None),
        (with_format("<tool_call> tools", "pythonic"), PYTHONIC, None),
        ("", None, None),
        (None, None, None),
    ],
)
def test_formats_are_read_from_the_template(template: Any, form: Any, marker: str | None) -> None:
    assert tool_format(template) is form
    found = reasoning_markers(template)
    assert (found.end if found else None) == marker
    with_space = tool_format("[TOOL_CALLS] [{")  # of older Mistral templates
    assert with_space is not None
    assert (with_space.name, with_space.first) == ("mistral", "[TOOL_CALLS] [")


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# tool #}"


@pytest.mark.parametrize(
    ("template", "call", "example"),
    [
        (with_format(PLAIN, "lfm2"), "<|tool_call_start|>[f(x=7)]<|tool_call_end|>", '[NAME(PARAMETER="VALUE")]'),
        (with_format(PLAIN, "glm-4.7"), "<tool_call>f<arg_key>x</arg_key>", "<arg_key>PARAMETER</arg_key>"),
        (with_format(PLAIN, "kimi-k2"), '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 7}', ":0<|"),
        (PLAIN + "{# tools <|tool_list_start|> #}", "<|tool_call_start|>[f(x=7)]<|tool_call_end|>", None),
    ],
)
def test_a_template_without_calls_gets_them_in_the_format_that_is_named(
    template: str, call: str, example: str | None
) -> None:
    text = render(chat(*CALLED, tools=TOOLS), ByteTokenizer(template))
    assert f"assistant: {call}" in text.replace("<|tool_calls_section_begin|>", "")
    assert "tool: seven" in text
    assert (example is None) == ("You may call these functions" not in text)
    assert not example or example in text


def test_each_format_can_be_named_by_the_setting() -> None:
    assert tuple(form.name for form in FORMATS) == TOOL_FORMATS
    assert {config(tool_format=name).tool_format for name in TOOL_FORMATS} == set(TOOL_FORMATS)
    with pytest.raises(ValueError, match=r"^tool_format: 'gemma' is not one of auto, hermes"):
        config(tool_format="gemma")


def test_special_tokens_of_a_format_are_opened() -> None:
    tokenizer = ByteTokenizer("[TOOL_CALLS][")
    tokenizer.backend_tokenizer.add_special_tokens(["[TOOL_CALLS]", "[INST]"])
    number = tokenizer.backend_tokenizer.token_to_id("[TOOL_CALLS]")
    assert opened_tokens(tokenizer, MISTRAL, None) == (number,)
    message = pb.GenerateRequest(messages=serving.conversation(("user", "hi")), tools=TOOLS)
    made, layout = planned(check(message, LIMITS, ()), tokenizer)
    assert made.params.grammar is not None
    assert json.loads(made.params.grammar.source)["open_tokens"] == [number]
    assert layout is not None
    assert layout.special_text
