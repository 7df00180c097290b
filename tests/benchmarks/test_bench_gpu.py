"""The run of sections: one that fails, hangs or finds what must not be has a line, and the others run on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.bench_gpu import Result, report, run, run_section
from benchmarks.gpu.native_pairs import native_pairs
from benchmarks.gpu.sections import SECTIONS, Found, Table

FOUND = {"tables": [{"title": "t", "header": ["a"], "rows": [["1"]]}], "notes": [], "failures": [], "left_out": []}


def section(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def writes(out: Path, **fields: object) -> list[str]:
    return section(f"open({str(out)!r}, 'w').write({json.dumps({**FOUND, **fields})!r})")


def test_a_section_is_ok_failed_or_left_out_by_what_it_wrote(tmp_path: Path) -> None:
    out = tmp_path / "r"
    assert run_section(writes(out), "x", out, 30).status == "ok"
    failed = run_section(writes(out, failures=["3 rows lost"]), "x", out, 30)
    assert (failed.status, failed.reason) == ("FAILED", "3 rows lost")
    left_out = run_section(writes(out, tables=[], left_out=["no GPU"]), "x", out, 30)
    assert (left_out.status, left_out.reason) == ("left out", "no GPU")
    text = report([failed, left_out], "a machine")
    assert "FAILED: 3 rows lost" in text
    assert "| a |" in text
    assert "Left out: no GPU" in text


def test_a_section_that_dies_or_hangs_is_failed_and_an_old_result_is_not_its_own(tmp_path: Path) -> None:
    out = tmp_path / "r"
    out.write_text(json.dumps(FOUND))
    died = run_section(section("raise SystemExit(3)"), "x", out, 30)
    assert (died.status, died.reason) == ("FAILED", "ended with status 3; its output is above")
    # It ends itself on SIGTERM, so that what it started can be closed.
    closed = tmp_path / "closed"
    code = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
try:
    time.sleep(600)
finally:
    open({str(closed)!r}, 'w').close()
"""
    hung = run_section(section(code), "x", out, 1.0)
    assert (hung.status, hung.reason) == ("FAILED", "not over after 1 s")
    assert closed.exists()


def test_what_no_time_is_left_for_says_so() -> None:
    assert run(["hostfunc", "pairs"], "cpu", True, budget_s=1.0) == [
        Result(name, "FAILED", 0.0, reason="no time was left for it; see --only") for name in ("hostfunc", "pairs")
    ]


def test_the_deadlines_of_the_sections_are_known() -> None:
    assert all(5 < deadline_s < 200 for _, deadline_s in SECTIONS.values())


@pytest.mark.parametrize("name", ["hostfunc", "kernels"])
def test_a_section_without_meaning_on_a_cpu_says_why(name: str) -> None:
    found = SECTIONS[name][0]("cpu", True)
    assert found == Found(left_out=found.left_out)
    assert found.left_out[0]


def test_exposed_has_the_same_table_on_a_cpu() -> None:
    found = SECTIONS["exposed"][0]("cpu", True)
    assert isinstance(found.tables[0], Table)
    assert found.tables[0].rows[0][-1] == "0", "no row lost, no word wrong"


def test_native_pairs_check_every_word() -> None:
    figures = native_pairs(500, rows=3, vocab=1000, work_us=0.0)
    assert (figures.pairs, figures.lost, figures.wrong) == (500, 0, 0)


@pytest.mark.slow
def test_help_teaches_the_sections(root: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "bench_gpu", "--help"]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert all(f"  {name} " in said for name in SECTIONS)
