"""The shared segment as CUDA sees it: registered host memory, tried out before a step relies on it.

Invariant: nothing is unregistered while a replay may be in flight; the owner waits for the device first. Only the
engine registers; to the grammar process the same pages are plain memory. Not responsible for: the posts (see
syncs.py).
"""

from __future__ import annotations

from types import TracebackType

import torch

from kernels.cuda.flags import SegmentNumbers
from shared_mem.layout import Layout
from shared_mem.segment import Segment

_PORTABLE_AND_MAPPED = 3


class PinningFailed(RuntimeError):
    """CUDA does not map the segment, or maps it and shows other bytes (confidential computing does that)."""


class PinnedSegment:
    """Registers a segment for the time of a `with` block. The segment belongs to the caller."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.device_address = 0

    def __enter__(self) -> PinnedSegment:
        cudart, address, size = torch.cuda.cudart(), self.segment.address, self.segment.layout.total_bytes
        torch.cuda.current_stream().synchronize()
        status = cudart.cudaHostRegister(address, size, _PORTABLE_AND_MAPPED)
        if int(status) != 0:
            raise PinningFailed(f"cudaHostRegister of {size} bytes: {status}")
        self.device_address = _device_pointer(address)
        self._self_test()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(self.segment.address)
        self.device_address = 0

    def numbers(self) -> SegmentNumbers:
        """Return the layout's numbers with addresses that kernels may use."""
        return segment_numbers(self.segment.layout, self.device_address)

    def _self_test(self) -> None:
        """Write from the host, read on the device, in the mask rows, before the first post."""
        at = self.segment.layout.mask_offset
        memory = torch.from_numpy(self.segment.memory)[at : at + 256]
        pattern = torch.arange(256, dtype=torch.uint8)
        saved = memory.clone()
        memory.copy_(pattern)
        same = torch.equal(memory.to("cuda").cpu(), pattern)
        memory.copy_(saved)
        if not same:
            raise PinningFailed("the device reads other bytes from the mapped segment than the host wrote")


def _device_pointer(address: int) -> int:
    from cuda.bindings import driver

    from kernels.cuda.nvrtc import check

    return int(check(driver.cuMemHostGetDevicePointer(address, 0)))


def segment_numbers(layout: Layout, address: int) -> SegmentNumbers:
    """Return the numbers of `layout` for a segment whose first byte is at `address`."""
    return SegmentNumbers(
        words=address + layout.words_offset,
        rec=address + layout.rec_offset,
        ans=address + layout.ans_offset,
        mask=address + layout.mask_offset,
        rec_entry_stride=layout.rec_entry_stride,
        num_slots=layout.num_slots,
        num_rows=layout.num_rows,
        num_recs=layout.num_recs,
        rec_head_bytes=layout.rec_head_bytes,
        rec_stride=layout.rec_stride,
        ans_stride=layout.ans_stride,
        ans_forced=layout.ans_forced_offset,
        mask_buffer_bytes=layout.mask_buffer_bytes,
        row_stride=layout.row_stride,
    )
