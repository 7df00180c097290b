"""KServe's service as `tritonclient` sees it, over the public port of a server with a fake engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_engine.api.output_tensors import OutputRows, OutputSpec
from gpu_engine.api.request import FinishReason, Logprobs, Request, TokenEvent
from gpu_engine.doors.kserve.infer_responses import joined_rows
from gpu_engine.doors.kserve.inference_servicer import SERVICE
from protos.kserve.v2 import inference_pb2 as pb
from tests.fakes import EOS, answers_with
from tests.gpu_engine.doors.kserve.client_process import CallFailed, TritonProcess
from tests.gpu_engine.doors.kserve.fake_server import Fakes, serving
from tests.waiting import eventually

TEXT = {"text_input": ("BYTES", ["hi"])}
STREAM = {**TEXT, "stream": ("BOOL", [True])}
WITHOUT_PROMPT = {"exclude_input_in_output": ("BOOL", [True])}


async def test_a_whole_answer_is_one_response_with_every_tensor(triton: TritonProcess) -> None:
    async with serving(Fakes(answers_with("yes"))) as server:
        response = await triton("infer", server.address, TEXT | WITHOUT_PROMPT, request_id="mine")
        with_prompt = await triton("infer", server.address, TEXT)
        elements = {"input_ids": [[*b"hi"]], "input_lengths": [[2]], "request_output_len": [[9]]}
        batch = {name: ("INT32", each) for name, each in elements.items()}
        batched = await triton("infer", server.address, batch | WITHOUT_PROMPT, outputs=["output_ids"])
    tensors = {
        "text_output": ([b"yes"], [1]),
        "output_ids": ([[*b"yes", EOS]], [1, 4]),
        "sequence_length": ([4], [1]),
        "sequence_index": ([0], [1]),
        "finish_reason": ([b"stop"], [1]),
    }
    shapes = {f"{name} shape": shape for name, (_, shape) in tensors.items()}
    values = {name: value for name, (value, _) in tensors.items()}
    assert response == {"id": "mine", "model": "fake", "triton_final_response": True, **values, **shapes}
    assert (with_prompt["text_output"], with_prompt["output_ids"]) == ([b"hiyes"], [[*b"hiyes", EOS]])
    # Shapes have a dimension for the batch where the prompt has one.
    assert (batched["output_ids"], batched["output_ids shape"]) == ([[[*b"yes", EOS]]], [1, 1, 4])
    assert "text_output" not in batched


def answers_by_index(request: Request) -> list[TokenEvent]:
    text = b"yes"[: request.index + 1]
    return [TokenEvent(request.index, tuple(text), finish=FinishReason.LENGTH)]


async def test_sequences_are_rows_of_a_whole_answer_padded_to_the_longest_and_parts_of_a_stream(
    triton: TritonProcess,
) -> None:
    given = {**TEXT, **WITHOUT_PROMPT, "num_return_sequences": ("INT32", [3]), "pad_id": ("INT32", [7])}
    async with serving(Fakes(answers_by_index)) as server:
        response = await triton("infer", server.address, given)
        two = {**STREAM, "num_return_sequences": ("INT32", [2])}
        streamed = await triton("stream", server.address, [("a", two, {})])
    assert response["text_output"] == [b"y", b"ye", b"yes"]
    assert response["output_ids"] == [[*b"y", 7, 7], [*b"ye", 7], [*b"yes"]]
    assert (response["sequence_length"], response["sequence_index"]) == ([1, 2, 3], [0, 1, 2])
    assert response["finish_reason"] == [b"length"] * 3
    assert {r["sequence_index"][0]: r["text_output"][0] for r in streamed} == {0: b"y", 1: b"ye"}
    assert [r["triton_final_response"] for r in streamed] == [False, True], "the last one ends both"


async def test_a_stream_has_what_is_new_and_says_which_response_is_the_last(triton: TritonProcess) -> None:
    options = {"enable_empty_final_response": True}
    async with serving(Fakes(answers_with("yes")), stream_pace_ms=0) as server:
        responses = await triton("stream", server.address, [("a", STREAM, options)])
    assert b"".join(r["text_output"][0] for r in responses) == b"yes"
    assert [token for r in responses for token in r["output_ids"][0]] == [*b"yes", EOS]
    assert [r["triton_final_response"] for r in responses] == [False] * (len(responses) - 1) + [True]
    assert [r["finish_reason"][0] for r in responses] == [b""] * (len(responses) - 1) + [b"stop"]


async def test_each_step_of_a_stream_is_a_response() -> None:
    request = pb.ModelInferRequest(model_name="fake", id="a")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hi")
    request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.outputs.add(name="text_output")
    fakes = Fakes()
    async with serving(fakes) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = _stream(channel)
        await call.write(request)
        await eventually(lambda: fakes.engine.submitted)
        (sequence,) = fakes.engine.submitted
        read = []
        for token, finish in ((121, None), (101, None), (115, FinishReason.LENGTH)):
            fakes.engine.emit(sequence, TokenEvent(0, (token,), finish=finish))
            response = (await asyncio.wait_for(call.read(), 20)).infer_response
            read.append((response.raw_output_contents[0], response.parameters["triton_final_response"].bool_param))
        await call.done_writing()
        assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.OK
    assert read == [(b"\1\0\0\0y", False), (b"\1\0\0\0e", False), (b"\1\0\0\0s", True)]


def _stream(channel: grpc.aio.Channel) -> Any:
    kinds = pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
    return channel.stream_stream(f"/{SERVICE}/ModelStreamInfer", *kinds)()


async def test_several_requests_run_at_once_over_one_stream(triton: TritonProcess) -> None:
    whole = {**TEXT, **WITHOUT_PROMPT}
    requests = [(str(i), STREAM if i % 2 else whole, {}) for i in range(8)]
    async with serving(Fakes(answers_with("yes"))) as server:
        responses = await triton("stream", server.address, requests)
    for i in range(8):
        own = [r for r in responses if r["id"] == str(i)]
        assert b"".join(r["text_output"][0] for r in own) == b"yes"
        assert [r["triton_final_response"] for r in own].count(True) == 1
        assert own[-1]["triton_final_response"]
        assert len(own) == 1 or i % 2


def scored(request: Request) -> list[TokenEvent]:
    first, second = Logprobs(-0.5, ()), Logprobs(-1.25, ())
    return [
        TokenEvent(request.index, (121,), (first,)),
        TokenEvent(request.index, (101,), (second,), finish=FinishReason.LENGTH),
    ]


async def test_log_probabilities_are_outputs_when_they_are_asked_for(triton: TritonProcess) -> None:
    given = {**TEXT, **WITHOUT_PROMPT, "return_log_probs": ("BOOL", [True])}
    async with serving(Fakes(scored)) as server:
        response = await triton("infer", server.address, given)
        refused = await triton("infer", server.address, TEXT, outputs=["cum_log_probs"])
    assert (response["output_log_probs"], response["cum_log_probs"]) == ([[-0.5, -1.25]], [-1.75])
    assert refused == {
        "error": "outputs: cum_log_probs needs return_log_probs",
        "status": "StatusCode.INVALID_ARGUMENT",
    }


def with_logits(request: Request) -> list[TokenEvent]:
    def rows(name: str, values: list[float], start: int) -> OutputRows:
        data = np.array([values], "<f4").view(np.uint8)
        return OutputRows(name, OutputSpec("float32", (len(values),)), start, data)

    return [
        TokenEvent(0, outputs=(rows("context_logits", [1, 2], 0),)),
        TokenEvent(0, (121,), outputs=(rows("context_logits", [3, 4], 1), rows("generation_logits", [5, 6], 1))),
        TokenEvent(0, (101,), finish=FinishReason.LENGTH, outputs=(rows("generation_logits", [7, 8], 2),)),
    ]


async def test_logits_are_outputs_when_they_are_asked_for(triton: TritonProcess) -> None:
    wanted = {f"return_{name}_logits": ("BOOL", [True]) for name in ("context", "generation")}
    async with serving(Fakes(with_logits)) as server:
        whole = await triton("infer", server.address, TEXT | {"max_tokens": ("INT32", [2])} | wanted)
        batched = {"text_input": ("BYTES", [["hi"]]), "max_tokens": ("INT32", [[2]])}
        with_batch = await triton("infer", server.address, batched | wanted, outputs=["context_logits"])
        responses = await triton(
            "stream", server.address, [("a", STREAM | {"max_tokens": ("INT32", [2])} | wanted, {})]
        )
        refused = await triton("infer", server.address, TEXT, outputs=["context_logits"])
    assert (whole["context_logits"], whole["generation_logits"]) == ([[1, 2], [3, 4]], [[5, 6], [7, 8]])
    assert (with_batch["context_logits"], with_batch["context_logits shape"]) == ([[[1, 2], [3, 4]]], [1, 2, 2])
    for name in ("context_logits", "generation_logits"):
        assert [row for response in responses for row in response.get(name, [])] == whole[name]
    assert refused["error"] == "outputs: context_logits needs return_context_logits"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_logits_have_32_bits_whatever_the_model_has(dtype: str) -> None:
    values = torch.tensor([[0.5, -1.25], [3.0, 2.0**-10]])
    stored = values.to(getattr(torch, dtype)).view(torch.uint8).numpy()
    shape, rows = joined_rows([OutputRows("context_logits", OutputSpec(dtype, (2,)), 0, stored)])
    assert (tuple(shape), np.asarray(rows).tolist()) == ((2, 2), values.tolist())
    assert np.asarray(rows).dtype == np.float32


def two_beams(request: Request) -> list[TokenEvent]:
    """The events of both sequences go to the first one's sink."""
    assert request.beams is not None
    return [
        TokenEvent(index, (121,), finish=FinishReason.LENGTH, beam_score=-0.5 * (index + 1))
        for index in range(request.beams.num_returned)
    ]


