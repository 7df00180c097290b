"""Tables line up, numbers are honest, progress counts."""

from __future__ import annotations

import io
import math

import pytest

from benchmarks.harness.measure import Run, Summary, summarize
from benchmarks.harness.report import BASELINE, result_table
from benchmarks.harness.tables import Progress, number, share, table
from benchmarks.harness.validity import Judge
from tests.benchmarks.test_measure import answer


def test_table_pads_every_column() -> None:
    lines = table(["a", "long"], [["wide cell", "1"], ["x"]]).splitlines()
    assert lines == ["| a         | long |", "|-----------|------|", "| wide cell | 1    |", "| x         |      |"]


def test_a_row_that_is_too_long_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 cells under a header of 1"):
        table(["a"], [["1", "2"]])


def test_numbers() -> None:
    assert number(1.25, 1, " ms") == "1.2 ms"
    assert number(math.nan, 1, " ms") == "-"


def test_a_share_never_rounds_up_to_all() -> None:
    assert share(1.0) == "100%"
    assert share(0.9999) == "99.9%"
    assert share(math.nan) == "-"


def test_progress_counts_to_its_total() -> None:
    out = io.StringIO()
    progress = Progress(10, out)
    for _ in range(10):
        progress.step("item")
    assert out.getvalue().splitlines()[-1].startswith("10/10 ")
    assert len(out.getvalue().splitlines()) == 10


def summary(tokens: int) -> Summary:
    return summarize([Run((answer(tokens=tokens),), 1.0)], {"a": None}, Judge())


def test_ratios_are_over_the_baseline_and_failures_say_why() -> None:
    shown = result_table({BASELINE: summary(10), "ours": summary(25), "broken": "AssertionError: hf.py:96"})
    rows = {line.split("|")[1].strip(): line for line in shown.splitlines() if line.startswith("|")}
    assert "1.00x" in rows[BASELINE]
    assert "2.50x" in rows["ours"]
    assert "fails" in rows["broken"]
    assert "fails: broken: AssertionError: hf.py:96" in shown.splitlines()


def test_without_a_baseline_there_is_no_ratio() -> None:
    assert "x" not in result_table({BASELINE: "fails", "ours": summary(25)}).split("ours")[1].split("\n")[0]
