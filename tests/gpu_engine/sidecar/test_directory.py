"""The directory of a grammar process belongs to one engine, and does not outlast it for long."""

from __future__ import annotations

import contextlib
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gpu_engine.api.config import ServerConfig
from gpu_engine.sidecar.directory import DirectoryRefused, grammar_directory
from service_runtime.private_directory import DIRECTORY_PREFIX, FRESH_S, private_directory
from shared_mem.handover import RPC_SOCKET_NAME


def make_old(path: Path) -> None:
    moment_s = path.stat().st_mtime - FRESH_S - 1
    os.utime(path, (moment_s, moment_s))


def opened_below(directory: Path) -> list[str]:
    """What this process holds open there; descriptors of other tests come and go."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return [target for target in targets if target.startswith(f"{directory}/")]


async def test_what_a_killed_engine_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left, young, other = (tmp_path / name for name in (f"{DIRECTORY_PREFIX}left", f"{DIRECTORY_PREFIX}young", "other"))
    for path in (left, young, other):
        path.mkdir()
        (path / "segment.sock").touch()
    make_old(left)
    make_old(other)
    (tmp_path / f"{DIRECTORY_PREFIX}link").symlink_to(other)
    async with AsyncExitStack() as stack:
        first = private_directory(stack, tmp_path)
        (first / "grammar.sock").touch()
        make_old(first)
        second = private_directory(stack, tmp_path)
        assert [path.stat().st_mode & 0o777 for path in (first, second)] == [0o700] * 2
        assert not left.exists()
        assert opened_below(tmp_path), "an engine holds its directory locked"
    assert [path.exists() for path in (first, second)] == [False] * 2, "they go with their owner"
    assert opened_below(tmp_path) == []
    assert young.exists()
    assert (other / "segment.sock").exists()


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
