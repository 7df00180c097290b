"""Bodies of requests: known fields, refused fields, and the place of a problem."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from pydantic import ValidationError

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.front.validation import check_prompt_length
from http_gateway.answers.naming import name_as_sent
from http_gateway.answers.sampling import begin
from http_gateway.http.calls import chat_request
from http_gateway.http.openapi import document
from http_gateway.wire.chat import ChatRequest
from http_gateway.wire.completions import CompletionRequest
from http_gateway.wire.errors import ApiError, from_status, message_error
from http_gateway.wire.fields import Fields, problem
from http_gateway.wire.messages import CountTokensRequest, MessagesRequest
from http_gateway.wire.messages import chat_body as message_body
from http_gateway.wire.responses import ResponsesRequest, chat_body
from protos.engine.v1 import engine_pb2 as pb

ASK = {"messages": [{"role": "user", "content": "x"}]}
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


def parsed(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate_json(json.dumps(ASK | fields))


def refusal(model: type[Fields], body: Any) -> tuple[str, str | None, str | None]:
    with pytest.raises(ValidationError) as raised:
        model.model_validate_json(json.dumps(body))
    error = problem(raised.value, body)
    return error.message, error.param, error.code


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"max_tokns": 1}, "max_tokns", "is unknown; did you mean max_tokens?"),
        ({"qqqq": 1}, "qqqq", "is unknown"),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "is not supported: a prompt is never cut"),
        ({"prediction": {"content": "x"}}, "prediction", "a text in the prompt is drafted from"),
        ({"speculation": {"draft_tokens": [1]}}, "speculation.draft_tokens", "a text in the prompt is drafted from"),
        ({"kv_cache_retention_config": {}}, "kv_cache_retention_config", "drops the pages that were unused"),
        ({"early_stopping": "soon"}, "early_stopping", "input should be"),
        ({"audio": {}}, "audio", "is not supported: the model reads only text"),
        ({"messages": []}, "messages", "list should have at least 1 item"),
        ({"messages": None}, "messages", "field required"),
        ({"messages": [{"role": "user", "contnt": "x"}]}, "messages[0].contnt", "did you mean content?"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]}, "messages[0].content[0].txt", ""),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].image_url",
            "the model reads only text",
        ),
        ({"temperature": "hot"}, "temperature", "should be a valid number"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"max_tokens": 1 << 32}, "max_tokens", "less than 4294967296"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", ""),
        ({"response_format": {"type": "jsn"}}, "response_format", ""),
        ({"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}}, None, "did you mean schema?"),
        ({"tool_choice": "maybe"}, "tool_choice", ""),
        ({"tool_choice": {"type": "function", "function": {"nme": "f"}}}, "tool_choice.function.nme", "name?"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
            "at least 1 item",
        ),
        ({"logits_processors": [{"qualname": "a", "args": [1]}]}, "logits_processors[0].args", "use kwargs"),
        ({"logits_processors": [{"name": "a"}]}, "logits_processors[0].name", "is unknown"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "not padded"),
    ],
)
def test_a_problem_names_its_field(body: dict[str, Any], param: str | None, message: str) -> None:
    said, named, _ = refusal(ChatRequest, ASK | body)
    assert message in said
    if param is not None:
        assert named == param
        assert said.startswith(f"{param}: ")


USE: dict[str, Any] = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "3"}]}
MESSAGE: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}


def translated(body: dict[str, Any]) -> pb.GenerateRequest:
    try:
        fields = MessagesRequest.model_validate_json(json.dumps(body))
    except ValidationError as error:
        raise problem(error, body) from error
    try:
        return chat_request(message_body(fields, "", thinks=False), thinks=False)
    except ApiError as error:
        raise name_as_sent(error, fields) from error


def blocks(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"max_tokens": None}, "max_tokens", "field required"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"stop": ["x"]}, "stop", "is unknown"),
        ({"container": "x"}, "container", "keeps no responses"),
        ({"service_tier": "priority"}, "service_tier", "one tier"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role", "'user' or 'assistant'"),
        (blocks({"type": "image", "source": {}}), "messages[0].content[0].type", "'image' is no block"),
        (blocks({"type": "text"}), "messages[0].content[0].text", "field required"),
        (blocks({"type": "text", "text": "x", "txt": 1}), "messages[0].content[0].txt", "did you mean text?"),
        (blocks(RESULT | {"content": [{"type": "document"}]}), "messages[0].content[0].content[0].type", "'document'"),
        (blocks(RESULT), "messages[0].content[0].tool_use_id", "no tool_use block before it"),
        (blocks({"type": "thinking", "thinking": "x"}), "messages[0].content[0].type", "is for the assistant"),
        (blocks(RESULT, role="assistant"), "messages[0].content[0].type", "is for the user"),
        ({"system": [{"type": "text", "text": "x", "citations": [1]}]}, "system[0].citations", "cites nothing"),
        ({"tools": [{"type": "bash_20250124", "name": "bash", "x": 1}]}, "tools[0].type", "runs no tools"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "field required"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "is required with type: tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "is required with type: enabled"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display", "shown whole"),
    ],
)
def test_a_problem_of_anthropic_s_body_names_its_field(body: dict[str, Any], param: str, message: str) -> None:
    body = {name: value for name, value in (MESSAGE | body).items() if value is not None}
    with pytest.raises(ApiError) as raised:
        translated(body)
    error = raised.value
    assert (error.param, message in error.message) == (param, True), error.message
    assert message_error(error)[1]["error"]["message"].startswith(f"{param}: ")


FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "h"}}]},
}
CUSTOM = {"type": "custom", "custom": {"name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
ASKED = {"input": "x"}


@pytest.mark.parametrize(
    ("model", "body", "engine_s", "client_s"),
    [
        (ChatRequest, ASK | {"response_format": FORMAT}, "grammar", "response_format.json_schema.schema"),
        (ChatRequest, ASK | {"response_format": FORMAT}, "grammar.json_schema", "response_format.json_schema.schema"),
        (ChatRequest, ASK | {"structured_outputs": {"json": SCHEMA}}, "grammar", "structured_outputs.json"),
        (ChatRequest, ASK | {"structured_outputs": {"choice": [""]}}, "grammar.choice.choices[0]",
         "structured_outputs.choice[0]"),
        (ChatRequest, ASK | {"structured_outputs": {"regex": "a", "max_whitespace": 1}}, "grammar.max_whitespace",
         "structured_outputs.max_whitespace"),
        (CompletionRequest, {"prompt": "x", "guided_json": SCHEMA}, "grammar", "guided_json"),
        (ChatRequest, ASK | {"tools": FUNCTIONS}, "tools[1].parameters", "tools[1].function.parameters"),
        (ChatRequest, ASK | {"tools": FUNCTIONS, "tool_choice": ALLOWED}, "tools[0].name", "tools[2].function.name"),
        (ChatRequest, ASK | {"tools": [CUSTOM]}, "tools[0].lark", "tools[0].custom.format.definition"),
        (ChatRequest, ASK | {"tools": [CUSTOM]}, "grammar", "tools"),
        (ResponsesRequest, ASKED | {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "grammar",
         "text.format.schema"),
        (ResponsesRequest, ASKED | {"structured_outputs": {"regex": "("}}, "grammar", "structured_outputs.regex"),
        (ResponsesRequest, ASKED | {"tools": [{"type": "function", "name": "f"}]}, "tools[0].parameters",
         "tools[0].parameters"),
        (ResponsesRequest, ASKED, "max_tokens", "max_output_tokens"),
        (ResponsesRequest, ASKED, "tools[0].function.name", "tools[0].name"),
        (MessagesRequest, MESSAGE | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
         "grammar", "output_config.format.schema"),
        (MessagesRequest, MESSAGE | {"tools": [{"name": "f", "input_schema": {}}]}, "tools[0].parameters",
         "tools[0].input_schema"),
        (MessagesRequest, MESSAGE, "stop[3]", "stop_sequences[3]"),
        (ChatRequest, ASK | {"tools": FUNCTIONS, "tool_choice": ALLOWED}, "tools[1].name", "tools"),
        (ChatRequest, ASK | {"logprobs": True, "top_logprobs": 21}, "logprobs", "top_logprobs"),
        (ChatRequest, ASK | {"logprobs": True}, "logprobs", "logprobs"),
        (ResponsesRequest, ASKED | {"top_logprobs": 21}, "logprobs", "top_logprobs"),
        (ResponsesRequest, ASKED, "tool_choice.allowed_tools.tools", "tool_choice.tools"),
        (MessagesRequest, MESSAGE | {"system": "s"}, "messages[0].content", "system"),
        (MessagesRequest, MESSAGE | {"system": "s"}, "messages[1].role", "messages[0].role"),
        (MessagesRequest, MESSAGE | {"system": "s"}, "messages[0].content[0].type", "messages[0].content[0].type"),
        (ResponsesRequest, ASKED | {"instructions": "s"}, "messages[0].content", "instructions"),
        (ResponsesRequest, ASKED | {"instructions": "s"}, "messages[1].content", "input"),
        (ResponsesRequest, {"input": [{"type": "reasoning", "summary": []}, {"role": "assistant", "content": "a"},
                                      {"role": "user", "content": "x"}]}, "messages[1].role", "input[2]"),
    ],
)  # fmt: skip
def test_an_error_of_the_engine_names_the_client_s_own_field(
    model: type[Fields], body: dict[str, Any], engine_s: str, client_s: str
) -> None:
    fields = model.model_validate(body)
    error = name_as_sent(ApiError(f"{engine_s}: is wrong", param=engine_s), fields)
    assert (error.param, error.message) == (client_s, f"{client_s}: is wrong")


@pytest.mark.parametrize(
    ("details", "status", "code"),
    [
        ("grammar: max_grammar_depth: the JSON Schema is nested deeper than 128 levels", 400, "grammar_too_large"),
        ("grammar: llguidance: 20001 alternatives; at most 20000 may be open in one place", 400, "grammar_too_large"),
        ("tools[0].parameters: max_grammar_bytes: the grammar has 2 bytes, the limit is 1", 400, "grammar_too_large"),
        ("grammar: compile_timeout_s: xgrammar did not compile the grammar within 5 s", 429, "overloaded"),
        ("grammar: compile_queue: 4 compilations are waiting already", 429, "overloaded"),
    ],
)
def test_a_grammar_that_is_too_large_is_not_to_be_sent_again(details: str, status: int, code: str) -> None:
    error = from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
    assert (error.status, error.code, "Retry-After" in error.headers) == (status, code, status == 429)
    assert error.param == details.partition(":")[0]


@pytest.mark.parametrize(
    ("engine_s", "param"),
    [
        ("token_ids.ids[3]", "prompt[3]"),
        ("text", "prompt"),
        ("response.per_field_logprobs", "field_logprobs"),
        ("sampling.repetition_min_pattern_size", "repetition_detection.min_pattern_size"),
        ("logits_processors[1].name", "logits_processors[1].qualname"),
        ("logits_processors[1].arguments", "logits_processors[1].kwargs"),
        ("logits_processors", "logits_processors"),
    ],
)
def test_a_status_of_the_engine_names_the_field_of_http(engine_s: str, param: str) -> None:
    error = from_status(grpc.StatusCode.INVALID_ARGUMENT, f"{engine_s}: is wrong")
    assert (error.param, error.message) == (param, f"{param}: is wrong")


def test_anthropic_s_body_is_the_same_conversation() -> None:
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "y"}, USE]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "and"}, {"type": "text", "text": "so"}]},
        {"role": "assistant", "content": "It is"},
    ]
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True}]
    asked: dict[str, Any] = {
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "tools": tools,
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "stop_sequences": ["E"],
        "metadata": {"user_id": "u"},
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
    }
    fields = MessagesRequest.model_validate(MESSAGE | asked | {"messages": turns})
    request = chat_request(message_body(fields, "id", thinks=True), thinks=True)
    assert request.messages.continue_final_message
    assert [(turn.role, turn.content, turn.reasoning) for turn in request.messages.messages] == [
        ("system", "s", ""),
        ("user", "x", ""),
        ("assistant", "y", "t"),
        ("tool", "3", ""),
        ("user", "", ""),
        ("assistant", "It is", ""),
    ]
    assert [part.text for part in request.messages.messages[4].parts] == ["and", "so"]
    (call,) = request.messages.messages[2].tool_calls
    assert (call.id, call.name, json.loads(call.arguments)) == ("a", "f", {"x": 1})
    assert request.messages.messages[3].tool_call_id == "a"
    assert (request.tools.choice, request.tools.name, request.tools.parallel) == (pb.TOOL_CHOICE_NAMED, "f", False)
    assert (request.tools.tools[0].description, request.tools.tools[0].strict) == ("d", True)
    assert request.reasoning.max_tokens == 9
    sampling = request.sampling
    assert (sampling.max_tokens, list(sampling.stop), sampling.top_k) == (5, ["E"], 4)
    assert (sampling.temperature, round(sampling.top_p, 3)) == (0.5, 0.9)

    def of(thinks: bool, **more: Any) -> pb.GenerateRequest:
        return chat_request(message_body(MessagesRequest(**MESSAGE | more), "id", thinks=thinks), thinks=thinks)

    off = {"thinking": {"type": "disabled"}}
    assert (of(True, **off).reasoning.enabled, of(False, **off).HasField("reasoning")) == (False, False)
    form = {"type": "json_schema", "schema": {"type": "integer"}}
    assert json.loads(of(False, output_config={"format": form}).grammar.json_schema) == {"type": "integer"}
    choices = {"auto": pb.TOOL_CHOICE_AUTO, "any": pb.TOOL_CHOICE_REQUIRED, "none": pb.TOOL_CHOICE_NONE}
    assert {name: of(False, tools=tools, tool_choice={"type": name}).tools.choice for name in choices} == choices


def test_what_is_no_object_is_refused() -> None:
    assert refusal(ChatRequest, [1])[0].startswith("body: ")
    assert refusal(ResponsesRequest, {"input": []})[1] == "input"
    assert refusal(ResponsesRequest, {"input": [{"type": "item_reference", "id": "x"}]})[1] == "input[0]"
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate_json(b"{")
    assert problem(raised.value, None).code == "invalid_json"


def test_null_and_values_that_ask_for_nothing_mean_unset() -> None:
    names = ChatRequest.names() | CompletionRequest.names() | set(ChatRequest.REFUSED)
    nulls = dict.fromkeys(names - {"messages", "prompt", "echo"})
    assert parsed(**nulls) == parsed()
    harmless: dict[str, Any] = {name: r.harmless[0] for name, r in ChatRequest.REFUSED.items() if r.harmless}
    assert len(harmless) > 8
    assert parsed(**harmless)


def test_completions_take_every_form_of_prompt() -> None:
    def prompts(prompt: Any) -> Any:
        return CompletionRequest.model_validate_json(json.dumps({"prompt": prompt})).prompts()

    assert (prompts("a"), prompts([1, 2])) == (["a"], [[1, 2]])
    for several in (["a", "b"], [[1], [2, 3]], [[]]):  # the engine refuses the last one
        assert prompts(several) == several
    for wrong in ([], ["a", 1], [1, "a"], {"a": 1}, [-1]):
        assert str(refusal(CompletionRequest, {"prompt": wrong})[1]).startswith("prompt")


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    made: Any = parsed(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
    assert list(made.response_format.json_schema.schema_["properties"]) == ["b", "a"]


def test_the_document_describes_every_field() -> None:
    schemas = document("1", keys=True)["components"]["schemas"]
    for model in (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, CountTokensRequest):
        assert set(schemas[model.__name__]["properties"]) == model.names()
        assert schemas[model.__name__]["additionalProperties"] is False
    assert json.dumps(schemas)


def test_a_problem_that_only_the_translation_finds_is_named() -> None:
    fields = ResponsesRequest.model_validate_json(
        '{"input": "x", "tools": [{"type": "function", "name": "f", "format": {"type": "text"}}]}'
    )
    with pytest.raises(ApiError, match="tools: format is not for a tool of type function"):
        chat_body(fields, "id")
    assert refusal(ResponsesRequest, {"input": [{"role": "", "content": "x"}]})[1] == "input[0].role"


def begun(**fields: Any) -> pb.GenerateRequest:
    return begin(parsed(**fields), "r", max_tokens=None, logprobs=None)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"n": 4}, pb.BeamSearch(beam_width=4)),
        ({"best_of": 3, "n": 2, "length_penalty": 0.5}, pb.BeamSearch(beam_width=3, length_penalty=0.5)),
        ({"beam_width": 2, "best_of": 2}, pb.BeamSearch(beam_width=2)),
        *(
            ({"beam_width": 2, "early_stopping": value}, pb.BeamSearch(beam_width=2, early_stopping=number))
            for value, number in (
                (False, pb.EARLY_STOPPING_HEURISTIC),
                (True, pb.EARLY_STOPPING_TRUE),
                ("never", pb.EARLY_STOPPING_NEVER),
            )
        ),
        ({}, pb.BeamSearch(beam_width=1)),  # the engine refuses it
    ],
)
def test_a_beam_search_has_the_fields_of_vllm(fields: dict[str, Any], wanted: pb.BeamSearch) -> None:
    made = begun(use_beam_search=True, temperature=0, top_p=1.0, top_k=-1, **fields)
    assert made.beam_search == wanted
    assert made.sampling == pb.SamplingParams(n=fields.get("n"))
    assert begun(use_beam_search=True, n=2, temperature=0.5, top_k=3).sampling.temperature == 0.5, "the engine decides"
    assert not begun(best_of=1, beam_width=1, length_penalty=1, early_stopping=False).HasField("beam_search")


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"best_of": 2}, "best_of", "is only for use_beam_search: true"),
        ({"beam_width": 2}, "beam_width", "is only for use_beam_search: true"),
        ({"length_penalty": 0.5, "use_beam_search": False}, "length_penalty", "is only for use_beam_search: true"),
        ({"early_stopping": "never"}, "early_stopping", "is only for use_beam_search: true"),
        ({"use_beam_search": True, "n": 2, "stream": True}, "use_beam_search", "is not for streams"),
        ({"use_beam_search": True, "best_of": 2, "beam_width": 3}, "best_of", "is 2, and beam_width is 3"),
    ],
)
def test_a_field_of_a_beam_search_without_an_effect_is_refused(
    fields: dict[str, Any], param: str, problem: str
) -> None:
    with pytest.raises(ApiError, match=problem) as raised:
        begun(**fields)
    assert raised.value.param == param
    assert raised.value.message.startswith(f"{param}: ")


def test_logits_processors_are_names_or_objects_with_arguments() -> None:
    body: dict[str, Any] = {"logits_processors": ["a", {"qualname": "b", "kwargs": {"n": [1]}}, {"qualname": "c"}]}
    made = begun(**body).logits_processors
    assert [(each.name, each.arguments) for each in made] == [("a", ""), ("b", '{"n": [1]}'), ("c", "")]


@pytest.mark.parametrize(
    ("fields", "closed"),
    [
        ({"strict": True}, True),
        ({"strict": False}, None),
        ({}, None),
        ({"strict": True, "options": {"closed_objects": False}}, False),
        ({"options": {"closed_objects": True}}, True),
        ({"options": {"disable_additional_properties": True}}, True),
        ({"options": {"disable_additional_properties": False}}, None),
    ],
)
def test_strict_and_the_name_of_vllm_close_objects(fields: dict[str, Any], closed: bool | None) -> None:
    named = {"name": "x", "schema": SCHEMA} | ({"strict": fields["strict"]} if "strict" in fields else {})
    options = {"structured_outputs": fields["options"]} if "options" in fields else {}
    grammar = begun(response_format={"type": "json_schema", "json_schema": named}, **options).grammar
    assert (grammar.closed_objects if grammar.HasField("closed_objects") else None) is closed
    body = {"model": "m", "input": "x", "text": {"format": {"type": "json_schema", **named}}}
    made = chat_body(ResponsesRequest.model_validate(body), "r")
    of_responses = begin(made, "r", max_tokens=None, logprobs=None).grammar
    assert of_responses.closed_objects is (fields.get("strict") is True)


def test_contradicting_closed_objects_are_refused() -> None:
    options = {"closed_objects": False, "disable_additional_properties": True, "json": SCHEMA}
    with pytest.raises(ApiError, match=r"contradicts structured_outputs\.closed_objects"):
        begun(structured_outputs=options)


def test_a_prompt_that_does_not_fit_has_the_code_that_clients_look_for() -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_prompt_length("text", 64, 64)
    made = from_status(grpc.StatusCode.INVALID_ARGUMENT, str(raised.value))
    assert (made.status, made.param, made.code) == (400, "prompt", "context_length_exceeded")
    assert from_status(grpc.StatusCode.INVALID_ARGUMENT, "text: has no tokens").code == "invalid_value"


@pytest.mark.parametrize(
    ("details", "seconds"), [("the limit is 9; try again in 4.3 s", "5"), ("the queue is full", "1")]
)
def test_a_retry_comes_when_the_engine_says(details: str, seconds: str) -> None:
    assert from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, details).headers == {"Retry-After": seconds}
