"""`make images` pushes only images that it tried; a small program that records its arguments stands for Docker.

Not responsible for: the images themselves (`make images` tries them), nor for what compose does with them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import images

RECORDER = """#!/bin/sh
echo "$@" | tr '\\n' ' ' >> {calls}
echo >> {calls}
case "$1 $2" in
    "image inspect") echo 123456789 ;;
    "exec engine"*) echo '{answer}' ;;
    "exec gateway"*) echo '{{"city": "Rome", "year": 1}}' ;;
esac
"""


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """A program that writes its calls into the file `calls` next to it, and answers as three sound images would."""
    return program(tmp_path, '{"city": "Rome", "year": 1}')


def program(folder: Path, answer: str) -> Path:
    path = folder / "docker"
    path.write_text(RECORDER.format(calls=folder / "calls", answer=answer))
    path.chmod(0o755)
    return path


def calls(path: Path) -> list[str]:
    return path.with_name("calls").read_text().splitlines()


def test_it_builds_tries_and_pushes_in_this_order(recorder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["engine-cpu", "grammar", "gateway", "--tool", str(recorder), "--prefix", "ml/", "--push"]
    assert images.main(arguments) == 0
    commands = [call.split()[0] for call in calls(recorder)]
    assert commands[:6] == ["build"] * 3 + ["image"] * 3
    assert commands[-6:] == ["push"] * 6
    assert commands[6:-6].count("run") == 3
    started = [call for call in calls(recorder) if call.startswith("run ")]
    confined = ("--user 10001:10001", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges")
    assert all(word in call for call in started for word in confined)
    assert ["--network none" in call for call in started] == [True, True, False], "the gateway is in the engine's"
    assert "--network container:engine-" in started[2]
    pushed = [call.split()[1] for call in calls(recorder) if call.startswith("push ")]
    assert pushed[:2] == [
        "ml/lockstep-engine:cpu",
        f"ml/lockstep-engine:{images.labels(images.ROOT)[0].partition('=')[2]}-cpu",
    ]
    assert "ml/lockstep-engine:cpu: 123 MB" in capsys.readouterr().out
    removed = [call for call in calls(recorder) if call.startswith(("rm ", "volume rm "))]
    assert len(removed) == 4, "three containers, and their volumes"


def test_an_answer_that_is_not_the_schemas_stops_a_push(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = program(tmp_path, '{"city": "Rome"}')
    assert images.main(["engine-cpu", "grammar", "gateway", "--tool", str(broken), "--push"]) == 1
    assert "does not fit its schema" in capsys.readouterr().err
    assert [call for call in calls(broken) if call.startswith("push")] == []


@pytest.mark.parametrize("arguments", [["--no-try"], ["engine-cpu"], ["grammar-xgrammar", "gateway"]])
def test_a_push_needs_a_trial(recorder: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        images.main([*arguments, "--push", "--tool", str(recorder)])
    assert not recorder.with_name("calls").exists()
