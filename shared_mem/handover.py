"""Passes a segment from the engine to the grammar process, and lets each process detect that the other has gone.

    engine                                    grammar process
    connect(path)                             listen(path), accept
    send_segment(sock, segment)  -- hello + fd -->  recv_segment(sock): checks, maps
                                 <-- acknowledgement --
    ... the socket stays open; nothing more is sent ...
    hung_up(sock)                             hung_up(sock)

Invariant: after the acknowledgement both sides have mapped the same layout version and generation, or both have
raised. The kernel closes the socket of a killed process, so the peer detects a hang-up within a millisecond and across
pid namespaces. Not responsible for: a process that is alive and stuck: heartbeats and deadlines detect that (see
channel.py).
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
import stat
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path

from shared_mem.errors import HandshakeError, InvalidField, LayoutError, PeerGone, VersionSkew
from shared_mem.layout import LAYOUT_VERSION
from shared_mem.segment import Segment

SOCKET_NAME = "segment.sock"
"""Name of the socket in the directory that the two processes share."""
RPC_SOCKET_NAME = "grammar.sock"
"""Name of the gRPC socket of the grammar process, in the same directory."""

# These two messages are the same in every layout version, so that a skew can be reported.
_MAGIC = b"LKSTPSEG"
_HELLO = struct.Struct("<8sIIQQ")  # magic, layout version, pid, generation, total bytes
_ACK = struct.Struct("<8sIIQIH")  # magic, status, layout version, generation, pid, bytes of the message that follows
_MAX_MESSAGE = 1024
_MAX_PATH = 107
_MAX_FDS = 4  # room for more than the one that is right, so that all of a wrong hello are closed


class _Status(enum.IntEnum):
    OK = 0
    VERSION_SKEW = 1
    REFUSED = 2


@dataclass(frozen=True, slots=True)
class Attachment:
    """The content of the acknowledgement."""

    pid: int
    """The grammar process's id in its own pid namespace."""
    layout_version: int
    generation: int


