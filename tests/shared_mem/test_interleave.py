"""flags.c over a simulated memory: no order of its accesses that C11 allows breaks a promise, and defects are found.

Not responsible for: what cannot be seen there (the first comment of interleave.c says what), all defects (see
tools/mutants.py).
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import shared_mem
from tools.step_plane.mutants import FLAGS, MUTANTS, Edit, build_search, edited

NATIVE = Path(shared_mem.__file__).parent / "native"
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("interleave") / "interleave"
    build_search(NATIVE, built)
    return built


def search(program: Path, first: int, count: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, str(first), str(count)], capture_output=True, text=True, check=False, timeout=300)


def mutated(folder: Path, edits: Sequence[Edit]) -> Path:
    (folder / "flags.h").write_text((NATIVE / "flags.h").read_text())
    (folder / "flags.c").write_text(edited(edits)[FLAGS])
    build_search(folder, folder / "interleave")
    return folder / "interleave"


def test_seeds_keep_every_promise(program: Path) -> None:
    run = search(program, 1, 1_000)
    assert (run.returncode, run.stderr) == (0, ""), run.stdout


def test_a_seed_repeats_its_run(program: Path) -> None:
    first, again, other = search(program, 7, 20), search(program, 7, 20), search(program, 27, 20)
    assert first.stdout == again.stdout != other.stdout


def test_a_fence_that_is_missing_is_found(tmp_path: Path) -> None:
    run = search(mutated(tmp_path, BY_NAME["RING_UNFENCED"].edits), 1, 1_000)
    assert "every process sleeps" in run.stdout


@pytest.mark.slow
def test_many_seeds_keep_every_promise(program: Path) -> None:
    run = search(program, 1_001, 40_000)
    assert (run.returncode, run.stderr) == (0, ""), run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ENTRY_UNFENCED", "ANSWER_READ_RELAXED", "LATE_CLEARED_FIRST", "NO_SECOND_LOOK"])
def test_a_defect_is_found(name: str, tmp_path: Path) -> None:
    run = search(mutated(tmp_path, BY_NAME[name].edits), 1, 20_000)
    assert run.returncode == 1, run.stdout
    assert run.stdout.startswith("seed ")
