"""`schemas` reads its file, counts endings, and fails exactly when an answer or the server is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.quality import schemas
from protos.engine.v1 import engine_pb2 as pb
from tests.benchmarks.conftest import Serve
from tests.benchmarks.fake_engine import Script

OBJECT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "cases.jsonl"
    lines = [{"name": f"case-{i}", "group": "even" if i % 2 == 0 else "odd", "schema": OBJECT} for i in range(6)]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def test_cases_are_spread_over_the_file(data: Path) -> None:
    cases = schemas.read_cases(data)
    assert [case.name for case in schemas.spread(cases, 3)] == ["case-0", "case-2", "case-4"]
    assert schemas.spread(cases, 99) == cases
    assert [case.name for case in schemas.read_cases(data, "odd")] == ["case-1", "case-3", "case-5"]


def run(data: Path, address: str) -> int:
    return schemas.main(["--data", str(data), "--count", "4", "--address", address, "--concurrency", "2"])


def test_valid_answers_pass(data: Path, serve_fake: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    address, engine = serve_fake(Script(text=lambda request: '{"n": 1}'))
    assert run(data, address) == 0
    assert "stop/valid" in capsys.readouterr().out
    assert engine.most_running <= 2
    assert {round(request.sampling.temperature, 3) for request in engine.requests} == {0.0, 0.8}
    assert all(json.loads(request.grammar.json_schema) == OBJECT for request in engine.requests)


def test_one_invalid_answer_fails_and_is_named(
    data: Path, serve_fake: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    address, _ = serve_fake(Script(text=lambda request: '{"n": 1.5}' if request.sampling.seed == 2 else '{"n": 1}'))
    assert run(data, address) == 1
    assert "INVALID case-3" in capsys.readouterr().out


def test_cut_off_answers_are_counted_and_not_judged(
    data: Path, serve_fake: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    address, _ = serve_fake(Script(text=lambda request: '{"n', finish=pb.FINISH_REASON_GRAMMAR_INCOMPLETE))
    assert run(data, address) == 1, "not one valid answer shows nothing"
    printed = capsys.readouterr().out
    assert "grammar_incomplete" in printed
    assert "INVALID" not in printed
