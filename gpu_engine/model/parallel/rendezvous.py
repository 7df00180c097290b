"""How the engines of a group find each other: each has a number, and all see one directory.

The engine of rank r listens on a socket `rank-r` there, connects to those of lower ranks, and waits for higher ones.
Both ends of a connection say what they serve. Invariant: a group has one engine of each rank, and all serve the same
weights. A lock that its process holds keeps a second engine from the same rank. Not responsible for: the sockets once
everybody is there (see peers.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpu_engine.model.loaded_model import ModelNotSupported

log = logging.getLogger(__name__)

SETTING = "data_parallel_attention"
WAIT_S = 600.0
"""Longest wait for the other engines, which may still load their models."""
_RETRY_S = 0.05
_SAY_S = 10.0
"""An engine that waits says so this often."""
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Place:
    """One engine's place in its group."""

    rank: int
    """0 <= rank < size."""
    size: int
    directory: Path


@dataclass(frozen=True, slots=True)
class Met:
    """Another engine of the group. Owns the socket."""

    rank: int
    process_id: int
    socket: socket.socket


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The result: the other engines in the order of their ranks."""

    others: tuple[Met, ...]
    store: Path
    """The file by which a process group is opened; in a new directory that rank 0 has made."""
    lock: IO[bytes]
    """Held until it is closed."""


def rendezvous(place: Place, about: str, wait_s: float = WAIT_S) -> Rendezvous:
    """Wait for every other engine. `about` says what this one serves; all must say the same.

    Raises ModelNotSupported for a rank that is taken, for another `about` or size, and when the wait ends; OSError when
    the directory cannot be used.
    """
    place.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = _locked(place)
    found: dict[int, tuple[Met, str]] = {}
    try:
        store = tempfile.mkdtemp(prefix="lockstep-experts-") if place.rank == 0 else ""
        hello = {"rank": place.rank, "size": place.size, "process": os.getpid(), "about": about, "store": store}
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
            for other, text in _greet_all(place, hello, listener, time.monotonic() + wait_s):
                if other.rank in found:  # it was started again meanwhile
                    found[other.rank][0].socket.close()
                found[other.rank] = other, text
                if len(found) == place.size - 1:
                    break
            _path(place, place.rank).unlink(missing_ok=True)
        others = tuple(found[rank][0] for rank in sorted(found))
        return Rendezvous(others, Path(store or found[0][1]) / "store", lock)
    except BaseException:
        for other, _ in found.values():
            other.socket.close()
        lock.close()
        raise


def _locked(place: Place) -> IO[bytes]:
    lock = (place.directory / f"rank-{place.rank}.lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ModelNotSupported(
            f"data_parallel_rank: another engine has rank {place.rank} in {place.directory}"
        ) from error
    return lock


def _greet_all(
    place: Place, hello: dict[str, Any], listener: socket.socket, deadline_s: float
) -> Iterator[tuple[Met, str]]:
    """Yield each other engine with its directory of the store, again if it was started again."""
    own = _path(place, place.rank)
    own.unlink(missing_ok=True)
    listener.bind(str(own))
    listener.listen(place.size)
    listener.settimeout(_RETRY_S)
    missing, said_s = list(range(place.rank)), time.monotonic()
    while True:
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise ModelNotSupported(f"{SETTING}: not all of {place.size} engines came to {place.directory}")
        if now_s - said_s > _SAY_S:
            log.info("rank %d of %d waits for the other engines in %s", place.rank, place.size, place.directory)
            said_s = now_s
        if missing:
            greeted = _greet(_connected(place, missing[0]), place, hello, deadline_s)
            if greeted is None:
                time.sleep(_RETRY_S)
                continue
            missing.pop(0)
        else:
            try:
                connection: socket.socket | None = listener.accept()[0]
            except TimeoutError:
                continue
            greeted = _greet(connection, place, hello, deadline_s)
        if greeted is not None:
            yield greeted


def _connected(place: Place, rank: int) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(_path(place, rank)))
    except (ConnectionRefusedError, FileNotFoundError):
        connection.close()
        return None
    return connection


def _greet(
    connection: socket.socket | None, place: Place, hello: dict[str, Any], deadline_s: float
) -> tuple[Met, str] | None:
    """Exchange greetings; None for an engine that has gone meanwhile. Raises ModelNotSupported."""
    if connection is None:
        return None
    try:
        connection.settimeout(max(deadline_s - time.monotonic(), _RETRY_S))
        connection.sendall(json.dumps(hello).encode() + b"\n")
        theirs = _line(connection)
    except OSError:
        theirs = b""
    if not theirs:
        connection.close()
        return None
    connection.settimeout(None)
    said = json.loads(theirs)
    for name in ("size", "about"):
        if said[name] != hello[name]:
            connection.close()
            raise ModelNotSupported(
                f"{SETTING}: the engine of rank {said['rank']} (process {said['process']}) has {name} {said[name]}, "
                f"and this one, of rank {place.rank}, has {hello[name]}"
            )
    return Met(said["rank"], said["process"], connection), said["store"]


def _line(connection: socket.socket) -> bytes:
    """Read up to the end of a line, and nothing after it. Empty: the other end is gone."""
    found = b""
    while not found.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(found) > _MOST_BYTES:
            return b""
        found += byte
    return found


def _path(place: Place, rank: int) -> Path:
    return place.directory / f"rank-{rank}"
