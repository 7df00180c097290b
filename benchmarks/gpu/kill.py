"""The effect of SIGKILL to the grammar process on two running answers, one guided and one not.

Invariant: the guided answer is compared, token by token, with the answer of an undisturbed run.
Not responsible for: the server (see server.py).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.faults.attacks import Target
from benchmarks.harness.tables import number
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc

KILLED = ["longest free gap ms", "guided gap ms", "guided tokens", "equal", "finish", "starts", "free tokens after"]


@dataclass
class _Stream:
    """Tokens of an answer and when they came."""

    token_ids: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    finish: str = ""

    async def read(
        self, stub: Any, request: pb.GenerateRequest, on_response: Callable[[], None] = lambda: None
    ) -> _Stream:
        async for response in stub.Generate(request, timeout=120):
            if response.token_ids:
                self.token_ids.extend(response.token_ids)
                self.at_s.append(time.perf_counter())
            if response.finish_reason:
                self.finish = pb.FinishReason.Name(response.finish_reason).removeprefix("FINISH_REASON_").lower()
            on_response()
        return self

    def longest_gap_ms(self, since_s: float) -> float:
        times = [since_s, *(at for at in self.at_s if at > since_s)]
        return max((b - a for a, b in itertools.pairwise(times)), default=float("nan")) * 1e3


async def killed(address: str, pid: int | None, length: int, drains_ms: float) -> tuple[list[str], list[str]]:
    """Return a row under KILLED, and problems, such as an unguided answer without tokens for `drains_ms`."""
    guided = pb.GenerateRequest(
        text="Letters: ",
        grammar=pb.Grammar(regex=f"[a-z ]{{{length}}}"),
        sampling=pb.SamplingParams(max_tokens=length + 10, temperature=0.0),
    )
    endless = pb.SamplingParams(max_tokens=1500, temperature=0.8, seed=1, ignore_eos=True)
    free = pb.GenerateRequest(text="Once upon a time", sampling=endless)
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = engine_pb2_grpc.EngineStub(channel)
        undisturbed = await _Stream().read(stub, guided)
        starts = (await stub.GetStats(pb.GetStatsRequest(), timeout=30)).grammar_starts
        steady, hit, kills = _Stream(), _Stream(), list[float]()

        def kill() -> None:
            sidecar = Target(address, pid).sidecar_pid()
            if not kills and len(hit.token_ids) >= 4 and steady.token_ids and sidecar is not None:
                kills.append(time.perf_counter())
                os.kill(sidecar, signal.SIGKILL)

        running = asyncio.create_task(steady.read(stub, free))
        await hit.read(stub, guided, kill)
        after = sum(at > kills[0] for at in steady.at_s) if kills else 0
        running.cancel()
        await asyncio.wait([running])
        stats = await stub.GetStats(pb.GetStatsRequest(), timeout=30)
    if not kills:
        return ["", "", str(len(hit.token_ids)), "", hit.finish, "", ""], ["the answer ended before the kill"]
    free_gap, equal = steady.longest_gap_ms(kills[0]), hit.token_ids == undisturbed.token_ids
    gaps = [number(free_gap, 0), number(hit.longest_gap_ms(kills[0]), 0)]
    again = stats.grammar_starts - starts
    problems = []
    if not equal:
        problems.append("the guided answer differs from the undisturbed one")
    if again != 1:
        problems.append(f"the grammar process was started {again} times, not once")
    if not free_gap < drains_ms:
        problems.append(f"the unguided answer had no token for {free_gap:.0f} ms")
    return [*gaps, str(len(hit.token_ids)), str(equal), hit.finish, str(again), str(after)], problems
