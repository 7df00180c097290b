"""deploy/triton's model.py against a fake of Triton's module, with the real client and the real engine."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_engine.doors.kserve.infer_requests import INPUTS
from gpu_engine.doors.kserve.infer_responses import LOGITS, OUTPUTS
from gpu_engine.doors.kserve.tensors import Tensor
from lockstep_client import Client
from tests.e2e.conftest import RunningServer
from tests.gpu_engine.doors.kserve.client_process import triton_process
from tests.waiting import eventually

pytestmark = pytest.mark.model

DTYPES: dict[str, tuple[Any, str]] = {
    "BYTES": (np.object_, "TYPE_STRING"),
    "BOOL": (np.bool_, "TYPE_BOOL"),
    "INT32": (np.int32, "TYPE_INT32"),
    "UINT64": (np.uint64, "TYPE_UINT64"),
    "FP32": (np.float32, "TYPE_FP32"),
}
"""KServe's name -> numpy's, and that of config.pbtxt."""
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
ELSEWHERE = {
    *("request_output_len", "min_length", "runtime_top_k", "runtime_top_p", "random_seed", "streaming", "len_penalty"),
    *("input_lengths", "request_id", "stop", "beam_width", "length_penalty", "early_stopping", "client_id", "lora"),
    *("logits_processors", "logits_processor_arguments", "prompt_adapter"),
    *("return_context_logits", "return_generation_logits"),
}
"""Tensors of the engine's own service that config.pbtxt leaves out: second names, and what Triton does itself."""


@pytest.fixture
def backend(root: Path, server: RunningServer) -> Iterator[Any]:
    """The model, initialised as Triton does it."""
    sys.path.insert(0, str(root / "tests/deploy/triton_backend"))
    try:
        spec = importlib.util.spec_from_file_location("triton_model", root / "deploy/triton/lockstep/1/model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    model = module.TritonPythonModel()
    config = {"parameters": {"server": {"string_value": server.address}, "start_timeout_s": {"string_value": "20"}}}
    model.initialize({"model_config": json.dumps(config)})
    yield model
    model.finalize()


OWN = LOGITS | {"beam_scores"}
"""Outputs of the engine's own service alone."""


def request(outputs: tuple[str, ...] = tuple(sorted(OUTPUTS.keys() - OWN)), **given: Any) -> Any:
    """Return a request with these tensors; a number or a text becomes a tensor with one element."""
    from triton_python_backend_utils import InferenceRequest  # type: ignore[import-not-found]

    tensors = {}
    for name, value in given.items():
        items = value if isinstance(value, list) else [value]
        items = [item.encode() if isinstance(item, str) else item for item in items]
        tensors[name] = np.array(items, DTYPES[INPUTS[name].datatype][0])
    return InferenceRequest(tensors, outputs)


def answers(sent: Any) -> list[dict[str, list[Any]]]:
    """Wait for the final response; return the responses. Raises the error of the last one."""
    assert sent.sender.final.wait(60)
    found = sent.sender.responses
    if found[-1].has_error():
        raise RuntimeError(f"{found[-1].error().code()} {found[-1].error().message()}")
    return [{tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()} for response in found]


def error_of(sent: Any) -> tuple[int, str]:
    with pytest.raises(RuntimeError) as caught:
        answers(sent)
    code, _, message = str(caught.value).partition(" ")
    return int(code), message


async def test_a_whole_answer_is_one_response_and_equals_that_of_the_engine(
    backend: Any, server: RunningServer
) -> None:
    asked = {"text_input": "The capital of Norway is", "max_tokens": 8, "seed": 5, "temperature": 0.7}
    whole, excluded = request(**asked), request(**asked, exclude_input_in_output=True, return_log_probs=True)
    backend.execute([whole, excluded])
    (first,), (second,) = answers(whole), answers(excluded)
    with Client(server.address) as client:
        expected = client.generate("The capital of Norway is", max_tokens=8, seed=5, temperature=0.7, logprobs=0)
    assert second["text_output"] == [expected.text.encode()]
    assert second["output_ids"] == [list(expected.token_ids)]
    assert (second["sequence_length"], second["sequence_index"]) == ([8], [0])
    assert second["finish_reason"] == [b"length"]
    assert second["output_log_probs"][0] == pytest.approx([each.logprob for each in expected.logprobs])
    assert second["cum_log_probs"] == pytest.approx([sum(each.logprob for each in expected.logprobs)])
    assert first["text_output"] == [f"The capital of Norway is{expected.text}".encode()]
    assert "output_log_probs" not in first


async def test_many_requests_are_in_flight_at_once_and_stream_guided_answers(
    backend: Any, server: RunningServer
) -> None:
    def fewest_responses() -> int:
        requests = [
            request(
                text_input=f"A JSON object with x {i}: ",
                max_tokens=48,
                temperature=0.0,
                stream=True,
                guided_decoding_guide_type="json_schema",
                guided_decoding_guide=json.dumps(SCHEMA),
            )
            for i in range(4)
        ]
        backend.execute(requests[:2])
        backend.execute(requests[2:])
        counts = []
        for sent in requests:
            responses = answers(sent)
            text = b"".join(response["text_output"][0] for response in responses)
            assert isinstance(json.loads(text)["x"], int)
            assert responses[-1]["finish_reason"] in ([b"stop"], [b"grammar_closed"])
            assert sent.sender.finals == 1
            counts.append(len(responses))
        return min(counts)

    # A server that was stopped for a while sends all it has as one response.
    assert any(fewest_responses() > 1 for _ in range(5))


async def test_sequences_are_rows_padded_to_the_longest(backend: Any) -> None:
    sent = request(
        text_input="One word: ", max_tokens=12, seed=3, num_return_sequences=3, stop_words=[" ", "."], pad_id=9
    )
    backend.execute([sent])
    (answer,) = answers(sent)
    lengths = answer["sequence_length"]
    assert len(answer["text_output"]) == len(lengths) == 3
    assert {len(row) for row in answer["output_ids"]} == {max(lengths)}
    assert all(
        row[length:] == [9] * (max(lengths) - length) for row, length in zip(answer["output_ids"], lengths, strict=True)
    )


async def test_a_cancelled_request_ends_in_the_engine_and_its_final_response_says_so(
    backend: Any, server: RunningServer
) -> None:
    import triton_python_backend_utils as utils

    sent = request(text_input="Once upon a time", max_tokens=400, stream=True, end_id=-1)
    backend.execute([sent])
    await eventually(lambda: sent.sender.responses)
    sent.sender.cancel.set()
    assert error_of(sent) == (utils.TritonError.CANCELLED, "the request was cancelled")
    with Client(server.address) as client:
        await eventually(lambda: client.stats().running == 0)
    assert sent.sender.finals == 1


TEXT = {"text_input": "a"}
GUIDE, GUIDE_TYPE = "guided_decoding_guide", "guided_decoding_guide_type"
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "text_input, input_ids: one of them is required, and not both"),
    ({**TEXT, "input_ids": [1]}, "text_input, input_ids: one of them is required"),
    ({**TEXT, "top_p": 2.0}, "top_p: is 2, must be in (0, 1]"),
    ({**TEXT, "stop_words": ["x", ""]}, "stop_words[1]: is empty"),
    ({**TEXT, "num_return_sequences": 99}, "num_return_sequences: is 99, must be at most"),
    ({**TEXT, "max_tokens": -1}, "max_tokens: Value out of range"),
    ({"input_ids": [10**6]}, "input_ids[0]: is 1000000, token ids are in"),
    ({**TEXT, GUIDE_TYPE: "yaml"}, "guided_decoding_guide_type: 'yaml'"),
    ({**TEXT, GUIDE_TYPE: "regex"}, "guided_decoding_guide: is required"),
    ({**TEXT, GUIDE: "a+"}, "guided_decoding_guide: needs a guided_decoding_guide_type"),
    ({**TEXT, GUIDE_TYPE: "json", GUIDE: "{}"}, "guided_decoding_guide: is given with the type json"),
    ({**TEXT, GUIDE_TYPE: "regex", GUIDE: "("}, "guided_decoding_guide: "),
]


