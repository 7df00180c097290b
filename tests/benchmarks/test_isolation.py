"""The watch over steady streams: gaps, differences and failures are found, and attacks do what they say."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from benchmarks.faults.attacks import (
    Outcomes,
    Target,
    flood,
    hostile,
    under,
)
from benchmarks.faults.isolation import Result, as_json, changed, ratio, result_table, tokenizer_of
from benchmarks.harness.streams import Streams, Window, Windows
from tests.benchmarks.conftest import Serve
from tests.benchmarks.fake_engine import Script
from tests.waiting import eventually


def result(alone: Window, seen: Window) -> Result:
    free = Window(gaps_ms=[1.0])
    return Result("flood", {"guided": alone, "free": free}, {"guided": seen, "free": free}, Outcomes({"OK": 3}))


async def watched(streams: Streams, enough: Callable[[Windows], bool]) -> Windows:
    """Return the first watch that has seen enough, each twice as long as the one before: a busy machine needs more."""
    seconds = 0.3
    while True:
        windows = await streams.watch(seconds)
        if enough(windows) or seconds > 60.0:
            return windows
        seconds *= 2


def test_the_ratio_is_of_the_99th_percentiles() -> None:
    found = result(Window(gaps_ms=[10.0] * 100), Window(gaps_ms=[10.0] * 90 + [25.0] * 10))
    assert ratio(found, "guided") == pytest.approx(2.5)
    assert ratio(found, "free") == pytest.approx(1.0)


def test_only_answers_that_both_windows_finished_are_compared() -> None:
    found = result(
        Window(answers={"0.0": (1, 2), "0.1": (3,), "0.2": (4,)}), Window(answers={"0.0": (1, 2), "0.1": (9,)})
    )
    assert changed(found, "guided") == (2, 1)


def test_streams_repeat_the_same_requests_in_every_watch(serve_fake: Serve) -> None:
    address, engine = serve_fake(Script())

    async def watch_twice() -> tuple[Window, Window]:
        streams = Streams(address, per_kind=1, max_tokens=8)
        try:
            first = await watched(streams, lambda windows: "0.0" in windows["guided"].answers)
            engine.requests.clear()
            second = await watched(
                streams, lambda windows: "0.0" in windows["guided"].answers and "0.0" in windows["free"].answers
            )
        finally:
            await streams.close()
        return first["guided"], second["guided"]

    first, second = asyncio.run(watch_twice())
    both = first.answers.keys() & second.answers.keys()
    assert "0.0" in both
    assert all(first.answers[name] == second.answers[name] for name in both)
    assert first.gaps_ms
    # "{}" lacks what every schema of the workload requires.
    assert first.invalid >= len(first.answers) > 0
    assert {request.HasField("grammar") for request in engine.requests} == {True, False}


def test_what_failed_is_said_under_the_table_and_in_the_plain_data() -> None:
    seen = Window(gaps_ms=[2.0], late_rows=7)
    for name in ("0.1", "1.4"):
        seen.fail(name, "UNAVAILABLE", "the grammar process was lost")
    found = result(Window(gaps_ms=[1.0], late_rows=4), seen)
    assert "guided streams failed: 2 UNAVAILABLE; first 0.1: UNAVAILABLE: the grammar process was lost" in result_table(
        [found]
    )
    guided = as_json([found])[0]
    assert guided["failures"] == {"UNAVAILABLE": 2}
    assert (guided["failed"], guided["late_rows"], guided["alone_late_rows"]) == (2, 7, 2.0)


def test_a_flood_sends_distinct_schemas_at_its_rate(serve_fake: Serve) -> None:
    address, engine = serve_fake(Script())

    async def attack() -> Outcomes:
        async with under(flood(200.0), Target(address, None)) as outcomes:
            await eventually(lambda: outcomes["OK"] >= 10)
        return outcomes

    outcomes = asyncio.run(attack())
    assert outcomes["sent"] >= 10
    sources = [request.grammar.json_schema for request in engine.compiled]
    assert len(sources) == len(set(sources)) >= 10


@pytest.mark.parametrize("guided", [True, False])
def test_a_hostile_request_and_its_control_differ_in_the_grammar_alone(serve_fake: Serve, guided: bool) -> None:
    address, engine = serve_fake(Script())

    async def attack() -> None:
        async with under(hostile(40.0, guided=guided), Target(address, None)) as outcomes:
            await eventually(lambda: outcomes["OK"] >= 8)

    asyncio.run(attack())
    grammars = [request.grammar.SerializeToString() for request in engine.requests]
    for request in engine.requests:
        json.loads(request.grammar.json_schema or "{}")
    assert {request.HasField("grammar") for request in engine.requests} == {guided}
    assert len(set(grammars)) == (len(grammars) if guided else 1)
    assert {request.sampling.max_tokens for request in engine.requests} == {4}


@pytest.mark.model
def test_the_control_compiles_the_schemas_of_the_flood() -> None:
    command = (sys.executable, "-m", "benchmarks.faults.compile_alone", "--tokenizer", str(tokenizer_of("embedded")))
    subprocess.run([*command, "--count", "3"], check=True)
