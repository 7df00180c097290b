"""`lockstep run`: one answer from a model, or a chat with it, without a server of the user's.

The invariant: stdout has only the answers. The server is a process of this command's, and ends with it.

Not responsible for: the server's start and end (lockstep_client/embedded.py), the flags of a request
(request_flags.py), the conversation (chat.py).
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from gpu_engine.api.engine_settings import EMBEDDED_MODEL
from gpu_engine.cli.asking import FAILED, INCOMPLETE, ask, stream_answer, usage
from gpu_engine.cli.chat import talk, template_of
from gpu_engine.cli.inputs import read_stdin, read_text, with_files
from gpu_engine.cli.request_flags import fill_conversation, fill_options
from gpu_engine.cli.terminal import loading_progress
from gpu_engine.model.names import is_hub_name
from lockstep_client.access import Access, access_to
from lockstep_client.embedded import EmbeddedServer
from lockstep_client.errors import EmbeddedServerError
from lockstep_client.wire import engine_pb2 as pb

START_TIMEOUT_S = 900.0
"""A model of the hub is downloaded first."""
CUT = INCOMPLETE | {pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_GRAMMAR_CLOSED}
"""Ends of an answer that the model did not choose."""
_STAGE = re.compile(r"\s*(\d+)% (.+)")
"""A line of the server's log about its start; see `loading_progress`."""


def run_once(flags: argparse.Namespace, stdin: TextIO = sys.stdin) -> int:
    """Start a server, print its answer to one prompt or chat with it, and end it."""
    if chatting(flags, stdin.isatty() and sys.stdout.isatty()):
        model = flags.words[0] if flags.words else EMBEDDED_MODEL
        try:
            template = template_of(flags)
        except ValueError as error:
            return usage(error)
        return _served(flags, model, _answers(template), lambda access: talk(access, template, flags.system))
    try:
        model, prompt = model_and_prompt(flags.words, flags.file, stdin)
        request = pb.GenerateRequest()
        fill_options(request, flags)
        if flags.raw:
            if flags.system is not None or flags.template_arguments is not None or request.HasField("reasoning"):
                raise ValueError(
                    "--raw: has no chat template; leave --system and the other flags of a conversation out"
                )
            request.text = prompt
        else:
            fill_conversation(request, flags, prompt)
    except ValueError as error:
        return usage(error)
    return _served(
        flags,
        model,
        _answers(request),
        lambda access: ask(
            access,
            lambda client: stream_answer(
                client, request, as_json=flags.output == "json", timeout_s=flags.timeout, quiet=not sys.stderr.isatty(),
                not_complete=INCOMPLETE if flags.allow_cut else cut_ends(request),
            ),
        ),
    )  # fmt: skip


def chatting(flags: argparse.Namespace, terminal: bool) -> bool:
    """Return whether a command line asks for a chat: in a terminal, without a prompt and flags of a single answer."""
    only_model = not flags.words or (len(flags.words) == 1 and _names_model(flags.words[0]))
    return terminal and only_model and not flags.file and not flags.raw and flags.output == "text"


def _answers(request: pb.GenerateRequest) -> int:
    """Return how many sequences a request has: the server has no other one, and needs no more slots."""
    return max(1, request.sampling.n, request.beam_search.beam_width)


def _served(flags: argparse.Namespace, model: str, slots: int, use: Callable[[Access], int]) -> int:
    """Return the exit status of `use` with a server of `model`, which ends with it."""
    with loading_progress() if sys.stderr.isatty() else contextlib.nullcontext() as progress:

        def show(line: str) -> None:
            if progress is not None and (stage := _STAGE.match(line)):
                progress(stage[2], int(stage[1]) / 100)

        server = EmbeddedServer({"model": model, "max_batch_size": slots}, None, START_TIMEOUT_S, show)
        try:
            server.start()
        except EmbeddedServerError as error:
            print(f"error: {error}{_taken_as_model(flags.words)}", file=sys.stderr)
            return FAILED
    try:
        return use(access_to(server.address, False, None, ()))
    finally:
        server.close()


def cut_ends(request: pb.GenerateRequest) -> frozenset[int]:
    """Return the finish reasons with which an answer to the request is not all that the model had to say."""
    # The server ends a guided answer that repeats itself as its grammar says: it is complete.
    return CUT if request.HasField("grammar") else CUT | {pb.FINISH_REASON_REPETITION}


def model_and_prompt(words: Sequence[str], files: Sequence[str], stdin: TextIO) -> tuple[str, str]:
    """Return the model and the prompt of a command line. Raises ValueError.

    Args:
        words: of the command line; the model may be left out.
        files: paths whose texts belong to the prompt; "-": stdin.
        stdin: the prompt, if there is none in the words and the files.
    """
    if len(words) > 2:
        raise ValueError(f"{len(words)} words: at most a model and a prompt; quote the prompt")
    if len(words) == 2:
        model, prompt = words[0], words[1]
    elif words and _names_model(words[0]):
        model, prompt = words[0], ""
    else:
        model, prompt = EMBEDDED_MODEL, "".join(words)
    texts = [("stdin", read_stdin(stdin)) if path == "-" else (path, read_text("--file", path)) for path in files]
    if not prompt and not texts:
        texts = [("stdin", read_stdin(stdin))]
    text = with_files(prompt, texts)
    if not text.strip():
        raise ValueError(f"the prompt is empty{_taken_as_model(words)}")
    return model, text


def _taken_as_model(words: Sequence[str]) -> str:
    """Return the end of an error's text where one word may have been meant as the prompt, else ""."""
    if len(words) != 1 or not is_hub_name(words[0]):
        return ""
    word = shlex.quote(words[0])
    return f"\n{word} was taken as a model; for a prompt write `lockstep run embedded {word}`"


def _names_model(word: str) -> bool:
    """Return whether a word by itself is the name of a model: `embedded`, a directory, a GGUF file or OWNER/NAME."""
    if word == EMBEDDED_MODEL or is_hub_name(word):
        return True
    try:
        return Path(word).is_dir() or (word.endswith(".gguf") and Path(word).is_file())
    except OSError:  # a prompt is too long for a path
        return False
