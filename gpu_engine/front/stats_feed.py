"""The streams of WatchStats: what the engine's loop did, and what each of its sequences is doing.

Invariant: a stream reads the ring of the last iterations at its own pace and never makes the engine wait. A reader that
is too slow for the ring misses iterations, and the next response says how many.

Not responsible for: the ring and its numbers (see api/stats.py, ops/iterations.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.ports import EngineCore
from gpu_engine.api.stats import Iteration, SequenceStats
from gpu_engine.front.calls import Write
from protos.engine.v1 import engine_pb2 as pb

LEAST_INTERVAL_MS = 10
DEFAULT_INTERVAL_MS = 100
LONGEST_INTERVAL_MS = 3_600_000


class StatsFeed:
    """The streams of one engine. Made and used on the event loop."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._closed = asyncio.Event()

    async def run(self, request: pb.WatchStatsRequest, write: Write) -> None:
        """Write statistics until the server closes. Raises InvalidRequest."""
        interval_ms = request.interval_ms if request.HasField("interval_ms") else DEFAULT_INTERVAL_MS
        if not LEAST_INTERVAL_MS <= interval_ms <= LONGEST_INTERVAL_MS:
            raise InvalidRequest(
                "interval_ms", f"is {interval_ms}, must be in [{LEAST_INTERVAL_MS}, {LONGEST_INTERVAL_MS}]"
            )
        ring = self._engine.iterations
        following = max(0, ring.total - min(request.history, ring.size))
        while not self._closed.is_set():
            iterations, end = ring.since(following)
            if end > following:
                missed = end - following - len(iterations)
                following = end
                await write(self._response(iterations, missed, with_requests=not request.omit_requests))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_ms / 1e3):
                    await self._closed.wait()

    def close(self) -> None:
        """End every stream."""
        self._closed.set()

    def _response(self, iterations: list[Iteration], missed: int, *, with_requests: bool) -> pb.WatchStatsResponse:
        now = self._engine.stats()
        sequences = self._engine.sequence_stats() if with_requests else []
        return pb.WatchStatsResponse(
            iterations=[_iteration(each, num_slots=now.num_slots, num_pages=now.num_pages) for each in iterations],
            requests=[_sequence(each) for each in sequences],
            missed=missed,
        )

    def __repr__(self) -> str:
        return f"<StatsFeed {self._engine.iterations!r}>"


def _iteration(each: Iteration, *, num_slots: int, num_pages: int) -> pb.IterationStats:
    return pb.IterationStats(
        iteration=each.number,
        time_s=each.ended_s,
        iteration_ms=each.seconds * 1e3,
        waiting=each.waiting,
        running=each.running,
        num_slots=num_slots,
        decoding=each.decoding,
        prefill_tokens=each.prefill_tokens,
        generated_tokens=each.generated_tokens,
        draft_tokens=each.draft_tokens,
        accepted_draft_tokens=each.accepted_draft_tokens,
        parked=each.parked,
        preempted=each.preempted,
        pages_used=each.pages_used,
        num_pages=num_pages,
    )


def _sequence(each: SequenceStats) -> pb.RequestStats:
    return pb.RequestStats(
        request_id=each.request_id,
        index=each.index,
        client_id=each.client_id,
        stage=cast("pb.RequestStats.Stage", each.stage.value),
        prompt_tokens=each.prompt_tokens,
        prefilled_tokens=each.prefilled_tokens,
        generated_tokens=each.generated_tokens,
        slot=each.slot,
        pages=each.pages,
    )
