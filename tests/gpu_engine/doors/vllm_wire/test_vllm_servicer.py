"""vLLM's service over a real gRPC connection, with a fake engine after it, next to our own service."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from gpu_engine.api.request import FinishReason, Logprobs, PromptLogprobs, Request, Telemetry, TokenEvent
from gpu_engine.doors.vllm_wire.reports import Reports
from gpu_engine.doors.vllm_wire.tokenizer_files import CHUNK_BYTES, TokenizerFiles
from gpu_engine.doors.vllm_wire.vllm_servicer import add_to
from tests.fakes import EOS, Script, answers_with
from tests.gpu_engine.front import serving as front
from tests.waiting import eventually


@dataclass
class Setup(front.Setup):
    wire: Any
    """The stub of vLLM's service."""


@asynccontextmanager
async def serving(
    tmp_path: Path, script: Script | None = None, *, kv_events: bool = True, **engine_fields: Any
) -> AsyncIterator[Setup]:
    doors = [partial(add_to, version="1.2", kv_events=kv_events)]
    async with front.serving(tmp_path, script, doors=doors, **engine_fields) as made:
        yield Setup(**vars(made), wire=vllm_engine_pb2_grpc.VllmEngineStub(made.channel))


def ask(text: str = "hi", **fields: Any) -> vllm.GenerateRequest:
    tokenized = vllm.TokenizedInput(input_ids=text.encode())
    return vllm.GenerateRequest(**{"tokenized": tokenized, "stream": True} | fields)


async def answer(stub: Any, request: vllm.GenerateRequest) -> list[vllm.GenerateResponse]:
    return [response async for response in stub.Generate(request, timeout=20)]


async def refusal(stub: Any, request: vllm.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(stub, request)
    return caught.value.code(), str(caught.value.details())


async def test_a_stream_has_chunks_of_new_tokens_and_one_complete_with_all(tmp_path: Path) -> None:
    async with serving(tmp_path, answers_with("yes", tokens_per_step=2)) as s:
        responses = await answer(s.wire, ask(request_id="mine"))
    *chunks, last = responses
    assert [token for r in chunks for token in r.chunk.token_ids] == [*b"yes", EOS]
    assert sum(r.chunk.completion_tokens for r in chunks) == 4
    assert all(r.chunk.prompt_tokens == 2 for r in chunks)
    complete = last.complete
    assert list(complete.output_ids) == [*b"yes", EOS]
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("stop", 2, 4)
    assert complete.WhichOneof("matched_stop") is None, "the end of the sequence is no stop of the request"


SCORES = PromptLogprobs(
    np.array([-0.5], np.float32), np.array([[105, 7]], np.int32), np.array([[-0.5, -1.0]], np.float32)
)


def scored(request: Request) -> list[TokenEvent]:
    first, second = Logprobs(-0.5, ((7, -0.5), (9, -2.0))), Logprobs(-1.5, ((3, -0.25), (8, -1.5)))
    of_prompt = SCORES if request.outputs.prompt_logprobs is not None else None
    return [
        TokenEvent(request.index, (7,), (first,), prompt_logprobs=of_prompt),
        TokenEvent(request.index, (8,), (second,), finish=FinishReason.LENGTH),
    ]


@pytest.mark.parametrize("stream", [True, False])
async def test_log_probabilities_of_the_answers_and_those_of_the_prompt_with_index_0(
    tmp_path: Path, stream: bool
) -> None:
    async with serving(tmp_path, scored) as s:
        responses = await answer(
            s.wire, ask(stream=stream, sampling_params={"logprobs": 2, "prompt_logprobs": 2, "n": 2})
        )
    completes = {r.complete.index: r.complete for r in responses if r.HasField("complete")}
    for index in range(2):
        found = completes[index].output_logprobs
        assert (list(found.token_logprobs), list(found.token_ids)) == ([-0.5, -1.5], [7, 8])
        tops = [(list(top.token_ids), list(top.values)) for top in found.top_logprobs]
        assert tops == [([7, 9], [-0.5, -2.0]), ([3, 8], [-0.25, -1.5])]
        chunks = [r.chunk for r in responses if r.HasField("chunk") and r.chunk.index == index]
        streamed = [value for chunk in chunks for value in chunk.output_logprobs.token_logprobs]
        assert streamed == ([-0.5, -1.5] if stream else [])
    entries = completes[0].input_logprobs
    assert list(entries.token_ids) == [*b"hi"]
    assert [entry.value if entry.HasField("value") else None for entry in entries.token_logprobs] == [None, -0.5]
    assert [list(top.token_ids) for top in entries.top_logprobs] == [[], [105, 7]]
    assert not completes[1].HasField("input_logprobs"), "all sequences share the prompt"
    chunks = [r.chunk for r in responses if r.HasField("chunk") and r.chunk.HasField("input_logprobs")]
    assert [(chunk.index, chunk.input_logprobs) for chunk in chunks] == ([(0, entries)] if stream else [])


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"sampling_params": {"temperature": -1}}, "INVALID_ARGUMENT", "sampling_params.temperature: is -1"),
    ({"sampling_params": {"n": 5}}, "INVALID_ARGUMENT", "sampling_params.n: is 5"),
    ({"tokenized": {"input_ids": [320]}}, "INVALID_ARGUMENT", "tokenized.input_ids[0]: is 320"),
    ({"tokenized": {"input_ids": [1] * 256}}, "INVALID_ARGUMENT", "tokenized.input_ids: has 256 tokens"),
    ({"tokenized": None}, "INVALID_ARGUMENT", "input: one of"),
    ({"sampling_params": {"json_schema": "bad"}}, "INVALID_ARGUMENT", "sampling_params.json_schema: line 1"),
    ({"sampling_params": {"json_object": False}}, "INVALID_ARGUMENT", "sampling_params.json_object: must be true"),
    ({"mm_inputs": {}}, "UNIMPLEMENTED", "mm_inputs: "),
    ({"kv_transfer_params_json": "{}"}, "UNIMPLEMENTED", "kv_transfer_params_json: "),
]


