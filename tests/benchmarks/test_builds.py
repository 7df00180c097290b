"""The comparison of two builds: turns alternate, ratios are taken within a turn, a slow build fails the run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from benchmarks.harness.measure import Answer, Run
from benchmarks.harness.server import ServerFailed, ServerOptions
from benchmarks.speed import builds
from benchmarks.speed.builds import Build, Comparison
from tests.benchmarks.conftest import Serve
from tests.benchmarks.fake_engine import Script

Starts = tuple[list[str], Callable[[Build], AbstractContextManager[str]]]


@pytest.fixture
def starts(serve_fake: Serve) -> Starts:
    """A fake engine for each build that is started, and the names of the builds in the order of their starts."""
    names: list[str] = []

    @contextmanager
    def start(build: Build) -> Iterator[str]:
        names.append(build.name)
        yield serve_fake(Script())[0]

    return names, start


@pytest.fixture
def checkouts(tmp_path: Path) -> tuple[Path, Path]:
    folders = tmp_path / "old", tmp_path / "new"
    for folder in folders:
        (folder / "gpu_engine").mkdir(parents=True)
        (folder / "gpu_engine" / "__main__.py").touch()
    return folders


def run_of(tokens: int, wall_s: float, first: int = 0) -> Run:
    return Run((Answer("a", "", tuple(range(first, first + tokens)), "stop", 0.0, 0.1, wall_s, tokens),), wall_s)


def test_each_ratio_is_taken_within_one_turn() -> None:
    comparison = Comparison([(run_of(10, 1.0), run_of(10, 0.5)), (run_of(10, 4.0), run_of(10, 5.0))])
    assert comparison.ratios() == [2.0, 0.8]
    line = builds.result_table({("chat", 1): comparison}).splitlines()[2]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        "chat", "1", "6.2", "11.0", "0.800", "1.400", "2.000", "2 of 2"
    ]  # fmt: skip


def test_times_per_token_are_compared_after_the_first_token() -> None:
    """The first token comes after 0.1 s in every run."""
    comparison = Comparison([(run_of(10, 1.0), run_of(10, 0.4)), (run_of(1, 0.1), run_of(1, 0.1))])
    first, second = comparison.tpot_ratios()
    assert first == pytest.approx(3.0)
    assert math.isnan(second)


def test_answers_with_other_token_ids_are_counted() -> None:
    comparison = Comparison([(run_of(3, 1.0), run_of(3, 1.0)), (run_of(3, 1.0), run_of(3, 1.0, first=7))])
    assert comparison.equal() == (1, 2)


def test_totals_have_the_turns_of_all_workloads_at_each_concurrency() -> None:
    results = {
        ("chat", 1): Comparison([(run_of(10, 1.0), run_of(10, 1.0))]),
        ("schema", 1): Comparison([(run_of(10, 3.0), run_of(10, 1.0))]),
        ("chat", 8): Comparison([(run_of(10, 1.0), run_of(10, 1.0))]),
        ("schema", 8): Comparison([(run_of(10, 1.0), run_of(10, 1.0))]),
    }
    totals = builds.with_totals(results)
    assert totals[builds.ALL, 1].ratios() == [1.0, 3.0]
    assert totals[builds.ALL, 8].ratios() == [1.0, 1.0]
    assert list(totals)[:4] == list(results)


def test_the_build_that_comes_first_alternates(checkouts: tuple[Path, Path], starts: Starts, tmp_path: Path) -> None:
    old, new = checkouts
    report = tmp_path / "builds.json"
    names, start = starts
    arguments = ["--old", str(old), "--new", str(new), "--count", "2", "--max-tokens", "4", "--json", str(report)]
    assert builds.main(arguments, start) == 0
    assert names == ["old", "new", "new", "old", "old", "new"]
    cells = json.loads(report.read_text())
    assert [(cell["workload"], cell["concurrency"]) for cell in cells][-2:] == [("all", 1), ("all", 8)]
    assert all(cell["equal"][0] == cell["equal"][1] for cell in cells)
    turns = {(cell["workload"], cell["concurrency"]): len(cell["ratios"]) for cell in cells}
    assert {turns[name, level] for name in ("chat", "schema", "extraction") for level in (1, 8)} == {3 * 2, 3 * 1}
    assert (turns["all", 1], turns["all", 8]) == (3 * 3 * 2, 3 * 3 * 1)


def test_a_build_that_is_too_slow_fails_the_run(
    checkouts: tuple[Path, Path], starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = checkouts
    arguments = ["--old", str(old), "--new", str(new), "--rounds", "1", "--count", "1", "--workloads", "chat"]
    assert builds.main([*arguments, "--at-least", "1000"], starts[1]) == 1
    assert "too slow: at concurrency 8 the median ratio is" in capsys.readouterr().out


def test_each_server_runs_in_its_own_checkout(tmp_path: Path) -> None:
    """The fake build answers no request: it says where it runs and what it imports, and exits."""
    package = tmp_path / "gpu_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    says = "import os, gpu_engine; raise SystemExit(f'{os.getcwd()} {gpu_engine.__file__}')"
    (package / "__main__.py").write_text(says)
    build = Build("old", tmp_path, ServerOptions())
    with pytest.raises(ServerFailed) as failure, builds.start_server(build):
        pytest.fail("the server must not start")
    assert f"{tmp_path} {package / '__init__.py'}" in str(failure.value)
