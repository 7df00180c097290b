"""The memory that this process may still take: what the machine has available, and what every control group above it
leaves; and how freed memory goes back to the machine.

Not responsible for: the memory of a GPU, or where control groups are (control_groups.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service_runtime.control_groups import folders, read


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that can be had without swapping; None where neither the machine nor a group says.

    `root` is the directory that holds `proc` and `sys`. Pages of files that the kernel can drop count as available.
    """
    return min([*_machine(root), *_groups(root)], default=None)


def _machine(root: Path) -> Iterator[int]:
    kilobytes = _fields(root / "proc/meminfo").get("MemAvailable:")
    if kilobytes is not None:
        yield kilobytes * 1024


def _groups(root: Path) -> Iterator[int]:
    for version, folder in folders(root, "memory"):
        limit, used = ("memory.max", "memory.current") if version == 2 else _VERSION_1
        texts = read(folder / limit), read(folder / used)
        if all(text.isdigit() for text in texts):  # "max" is no limit
            # Version 1 counts a group's children in its use, and in the fields that begin with `total_`.
            # Pages that were read twice are active, and go as well where memory is short.
            fields, prefix = _fields(folder / "memory.stat"), "" if version == 2 else "total_"
            droppable = sum(fields.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
            yield max(0, int(texts[0]) - int(texts[1]) + droppable)


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _fields(file: Path) -> dict[str, int]:
    """Return the numbers of a file that has a name and a number in each line."""
    words = (line.split() for line in read(file).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers of these settings (mallopt)."""
_LARGE, _LARGEST = 1 << 20, 32 << 20
"""Sizes of blocks that have memory of their own: while a model is loaded, and else, where it is glibc's own bound."""


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Have glibc return each weight's memory to the system when it is freed, while the context is open.

    It would keep the pieces, and others would not fit into them: a third of the weights of a model of 1B at its peak.
    """
    library = ctypes.CDLL(None)
    option, trim = getattr(library, "mallopt", None), getattr(library, "malloc_trim", None)
    if option is None or trim is None:  # another C library
        yield
        return
    option(_M_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        option(_M_MMAP_THRESHOLD, _LARGEST)
        option(_M_TRIM_THRESHOLD, 2 * _LARGEST)
        trim(0)
