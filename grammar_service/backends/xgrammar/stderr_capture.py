"""What a C++ library writes to file descriptor 2 while it compiles, as lines.

Invariant: the descriptor is restored whatever happens. It belongs to the whole process, so one thread at a time; in
the sidecar only compile workers, which have one thread, use it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def captured_stderr() -> Iterator[Callable[[], list[str]]]:
    """Redirect descriptor 2 into memory. The yielded function returns the lines, once the block has ended."""
    said: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    sink = os.memfd_create("lockstep-stderr")
    os.dup2(sink, 2)
    try:
        yield lambda: said
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        said.extend(os.pread(sink, os.fstat(sink).st_size, 0).decode(errors="replace").splitlines())
        os.close(sink)
