"""The MaskBench harness on four schemas and a small tokenizer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import maskbench
from benchmarks.quality.shared_rows import SharedRows
from grammar_service.backends.backend import Rows
from tests.grammar_service.toy import STOP, VOCAB, ToyMatcher, row_of, tokenizer_json

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


class SlowMatcher(ToyMatcher):
    """Takes longer for a row than the worker of the test has."""

    def fill(self, rows: Rows, index: int) -> None:
        time.sleep(0.02)
        super().fill(rows, index)


class SlowGrammar:
    """Compiled: one text in tokens."""

    warnings: tuple[str, ...] = ()
    memory_bytes = 0

    def __init__(self, text: tuple[int, ...]) -> None:
        self.text = text

    def matcher(self) -> Any:
        return SlowMatcher([self.text])


def test_a_row_after_the_deadline_is_waited_for() -> None:
    shared, text = SharedRows(VOCAB, row_deadline_ms=0.5), (1, 2, 3, 4, 5, 6)
    try:
        words = (VOCAB + 31) // 32
        after = [row_of({text[at]} if at < len(text) else {STOP}, words) for at in range(len(text) + 1)]
        compared, differing = shared.compare(SlowGrammar(text), text, after)
        assert (compared > len(text), differing) == (True, 0)
        assert shared.num_late > 0
        after[3] = row_of({8}, words)
        assert shared.compare(SlowGrammar(text), text, after)[1] > 0
    finally:
        shared.close()
