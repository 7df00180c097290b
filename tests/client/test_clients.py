"""Both clients against a scripted server: answers, streams, errors, attempts, and what a left stream does."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from lockstep_client import (
    AsyncClient,
    Client,
    CompiledGrammar,
    FinishReason,
    Grammar,
    GrammarNotConfigured,
    InvalidRequest,
    LimitExceeded,
    LockstepError,
    NotAuthenticated,
    NotSupported,
    PartKind,
    Retries,
    ServerFailed,
    TimedOut,
    TokenLogprob,
    TokenLogprobs,
    ToolCall,
    Unavailable,
    UnknownGrammar,
)
from protos.engine.v1 import engine_pb2 as pb
from tests.client.scripted import Scripted, Twin, end, says


@dataclass
class City:
    name: str
    people: int


async def test_an_answer_is_the_sum_of_its_deltas(twin: Twin, server: Scripted) -> None:
    server.script = says("hel", "lo")
    answer = await twin.call("generate", "x", max_tokens=5)
    assert (answer.text, answer.content, answer.token_ids) == ("hello", "hello", (0, 1))
    assert (answer.finish_reason, answer.usage.prompt_tokens) == (FinishReason.STOP, 3)
    assert (answer.telemetry.backend, answer.telemetry.warnings) == ("llguidance", ("w",))
    assert server.requests == [pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=5))]


async def test_a_stream_yields_deltas_and_then_the_answer(twin: Twin, server: Scripted) -> None:
    server.script = says("a", "b")
    deltas, answer = await twin.stream("stream_chat", "Hello")
    assert [delta.text for delta in deltas] == ["a", "b", ""]
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.STOP]
    assert answer.text == "ab"
    assert [(m.role, m.content) for m in server.requests[0].messages.messages] == [("user", "Hello")]


async def test_a_schema_comes_back_as_an_object(twin: Twin, server: Scripted) -> None:
    server.script = says('{"name": "Oslo", ', '"people": 700000}')
    assert (await twin.call("chat", "Describe Oslo.", schema=City)).parsed == City("Oslo", 700000)
    assert '"people": {"type": "integer"}' in server.requests[0].grammar.json_schema


async def test_sequences_are_kept_apart_and_each_of_them_must_end(twin: Twin, server: Scripted) -> None:
    first = [pb.GenerateResponse(index=1, text="b"), pb.GenerateResponse(index=0, text="a")]
    server.script = lambda request, context: [*first, end(1), end(0)]
    answer = await twin.call("generate", [1, 2, 3], n=2)
    assert [each.text for each in (answer, *answer.others)] == ["a", "b"]
    assert list(server.requests[0].token_ids.ids) == [1, 2, 3]
    server.script = lambda request, context: [end(0)]
    with pytest.raises(ServerFailed, match="1 of 2 answers"):
        await twin.call("generate", "x", n=2)


async def test_parts_become_content_reasoning_and_tool_calls(twin: Twin, server: Scripted) -> None:
    kinds = pb.AnswerPart
    parts = [
        [kinds(kind=kinds.KIND_REASONING, text="hm")],
        [kinds(kind=kinds.KIND_CONTENT, text="I "), kinds(kind=kinds.KIND_CONTENT, text="look.")],
        [kinds(kind=kinds.KIND_TOOL_CALL, tool_call_id="c1", tool_name="weather")],
        [kinds(kind=kinds.KIND_TOOL_ARGUMENTS, text='{"city": "Os')],
        [kinds(kind=kinds.KIND_TOOL_ARGUMENTS, text='lo"}')],
        [kinds(kind=kinds.KIND_TOOL_CALL, tool_call_index=1, tool_call_id="c2", tool_name="now")],
    ]
    server.script = lambda request, context: [*(pb.GenerateResponse(parts=each) for each in parts), end()]
    deltas, answer = await twin.stream("stream_chat", "x", reasoning=True)
    assert deltas[2].parts[0].kind is PartKind.TOOL_CALL
    assert (answer.reasoning, answer.content) == ("hm", "I look.")
    assert answer.tool_calls == (ToolCall("c1", "weather", '{"city": "Oslo"}'), ToolCall("c2", "now", ""))
    assert answer.tool_calls[0].json() == {"city": "Oslo"}
    assert answer.message.tool_calls == answer.tool_calls


async def test_log_probabilities_and_the_prompt_are_in_the_answer(twin: Twin, server: Scripted) -> None:
    entry = pb.TokenLogprobs(logprob=-1, top=[pb.TokenLogprob(token_id=4, logprob=-0.5)])
    server.script = lambda request, context: [
        pb.GenerateResponse(token_ids=[4], logprobs=[entry], prompt_token_ids=[8], prompt_logprobs=[entry]),
        end(logprobs=[entry], field_logprobs=[pb.FieldLogprob(pointer="/a", logprob=-2, tokens=3)]),
    ]
    answer = await twin.call("generate", "x", logprobs=1, echo=True)
    read = TokenLogprobs(-1, (TokenLogprob(4, -0.5),))
    of_answer, of_prompt = (replace(read, token_id=4), read), replace(read, token_id=8)
    assert (answer.logprobs, answer.prompt_logprobs, answer.prompt_token_ids) == (of_answer, (of_prompt,), (8,))
    assert (answer.field_logprobs[0].pointer, answer.field_logprobs[0].tokens) == ("/a", 3)


async def test_choices_have_probabilities_that_sum_to_one(twin: Twin, server: Scripted) -> None:
    """A choice has the tokens 5, 6 and the end of sequence, 2."""
    scores = {0: [-9.0, -1.0, -0.5, -0.5], 1: [-9.0, -1.5, -1.0, -0.5], 2: [-9.0, -2.0, -1.0, -1.0]}

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        number = sum(isinstance(each, pb.GenerateRequest) for each in server.requests) - 1
        entries = [pb.TokenLogprobs(logprob=each) for each in scores[number]]
        yield pb.GenerateResponse(prompt_logprobs=entries)
        yield end()

    server.script = script
    shares = await twin.call("choice_probs", [8], ["good", "fair", "bad"])
    weights = [math.exp(each) for each in (-2, -3, -4)]
    assert list(shares) == ["good", "fair", "bad"]
    assert list(shares.values()) == pytest.approx([each / sum(weights) for each in weights])
    sent = [each for each in server.requests if isinstance(each, pb.GenerateRequest)]
    assert [list(each.token_ids.ids) for each in sent] == [[8, 5, 6, 2]] * 3
    assert {(each.response.HasField("prompt_logprobs"), each.sampling.max_tokens) for each in sent} == {(True, 1)}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"choices": ["a"]}, "prompt, messages: exactly one"),
        ({"prompt": "x", "messages": "y", "choices": ["a"]}, "prompt, messages: exactly one"),
        *(({"prompt": "x", "choices": choices}, "choices: must be texts") for choices in ([], ["a", "a"], [""], "ab")),
    ],
)
async def test_wrong_choices_are_refused(twin: Twin, server: Scripted, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}"):
        await twin.call("choice_probs", **given)
    assert server.requests == []


async def test_a_grammar_is_compiled_once_and_used_by_its_id(twin: Twin, server: Scripted) -> None:
    compiled = await twin.call("compile", schema=City)
    assert isinstance(compiled, CompiledGrammar)
    assert (compiled.grammar_id, compiled.backend, compiled.min_tokens) == ("g-1", "xgrammar", 4)
    server.script = says('{"name": "Oslo", "people": 1}')
    assert (await twin.call("chat", "x", grammar=compiled)).parsed == City("Oslo", 1)
    assert server.requests[1].grammar == pb.Grammar(grammar_id="g-1")


async def test_the_other_calls(twin: Twin) -> None:
    assert await twin.call("abort", "r") is True
    assert await twin.call("abort", "another") is False
    info, stats = await twin.call("model_info"), await twin.call("stats")
    assert (info.model, info.backends, info.eos_token_ids) == ("m", ("xgrammar",), (2, 3))
    assert (stats.steps, stats.finished) == (9, {"STOP": 4})
    tokens = await twin.call("tokenize", "ab", with_texts=True)
    assert (tokens.token_ids, tokens.texts) == ((5, 6), ("a", "b"))
    assert await twin.call("detokenize", [5, 6]) == "5,6"
    assert await twin.call("token_texts", [5, 6]) == ("5", "6")


ERRORS: dict[grpc.StatusCode, type[LockstepError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: UnknownGrammar,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
    grpc.StatusCode.FAILED_PRECONDITION: GrammarNotConfigured,
    grpc.StatusCode.UNIMPLEMENTED: NotSupported,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticated,
    grpc.StatusCode.INTERNAL: ServerFailed,
    grpc.StatusCode.DATA_LOSS: ServerFailed,
}


async def test_a_status_is_an_error_of_its_own(twin: Twin, server: Scripted) -> None:
    for code, kind in ERRORS.items():
        server.fails = [(code, "sampling.stop[0]: is empty")] * 2
        for method, arguments in (("generate", ("x",)), ("stats", ())):
            with pytest.raises(LockstepError, match=r"is empty") as raised:
                await twin.call(method, *arguments)
            assert type(raised.value) is kind
            if isinstance(raised.value, InvalidRequest):
                assert raised.value.field == "sampling.stop[0]"
    assert len(server.requests) == 2 * len(ERRORS), "none of them is tried again"


async def test_what_passes_is_tried_again_and_nothing_else(twin: Twin, server: Scripted) -> None:
    passing = [
        (grpc.StatusCode.UNAVAILABLE, "the server is shutting down"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "9 sequences run or wait; max_queue_size = 8"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "grammar: compile_queue: 8 compilations run or wait already; try again"),
    ]
    for failure in passing:
        server.requests.clear()
        server.fails = [failure] * 2
        assert (await twin.call("generate", "x")).text == "yes"
        server.fails = [failure] * 2
        assert (await twin.call("stats")).steps == 9
        assert len(server.requests) == 6
    server.requests.clear()
    server.fails = [(grpc.StatusCode.UNAVAILABLE, "away")] * 3
    with pytest.raises(Unavailable):
        await twin.call("generate", "x")
    server.fails = [(grpc.StatusCode.RESOURCE_EXHAUSTED, "grammar: takes longer than compile_timeout_s = 5")]
    with pytest.raises(LimitExceeded):
        await twin.call("generate", "x")
    assert len(server.requests) == 4


async def test_nothing_is_sent_again_after_the_first_response_or_the_timeout(twin: Twin, server: Scripted) -> None:
    def script(request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        if request.text == "late":
            threading.Event().wait(min(5, context.time_remaining() + 0.5))
        yield pb.GenerateResponse(text="a")
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    server.script = script
    with pytest.raises(Unavailable):
        await twin.call("generate", "x")
    assert len(server.requests) == 1
    with pytest.raises(TimedOut):
        await twin.call("generate", "late", timeout_s=0.2)
    assert len(server.requests) <= 2  # on a busy machine the call may end before the server sees it


async def test_leaving_a_stream_cancels_its_call(twin: Twin, server: Scripted) -> None:
    ended = threading.Event()

    def script(request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        context.add_callback(ended.set)
        while context.is_active():
            yield pb.GenerateResponse(text="a")
            threading.Event().wait(0.01)

    def leave() -> None:
        with twin.client.stream_generate("x") as stream:  # type: ignore[union-attr]
            assert next(stream).text == "a"
            assert not ended.is_set()

    server.script = script
    if isinstance(twin.client, AsyncClient):
        async with twin.client.stream_generate("x") as stream:
            assert (await anext(aiter(stream))).text == "a"
            assert not ended.is_set()
    else:
        await asyncio.to_thread(leave)
    assert await asyncio.to_thread(ended.wait, 60)


def test_no_server_is_unavailable(tmp_path: Any) -> None:
    nowhere = Client(f"unix:{tmp_path}/nobody", retries=Retries(attempts=2, first_pause_s=0.001, longest_pause_s=0.001))
    with nowhere, pytest.raises(Unavailable):
        nowhere.model_info()


async def test_a_wrong_argument_is_refused_before_anything_is_sent(twin: Twin, server: Scripted) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"temprature": 1}, r"generate\(\): 'temprature' is not known; did you mean 'temperature'"),
        ({"tools": []}, r"generate\(\): 'tools' is not known"),
        ({"max_tokens": -1}, "max_tokens: "),
        ({"stop": [3]}, "stop: "),
        ({"schema": City, "grammar": Grammar.regex("a")}, "schema, grammar: exclude each other"),
    ]
    for options, message in cases:
        with pytest.raises((TypeError, ValueError), match=message):
            await twin.call("generate", "x", **options)
    assert server.requests == []
