"""The engines that share the experts of one model, as one of them sees the others: woken, watched, left.

Every engine has its own scheduler, slots and grammar process. What joins them is the mixtures of a forward: all
ranks enter each of them together, a rank without its own forward with no rows. So when a rank begins a forward it
sends a byte to every other one, whose engine then takes part, by its own forward or by `step_along`. Invariant:
the numbers of forwards that two ranks have entered differ by at most one, and a collective runs only when all ranks are
in it. Not responsible for: how the ranks find each other (see rendezvous.py), the rows (see shared_experts.py).
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpu_engine.api.errors import RankLost
from gpu_engine.model.parallel.collectives import Collectives, open_group
from gpu_engine.model.parallel.heartbeat import BEAT_S
from gpu_engine.model.parallel.ranks import SILENCE_S
from gpu_engine.model.parallel.rendezvous import WAIT_S, Met, Place, rendezvous
from kernels.kv_pages import KVPages, copy_page

log = logging.getLogger(__name__)

JOIN_S = 60.0
"""Longest wait for another rank that lives to take part in a forward: its engine may still start."""
LINGER_S = 6.0
"""A rank that is stopped takes part in the others' forwards for so long, unless they are stopped as well."""
_REASON_S = 3.0
"""The watch notices the cause of a broken collective within this time."""
_BEAT, _BEGUN, _LEAVES = b".", b"F", b"Q"


@dataclass(slots=True, eq=False)
class _Peer:
    """Another rank. Only the watch writes it."""

    met: Met
    heard_s: float
    begun: int = 0
    """Forwards that it has entered."""
    leaves: bool = False
    """It was stopped, and begins no forward any more."""
    gone: bool = False


