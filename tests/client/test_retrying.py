"""When a call is sent again, without sleeping."""

from __future__ import annotations

import grpc
import pytest

from lockstep_client.errors import from_status
from lockstep_client.retrying import Attempts, Retries

AWAY = from_status(grpc.StatusCode.UNAVAILABLE, "away")


def attempts(retries: Retries, deadline_s: float | None = None, jitter: float = 1.0) -> Attempts:
    return Attempts(retries, deadline_s, lambda: 100.0, lambda: jitter)


def test_pauses_double_up_to_the_longest_less_jitter_and_end_at_the_deadline() -> None:
    made = attempts(Retries(attempts=6, first_pause_s=1, longest_pause_s=5))
    assert [made.pause_after(AWAY) for _ in range(6)] == [1, 2, 4, 5, 5, None]
    assert attempts(Retries(first_pause_s=1), jitter=0.0).pause_after(AWAY) == 0.5, "up to half of a pause"
    made = attempts(Retries(attempts=9, first_pause_s=2, longest_pause_s=9), deadline_s=103.0)
    assert [made.pause_after(AWAY) for _ in range(2)] == [2, None]
    assert made.remaining_s == 3


def test_a_refusal_is_final() -> None:
    for code, details in (("INVALID_ARGUMENT", "max_queue_size"), ("RESOURCE_EXHAUSTED", "max_grammar_bytes")):
        assert attempts(Retries()).pause_after(from_status(grpc.StatusCode[code], details)) is None


def test_impossible_retries_are_refused() -> None:
    for wrong in ({"attempts": 0}, {"first_pause_s": 0}, {"first_pause_s": 9, "longest_pause_s": 1}):
        with pytest.raises(ValueError, match=r"attempts|first_pause_s"):
            Retries(**wrong)  # type: ignore[arg-type]