def listen(path: str | os.PathLike[str]) -> socket.socket:
    """Return a listening socket at `path` with mode 0600. A socket file without a listener is replaced.

    Raises:
        InvalidField: the path is too long for a unix socket, is taken by another file, or has a listener.
    """
    target = Path(path)
    if len(os.fsencode(target)) > _MAX_PATH:
        raise InvalidField("path", f"{target} is longer than {_MAX_PATH} bytes, the limit of a unix socket")
    _remove_stale(target)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # The inode of the path takes its mode from the socket's, so there is no moment with a wider one.
        os.fchmod(server.fileno(), 0o600)
        server.bind(str(target))
        target.chmod(0o600)
        server.listen(4)
    except BaseException:
        server.close()
        raise
    return server


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidField("path", f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise InvalidField("path", f"another process listens on {path}")


def connect(path: str | os.PathLike[str], timeout_s: float = 5.0) -> socket.socket:
    """Return a socket that is connected to the grammar process at `path`.

    Raises:
        PeerGone: no process listens there.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    client.settimeout(timeout_s)
    try:
        client.connect(os.fspath(path))
    except OSError as error:
        client.close()
        raise PeerGone(f"no grammar process listens on {os.fspath(path)}: {error}") from error
    return client


def send_segment(sock: socket.socket, segment: Segment, timeout_s: float = 5.0) -> Attachment:
    """Send `segment` to the grammar process and wait until it is mapped there; the caller owns both arguments.

    Raises:
        VersionSkew: the peer was built with another layout; both versions are named.
        HandshakeError: the peer refused (its reason is in the message), or answered something else, or not in time.
        PeerGone: the peer closed the socket.
    """
    layout = segment.layout
    hello = _HELLO.pack(_MAGIC, LAYOUT_VERSION, os.getpid(), layout.generation, layout.total_bytes)
    sock.settimeout(timeout_s)
    try:
        sent = socket.send_fds(sock, [hello], [segment.fileno()])
        if sent < len(hello):  # even an empty send fails on a peer that has refused and closed already
            sock.sendall(hello[sent:])
    except TimeoutError as error:
        raise HandshakeError(f"the grammar process did not take the segment within {timeout_s} s") from error
    except OSError as error:
        raise PeerGone(f"the grammar process closed its segment socket: {error}") from error
    magic, status, version, generation, pid, length = _ACK.unpack(_read(sock, _ACK.size, "acknowledgement"))
    if magic != _MAGIC:
        raise HandshakeError(f"the peer answered {magic!r}, not {_MAGIC!r}")
    message = _read(sock, min(length, _MAX_MESSAGE), "acknowledgement").decode("utf-8", "replace")
    if status == _Status.VERSION_SKEW:
        raise VersionSkew(ours=LAYOUT_VERSION, theirs=version)
    if status != _Status.OK:
        raise HandshakeError(f"the grammar process refused the segment: {message}")
    if generation != layout.generation:
        raise HandshakeError(f"the grammar process mapped generation {generation}, not {layout.generation}")
    return Attachment(pid, version, generation)


def recv_segment(sock: socket.socket, timeout_s: float = 5.0) -> Segment:
    """Receive a segment from the engine, map it, and acknowledge it. The caller owns the socket.

    Raises:
        VersionSkew: the engine was built with another layout; the acknowledgement names both versions.
        LayoutError: the file is not a segment as its header says; the acknowledgement says why.
        HandshakeError: the peer sent something else than one hello with one file descriptor, or not in time.
        PeerGone: the peer closed the socket.
    """
    sock.settimeout(timeout_s)
    hello, fd = _read_hello(sock)
    try:
        magic, version, _pid, generation, total = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise HandshakeError(f"the peer said {magic!r}, not {_MAGIC!r}")
        if version != LAYOUT_VERSION:
            raise VersionSkew(ours=LAYOUT_VERSION, theirs=version)
        fd, taken = -1, fd
        segment = Segment.attach(taken)
        if (segment.layout.generation, segment.layout.total_bytes) != (generation, total):
            segment.close()
            raise LayoutError(f"the hello speaks of generation {generation} with {total} bytes, the segment is another")
    except (VersionSkew, LayoutError, HandshakeError, OSError) as error:
        status = _Status.VERSION_SKEW if isinstance(error, VersionSkew) else _Status.REFUSED
        # The error itself matters more than an acknowledgement that a closed socket does not take.
        with contextlib.suppress(OSError):
            _acknowledge(sock, status, 0, str(error))
        raise
    finally:
        if fd >= 0:
            os.close(fd)
    try:
        _acknowledge(sock, _Status.OK, generation, "")
    except OSError as error:
        segment.close()
        raise PeerGone(f"the engine closed its segment socket: {error}") from error
    return segment


def hung_up(sock: socket.socket, timeout_s: float = 0.0) -> bool:
    """Return True as soon as the peer closed its end or died, False after `timeout_s` without that."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    events = poller.poll(timeout_s * 1000)
    return any(flags & (select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, flags in events)


def _acknowledge(sock: socket.socket, status: _Status, generation: int, message: str) -> None:
    text = message.encode("utf-8")[:_MAX_MESSAGE]
    sock.sendall(_ACK.pack(_MAGIC, status, LAYOUT_VERSION, generation, os.getpid(), len(text)) + text)


def _read(sock: socket.socket, size: int, what: str) -> bytes:
    data = b""
    while len(data) < size:
        try:
            part = sock.recv(size - len(data))
        except TimeoutError as error:
            raise HandshakeError(f"no {what} within {sock.gettimeout()} s") from error
        except OSError as error:
            raise PeerGone(f"the peer closed the segment socket before its {what}: {error}") from error
        if not part:
            raise PeerGone(f"the peer closed the segment socket before its {what}")
        data += part
    return data


def _read_hello(sock: socket.socket) -> tuple[bytes, int]:
    """Return the hello's bytes and its one file descriptor, which is the caller's and close-on-exec."""
    try:
        # socket.recv_fds drops its flags in Python 3.11, and close-on-exec must not come a moment later.
        data, ancillary, _, _ = sock.recvmsg(
            _HELLO.size, socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize), socket.MSG_CMSG_CLOEXEC
        )
    except TimeoutError as error:
        raise HandshakeError(f"no hello within {sock.gettimeout()} s") from error
    except OSError as error:
        raise PeerGone(f"the peer closed the segment socket before its hello: {error}") from error
    fds = array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    try:
        if not data:
            raise PeerGone("the peer closed the segment socket before its hello")
        if len(fds) != 1:
            raise HandshakeError(f"a hello carries one file descriptor, this one {len(fds)}")
        return data + _read(sock, _HELLO.size - len(data), "hello"), fds[0]
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
