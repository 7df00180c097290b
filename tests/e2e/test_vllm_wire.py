"""vLLM's service of a real server, without a gateway: our own service's tokens.

Not responsible for: its tokenizer and its events of pages (tests/gpu_engine/doors/vllm_wire, and test_smg.py, whose
gateway fetches the tokenizer).
"""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from protos.engine.v1 import engine_pb2 as pb
from tests.e2e.asking import answer
from tests.e2e.conftest import RunningServer
from tests.rpc_client import Client

pytestmark = pytest.mark.model
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]})


async def complete(stub: Any, request: vllm.GenerateRequest) -> tuple[list[int], vllm.GenerateComplete]:
    """Return the tokens of the chunks, and the complete."""
    responses = [response async for response in stub.Generate(request, timeout=60)]
    return [token for r in responses for token in r.chunk.token_ids], responses[-1].complete


@pytest.mark.parametrize(("temperature", "guided"), [(0.0, False), (0.8, True)])
async def test_both_services_give_the_same_tokens(server: RunningServer, temperature: float, guided: bool) -> None:
    prompt, sampling = [100 + i for i in range(20)], {"temperature": temperature, "seed": 5, "max_tokens": 24}
    ours = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)  # type: ignore[arg-type]
    theirs = vllm.GenerateRequest(tokenized={"input_ids": prompt}, sampling_params=sampling, stream=True)
    if guided:
        ours.grammar.json_schema = theirs.sampling_params.json_schema = SCHEMA
    async with Client(server.address) as client, grpc.aio.insecure_channel(server.address) as channel:
        expected = await answer(client, ours)
        tokens, last = await complete(vllm_engine_pb2_grpc.VllmEngineStub(channel), theirs)
    assert tokens == list(last.output_ids) == expected.token_ids
    assert last.finish_reason == ("stop" if guided else "length")
    assert last.spec_draft_tokens >= last.spec_accepted_tokens
    if guided:
        assert last.spec_accepted_tokens > 0, "the grammar forces tokens of the key"
