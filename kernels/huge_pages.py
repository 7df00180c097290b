"""Memory that is read from end to end in every step, in huge pages where the system has some.

A step of one row waits for the weights, and a translation that the processor has not cached makes it wait longer.
Invariant: the memory of a tensor belongs to that tensor; small ones that last share a mapping, which goes with the last
of them. Not responsible for: systems that refuse huge pages, where the tensors lie in small ones.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
import weakref

import torch

_LINE = 64
"""Bytes of alignment."""
_HUGE = 2 << 20
_PIECE = 32 * _HUGE
"""Bytes of a mapping that several tensors share: matrices of a small model are smaller than a huge page."""

log = logging.getLogger(__name__)


class Pieces:
    """Mappings that tensors take one after another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """Return a mapping that has `size` bytes for the caller, and where they begin."""
        with self._lock:
            piece = self._newest() if self._newest is not None else None
            if piece is None or self._used + size > _PIECE:
                piece, self._used = _mapped(_PIECE), 0
                self._newest = weakref.ref(piece)
            begin, self._used = self._used, -(-(self._used + size) // _LINE) * _LINE
            return piece, begin


def _mapped(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        log.debug("no huge pages: %s", error)
    return memory


_pieces = Pieces()


def empty(*shape: int, dtype: torch.dtype, lasts: bool = False) -> torch.Tensor:
    """Return a tensor of this shape with no defined content, which has its own storage. Any thread.

    Args:
        lasts: the tensor and others of its kind are freed together, so it may share a mapping with them. Without it, a
            tensor that is smaller than a huge page lies in small pages.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size >= _HUGE:
        memory, begin = _mapped(size), 0
    elif lasts and size:
        memory, begin = _pieces.take(size)
    else:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).view(shape)
