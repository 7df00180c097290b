"""One segment of shared memory: a sealed memfd and this process's mapping of it.

Invariant: the size can never change after creation (sealed), so no peer can make an access fault. Memory stays mapped
while anything made from it (a numpy view, a channel end) is alive, whatever `close` says, so a late view reads old
bytes and never faults. Not responsible for: passing it to the other process (see handover.py) and every access with an
ordering (see channel.py).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from types import TracebackType

import numpy as np
import numpy.typing as npt

from shared_mem import native
from shared_mem.errors import LayoutError, SegmentClosed
from shared_mem.layout import HEADER_BYTES, Layout, Word

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """A mapped segment. `create` makes one (engine), `attach` maps a received one (grammar process).

    Owns its file descriptor (close-on-exec) and one reference to the mapping; a context manager.
    """

    def __init__(self, fd: int, layout: Layout, memory: npt.NDArray[np.uint8]) -> None:
        self._fd = fd
        self._memory: npt.NDArray[np.uint8] | None = memory
        self.layout = layout
        self.start_seq: int = native.load64(native.address_of(memory) + layout.word_offset(Word.REQ_SEQ))
        """Newest posted sequence when this process mapped the segment; it may skip the posts up to that one."""

    @staticmethod
    def create(layout: Layout) -> Segment:
        """Return a new zeroed segment with its header written, every page present, and its size sealed.

        Raises:
            OSError: ENOMEM or ENOSPC when the memory is not there (now, rather than as SIGBUS later).
        """
        fd = os.memfd_create(f"lockstep-{layout.generation}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, layout.total_bytes)
            os.posix_fallocate(fd, 0, layout.total_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            memory = _map(fd, layout.total_bytes)
            memory[:HEADER_BYTES] = np.frombuffer(layout.pack_header(), dtype=np.uint8)
            return Segment(fd, layout, memory)
        except BaseException:
            os.close(fd)
            raise

    @staticmethod
    def attach(fd: int) -> Segment:
        """Map the segment after `fd` and take `fd` over: it is closed when this raises.

        Raises:
            LayoutError: the file is not a segment, is not sealed, or has another size than its header says.
            VersionSkew: the header is of another layout version.
        """
        try:
            _check_seals(fd)
            size = os.fstat(fd).st_size
            layout = Layout.from_header(os.pread(fd, HEADER_BYTES, 0))
            if size != layout.total_bytes:
                raise LayoutError(f"the file has {size} bytes, its header says {layout.total_bytes}")
            return Segment(fd, layout, _map(fd, size))
        except BaseException:
            os.close(fd)
            raise

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The whole mapping, uint8 [total_bytes]. A reference to this array keeps the segment mapped."""
        if self._memory is None:
            raise SegmentClosed("the segment is closed")
        return self._memory

    @property
    def address(self) -> int:
        """Where the mapping starts in this process; page-aligned."""
        return native.address_of(self.memory)

    def fileno(self) -> int:
        """Return the file descriptor, which this object owns."""
        if self._fd < 0:
            raise SegmentClosed("the segment is closed")
        return self._fd

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._fd < 0

    def close(self) -> None:
        """Close the file descriptor and release the mapping, which ends with its last view. Idempotent."""
        fd, self._fd, self._memory = self._fd, -1, None
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fd={self._fd}"
        return f"Segment({state}, {self.layout.total_bytes} bytes, {self.layout})"


def _map(fd: int, size: int) -> npt.NDArray[np.uint8]:
    # The array owns the only reference to the mmap object: the pages are mapped as long as numpy counts a view.
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(mapping, dtype=np.uint8)


def _check_seals(fd: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise LayoutError("the file descriptor is not a memfd") from error
    if seals & _SEALS != _SEALS:
        raise LayoutError(f"the segment is not sealed against resize (seals {seals:#x}, needed {_SEALS:#x})")


def mask_views(layout: Layout, memory: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return both mask buffers as int32 [num_slots, R, row_stride / 4] views of a mapping."""
    first, size = layout.mask_offset, layout.mask_buffer_bytes
    shape = (layout.num_slots, layout.num_rows, layout.row_stride // 4)
    views = [memory[first + i * size : first + (i + 1) * size].view(np.int32).reshape(shape) for i in (0, 1)]
    return views[0], views[1]
