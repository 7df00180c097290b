"""The directory of a grammar process belongs to one engine, and does not outlast it for long."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gpu_engine.api.config import ServerConfig
from gpu_engine.sidecar.directory import DirectoryRefused, grammar_directory
from shared_mem.handover import RPC_SOCKET_NAME


@pytest.mark.parametrize("grammar", ["spawn", "connect"])
async def test_two_engines_never_share_a_directory(tmp_path: Path, grammar: str) -> None:
    config = ServerConfig(grammar=grammar, grammar_dir=str(tmp_path))
    async with AsyncExitStack() as first:
        assert grammar_directory(config, first) == tmp_path
        async with AsyncExitStack() as second:
            with pytest.raises(DirectoryRefused, match=f"grammar_dir: another engine uses {tmp_path}"):
                grammar_directory(config, second)
    async with AsyncExitStack() as later:
        assert grammar_directory(config, later) == tmp_path


async def test_a_grammar_process_that_runs_by_itself_is_not_started_again(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / RPC_SOCKET_NAME))
        other.listen()
        async with AsyncExitStack() as stack:
            with pytest.raises(DirectoryRefused, match=f"another grammar process serves in {tmp_path}"):
                grammar_directory(ServerConfig(grammar="spawn", grammar_dir=str(tmp_path)), stack)
        async with AsyncExitStack() as stack:
            assert grammar_directory(ServerConfig(grammar="connect", grammar_dir=str(tmp_path)), stack) == tmp_path


async def test_a_directory_is_made_and_one_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    missing = ServerConfig(grammar="connect", grammar_dir=str(tmp_path / "nowhere"))
    impossible = ServerConfig(grammar="spawn", grammar_dir=str(tmp_path / "file/below"))
    async with AsyncExitStack() as stack:
        made = grammar_directory(ServerConfig(grammar_dir=str(tmp_path / "a/b")), stack)
        assert made.stat().st_mode & 0o777 == 0o700
        with pytest.raises(DirectoryRefused, match=r"grammar_dir: .*nowhere is no directory"):
            grammar_directory(missing, stack)
        with pytest.raises(DirectoryRefused, match=r"grammar_dir: cannot make .*below: Not a directory"):
            grammar_directory(impossible, stack)
