"""Refused requests, and log-probabilities of a prompt."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from gpu_engine.api.request import PromptLogprobs
from protos.engine.v1 import engine_pb2 as pb
from tests.gpu_engine.front.serving import answer
from tests.rpc_client import Client


async def refusal(client: Client, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(client, request)
    return caught.value


def prompt_scores(count: int, wanted: int) -> PromptLogprobs:
    ids = np.tile(np.arange(wanted, dtype=np.int32), (count, 1))
    return PromptLogprobs(np.linspace(-1, 0, count, dtype=np.float32), ids, -ids.astype(np.float32))