async def test_every_beam_is_returned_with_its_score(triton: TritonProcess) -> None:
    given = TEXT | WITHOUT_PROMPT | {"beam_width": ("INT32", [2]), "length_penalty": ("FP32", [1.0])}
    async with serving(Fakes(two_beams)) as server:
        every = await triton("infer", server.address, given)
        best = await triton("infer", server.address, given | {"num_return_sequences": ("INT32", [1])})
        wide = await triton("infer", server.address, given | {"beam_width": ("INT32", [99])})
        tempered = await triton("infer", server.address, given | {"temperature": ("FP32", [0.5])})
    assert (every["text_output"], every["beam_scores"]) == ([b"y", b"y"], [-0.5, -1.0])
    assert (best["text_output"], best["beam_scores"]) == ([b"y"], [-0.5])
    assert wide["error"].startswith("beam_width: is 99, must be")
    assert tempered["error"] == "temperature: is not allowed together with beam_search"


async def test_a_client_that_leaves_a_stream_ends_its_requests(triton: TritonProcess) -> None:
    fakes = Fakes(lambda request: [TokenEvent(request.index, (121,))])
    async with serving(fakes) as server:
        requests = [("a", STREAM, {}), ("b", STREAM, {})]
        responses = await triton("stream", server.address, requests, until=2)
        assert {r.get("id") for r in responses[:2]} == {"a", "b"}
        assert responses[2:] == [{"error": "Locally cancelled by application!", "status": "StatusCode.CANCELLED"}]
        await eventually(lambda: len(fakes.engine.dropped) == 2)
        assert len(server.calls) == 0


