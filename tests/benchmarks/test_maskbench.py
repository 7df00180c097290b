"""The MaskBench harness on four schemas and a small tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.quality import maskbench
from tests.grammar_service.toy import tokenizer_json

INT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
LINES = [
    {
        "name": "int",
        "group": "g",
        "schema": INT,
        "tests": [
            {"description": "good", "valid": True, "data": {"a": 12345}},
            {"description": "bad", "valid": False, "data": {"a": "x"}},
            {"description": "wrongly marked", "valid": True, "data": {"b": 1}},
        ],
    },
    {
        "name": "not",
        "group": "g",
        "schema": {"type": "string", "not": {"pattern": "a"}},
        "tests": [{"description": "", "valid": False, "data": "a"}],
    },
    {"name": "broken", "group": "g", "schema": {"type": "intger"}, "tests": []},
    {"name": "any", "group": "g", "schema": {}, "tests": [{"description": "", "valid": True, "data": ["é", None]}]},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json())
    (tmp_path / "config.json").write_text('{"eos_token_id": [0, 1]}')
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path


def test_counts_and_compares(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(data / "data.jsonl"), "--tokenizer", str(data), "--backend", "llguidance"]
    assert maskbench.main([*flags, "--check-shm", "--details", "--plot", str(data / "times.png")]) == 0
    shown = capsys.readouterr().out
    cells = [cell.strip() for cell in shown.splitlines()[2].split("|")[1:-1]]
    assert cells[:8] == ["llguidance", "2 / 4", "2", "0", "0", "2 / 1", "1 / 0", "0"]
    rows, differing = cells[8].split(" / ")
    assert int(rows) > 30
    assert differing == "0"
    assert "/not: is not enforced" in shown
    assert "lost: int: wrongly marked" in shown
    assert (data / "times.png").stat().st_size > 1000


def test_auto_and_what_is_allowed(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(data / "data.jsonl"), "--tokenizer", str(data), "--limit", "2", "--allow-unenforced"]
    assert maskbench.main([*flags, "--backend", "auto"]) == 0
    shown = capsys.readouterr().out
    cells = [cell.strip() for cell in shown.splitlines()[2].split("|")[1:-1]]
    assert cells[:8] == ["auto", "2 / 2", "0", "0", "0", "1 / 1", "1 / 0", "1"]
    assert "compiled by " in shown


def test_white_space_is_as_the_grammar_allows(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(data / "data.jsonl"), "--tokenizer", str(data / "tokenizer.json"), "--limit", "1"]
    for whitespace in ("compact", "bounded"):
        assert maskbench.main([*flags, "--backend", "llguidance", "--whitespace", whitespace]) == 0
        assert "| 1 / 1" in capsys.readouterr().out


def test_the_cpu_time_of_compilations_is_that_of_served_schemas(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(data / "data.jsonl"), "--tokenizer", str(data), "--compile-cpu"]
    for more, counts in (([], ["2", "2"]), (["--verify"], ["3", "1"])):
        assert maskbench.main([*flags, "--backend", "llguidance", *more]) == 0
        cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[2].split("|")[1:-1]]
        assert cells[:3] == ["llguidance", *counts]
        whole, compilation = (float(cell.split(" / ")[0]) for cell in cells[3:])
        assert 0 < compilation < whole < 10_000
    with pytest.raises(SystemExit, match="auto"):
        maskbench.main([*flags, "--backend", "auto"])