class Peers:
    """A `RankSet` of engines. Any thread may call it, except for `enter`, `step_along` and `close`, which belong to the
    thread of the forwards."""

    plans = None
    """Engines share experts on CPUs only."""

    def __init__(self, place: Place, about: str, device: torch.device, wait_s: float = WAIT_S) -> None:
        """Wait for the other engines (see `meet`). Raises as that, and RankLost."""
        self.place = place
        self._rendezvous = rendezvous(place, about, wait_s)
        self._peers = [_Peer(met, time.monotonic()) for met in self._rendezvous.others]
        self._changed = threading.Condition()
        self._lost: RankLost | None = None
        self._closing = self._leaving = False
        self._watchers: list[Callable[[], None]] = []
        """`_lost`, `_watchers` and `_closing` are guarded by `_changed`."""
        self._wake: Callable[[], None] = lambda: None
        self._layers: Sequence[Callable[[], None]] = ()
        self._next = self._rounds = self._seen = 0
        self.num_idle_forwards = 0
        """Forwards of others that this rank entered without rows."""
        self._watch_thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._watch_thread.start()
        try:
            group = open_group(self._rendezvous.store, place.rank, place.size)
            self.collectives = Collectives(group, place.rank, place.size, device, self._reason)
            self.collectives.rendezvous()
        except RuntimeError as error:
            reason = error if isinstance(error, RankLost) else self._reason(error)
            self.close()
            raise reason from error
        finally:
            if place.rank == 0:
                shutil.rmtree(self._rendezvous.store.parent, ignore_errors=True)

    # -- forwards: on the thread of the engine -------------------------------------------------------------------------

    def share(self, layers: Sequence[Callable[[], None]]) -> None:
        """Take the mixtures of the model, in the order of a forward; each function enters one without rows."""
        self._layers = layers

    def enter(self, layer: int) -> None:
        """Note that a forward comes to this mixture; at the first one, tell the others. Raises RankLost."""
        if layer != self._next:
            self._lose(f"rank {self.place.rank} of {self.place.size} left a forward before its mixture {self._next}")
            self.check()
        if layer == 0:
            self._rounds += 1
            self._tell(_BEGUN)
            self._await_others()
        self._next = (layer + 1) % len(self._layers)

    def _await_others(self) -> None:
        """Wait until every rank has entered this forward: a collective, which nothing can interrupt, then never waits
        for a rank that does something else. Raises RankLost."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or not self._missing(), JOIN_S)
            missing = [] if self._lost is not None else self._missing()
        if missing:
            self._lose(f"{self._name(missing[0])} has taken part in no forward for {JOIN_S:g} s")
        self.check()

    def _missing(self) -> list[_Peer]:
        return [peer for peer in self._peers if peer.begun < self._rounds]

    def step_along(self) -> bool:
        """See `RankSet`."""
        joined, self._seen = self._rounds != self._seen, self._rounds
        if joined or not self._behind():
            return False
        self._enter_without_rows()
        return True

    def _enter_without_rows(self) -> None:
        with torch.inference_mode():
            for layer in self._layers:
                layer()
        self._seen = self._rounds
        self.num_idle_forwards += 1

    def _behind(self) -> bool:
        return any(peer.begun > self._rounds for peer in self._peers)

    # -- as a RankSet --------------------------------------------------------------------------------------------------

    def allocate_pages(self, num_pages: int, page_size: int) -> None:
        """Do nothing: every engine has its own KV cache."""

    def copy_page(self, pages: list[KVPages], source: int, target: int) -> None:
        """Copy a page in `pages`."""
        copy_page(pages, source, target)

    def watch(self, lost: Callable[[], None]) -> None:
        """See `RankSet`."""
        with self._changed:
            if self._lost is None:
                self._watchers.append(lost)
                return
        lost()

    def wake(self, engine: Callable[[], None]) -> None:
        """See `RankSet`."""
        self._wake = engine

    def check(self) -> None:
        """Raise RankLost if a rank was lost."""
        with self._changed:
            if self._lost is not None:
                raise self._lost

    def close(self) -> None:
        """Take part in the others' forwards until they are stopped as well, for LINGER_S at most; then leave the group.
        A second call changes nothing."""
        self._leaving = True
        self._tell(_LEAVES)
        deadline_s = time.monotonic() + LINGER_S
        with contextlib.suppress(RankLost):
            while not self._all_leave() and (left_s := deadline_s - time.monotonic()) > 0:
                with self._changed:
                    self._changed.wait_for(lambda: self._behind() or self._all_leave(), left_s)
                if self._behind() and not self._closing:
                    self._enter_without_rows()
        with self._changed:
            self._closing = True
        self._watch_thread.join()
        self._rendezvous.lock.close()

    def _all_leave(self) -> bool:
        return self._closing or self._lost is not None or all(peer.leaves for peer in self._peers)

    # -- the watch -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.met.socket, selectors.EVENT_READ, peer)
            checked_s = beat_s = time.monotonic()
            while not self._closing and self._lost is None:
                events = selector.select(BEAT_S / 2)
                now_s = time.monotonic()
                if now_s - checked_s > 1.0:  # this process was stopped itself, as by control-Z
                    for peer in self._peers:
                        peer.heard_s = now_s
                checked_s = now_s
                if now_s - beat_s >= BEAT_S:
                    beat_s = now_s
                    self._tell(_BEAT)
                problem = next(filter(None, (self._hear(key.data, now_s) for key, _ in events)), None)
                for key, _ in events:
                    if key.data.gone:
                        selector.unregister(key.fileobj)
                problem = problem or next(filter(None, (self._silence(peer, now_s) for peer in self._peers)), None)
                if problem and not self._closing:
                    self._lose(problem)
        for peer in self._peers:
            peer.met.socket.close()

    def _hear(self, peer: _Peer, now_s: float) -> str | None:
        """Read what a rank has sent; return how it was lost, or None."""
        try:
            sent = peer.met.socket.recv(4096)
        except OSError:
            sent = b""
        if not sent:
            peer.gone = True
            if peer.leaves and self._leaving:
                return None
            return f"{self._name(peer)} {'was stopped' if peer.leaves else 'has ended'}"
        peer.heard_s = now_s
        with self._changed:
            peer.begun += sent.count(_BEGUN)
            peer.leaves |= _LEAVES in sent
            self._changed.notify_all()
        if self._behind():
            self._wake()
        return None

    def _silence(self, peer: _Peer, now_s: float) -> str | None:
        """Return that a rank is silent for too long, or None."""
        if peer.gone or now_s - peer.heard_s <= SILENCE_S:
            return None
        return f"{self._name(peer)} has sent no heartbeat for {SILENCE_S:g} s"

    def _name(self, peer: _Peer) -> str:
        return f"rank {peer.met.rank} of {self.place.size} (process {peer.met.process_id})"

    def _tell(self, byte: bytes) -> None:
        """Send a byte to every other rank. The watch notices one that is gone."""
        may_wait = 0 if byte != _BEAT else socket.MSG_DONTWAIT  # the watch must not wait for a rank that hangs
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.met.socket.send(byte, socket.MSG_NOSIGNAL | may_wait)

    def _lose(self, problem: str) -> None:
        with self._changed:
            if self._lost is not None:
                return
            self._lost = RankLost(problem)
            watchers, self._watchers = self._watchers, []
            self._changed.notify_all()
        for peer in self._peers:  # ends a send to a rank that hangs
            with contextlib.suppress(OSError):
                peer.met.socket.shutdown(socket.SHUT_RDWR)
        for watcher in watchers:
            watcher()

    def _reason(self, error: Exception) -> RankLost:
        """Return why a collective failed: the watch notices within a moment, or nothing but the collective has."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, timeout=_REASON_S)
            if self._lost is None:
                self._lost = RankLost(f"the engines that share the experts lost each other: {error}")
            return self._lost

    def __repr__(self) -> str:
        return f"<Peers: rank {self.place.rank} of {self.place.size}, {self._rounds} forwards, lost={self._lost}>"