async def test_refusals_name_the_fields_of_vllm(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        for fields, status, message in REFUSED:
            code, details = await refusal(s.wire, ask(**fields))
            assert (code.name, details[: len(message)]) == (status, message)
        assert s.engine.submitted == s.engine.dropped


async def test_a_hundred_calls_at_once_and_every_fourth_leaves(tmp_path: Path) -> None:
    def script(request: Request) -> list[TokenEvent]:
        return [] if int(request.request_id) % 4 == 0 else list(answers_with(request.request_id)(request))

    async with serving(tmp_path, script, max_queue_size=256) as s:
        calls = [s.wire.Generate(ask(request_id=str(i)), timeout=60) for i in range(100)]
        tasks = [asyncio.create_task(_joined(call)) for i, call in enumerate(calls) if i % 4]
        await eventually(lambda: len(s.engine.submitted) == 100)
        for call in calls[::4]:
            call.cancel()
        answers = await asyncio.gather(*tasks)
        assert answers == [[*str(i).encode(), EOS] for i in range(100) if i % 4]
        await eventually(lambda: not len(s.calls))


async def _joined(call: Any) -> list[int]:
    return [token async for response in call for token in response.chunk.token_ids]


async def test_the_model_and_the_server_are_described(tmp_path: Path) -> None:
    async with serving(tmp_path, max_batch_size=3, served_model_name="city, town") as s:
        model = await s.wire.GetModelInfo(vllm.GetModelInfoRequest(), timeout=20)
        server = await s.wire.GetServerInfo(vllm.GetServerInfoRequest(), timeout=20)
        health = await s.wire.HealthCheck(vllm.HealthCheckRequest(), timeout=20)
        assert (model.model_path, model.served_model_name, model.is_generation) == ("fake-model", "city", True)
        assert model.tokenizer_path == "engine:fake-model", "no place where a gateway could find other files"
        assert (model.max_context_length, model.vocab_size, list(model.eos_token_ids)) == (256, 320, [EOS])
        assert (model.bos_token_id, model.pad_token_id) == (257, 0)
        assert (server.server_type, server.block_size, server.max_num_seqs) == ("vllm-grpc", 16, 3)
        assert (server.active_requests, server.is_paused) == (0, False)
        assert health.healthy


async def test_the_load_has_queue_cache_and_tokens_per_second(tmp_path: Path) -> None:
    now = [100.0]
    async with serving(tmp_path) as s:
        call = s.wire.Generate(ask("hello"), timeout=20)
        await eventually(lambda: s.engine.submitted)
        load = (await s.wire.GetLoads(vllm.GetLoadsRequest(), timeout=20)).loads[0]
        assert (load.num_running_reqs, load.max_running_requests, load.max_total_num_tokens) == (1, 4, 64 * 16)
        assert load.num_waiting_uncached_tokens == 5, "the fake never gives it a slot"
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError, match="dp_rank"):
            await s.wire.GetLoads(vllm.GetLoadsRequest(dp_rank=1), timeout=20)
        reports = Reports(s.calls, "1", clock_s=lambda: now[0])
        assert reports.loads().loads[0].gen_throughput == 0
        s.engine.generated_tokens = 50
        now[0] += 2
        assert reports.loads().loads[0].gen_throughput == 25
        now[0] += 0.5
        assert reports.loads().loads[0].gen_throughput == 25, "no new measurement yet"


