"""Access lines: one per call, with the id of its request, and without its texts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.server import Parts, open_server
from protos.engine.v1 import engine_pb2 as pb
from service_runtime.logs import JsonFormatter, RequestIdFilter
from tests.fakes import FakeEngine, FakeModel, answers_with
from tests.rpc_client import Client


@pytest.fixture
def access() -> Iterator[list[logging.LogRecord]]:
    """The records of the access logger."""
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    handler.addFilter(RequestIdFilter())
    logger = logging.getLogger("gpu_engine.ops.access")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_every_call_has_one_access_line_without_its_texts(
    tmp_path: Path, access: list[logging.LogRecord]
) -> None:
    parts = Parts(
        lambda config, progress: FakeModel(), lambda c, model, channel, grammar: FakeEngine(c, answers_with("hush"))
    )
    config = ServerConfig(listen=f"unix:{tmp_path}/s", grammar="none")
    ask = pb.GenerateRequest(text="secret", request_id="r-1", client_id="team", sampling=pb.SamplingParams(n=2))
    hot = pb.SamplingParams(temperature=-1)
    wrong = [
        pb.GenerateRequest(text="secret", request_id="r-2", grammar=pb.Grammar(regex="secret")),
        pb.GenerateRequest(text="secret", request_id="mine", sampling=hot),
        pb.GenerateRequest(text="secret", sampling=hot),
        pb.GenerateRequest(text="secret", request_id="two\nlines", sampling=hot),
        pb.GenerateRequest(text="secret", request_id="x" * 129, sampling=hot),
        pb.GenerateRequest(text="secret", request_id="other", grammar=pb.Grammar(grammar_id="g-0")),
    ]
    engine = EngineConfig(max_model_len=256)
    async with open_server(engine, config, parts=parts) as server, Client(server.address) as client:
        assert [response async for response in client.generate(ask)]
        for each in wrong:
            with pytest.raises(grpc.aio.AioRpcError):
                await anext(client.generate(each))
    lines = [json.loads(JsonFormatter().format(line)) for line in access]
    assert {line["message"] for line in lines} == {"generate"}
    assert [(line.get("request_id"), line["status"]) for line in lines] == [
        ("r-1", "OK"),
        ("r-2", "FAILED_PRECONDITION"),
        ("mine", "INVALID_ARGUMENT"),
        *[(None, "INVALID_ARGUMENT")] * 3,
        ("other", "FAILED_PRECONDITION"),
    ]
    assert (lines[0]["finish"], lines[0]["prompt_tokens"], lines[0]["completion_tokens"]) == ("STOP,STOP", 6, 10)
    assert lines[0]["total_ms"] > 0
    assert [line.get("client_id") for line in lines] == ["team", *[None] * 6]
    assert lines[1]["grammar"] == "regex"
    assert not [line for line in map(str, lines) if "secret" in line or "hush" in line]
