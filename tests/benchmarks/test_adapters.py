"""The adapters' benchmark runs over a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed import bench_adapters
from tests.gpu_engine import tiny


def test_the_table_has_a_line_for_each_number_of_lanes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.save(tiny.FAMILIES["llama"](), tmp_path)
    flags = ["--model", str(tmp_path), "--dtype", "float32", "--threads", "1", "--rank", "4", "--rounds", "2"]
    assert bench_adapters.main([*flags, "--lanes", "1,9"]) == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [line[0] for line in lines] == ["1", "9"]
    assert all(float(cell) > 0 for line in lines for cell in line[1:])
