"""The benchmark of a model over several processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed import distributed
from tests.gpu_engine import tiny


@pytest.mark.slow
def test_the_parts_of_a_forward_are_shares_of_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.save(tiny.FAMILIES["llama"](), tmp_path)
    assert distributed.main(["--model", str(tmp_path), "--no-tokens", "--shapes", "1x1,2x8", "--rounds", "2"]) == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[-4:]]
    assert [line[:2] for line in lines] == [["1 x 1", "1"], ["1 x 1", "2"], ["2 x 8", "1"], ["2 x 8", "2"]]
    for line in lines:
        shares = [float(cell.rstrip("%")) for cell in line[4:]]
        assert sum(shares) == pytest.approx(100, abs=3)
        assert (shares[1] > 0) == (line[1] == "2")


@pytest.mark.slow
@pytest.mark.model
def test_two_ranks_of_the_real_model_have_the_tokens_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Three prompts, guided and free, with and without drafts; a difference is exit status 1."""
    flags = ["--count", "3", "--max-tokens", "16", "--shapes", "1x1", "--rounds", "1"]
    assert distributed.main(flags) == 0
    assert capsys.readouterr().out.count("3 of 3") == 4
