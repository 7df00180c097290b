"""Two real processes, of which peer.py is one: no stale, torn or lost row, and a killed peer is noticed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from shared_mem.channel import EngineEnd
from shared_mem.errors import VersionSkew
from shared_mem.handover import connect, hung_up, send_segment
from shared_mem.layout import HEADER_BYTES, LAYOUT_VERSION, Layout, RowKind
from shared_mem.segment import Segment

StartPeer = Callable[..., "subprocess.Popen[str]"]

WORD = 0x7FFFFFFF
LONG_S = 60.0
LAYOUT = Layout(num_slots=3, num_rows=2, vocab_size=2000, generation=3)

POLICIES = {"spin": 50_000, "park": 0}
"""Nanoseconds that both sides spin before they park."""


@contextmanager
def attached(
    start_peer: StartPeer, path: Path, *mode: object
) -> Iterator[tuple[Segment, socket.socket, subprocess.Popen[str]]]:
    peer = start_peer(mode[0], path, *mode[1:])
    with Segment.create(LAYOUT) as segment, connect(path) as sock:
        assert send_segment(sock, segment).pid == peer.pid
        yield segment, sock, peer


def run_rounds(engine: EngineEnd, rounds: int) -> None:
    """Post, await and check `rounds` times. Every 97th post is not awaited, so the peer must also read two at once."""
    slots = np.array([2, 0], dtype=np.int32)
    arrays = engine.batch_arrays(2)
    arrays.slots[:] = slots
    rows = engine.layout.num_rows
    for _ in range(rounds):
        seq = engine.last_seq + 1
        value = seq & WORD
        arrays.slot_gens[:] = value
        arrays.commit_pos[:] = value
        arrays.tokens[:] = value
        arrays.n_commit[:] = seq % (rows + 1)
        arrays.n_draft[:] = seq % rows
        assert engine.post_batch(arrays, stage=seq % 3) == seq
        if seq % 97 == 0:
            continue
        result = engine.await_batch(arrays, seq, timeout_s=LONG_S)
        ok = (
            (result.kinds == RowKind.APPLY).all()
            and (result.forced == value).all()
            and (engine.mask_rows(seq)[slots] == value).all()
        )
        assert ok, f"sequence {seq}: {result}, rows {engine.mask_rows(seq)[slots]}"


def stress(start_peer: StartPeer, path: Path, rounds: int, spin_ns: int) -> None:
    with attached(start_peer, path, "pattern", spin_ns) as (segment, sock, peer):
        engine = EngineEnd(segment, spin_ns)
        run_rounds(engine, rounds)
        assert engine.stats()["missing_lanes"] == 0
        sock.close()
        _, errors = peer.communicate(timeout=LONG_S)
        assert (peer.returncode, errors) == (0, "")


@pytest.mark.parametrize("policy", ["park", pytest.param("spin", marks=pytest.mark.slow)])
def test_no_row_is_stale_torn_or_lost(start_peer: StartPeer, tmp_path: Path, policy: str) -> None:
    stress(start_peer, tmp_path / "s", 10_000, POLICIES[policy])


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "rounds"), [("park", 500_000), ("spin", 120_000)])
def test_no_row_of_many_is_stale_torn_or_lost(start_peer: StartPeer, tmp_path: Path, policy: str, rounds: int) -> None:
    """Two ends that spin take both cores from everything else, and twice the time for a round."""
    stress(start_peer, tmp_path / "s", rounds, POLICIES[policy])


def test_a_killed_peer_hangs_up_and_its_rows_are_deferred(start_peer: StartPeer, tmp_path: Path) -> None:
    with attached(start_peer, tmp_path / "s", "pattern", 0) as (segment, sock, peer):
        engine = EngineEnd(segment)
        run_rounds(engine, 50)
        assert not hung_up(sock)
        peer.send_signal(signal.SIGKILL)
        assert hung_up(sock, timeout_s=LONG_S)
        seq = engine.post([1], [1], [0], [0], [0], [[0] * 4])
        result = engine.await_rows(seq, [1], [1], timeout_s=0.02)
        assert (result.kinds == RowKind.DEFER).all()
        assert result.num_missing == 1
        engine.set_abort()
        assert engine.await_rows(seq, [1], [1], timeout_s=LONG_S).num_missing == 1


def test_a_stopped_peer_has_an_open_socket_and_an_old_heartbeat(start_peer: StartPeer, tmp_path: Path) -> None:
    with attached(start_peer, tmp_path / "s", "pattern", 0) as (segment, sock, peer):
        engine = EngineEnd(segment)
        run_rounds(engine, 10)
        peer.send_signal(signal.SIGSTOP)
        os.waitpid(peer.pid, os.WUNTRACED)
        first = engine.heartbeat_age_ns()
        seq = engine.post([1], [1], [0], [0], [0], [[0] * 4])
        assert engine.await_rows(seq, [1], [1], timeout_s=0.02).num_missing == 1
        second = engine.heartbeat_age_ns()
        assert first is not None
        assert second is not None
        assert second - first >= 20_000_000
        assert not hung_up(sock)


def test_a_new_peer_can_attach_to_the_same_segment(start_peer: StartPeer, tmp_path: Path) -> None:
    with attached(start_peer, tmp_path / "a", "pattern", 0) as (segment, _, peer):
        engine = EngineEnd(segment)
        run_rounds(engine, 200)
        peer.kill()
        peer.wait()
        engine.post([1], [1], [0], [0], [0], [[0] * 4])
        start_peer("pattern", tmp_path / "b", 0)
        with connect(tmp_path / "b") as again:
            send_segment(again, segment)
            run_rounds(engine, 200)
        assert engine.stats()["missing_lanes"] == 0


def test_the_peer_notices_the_end_of_the_engine(start_peer: StartPeer, tmp_path: Path) -> None:
    with attached(start_peer, tmp_path / "s", "silent") as (_, sock, peer):
        assert peer.poll() is None
        sock.close()
        _, errors = peer.communicate(timeout=LONG_S)
        assert (peer.returncode, errors) == (0, "")


def test_version_skew_between_processes_names_both_versions(start_peer: StartPeer, tmp_path: Path) -> None:
    peer = start_peer("silent", tmp_path / "s")
    with Segment.create(LAYOUT) as segment, connect(tmp_path / "s") as sock:
        header = bytearray(segment.memory[:HEADER_BYTES])
        header[8] += 1
        segment.memory[:HEADER_BYTES] = np.frombuffer(bytes(header), dtype=np.uint8)
        with pytest.raises(VersionSkew):
            send_segment(sock, segment)
        _, errors = peer.communicate(timeout=LONG_S)
        assert errors.strip().endswith(
            f"VersionSkew: shared-memory layout version {LAYOUT_VERSION} here, {LAYOUT_VERSION + 1} in the peer: "
            "run the same release in both processes"
        )
