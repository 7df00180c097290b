"""A conversation in the terminal, against a server with a scripted engine."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import pytest

from gpu_engine.api.errors import InvalidRequest
from gpu_engine.api.request import Request, TokenEvent
from gpu_engine.cli import commands as cli
from gpu_engine.cli.chat import Conversation
from gpu_engine.cli.line_history import LineHistory
from gpu_engine.server import open_server
from lockstep_client.wire import engine_pb2 as pb
from tests.fakes import FakeEngine, Script
from tests.fakes import answers_with as answers
from tests.gpu_engine.fake_servers import ENGINE, config, parts
from tests.rpc_client import Client
from tests.waiting import eventually


class Lines:
    """A screen that asks from a list and remembers what it shows."""

    scripted = False

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines = iter(lines)
        self.answers = ""
        self.thoughts = ""
        self.notes: list[str] = []

    def ask(self) -> str:
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    def write(self, text: str) -> None:
        self.answers += text

    def aside(self, text: str) -> None:
        self.thoughts += text

    def note(self, text: str) -> None:
        self.notes.append(text)


async def chat(
    address: str, screen: Lines, system: str | None = None, template: pb.GenerateRequest | None = None
) -> int:
    def run() -> int:
        async def connect() -> Client:
            return Client(address)

        with asyncio.Runner() as runner:
            client = runner.run(connect())
            try:
                return Conversation(client, template or pb.GenerateRequest(), screen, system).run(runner)
            finally:
                runner.run(client.aclose())

    return await asyncio.to_thread(run)


def prompts(engine: FakeEngine) -> list[str]:
    return [bytes(request.prompt_ids).decode() for request in engine.submitted]


@asynccontextmanager
async def talking(
    tmp_path: Path, text: str = "hm", script: Script | None = None
) -> AsyncIterator[tuple[str, FakeEngine]]:
    engines: list[FakeEngine] = []
    async with open_server(ENGINE, config(tmp_path), parts=parts(script or answers(text), engines)) as server:
        yield server.address, engines[0]


async def test_every_question_is_sent_with_the_conversation_which_commands_change(tmp_path: Path) -> None:
    async with talking(tmp_path) as (address, engine):
        screen = Lines("one", "  ", "two")
        assert await chat(address, screen, "be brief") == cli.OK
        assert prompts(engine) == [
            "system: be brief\nuser: one\nassistant:",
            "system: be brief\nuser: one\nassistant: hm\nuser: two\nassistant:",
        ]
        assert screen.answers == "hm\nhm\n"
        assert screen.notes[0].startswith("fake-model on unix:")
        assert screen.notes[1].startswith("[stop]")
        engine.submitted.clear()
        changes = ("/undo", "/foo", "/help", "three", "/reset", "four", "/system S", "five", "/exit", "six")
        screen = Lines("one", "two", *changes)
        assert await chat(address, screen) == cli.OK
        assert prompts(engine)[2:] == [
            "user: one\nassistant: hm\nuser: three\nassistant:",
            "user: four\nassistant:",
            "system: S\nuser: five\nassistant:",
        ]
        assert "there is no command /foo; /help lists them" in screen.notes
        assert any("/reset" in note for note in screen.notes)


async def test_a_question_that_is_refused_is_forgotten_and_the_status_is_that_of_the_last(tmp_path: Path) -> None:
    async with talking(tmp_path) as (address, engine):
        screen = Lines("refuse", "\udcff", "one", KeyboardInterrupt)
        assert await chat(address, screen) == cli.OK
        assert prompts(engine) == ["user: one\nassistant:"]
        assert screen.notes[1].startswith("INVALID_ARGUMENT")
        assert screen.notes[2] == "the line is no UTF-8 at character 0"
        assert await chat(address, Lines("one", "refuse")) == cli.FAILED


async def test_files_go_with_one_question_and_a_conversation_is_saved_and_loaded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alpha\n")
    saved = tmp_path / "saved.json"
    async with talking(tmp_path) as (address, engine):
        screen = Lines(f"/file {tmp_path}/a.txt", "/file", "/file nope", "one", "two", f"/save {saved}", "/save nope/x")
        assert await chat(address, screen, "be brief") == cli.OK
        first = "system: be brief\nuser: one\n\na.txt:\n```\nalpha\n```\nassistant:"
        assert prompts(engine) == [first, f"{first} hm\nuser: two\nassistant:"]
        assert "/file needs a path" in screen.notes
        assert "/file: cannot read nope: No such file or directory" in screen.notes
        assert "/save: cannot write nope/x: No such file or directory" in screen.notes
        assert saved.stat().st_mode & 0o777 == 0o600
        engine.submitted.clear()
        (tmp_path / "null.json").write_text("null")
        screen = Lines("x", "/load nope", f"/load {saved}", f"/load {tmp_path}/null.json", f"/save {saved}", "three")
        assert await chat(address, screen) == cli.OK
        assert screen.notes[-3:-1] == ["/load: must be a JSON list", f"/save: {saved} exists; name a new file"]
        assert prompts(engine)[1] == f"{first} hm\nuser: two\nassistant: hm\nuser: three\nassistant:"
        (tmp_path / "s.json").write_text("{}")
        template = pb.GenerateRequest(grammar=pb.Grammar(regex="a", whitespace=pb.WHITESPACE_COMPACT))
        screen = Lines(f"/schema {saved}.no", f"/schema {tmp_path}/a.txt", f"/schema {tmp_path}/s.json")
        assert await chat(address, screen, template=template) == cli.OK
        assert template.grammar == pb.Grammar(json_schema="{}", whitespace=pb.WHITESPACE_COMPACT)
        assert await chat(address, Lines("/schema"), template=template) == cli.OK
        assert not template.HasField("grammar")


async def test_thoughts_are_shown_apart_and_sent_back(tmp_path: Path) -> None:
    phase = pb.GenerateRequest(reasoning=pb.Reasoning(enabled=True, begin="<a>", end="</a>"))
    async with talking(tmp_path, "<a>hm</a>yes") as (address, engine):
        screen = Lines("one", "two")
        assert await chat(address, screen, template=phase) == cli.OK
        assert (screen.thoughts, screen.answers) == ("hmhm", "\nyes\n\nyes\n")
        assert prompts(engine)[1] == "user: one\nassistant: yes\nuser: two\nassistant:"


async def test_without_a_server_it_says_how_to_start_one(tmp_path: Path) -> None:
    screen = Lines("one")
    assert await chat(f"unix:{tmp_path}/nobody", screen) == cli.FAILED
    assert f"lockstep serve --listen unix:{tmp_path}/nobody" in screen.notes[0]


def endless(asked: threading.Event) -> Script:
    def script(request: Request) -> Iterable[TokenEvent]:
        asked.set()
        return [TokenEvent(request.index, (ord("a"),))]

    return script


HEEDING_CONTROL_C = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("gpu_engine", run_name="__main__", alter_sys=True)
"""
"""A shell starts what it puts into the background with SIGINT ignored, and children inherit that. (A preexec_fn would
run between fork and exec, where locks of other threads may be held.)"""


