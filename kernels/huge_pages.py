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

import torch

_LINE = 64
"""Bytes of alignment."""
_HUGE = 2 << 20
_PIECE = 32 * _HUGE
"""Bytes of a mapping that several tensors share: matrices of a small model are smaller than a huge page."""

log = logging.getLogger(__name__)


class _Pieces:
    """Mappings that tensors take one after another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes, uint8."""
        with self._lock:
            if self._used + size > len(self._piece):
                self._piece, self._used = _mapped(_PIECE), 0
            begin, self._used = self._used, -(-(self._used + size) // _LINE) * _LINE
            return self._piece[begin : begin + size]


def _mapped(size: int) -> torch.Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        log.debug("no huge pages: %s", error)
    return torch.frombuffer(memory, dtype=torch.uint8)


_pieces = _Pieces()


def empty(*shape: int, dtype: torch.dtype, lasts: bool = False) -> torch.Tensor:
    """Return a tensor of this shape with no defined content. Any thread.

    Args:
        lasts: the tensor and others of its kind are freed together, so it may share a mapping with them. Without it, a
            tensor that is smaller than a huge page lies in small ones.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE and not (lasts and size):
        return torch.empty(*shape, dtype=dtype)
    return (_mapped(size) if size >= _HUGE else _pieces.take(size)).view(dtype).view(shape)
