"""Steady streams: a few clients that each send one request after the other while their gaps are recorded.

Invariant: every window starts with the same requests and the same seeds, so answers of two windows can be compared by
name.
Not responsible for: attacks on the server (see faults/attacks.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import grpc

from benchmarks.harness.client import make_call
from benchmarks.harness.validity import Judge, Verdict
from benchmarks.harness.workloads import Item, workload
from protos.engine.v1 import engine_pb2 as pb
from protos.engine.v1 import engine_pb2_grpc


@dataclass(slots=True)
class Window:
    """What the streams of one kind saw in one window."""

    gaps_ms: list[float] = field(default_factory=list)
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Finished answers, by stream and number."""
    invalid: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """gRPC status name -> answers that ended with it."""
    first_failure: str = ""
    """What the first of them said: stream and number, status, details."""
    late_rows: int = 0
    """Guided streams: times that a sequence's rows came too late for its step, by the server's own count."""

    @property
    def failed(self) -> int:
        """Answers that ended with a status of error."""
        return self.failures.total()

    def fail(self, name: str, status: str, details: str) -> None:
        """Note an answer that failed."""
        self.failures[status] += 1
        self.first_failure = self.first_failure or f"{name}: {status}: {details}"

    def add(self, other: Window) -> None:
        """Take another window of the same streams in."""
        self.gaps_ms += other.gaps_ms
        self.answers |= other.answers
        self.invalid += other.invalid
        self.failures += other.failures
        self.first_failure = self.first_failure or other.first_failure
        self.late_rows += other.late_rows


Windows = dict[str, Window]
"""By kind of stream: "guided", "free"."""


class Streams:
    """The steady load: `per_kind` guided and as many unguided streams over one channel."""

    def __init__(self, address: str, per_kind: int, max_tokens: int, metadata: Sequence[tuple[str, str]] = ()) -> None:
        """Args: `metadata` is sent with every call."""
        self._metadata = tuple(metadata)
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = engine_pb2_grpc.EngineStub(self._channel)
        self._items = {
            "guided": workload("schema", max_tokens=max_tokens),
            "free": workload("chat", max_tokens=max_tokens),
        }
        self._per_kind = per_kind
        self._judge = Judge()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(None)

    async def watch(self, seconds: float) -> Windows:
        """Run every stream from its first request on, for `seconds`; answers that still run then are cancelled."""
        windows = {kind: Window() for kind in self._items}
        before = await self._stub.GetStats(pb.GetStatsRequest(), metadata=self._metadata)
        streams = [
            asyncio.create_task(self._stream(items, lane, windows[kind]), name=f"{kind} {lane}")
            for kind, items in self._items.items()
            for lane in range(self._per_kind)
        ]
        done, running = await asyncio.wait(streams, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task in done:
            task.result()
        after = await self._stub.GetStats(pb.GetStatsRequest(), metadata=self._metadata)
        windows["guided"].late_rows = after.deferred_rows - before.deferred_rows
        return windows

    async def _stream(self, items: Sequence[Item], lane: int, window: Window) -> None:
        for number in count():
            item = items[(lane + number * self._per_kind) % len(items)]
            name = f"{lane}.{number}"
            sampling = pb.SamplingParams(max_tokens=item.max_tokens, temperature=0.8, seed=1000 * lane + number)
            call = make_call(name, item.messages, schema=item.schema, sampling=sampling)
            try:
                await self._answer(call.request, name, item, window)
            except grpc.aio.AioRpcError as error:
                window.fail(name, error.code().name, error.details() or "")
                await asyncio.sleep(0.1)

    async def _answer(self, request: pb.GenerateRequest, name: str, item: Item, window: Window) -> None:
        tokens: list[int] = []
        text: list[str] = []
        last_s = 0.0
        finish = pb.FINISH_REASON_UNSPECIFIED
        async for response in self._stub.Generate(request, timeout=600, metadata=self._metadata):
            now_s = time.perf_counter()
            if response.token_ids:
                if last_s:
                    window.gaps_ms.append((now_s - last_s) * 1e3)
                last_s = now_s
            tokens += response.token_ids
            text.append(response.text)
            finish = response.finish_reason or finish
        window.answers[name] = tuple(tokens)
        if item.schema and finish == pb.FINISH_REASON_STOP:
            window.invalid += self._judge.judge(item.schema, "".join(text)).verdict is not Verdict.VALID
