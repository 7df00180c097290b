"""The vector unit whose kernels are called: the fastest one that the CPU runs, or another for a benchmark or a test.

Invariant: a level of dispatch.c has one name here. Not responsible for: the matrix unit (see matrix_unit.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kernels.library import native

WITH_BLOCKS = 3
"""From this level on there are products over blocks, and forwards in one call."""
WITH_TILES = 5
"""The level whose kernels have products on tiles."""
_UNITS = {
    0: "no vectors",
    1: "plain vectors",
    3: "AVX2",
    6: "AVX2 with VNNI",
    4: "AVX-512",
    5: "AVX-512 with VNNI",
    8: "dot products of bytes",
    9: "products of byte matrices (i8mm)",
}
"""Names by level, the slowest of a CPU first."""


def unit_level() -> int:
    """Return the level of dispatch.c whose kernels are called."""
    return int(native().lockstep_cpu_level())


def unit_name(level: int | None = None) -> str:
    """Return the name of a level's unit; without one, of the unit whose kernels are called."""
    return _UNITS[unit_level() if level is None else level]


def unit_levels() -> list[int]:
    """Return the levels that this CPU runs, the slowest first.

    The caller sees to it that no other thread calls a kernel meanwhile.
    """
    before = unit_level()
    try:
        return [level for level in _UNITS if native().lockstep_use_level(level) == level]
    finally:
        native().lockstep_use_level(before)


@contextlib.contextmanager
def on_unit(level: int) -> Iterator[None]:
    """Call the kernels of this level meanwhile. The caller sees to it that no other thread calls a kernel at the
    beginning and at the end.

    Raise ValueError where the CPU does not run it.
    """
    before = unit_level()
    if native().lockstep_use_level(level) != level:
        raise ValueError(f"this CPU does not run {_UNITS.get(level, level)}")
    try:
        yield
    finally:
        native().lockstep_use_level(before)
