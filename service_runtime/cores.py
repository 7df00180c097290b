"""The number of cores that this process may use: its CPU set, and the CPU quota of every control group above it.

The invariant: the number is at least 1 and at most the size of the CPU set; a file that is missing or unreadable limits
nothing. Reads control groups of version 1 and 2, from inside a container and from outside.

Not responsible for: the use of the cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_cores(root: Path = Path("/"), affinity: int | None = None) -> int:
    """Return the number of usable cores; a quota is rounded up.

    Args:
        root: the directory that holds `proc` and `sys`.
        affinity: size of the CPU set; None asks the kernel.
    """
    cores = len(os.sched_getaffinity(0)) if affinity is None else affinity
    return max(1, min([cores, *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    mount = root / "sys/fs/cgroup"
    for controllers, group in _groups(root / "proc/self/cgroup"):
        if not controllers:
            for folder in _upwards(mount, group):
                yield from _version_2(folder)
        elif "cpu" in controllers:
            for name in (",".join(controllers), "cpu"):
                for folder in _upwards(mount / name, group):
                    yield from _version_1(folder)


def _groups(file: Path) -> Iterator[tuple[list[str], PurePosixPath]]:
    """Yield (controllers, path) of each hierarchy; a hierarchy of version 2 lists no controllers."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield [name for name in controllers.split(",") if name], PurePosixPath(path.lstrip("/"))


def _upwards(mount: Path, group: PurePosixPath) -> Iterator[Path]:
    # In a container the path is the host's, and the mount begins at our own group: the mount itself is also read.
    for folder in (group, *group.parents):
        if ".." not in folder.parts:
            yield mount / folder


def _version_2(folder: Path) -> Iterator[int]:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    yield from _rounded_up(quota, period)


def _version_1(folder: Path) -> Iterator[int]:
    yield from _rounded_up(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _rounded_up(quota: str, period: str) -> Iterator[int]:
    # "max" and -1 mean no limit.
    if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
        yield -(-int(quota) // int(period))
