"""The command `lockstep-bench`: wrong arguments and files are named, and a whole run against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep_bench.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "bench" / "README.md"


def test_help_names_every_track_and_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = capsys.readouterr().out
    for text in ("valid", "equal", "cost", "drafts", "bystanders", "keywords", "complete", "lockstep-bench table"):
        assert text in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "one of the arguments --url --grpc is required"),
        (["run", "--url", "http://x", "--tracks", "valid,speed"], "--tracks: there is no speed"),
        (["run", "--url", "http://x", "--concurrency", "0"], "--concurrency: must be at least 1"),
        (["run", "--url", "http://x", "--dialect", "other"], "invalid choice: 'other'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err


def test_without_a_server_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9/v1/models" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", '{"tracks": {}}'])
def test_a_file_that_is_no_result_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    assert main(["table", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_the_published_results_make_the_published_table(capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(PAGE.parent.glob("*.json"))
    assert len(files) >= 4
    for path in files:
        assert json.loads(path.read_text())["command"].startswith("lockstep-bench run ")
    assert main(["table", *map(str, files)]) == 0
    assert capsys.readouterr().out.strip() in PAGE.read_text()
