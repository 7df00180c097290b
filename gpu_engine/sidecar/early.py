"""Prepares a grammar process before the engine attaches: while a model's libraries are imported and its weights read.

The vocabulary of a model that was served before is kept in a file by the state of the model's files, so the process has
it at once. Invariant: nothing depends on any of this. The engine configures the process again when it attaches: an
equal vocabulary costs nothing then, and another one takes its place. Not responsible for: attaching (see link.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError

from gpu_engine.api.request import GrammarSpec
from gpu_engine.sidecar.compilations import compile_message
from gpu_engine.sidecar.link import CONFIGURE_TIMEOUT_S, GrammarSetup, OpenChannel, configure_request, unix_channel
from protos.grammar.v1 import grammar_pb2 as gpb
from protos.grammar.v1 import grammar_pb2_grpc
from shared_mem.handover import RPC_SOCKET_NAME

log = logging.getLogger(__name__)

_MOST_FILES = 8
"""The vocabularies that are kept; a file has some megabytes."""


async def prepare(
    directory: Path, setup: GrammarSetup, first: GrammarSpec, open_channel: OpenChannel = unix_channel
) -> None:
    """Have the process that serves in `directory` read a vocabulary and compile a grammar, with no engine attached.

    The process must belong to this engine: a vocabulary takes the place of the one before.
    """
    channel = open_channel(directory / RPC_SOCKET_NAME)
    try:
        stub = grammar_pb2_grpc.GrammarStub(channel)
        await stub.Configure(configure_request(setup), timeout=CONFIGURE_TIMEOUT_S, wait_for_ready=True)
        await stub.Compile(compile_message(first, accepted=False), timeout=CONFIGURE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        log.debug("the grammar process was not prepared: %s: %s", error.code().name, error.details())
    finally:
        await channel.close(grace=None)


@dataclass(frozen=True, slots=True)
class KeptSetup:
    """The setup of a grammar process for one model, in a file.

    Args:
        file: its place; another one when a file of the model has changed.
    """

    file: Path

    @classmethod
    def of(cls, folder: Path, model: Path) -> KeptSetup:
        """Return the one for a model, a file or a folder, below `folder`. Raises OSError."""
        files = [model] if model.is_file() else sorted(path for path in model.iterdir() if path.is_file())
        stats = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
        state = json.dumps([str(model.resolve()), stats]).encode()
        return cls(folder / hashlib.blake2b(state, digest_size=16).hexdigest())

    def read(self) -> GrammarSetup | None:
        """Return the setup; None: there is none, or the file is damaged."""
        try:
            message = gpb.ConfigureRequest.FromString(self.file.read_bytes())
        except (OSError, DecodeError):
            return None
        if not message.tokenizer_json or not message.stop_token_ids:
            return None
        return GrammarSetup(message.tokenizer_json, message.vocab_size, tuple(message.stop_token_ids), 0)

    def write(self, setup: GrammarSetup) -> None:
        """Keep a setup, and remove the oldest files beyond the number that is kept. A failure is only logged."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.file.parent, prefix=".", delete=False) as made:
                try:
                    made.write(configure_request(setup).SerializeToString())
                    made.flush()
                    os.replace(made.name, self.file)
                except BaseException:
                    os.unlink(made.name)
                    raise
            files = sorted(self.file.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            for path in files[:-_MOST_FILES]:
                with contextlib.suppress(FileNotFoundError):  # another start removes it
                    path.unlink()
        except OSError as error:
            log.info("the vocabulary is not kept for the next start: %s", error)
