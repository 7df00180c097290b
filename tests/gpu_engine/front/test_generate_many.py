"""GenerateMany: many requests over one call, each answered for itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from gpu_engine.api.errors import GrammarUnavailable
from gpu_engine.api.request import FinishReason, Request, TokenEvent
from gpu_engine.front.generate_many import ManyRequests
from gpu_engine.front.validation import check
from gpu_engine.ops.access import CallRecord
from gpu_engine.ops.metrics_requests import RequestWatch
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import EOS, Script, answers_with
from tests.gpu_engine.front.serving import FakeContext, Setup, answer, ask, serving
from tests.waiting import eventually

ABORTED = pb.FINISH_REASON_ABORTED
LIMIT = 6
SMALL = {"max_batch_size": 2, "max_queue_size": LIMIT - 2}


class Many:
    """A client's end of one call."""

    def __init__(self, call: Any, setup: Setup) -> None:
        self.call, self.setup = call, setup

    async def send(self, *requests: pb.GenerateRequest) -> None:
        for request in requests:
            await self.call.write(pb.GenerateManyRequest(generate=request))

    async def abort(self, name: str) -> None:
        await self.call.write(pb.GenerateManyRequest(abort=name))

    async def read(self) -> pb.GenerateManyResponse:
        response = await self.call.read()
        assert isinstance(response, pb.GenerateManyResponse), "the call has ended"
        return response

    async def rest(self) -> list[pb.GenerateManyResponse]:
        """Close the requests' side and return what is still sent."""
        await self.call.done_writing()
        found = []
        while (response := await self.call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stub
            found.append(response)
        return found

    async def submitted(self, count: int) -> list[Request]:
        """Wait until the engine has so many sequences, and return them in the order of their names."""
        await eventually(lambda: len(self.setup.engine.submitted) >= count)
        return sorted(self.setup.engine.submitted, key=lambda request: request.key)


@asynccontextmanager
async def many_calls(tmp_path: Path, script: Script | None = None, **fields: Any) -> AsyncIterator[Many]:
    async with serving(tmp_path, script, **fields) as s, asyncio.timeout(30):
        call = s.stub.GenerateMany()
        yield Many(call, s)
        call.cancel()


def ends(request: Request) -> TokenEvent:
    return TokenEvent(request.index, (EOS,), finish=FinishReason.STOP, matched_token_id=EOS)


async def test_requests_are_answered_in_the_order_in_which_their_responses_come(tmp_path: Path) -> None:
    async with many_calls(tmp_path) as many:
        await many.send(ask(request_id="a"), ask(request_id="b"))
        a, b = await many.submitted(2)
        many.setup.engine.emit(b, TokenEvent(0, (66,)))
        first = await many.read()
        assert (first.request_id, first.response.text, first.last) == ("b", "B", False)
        many.setup.engine.emit(a, ends(a))
        second = await many.read()
        assert (second.request_id, second.response.finish_reason, second.last) == ("a", pb.FINISH_REASON_STOP, True)
        await many.send(ask(request_id="a"))  # its id is free again
        _, again, b = await many.submitted(3)
        many.setup.engine.emit(b, ends(b))
        assert (await many.read()).last
        many.setup.engine.emit(again, ends(again))
        assert [(response.request_id, response.last) for response in await many.rest()] == [("a", True)]


async def test_the_last_response_of_the_last_sequence_is_the_requests_last(tmp_path: Path) -> None:
    async with many_calls(tmp_path, answers_with("abc")) as many:
        await many.send(
            ask(request_id="a", sampling=pb.SamplingParams(n=3)),
            ask(request_id="w", sampling=pb.SamplingParams(n=2), response=pb.ResponseOptions(whole=True)),
        )
        responses = await many.rest()
    by_name = {name: [each for each in responses if each.request_id == name] for name in ("a", "w")}
    for found, count in ((by_name["a"], 3), (by_name["w"], 2)):
        assert [response.last for response in found] == [False] * (len(found) - 1) + [True]
        assert sum(bool(response.response.finish_reason) for response in found) == count
    assert [response.response.text for response in by_name["w"]] == ["abc", "abc"]


async def test_a_request_that_fails_disturbs_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def script(request: Request) -> Iterable[TokenEvent]:
        if request.request_id == "defect":
            raise RuntimeError("secret")
        yield TokenEvent(0, (65,))
        if request.request_id == "engine":
            yield TokenEvent(0, error=GrammarUnavailable("gone"))
        yield ends(request)

    async with many_calls(tmp_path, script) as many:
        await many.send(
            ask(request_id="first"),
            ask(),
            ask(request_id="field", sampling=pb.SamplingParams(max_tokens=0)),
            ask(request_id="grammar", grammar=pb.Grammar(regex="bad")),
            ask(request_id="engine"),
            ask(request_id="defect"),
            ask(request_id="last"),
        )
        responses = await many.rest()
        stats = await many.setup.client.stats()
    errors = {each.request_id: each.error for each in responses if each.HasField("error")}
    codes = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL
    invalid, unavailable, internal = (code.value[0] for code in codes)
    assert {name: error.code for name, error in errors.items()} == {
        "": invalid, "field": invalid, "grammar": invalid, "engine": unavailable, "defect": internal,
    }  # fmt: skip
    assert errors[""].message == "request_id: is required"
    assert errors["field"].message == "sampling.max_tokens: is 0, must be at least 1"
    assert "secret" not in errors["defect"].message
    assert "secret" in caplog.text
    assert Counter(each.request_id for each in responses if each.last) == Counter(
        ("first", "", "field", "grammar", "engine", "defect", "last")
    )
    ended = {each.request_id for each in responses if each.response.finish_reason}
    assert ended == {"first", "last"}
    assert dict(stats.failed) == {"INVALID_ARGUMENT": 3, "UNAVAILABLE": 1, "INTERNAL": 1}


async def test_a_request_that_is_aborted_at_once_never_reaches_the_engine(tmp_path: Path) -> None:
    async with many_calls(tmp_path) as many:
        many.setup.calls._warm.clear()  # as before the engine is warm
        await many.send(ask(request_id="a"))
        await many.abort("a")
        await many.send(ask(request_id=""))
        assert (await many.read()).error.message == "request_id: is required"  # the abort was read before this
        many.setup.calls.warm()
        (response,) = await many.rest()
        assert (response.response.finish_reason, response.last) == (ABORTED, True)
        assert many.setup.engine.submitted == []


async def test_draining_lets_the_requests_of_a_call_end_and_then_ends_the_call(tmp_path: Path) -> None:
    async with many_calls(tmp_path) as many:
        await many.send(ask(request_id="a"))
        (a,) = await many.submitted(1)
        drain = asyncio.create_task(many.setup.calls.drain(20))
        await asyncio.sleep(0)
        await many.send(ask(request_id="late"))
        late = await many.read()
        assert (late.request_id, late.error.code) == ("late", grpc.StatusCode.UNAVAILABLE.value[0])
        many.setup.engine.emit(a, ends(a))
        response = await many.read()
        assert (response.request_id, response.response.finish_reason) == ("a", pb.FINISH_REASON_STOP)
        await drain
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await many.call.read()


class NotReading(FakeContext):
    """The context of a call whose client reads once `reads` is set."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.taken: list[pb.GenerateManyResponse] = []

    async def write(self, response: pb.GenerateManyResponse) -> None:
        await self.reads.wait()
        self.taken.append(response)


async def test_a_client_that_does_not_read_stops_its_own_requests_alone(tmp_path: Path) -> None:
    asked: list[str] = []

    async def actions() -> AsyncIterator[pb.GenerateManyRequest]:
        for i in range(50):
            asked.append(f"r{i}")
            yield pb.GenerateManyRequest(generate=ask(request_id=f"r{i}"))

    async with serving(tmp_path, answers_with("abc"), **SMALL) as s, asyncio.timeout(30):
        context: Any = NotReading()
        many = ManyRequests(s.calls, context, lambda request: lambda seen: check(request, s.calls.limits, seen.running))
        task = asyncio.create_task(many.run(actions()))
        await eventually(lambda: len(s.engine.submitted) == LIMIT)
        assert (await answer(s.client, ask("other")))[-1].finish_reason == pb.FINISH_REASON_STOP
        await eventually(lambda: len(asked) > LIMIT)
        assert len(asked) == LIMIT + 1, "the reader waits until the client has taken the refusal"
        assert len(s.engine.submitted) == LIMIT + 1
        context.reads.set()
        await task
    assert Counter(each.request_id for each in context.taken if each.last) == Counter(asked)
    assert len(asked) == 50
    refused = [each.error for each in context.taken if each.HasField("error")]
    assert all(f"max_queue_size = {LIMIT - 2}" in error.message for error in refused)
    assert refused
    text = "".join(each.response.text for each in context.taken if each.request_id == "r0")
    assert text == "abc"


class HandingOver(FakeContext):
    """The context of a call whose client has a message some turns of the loop before the write of it returns."""

    def __init__(self) -> None:
        self.has_last = asyncio.Event()
        self.taken: list[pb.GenerateManyResponse] = []

    async def write(self, response: pb.GenerateManyResponse) -> None:
        self.taken.append(response)
        if response.last:
            self.has_last.set()
            for _ in range(20):
                await asyncio.sleep(0)


@pytest.mark.parametrize("max_tokens", [4, 0], ids=["answered", "refused"])
async def test_an_id_is_free_once_the_client_has_its_last_message(tmp_path: Path, max_tokens: int) -> None:
    context: Any = HandingOver()
    request = ask(request_id="a", sampling=pb.SamplingParams(max_tokens=max_tokens))

    async def actions() -> AsyncIterator[pb.GenerateManyRequest]:
        yield pb.GenerateManyRequest(generate=request)
        await context.has_last.wait()
        yield pb.GenerateManyRequest(generate=request)

    async with serving(tmp_path, answers_with("abc")) as s, asyncio.timeout(30):
        await ManyRequests(s.calls, context, lambda r: lambda seen: check(r, s.calls.limits, seen.running)).run(
            actions()
        )
    first, second = (response for response in context.taken if response.last)
    assert first.HasField("error") == (max_tokens == 0)
    assert first.error == second.error
    assert first.response.finish_reason == second.response.finish_reason


async def test_the_record_of_each_request_names_the_call(tmp_path: Path) -> None:
    records: list[CallRecord] = []
    async with many_calls(tmp_path, answers_with("abc")) as many:
        many.setup.calls.watch = RequestWatch(CollectorRegistry(), records.append)
        await many.send(ask(request_id="a", client_id="team"), ask(request_id="b", sampling=pb.SamplingParams(n=0)))
        await many.rest()
    found = {record.request_id: (record.method, record.status) for record in records}
    assert found == {"a": ("GenerateMany", "OK"), "b": ("GenerateMany", "INVALID_ARGUMENT")}
    assert {record.access_fields().get("client_id") for record in records} >= {"team"}


async def test_an_id_names_one_request_of_its_own_call(tmp_path: Path) -> None:
    async with many_calls(tmp_path) as many:
        theirs = asyncio.create_task(answer(many.setup.client, ask(request_id="theirs")))
        await many.submitted(1)
        await many.send(ask(request_id="a", sampling=pb.SamplingParams(n=2)), ask(request_id="b"), ask(request_id="a"))
        refused = await many.read()
        assert (refused.request_id, refused.last) == ("a", False)
        assert refused.error.message == "request_id: 'a' belongs to a request that is running"
        *_, b, other = await many.submitted(4)
        for name in ("never", "theirs", "a"):
            await many.abort(name)
        aborted = [await many.read(), await many.read()]
        assert [each.response.finish_reason for each in aborted] == [ABORTED] * 2
        assert [(each.request_id, each.last) for each in aborted] == [("a", False), ("a", True)]
        many.setup.engine.emit(b, ends(b))
        assert [each.request_id for each in await many.rest()] == ["b"]
        many.setup.engine.emit(other, ends(other))
        assert (await theirs)[-1].finish_reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize("cancels", [True, False], ids=["the client cancels", "an action without content"])
async def test_a_call_that_ends_early_ends_its_requests(tmp_path: Path, cancels: bool) -> None:
    async with many_calls(tmp_path) as many:
        await many.send(ask(request_id="a", grammar=pb.Grammar(regex="a")), ask(request_id="b"))
        await many.submitted(2)
        if cancels:
            many.call.cancel()
        else:
            await many.call.write(pb.GenerateManyRequest())
            with pytest.raises(grpc.aio.AioRpcError, match="action: one of generate and abort is required"):
                await many.call.read()
        engine, calls = many.setup.engine, many.setup.calls
        await eventually(lambda: len(engine.dropped) == 2 and not len(calls))
        assert many.setup.grammar.forgotten == ["a"]
