"""Captures the lines that a C++ library writes to file descriptor 2.

Invariant: the descriptor is restored in every case. It belongs to the whole process, so only one thread may use this;
compile workers, which have one thread, are the only processes of the sidecar that do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def captured_stderr() -> Iterator[Callable[[], list[str]]]:
    """Redirect descriptor 2 into memory. The yielded function returns the lines after the block has ended."""
    lines: list[str] = []
    sys.stderr.flush()
    original = os.dup(2)
    sink = os.memfd_create("lockstep-stderr")
    os.dup2(sink, 2)
    try:
        yield lambda: lines
    finally:
        os.dup2(original, 2)
        os.close(original)
        lines.extend(os.pread(sink, os.fstat(sink).st_size, 0).decode(errors="replace").splitlines())
        os.close(sink)
