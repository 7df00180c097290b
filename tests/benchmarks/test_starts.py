"""The benchmark of starts: its cells, its flags, and what it says of a peer that fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.cost.starts import fits, main, peer, row_of, size_of


def test_a_row_of_the_table_of_starts(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(2_000_000_000 // 1000))
    assert size_of(tmp_path) == size_of(tmp_path / "a") == 2_000_000
    assert fits('{"name": "Ada", "age": 36}')
    assert not any(map(fits, ('{"name": "Ada"', "[]", '{"name": "Ada"}', '{"name": "Ada", "age": "36"}')))
    assert row_of(["1b q4_0"], [(1.25, 1_500_000_000), None]) == ["1b q4_0", "1.2 s", "1.50 GB", "-", "-"]


def test_a_peer_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print(len(sys.argv))"
    took = peer(sys.executable, code, tmp_path, 2)
    assert took is not None
    assert took[1] == 3
    assert peer(sys.executable, "raise SystemExit('no such file')", tmp_path, 2) is None
    assert "exited with 1: no such file" in capsys.readouterr().err


def test_an_unknown_kind_is_refused_before_anything_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--kinds", "q9_9"])
    assert ended.value.code == 2
    assert "q9_9" in capsys.readouterr().err