async def test_a_client_that_cancels_a_whole_answer_ends_its_request() -> None:
    request = pb.ModelInferRequest(model_name="fake", raw_input_contents=[b"\2\0\0\0hi"])
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    fakes = Fakes()
    async with serving(fakes) as server, grpc.aio.insecure_channel(server.address) as channel:
        kinds = pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer", *kinds)(request)
        await eventually(lambda: fakes.engine.submitted)
        call.cancel()
        await eventually(lambda: fakes.engine.dropped)
        assert len(server.calls) == 0


async def test_tokens_protect_it(triton: TritonProcess, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("0123456789abcdef")
    async with serving(Fakes(answers_with("yes")), auth_token_file=str(tmp_path / "tokens")) as server:
        refused = await triton("infer", server.address, TEXT)
        # More requests than the client can send before the refusal, so that it also meets a stream that has ended.
        streamed = await triton("stream", server.address, [(str(i), STREAM, {}) for i in range(1000)])
        headers = {"authorization": "Bearer 0123456789abcdef"}
        answered = await triton("infer", server.address, TEXT, headers=headers)
    assert refused["status"] == "StatusCode.UNAUTHENTICATED"
    assert [response["status"] for response in streamed] == ["StatusCode.UNAUTHENTICATED"]
    assert answered["text_output"] == [b"hiyes"]


async def test_stop_ends_the_request_of_its_id(triton: TritonProcess) -> None:
    fakes = Fakes(lambda request: [TokenEvent(request.index, (121,))])
    async with serving(fakes) as server:
        running = asyncio.create_task(triton("stream", server.address, [("7", STREAM, {})]))
        await eventually(lambda: fakes.engines and fakes.engine.submitted)
        async with grpc.aio.insecure_channel(server.address) as channel:
            request = pb.ModelInferRequest(model_name="fake", id="7")
            request.inputs.add(name="stop", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
            response = await _unary(channel, "ModelInfer", request, pb.ModelInferResponse)
        responses = await running
    assert response.parameters["triton_final_response"].bool_param
    assert responses[-1]["finish_reason"] == [b"aborted"]
    assert responses[-1]["triton_final_response"]


async def _unary(channel: grpc.aio.Channel, name: str, request: Any, kind: Any) -> Any:
    call = channel.unary_unary(f"/{SERVICE}/{name}", type(request).SerializeToString, kind.FromString)
    return await call(request, timeout=20)


LOGITS_OF_TWO = {"return_context_logits": ("BOOL", [True]), "num_return_sequences": ("INT32", [2])}
INVALID: list[tuple[dict[str, Any], str]] = [
    ({}, "inputs: one of the tensors text_input and input_ids is required"),
    (
        {"text_imput": ("BYTES", ["hi"])},
        "inputs: the tensor 'text_imput' is not known; did you mean 'text_input'?",
    ),
    (TEXT | {"max_tokens": ("INT64", [3])}, "max_tokens: has the datatype 'INT64', must be INT32"),
    (TEXT | {"max_tokens": ("INT32", [3, 4])}, "max_tokens: has the shape [2], must be [1] or [1, 1]"),
    (
        {"text_input": ("BYTES", [["a"], ["b"]])},
        "text_input: has a batch of 2; send each request by itself, the server batches them",
    ),
    (TEXT | {"max_tokens": ("INT32", [-3])}, "max_tokens: is -3, must not be negative"),
    (TEXT | {"temperature": ("FP32", [101.0])}, "temperature: is 101, must be in [0, 100]"),
    (TEXT | {"stop_words": ("BYTES", ["a", ""])}, "stop_words[1]: is empty"),
    (TEXT | {"stream": ("BOOL", [True])}, "stream: needs ModelStreamInfer; ModelInfer sends one"),
]
UNSERVED: list[tuple[dict[str, Any], str]] = [
    (TEXT | {"embedding_bias": ("FP32", [1.0])}, "embedding_bias: this server does not take it"),
    (TEXT | {"return_perf_metrics": ("BOOL", [True])}, "return_perf_metrics: this server does not do this"),
    (
        TEXT | LOGITS_OF_TWO,
        "return_context_logits: a whole answer of more than one sequence has no logits; use stream",
    ),
]
NO_GRAMMAR = TEXT | {"guided_decoding_guide_type": ("BYTES", ["json"])}


async def test_what_cannot_be_served_is_refused_by_name(triton: TritonProcess) -> None:
    cases = {
        "INVALID_ARGUMENT": INVALID,
        "UNIMPLEMENTED": UNSERVED,
        "FAILED_PRECONDITION": [(NO_GRAMMAR, "grammar: this server runs without a grammar process")],
    }
    async with serving(Fakes(answers_with("yes"))) as server:
        for status, rows in cases.items():
            for given, message in rows:
                response = await triton("infer", server.address, given)
                assert response["status"] == f"StatusCode.{status}"
                assert response["error"].startswith(message)
            assert server.calls.failed[status] == len(rows)


async def test_a_request_of_a_stream_that_is_refused_disturbs_no_other(triton: TritonProcess) -> None:
    requests = [("good", STREAM, {}), ("bad", TEXT | {"top_p": ("FP32", [2.0])}, {}), ("other", STREAM, {})]
    async with serving(Fakes(answers_with("yes"))) as server:
        responses = await triton("stream", server.address, requests)
    errors = [r for r in responses if "error" in r]
    assert errors == [{"error": "top_p: is 2, must be in (0, 1]", "status": None}]
    for name in ("good", "other"):
        assert b"".join(r["text_output"][0] for r in responses if r.get("id") == name) == b"yes"


async def test_the_error_of_a_stream_says_whose_it_is_and_which_status_it_has() -> None:
    request = pb.ModelInferRequest(model_name="fake", id="bad")
    async with serving(Fakes()) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = _stream(channel)
        await call.write(request)
        response = await asyncio.wait_for(call.read(), 20)
        await call.done_writing()
        assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.OK
        malformed = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
        await malformed.write(b"\xff\xff")
        assert await asyncio.wait_for(malformed.code(), 20) is grpc.StatusCode.INVALID_ARGUMENT
        assert "malformed" in str(await malformed.details())
    assert response.error_message == "inputs: one of the tensors text_input and input_ids is required"
    assert response.infer_response.id == "bad"
    assert response.infer_response.parameters["status"].string_param == "INVALID_ARGUMENT"
    assert response.infer_response.parameters["triton_final_response"].bool_param


async def test_a_model_or_a_memory_that_the_server_does_not_have_is_refused(triton: TritonProcess) -> None:
    async with serving(Fakes(answers_with("yes"))) as server:
        unknown = await triton("refusals", server.address, "other")
        version = await triton("refusals", server.address, "fake", "2")
        inferred = await triton("infer", server.address, TEXT, model="other")
        with pytest.raises(CallFailed, match=r"^statistics: InferenceServerException: .* 'other' is not known"):
            await triton("statistics", server.address, "other")
        answered = await triton("infer", server.address, TEXT)
        in_memory = await triton("shared_memory", server.address, TEXT)
    assert answered["text_output"] == [b"hiyes"]
    assert in_memory["status"] == "StatusCode.UNIMPLEMENTED"
    assert in_memory["error"].startswith("text_output: shared_memory_")
    message = "model_name: 'other' is not known; this server has fake, alias"
    assert unknown == [{"ready": False}] + [{"error": message, "status": "StatusCode.NOT_FOUND"}] * 3
    assert inferred == unknown[1]
    assert [e["error"] for e in version[1:]] == ["model_version: '2' is not known; this server has '1'"] * 3


async def test_the_server_its_model_and_its_statistics_are_described(triton: TritonProcess) -> None:
    async with serving(Fakes(answers_with("yes"))) as server:
        found = await triton("describe", server.address, "alias", "1")
        for given in (TEXT, TEXT | {"num_return_sequences": ("INT32", [2])}, {}):
            await triton("infer", server.address, given)
        statistics = await triton("statistics", server.address)
    assert (found["live"], found["ready"], found["model_ready"]) == (True, True, True)
    assert found["server"]["name"] == "lockstep"
    assert found["index"] == {"models": [{"name": "fake", "version": "1", "state": "READY"}]}
    assert found["metadata"]["name"] == found["config"]["name"] == "alias"
    assert {"name": "text_input", "datatype": "BYTES", "shape": ["1"]} in found["metadata"]["inputs"]
    assert {"name": "output_ids", "datatype": "INT32", "shape": ["-1", "-1"]} in found["metadata"]["outputs"]
    assert found["config"]["model_transaction_policy"] == {"decoupled": True}
    described = {tensor["name"] for tensor in found["metadata"]["inputs"]}
    assert described == {tensor["name"] for tensor in found["config"]["input"]}
    assert (statistics["name"], statistics["inference_count"]) == ("fake", "3"), "sequences, not requests"
    times = statistics["inference_stats"]
    assert (times["success"]["count"], times["fail"]["count"], times["cache_miss"]["count"]) == ("2", "1", "3")
    assert int(times["success"]["ns"]) > 0


async def test_only_a_server_with_the_setting_knows_the_service_and_its_health(triton: TritonProcess) -> None:
    health = health_pb2.HealthCheckRequest(service=SERVICE)
    async with serving(Fakes()) as server, grpc.aio.insecure_channel(server.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health, timeout=20)
        assert (await check).status == health_pb2.HealthCheckResponse.SERVING
    async with serving(Fakes(), services="") as server, grpc.aio.insecure_channel(server.address) as channel:
        assert (await triton("infer", server.address, TEXT))["status"] == "StatusCode.UNIMPLEMENTED"
        check = health_pb2_grpc.HealthStub(channel).Check(health, timeout=20)
        assert await check.code() is grpc.StatusCode.NOT_FOUND


async def test_a_stream_that_is_open_does_not_hold_up_a_server_that_closes() -> None:
    async with serving(Fakes(answers_with("yes"))) as server:
        channel = grpc.aio.insecure_channel(server.address)
        call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
        await call.write(pb.ModelInferRequest(model_name="fake").SerializeToString())
        assert await asyncio.wait_for(call.read(), 60)
    assert await asyncio.wait_for(call.code(), 60) is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in str(await call.details()), "gRPC would have waited, and cut the stream off"
    await channel.close()


def _members(message: descriptor_pb2.DescriptorProto, path: str) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {
        f"{path}.{f.name}": (f.number, f.type, f.label, f.type_name) for f in message.field
    }
    for nested in message.nested_type:
        found |= _members(nested, f"{path}.{nested.name}")
    return found


def _file(file: descriptor_pb2.FileDescriptorProto) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for message in file.message_type:
        found |= _members(message, message.name)
    for enum in file.enum_type:
        found |= {f"{enum.name}.{value.name}": (value.number,) for value in enum.value}
    for service in file.service:
        for rpc in service.method:
            kinds = (rpc.input_type, rpc.client_streaming, rpc.output_type, rpc.server_streaming)
            found[f"{service.name}.{rpc.name}"] = kinds
    return found


async def test_every_field_of_the_proto_is_that_of_triton(triton: TritonProcess) -> None:
    theirs: dict[str, tuple[Any, ...]] = {}
    for serialized in await triton("file_descriptors"):
        theirs |= _file(descriptor_pb2.FileDescriptorProto.FromString(serialized))
    own = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(own)
    members = _file(own)
    assert len(members) > 100
    assert {name: kind for name, kind in members.items() if theirs.get(name) != kind} == {}
