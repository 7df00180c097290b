"""A client whose connection breaks during a write has cancelled its request; it is no defect of ours."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpu_engine.front.servicer import EngineServicer
from protos.engine.v1 import engine_pb2 as pb
from tests.fakes import answers_with
from tests.gpu_engine.front.serving import ask, serving


class BrokenConnection:
    """The context of a call whose writes fail as gRPC's do, and which does not know yet that it is over."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer_identities(self) -> None:
        return None

    async def write(self, message: object) -> None:
        raise grpc.aio.InternalError("Failed to execute batch")

    async def abort(self, status: grpc.StatusCode, problem: str) -> None:
        raise grpc.aio.InternalError("Failed to execute batch")

    def cancelled(self) -> bool:
        return False

    def done(self) -> bool:
        return False


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
