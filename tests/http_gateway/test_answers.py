"""Answers and their streams, from responses that hold it all: reasoning, content, calls, several sequences."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_gateway.answers.chat import ChatShape, ChatStream, ChatWhole
from http_gateway.answers.completions import Completions, CompletionShape
from http_gateway.answers.messages import MessageAnswer, MessageShape
from http_gateway.answers.pieces import finish_reason, stop_reason
from http_gateway.answers.responses import ResponseAnswer, ResponseShape
from http_gateway.http import stream
from http_gateway.http.calls import chat_request
from http_gateway.wire.chat import ChatRequest
from http_gateway.wire.completions import CompletionRequest
from http_gateway.wire.errors import ApiError
from http_gateway.wire.responses import ResponsesRequest
from protos.engine.v1 import engine_pb2 as pb

Part = pb.AnswerPart
KINDS = {"reasoning": Part.KIND_REASONING, "content": Part.KIND_CONTENT, "arguments": Part.KIND_TOOL_ARGUMENTS}
USAGE = pb.Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3, reasoning_tokens=2)
ASK: Any = {"messages": [{"role": "user", "content": "x"}]}


def end(index: int = 0, reason: pb.FinishReason = pb.FINISH_REASON_STOP) -> pb.GenerateResponse:
    return pb.GenerateResponse(index=index, finish_reason=reason, usage=USAGE)


@st.composite
def answers(draw: st.DrawFn) -> list[pb.GenerateResponse]:
    """An answer of one sequence: reasoning, content, then calls, cut into responses anywhere."""
    parts = [Part(kind=KINDS[kind], text=text) for kind in ("reasoning", "content") for text in draw(TEXTS)]
    for number, name in enumerate(draw(st.lists(st.sampled_from(["f", "c"]), max_size=3))):
        parts.append(Part(kind=Part.KIND_TOOL_CALL, tool_call_index=number, tool_call_id=f"id{number}", tool_name=name))
        parts += [Part(kind=Part.KIND_TOOL_ARGUMENTS, tool_call_index=number, text=text) for text in draw(TEXTS)]
    responses = []
    while parts:
        count = draw(st.integers(1, 4))
        responses.append(pb.GenerateResponse(text="raw <markers>", parts=parts[:count]))
        parts = parts[count:]
    return [*responses, end()]


TEXTS = st.lists(st.text(min_size=1, max_size=3), max_size=3)


def shape(**fields: Any) -> ChatShape:
    made = ChatRequest.model_validate(ASK | fields)
    return ChatShape(id="i", model="m", fields=made, custom=frozenset({"c"}), apart=True, texts={}, created=1)


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the deltas as a client does."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": "", "calls": {}}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content", "reasoning"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                kind, key = ("custom", "input") if "custom" in call else ("function", "arguments")
                known = message["calls"].setdefault(call["index"], {"id": "", "name": "", "text": "", "type": kind})
                assert known["type"] == kind
                known["id"] += call.get("id", "")
                known["name"] += call[kind].get("name", "")
                known["text"] += call[kind].get(key, "")
            message["reason"] = choice["finish_reason"]
    return message


@given(responses=answers())
def test_the_deltas_of_a_stream_are_the_message_of_the_whole_answer(responses: list[pb.GenerateResponse]) -> None:
    stream, whole = ChatStream(shape()), ChatWhole(shape())
    chunks = [chunk for response in responses for chunk in stream.chunks(response)]
    for response in responses:
        whole.take(response)
    (choice,) = whole.result()["choices"]
    message, streamed = choice["message"], joined(chunks)
    assert streamed["content"] == (message["content"] or "")
    for name in ("reasoning_content", "reasoning"):
        assert streamed[name] == message.get("reasoning", "")
    assert streamed["reason"] == choice["finish_reason"]
    calls = message.get("tool_calls", [])
    assert [(c["id"], c[c["type"]]["name"]) for c in calls] == [
        (c["id"], c["name"]) for c in streamed["calls"].values()
    ]
    texts = [c["function"]["arguments"] if c["type"] == "function" else c["custom"]["input"] for c in calls]
    assert texts == [c["text"] for c in streamed["calls"].values()]
    assert "raw" not in json.dumps(chunks)
    assert (choice["finish_reason"] == "tool_calls") == bool(calls)


@given(responses=answers())
def test_the_events_of_the_responses_api_build_its_items(responses: list[pb.GenerateResponse]) -> None:
    fields = ResponsesRequest.model_validate({"input": "x"})
    custom: frozenset[str] = frozenset({"c"})
    answer = ResponseAnswer(ResponseShape(id="i", model="m", fields=fields, custom=custom, apart=True, texts={}))
    events = [*answer.begin(), *(event for response in responses for event in answer.take(response))]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    assert final == answer.json()
    assert final["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    texts = {item["id"]: "" for item in done}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] += event["delta"]
    for item in done:
        shown = item.get("arguments", item.get("input"))
        if item["type"] in ("message", "reasoning"):
            shown = "".join(part["text"] for part in item["content"])
        assert texts[item["id"]] == shown


def message_shape(*, apart: bool = True, prompt_tokens: int = 0) -> MessageShape:
    return MessageShape("i", "m", apart, prompt_tokens, max_tokens=20, max_model_len=64)


@given(responses=answers())
def test_the_events_of_anthropic_s_api_build_its_blocks(responses: list[pb.GenerateResponse]) -> None:
    answer = MessageAnswer(message_shape(prompt_tokens=7))
    start, ping, *events = [*answer.begin(), *(event for response in responses for event in answer.take(response))]
    assert (start["message"]["content"], start["message"]["usage"]["input_tokens"]) == ([], 7)
    assert ping == {"type": "ping"}
    blocks, is_open = list[dict[str, Any]](), False
    for event in events[:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                blocks.append(event["content_block"] | {"json": ""})
                is_open = True
            case "content_block_stop":
                assert is_open
                is_open = False
            case "content_block_delta":
                kind, text = event["delta"]["type"], next(v for k, v in event["delta"].items() if k != "type")
                name = {"input_json_delta": "json"}.get(kind, kind.removesuffix("_delta"))
                blocks[-1][name] += text
            case kind:
                raise AssertionError(kind)
        assert event["index"] == len(blocks) - 1
    assert not is_open
    made, calls = answer.json(), [block for block in blocks if block["type"] == "tool_use"]
    assert [block | {"json": ""} for block in blocks] == [block | {"json": ""} for block in made["content"]]
    texts = {"thinking": "", "text": ""}
    for block in blocks:
        if block["type"] != "tool_use":
            texts[block["type"]] += block[block["type"]]
    whole = ChatWhole(shape())
    for response in responses:
        whole.take(response)
    message = whole.result()["choices"][0]["message"]
    assert texts == {"thinking": message.get("reasoning", ""), "text": message["content"] or ""}
    chat_calls = [call[call["type"]] for call in message.get("tool_calls", ())]
    assert [(call["name"], call["json"]) for call in calls] == [
        (call["name"], call.get("arguments", call.get("input"))) for call in chat_calls
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == made["usage"]
    assert made["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 5,
    }
    assert events[-1] == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("reason", "stop", "prompt_tokens", "said"),
    [
        (pb.FINISH_REASON_STOP, "END", 60, ("stop_sequence", "END")),
        (pb.FINISH_REASON_LENGTH, None, 44, ("max_tokens", None)),
        (pb.FINISH_REASON_LENGTH, None, 45, ("model_context_window_exceeded", None)),
        (pb.FINISH_REASON_GRAMMAR_INCOMPLETE, None, 0, ("max_tokens", None)),
        (pb.FINISH_REASON_GRAMMAR_CLOSED, None, 0, ("max_tokens", None)),
    ],
)
def test_stop_reasons_have_anthropic_s_names(
    reason: pb.FinishReason, stop: str | None, prompt_tokens: int, said: tuple[str, Any]
) -> None:
    """At most 20 tokens were asked for, of a context of 64."""
    answer = MessageAnswer(message_shape(apart=False))
    cut = pb.GenerateResponse(
        text="x", finish_reason=reason, matched_stop_str=stop, usage=pb.Usage(prompt_tokens=prompt_tokens)
    )
    assert [event["type"] for event in answer.take(cut)][-2:] == ["message_delta", "message_stop"]
    assert (answer.json()["stop_reason"], answer.json()["stop_sequence"]) == said


def test_the_input_of_a_call_is_an_object_even_where_max_tokens_cut_it() -> None:
    for text, value in (('{"a": 1}', {"a": 1}), ('{"a": ', {}), ("", {})):
        answer = MessageAnswer(message_shape())
        call = Part(kind=Part.KIND_TOOL_CALL, tool_call_id="id", tool_name="f", text=text)
        list(answer.take(pb.GenerateResponse(parts=[call])))
        assert answer.json()["content"] == [{"type": "tool_use", "id": "id", "name": "f", "input": value}]


STOPPED = pb.GenerateResponse(finish_reason=pb.FINISH_REASON_STOP, usage=USAGE, matched_stop_str="x")


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [("f", '{"a": ', "stop"), ("f", '{"a": 1}', "tool_calls"), ("c", '{"a": ', "tool_calls")],
)
def test_a_call_that_a_stop_string_cut_is_not_one_to_run(name: str, arguments: str, reason: str) -> None:
    calls = [
        Part(kind=Part.KIND_TOOL_CALL, tool_call_id="i", tool_name="f"),
        Part(kind=Part.KIND_TOOL_ARGUMENTS, text="{}"),
        Part(kind=Part.KIND_TOOL_CALL, tool_call_index=1, tool_call_id="j", tool_name=name),
        Part(kind=Part.KIND_TOOL_ARGUMENTS, tool_call_index=1, text=arguments),
    ]
    responses = [pb.GenerateResponse(parts=calls), STOPPED]
    stream, whole = ChatStream(shape()), ChatWhole(shape())
    for response in responses:
        whole.take(response)
    (choice,) = whole.result()["choices"]
    chunks = [chunk for response in responses for chunk in stream.chunks(response)]
    assert choice["finish_reason"] == joined(chunks)["reason"] == reason
    assert choice["stop_reason"] == "x"
    fields = ResponsesRequest.model_validate({"input": "x"})
    answer = ResponseAnswer(
        ResponseShape(id="i", model="m", fields=fields, custom=frozenset({"c"}), apart=True, texts={})
    )
    events = [event for response in responses for event in answer.take(response)]
    done = [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"]
    assert done == [item["status"] for item in answer.json()["output"]]
    assert done == ["completed", "incomplete" if reason == "stop" else "completed"]
    if name == "f":
        message = MessageAnswer(message_shape())
        for response in responses:
            list(message.take(response))
        stopped = ("stop_sequence", "x") if reason == "stop" else ("tool_use", None)
        assert (message.json()["stop_reason"], message.json()["stop_sequence"]) == stopped


@pytest.mark.parametrize("cuts", [(4,), (1, 3), (1, 1, 1, 1)])
def test_each_token_of_a_message_has_its_log_probability_however_it_comes(cuts: tuple[int, ...]) -> None:
    fields = ResponsesRequest.model_validate({"input": "x"})
    texts = {1: "\N{REPLACEMENT CHARACTER}", 2: "\N{REPLACEMENT CHARACTER}", 3: "b", 4: "<end>"}
    answer = ResponseAnswer(ResponseShape("i", "m", fields, frozenset(), apart=False, texts=texts))
    events, shown = [], {1: "", 2: "\u00e9", 3: "b", 4: ""}
    ids = [1, 2, 3, 4]
    for cut in cuts:
        now, ids = ids[:cut], ids[cut:]
        response = pb.GenerateResponse(text="".join(shown[i] for i in now), token_ids=now)
        response.logprobs.extend(pb.TokenLogprobs(logprob=-i) for i in now)
        if not ids:
            response.MergeFrom(end())
        events += answer.take(response)
    (item,) = answer.json()["output"]
    assert [entry["logprob"] for entry in item["content"][0]["logprobs"]] == [-1, -2, -3, -4]
    streamed = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert streamed == item["content"][0]["logprobs"]
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == "\u00e9b"


def test_only_the_last_item_of_a_response_is_incomplete() -> None:
    parts = [
        Part(kind=Part.KIND_CONTENT, text="a"),
        Part(kind=Part.KIND_TOOL_CALL, tool_call_id="i", tool_name="f"),
        Part(kind=Part.KIND_TOOL_ARGUMENTS, text="{"),
    ]
    fields = ResponsesRequest.model_validate({"input": "x"})
    answer = ResponseAnswer(ResponseShape(id="i", model="m", fields=fields, custom=frozenset(), apart=True, texts={}))
    for response in (pb.GenerateResponse(parts=parts), end(reason=pb.FINISH_REASON_LENGTH)):
        list(answer.take(response))
    made = answer.json()
    assert [item["status"] for item in made["output"]] == ["completed", "incomplete"]
    assert made["status"] == "incomplete"


@pytest.mark.parametrize("field", [{"echo": True, "logprobs": 0}, {"prompt_logprobs": 0}])
def test_every_choice_has_the_log_probabilities_of_the_prompt_whichever_sequence_begins(field: dict[str, Any]) -> None:
    fields = CompletionRequest.model_validate({"prompt": "ab", "n": 2, **field})
    made = CompletionShape("i", "m", fields, [{1: "a", 2: "b", 3: "c"}], prompt_ids={0: (1, 2)})
    echo = "ab" if "echo" in field else ""
    later, first = (
        pb.GenerateResponse(
            index=index,
            text=f"{echo}c",
            token_ids=[3],
            logprobs=[pb.TokenLogprobs(logprob=-1)] if echo else (),
            finish_reason=pb.FINISH_REASON_LENGTH,
            usage=USAGE,
        )
        for index in (1, 0)
    )
    first.prompt_token_ids.extend([1, 2])
    first.prompt_logprobs.extend([pb.TokenLogprobs(), pb.TokenLogprobs(logprob=-2)])
    whole, streamed = Completions(made), Completions(made)
    for response in (later, first):
        whole.take(0, response)
    choices = whole.result()["choices"]
    chunks = [chunk["choices"][0] for response in (later, first) for chunk in streamed.chunks(0, response)]
    assert sorted(chunks, key=lambda choice: choice["index"]) == choices
    assert choices[0] == choices[1] | {"index": 0}
    if echo:
        assert choices[1]["logprobs"]["text_offset"] == [0, 1, 2]
        assert choices[1]["logprobs"]["token_logprobs"] == [None, -2, -1]
    else:
        assert len(choices[1]["prompt_logprobs"]) == 2


def test_each_sequence_and_the_usage_have_a_place_of_their_own() -> None:
    stream = ChatStream(shape(stream=True, stream_options={"include_usage": True}, n=2))
    responses = [
        *(pb.GenerateResponse(index=i, parts=[Part(kind=Part.KIND_CONTENT, text=str(i))]) for i in (1, 0, 1)),
        end(0, pb.FINISH_REASON_LENGTH),
        end(1),
    ]
    chunks = [chunk for response in responses for chunk in stream.chunks(response)]
    assert {c["index"]: c["finish_reason"] for chunk in chunks for c in chunk["choices"]} == {0: "length", 1: "stop"}
    assert all(chunk["usage"] is None for chunk in chunks)
    last = stream.last()
    assert last is not None
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 7
    assert last["usage"]["completion_tokens"] == 10
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert ChatStream(shape(stream=True)).last() is None
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = ChatStream(shape(stream=True, stream_options=options, n=2))
    responses = [pb.GenerateResponse(index=1, token_ids=[1]), end(0), end(1)]
    usages = [chunk["usage"] for response in responses for chunk in stream.chunks(response)]
    assert ["completion_tokens_details" in usage for usage in usages] == [False] * (len(usages) - 1) + [True]


def test_a_search_returns_the_answers_that_its_grammar_has() -> None:
    found = pb.GenerateResponse(text="a", finish_reason=pb.FINISH_REASON_STOP, usage=USAGE, beam_score=-0.5)
    missing = [end(index, pb.FINISH_REASON_GRAMMAR_ERROR) for index in (1, 2)]
    search = {"use_beam_search": True, "n": 3}
    chat, completion = ChatRequest.model_validate(ASK | search), {"prompt": ["x", "y"]} | search
    whole = ChatWhole(ChatShape("i", "m", chat, frozenset(), False, {}))
    texts = CompletionShape("i", "m", CompletionRequest.model_validate(completion), [{}, {}])
    completions = Completions(texts)
    for response in (found, *missing):
        whole.take(response)
        completions.take(1, response)
    (choice,) = whole.result()["choices"]
    assert (choice["index"], choice["message"]["content"], choice["beam_score"]) == (0, "a", -0.5)
    (choice,) = completions.result()["choices"]
    assert (choice["index"], choice["text"], choice["beam_score"]) == (3, "a", -0.5)
    completions.take(0, found)
    with pytest.raises(ApiError, match="the grammar left no legal token"):
        completions.take(0, end(0, pb.FINISH_REASON_GRAMMAR_ERROR))


@given(answers())
def test_each_token_says_how_it_came(responses: list[pb.GenerateResponse]) -> None:
    texts = {1: "a", 2: "b", 3: "c"}
    made = ChatShape(
        id="i", model="m", fields=ChatRequest.model_validate(ASK | {"token_origins": True}), custom=frozenset(),
        apart=True, texts=texts, created=1,
    )  # fmt: skip
    for response in responses:
        response.token_ids.extend([1, 2, 3])
        response.token_origins.extend([pb.TOKEN_ORIGIN_FORCED, pb.TOKEN_ORIGIN_DRAFT, pb.TOKEN_ORIGIN_SAMPLED])
    each = [{"token": "a", "origin": "forced"}, {"token": "b", "origin": "draft"}, {"token": "c", "origin": "sampled"}]
    stream, whole = ChatStream(made), ChatWhole(made)
    for response in responses:
        whole.take(response)
    chunks = [chunk for response in responses for chunk in stream.chunks(response)]
    streamed = [entry for chunk in chunks for entry in chunk["choices"][0].get("token_origins", ())]
    assert streamed == whole.result()["choices"][0]["token_origins"] == each * len(responses)
    fields = CompletionRequest.model_validate({"prompt": "x", "token_origins": True})
    completions = Completions(CompletionShape(id="i", model="m", fields=fields, texts=[texts]))
    for response in responses:
        completions.take(0, response)
    assert completions.result()["choices"][0]["token_origins"] == streamed


def test_values_have_events_next_to_the_text_and_in_the_whole_answer() -> None:
    kinds = pb.ValueEvent
    responses = [pb.GenerateResponse(text='{"a":'), pb.GenerateResponse(text="1}"), end()]
    responses[0].value_events.add(kind=kinds.KIND_STARTED, pointer="", type=kinds.TYPE_OBJECT)
    responses[1].value_events.add(
        kind=kinds.KIND_FINISHED, pointer="/a", type=kinds.TYPE_NUMBER, value_json="1", logprob=-0.5, tokens=1
    )
    responses[1].value_events.add(kind=kinds.KIND_FINISHED, pointer="", type=kinds.TYPE_OBJECT, logprob=-2.25, tokens=4)
    first = [{"kind": "started", "pointer": "", "type": "object"}]
    second = [
        {"kind": "finished", "pointer": "/a", "type": "number", "value_json": "1", "logprob": -0.5, "tokens": 1},
        {"kind": "finished", "pointer": "", "type": "object", "logprob": -2.25, "tokens": 4},
    ]
    for asked in ({"value_events": True}, {"items_of": "/a"}):
        made = replace(shape(**asked), apart=False)
        stream, whole = ChatStream(made), ChatWhole(made)
        for response in responses:
            whole.take(response)
        chunks = [chunk["choices"][0] for response in responses for chunk in stream.chunks(response)]
        sent = [
            (choice["delta"].get("content"), choice["value_events"]) for choice in chunks if "value_events" in choice
        ]
        assert sent == [('{"a":', first), ("1}", second)]
        assert whole.result()["choices"][0]["value_events"] == first + second
        fields = CompletionRequest.model_validate({"prompt": "x"} | asked)
        completions = Completions(CompletionShape(id="i", model="m", fields=fields, texts=[{}]))
        for response in responses:
            completions.take(0, response)
        assert completions.result()["choices"][0]["value_events"] == first + second


def test_the_fields_of_values_reach_the_engine() -> None:
    asked = chat_request(ChatRequest.model_validate(ASK | {"value_events": True, "items_of": ""}), thinks=False)
    assert (asked.response.value_events, asked.response.HasField("items_of")) == (True, True)
    asked = chat_request(ChatRequest.model_validate(ASK), thinks=False)
    assert (asked.response.value_events, asked.response.HasField("items_of")) == (False, False)


def test_reasoning_is_hidden_where_the_client_says_so() -> None:
    thought = pb.GenerateResponse(parts=[Part(kind=Part.KIND_REASONING, text="hm")])
    stream, whole = ChatStream(shape(include_reasoning=False)), ChatWhole(shape(include_reasoning=False))
    assert "hm" not in json.dumps([*stream.chunks(thought)])
    whole.take(thought)
    whole.take(end())
    assert "hm" not in json.dumps(whole.result())


def test_a_model_that_thinks_is_asked_for_its_thoughts_apart() -> None:
    def asked(thinks: bool, **fields: Any) -> pb.GenerateRequest:
        return chat_request(ChatRequest.model_validate(ASK | fields), thinks=thinks)

    assert [asked(thinks).HasField("reasoning") for thinks in (True, False)] == [True, False]
    assert asked(False, reasoning_effort="low").reasoning == pb.Reasoning(effort="low")
    assert asked(True, reasoning_effort="none").reasoning == pb.Reasoning(enabled=False)
    assert asked(False, thinking_token_budget=9).reasoning == pb.Reasoning(max_tokens=9)


@pytest.mark.parametrize(
    ("reason", "calls", "said"),
    [
        (pb.FINISH_REASON_STOP, 0, "stop"),
        (pb.FINISH_REASON_STOP, 1, "tool_calls"),
        (pb.FINISH_REASON_GRAMMAR_CLOSED, 0, "length"),
        (pb.FINISH_REASON_GRAMMAR_CLOSED, 1, "length"),
        (pb.FINISH_REASON_LENGTH, 1, "length"),
        (pb.FINISH_REASON_GRAMMAR_INCOMPLETE, 0, "length"),
    ],
)
def test_finish_reasons_have_openai_s_names(reason: pb.FinishReason, calls: int, said: str) -> None:
    assert finish_reason(end(0, reason), calls) == said


def test_a_closed_answer_says_so_unless_a_stop_of_the_request_ended_it() -> None:
    closed = end(0, pb.FINISH_REASON_GRAMMAR_CLOSED)
    assert stop_reason(closed, ()) == "grammar_closed"
    closed.matched_token_id = 7
    assert (stop_reason(closed, ()), stop_reason(closed, (7,))) == ("grammar_closed", 7)
    assert stop_reason(end(0, pb.FINISH_REASON_STOP), ()) is None


def test_an_answer_that_failed_is_an_error() -> None:
    for reason, status in ((pb.FINISH_REASON_ABORTED, 503), (pb.FINISH_REASON_GRAMMAR_ERROR, 422)):
        with pytest.raises(ApiError) as raised:
            finish_reason(end(0, reason), 0)
        assert raised.value.status == status


@given(
    st.text(
        alphabet=st.one_of(st.sampled_from('\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\\"'), st.characters(codec="utf-8"))
    )
)
def test_the_data_of_an_event_is_one_line_to_every_client(text: str) -> None:
    lines = stream.event({"text": text}, "a").decode().splitlines()
    assert [lines[0], *lines[2:]] == ["event: a", ""]
    assert json.loads(lines[1].removeprefix("data: ")) == {"text": text}
