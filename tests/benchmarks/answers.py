"""Answers as a run measures them."""

from __future__ import annotations

from benchmarks.harness.measure import Answer, EngineTimes


def answer(
    name: str = "a",
    tokens: int = 3,
    text: str = "{}",
    finish: str = "stop",
    first_s: float = 0.5,
    last_s: float = 1.5,
    steps: int = 2,
    times: EngineTimes | None = None,
) -> Answer:
    return Answer(name, text, tuple(range(tokens)), finish, 0.0, first_s, last_s, steps, times)


def times(decode_ms: float, steps: int, mask_wait_ms: float = 0.0) -> EngineTimes:
    return EngineTimes(10.0, 10.0 + decode_ms, mask_wait_ms, steps, 0, 0, 0)
