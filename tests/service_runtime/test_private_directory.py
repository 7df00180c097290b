"""A private directory goes with its owner, also with one that was killed."""

from __future__ import annotations

import contextlib
import os
from contextlib import AsyncExitStack
from pathlib import Path

from service_runtime.private_directory import FRESH_S, private_directory

PREFIX = "owner-"


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


async def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left, young, other = (tmp_path / name for name in (f"{PREFIX}left", f"{PREFIX}young", "other"))
    for path in (left, young, other):
        path.mkdir()
        (path / "segment.sock").touch()
    make_old(left)
    make_old(other)
    (tmp_path / f"{PREFIX}link").symlink_to(other)
    async with AsyncExitStack() as stack:
        first = private_directory(stack, tmp_path, PREFIX)
        (first / "grammar.sock").touch()
        make_old(first)
        second = private_directory(stack, tmp_path, PREFIX)
        assert [path.stat().st_mode & 0o777 for path in (first, second)] == [0o700] * 2
        assert not left.exists()
        assert opened_below(tmp_path), "its owner holds its directory locked"
    assert [path.exists() for path in (first, second)] == [False] * 2, "they go with their owner"
    assert opened_below(tmp_path) == []
    assert young.exists()
    assert (other / "segment.sock").exists()