async def test_draining_ends_streams_of_events_and_refuses_requests(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        events = s.wire.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=20)
        assert (await events.read()).snapshot.count == 1
        async with asyncio.timeout(10):
            await s.calls.drain(5.0)
            assert await events.read() is grpc.aio.EOF
        assert (await refusal(s.wire, ask()))[0] is grpc.StatusCode.UNAVAILABLE
        assert not (await s.wire.HealthCheck(vllm.HealthCheckRequest(), timeout=20)).healthy
        assert (await s.wire.GetServerInfo(vllm.GetServerInfoRequest(), timeout=20)).is_paused


async def test_the_engine_is_watched_while_a_subscriber_is_there(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        subscriptions = [s.wire.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=20) for _ in range(2)]
        for events in subscriptions:
            await events.read()
        assert s.engine.page_events is not None
        subscriptions[0].cancel()
        s.engine.page_events.reset(())
        assert (await subscriptions[1].read()).events[0].WhichOneof("data") == "cleared"
        subscriptions[1].cancel()
        await eventually(lambda: s.engine.page_events is None)


FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.GRAMMAR_CLOSED: "length",
    FinishReason.LENGTH: "length",
    FinishReason.GRAMMAR_INCOMPLETE: "length",
    FinishReason.REPETITION: "repetition",
    FinishReason.GRAMMAR_ERROR: "error",
    FinishReason.GRAMMAR_INVALID: "error",
    FinishReason.GRAMMAR_INEXACT: "error",
    FinishReason.ABORTED: "abort",
}


async def test_a_complete_has_the_finish_reason_of_vllm_the_drafts_and_what_it_stopped_at(tmp_path: Path) -> None:
    def measure(request: Request, telemetry: Telemetry) -> None:
        telemetry.draft_tokens, telemetry.accepted_draft_tokens, telemetry.cached_tokens = 5, 3, 1

    def ends_with(finish: FinishReason) -> Script:
        return lambda request: [TokenEvent(request.index, (7, 8), finish=finish, matched_token_id=8)]

    async with serving(tmp_path) as s:
        s.engine.measure = measure
        assert set(FINISH_REASONS) == set(FinishReason)
        for finish, reason in FINISH_REASONS.items():
            s.engine.script = ends_with(finish)
            complete = (await answer(s.wire, ask(sampling_params={"stop_token_ids": [8]})))[-1].complete
            assert complete.finish_reason == reason
            assert complete.matched_token_id == 8
            assert (complete.spec_accepted_tokens, complete.spec_draft_tokens, complete.cached_tokens) == (3, 5, 1)
        s.engine.script = answers_with("yes no")
        complete = (await answer(s.wire, ask(sampling_params={"stop": [" "]})))[-1].complete
        assert (complete.matched_stop_str, list(complete.output_ids)) == (" ", [*b"yes "])
        responses = await answer(s.wire, ask(stream=False, sampling_params={"n": 3}))
        assert sorted(r.complete.index for r in responses) == [0, 1, 2]
        assert all(list(r.complete.output_ids) == [*b"yes no", EOS] for r in responses)


