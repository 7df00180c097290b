"""A grammar process is prepared before the engine attaches, by a kept vocabulary too, and nothing depends on it."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpu_engine.api.config import ServerConfig
from gpu_engine.sidecar.early import KeptSetup, prepare
from gpu_engine.sidecar.link import GrammarSetup, unix_channel
from gpu_engine.sidecar.process import WARM_UP, GrammarProcess
from protos.grammar.v1 import grammar_pb2 as gpb
from protos.grammar.v1 import grammar_pb2_grpc
from service_runtime.private_directory import private_directory
from shared_mem.handover import RPC_SOCKET_NAME
from tests.fakes import FakeModel


class Scripted(grammar_pb2_grpc.GrammarServicer):
    """Notes what it is asked for; refuses one call."""

    def __init__(self, refused: str = "") -> None:
        self.refused, self.asked = refused, list[object]()

    async def Configure(self, request: gpb.ConfigureRequest, context: Any) -> gpb.ConfigureResponse:
        await self._note(request, "Configure", context)
        return gpb.ConfigureResponse()

    async def Compile(self, request: gpb.CompileRequest, context: Any) -> gpb.CompileResponse:
        await self._note(request, "Compile", context)
        return gpb.CompileResponse()

    async def _note(self, request: object, call: str, context: Any) -> None:
        self.asked.append(request)
        if call == self.refused:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")


@pytest.mark.parametrize(("refused", "calls"), [("", 2), ("Configure", 1), ("Compile", 2)])
async def test_it_reads_the_vocabulary_and_compiles_and_a_refusal_is_no_error(
    tmp_path: Path, refused: str, calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    servicer, server = Scripted(refused), grpc.aio.server()  # type: ignore[abstract] # no other call comes
    grammar_pb2_grpc.add_GrammarServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{tmp_path}/{RPC_SOCKET_NAME}")
    await server.start()
    try:
        with caplog.at_level(logging.INFO):
            await prepare(tmp_path, GrammarSetup(b"{}", 320, (2,), 0), WARM_UP)
    finally:
        await server.stop(None)
    assert len(servicer.asked) == calls
    first = servicer.asked[0]
    assert isinstance(first, gpb.ConfigureRequest)
    assert (first.tokenizer_json, first.vocab_size, list(first.stop_token_ids)) == (b"{}", 320, [2])
    assert not caplog.records


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose sockets have at most the 107 characters of a Unix socket's path."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


async def test_a_spawned_process_compiles_before_an_engine_is_there(short_path: Path) -> None:
    async with AsyncExitStack() as stack:
        directory = private_directory(stack, short_path, "engine-")
        background = await stack.enter_async_context(asyncio.TaskGroup())
        grammar = GrammarProcess(ServerConfig(grammar="spawn"), directory, background, stack)
        setup = grammar.setup_of(FakeModel())
        grammar.prepare(setup)
        grammar.prepare(setup)  # once only
        (task,) = (task for task in asyncio.all_tasks() if task.get_name() == "prepare the grammar process")
        await asyncio.wait_for(task, 60)
        channel = unix_channel(directory / RPC_SOCKET_NAME)
        stub = grammar_pb2_grpc.GrammarStub(channel)
        stats = await stub.GetStats(gpb.GetStatsRequest(), timeout=10)
        await channel.close(grace=None)
        assert stats.cached_grammars == 1


async def test_a_start_that_fails_meanwhile_waits_for_nothing(short_path: Path) -> None:
    """The process has not answered by then."""

    async def start() -> None:
        async with AsyncExitStack() as stack:
            directory = private_directory(stack, short_path, "engine-")
            background = await stack.enter_async_context(asyncio.TaskGroup())
            grammar = GrammarProcess(ServerConfig(grammar="spawn"), directory, background, stack)
            grammar.prepare(grammar.setup_of(FakeModel()))
            raise FileNotFoundError("model: nowhere")

    with pytest.raises(ExceptionGroup):
        await asyncio.wait_for(start(), 20)


async def test_a_process_of_somebody_else_keeps_its_vocabulary(tmp_path: Path) -> None:
    """Another engine may be attached to it."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as background:
        config = ServerConfig(grammar="connect", grammar_dir=str(tmp_path))
        grammar = GrammarProcess(config, tmp_path, background, stack)
        grammar.prepare(grammar.setup_of(FakeModel()))
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "prepare the grammar process"]


SETUP = GrammarSetup(b"{}", 320, (2, 5), 0)


def test_a_setup_is_kept_until_a_file_of_the_model_changes(tmp_path: Path) -> None:
    model, kept = tmp_path / "model.gguf", tmp_path / "kept"
    model.write_bytes(b"weights")
    assert KeptSetup.of(kept, model).read() is None
    KeptSetup.of(kept, model).write(SETUP)
    assert KeptSetup.of(kept, model).read() == SETUP
    os.utime(model, ns=(0, 1))
    assert KeptSetup.of(kept, model).read() is None


def test_a_folder_has_one_by_all_of_its_files(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    KeptSetup.of(tmp_path / "kept", model).write(SETUP)
    assert KeptSetup.of(tmp_path / "kept", model).read() == SETUP
    (model / "tokenizer.json").write_text("{}")
    assert KeptSetup.of(tmp_path / "kept", model).read() is None


@pytest.mark.parametrize("content", [b"", b"\xff" * 50, b"no message"])
def test_a_damaged_file_is_none(tmp_path: Path, content: bytes) -> None:
    kept = KeptSetup(tmp_path / "file")
    kept.file.write_bytes(content)
    assert kept.read() is None


def test_few_are_kept_and_the_oldest_go(tmp_path: Path) -> None:
    for number in range(12):
        kept = KeptSetup(tmp_path / "kept" / str(number))
        kept.write(SETUP)
        os.utime(kept.file, ns=(number, number))
    assert {path.name for path in kept.file.parent.iterdir()} == {str(number) for number in range(4, 12)}


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file")
    KeptSetup(tmp_path / "kept" / "0").write(SETUP)
    assert KeptSetup(tmp_path / "kept" / "0").read() is None
