"""Arguments become the message that the engine reads, field by field."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lockstep_client import (
    AdditionalOutput,
    Answer,
    FinishReason,
    Grammar,
    Message,
    NotParsed,
    Reasoning,
    Telemetry,
    Tool,
    ToolCall,
)
from lockstep_client import Delta as ClientDelta
from lockstep_client.answers import (
    ClearedGrammars,
    FieldLogprob,
    ModelInfo,
    OutputTensor,
    Part,
    Stats,
    Tokens,
    Usage,
    ValueEvent,
    joined_outputs,
)
from lockstep_client.calls import chat_request, text_request, tokenize_request
from lockstep_client.grammars import CompiledGrammar
from lockstep_client.messages import conversation, tools_message
from lockstep_client.options import CHAT_OPTIONS, OPTIONS, BeamSearch, LogitsProcessor
from lockstep_client.statistics import IterationStats, RequestStats, StatsUpdate
from lockstep_client.tokenizer import TokenizerInfo
from lockstep_client.wire import engine_pb2 as own
from protos.engine.v1 import engine_pb2 as pb

ALL_OPTIONS: dict[str, Any] = {
    "max_tokens": 5, "min_tokens": 1, "temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "seed": 9,
    "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "stop": "a",
    "stop_token_ids": [4], "bad_token_ids": [5], "bad_words": ["b"], "ignore_eos": True, "logprobs": 2, "n": 3,
    "masked_logprobs": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "logit_bias": {8: -1.0},
    "num_draft_tokens": 0, "draft_index": False, "omit_text": True, "omit_token_ids": True, "echo": True,
    "prompt_logprobs": 1, "per_field_logprobs": True, "token_origins": True, "request_id": "r",
    "value_events": True, "items_of": "/a", "receipt_nonce": b"0123456789abcdef",
    "cache_salt": "s", "priority": -2,
    "context_logits": True, "generation_logits": True, "additional_outputs": ["logits", AdditionalOutput("m", True)],
    "repetition_max_pattern_size": 6, "repetition_min_pattern_size": 2, "repetition_min_count": 5,
    "grammar_exact": True, "grammar_exact_tries": 9, "grammar_exact_ms": 50, "grammar_exact_error": True,
    "grammar_exact_shared_tries": 4, "grammar_exact_any_spelling": True,
    "max_queue_ms": 250, "never_preempt": True,
    "whole": True, "cumulative": True, "client_id": "c", "lora": "l", "prompt_adapter": "p",
}  # fmt: skip

OF_PARTS: dict[str, tuple[Any, Any]] = {
    "beam_search": (
        BeamSearch(beam_width=4, length_penalty=0.5, early_stopping=True),
        pb.BeamSearch(beam_width=4, length_penalty=0.5, early_stopping=pb.EARLY_STOPPING_TRUE),
    ),
    "logits_processors": (
        ["a", LogitsProcessor("b", {"size": 3})],
        [pb.LogitsProcessor(name="a"), pb.LogitsProcessor(name="b", arguments='{"size": 3}')],
    ),
}
"""Options that are messages of their own: the value, and its message."""


def sent(message: Any) -> Any:
    """Return the message as the engine parses it."""
    return pb.GenerateRequest.FromString(message.SerializeToString())


def test_every_option_has_its_field() -> None:
    request = sent(text_request("x", None, None, ALL_OPTIONS, None).request)
    parts = {"sampling", "speculation", "response"}
    by_name = {
        field.name: value
        for message in (request, *(getattr(request, part) for part in parts))
        for field, value in message.ListFields()
    }
    for name, value in ALL_OPTIONS.items():
        found = by_name[name]
        if name == "additional_outputs":
            found = [each.name if not each.context else AdditionalOutput(each.name, True) for each in found]
        found = dict(found) if name == "logit_bias" else list(found) if hasattr(found, "extend") else found
        assert found == (["a"] if name == "stop" else value), name
    assert set(ALL_OPTIONS) == OPTIONS - {"timeout_s", *OF_PARTS}


def test_an_option_with_parts_becomes_its_message() -> None:
    for name, (value, message) in OF_PARTS.items():
        found = getattr(sent(text_request("x", None, None, {name: value}, None).request), name)
        assert (found if name == "beam_search" else list(found)) == message
    request = sent(text_request("x", None, None, {"beam_search": 3}, None).request)
    assert request.beam_search == pb.BeamSearch(beam_width=3)
    wrong: Any = BeamSearch(beam_width=3, early_stopping="soon")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="early_stopping: 'soon' is none of"):
        text_request("x", None, None, {"beam_search": wrong}, None)


def test_every_field_of_a_request_has_its_option() -> None:
    request = own.GenerateRequest.DESCRIPTOR.fields_by_name
    nested = ("sampling", "speculation", "response")
    fields = {name for part in nested for name in request[part].message_type.fields_by_name}
    fields |= set(request) - set(nested)
    assert len(fields) > 40
    elsewhere = {"text", "token_ids", "messages", "grammar"}
    assert fields - elsewhere <= CHAT_OPTIONS


OF_MESSAGES: dict[Any, type[Any]] = {
    own.GetModelInfoResponse: ModelInfo, own.GetStatsResponse: Stats, own.Telemetry: Telemetry, own.Usage: Usage,
    own.FieldLogprob: FieldLogprob, own.ValueEvent: ValueEvent,
    own.OutputTensor: OutputTensor, own.AdditionalOutput: AdditionalOutput,
    own.AnswerPart: Part, own.TokenizeResponse: Tokens, own.GenerateResponse: ClientDelta,
    own.IterationStats: IterationStats, own.RequestStats: RequestStats, own.WatchStatsResponse: StatsUpdate,
    own.ClearGrammarCacheResponse: ClearedGrammars, own.GetTokenizerInfoResponse: TokenizerInfo,
    own.CompileResponse: CompiledGrammar, own.ChatMessage: Message, own.ToolCall: ToolCall, own.Reasoning: Reasoning,
    own.Tool: Tool,
}  # fmt: skip


def test_every_field_of_a_message_has_one_of_the_client() -> None:
    for message, kind in OF_MESSAGES.items():
        described = {field.name for field in message.DESCRIPTOR.fields} - {"parts" if kind is Message else ""}
        assert described == set(kind.__dataclass_fields__) - {"parse"}, kind
    names = {name.removeprefix("FINISH_REASON_") for name in pb.FinishReason.DESCRIPTOR.values_by_name}
    assert names - {"UNSPECIFIED"} == {reason.name for reason in FinishReason}


@pytest.mark.parametrize(("dtype", "packed"), [("float32", "<f4"), ("float16", "<f2"), ("bfloat16", "<u4")])
def test_a_tensor_is_the_same_as_lists_and_as_an_array(dtype: str, packed: str) -> None:
    values = np.array([[1.5, -2.0, 0.25], [0.0, -0.5, 96.0]], np.float32)
    data = (values.view(np.uint32) >> 16).astype("<u2") if dtype == "bfloat16" else values.astype(packed)
    parts = [OutputTensor("x", dtype, (1, 3), row.tobytes(), 4 + i) for i, row in enumerate(data)]
    tensor = joined_outputs(parts)["x"]
    assert (tensor.shape, tensor.start) == ((2, 3), 4)
    assert tensor.tolist() == values.tolist()
    assert tensor.numpy().tolist() == values.tolist()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.json_object(), pb.Grammar(json_object=True)),
        (Grammar.schema({"type": "null"}), pb.Grammar(json_schema='{"type": "null"}')),
        (Grammar.regex("a+"), pb.Grammar(regex="a+")),
        (Grammar.choice("a", "b"), pb.Grammar(choice=pb.Choice(choices=["a", "b"]))),
        (Grammar.ebnf("root ::= [a]"), pb.Grammar(ebnf="root ::= [a]")),
        (Grammar.lark("start: A"), pb.Grammar(lark="start: A")),
        (Grammar.structural_tag({"a": 1}), pb.Grammar(structural_tag='{"a": 1}')),
        (
            Grammar.schema({"type": "array"}).with_options(unenforced="verify", max_backtracks=0, hold_tokens=9),
            pb.Grammar(
                json_schema='{"type": "array"}', unenforced=pb.UNENFORCED_VERIFY, max_backtracks=0, hold_tokens=9
            ),
        ),
        (
            Grammar.json_object().with_options(
                max_string_length=9, max_array_items=3, max_number_digits=5, max_whitespace=0
            ),
            pb.Grammar(json_object=True, max_string_length=9, max_array_items=3, max_number_digits=5, max_whitespace=0),
        ),
        (
            Grammar.schema(list[int]).with_options(whitespace="spaced"),
            pb.Grammar(
                json_schema='{"type": "array", "items": {"type": "integer"}}',
                whitespace=pb.WHITESPACE_SPACED,
                closed_objects=True,
            ),
        ),
        (Grammar.schema("{}").with_options(closed_objects=False), pb.Grammar(json_schema="{}", closed_objects=False)),
        (
            Grammar.regex("a").with_options(whitespace="any", backend="auto", allow_unenforced=True),
            pb.Grammar(regex="a", whitespace=pb.WHITESPACE_ANY, backend=pb.BACKEND_AUTO, allow_unenforced=True),
        ),
    ],
    ids=repr,
)
def test_a_grammar_of_every_kind(grammar: Grammar, message: pb.Grammar) -> None:
    assert sent(text_request("x", None, grammar, {}, None).request).grammar == message
    kinds = pb.Grammar.DESCRIPTOR.oneofs_by_name["spec"].fields
    assert len(kinds) == 8, "a new kind of grammar needs a class method"
    with pytest.raises(ValueError, match="whitespace: 'none' is none of spaced, compact, bounded, any"):
        grammar.with_options(whitespace="none")  # type: ignore[arg-type]


def test_a_conversation_comes_in_three_forms() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    plain = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    typed = [
        Message(role="assistant", tool_calls=(ToolCall("c", "f", "{}"),), reasoning="hm"),
        Message(role="tool", content="3", tool_call_id="c"),
    ]
    request = sent(chat_request(plain, None, None, {"template_arguments": {"a": 1}}, None).request)
    assert [part.text for part in request.messages.messages[0].parts] == ["a", "b"]
    assert request.messages.messages[0].name == "Ann"
    assert json.loads(request.messages.template_arguments) == {"a": 1}
    assert conversation(plain[1:]) == conversation(typed)
    assert conversation("a") == conversation([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "contents": "a"}], r"messages\[0\]: 'contents' is not known; did you mean 'content'"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"messages\[0\].content\[0\]: the model reads only text",
        ),
        (["a"], r"messages\[0\]: is a str, not a Message or a mapping"),
    ],
)
def test_a_wrong_turn_is_named(messages: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        conversation(messages)


def test_tools_come_in_three_forms() -> None:
    def weather(city: str) -> str:
        """Return the weather
        of a city.

        More.
        """
        raise AssertionError

    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    openai = {"type": "function", "function": {"name": "weather", "parameters": schema, "strict": False}}
    message = tools_message([weather, openai, Tool(name="free", regex="a+")], "free", False)
    assert (message.choice, message.name, message.parallel) == (pb.TOOL_CHOICE_NAMED, "free", False)
    of_function, of_mapping, custom = message.tools
    assert (of_function.name, of_function.description) == ("weather", "Return the weather of a city.")
    assert json.loads(of_function.parameters) == schema | {"additionalProperties": False}
    assert (json.loads(of_mapping.parameters), of_mapping.strict) == (schema, False)
    assert not of_function.HasField("strict")
    assert (custom.WhichOneof("input"), custom.regex) == ("regex", "a+")


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([Tool(name="f")], "g", "tool_choice: 'g' is none of auto, none, required, f"),
        ([Tool(name="f", regex="a", lark="b")], None, r"tools\[0\]: lark and regex exclude each other"),
        ([3], None, r"tools\[0\]: is a int"),
        ([{"type": "custom"}], None, r"tools\[0\].type: 'custom' is not 'function'"),
        ([{"name": "f", "parameter": {}}], None, r"tools\[0\]: 'parameter' is not known; did you mean 'parameters'"),
    ],
)
def test_wrong_tools_are_named(tools: Any, choice: str | None, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        tools_message(tools, choice)
    with pytest.raises(ValueError, match="need tools"):
        chat_request("x", None, None, {"tool_choice": "auto"}, None)


def test_reasoning_is_a_switch_or_more() -> None:
    switch = sent(chat_request("x", None, None, {"reasoning": False}, None).request)
    assert switch.reasoning == pb.Reasoning(enabled=False)
    more = sent(chat_request("x", None, None, {"reasoning": Reasoning(max_tokens=9, effort="low")}, None).request)
    assert more.reasoning == pb.Reasoning(max_tokens=9, effort="low")


def test_tokenize_takes_a_text_or_a_conversation() -> None:
    request = tokenize_request(None, "a", [Tool(name="f")], special=None, texts=True)
    assert (request.messages.messages[0].content, request.tools.tools[0].name) == ("a", "f")
    assert not request.HasField("add_special_tokens")
    with pytest.raises(ValueError, match="text, messages: exactly one"):
        tokenize_request(None, None, [], special=None, texts=False)


def answer(**fields: Any) -> Answer[Any]:
    values = {"text": "3", "content": "3", "finish_reason": FinishReason.STOP, "_parse": int} | fields
    return Answer(
        request_id="r",
        index=0,
        token_ids=(),
        usage=Usage(0, 0, 0, 0),
        telemetry=Telemetry(0, 0, False, 0, 0, 0, 0, 0, 0, 0, 0, 0, "", ()),
        **values,
    )


def test_a_closed_answer_has_a_value_for_who_asks_for_it() -> None:
    assert answer(finish_reason=FinishReason.GRAMMAR_CLOSED).parse(closed=True) == 3


def test_a_value_is_parsed_once() -> None:
    values = iter([1, 2])
    parsed = answer(_parse=lambda text: next(values))
    assert (parsed.parsed, parsed.parsed) == (1, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"_parse": None}, "no schema"),
        ({"finish_reason": FinishReason.GRAMMAR_CLOSED}, r"more room, or take them with parse\(closed=True\)"),
        ({"finish_reason": FinishReason.GRAMMAR_INCOMPLETE}, "not complete: it ended with GRAMMAR_INCOMPLETE"),
        ({"tool_calls": (ToolCall("c", "f", "{}"),), "content": " "}, "is a call of f"),
        ({"content": "x", "matched_stop_str": "!"}, "the stop string '!' came first"),
    ],
)
def test_an_answer_without_a_value_says_why(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(NotParsed, match=message):
        _ = answer(**fields).parsed
