"""Requests with logits processors and without are sent in turn, and an answer that differs is counted."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from benchmarks.cost.processors import ENTRIES, KINDS, PLAIN, Findings, measure, report
from gpu_engine.api.config import EngineConfig
from protos.engine.v1 import engine_pb2 as pb
from tests.benchmarks.conftest import Serve
from tests.benchmarks.fake_engine import Script, stable_tokens


def test_the_server_of_the_benchmark_has_every_processor() -> None:
    names = {entry.partition("=")[0] for entry in EngineConfig(logits_processors=ENTRIES).logits_processors}
    assert {each.name for kind in KINDS.values() for each in kind} == names


def test_the_report_divides_by_the_times_without_processors() -> None:
    findings = Findings()
    for kind in KINDS:
        for many in (1, 8):
            findings.seconds[kind, many] = (1.0 if kind == PLAIN else 2.0) * many
        findings.beside_s[kind] = 3.0 if kind == PLAIN else 4.0
    line = report(findings, 8).splitlines()[-1]
    assert line.count("0.50x") == 2
    assert "0.75x" in line


@pytest.mark.parametrize("changes", [False, True])
def test_every_kind_is_asked_alone_together_and_beside_others(serve_fake: Serve, changes: bool) -> None:
    def tokens(request: pb.GenerateRequest) -> list[int]:
        return [*stable_tokens(request), len(request.logits_processors) * changes]

    address, engine = serve_fake(Script(tokens=tokens))
    findings = asyncio.run(measure(address, argparse.Namespace(rounds=1, concurrency=2, max_tokens=4)))
    assert set(findings.beside_s) == set(KINDS)
    assert [findings.differ[kind] for kind in KINDS] == [0, *[3 * changes] * 3]
    assert len(engine.requests) == 1 + len(KINDS) * (1 + 2 + 2)
