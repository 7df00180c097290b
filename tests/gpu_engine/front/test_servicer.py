"""The public API over a real gRPC connection, with a fake engine after it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from gpu_engine.api.errors import GrammarUnavailable, LimitExceeded, QueueTimeout
from gpu_engine.api.output_tensors import OutputRows, OutputSpec
from gpu_engine.api.request import FinishReason, Logprobs, Request, TokenEvent, TokenOrigin
from gpu_engine.front.pacing import StreamPacer
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc
from tests.fakes import EOS, answers_with
from tests.gpu_engine.front.refusals import prompt_scores, refusal
from tests.gpu_engine.front.serving import answer, ask, serving
from tests.waiting import eventually


async def test_an_answer_streams_and_ends_with_usage_and_telemetry(tmp_path: Path) -> None:
    async with serving(tmp_path, answers_with("h\u00e9llo")) as s:
        responses = await answer(s.client, ask(request_id="mine", sampling=pb.SamplingParams(seed=5)))
    assert "".join(r.text for r in responses) == "h\u00e9llo"
    assert [t for r in responses for t in r.token_ids] == [*"h\u00e9llo".encode(), EOS]
    last = responses[-1]
    assert {r.request_id for r in responses} == {"mine"}
    assert last.finish_reason == pb.FINISH_REASON_STOP
    assert last.matched_token_id == EOS
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 7)
    assert last.telemetry.seed == 5
    assert last.telemetry.total_ms > 0
    assert not any(r.finish_reason or r.HasField("usage") for r in responses[:-1])


class LongPauses(StreamPacer):
    """Pauses a stream for longer than any test waits."""

    def pause_s(self, streams: int) -> float:
        return 60.0


async def test_the_end_of_an_answer_interrupts_the_pause_between_two_responses(tmp_path: Path) -> None:
    async with serving(tmp_path, pacer=LongPauses(60.0)) as s, asyncio.timeout(20):
        responses = s.client.generate(ask(), timeout_s=20)
        first = asyncio.create_task(anext(responses))
        await eventually(lambda: s.engine.submitted)
        (request,) = s.engine.submitted
        s.engine.emit(request, TokenEvent(0, (104,)))
        assert (await first).text == "h"
        # The second event is merged with the last one.
        s.engine.emit(request, TokenEvent(0, (105,)))
        s.engine.emit(request, TokenEvent(0, (EOS,), finish=FinishReason.STOP, matched_token_id=EOS))
        assert [(response.text, list(response.token_ids)) async for response in responses] == [("i", [105, EOS])]


async def test_an_error_interrupts_the_pause_between_two_responses(tmp_path: Path) -> None:
    async with serving(tmp_path, pacer=LongPauses(60.0)) as s, asyncio.timeout(20):
        responses = s.client.generate(ask(), timeout_s=20)
        first = asyncio.create_task(anext(responses))
        await eventually(lambda: s.engine.submitted)
        (request,) = s.engine.submitted
        s.engine.emit(request, TokenEvent(0, (104,)))
        await first
        s.engine.emit(request, TokenEvent(0, error=GrammarUnavailable("gone")))
        with pytest.raises(grpc.aio.AioRpcError, match="gone"):
            await anext(responses)


async def test_every_sequence_ends_once_with_its_own_index(tmp_path: Path) -> None:
    async with serving(tmp_path, answers_with("abc", tokens_per_step=2)) as s:
        responses = await answer(s.client, ask(sampling=pb.SamplingParams(n=3)))
        stats = await s.client.stats()
    for index in range(3):
        mine = [r for r in responses if r.index == index]
        assert "".join(r.text for r in mine) == "abc"
        assert [bool(r.finish_reason) for r in mine] == [False] * (len(mine) - 1) + [True]
    assert len({r.telemetry.seed for r in responses if r.finish_reason}) == 3
    assert dict(stats.finished) == {"STOP": 3}
    assert s.engine.dropped == []


async def test_a_stop_string_ends_the_sequence_and_frees_it(tmp_path: Path) -> None:
    async with serving(tmp_path, answers_with("one two three", tokens_per_step=5)) as s:
        responses = await answer(s.client, ask(sampling=pb.SamplingParams(stop=["two"])))
    assert "".join(r.text for r in responses) == "one "
    assert bytes(t for r in responses for t in r.token_ids) == b"one two"
    assert responses[-1].matched_stop_str == "two"
    assert responses[-1].usage.completion_tokens == 7
    assert s.engine.dropped == s.engine.submitted


async def test_the_first_response_of_each_sequence_echoes_the_prompt(tmp_path: Path) -> None:
    async with serving(tmp_path, answers_with("abc", tokens_per_step=2)) as s:
        fields = {"sampling": pb.SamplingParams(n=2), "response": pb.ResponseOptions(echo=True)}
        responses = await answer(s.client, ask("h\u00e9 ", **fields))
    for index in range(2):
        mine = [r for r in responses if r.index == index]
        assert "".join(r.text for r in mine) == "h\u00e9 abc"
        assert [bytes(r.prompt_token_ids).decode() for r in mine] == ["h\u00e9 ", *[""] * (len(mine) - 1)]
        assert mine[-1].usage.completion_tokens == 4


async def test_an_echo_ends_with_the_last_whole_character_of_the_prompt(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda request: answers_with("!")(request)) as s:
        prompt = pb.TokenIds(ids=[257, *"h\u00e9".encode()[:2]])
        options = pb.ResponseOptions(echo=True, omit_token_ids=True)
        responses = await answer(s.client, pb.GenerateRequest(token_ids=prompt, response=options))
        assert "".join(r.text for r in responses) == "h\ufffd!", (
            "the special token is left out, and U+FFFD is there once"
        )
        assert not any(r.prompt_token_ids for r in responses)
        options = pb.ResponseOptions(echo=True, omit_text=True)
        responses = await answer(s.client, pb.GenerateRequest(token_ids=prompt, response=options))
        assert "".join(r.text for r in responses) == ""
        assert list(responses[0].prompt_token_ids) == list(prompt.ids)


@pytest.mark.parametrize("length", [1, 3, 250])
async def test_log_probabilities_of_the_prompt_are_in_the_first_response_of_sequence_0(
    tmp_path: Path, length: int
) -> None:
    def script(request: Request) -> Iterable[TokenEvent]:
        wanted = request.outputs.prompt_logprobs
        scores = None if wanted is None else prompt_scores(len(request.prompt_ids) - 1, wanted)
        yield TokenEvent(request.index, (104,), prompt_logprobs=scores)
        yield TokenEvent(request.index, (EOS,), finish=FinishReason.STOP, matched_token_id=EOS)

    async with serving(tmp_path, script) as s:
        options = pb.ResponseOptions(prompt_logprobs=20, omit_text=True, omit_token_ids=True)
        responses = await answer(s.client, ask("x" * length, sampling=pb.SamplingParams(n=2), response=options))
    with_scores = [r for r in responses if r.prompt_logprobs]
    assert [r.index for r in with_scores] == [0]
    first, *behind = with_scores[0].prompt_logprobs
    assert first == pb.TokenLogprobs()
    assert [entry.logprob for entry in behind] == prompt_scores(length - 1, 20).logprob_N.tolist()
    for entry in behind:
        assert [(top.token_id, top.logprob) for top in entry.top] == [(i, -i) for i in range(20)]
    assert {r.index for r in responses if r.finish_reason} == {0, 1}


def rows(start: int, count: int) -> OutputRows:
    """Return rows whose numbers are their positions."""
    spec = OutputSpec("float32", (320,))
    values = np.repeat(np.arange(start, start + count, dtype=np.float32), 320)
    return OutputRows("generation_logits", spec, start, values.view(np.uint8).reshape(count, -1))


async def test_many_rows_of_a_tensor_come_in_messages_that_any_client_takes(tmp_path: Path) -> None:
    def script(request: Request) -> Iterable[TokenEvent]:
        begin = len(request.prompt_ids) - 1
        yield TokenEvent(0, tuple(b"abc"), outputs=(rows(begin, 3),))
        yield TokenEvent(0, (*b"d" * 2000, EOS), finish=FinishReason.STOP, outputs=(rows(begin + 3, 2001),))

    async with serving(tmp_path, script) as s:
        request = ask(response=pb.ResponseOptions(generation_logits=True, echo=True))
        responses = await answer(s.client, request)
    assert responses[0].text.startswith("hi")
    assert [bool(response.finish_reason) for response in responses] == [False] * (len(responses) - 1) + [True]
    outputs = [output for response in responses for output in response.outputs]
    assert max(response.ByteSize() for response in responses) < (1 << 20) + 50_000
    assert len(outputs) > 2
    begin = len(s.engine.submitted[0].prompt_ids) - 1
    for output in outputs:
        assert output.start == begin
        assert list(output.shape) == [len(output.data) // 1280, 320]
        assert np.frombuffer(output.data, "<f4")[::320].tolist() == list(range(begin, begin + output.shape[0]))
        begin += output.shape[0]
    assert begin == len(s.engine.submitted[0].prompt_ids) + 2003


async def test_rows_of_tokens_behind_a_stop_string_are_dropped(tmp_path: Path) -> None:
    def script(request: Request) -> Iterable[TokenEvent]:
        begin = len(request.prompt_ids) - 1
        yield TokenEvent(0, tuple(b"abcd"), outputs=(rows(begin, 4),))
        yield TokenEvent(0, tuple(b"efgh"), outputs=(rows(begin + 4, 4),))

    async with serving(tmp_path, script) as s:
        sampling = pb.SamplingParams(stop=["ef"])
        request = ask(sampling=sampling, response=pb.ResponseOptions(generation_logits=True))
        responses = await answer(s.client, request)
    assert sum(output.shape[0] for response in responses for output in response.outputs) == 6
    assert responses[-1].usage.completion_tokens == 6


async def test_tensors_of_all_running_requests_together_are_bounded(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda request: ()) as s:
        s.calls.limits = replace(s.calls.limits, output_memory_bytes=150 * 1280)
        request = ask(sampling=pb.SamplingParams(max_tokens=100), response=pb.ResponseOptions(generation_logits=True))
        first = asyncio.create_task(answer(s.client, request))
        await eventually(lambda: len(s.engine.submitted) == 1)
        error = await refusal(s.client, request)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"may have {200 * 1280} bytes; output_memory_bytes = {150 * 1280}" in str(error.details())
        request.sampling.max_tokens = 50
        second = asyncio.create_task(answer(s.client, request))
        await eventually(lambda: len(s.engine.submitted) == 2)
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await eventually(lambda: len(s.calls) == 0)
        third = asyncio.create_task(answer(s.client, request))
        await eventually(lambda: len(s.engine.submitted) == 3)
        third.cancel()


async def test_a_wait_that_is_too_long_is_a_deadline_exceeded(tmp_path: Path) -> None:
    def script(request: Request) -> Iterable[TokenEvent]:
        assert request.scheduling.max_queue_s == 0.25
        yield TokenEvent(0, error=QueueTimeout("max_queue_ms: waited 251 ms"))

    async with serving(tmp_path, script) as s:
        error = await refusal(s.client, ask(max_queue_ms=250))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.details() == "max_queue_ms: waited 251 ms"
        assert s.calls.failed == {"DEADLINE_EXCEEDED": 1}


async def test_tokenize_and_detokenize_are_calls_of_the_service(tmp_path: Path) -> None:
    async with serving(tmp_path) as s, grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        stub: engine_pb2_grpc.EngineAsyncStub = engine_pb2_grpc.EngineStub(channel)  # type: ignore[assignment]
        ids = (await stub.Tokenize(pb.TokenizeRequest(text="h\u00e9"))).token_ids
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "h\u00e9"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Detokenize(pb.DetokenizeRequest(token_ids=[320]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "token_ids[0]: is 320" in str(caught.value.details())
        assert dict((await s.client.stats()).failed) == {"INVALID_ARGUMENT": 1}


async def test_a_client_that_leaves_frees_every_sequence(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        call = s.client.generate(ask(sampling=pb.SamplingParams(n=2), grammar=pb.Grammar(regex="a"), request_id="x"))
        async with aclosing(call):
            task = asyncio.create_task(anext(call))
            await eventually(lambda: len(s.engine.submitted) == 2)
            s.engine.emit(s.engine.submitted[0], TokenEvent(0, (65,)))
            assert (await task).text == "A"
        await eventually(lambda: len(s.engine.dropped) == 2)
        assert s.grammar.forgotten == ["x"]
        await eventually(lambda: not len(s.calls))


async def test_a_deadline_frees_the_request(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in s.client.generate(ask(), timeout_s=3.0):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: s.engine.dropped == s.engine.submitted and s.engine.dropped)


async def test_events_that_wait_are_merged(tmp_path: Path) -> None:
    def script(request: Request) -> Iterable[TokenEvent]:
        yield from [TokenEvent(0, (65,))] * 50
        yield TokenEvent(0, finish=FinishReason.LENGTH)
        s.engine.settle()

    async with serving(tmp_path) as s:
        s.engine.script = script
        responses = await answer(s.client, ask())
    assert "".join(r.text for r in responses) == "A" * 50
    assert len(responses) == 1


async def test_an_error_of_the_engine_ends_the_call_with_its_status(tmp_path: Path) -> None:
    def script(request: Request) -> Iterable[TokenEvent]:
        if request.index == 1:
            yield TokenEvent(1, (66,))
            yield TokenEvent(1, error=GrammarUnavailable("sidecar gone"))

    async with serving(tmp_path, script) as s:
        error = await refusal(s.client, ask(sampling=pb.SamplingParams(n=2)))
        stats = await s.client.stats()
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "sidecar gone"
        assert dict(stats.failed) == {"UNAVAILABLE": 1}
        assert s.engine.dropped == [s.engine.submitted[0]]


async def test_a_wrong_grammar_is_refused_before_its_turn(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        error = await refusal(s.client, ask(grammar=pb.Grammar(regex="bad")))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "grammar: line 1: no"
        assert s.engine.dropped == s.engine.submitted


async def test_a_grammar_for_which_there_is_no_room_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        s.grammar.full = LimitExceeded("grammar: compile_queue: 2 compilations run or wait already")
        error = await refusal(s.client, ask(grammar=pb.Grammar(regex="a")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "compile_queue" in (error.details() or "")
        assert (s.engine.submitted, s.engine.dropped) == ([], [])


async def test_a_grammar_without_a_grammar_process_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, with_grammar=False) as s:
        error = await refusal(s.client, ask(grammar=pb.Grammar(json_object=True)))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "grammar=none" in (error.details() or "")
        assert list((await s.client.info()).backends) == []
        assert not (await s.client.stats()).grammar_ready


async def test_a_full_queue_gives_back_the_sequences_that_were_in(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        s.engine.refuse_with, s.engine.refuse_from = LimitExceeded("the queue is full (max_queue_size 2)"), 2
        error = await refusal(s.client, ask(sampling=pb.SamplingParams(n=3)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert s.engine.dropped == s.engine.submitted
        assert len(s.engine.dropped) == 2


async def test_a_defect_is_internal_and_says_nothing_of_the_inside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(request: Request) -> Iterable[TokenEvent]:
        raise RuntimeError("secret")

    async with serving(tmp_path, script) as s:
        error = await refusal(s.client, ask())
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")
    assert "secret" in caplog.text


async def test_a_bad_field_is_an_invalid_argument(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        error = await refusal(s.client, ask(sampling=pb.SamplingParams(max_tokens=0)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "sampling.max_tokens: is 0, must be at least 1"
        assert s.engine.submitted == []


async def test_abort_ends_all_sequences(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        task = asyncio.create_task(answer(s.client, ask(request_id="a", sampling=pb.SamplingParams(n=2))))
        await eventually(lambda: len(s.engine.submitted) == 2)
        assert await s.client.abort("a")
        responses = await task
        assert [r.finish_reason for r in responses] == [pb.FINISH_REASON_ABORTED] * 2
        await eventually(lambda: not len(s.calls))
        assert not await s.client.abort("a")
        assert not await s.client.abort("never")


async def test_a_request_id_is_free_again_after_its_request(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        task = asyncio.create_task(answer(s.client, ask(request_id="a")))
        await eventually(lambda: s.engine.submitted)
        error = await refusal(s.client, ask(request_id="a"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id" in (error.details() or "")
        s.engine.emit(s.engine.submitted[0], TokenEvent(0, finish=FinishReason.LENGTH))
        await task
        s.engine.script = answers_with("again")
        assert (await answer(s.client, ask(request_id="a")))[-1].finish_reason == pb.FINISH_REASON_STOP


async def test_responses_carry_what_was_asked_for(tmp_path: Path) -> None:
    def script(request: Request) -> Iterable[TokenEvent]:
        logprobs = (Logprobs(-0.5, ((65, -0.5), (66, -1.5))),) if request.outputs.logprobs else ()
        origins = (TokenOrigin.DRAFT,) if request.outputs.token_origins else ()
        yield TokenEvent(0, (65,), logprobs, origins=origins)
        yield TokenEvent(0, (EOS,), logprobs and (Logprobs(0.0, ()),), FinishReason.STOP, EOS, origins=origins)

    async with serving(tmp_path, script) as s:
        no_text = await answer(s.client, ask(response=pb.ResponseOptions(omit_text=True)))
        no_ids = await answer(s.client, ask(response=pb.ResponseOptions(omit_token_ids=True)))
        scored = await answer(s.client, ask(sampling=pb.SamplingParams(logprobs=2)))
        origins = await answer(s.client, ask(response=pb.ResponseOptions(token_origins=True, omit_token_ids=True)))
    assert [o for r in origins for o in r.token_origins] == [pb.TOKEN_ORIGIN_DRAFT] * 2
    assert not any(r.token_origins for r in (*no_text, *no_ids))
    assert not any(r.text for r in no_text)
    assert [t for r in no_text for t in r.token_ids] == [65, EOS]
    assert "".join(r.text for r in no_ids) == "A"
    assert not any(r.token_ids for r in no_ids)
    entries = [entry for r in scored for entry in r.logprobs]
    assert len(entries) == 2
    assert [t.token_id for t in entries[0].top] == [65, 66]


async def test_draining_refuses_new_requests_and_aborts_the_last(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        task = asyncio.create_task(answer(s.client, ask()))
        await eventually(lambda: s.engine.submitted)
        drain = asyncio.create_task(s.calls.drain(0.2))
        await asyncio.sleep(0)
        error = await refusal(s.client, ask())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in (error.details() or "")
        assert (await task)[-1].finish_reason == pb.FINISH_REASON_ABORTED
        await drain


async def test_info_and_stats(tmp_path: Path) -> None:
    async with serving(tmp_path, num_draft_tokens=3) as s:
        info, stats = await s.client.info(), await s.client.stats()
        assert info.served_names == ["embedded"]
    assert (info.model, info.version, info.max_model_len, info.num_draft_tokens) == ("fake-model", "1.2", 256, 3)
    assert list(info.backends) == [pb.BACKEND_LLGUIDANCE, pb.BACKEND_XGRAMMAR]
    assert (stats.num_slots, stats.matchers, stats.cached_grammars, stats.grammar_starts) == (4, 2, 3, 1)
    assert stats.grammar_ready


async def test_a_grammar_compiled_ahead_is_named_by_its_id(tmp_path: Path) -> None:
    async with serving(tmp_path, answers_with("ok")) as s:
        made = await s.client.compile(pb.Grammar(regex="[a-z]+", backend=pb.BACKEND_AUTO, allow_unenforced=True))
        assert (made.backend, made.memory_bytes) == (pb.BACKEND_LLGUIDANCE, 99)
        assert (made.min_tokens, made.known_answer_tokens) == (4, 6)
        assert list(made.warnings) == ["w"]
        await answer(s.client, ask(grammar=pb.Grammar(grammar_id=made.grammar_id)))
        assert [spec for _, spec in s.grammar.prepared] == s.grammar.compiled
        assert (s.grammar.compiled[0].backend, s.grammar.compiled[0].allow_unenforced) == (pb.BACKEND_AUTO, True)
        error = await refusal(s.client, ask(grammar=pb.Grammar(grammar_id="g-unknown")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.client.compile(pb.Grammar(regex="bad"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_server_without_a_grammar_process_compiles_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, answers_with("ok"), with_grammar=False) as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.client.compile(pb.Grammar(regex="a"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        error = await refusal(s.client, ask(grammar=pb.Grammar(grammar_id="g-1")))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_requests_with_one_grammar_share_their_answers_unless_they_say_otherwise(tmp_path: Path) -> None:
    guided = {"grammar": pb.Grammar(json_schema='{"const": "abcdef"}')}
    async with serving(tmp_path, answers_with("x"), device="cpu") as s:  # type: ignore[arg-type]
        for fields in (guided, guided, {**guided, "speculation": pb.Speculation(draft_index=False)}, {}):
            await answer(s.client, ask(**fields))
        one, again, off, free = (request.suffix_scope for request in s.engine.submitted)
    assert one == again
    assert one is not None
    assert one.seeds == (tuple(b' "abcdef"'),)
    assert off is free is None
