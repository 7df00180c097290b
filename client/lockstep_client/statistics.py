"""Typed statistics of a server: what each iteration of its loop did, and what each running request is doing.

The invariant: every field of the server's messages has one here, under the same name; a test compares them.

Not responsible for: the stream that brings them (see client.py and async_client.py).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lockstep_client.answers import from_message
from lockstep_client.wire import engine_pb2 as pb


@dataclass(frozen=True, slots=True)
class IterationStats:
    """One iteration of the engine's loop that had something to do; engine.proto documents each field."""

    iteration: int
    time_s: float
    """When it ended: seconds since 1970."""
    iteration_ms: float
    waiting: int
    running: int
    num_slots: int
    decoding: int
    prefill_tokens: int
    generated_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    parked: int
    preempted: int
    pages_used: int
    num_pages: int


class Stage(enum.StrEnum):
    """Where a sequence is."""

    WAITING = "waiting"
    """In the waiting queue."""
    PREFILL = "prefill"
    DECODE = "decode"
    PARKED = "parked"
    """It waits for the grammar process."""


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One sequence that waits or runs; engine.proto documents each field."""

    request_id: str
    index: int
    client_id: str
    stage: Stage
    prompt_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    slot: int | None
    """None while it has none."""
    pages: int


@dataclass(frozen=True, slots=True)
class StatsUpdate:
    """What is new since the last update."""

    iterations: tuple[IterationStats, ...]
    """Oldest first."""
    requests: tuple[RequestStats, ...]
    """The sequences that wait or run after the last of these iterations."""
    missed: int
    """Iterations that this reader missed before these, because it was too slow."""


def update_of(message: pb.WatchStatsResponse) -> StatsUpdate:
    """Return the update of a message."""
    return StatsUpdate(
        iterations=tuple(from_message(IterationStats, each) for each in message.iterations),
        requests=tuple(_request(each) for each in message.requests),
        missed=message.missed,
    )


def _request(each: pb.RequestStats) -> RequestStats:
    return RequestStats(
        request_id=each.request_id,
        index=each.index,
        client_id=each.client_id,
        stage=Stage(pb.RequestStats.Stage.Name(each.stage).removeprefix("STAGE_").lower()),
        prompt_tokens=each.prompt_tokens,
        prefilled_tokens=each.prefilled_tokens,
        generated_tokens=each.generated_tokens,
        slot=each.slot if each.HasField("slot") else None,
        pages=each.pages,
    )
