"""Tables line up, numbers are honest, progress counts."""

from __future__ import annotations

import json
import math

from benchmarks.harness.measure import Run, Summary, summarize
from benchmarks.harness.report import Cell, as_json, best_peer, overview_table, result_table
from benchmarks.harness.tables import share
from benchmarks.harness.validity import Judge
from tests.benchmarks.answers import answer


def test_a_share_never_rounds_up_to_all() -> None:
    assert share(1.0) == "100%"
    assert share(0.9999) == "99.9%"
    assert share(math.nan) == "-"


def summary(tokens: int) -> Summary:
    return summarize([Run((answer(tokens=tokens),), 1.0)], {"a": None}, Judge())


def rows_of(text: str, column: int = 1) -> dict[str, str]:
    return {line.split("|")[column].strip(): line for line in text.splitlines() if line.startswith("|")}


def test_ratios_are_over_the_fastest_peer_and_failures_say_why() -> None:
    cell = {"slow peer": summary(10), "fast peer": summary(20), "ours": summary(25), "broken": "no such option"}
    shown = result_table(cell, ["slow peer", "fast peer", "broken"])
    rows = rows_of(shown)
    assert "0.50x" in rows["slow peer"]
    assert "1.00x" in rows["fast peer"]
    assert "1.25x" in rows["ours"]
    assert "fails" in rows["broken"]
    assert "fails: broken: no such option" in shown.splitlines()


def test_a_system_that_is_no_peer_is_never_the_best() -> None:
    cell = {"no grammar": summary(90), "peer": summary(20), "ours": summary(25)}
    assert best_peer(cell, ["peer"]) == ("peer", 20.0)
    assert "4.50x" in rows_of(result_table(cell, ["peer"]))["no grammar"]


def test_without_a_peer_there_is_no_ratio() -> None:
    cell = {"peer": "fails", "ours": summary(25)}
    assert best_peer(cell, ["peer"]) is None
    assert "x" not in rows_of(result_table(cell, ["peer"]))["ours"].split("|")[3]


def test_the_overview_has_a_cell_per_system_and_concurrency() -> None:
    results: dict[Cell, dict[str, Summary | str]] = {
        ("tools", 1): {"ours": summary(30), "peer": summary(20)},
        ("tools", 16): {"ours": summary(80), "peer": "out of memory"},
    }
    shown = overview_table(results, {"tools": ["peer"]})
    assert [word.strip() for word in shown.splitlines()[0].split("|")[1:-1]] == [
        "workload", "system", "1 at a time", "16 at a time",
    ]  # fmt: skip
    rows = {line.split("|")[2].strip(): [w.strip() for w in line.split("|")[3:-1]] for line in shown.splitlines()[2:]}
    assert rows == {
        "ours": ["30 tok/s, 500 ms, 1.50x", "80 tok/s, 500 ms, -"],
        "peer": ["20 tok/s, 500 ms, 1.00x*", "fails"],
    }


def test_the_json_names_the_best_peer_and_has_no_nan() -> None:
    results: dict[Cell, dict[str, Summary | str]] = {("chat", 1): {"ours": summary(30), "peer": summary(20)}}
    data = as_json(results, {}, {"chat": ["peer"]}, {"vllm": "no python"})
    plain = json.loads(json.dumps(data, allow_nan=False))
    assert plain["workloads"][0]["best_peer"] == "peer"
    assert plain["workloads"][0]["systems"]["ours"]["valid_share"] is None, "free text is not judged"
    assert plain["skipped"] == {"vllm": "no python"}