async def test_bad_input_is_refused_with_the_name_of_the_tensor(backend: Any) -> None:
    import triton_python_backend_utils as utils

    for given, message in BAD:
        sent = request(**given)
        backend.execute([sent])
        code, found = error_of(sent)
        assert (code, found[: len(message)]) == (utils.TritonError.INVALID_ARG, message)


async def test_finalize_ends_what_runs_with_a_final_response(root: Path, backend: Any) -> None:
    running = request(text_input="Once upon a time", max_tokens=400, stream=True, end_id=-1)
    backend.execute([running])
    await eventually(lambda: running.sender.responses)
    await asyncio.to_thread(backend._run(backend._close_requests()).result)
    assert error_of(running)[1] == "the request was cancelled"


async def test_an_engine_that_is_not_there_fails_the_load_of_the_model(backend: Any) -> None:
    import triton_python_backend_utils as utils

    other = type(backend)()
    parameters = {"server": {"string_value": "127.0.0.1:1"}, "start_timeout_s": {"string_value": "0"}}
    with pytest.raises(utils.TritonModelException, match="no Lockstep engine: UNAVAILABLE"):
        await asyncio.to_thread(other.initialize, {"model_config": json.dumps({"parameters": parameters})})


async def test_the_configuration_has_the_tensors_of_the_engines_own_service(root: Path) -> None:
    text = (root / "deploy/triton/lockstep/config.pbtxt").read_text()
    with triton_process() as triton:
        config = await triton("parsed_config", text)

    def described(tensors: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
        return {name: (DTYPES[tensor.datatype][1], list(tensor.shape)) for name, tensor in tensors.items()}

    assert (config["name"], config["backend"], config["max_batch_size"], config["decoupled"]) == (
        "lockstep", "python", 0, True,
    )  # fmt: skip
    assert config["outputs"] == described({name: tensor for name, tensor in OUTPUTS.items() if name not in OWN})
    own = described({name: tensor for name, tensor in INPUTS.items() if name not in ELSEWHERE})
    assert config["inputs"] == {name: (*kind, True) for name, kind in own.items()}
    named = set(re.findall(r"`(\w+)`", (root / "deploy/triton/README.md").read_text()))
    assert set(config["parameters"]) <= named
