"""`lockstep chat` and `lockstep run MODEL`: a conversation in the terminal, over a running server.

The invariant: the conversation holds only whole turns. An answer that was interrupted or failed is forgotten with its
question, and interrupting it cancels the request, so that the server frees its slot.

Not responsible for: the flags of a request (see request_flags.py), the lines of earlier chats (see line_history.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Protocol

import grpc
from google.protobuf import json_format

from gpu_engine.cli.access_flags import access_of
from gpu_engine.cli.asking import FAILED, OK, hint, model_info, responses_of, usage
from gpu_engine.cli.inputs import json_of, read_text, text, with_files
from gpu_engine.cli.line_history import LineHistory, history_path
from gpu_engine.cli.request_flags import conversation, fill_options
from gpu_engine.cli.terminal import summary
from lockstep_client.access import Access
from lockstep_client.async_rpc import AsyncRpc
from lockstep_client.wire import engine_pb2 as pb

_HELP = """\
/reset          forget the conversation, and files that were not sent yet
/system TEXT    set the system message, and forget the conversation
/undo           forget the last question and its answer
/file PATH      send the text of a file with the next question
/schema PATH    every answer from now on fits the JSON Schema in this file; /schema by itself: free text
/save PATH      write the conversation to a new file, as JSON that --messages takes
/load PATH      go on with the conversation in such a file
/help           this list
/exit           end; so does Control-D
Control-C ends a running answer."""


class Screen(Protocol):
    """What the conversation needs of a terminal."""

    scripted: bool
    """The lines come from a pipe or a file, so a command that fails ends the conversation."""

    def ask(self) -> str:
        """Return the user's next line. Raises EOFError at the end, KeyboardInterrupt at Control-C."""

    def write(self, text: str) -> None:
        """Show a piece of the answer."""

    def aside(self, text: str) -> None:
        """Show a piece of what the model thinks."""

    def note(self, text: str) -> None:
        """Show a line that belongs to no answer."""


class Plain:
    """A screen for pipes: answers on stdout, notes on stderr."""

    scripted = True

    def ask(self) -> str:
        """Return the next line of stdin."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def write(self, text: str) -> None:
        """Write to stdout at once."""
        print(text, end="", flush=True)

    def aside(self, text: str) -> None:
        """Write to stderr at once."""
        print(text, end="", flush=True, file=sys.stderr)

    def note(self, text: str) -> None:
        """Write a line to stderr."""
        print(text, file=sys.stderr)


class Rich:
    """A screen for a terminal, with colours and the keys of a line editor."""

    scripted = False

    def __init__(self, history: LineHistory | None) -> None:
        """history: the lines of earlier chats; None: none are kept."""
        import readline  # noqa: F401 - gives `input` history and editing

        from rich.console import Console

        self._console, self._history = Console(highlight=False), history
        coloured = self._console.color_system is not None and not self._console.no_color
        # The line editor must know the prompt, to redraw the line; what is between \x01 and \x02 takes no room.
        self._prompt = "\x01\x1b[1;36m\x02you>\x01\x1b[0m\x02 " if coloured else "you> "

    def ask(self) -> str:
        """Ask with a prompt."""
        line = input(self._prompt)
        if self._history is not None:
            try:
                self._history.keep()
            except OSError as error:
                self._history = None
                self.note(f"the lines of this chat are not kept: {error}")
        return line

    def write(self, text: str) -> None:
        """Write as it is: an answer's brackets are no markup."""
        self._console.print(text, end="", markup=False, soft_wrap=True)
        self._console.file.flush()

    def aside(self, text: str) -> None:
        """Write in italics."""
        self._console.print(text, end="", style="dim italic", markup=False, soft_wrap=True)
        self._console.file.flush()

    def note(self, text: str) -> None:
        """Write a dim line."""
        self._console.print(text, style="dim", markup=False)


def run_chat(flags: argparse.Namespace) -> int:
    """Chat with the server that the flags name, until the end of the input."""
    try:
        access, template = access_of(flags), template_of(flags)
        files = [(path, read_text("--file", path)) for path in flags.file]
    except ValueError as error:
        return usage(error)
    return talk(access, template, flags.system, files, history=flags.history)


def template_of(flags: argparse.Namespace) -> pb.GenerateRequest:
    """Return what the flags say of every request of a conversation. Raises ValueError that names the flag."""
    template = pb.GenerateRequest()
    fill_options(template, flags)
    if flags.template_arguments is not None:
        template.messages.template_arguments = flags.template_arguments
    return template


def talk(
    access: Access,
    template: pb.GenerateRequest,
    system: str | None,
    files: Sequence[tuple[str, str]] = (),
    *,
    history: bool = True,
) -> int:
    """Chat until the end of the input; return the exit status. The arguments are `Conversation`'s.

    `history`: keep the lines of a terminal for later chats.
    """
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    screen = Rich(_history() if history else None) if interactive else Plain()

    async def connect() -> AsyncRpc:
        return AsyncRpc(access)

    # The event loop runs while an answer does. A line is read in between, in this thread, where Control-C ends `ask`.
    with asyncio.Runner() as runner:
        client = runner.run(connect())
        try:
            return Conversation(client, template, screen, system, files).run(runner)
        finally:
            runner.run(client.aclose())


def _history() -> LineHistory | None:
    import readline

    try:
        return LineHistory(history_path(os.environ), readline)
    except (OSError, RuntimeError) as error:
        print(f"the lines of this chat are not kept: {error}", file=sys.stderr)
        return None


