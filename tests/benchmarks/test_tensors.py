"""Requests with tensors and without are sent in turn, and an answer that differs is counted."""

from __future__ import annotations

import argparse
import asyncio

from benchmarks.cost.tensors import PLAIN, Findings, kinds, measure, report, request
from protos.engine.v1 import engine_pb2 as pb
from tests.benchmarks.conftest import Serve
from tests.benchmarks.fake_engine import Script

NAMES = ["logits", "hidden_states.0", "hidden_states.10", "hidden_states.2", "a.0.mlp", "a.1.mlp", "a.1.attn"]


def test_the_last_states_and_a_middle_module_are_asked_for() -> None:
    found = kinds(NAMES)
    assert list(found) == [
        "generation_logits",
        "context_logits",
        "hidden_states.10",
        "hidden_states.10, context",
        "a.1.mlp",
    ]
    assert found["hidden_states.10, context"].additional_outputs[0].context
    assert list(kinds(NAMES[:2])) == [
        "generation_logits",
        "context_logits",
        "hidden_states.0",
        "hidden_states.0, context",
    ]


def test_the_report_divides_by_the_times_without_tensors() -> None:
    findings = Findings(num_bytes={PLAIN: 0, "x": 2_000_000})
    for name, seconds in ((PLAIN, 1.0), ("x", 2.0)):
        for many in (1, 8):
            findings.seconds[name, many], findings.first_s[name, many] = seconds * many, 0.01
        findings.beside_s[name] = 3 * seconds
    line = report(findings, 8).splitlines()[-2]
    assert line.split("|")[1].strip() == "x"
    assert line.count("0.50x") == 3
    assert "2.0 MB" in line


def test_every_kind_is_asked_alone_together_and_beside_others(serve_fake: Serve) -> None:
    address, engine = serve_fake(Script(output_names=NAMES))
    args = argparse.Namespace(rounds=1, concurrency=2, max_tokens=4)
    findings = asyncio.run(measure(address, args))
    assert findings.differ == 0
    assert set(findings.num_bytes) == {PLAIN, *kinds(NAMES)}
    asked = [message.response.SerializeToString() for message in engine.requests[1:]]
    assert len(asked) == 6 * (1 + 2 + 2)
    for options in kinds(NAMES).values():
        assert asked.count(options.SerializeToString()) == 4
    prompts = {tuple(request(seed, 4, None).token_ids.ids) for seed in range(16)}
    assert len(prompts) == 16
    assert isinstance(engine.requests[0], pb.GenerateRequest)
