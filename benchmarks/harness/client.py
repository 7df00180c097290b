"""A gRPC client that measures: one call becomes one `Answer`, many calls run at a bounded concurrency.

Invariant: times are taken in this process, when a response with tokens arrives, never read from the server.
Not responsible for: prompts (see workloads.py), judging answers (see validity.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from benchmarks.harness.failure import CannotRun
from benchmarks.harness.measure import Answer, EngineTimes, Run
from lockstep_client.access import access_to
from lockstep_client.async_rpc import AsyncRpc
from lockstep_client.calls import Method
from protos.engine.v1 import engine_pb2 as pb

GENERATE = Method("Generate", pb.GenerateRequest, pb.GenerateResponse)
MODEL_INFO = Method("GetModelInfo", pb.GetModelInfoRequest, pb.GetModelInfoResponse)


class CallRefused(CannotRun):
    """The server ended a call with a gRPC status."""

    def __init__(self, name: str, status: str, reason: str) -> None:
        super().__init__(f"{name}: {status}: {reason}")
        self.name = name
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Call:
    """One request and the name that its answer goes by."""

    name: str
    request: pb.GenerateRequest


def make_call(
    name: str,
    messages: Sequence[tuple[str, str]],
    *,
    schema: str | None,
    sampling: pb.SamplingParams,
    num_draft_tokens: int | None = None,
) -> Call:
    """Build a call from chat messages; `schema` None: unguided text; `num_draft_tokens` None: the server's K."""
    request = pb.GenerateRequest(
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages]),
        sampling=sampling,
    )
    if schema is not None:
        request.grammar.json_schema = schema
    if num_draft_tokens is not None:
        request.speculation.num_draft_tokens = num_draft_tokens
    return Call(name, request)


class EngineClient:
    """One channel to one engine. Use it inside one event loop and close it there."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._rpc = AsyncRpc(access_to(address, False, None, ()))

    def __repr__(self) -> str:
        return f"<EngineClient {self.address}>"

    async def info(self) -> pb.GetModelInfoResponse:
        """Return the server's description of itself."""
        return await self._rpc.unary(MODEL_INFO, pb.GetModelInfoRequest(), 30)

    async def close(self) -> None:
        """Close the channel."""
        await self._rpc.aclose()

    async def generate(self, call: Call, timeout_s: float = 600.0) -> Answer:
        """Run one call to its end.

        Raises:
            CallRefused: the server ended the call with a status.

        """
        text: list[str] = []
        tokens: list[int] = []
        arrivals: list[float] = []
        finish = ""
        times: EngineTimes | None = None
        started_s = time.perf_counter()
        try:
            async for response in self._rpc.stream(GENERATE, call.request, timeout_s):
                if response.token_ids:
                    arrivals.append(time.perf_counter())
                    tokens.extend(response.token_ids)
                text.append(response.text)
                if response.finish_reason:
                    finish = pb.FinishReason.Name(response.finish_reason).removeprefix("FINISH_REASON_").lower()
                if response.HasField("telemetry"):
                    times = _times(response.telemetry)
        except grpc.aio.AioRpcError as error:
            raise CallRefused(call.name, error.code().name, error.details() or "") from error
        ended_s = time.perf_counter()
        return Answer(
            name=call.name,
            text="".join(text),
            token_ids=tuple(tokens),
            finish=finish,
            started_s=started_s,
            first_s=arrivals[0] if arrivals else ended_s,
            last_s=arrivals[-1] if arrivals else ended_s,
            steps=times.steps if times and times.steps else len(arrivals),
            times=times,
        )

    async def run(self, calls: Sequence[Call], concurrency: int, on_answer: Callable[[], None] = lambda: None) -> Run:
        """Run `calls` in order, `concurrency` at a time.

        Raises:
            CallRefused: the first refusal; the other calls are cancelled.

        """
        gate = asyncio.Semaphore(concurrency)

        async def one(call: Call) -> Answer:
            async with gate:
                answer = await self.generate(call)
                on_answer()
                return answer

        started_s = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(call)) for call in calls]
        except* CallRefused as refusals:
            raise refusals.exceptions[0] from None
        return Run(tuple(task.result() for task in tasks), time.perf_counter() - started_s)


def _times(telemetry: pb.Telemetry) -> EngineTimes:
    return EngineTimes(
        ttft_ms=telemetry.ttft_ms,
        total_ms=telemetry.total_ms,
        mask_wait_ms=telemetry.mask_wait_ms,
        steps=telemetry.steps,
        draft_tokens=telemetry.draft_tokens,
        accepted_draft_tokens=telemetry.accepted_draft_tokens,
        deferred_rows=telemetry.deferred_rows,
        backtracks=telemetry.backtracks,
        exact_tries=telemetry.exact_tries,
        exact_tokens=telemetry.exact_tokens,
    )
