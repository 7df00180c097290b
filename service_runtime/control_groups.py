"""The control groups of this process, of version 1 and 2, from inside a container and from outside.

Invariant: a file that is missing or unreadable limits nothing. Not responsible for: what the limits mean (cores.py,
memory.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def groups(root: Path) -> Iterator[tuple[list[str], PurePosixPath]]:
    """Yield (controllers, path) of each hierarchy; a hierarchy of version 2 lists no controllers.

    `root` is the directory that holds `proc` and `sys`.
    """
    for line in read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield [name for name in controllers.split(",") if name], PurePosixPath(path.lstrip("/"))


def folders(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield (version, folder) of every group of this process that a controller may limit, and of those above it."""
    mount = root / "sys/fs/cgroup"
    for controllers, group in groups(root):
        if not controllers:
            yield from ((2, folder) for folder in _upwards(mount, group))
        elif controller in controllers:
            for name in dict.fromkeys((",".join(controllers), controller)):
                yield from ((1, folder) for folder in _upwards(mount / name, group))


def read(file: Path) -> str:
    """Return the text of a file, empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _upwards(mount: Path, group: PurePosixPath) -> Iterator[Path]:
    # In a container the path is the host's, and the mount begins at our own group: the mount itself is also read.
    for folder in (group, *group.parents):
        if ".." not in folder.parts:
            yield mount / folder
