"""KServe's service on the real engine, asked by `tritonclient`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from lockstep_client import Client
from tests.e2e.conftest import RunningServer
from tests.gpu_engine.doors.kserve.client_process import TritonProcess, triton_process
from tests.waiting import eventually

pytestmark = pytest.mark.model

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
PROMPT = "The capital of Norway is"


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonProcess]:
    with triton_process() as process:
        yield process


@pytest.fixture
def model(server: RunningServer) -> str:
    """The name of the model."""
    with Client(server.address) as client:
        return client.model_info().served_names[0]


async def test_an_answer_equals_that_of_our_own_service(
    triton: TritonProcess, server: RunningServer, model: str
) -> None:
    given = {
        "text_input": ("BYTES", [[PROMPT]]),
        "max_tokens": ("INT32", [[12]]),
        "temperature": ("FP32", [[0.5]]),
        "top_k": ("INT32", [[40]]),
        "random_seed": ("UINT64", [[2**63 + 5]]),
        "exclude_input_in_output": ("BOOL", [[True]]),
    }
    response = await triton("infer", server.address, given, model=model)
    with Client(server.address) as client:
        expected = client.generate(PROMPT, max_tokens=12, temperature=0.5, top_k=40, seed=2**63 + 5)
    assert response["text_output"] == [[expected.text.encode()]]
    assert response["output_ids"] == [[list(expected.token_ids)]]


async def test_guided_answers_are_streamed_several_at_once(
    triton: TritonProcess, server: RunningServer, model: str
) -> None:
    def guided(i: int) -> dict[str, tuple[str, list[object]]]:
        return {
            "text_input": ("BYTES", [f"A JSON object with x {i}: "]),
            "max_tokens": ("INT32", [48]),
            "temperature": ("FP32", [0.0]),
            "stream": ("BOOL", [True]),
            "guided_decoding_guide_type": ("BYTES", ["json_schema"]),
            "guided_decoding_guide": ("BYTES", [json.dumps(SCHEMA)]),
        }

    responses = await triton("stream", server.address, [(str(i), guided(i), {}) for i in range(6)], model=model)
    for i in range(6):
        own = [response for response in responses if response.get("id") == str(i)]
        text = b"".join(response["text_output"][0] for response in own)
        assert isinstance(json.loads(text)["x"], int)
        assert own[-1]["finish_reason"] in ([b"stop"], [b"grammar_closed"])
        assert own[-1]["triton_final_response"]


async def test_a_client_that_goes_leaves_nothing_running(
    triton: TritonProcess, server: RunningServer, model: str
) -> None:
    endless = {
        "text_input": ("BYTES", ["Once upon a time"]),
        "max_tokens": ("INT32", [400]),
        "end_id": ("INT32", [-1]),
        "stream": ("BOOL", [True]),
    }
    await triton("stream", server.address, [("a", endless, {}), ("b", endless, {})], model=model, until=3)
    with Client(server.address) as client:
        await asyncio.wait_for(eventually(lambda: client.stats().running == 0), 30)


async def test_a_bad_grammar_names_the_tensor(triton: TritonProcess, server: RunningServer, model: str) -> None:
    given = {
        "text_input": ("BYTES", ["a"]),
        "guided_decoding_guide_type": ("BYTES", ["regex"]),
        "guided_decoding_guide": ("BYTES", ["("]),
    }
    response = await triton("infer", server.address, given, model=model)
    assert response["status"] == "StatusCode.INVALID_ARGUMENT"
    assert response["error"].startswith("guided_decoding_guide: ")
