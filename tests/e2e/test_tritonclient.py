"""KServe's service on the real engine, asked by `tritonclient`: our own service's tokens, and guided streams.

Not responsible for: refusals and clients that leave (tests/gpu_engine/doors/kserve/test_tritonclient.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep_client import Client
from tests.e2e.conftest import RunningServer
from tests.gpu_engine.doors.kserve.client_process import triton_process

pytestmark = pytest.mark.model

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
PROMPT = "The capital of Norway is"


async def test_answers_equal_those_of_our_own_service_and_guided_ones_are_streamed(server: RunningServer) -> None:
    given = {
        "text_input": ("BYTES", [[PROMPT]]),
        "max_tokens": ("INT32", [[12]]),
        "temperature": ("FP32", [[0.5]]),
        "top_k": ("INT32", [[40]]),
        "random_seed": ("UINT64", [[2**63 + 5]]),
        "exclude_input_in_output": ("BOOL", [[True]]),
    }

    def guided(i: int) -> dict[str, Any]:
        return {
            "text_input": ("BYTES", [f"A JSON object with x {i}: "]),
            "max_tokens": ("INT32", [48]),
            "temperature": ("FP32", [0.0]),
            "stream": ("BOOL", [True]),
            "guided_decoding_guide_type": ("BYTES", ["json_schema"]),
            "guided_decoding_guide": ("BYTES", [json.dumps(SCHEMA)]),
        }

    with Client(server.address) as client, triton_process() as triton:
        model = client.model_info().served_names[0]
        expected = client.generate(PROMPT, max_tokens=12, temperature=0.5, top_k=40, seed=2**63 + 5)
        response = await triton("infer", server.address, given, model=model)
        streamed = await triton("stream", server.address, [(str(i), guided(i), {}) for i in range(6)], model=model)
    assert response["text_output"] == [[expected.text.encode()]]
    assert response["output_ids"] == [[list(expected.token_ids)]]
    for i in range(6):
        own = [response for response in streamed if response.get("id") == str(i)]
        text = b"".join(response["text_output"][0] for response in own)
        assert isinstance(json.loads(text)["x"], int)
        assert own[-1]["finish_reason"] in ([b"stop"], [b"grammar_closed"])
        assert own[-1]["triton_final_response"]
