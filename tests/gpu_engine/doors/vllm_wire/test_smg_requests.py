"""What the gateway smg makes of a request, as the engine receives it: what it drops is in docs/gateways.md."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpu_engine.api.request import GrammarKind, Request
from gpu_engine.doors.vllm_wire.vllm_servicer import add_to
from gpu_engine.front.calls import Calls
from tests.e2e.smg import Smg, smg
from tests.fakes import FakeEngine, answers_with
from tests.gpu_engine.front import serving as front

pytest.importorskip("smg", reason="needs the gateway smg, of which there is a wheel for x86-64")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "pay", "parameters": SCHEMA, "strict": True}}]


@dataclass
class Setup:
    gateway: Smg
    engine: FakeEngine

    async def received(self, **fields: Any) -> Request:
        """Send a chat through the gateway; return what the engine got."""
        body = {"model": "embedded", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9} | fields
        before = len(self.engine.submitted)
        await asyncio.to_thread(self.gateway.post, "/v1/chat/completions", body)
        (request,) = self.engine.submitted[before:]
        return request


@asynccontextmanager
async def gateway_of(folder: Path) -> AsyncIterator[Setup]:
    ports: list[int] = []

    def door(server: grpc.aio.Server, calls: Calls) -> None:
        add_to(server, calls, "1.2", kv_events=True)
        ports.append(server.add_insecure_port("127.0.0.1:0"))

    async with front.serving(folder, answers_with('{"a": 1}'), doors=[door]) as made:
        running = smg([f"127.0.0.1:{ports[0]}"], folder / "log")
        gateway = await asyncio.to_thread(running.__enter__)
        try:
            yield Setup(gateway, made.engine)
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)
            await made.calls.drain(1.0)


async def test_what_a_request_becomes_on_its_way_to_the_engine(tmp_path: Path) -> None:
    async with gateway_of(tmp_path) as s:
        plain = await s.received(temperature=0.5, top_p=0.25, seed=3, frequency_penalty=1.0, stop=["x"])
        sampling = plain.sampling
        assert bytes(plain.prompt_ids).decode() == "user: hi\nassistant:", "the engine's own chat template"
        assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.stop) == (0.5, 0.25, 3, ("x",))
        assert (sampling.frequency_penalty, sampling.max_tokens, plain.grammar) == (1.0, 9, None)

        formatted = await s.received(response_format=FORMAT)
        assert formatted.grammar is not None
        assert (formatted.grammar.kind, json.loads(formatted.grammar.source)) == (GrammarKind.JSON_SCHEMA, SCHEMA)
        assert (await s.received(response_format={"type": "json_object"})).grammar is not None
        required = await s.received(tools=TOOLS, tool_choice="required")
        assert required.grammar is not None
        assert "pay" in required.grammar.source

        # What smg drops.
        assert (await s.received(structured_outputs={"regex": "a"})).grammar is None
        assert (await s.received(logit_bias={"5": 1})).sampling.logit_bias == ()
        assert (await s.received(tools=TOOLS, tool_choice="auto")).grammar is None, "strict has no effect"
        both = await s.received(tools=TOOLS, tool_choice="auto", response_format=FORMAT)
        assert both.grammar is not None
        assert json.loads(both.grammar.source) == SCHEMA, "no tool can be called"