async def test_control_c_ends_the_answer_and_not_the_chat(tmp_path: Path, root: Path) -> None:
    asked = threading.Event()
    async with talking(tmp_path, script=endless(asked)) as (address, engine):
        primary, terminal = pty.openpty()
        history = tmp_path / "lockstep/chat_history"
        history.parent.mkdir()
        history.touch(0o644)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HEEDING_CONTROL_C, "chat", "--server", address),
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=root,
            env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        )
        os.close(terminal)
        shown = bytearray()
        reader = threading.Thread(target=_read_all, args=(primary, shown.extend), daemon=True)
        reader.start()
        try:
            await eventually(lambda: b"you>" in shown)
            os.write(primary, b"one\n")
            await eventually(asked.is_set)
            await eventually(lambda: b"a" in shown.partition(b"one")[2])
            process.send_signal(signal.SIGINT)
            await eventually(lambda: b"interrupted" in shown)
            await eventually(lambda: engine.dropped)
            os.write(primary, b"/exit\n")
            async with asyncio.timeout(20):
                assert await process.wait() == cli.FAILED
            assert history.read_text().split() == ["one", "/exit"]
            assert history.stat().st_mode & 0o777 == 0o600
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await asyncio.to_thread(reader.join, 20)
            os.close(primary)


def test_a_line_editor_that_appends_to_no_file_keeps_no_history(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="libedit"):
        LineHistory(tmp_path / "history", ModuleType("readline"))
    assert not [*tmp_path.iterdir()]


def _read_all(descriptor: int, take: Callable[[bytes], object]) -> None:
    while True:
        try:
            read = os.read(descriptor, 4096)
        except OSError:  # the other end is closed
            return
        if not read:
            return
        take(read)


async def test_lines_of_a_pipe_are_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str], root: Path) -> None:
    async with talking(tmp_path) as (address, engine):
        command = [sys.executable, "-m", "gpu_engine", "chat", "--server", address, "--max-tokens", "9"]
        done = await asyncio.to_thread(
            subprocess.run, command, input="one\ntwo\n", capture_output=True, text=True, cwd=root, check=False
        )
        failed = await asyncio.to_thread(
            subprocess.run, command, input="one\n/file nope\n2\n", capture_output=True, text=True, cwd=root, check=False
        )
    assert (done.returncode, done.stdout) == (cli.OK, "hm\nhm\n")
    assert engine.submitted[0].sampling.max_tokens == 9
    assert (failed.returncode, failed.stdout) == (cli.FAILED, "hm\n")


async def test_the_files_of_a_question_that_failed_go_with_the_next(tmp_path: Path) -> None:
    class Mending(Lines):
        def note(self, text: str) -> None:
            super().note(text)
            if text.startswith("INVALID_ARGUMENT"):
                engine.refuse_with = None

    (tmp_path / "a.txt").write_text("alpha")
    async with talking(tmp_path) as (address, engine):
        engine.refuse_with = InvalidRequest("text", "is refused")
        screen = Mending(f"/file {tmp_path}/a.txt", "one", "two", "three")
        assert await chat(address, screen) == cli.OK
    asked = "user: two\n\na.txt:\n```\nalpha\n```\nassistant:"
    assert prompts(engine) == [asked, f"{asked} hm\nuser: three\nassistant:"]
