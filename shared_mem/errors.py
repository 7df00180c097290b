"""Errors of the shared-memory plane, one small tree.

    SharedMemoryError
    |- InvalidField      a value given by the caller is out of its range; names the field and the limit
    |- LayoutError       the bytes of a segment contradict themselves or the file they are in
    |- VersionSkew       the two processes were built with different layouts; names both versions
    |- HandshakeError    the peer on the socket does not speak this protocol, or refused the segment
    |- PeerGone          the peer closed its end of the socket
    |- SegmentClosed     the segment is used after `close`
    |- RingOverrun       a record was overwritten before it was read
    `- NativeMissing     the compiled library is not there

Not responsible for: a late answer, which is a result (`RowKind.DEFER`) and no error.
"""

from __future__ import annotations


class SharedMemoryError(Exception):
    """Base of every error that `shared_mem` raises on purpose."""


class InvalidField(SharedMemoryError, ValueError):
    """A value is out of its range. `field` names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class LayoutError(SharedMemoryError):
    """A header is not ours, is damaged, or does not fit the file that it describes."""


class VersionSkew(SharedMemoryError):
    """The peer was built with another layout. `ours` and `theirs` are layout versions."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(
            f"shared-memory layout version {ours} here, {theirs} in the peer: run the same release in both processes"
        )
        self.ours = ours
        self.theirs = theirs


class HandshakeError(SharedMemoryError):
    """The peer sent something else than a hello or an acknowledgement, or refused the segment."""


class PeerGone(SharedMemoryError):
    """The socket to the peer was closed, or no process listens on it."""


class SegmentClosed(SharedMemoryError):
    """The segment was closed before this call."""


class RingOverrun(SharedMemoryError):
    """The record of sequence `seq` is no longer (or was never) in the ring."""

    def __init__(self, seq: int) -> None:
        super().__init__(f"the record of sequence {seq} is not in the ring")
        self.seq = seq


class NativeMissing(SharedMemoryError):
    """The compiled library is missing or was built from other sources."""
