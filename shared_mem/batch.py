"""The arrays of one batch that the engine posts from and awaits into, bound once to the native calls' arguments.

Invariant: addresses never change, so a captured graph may contain them. One thread (or stream) uses a batch at a time.
Not responsible for: the calls themselves (see channel.py).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shared_mem import native
from shared_mem.errors import InvalidField
from shared_mem.layout import MAX_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIELD_ALIGN = 128

Int32Array = npt.NDArray[np.int32]
ByteArray = npt.NDArray[np.uint8]


def _fields(batch: int, rows: int) -> Iterator[tuple[str, type[np.generic], tuple[int, ...]]]:
    for name in ("slots", "slot_gens", "commit_pos", "n_commit", "n_draft"):
        yield name, np.int32, (batch,)
    yield "need_rows", np.uint32, (batch,)
    yield "tokens", np.int32, (batch, 2 * rows)
    yield "kinds", np.uint8, (batch, rows)
    yield "forced", np.int32, (batch, rows)
    yield "awaited", np.uint64, (1,)


def _padded(dtype: type[np.generic], shape: tuple[int, ...]) -> int:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return -(-size // _FIELD_ALIGN) * _FIELD_ALIGN


class BatchArrays:
    """B lanes of at most R rows. In: the record to post; out: its answer.

    `slots` starts as -1 everywhere: that lane (padding, or a sequence without a grammar) is neither posted nor
    waited for, and its rows become ALL. Several BatchArrays may exist, one per captured batch size.

    Args:
        batch: B, at least 1.
        rows: R of the segment's layout.
        memory: uint8, C-contiguous, at least `nbytes(batch, rows)`; pinned memory of the engine, say. None: own memory.
    """

    slots: Int32Array
    """[B] in: slot of the lane, or -1."""
    slot_gens: Int32Array
    """[B] in."""
    commit_pos: Int32Array
    """[B] in: answer tokens committed before `tokens`."""
    n_commit: Int32Array
    """[B] in, 0 to R."""
    n_draft: Int32Array
    """[B] in, 0 to R - 1."""
    need_rows: npt.NDArray[np.uint32]
    """[B] in: bit j set: row j is wanted. All ones at the start."""
    tokens: Int32Array
    """[B, 2R] in: `n_commit` committed tokens, then `n_draft` drafts, without a gap."""
    kinds: ByteArray
    """[B, R] out: RowKind."""
    forced: Int32Array
    """[B, R] out: the one legal token, or -1."""
    awaited: npt.NDArray[np.uint64]
    """[1] out: the sequence that the answers belong to."""

    def __init__(self, batch: int, rows: int, memory: ByteArray | None = None) -> None:
        if batch < 1:
            raise InvalidField("batch", f"{batch} is not at least 1")
        if not 1 <= rows <= MAX_ROWS:
            raise InvalidField("rows", f"{rows} is not in [1, {MAX_ROWS}]")
        size = self.nbytes(batch, rows)
        if memory is None:
            memory = np.zeros(size, dtype=np.uint8)
        if memory.dtype != np.uint8 or not memory.flags.c_contiguous or memory.nbytes < size:
            raise InvalidField("memory", f"must be contiguous uint8 with at least {size} bytes")
        self.batch = batch
        self.rows = rows
        self._memory = memory
        offset = 0
        for name, dtype, shape in _fields(batch, rows):
            count = int(np.prod(shape))
            view = np.frombuffer(memory.data, dtype=dtype, count=count, offset=offset).reshape(shape)
            setattr(self, name, view)
            offset += _padded(dtype, shape)
        self.slots[:] = -1
        self.need_rows[:] = 0xFFFFFFFF
        at = native.address_of
        self.post_args = native.PostArgs(
            slots=at(self.slots),
            slot_gens=at(self.slot_gens),
            commit_pos=at(self.commit_pos),
            n_commit=at(self.n_commit),
            n_draft=at(self.n_draft),
            need_rows=at(self.need_rows),
            tokens=at(self.tokens),
            batch=batch,
        )
        self.await_args = native.AwaitArgs(
            slots=at(self.slots),
            slot_gens=at(self.slot_gens),
            kinds=at(self.kinds),
            forced=at(self.forced),
            awaited=at(self.awaited),
            batch=batch,
        )
        self.post_pointer = ctypes.addressof(self.post_args)
        self.await_pointer = ctypes.addressof(self.await_args)

    @staticmethod
    def fields(batch: int, rows: int) -> dict[str, tuple[int, np.dtype[np.generic], tuple[int, ...]]]:
        """Return where each field lies: name -> (offset in bytes, dtype, shape), inputs before outputs."""
        places, offset = {}, 0
        for name, dtype, shape in _fields(batch, rows):
            places[name] = (offset, np.dtype(dtype), shape)
            offset += _padded(dtype, shape)
        return places

    @staticmethod
    def nbytes(batch: int, rows: int) -> int:
        """Return how much memory B lanes of R rows need, in bytes."""
        return sum(_padded(dtype, shape) for _, dtype, shape in _fields(batch, rows))

    def __repr__(self) -> str:
        return f"BatchArrays(batch={self.batch}, rows={self.rows}, lanes={int((self.slots >= 0).sum())})"
