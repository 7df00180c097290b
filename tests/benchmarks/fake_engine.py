"""An engine that speaks the real protocol over real gRPC and makes its tokens up, for tests of the harness.

Invariant: what it answers is a function of only the request and of `Script`. Not a model, and no grammar: a guided
answer is whatever the script says, valid or not.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc


@dataclass
class Script:
    """What the fake answers. `text` makes the text of a request; `tokens` its ids."""

    text: Callable[[pb.GenerateRequest], str] = lambda request: "{}"
    tokens: Callable[[pb.GenerateRequest], list[int]] = lambda request: stable_tokens(request)
    finish: pb.FinishReason = pb.FINISH_REASON_STOP
    refuse: tuple[grpc.StatusCode, str] | None = None
    output_names: Sequence[str] = ()
    """The tensors that the model has."""


def stable_tokens(request: pb.GenerateRequest) -> list[int]:
    """Tokens that depend on the prompt and the seed, and not on speculation."""
    seed = zlib.crc32(request.messages.SerializeToString()) ^ request.sampling.seed
    return [(seed >> shift) & 0xFF for shift in range(0, 24, 4)]


ServicerContext = grpc.aio.ServicerContext[Any, Any]


class FakeEngine(engine_pb2_grpc.EngineServicer):
    """Answers in two deltas of tokens and a last response; counts how many calls ran at once."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.running = 0
        self.most_running = 0
        self.requests: list[pb.GenerateRequest] = []
        self.compiled: list[pb.CompileRequest] = []

    async def Generate(
        self, request: pb.GenerateRequest, context: ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            if self.script.refuse is not None:
                await context.abort(*self.script.refuse)
            tokens = self.script.tokens(request)
            yield pb.GenerateResponse(token_ids=tokens[:1])
            await asyncio.sleep(0)
            yield pb.GenerateResponse(token_ids=tokens[1:])
            yield pb.GenerateResponse(
                text=self.script.text(request),
                finish_reason=self.script.finish,
                usage=pb.Usage(prompt_tokens=3, completion_tokens=len(tokens)),
                telemetry=pb.Telemetry(steps=2, ttft_ms=1.0, total_ms=5.0, mask_wait_ms=0.5),
            )
        finally:
            self.running -= 1

    async def Compile(self, request: pb.CompileRequest, context: ServicerContext) -> pb.CompileResponse:
        self.compiled.append(request)
        if self.script.refuse is not None:
            await context.abort(*self.script.refuse)
        return pb.CompileResponse(grammar_id="fake")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: ServicerContext) -> pb.GetModelInfoResponse:
        names = self.script.output_names
        return pb.GetModelInfoResponse(
            model="fake", version="0", num_draft_tokens=7, drafter="ngram", output_names=names
        )

    async def Abort(self, request: pb.AbortRequest, context: ServicerContext) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=False)

    async def GetStats(self, request: pb.GetStatsRequest, context: ServicerContext) -> pb.GetStatsResponse:
        return pb.GetStatsResponse(running=self.running)
