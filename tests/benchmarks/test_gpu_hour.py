"""`make gpu-hour` goes on where it was cut: `bench_gpu --resume` over the sections that a CPU has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.bench_gpu import read_done
from tests.gpu_engine.harness import PATIENCE_S, until_false

SECTIONS = ("exposed", "pairs")


def start(root: Path, file: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks", "bench_gpu", "--device", "cpu", "--quick", "--json", str(file)]
    return subprocess.Popen(
        [*command, "--only", *SECTIONS, *arguments],
        cwd=root,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def sections(file: Path) -> dict[str, dict[str, Any]]:
    return {section["name"]: section for section in json.loads(file.read_text())["sections"]}


@pytest.mark.slow
def test_a_run_that_was_cut_goes_on_with_the_sections_that_are_missing_or_failed(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "gpu-hour.json"
    with start(root, file) as cut:
        until_false(lambda: not file.exists() and cut.poll() is None)
        os.killpg(cut.pid, signal.SIGKILL)
    assert list(sections(file)) == [SECTIONS[0]]
    first = sections(file)[SECTIONS[0]]
    assert first["status"] == "ok"

    with start(root, file, "--resume") as rest:
        _, said = rest.communicate(timeout=PATIENCE_S)
    assert rest.returncode == 0, said
    assert [line.split()[1] for line in said.splitlines() if line.startswith("[")] == [f"{SECTIONS[1]}:"]
    done = sections(file)
    assert list(done) == [*SECTIONS]
    assert done[SECTIONS[0]] == first, "with the seconds and figures of the first run"
    assert done[SECTIONS[1]]["status"] == "ok"


def test_only_sections_that_ended_well_on_this_machine_are_left_out(tmp_path: Path) -> None:
    file, rows = tmp_path / "gpu-hour.json", []
    for name, status in (("exposed", "ok"), ("pairs", "FAILED"), ("kill", "left out")):
        rows.append({"name": name, "status": status, "seconds": 1.0, "found": {}, "reason": ""})
    file.write_text(json.dumps({"machine": "an H100", "sections": rows}))
    assert [result.name for result in read_done(file, "an H100")] == ["exposed"]
    assert read_done(tmp_path / "none.json", "an H100") == []
    with pytest.raises(ValueError, match="is of another machine or other versions: an H100"):
        read_done(file, "an H200")
