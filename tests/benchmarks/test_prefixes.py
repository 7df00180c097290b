"""Both servers are asked the same, in turn, and an answer that differs is counted."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace

from benchmarks.harness.workloads import workload
from benchmarks.speed.prefixes import FIRST, NEXT, SEEN, extractions, measure, report
from protos.engine.v1 import engine_pb2 as pb
from tests.benchmarks.conftest import Serve
from tests.benchmarks.fake_engine import Script


def arguments(**fields: int) -> argparse.Namespace:
    return argparse.Namespace(**{"count": 6, "conversations": 2, "max_tokens": 8} | fields)


def test_a_schema_is_new_once() -> None:
    kinds = [kind for kind, _ in extractions(len(workload("extraction")), 8)]
    schemas = {item.schema for item in workload("extraction")}
    assert kinds.count(FIRST) == len(schemas)
    assert kinds.count(SEEN) == len(kinds) - len(schemas) > 0
    assert kinds[0] == FIRST


def test_both_are_asked_the_same_and_conversations_carry_the_answer(serve_fake: Serve) -> None:
    script = Script(text=lambda request: f"said {len(request.messages.messages)}")
    (without, one), (with_cache, other) = serve_fake(script), serve_fake(script)
    findings = asyncio.run(measure((without, with_cache), arguments()))
    assert [r.SerializeToString() for r in one.requests] == [r.SerializeToString() for r in other.requests]
    assert (findings.answers, findings.differ) == (6 + 2 * 3, 0)
    assert {kind: len(off) for kind, (off, _) in findings.ttft_ms.items()}[NEXT] == 4
    last = one.requests[-1].messages.messages
    assert [message.role for message in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[1].content == "said 1"
    assert "answers that differ: 0 of 12" in report(findings)


def test_an_answer_that_differs_is_counted(serve_fake: Serve) -> None:
    script = Script(text=lambda request: "a")
    without, _ = serve_fake(script)
    with_cache, _ = serve_fake(replace(script, text=lambda request: "b" if request.HasField("grammar") else "a"))
    findings = asyncio.run(measure((without, with_cache), arguments()))
    assert findings.differ == 6


def test_what_is_asked_is_bounded(serve_fake: Serve) -> None:
    address, engine = serve_fake(Script(text=lambda request: ""))
    asyncio.run(measure((address, address), arguments(count=1, conversations=0)))
    assert [request.sampling.max_tokens for request in engine.requests] == [4, 4, 8, 8]
    assert all(isinstance(request, pb.GenerateRequest) for request in engine.requests)
