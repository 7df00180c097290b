"""The harness's own rules: turns rotate, failures are kept, wrong arguments are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import grpc
import pytest

from benchmarks.harness.measure import Answer, Run, Summary
from benchmarks.harness.report import as_json
from benchmarks.harness.server import ServerOptions
from benchmarks.harness.systems import Lockstep, Prompt, SystemFailed
from benchmarks.harness.validity import Judge
from benchmarks.harness.workloads import workload
from benchmarks.speed import serve
from benchmarks.speed.serve_systems import peer_names
from tests.benchmarks.conftest import Serve
from tests.benchmarks.fake_engine import Script


class FakeSystem:
    """Answers each prompt with two tokens, or fails; notes its turns in a shared list."""

    def __init__(self, name: str, turns: list[str], fails: bool = False) -> None:
        self.name = name
        self.guided = True
        self._turns = turns
        self._fails = fails

    def run(self, prompts: Sequence[Prompt], concurrency: int, on_answer: Callable[[], None]) -> Run:
        self._turns.append(self.name)
        if self._fails:
            raise SystemFailed("AssertionError: hf.py:96")
        answers = tuple(Answer(p.item.name, "{}", (1, 2), "stop", 0.0, 0.1, 0.2, 2) for p in prompts)
        return Run(answers, 1.0)

    def describe(self) -> str:
        return self.name

    def close(self) -> None:
        self._turns.append(f"closed {self.name}")


def prompts(count: int) -> dict[str, list[Prompt]]:
    return {"chat": [Prompt(item, (1, 2, 3)) for item in workload("chat", count)]}


def test_systems_take_turns_and_the_first_one_changes() -> None:
    turns: list[str] = []
    systems = [FakeSystem(name, turns) for name in "abc"]
    results = serve.measure(systems, prompts(2), [1], 3, Judge())
    assert turns == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    summary = results["chat", 1]["a"]
    assert isinstance(summary, Summary)
    assert (summary.answers, summary.tokens, summary.tokens_per_s) == (6, 12, 4.0)


def test_a_failure_is_kept_and_not_tried_again() -> None:
    turns: list[str] = []
    systems = [FakeSystem("good", turns), FakeSystem("bad", turns, fails=True)]
    results = serve.measure(systems, prompts(1), [1], 2, Judge())
    assert results["chat", 1]["bad"] == "AssertionError: hf.py:96"
    assert turns.count("bad") == 1
    data = as_json(results, {}, {"chat": ["good", "bad"]}, {})
    assert json.loads(json.dumps(data))["workloads"][0]["systems"]["bad"] == "AssertionError: hf.py:96"


def test_guided_answers_are_paired_with_free_ones_of_the_same_length(serve_fake: Serve) -> None:
    address, engine = serve_fake(Script(tokens=lambda request: [1, 2, 3]))
    ours = Lockstep(ServerOptions(), address)
    extraction = [Prompt(item, (1,)) for item in workload("extraction", 3)]
    pairs = ours.run_guidance_pairs(extraction, 1, lambda: None)
    ours.close()
    assert [(guided.name, free.name) for guided, free in pairs] == [(p.item.name, p.item.name) for p in extraction]
    asked = [(r.HasField("grammar"), r.sampling.ignore_eos, r.sampling.max_tokens) for r in engine.requests]
    assert asked == [(True, False, 192), (False, True, 3)] * 3


def test_a_refusal_is_a_failed_system(serve_fake: Serve) -> None:
    address, _ = serve_fake(Script(refuse=(grpc.StatusCode.FAILED_PRECONDITION, "no grammar process")))
    ours = Lockstep(ServerOptions(), address)
    with pytest.raises(SystemFailed, match="FAILED_PRECONDITION: no grammar process"):
        ours.run(prompts(2)["chat"], 2, lambda: None)
    ours.close()


def test_a_pass_has_two_requests_per_slot_at_least() -> None:
    ready = prompts(3)["chat"]
    assert serve.requests(ready, 1) == ready
    assert [p.item.name for p in serve.requests(ready, 4)] == [ready[i % 3].item.name for i in range(8)]


def test_each_pass_has_a_salt_of_its_own(serve_fake: Serve) -> None:
    address, engine = serve_fake(Script(tokens=lambda request: [1]))
    ours = Lockstep(ServerOptions(prefix_cache=True), address)
    for _ in range(2):
        ours.run(prompts(2)["chat"], 1, lambda: None)
    ours.close()
    assert [request.cache_salt for request in engine.requests] == ["pass 1", "pass 1", "pass 2", "pass 2"]


def test_a_system_that_ignores_schemas_is_no_peer_on_a_guided_workload() -> None:
    guided, free = FakeSystem("guided", []), FakeSystem("free", [])
    free.guided = False
    assert peer_names([guided, free], guided=True) == ["guided"]
    assert peer_names([guided, free], guided=False) == ["guided", "free"]
