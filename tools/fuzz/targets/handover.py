"""What the two processes say to each other when a segment is passed: header, hello and acknowledgement.

The first byte of an input chooses which. Invariant: any bytes give a typed error of shared_mem, or what they should
say; no descriptor is left behind.
"""

from __future__ import annotations

import fcntl
import os
import socket
import zlib
from random import Random

from shared_mem.errors import SharedMemoryError
from shared_mem.handover import recv_segment, send_segment
from shared_mem.layout import HEADER_BYTES, Layout
from shared_mem.segment import Segment
from tools.fuzz.mutations import mutate_bytes
from tools.fuzz.target import Target, require

PATIENCE_S = 10.0
_CRC_BYTES = 4
_MAX_FILE_BYTES = 1 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def handover() -> Target:
    """Return the target."""
    segment = Segment.create(Layout(2, 2, 64, 2, generation=7))

    def run(data: bytes) -> None:
        mode, body = (data[0] if data else 0), data[1:]
        before = set(os.listdir("/proc/self/fd"))
        try:
            match mode % 3:
                case 0:
                    _read_header(body, repaired=bool(mode & 4))
                case 1:
                    _receive(body, mode)
                case _:
                    _send(body, segment)
        except SharedMemoryError:
            pass
        # Fewer are no defect of the input: the collector may close what another part of the process left.
        require(set(os.listdir("/proc/self/fd")) <= before, "a descriptor is left behind")

    return Target(run, mutate, max_bytes=2 * HEADER_BYTES + 64)


def mutate(data: bytes, random: Random) -> bytes:
    """Return another input; half of the time with its first byte kept."""
    changed = mutate_bytes(data, random)
    return data[:1] + changed[1:] if random.random() < 0.5 else changed


def _repaired(header: bytes) -> bytes:
    """Return a header whose checksum fits, so that what it says is read."""
    body = header[: HEADER_BYTES - _CRC_BYTES].ljust(HEADER_BYTES - _CRC_BYTES, b"\0")
    return body + zlib.crc32(body).to_bytes(_CRC_BYTES, "little")


def _read_header(header: bytes, *, repaired: bool) -> None:
    layout = Layout.from_header(_repaired(header) if repaired else header)
    again = Layout.from_header(layout.pack_header())
    require(again == layout, "a layout changes when its header is written again")


def _receive(body: bytes, mode: int) -> None:
    """Be the grammar process: the peer sends a hello, and a file that begins with the rest of the input."""
    hello, header = body[:32], body[32:]
    if mode & 4:
        header = _repaired(header)
    file = os.memfd_create("fuzzed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    ours, theirs = socket.socketpair()
    with ours, theirs, os.fdopen(file, "r+b", buffering=0) as held:
        held.write(header)
        held.truncate(min(_MAX_FILE_BYTES, int.from_bytes(header[24:32], "little")))
        if mode & 8:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        socket.send_fds(theirs, [hello], [file] * (mode >> 4 & 3)) if hello else None
        theirs.shutdown(socket.SHUT_WR)
        received = recv_segment(ours, PATIENCE_S)
        try:
            require(received.layout.total_bytes == os.fstat(received.fileno()).st_size, "another size than the file's")
        finally:
            received.close()


def _send(acknowledgement: bytes, segment: Segment) -> None:
    """Be the engine: the peer answers with the input."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(acknowledgement)
        theirs.shutdown(socket.SHUT_WR)
        attached = send_segment(ours, segment, PATIENCE_S)
        require(attached.generation == segment.layout.generation, "another generation was acknowledged")
