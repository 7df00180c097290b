"""A rank's end of its socket to rank 0: a byte at intervals, and the end of the process when the socket closes.

Invariant: no import here takes long, so that a rank is heard before it loads its libraries. Not responsible for: rank
0's end (see ranks.py).
"""

from __future__ import annotations

import os
import select
import socket
import threading

BEAT_S = 0.5
"""A rank sends a byte this often."""
READY, FAILED, GO = b"R", b"E", b"G"
"""Bytes on the socket: a rank has loaded its part; it cannot, and the reason follows; every rank may connect."""


class Heartbeat:
    """Owns the socket. `channel` is connected to rank 0."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._goes = channel, threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def ready(self) -> None:
        """Say that this rank has loaded its part; wait until every rank has."""
        self._channel.sendall(READY)
        self._goes.wait()

    def fail(self, reason: str) -> None:
        """Say why this rank cannot load its part. The process ends after this."""
        self._channel.sendall(FAILED + reason.encode())

    def _beat(self) -> None:
        while True:
            try:
                self._channel.sendall(b".")
                readable, _, _ = select.select([self._channel], [], [], BEAT_S)
                received = self._channel.recv(16) if readable else b"."
            except OSError:
                received = b""
            if not received:
                os._exit(0)  # the main thread may wait in a collective that never ends
            if GO in received:
                self._goes.set()
