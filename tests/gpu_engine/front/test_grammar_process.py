"""The private directory of a spawned grammar process: it never outlives its engine for long."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path

from gpu_engine.grammar_process import DIRECTORY_PREFIX, FRESH_S, private_directory


def make_old(path: Path) -> None:
    moment_s = path.stat().st_mtime - FRESH_S - 1
    os.utime(path, (moment_s, moment_s))


async def test_a_directory_goes_with_its_owner(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        path = private_directory(stack, tmp_path)
        (path / "grammar.sock").touch()
        assert path.stat().st_mode & 0o777 == 0o700
    assert not path.exists()


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
        make_old(first)
        second = private_directory(stack, tmp_path)
        assert not left.exists()
        assert first.exists()
        assert second.exists()
    assert young.exists()
    assert (other / "segment.sock").exists()
