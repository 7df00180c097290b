"""The harness's own rules: turns rotate, failures are kept, wrong arguments are named."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from benchmarks.harness.measure import Answer, Run, Summary
from benchmarks.harness.plot import curve, draw
from benchmarks.harness.report import as_json
from benchmarks.harness.server import EngineServer, ServerFailed, ServerOptions
from benchmarks.harness.systems import Lockstep, Prompt, SystemFailed, hf_directory
from benchmarks.harness.validity import Judge
from benchmarks.harness.workloads import workload
from benchmarks.speed import serve
from benchmarks.speed.serve_systems import SYSTEMS, gguf_file, makers, peer_names, start_systems
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


def test_the_results_so_far_are_handed_on_after_each_cell() -> None:
    seen: list[list[tuple[str, int]]] = []
    serve.measure([FakeSystem("a", [])], prompts(1), [1, 2], 1, Judge(), lambda results: seen.append(list(results)))
    assert seen == [[("chat", 1)], [("chat", 1), ("chat", 2)]]


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


def test_every_system_can_be_named_and_starts_nothing_until_then(tmp_path: Path) -> None:
    arguments = serve.build_parser().parse_args(["--llama-server", str(tmp_path / "none"), "--engine-flag=--a=b"])
    settings = serve.settings_of(arguments, tmp_path, [1, 32])
    assert tuple(makers(settings)) == SYSTEMS
    assert (settings.batch, settings.engine.max_batch_size) == (32, 32)
    assert settings.engine.extra == ("--draft-index-bytes=0", "--a=b"), "a flag given here overrides the harness's"


def test_a_system_that_is_not_installed_is_skipped_with_its_reason(tmp_path: Path) -> None:
    arguments = serve.build_parser().parse_args(["--llama-server", str(tmp_path / "none"), "--gguf", __file__])
    known = makers(serve.settings_of(arguments, tmp_path, [1]))
    with ExitStack() as running:
        started, absent = start_systems(["openvino", "llamacpp", "vllm"], known, running)
    assert started == []
    assert (absent["openvino"], absent["vllm"]) == ("no --openvino-python", "no --vllm-python")
    assert str(tmp_path / "none") in absent["llamacpp"]


def test_systems_that_cannot_forget_a_pass_are_left_out_of_a_run_with_prefix_caches(tmp_path: Path) -> None:
    arguments = serve.build_parser().parse_args(["--prefix-cache", "--gguf", __file__, "--vllm-python", __file__])
    settings = serve.settings_of(arguments, tmp_path, [1])
    assert settings.engine.prefix_cache
    with ExitStack() as running:
        started, absent = start_systems(["openvino", "llamacpp", "transformers"], makers(settings), running)
    assert started == []
    assert all(reason.startswith("--prefix-cache: ") for reason in absent.values())


def test_each_pass_has_a_salt_of_its_own(serve_fake: Serve) -> None:
    address, engine = serve_fake(Script(tokens=lambda request: [1]))
    ours = Lockstep(ServerOptions(prefix_cache=True), address)
    for _ in range(2):
        ours.run(prompts(2)["chat"], 1, lambda: None)
    ours.close()
    assert [request.cache_salt for request in engine.requests] == ["pass 1", "pass 1", "pass 2", "pass 2"]


def test_the_others_are_at_rest_before_each_pass() -> None:
    turns: list[str] = []
    systems = [FakeSystem(name, turns) for name in "ab"]
    serve.measure(systems, prompts(1), [1], 1, Judge(), rest=lambda: turns.append("rest"))
    assert turns == ["rest", "a", "rest", "b"]


def test_started_systems_are_closed_when_the_process_is_told_to_end() -> None:
    turns: list[str] = []

    def told_to_end() -> FakeSystem:
        signal.raise_signal(signal.SIGTERM)
        return FakeSystem("late", turns)

    known = {"first": lambda: FakeSystem("first", turns), "second": told_to_end}
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end, serve.exit_on_sigterm(), ExitStack() as running:
        start_systems(["first", "second"], known, running)
    assert end.value.code == 143
    assert turns == ["closed first"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_system_that_ignores_schemas_is_no_peer_on_a_guided_workload() -> None:
    guided, free = FakeSystem("guided", []), FakeSystem("free", [])
    free.guided = False
    assert peer_names([guided, free], guided=True) == ["guided"]
    assert peer_names([guided, free], guided=False) == ["guided", "free"]


def test_a_gguf_file_is_the_one_given_or_the_model_itself(tmp_path: Path) -> None:
    given = tmp_path / "a.gguf"
    given.touch()
    assert gguf_file("embedded", given) == given
    assert gguf_file("m.gguf", None) == Path("m.gguf")
    assert gguf_file(str(tmp_path), None) is None
    with pytest.raises(ValueError, match=r"--gguf: .*b\.gguf is not a file"):
        gguf_file("embedded", tmp_path / "b.gguf")


def test_a_curve_leaves_out_the_cells_where_its_system_failed() -> None:
    turns: list[str] = []
    good = serve.measure([FakeSystem("a", turns)], prompts(1), [4, 1], 1, Judge())
    results = good | {("chat", 8): {"a": "out of memory"}}
    assert curve(results, "chat", "a", lambda summary: summary.ttft_p50_ms) == ([1, 4], [100.0, 100.0])


def test_a_plot_is_written_for_results_with_failures(tmp_path: Path) -> None:
    turns: list[str] = []
    systems = [FakeSystem("good", turns), FakeSystem("bad", turns, fails=True)]
    results = serve.measure(systems, prompts(1), [1, 2], 1, Judge())
    nothing = {("tools", level): {"good": "failed", "bad": "failed, too"} for level in (1, 2)}
    for number, drawn in enumerate((results, results | nothing, nothing)):
        path = tmp_path / f"{number}.png"
        draw(drawn, ["good", "bad"], "title", path)
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--systems", "nope"], "--systems: nope not among"),
        (["--workloads", "nope", "--hf-model", "/"], "workload: 'nope'"),
        (["--concurrency", "0"], "must be at least 1"),
        (["--workloads", "chat", "--hf-model", "/nonexistent"], "--hf-model: /nonexistent is not a directory"),
        (["--workloads", "tools", "--bfcl-python", "/nonexistent"], "--workloads: tools: /nonexistent does not run"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(arguments)
    assert words in capsys.readouterr().err


def test_a_model_directory_serves_the_peers_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert hf_directory(str(tmp_path), None) == tmp_path


def test_an_engine_that_exits_is_reported_with_its_log() -> None:
    server = EngineServer(ServerOptions(extra=("--no-such-flag",)))
    with pytest.raises(ServerFailed, match=r"the engine exited with \d+"), server:
        pytest.fail("the server must not start")
    server.log.unlink()
