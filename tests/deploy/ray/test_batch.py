"""The batch job on real Ray: killed amid its work and run again, an engine and an actor killed, wrong input.

Skipped without the extra `ray`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import jsonschema
import psutil
import pytest

from tests.gpu_engine import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install '.[ray]'"),
]

RECORDS = 60
START_S = 240
"""Ray's own processes take some 15 s of a quiet core, and a busy machine has none."""
SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 3, "maxItems": 3}


class Job:
    """The command for one folder of inputs."""

    def __init__(self, root: Path, folder: Path, model: Path) -> None:
        self.folder, self.output = folder, folder / "answers.jsonl"
        self._root = root
        settings = {"model": model, "dtype": "float32", "device": "cpu", "num_threads": 1, "max_batch_size": 4}
        settings |= {"max_model_len": 512}
        (folder / "schema.json").write_text(json.dumps(SCHEMA))
        self._command = [
            *(sys.executable, "-m", "deploy.ray.batch", str(folder / "prompts.jsonl"), str(self.output)),
            *("--schema", str(folder / "schema.json"), "--local-cpus", "2", "--engine-cpus", "0.5"),
            *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
            *("--option", "max_tokens=64", "--option", "temperature=0.0"),
        ]

    def write(self, records: list[dict[str, Any]]) -> None:
        (self.folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[str]]:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(self._root), str(self._root / "client"))),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_agent_register_timeout_ms": "300000",
            "RAY_worker_niceness": "0",
        }
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(self._command, env=environment, cwd=self._root, **pipes) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self) -> tuple[int, str, str]:
        """Return exit status, stdout and stderr."""
        with self.started() as process:
            out, err = process.communicate(timeout=START_S)
            return process.returncode, out, err

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]


def done_when(stderr: IO[str], count: int) -> int:
    """Read progress lines until one says that `count` records are done; return what it says."""
    lines = []
    for line in stderr:
        lines.append(line)
        if (found := re.match(rf"(\d+) of {RECORDS} records", line)) and int(found[1]) >= count:
            return int(found[1])
    raise AssertionError("".join(lines)[-3000:])


def numbers() -> list[dict[str, Any]]:
    """Return records with both kinds of ids."""
    return [{"id": number if number % 2 else f"r{number}", "prompt": f"{number}: "} for number in range(RECORDS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("batch"), rounds=True)


def check(job: Job, records: list[dict[str, Any]]) -> None:
    """Fail unless each record has one line with an answer under the schema."""
    answers = job.answers()
    assert sorted(str(answer["id"]) for answer in answers) == sorted(str(record["id"]) for record in records)
    assert {type(answer["id"]) for answer in answers} == {int, str}
    for answer in answers:
        jsonschema.validate(json.loads(answer["text"]), SCHEMA)
        assert answer["finish_reason"] == "stop"


def test_a_killed_job_goes_on_where_it_was_and_no_line_is_lost_or_doubled(
    root: Path, tmp_path: Path, model: Path
) -> None:
    job = Job(root, tmp_path, model)
    job.write(numbers())
    with job.started() as process:
        assert process.stderr is not None
        reported = done_when(process.stderr, 8)
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = job.answers()
    assert reported <= len(kept) < RECORDS, "what was reported is on the disk"
    with job.output.open("a") as file:
        file.write('{"id": "r58", "te')  # a line that the kill has cut
    status, out, err = job.run()
    assert status == 0, err[-3000:]
    assert f"{RECORDS - len(kept)} answered, 0 failed, {len(kept)} had an answer" in out
    assert job.answers()[: len(kept)] == kept, "what was there is not written again"
    check(job, numbers())
    assert job.run()[1].strip().endswith(f"0 answered, 0 failed, {RECORDS} had an answer")
    check(job, numbers())


def test_a_killed_engine_and_a_killed_actor_cost_time_alone(root: Path, tmp_path: Path, model: Path) -> None:
    job = Job(root, tmp_path, model)
    job.write(numbers())
    with job.started() as process:
        assert process.stderr is not None
        done_when(process.stderr, 4)
        mine = {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
        engines = [each for each in psutil.process_iter(["cmdline"]) if _serves(each, model)]
        (engine,) = engines
        actor = engine.parent()
        assert actor is not None
        assert actor.pid in mine
        engine.kill()
        done_when(process.stderr, 20)
        actor.kill()
        out, err = process.communicate(timeout=START_S)
        assert process.returncode == 0, err[-3000:]
    assert f"{RECORDS} answered, 0 failed, 0 had an answer" in out
    check(job, numbers())


def _serves(process: psutil.Process, model: Path) -> bool:
    words = process.info["cmdline"] or []
    return "serve" in words and f"--model={model}" in words


def test_wrong_records_are_named_and_failed_ones_are_sent_again(root: Path, tmp_path: Path, model: Path) -> None:
    job = Job(root, tmp_path, model)
    job.write([{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}])
    status, _, err = job.run()
    assert (status, "two records have the id 1" in err) == (2, True), err[-2000:]
    job.write([{"id": "long", "prompt": "x" * 600}, {"id": 2, "prompt": "short"}])
    status, out, err = job.run()
    assert status == 1, err[-2000:]
    assert "1 answered, 1 failed, 0 had an answer" in out
    assert [answer["id"] for answer in job.answers()] == [2]
    (failed,) = [json.loads(line) for line in Path(f"{job.output}.failed").read_text().splitlines()]
    assert failed["id"] == "long"
    assert "max_model_len" in failed["error"]
    job.write([{"id": "long", "prompt": "x"}, {"id": 2, "prompt": "short"}])
    assert "1 answered, 0 failed, 1 had an answer" in job.run()[1]
    assert Path(f"{job.output}.failed").read_text() == ""
