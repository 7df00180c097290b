"""The public API over a real gRPC connection, with a fake engine after it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from gpu_engine.api.errors import GrammarUnavailable, LimitExceeded, QueueTimeout
from gpu_engine.api.output_tensors import OutputRows, OutputSpec
from gpu_engine.api.request import FinishReason, Logprobs, Request, TokenEvent, TokenOrigin
from gpu_engine.front.pacing import StreamPacer
from gpu_engine.front.servicer import EngineServicer
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import EOS, answers_with
from tests.gpu_engine.front.serving import FakeContext, answer, ask, prompt_scores, refusal, serving
from tests.waiting import eventually

Code = grpc.StatusCode


async def test_an_answer_streams_and_ends_with_usage_and_telemetry(tmp_path: Path) -> None:
    async with serving(tmp_path, answers_with("h\u00e9llo")) as s:
        responses = await answer(s.client, ask(request_id="mine", sampling=pb.SamplingParams(seed=5)))
    assert "".join(r.text for r in responses) == "h\u00e9llo"
    assert [t for r in responses for t in r.token_ids] == [*"h\u00e9llo".encode(), EOS]
    last = responses[-1]
    assert {r.request_id for r in responses} == {"mine"}
    assert (last.finish_reason, last.matched_token_id) == (pb.FINISH_REASON_STOP, EOS)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 7)
    assert last.telemetry.seed == 5
    assert last.telemetry.total_ms > 0
    assert not any(r.finish_reason or r.HasField("usage") for r in responses[:-1])


class LongPauses(StreamPacer):
    """Pauses a stream for longer than any test waits."""

    def pause_s(self, streams: int) -> float:
        return 60.0


async def test_the_end_of_an_answer_and_an_error_interrupt_the_pause_between_two_responses(tmp_path: Path) -> None:
    async with serving(tmp_path, pacer=LongPauses(60.0)) as s, asyncio.timeout(20):
        for number in range(2):
            responses = s.client.generate(ask(), timeout_s=20)
            first = asyncio.create_task(anext(responses))
            await eventually(lambda number=number: len(s.engine.submitted) > number)
            request = s.engine.submitted[-1]
            s.engine.emit(request, TokenEvent(0, (104,)))
            assert (await first).text == "h"
            s.engine.emit(request, TokenEvent(0, (105,)))  # merged with the event after it
            if number == 0:
                s.engine.emit(request, TokenEvent(0, (EOS,), finish=FinishReason.STOP, matched_token_id=EOS))
                assert [(each.text, list(each.token_ids)) async for each in responses] == [("i", [105, EOS])]
            else:
                s.engine.emit(request, TokenEvent(0, error=GrammarUnavailable("gone")))
                with pytest.raises(grpc.aio.AioRpcError, match="gone"):
                    assert [each async for each in responses] == []


async def test_every_sequence_echoes_the_prompt_and_ends_once_with_its_own_index(tmp_path: Path) -> None:
    async with serving(tmp_path, answers_with("abc", tokens_per_step=2)) as s:
        fields = {"sampling": pb.SamplingParams(n=3), "response": pb.ResponseOptions(echo=True)}
        responses = await answer(s.client, ask("h\u00e9 ", **fields))
        stats = await s.client.stats()
    for index in range(3):
        mine = [r for r in responses if r.index == index]
        assert "".join(r.text for r in mine) == "h\u00e9 abc"
        assert [bytes(r.prompt_token_ids).decode() for r in mine] == ["h\u00e9 ", *[""] * (len(mine) - 1)]
        assert [bool(r.finish_reason) for r in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].usage.completion_tokens == 4
    assert len({r.telemetry.seed for r in responses if r.finish_reason}) == 3
    assert dict(stats.finished) == {"STOP": 3}
    assert s.engine.dropped == []


async def test_a_stop_string_ends_the_sequence_and_frees_it(tmp_path: Path) -> None:
    async with serving(tmp_path, answers_with("one two three", tokens_per_step=5)) as s:
        responses = await answer(s.client, ask(sampling=pb.SamplingParams(stop=["two"])))
    assert "".join(r.text for r in responses) == "one "
    assert bytes(t for r in responses for t in r.token_ids) == b"one two"
    assert (responses[-1].matched_stop_str, responses[-1].usage.completion_tokens) == ("two", 7)
    assert s.engine.dropped == s.engine.submitted


async def test_an_echo_ends_with_the_last_whole_character_of_the_prompt(tmp_path: Path) -> None:
    prompt = pb.TokenIds(ids=[257, *"h\u00e9".encode()[:2]])
    async with serving(tmp_path, answers_with("!")) as s:
        for omitted, text, ids in (
            ({"omit_token_ids": True}, "h\ufffd!", []),  # no special token, and U+FFFD once
            ({"omit_text": True}, "", list(prompt.ids)),
        ):
            options = pb.ResponseOptions(echo=True, **omitted)
            responses = await answer(s.client, pb.GenerateRequest(token_ids=prompt, response=options))
            assert "".join(r.text for r in responses) == text
            assert [token for r in responses for token in r.prompt_token_ids] == ids


@pytest.mark.parametrize("length", [1, 250])
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
    (scored,) = [r for r in responses if r.prompt_logprobs]
    first, *others = scored.prompt_logprobs
    assert (scored.index, first) == (0, pb.TokenLogprobs())
    assert [entry.logprob for entry in others] == prompt_scores(length - 1, 20).logprob_N.tolist()
    for entry in others:
        assert [(top.token_id, top.logprob) for top in entry.top] == [(i, -i) for i in range(20)]
    assert {r.index for r in responses if r.finish_reason} == {0, 1}


def rows(start: int, count: int) -> OutputRows:
    """Return rows whose numbers are their positions."""
    values = np.repeat(np.arange(start, start + count, dtype=np.float32), 320)
    spec = OutputSpec("float32", (320,))
    return OutputRows("generation_logits", spec, start, values.view(np.uint8).reshape(count, -1))


async def test_many_rows_of_a_tensor_come_in_messages_that_any_client_takes(tmp_path: Path) -> None:
    def script(request: Request) -> Iterable[TokenEvent]:
        begin = len(request.prompt_ids) - 1
        yield TokenEvent(0, tuple(b"abc"), outputs=(rows(begin, 3),))
        yield TokenEvent(0, (*b"d" * 2000, EOS), finish=FinishReason.STOP, outputs=(rows(begin + 3, 2001),))

    async with serving(tmp_path, script) as s:
        responses = await answer(s.client, ask(response=pb.ResponseOptions(generation_logits=True, echo=True)))
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


async def test_rows_of_tokens_after_a_stop_string_are_dropped(tmp_path: Path) -> None:
    def script(request: Request) -> Iterable[TokenEvent]:
        begin = len(request.prompt_ids) - 1
        yield TokenEvent(0, tuple(b"abcd"), outputs=(rows(begin, 4),))
        yield TokenEvent(0, tuple(b"efgh"), outputs=(rows(begin + 4, 4),))

    async with serving(tmp_path, script) as s:
        options = pb.ResponseOptions(generation_logits=True)
        responses = await answer(s.client, ask(sampling=pb.SamplingParams(stop=["ef"]), response=options))
    assert sum(output.shape[0] for response in responses for output in response.outputs) == 6
    assert responses[-1].usage.completion_tokens == 6


async def test_tensors_of_all_running_requests_together_are_bounded(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda request: ()) as s:
        s.calls.limits = replace(s.calls.limits, output_memory_bytes=150 * 1280)
        request = ask(sampling=pb.SamplingParams(max_tokens=100), response=pb.ResponseOptions(generation_logits=True))
        tasks = [asyncio.create_task(answer(s.client, request))]
        await eventually(lambda: len(s.engine.submitted) == 1)
        error = await refusal(s.client, request)
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert f"may have {200 * 1280} bytes; output_memory_bytes = {150 * 1280}" in str(error.details())
        request.sampling.max_tokens = 50
        tasks.append(asyncio.create_task(answer(s.client, request)))
        await eventually(lambda: len(s.engine.submitted) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: len(s.calls) == 0)
        third = asyncio.create_task(answer(s.client, request))
        await eventually(lambda: len(s.engine.submitted) == 3)
        third.cancel()


def fails(request: Request) -> Iterable[TokenEvent]:
    """Fail as the prompt says."""
    match bytes(request.prompt_ids):
        case b"late":
            assert request.scheduling.max_queue_s == 0.25
            yield TokenEvent(request.index, error=QueueTimeout("max_queue_ms: waited 251 ms"))
        case b"gone" if request.index == 1:
            yield TokenEvent(1, (66,))
            yield TokenEvent(1, error=GrammarUnavailable("sidecar gone"))
        case b"defect":
            raise RuntimeError("secret")


REFUSED: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, str, int, int]] = {
    "bad field": (
        ask(sampling=pb.SamplingParams(max_tokens=0)),
        Code.INVALID_ARGUMENT,
        "sampling.max_tokens: is 0, must be at least 1",
        0,
        0,
    ),
    "bad grammar": (ask(grammar=pb.Grammar(regex="bad")), Code.INVALID_ARGUMENT, "grammar: line 1: no", 1, 1),
    "late": (ask("late", max_queue_ms=250), Code.DEADLINE_EXCEEDED, "max_queue_ms: waited 251 ms", 1, 0),
    "gone": (ask("gone", sampling=pb.SamplingParams(n=2)), Code.UNAVAILABLE, "sidecar gone", 2, 1),
    "defect": (ask("defect"), Code.INTERNAL, "internal error (RuntimeError); the server's log has the details", 1, 0),
}
"""By name: a request, its status and message, how many sequences the engine got, and how many it had to drop."""


async def test_each_error_has_its_status_and_frees_what_was_submitted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, fails) as s:
        for name, (request, code, details, submitted, dropped) in REFUSED.items():
            s.engine.submitted.clear()
            s.engine.dropped.clear()
            error = await refusal(s.client, request)
            assert (error.code(), error.details()) == (code, details), name
            assert (len(s.engine.submitted), s.engine.dropped) == (submitted, s.engine.submitted[:dropped]), name
        stats = await s.client.stats()
    assert "secret" in caplog.text
    counts = {"INVALID_ARGUMENT": 2, "DEADLINE_EXCEEDED": 1, "UNAVAILABLE": 1, "INTERNAL": 1}
    assert dict(stats.failed) == counts


async def test_without_room_a_request_is_refused_and_its_sequences_are_given_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        s.grammar.full = LimitExceeded("grammar: compile_queue: 2 compilations run or wait already")
        error = await refusal(s.client, ask(grammar=pb.Grammar(regex="a")))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "compile_queue" in str(error.details())
        assert (s.engine.submitted, s.engine.dropped) == ([], [])
        s.engine.refuse_with, s.engine.refuse_from = LimitExceeded("the queue is full (max_queue_size 2)"), 2
        error = await refusal(s.client, ask(sampling=pb.SamplingParams(n=3)))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert s.engine.dropped == s.engine.submitted
        assert len(s.engine.dropped) == 2


async def test_a_client_that_leaves_or_a_deadline_frees_every_sequence(tmp_path: Path) -> None:
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
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert not [each async for each in s.client.generate(ask(), timeout_s=3.0)]
        assert caught.value.code() is Code.DEADLINE_EXCEEDED
        await eventually(lambda: s.engine.dropped == s.engine.submitted and len(s.engine.dropped) == 3)


async def test_events_that_wait_are_merged(tmp_path: Path) -> None:
    def script(request: Request) -> Iterable[TokenEvent]:
        yield from [TokenEvent(0, (65,))] * 50
        yield TokenEvent(0, finish=FinishReason.LENGTH)
        s.engine.settle()

    async with serving(tmp_path) as s:
        s.engine.script = script
        responses = await answer(s.client, ask())
    assert [r.text for r in responses] == ["A" * 50]


async def test_abort_ends_all_sequences_and_frees_the_id(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        task = asyncio.create_task(answer(s.client, ask(request_id="a", sampling=pb.SamplingParams(n=2))))
        await eventually(lambda: len(s.engine.submitted) == 2)
        error = await refusal(s.client, ask(request_id="a"))
        assert error.code() is Code.INVALID_ARGUMENT
        assert "request_id" in str(error.details())
        assert await s.client.abort("a")
        assert [r.finish_reason for r in await task] == [pb.FINISH_REASON_ABORTED] * 2
        await eventually(lambda: not len(s.calls))
        assert not await s.client.abort("a")
        assert not await s.client.abort("never")
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
    assert ["".join(r.text for r in responses) for responses in (no_text, no_ids)] == ["", "A"]
    assert [[t for r in responses for t in r.token_ids] for responses in (no_text, no_ids)] == [[65, EOS], []]
    first, _ = [entry for r in scored for entry in r.logprobs]
    assert [(t.token_id, t.logprob) for t in first.top] == [(65, -0.5), (66, -1.5)]


async def test_draining_refuses_new_requests_and_aborts_the_last(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        task = asyncio.create_task(answer(s.client, ask()))
        await eventually(lambda: s.engine.submitted)
        drain = asyncio.create_task(s.calls.drain(0.2))
        await asyncio.sleep(0)
        error = await refusal(s.client, ask())
        assert error.code() is Code.UNAVAILABLE
        assert "shutting down" in str(error.details())
        assert (await task)[-1].finish_reason == pb.FINISH_REASON_ABORTED
        await drain


async def test_requests_with_one_grammar_share_their_answers_unless_they_say_otherwise(tmp_path: Path) -> None:
    guided = {"grammar": pb.Grammar(json_schema='{"const": "abcdef"}')}
    async with serving(tmp_path, answers_with("x"), device="cpu") as s:
        for fields in (guided, guided, {**guided, "speculation": pb.Speculation(draft_index=False)}, {}):
            await answer(s.client, ask(**fields))
        one, again, off, free = (request.suffix_scope for request in s.engine.submitted)
    assert one == again
    assert one is not None
    assert one.seeds == (tuple(b' "abcdef"'),)
    assert off is free is None


class BrokenConnection(FakeContext):
    """The context of a call whose writes fail as gRPC's do, and which does not know yet that it is over."""

    async def write(self, message: object) -> None:
        raise grpc.aio.InternalError("Failed to execute batch")

    async def abort(self, status: grpc.StatusCode, problem: str) -> None:
        await self.write(problem)


@pytest.mark.parametrize("temperature", [1.0, -1.0], ids=["while it writes", "while it refuses"])
async def test_a_broken_write_is_a_cancelled_request(
    tmp_path: Path, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    context: Any = BrokenConnection()
    async with serving(tmp_path, answers_with("a long answer")) as s:
        request = ask(sampling=pb.SamplingParams(temperature=temperature))
        with caplog.at_level(logging.INFO), pytest.raises(asyncio.CancelledError):
            await EngineServicer(s.calls, version="1").Generate(request, context)
        assert len(s.calls) == 0
    assert "a request failed by a defect" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]
