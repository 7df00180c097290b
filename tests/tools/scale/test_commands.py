"""The command line: each command runs, and the page has the figures that `compare` prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.scale.__main__ import BEGIN, END, PAGE, main
from tools.scale.calibrate import Pass, Timed, calibration_of
from tools.scale.calibration import Sample
from tools.scale.comparison import page


def calibration(path: Path) -> Path:
    samples = [
        Sample(
            ended_s=0.005 * n,
            seconds=0.005 + 0.001 * (n % 3),
            lanes=1 + n % 3,
            draft_rows=0,
            prefill_tokens=0,
            context_tokens=50,
            generated=1 + n % 3,
        )
        for n in range(100)
    ]
    answer = Timed(20, 10, 0.01, 0.01, 0.05, None, False, 10)
    calibration_of([Pass(1, (answer,), 1.0, tuple(samples))], "chat", "an engine", {}).save(path)
    return path


def test_the_page_has_the_comparison_that_the_command_writes() -> None:
    written = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()
    assert written == page(), "python -m tools.scale compare --write"


def test_memory_and_step_print_their_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--model", "llama-70b", "--tp", "4", "--device", "h100"]) == 0
    assert "70.55 billion weights" in capsys.readouterr().out
    assert main(["step", "--lanes", "1", "64", "--drafts", "3", "--guided-steps", "--tp", "2"]) == 0
    out = capsys.readouterr().out
    assert "| 64 " in out
    assert "not measured" in out


def test_a_fleet_is_simulated_and_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = [
        "--calibration",
        str(calibration(tmp_path / "chat.json")),
        "--rate",
        "10",
        "--seconds",
        "6",
        "--warm-s",
        "1",
    ]
    trace = tmp_path / "trace.jsonl"
    assert main(["simulate", *where, "--engines", "2", "--kill-engine", "3", "--write-trace", str(trace)]) == 0
    first = capsys.readouterr().out
    assert main(["simulate", *where, "--engines", "2", "--kill-engine", "3", "--trace", str(trace)]) == 0
    assert capsys.readouterr().out == first, "the written trace is the load"
    result, plot = tmp_path / "plan.json", tmp_path / "plan.png"
    options = ["--engines", "1-2", "--ttft-ms", "1000", "--runs", "1", "--lose-engine"]
    assert main(["plan", *where, *options, "--json", str(result), "--plot", str(plot)]) == 0
    assert "engines hold the goals" in capsys.readouterr().out
    assert json.loads(result.read_text())["enough"] in (1, 2)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", *where, "--engines", "1", "--ttft-ms", "0.001", "--runs", "1"]) == 1
