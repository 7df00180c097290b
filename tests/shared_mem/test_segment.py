"""The memfd: its seals, its lifetime, and the hand-over between two processes."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared_mem.channel import EngineEnd, GrammarEnd
from shared_mem.errors import HandshakeError, InvalidField, LayoutError, PeerGone, SegmentClosed, VersionSkew
from shared_mem.handover import Attachment, connect, hung_up, listen, recv_segment, send_segment
from shared_mem.layout import LAYOUT_VERSION, Layout
from shared_mem.segment import Segment

HELLO, ACK = struct.Struct("<8sIIQQ"), struct.Struct("<8sIIQIH")
Pair = tuple[socket.socket, socket.socket]


def concurrently(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start `call` on a thread; the returned function joins it and returns its result or raises its exception."""
    box: list[Any] = []

    def body() -> None:
        try:
            box.append(call())
        except Exception as error:
            box.append(error)

    thread = threading.Thread(target=body)
    thread.start()

    def join() -> Any:
        thread.join()
        return box[0]

    return join


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The sockets of an engine and of a grammar process."""
    engine, grammar = socket.socketpair()
    with engine, grammar:
        yield engine, grammar


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_segment_is_zeroed_not_inherited_and_cannot_be_resized(segment: Segment) -> None:
    assert not segment.memory[4096:].any()
    assert not os.get_inheritable(segment.fileno())
    for size in (0, segment.layout.total_bytes * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fileno(), size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_both_mappings_are_one_memory(segment: Segment) -> None:
    with Segment.attach(os.dup(segment.fileno())) as other:
        other.memory[9000] = 42
        assert segment.memory[9000] == 42
        assert other.layout == segment.layout
        assert other.address != segment.address


def test_close_is_idempotent_and_views_survive_it(layout: Layout) -> None:
    before = open_fds()
    segment = Segment.create(layout)
    end = EngineEnd(segment)
    view = segment.memory[8192:8200]
    segment.close()
    segment.close()
    assert segment.closed
    view[:] = 3
    assert end.post([0], [1], [0], [0], [0], [[0] * 6]) == 1
    assert (view == 3).all()
    with pytest.raises(SegmentClosed):
        segment.fileno()
    with pytest.raises(SegmentClosed):
        _ = segment.memory
    assert "closed" in repr(segment)
    del view, end
    assert open_fds() == before


@pytest.mark.parametrize(("missing", "seals", "message"), [(0, False, "not sealed"), (4096, True, "its header says")])
def test_attach_rejects_another_file_and_closes_it(layout: Layout, missing: int, seals: bool, message: str) -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, layout.pack_header())
    os.ftruncate(fd, layout.total_bytes - missing)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with pytest.raises(LayoutError, match=message):
        Segment.attach(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_attach_rejects_a_regular_file(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="not a memfd"):
        Segment.attach(os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR))


def test_handover_gives_the_same_memory(segment: Segment) -> None:
    before = open_fds()
    engine, grammar = socket.socketpair()
    with engine, grammar:
        received = concurrently(lambda: recv_segment(grammar))
        attachment = send_segment(engine, segment)
        assert attachment == Attachment(os.getpid(), LAYOUT_VERSION, segment.layout.generation)
        with received() as other:
            assert not os.get_inheritable(other.fileno())
            segment.memory[9000] = 17
            assert other.memory[9000] == 17
        assert not hung_up(engine)
        assert not hung_up(grammar)
    assert open_fds() == before


def test_posts_before_the_attach_are_skipped(segment: Segment) -> None:
    engine = EngineEnd(segment)
    seqs = [engine.post([0], [1], [0], [0], [0], [[0] * 6]) for _ in range(3)]
    with Segment.attach(os.dup(segment.fileno())) as late:
        assert GrammarEnd(late).start_seq == seqs[-1]
    assert EngineEnd(segment).post([0], [1], [0], [0], [0], [[0] * 6]) == seqs[-1] + 1


def test_version_skew_is_reported_to_both_sides(segment: Segment, pair: Pair) -> None:
    engine, grammar = pair
    hello = HELLO.pack(b"LKSTPSEG", LAYOUT_VERSION + 1, 1, 7, segment.layout.total_bytes)
    socket.send_fds(engine, [hello], [segment.fileno()])
    with pytest.raises(VersionSkew, match=f"{LAYOUT_VERSION} here, {LAYOUT_VERSION + 1} in the peer"):
        recv_segment(grammar)
    answer = ACK.unpack(engine.recv(ACK.size))
    assert answer[1:3] == (1, LAYOUT_VERSION)


def test_the_engine_reports_the_version_of_a_newer_peer(segment: Segment, pair: Pair) -> None:
    engine, grammar = pair
    grammar.sendall(ACK.pack(b"LKSTPSEG", 1, LAYOUT_VERSION + 5, 0, 1, 0))
    with pytest.raises(VersionSkew) as caught:
        send_segment(engine, segment)
    assert (caught.value.ours, caught.value.theirs) == (LAYOUT_VERSION, LAYOUT_VERSION + 5)


def test_a_refusal_reaches_the_engine_with_its_reason(segment: Segment, pair: Pair) -> None:
    segment.memory[100] ^= 1
    engine, grammar = pair
    received = concurrently(lambda: recv_segment(grammar))
    with pytest.raises(HandshakeError, match="the header is damaged"):
        send_segment(engine, segment)
    assert isinstance(received(), LayoutError)


@pytest.mark.parametrize("num_fds", [0, 2])
def test_a_hello_carries_one_descriptor(segment: Segment, pair: Pair, num_fds: int) -> None:
    engine, grammar = pair
    hello = HELLO.pack(b"LKSTPSEG", LAYOUT_VERSION, 1, 7, segment.layout.total_bytes)
    socket.send_fds(engine, [hello], [segment.fileno()] * num_fds)
    before = open_fds()
    with pytest.raises(HandshakeError, match=f"this one {num_fds}"):
        recv_segment(grammar)
    assert open_fds() == before


def test_a_connection_of_another_protocol_is_rejected(segment: Segment, pair: Pair) -> None:
    engine, grammar = pair
    socket.send_fds(engine, [b"GET / HTTP/1.1\r\n".ljust(HELLO.size)], [segment.fileno()])
    with pytest.raises(HandshakeError, match="the peer said b'GET"):
        recv_segment(grammar)
    engine.recv(4096)  # the refusal
    grammar.sendall(b"HTTP/1.1 400 Bad Request\r\n".ljust(ACK.size))
    with pytest.raises(HandshakeError, match="the peer answered b'HTTP"):
        send_segment(engine, segment)


def test_the_handshake_with_a_silent_peer_times_out(segment: Segment, pair: Pair) -> None:
    engine, grammar = pair
    with pytest.raises(HandshakeError, match="no acknowledgement within"):
        send_segment(engine, segment, timeout_s=0.01)
    engine.close()  # the hello is still in the socket; only the acknowledgement has no reader
    with pytest.raises(PeerGone):
        recv_segment(grammar)


def test_a_peer_that_disconnects_is_noticed(segment: Segment, pair: Pair) -> None:
    engine, grammar = pair
    assert not hung_up(engine)
    grammar.close()
    assert hung_up(engine, timeout_s=1)
    with pytest.raises(PeerGone):
        send_segment(engine, segment)


def test_the_listener_is_private_and_replaces_a_stale_socket(tmp_path: Path, segment: Segment) -> None:
    path = tmp_path / "segment.sock"
    listen(path).close()
    with listen(path) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(InvalidField, match="another process listens"):
            listen(path)
        server.accept()[0].close()
        with connect(path) as engine, server.accept()[0] as grammar:
            received = concurrently(lambda: recv_segment(grammar))
            send_segment(engine, segment)
            received().close()
    with pytest.raises(PeerGone, match="no grammar process listens"):
        connect(path)


def test_the_listener_does_not_replace_other_files(tmp_path: Path) -> None:
    path = tmp_path / "segment.sock"
    path.write_text("not yours")
    with pytest.raises(InvalidField, match="not a socket"):
        listen(path)
    with pytest.raises(InvalidField, match="longer than 107 bytes"):
        listen(tmp_path / ("x" * 120))
