"""The forward's benchmark runs both ways over a small model and says that they agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed import bench_forward
from tests.gpu_engine import tiny


def test_the_table_has_a_line_for_each_number_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.save(tiny.FAMILIES["qwen2"](), tmp_path)
    flags = ["--model", str(tmp_path), "--dtype", "float32", "--threads", "1", "--cpu-time"]
    assert bench_forward.main([*flags, "--rows", "1,3", "--context", "20", "--rounds", "2"]) == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [line[0] for line in lines] == ["1", "3"]
    for line in lines:
        assert all(float(cell) > 0 for cell in line[1:4])
        assert (line[4], line[5]) == ("0.0000", "1.00")


def test_cpu_time_of_several_threads_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_forward.main(["--cpu-time"])
    assert "--threads 1" in capsys.readouterr().err