class Conversation:
    """One conversation with one server."""

    def __init__(
        self,
        client: AsyncRpc,
        template: pb.GenerateRequest,
        screen: Screen,
        system: str | None,
        files: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Args: see below.

        template: everything of a request but its turns; `/schema` changes it.
        system: the system message, if any.
        files: (path, text) of what is sent with the first question.
        """
        self._client, self._template, self._screen, self._system = client, template, screen, system
        self._turns: list[pb.ChatMessage] = []
        self._files = [*files]

    def run(self, runner: asyncio.Runner) -> int:
        """Chat until the end of the input; return the exit status."""
        try:
            info = runner.run(model_info(self._client))
        except grpc.aio.AioRpcError as error:
            self._fail(error)
            return FAILED
        self._screen.note(f"{info.model} on {self._client.address}; /help lists the commands")
        answered = True
        while (line := self._next_line()) is not None:
            if line.startswith("/"):
                try:
                    self._screen.note(self._command(line))
                except ValueError as error:
                    self._screen.note(str(error))
                    if self._screen.scripted:
                        return FAILED
            elif line.strip():
                answered = False
                try:
                    answered = runner.run(self._answer(with_files(line, self._files)))
                except KeyboardInterrupt:
                    self._screen.write("\n")
                    self._screen.note("interrupted; the question is forgotten")
                if answered:
                    self._files.clear()
                elif self._files:
                    self._screen.note("its files go with the next question; /reset forgets them")
        return OK if answered else FAILED

    def _next_line(self) -> str | None:
        """Return the next line, or None at the end."""
        while True:
            try:
                line = text(self._screen.ask())
            except (EOFError, KeyboardInterrupt):
                return None
            except argparse.ArgumentTypeError as error:
                self._screen.note(f"the line {error}")
                continue
            return None if line in ("/exit", "/quit") else line

    def _command(self, line: str) -> str:
        """Run a command, and return the line that tells what it did. Raises ValueError."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/file", "/save", "/load") and not rest:
            raise ValueError(f"{name} needs a path")
        path = os.path.expanduser(rest)
        match name:
            case "/reset":
                self._turns.clear()
                self._files.clear()
            case "/system":
                self._system = rest or None
                self._turns.clear()
            case "/undo":
                del self._turns[-2:]
            case "/file":
                self._files.append((path, read_text(name, path)))
                return f"files with the next question: {len(self._files)}"
            case "/schema":
                return self._set_schema(path)
            case "/save":
                return self._save(path)
            case "/load":
                self._load(path)
            case "/help":
                return _HELP
            case _:
                raise ValueError(f"there is no command {name}; /help lists them")
        return f"{len(self._turns)} turns in the conversation"

    def _set_schema(self, path: str) -> str:
        if not path:
            self._template.ClearField("grammar")
            return "the answers are free text"
        schema = read_text("/schema", path)
        json_of("/schema", schema)
        # The other options of the flags' grammar stay.
        self._template.grammar.json_schema = schema
        return f"every answer fits {path}"

    def _save(self, path: str) -> str:
        system = [pb.ChatMessage(role="system", content=self._system)] if self._system is not None else []
        turns = [json_format.MessageToDict(turn, preserving_proto_field_name=True) for turn in [*system, *self._turns]]
        try:
            with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
                file.write(json.dumps(turns, ensure_ascii=False, indent=2) + "\n")
        except FileExistsError:
            raise ValueError(f"/save: {path} exists; name a new file") from None
        except OSError as error:
            raise ValueError(f"/save: cannot write {path}: {error.strerror}") from error
        return f"{len(self._turns)} turns in {path}"

    def _load(self, path: str) -> None:
        turns = [*conversation("/load", json_of("/load", read_text("/load", path))).messages]
        system = turns[0].content if turns and turns[0].role == "system" else None
        self._system, self._turns = system, turns[system is not None :]

    async def _answer(self, question: str) -> bool:
        """Answer one question; return whether the server did."""
        request = pb.GenerateRequest()
        request.CopyFrom(self._template)
        if self._system is not None:
            request.messages.messages.add(role="system", content=self._system)
        asked = pb.ChatMessage(role="user", content=question)
        request.messages.messages.extend([*self._turns, asked])
        answer = pb.ChatMessage(role="assistant")
        try:
            async with contextlib.aclosing(responses_of(self._client, request)) as responses:
                async for response in responses:
                    self._show(request, response, answer)
                    if response.finish_reason:
                        self._screen.write("\n")
                        self._screen.note(summary(response))
        except grpc.aio.AioRpcError as error:
            self._fail(error)
            return False
        self._turns += [asked, answer]
        return True

    def _show(self, request: pb.GenerateRequest, response: pb.GenerateResponse, answer: pb.ChatMessage) -> None:
        """Show what a response adds to the answer, and add it to the turn."""
        if not request.HasField("reasoning"):
            self._screen.write(response.text)
            answer.content += response.text
            return
        for part in response.parts:
            if part.kind == pb.AnswerPart.KIND_REASONING:
                self._screen.aside(part.text)
                answer.reasoning += part.text
            else:
                if answer.reasoning and not answer.content:
                    self._screen.write("\n")
                self._screen.write(part.text)
                answer.content += part.text

    def _fail(self, error: grpc.aio.AioRpcError) -> None:
        explanation = hint(self._client.address, error.code(), error.details())
        self._screen.note(f"{error.code().name}: {error.details()}{explanation}")