async def test_both_services_share_the_running_requests(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        calls = [asyncio.create_task(answer(s.wire, ask(request_id=name))) for name in ("one", "two", "three")]
        await eventually(lambda: len(s.engine.submitted) == 3)
        code, details = await refusal(s.wire, ask(request_id="one"))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "belongs to a request that is running" in details
        await s.wire.Abort(vllm.AbortRequest(request_ids=["one", "unknown", "two"]), timeout=20)
        assert await s.client.abort("three")
        for responses in await asyncio.gather(*calls):
            assert responses[-1].complete.finish_reason == "abort"


async def test_what_is_no_message_or_no_method_of_ours_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        for method in ("Generate", "Abort", "GetLoads", "GetTokenizer", "SubscribeKvEvents"):
            call = s.channel.unary_stream(f"/vllm.grpc.engine.VllmEngine/{method}", None, None)(b"\xff\xff", timeout=20)
            with pytest.raises(grpc.aio.AioRpcError, match="the request is malformed"):
                assert [each async for each in call] == []
        for method in ("Embed", "FlushCache", "StartProfile", "StopProfile"):
            request = vllm.EmbedRequest() if method == "Embed" else getattr(common, f"{method}Request")()
            with pytest.raises(grpc.aio.AioRpcError, match=f"{method}: ") as caught:
                await getattr(s.wire, method)(request, timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_tokenizer_arrives_as_an_archive_with_its_digest(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:

        async def chunks() -> list[Any]:
            return [each async for each in s.wire.GetTokenizer(common.GetTokenizerRequest(), timeout=20)]

        tokenizer: Any = s.calls.model.tokenizer
        template, tokenizer.chat_template = tokenizer.chat_template, 3
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await chunks()
        assert caught.value.code() is grpc.StatusCode.INTERNAL, "it cannot be packed"
        tokenizer.chat_template = template
        found, again = await chunks(), await chunks()
    content = b"".join(chunk.data for chunk in found)
    assert [chunk.sha256 for chunk in found] == [""] * (len(found) - 1) + [hashlib.sha256(content).hexdigest()]
    assert found == again
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert set(archive.namelist()) == {"tokenizer.json", "chat_template.jinja"}
        assert archive.testzip() is None
    content = bytes(range(256)) * 1000
    cut = TokenizerFiles(content, "").chunks()
    assert b"".join(cut) == content
    assert {len(chunk) for chunk in cut[:-1]} == {CHUNK_BYTES}


async def test_events_are_refused_by_name(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"kv_events": False}, "UNIMPLEMENTED", "SubscribeKvEvents: is served with services=vllm,kv_events"),
        ({"prefix_cache": False}, "UNIMPLEMENTED", "SubscribeKvEvents: this server has no prefix cache"),
        ({}, "INVALID_ARGUMENT", "start_sequence_number: is 18446744073709551615, must be at most"),
    ]
    for fields, status, message in cases:
        async with serving(tmp_path, **fields) as s:
            request = common.SubscribeKvEventsRequest(start_sequence_number=2**64 - 1)
            with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
                await anext(aiter(s.wire.SubscribeKvEvents(request, timeout=20)))
            assert caught.value.code().name == status
            assert s.engine.page_events is None
