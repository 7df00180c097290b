"""`lockstep run`: which word is the model, and what a script sees of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from gpu_engine.cli import commands as cli
from gpu_engine.cli.run import chatting, cut_ends, model_and_prompt
from lockstep_client.wire import engine_pb2 as pb
from tests.waiting import alive, eventually


@pytest.mark.parametrize(
    ("words", "files", "wanted"),
    [
        (["Name a river."], [], ("embedded", "Name a river.")),
        (["MODEL", "Name a river."], [], ("MODEL", "Name a river.")),
        ([], [], ("embedded", "from stdin")),
        (["embedded"], [], ("embedded", "from stdin")),
        (["DIR"], [], ("DIR", "from stdin")),
        (["owner/name"], ["FILE"], ("owner/name", "text\n")),
        (["Sum up."], ["FILE"], ("embedded", "Sum up.\n\na.txt:\n```\ntext\n```")),
        (["Sum up."], ["-"], ("embedded", "Sum up.\n\nstdin:\n```\nfrom stdin\n```")),
        (["x" * 5000], [], ("embedded", "x" * 5000)),
    ],
)
def test_one_word_is_the_prompt_unless_it_names_a_model(
    words: list[str], files: list[str], wanted: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("text\n")
    places = {"DIR": str(tmp_path), "FILE": f"{tmp_path}/a.txt"}
    found = model_and_prompt(
        [places.get(word, word) for word in words],
        [places.get(path, path) for path in files],
        io.StringIO("from stdin"),
    )
    assert found == (places.get(wanted[0], wanted[0]), wanted[1])


@pytest.mark.parametrize(
    ("arguments", "terminal", "wanted"),
    [
        ([], True, True),
        (["owner/name"], True, True),
        (["owner/name-GGUF:Q4_K_M"], True, True),
        (["Name a river."], True, False),
        (["owner/name", "Name a river."], True, False),
        (["owner/name", "--file", "a.txt"], True, False),
        (["owner/name", "--raw"], True, False),
        (["owner/name", "--output", "json"], True, False),
        (["owner/name"], False, False),
    ],
)
def test_a_model_without_a_prompt_is_a_chat_in_a_terminal(arguments: list[str], terminal: bool, wanted: bool) -> None:
    assert chatting(cli._parser().parse_args(["run", *arguments]), terminal) is wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embedded", "Name", "a river."], "3 words: at most a model and a prompt; quote the prompt"),
        (["x", "--file", "/nope"], "--file: cannot read /nope"),
        (["x", "--schema", "/nope"], "--schema: cannot read /nope"),
        (["x", "--raw", "--system", "s"], "--raw: has no chat template"),
        ([" "], "the prompt is empty"),
        (["embedded", "--temperature", "0", " "], "the prompt is empty"),
        (["a b", "--temperature", "0", "c", "--n", "1", "d"], "3 words"),
    ],
)
def test_a_wrong_command_line_starts_no_server(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *arguments]) == cli.USAGE
    assert message in capsys.readouterr().err


def test_repetition_cuts_an_answer_without_a_grammar() -> None:
    assert pb.FINISH_REASON_REPETITION in cut_ends(pb.GenerateRequest())
    assert pb.FINISH_REASON_REPETITION not in cut_ends(pb.GenerateRequest(grammar=pb.Grammar(regex="a")))


def test_a_terminal_is_told_that_its_input_is_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with pytest.raises(ValueError, match=r"the prompt is empty\nyes/no was taken as a model; .* embedded yes/no`"):
        model_and_prompt(["yes/no"], [], Terminal(""))
    assert capsys.readouterr().err == "reading from stdin; Control-D ends it\n"


@pytest.mark.model
@pytest.mark.slow
def test_a_script_gets_the_answer_and_whether_it_is_whole(root: Path) -> None:
    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        command = [sys.executable, "-m", "gpu_engine", "run", *arguments, "--temperature", "0"]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=root, timeout=300, check=False)
        return done.returncode, done.stdout, done.stderr

    status, out, err = run("embedded", "--schema", "samples/city.json", "--max-tokens", "200", stdin="Describe Paris.")
    assert (status, err) == (cli.OK, "")
    assert set(json.loads(out)) == {"city", "country", "continent"}
    status, out, err = run("One, two,", "--raw", "--max-tokens", "3")
    assert (status, out.strip() != "") == (cli.NOT_COMPLETE, True)
    assert err.startswith("[length] ")
    status, _, err = run("/no/model", "Hello")
    assert status == cli.FAILED
    assert "/no/model is neither a directory, a GGUF file" in err


@pytest.mark.model
@pytest.mark.slow
async def test_a_chat_has_a_server_that_ends_with_it(root: Path, tmp_path: Path) -> None:
    primary, terminal = pty.openpty()
    command = [sys.executable, "-m", "gpu_engine", "run", "embedded", "--max-tokens", "4", "--temperature", "0"]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=root,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
    )
    os.close(terminal)
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while data := os.read(primary, 4096):
                shown.extend(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        await eventually(lambda: b"you>" in shown, 300)
        (server,) = psutil.Process(process.pid).children()
        os.write(primary, b"Hello\n")
        await eventually(lambda: b"[length]" in shown, 300)
        os.write(primary, b"/exit\n")
        assert await process.wait() == cli.OK
    finally:
        if process.returncode is None:
            process.kill()
        reader.join()
        os.close(primary)
    assert b"loading" in shown
    assert not alive(server.pid)
