"""Finds accesses of recorded streams and of the host that nothing orders, by vector clocks, whatever order they had.

A node of a stream comes after the nodes before it on that stream, and after all that the host did before it enqueued
the node. An event carries the clock of its stream at the mark, to a stream that holds for it and to a host that has
waited for it. `Order.races` names each two accesses to one byte without such an order, one of which writes.

Memory that is shared is watched: pinned memory, and all memory that a node accesses once there is a second stream. The
accesses are those of torch's operations and of the interpreter's launches, byte by byte. `Turns` draws the order in
which streams run, within what events permit.
Invariant: the threads of the host count as one. Not responsible for: what native host functions do with the addresses
that they get, accesses through numpy, races within one launch (see tests/kernels/checked_interpreter.py).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.kernels.checked_interpreter import Launch

Clock = dict[int, int]
Runs = npt.NDArray[np.int64]
"""Sorted pieces of memory, [N, 2]: first address and end."""

HOST = 0
"""The number of the host; those of streams follow."""
NUMBER_BYTES = 4
"""Pinned memory of one number is a hint: `most_lacking` of a decoupled drafter may be a step old, and decides only
speed."""

_hints: dict[int, StorageWeakRef] = {}


def hint(tensor: torch.Tensor) -> None:
    """Watch no access to a word that the host reads while a step may be writing it: a step earlier or later does."""
    _hints[tensor.untyped_storage().data_ptr()] = StorageWeakRef(tensor.untyped_storage())


TOLERATED = {"read"}
"""Nodes that may read what another stream writes: the reading graph of a decoupled drafter, by its page, reads texts
next to anything else, and the next draft graph forgets what it read of another sequence."""


@dataclass(frozen=True)
class Actor:
    """A node of a stream that runs, or the host at some time."""

    number: int
    clock: Clock
    name: str
    order: Order


class _Running(threading.local):
    actor: Actor | None = None


_running = _Running()


@dataclass(eq=False)
class _Memory:
    """The accesses to one storage, by actor and whether they write: of each piece the last one's epoch and name."""

    ref: StorageWeakRef
    pinned: bool = False
    accesses: dict[tuple[int, bool], dict[bytes, tuple[int, str]]] = field(default_factory=dict)
    latest: dict[tuple[int, bool], int] = field(default_factory=dict)


class Order:
    """The clocks of the streams of one device and of the host, and what they accessed."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.active = bool(_runs)
        """Accesses are watched."""
        self.nodes, self.compared = 0, 0
        """Nodes that were enqueued; pairs of accesses, one by another actor and at least one a write, that were
        compared."""
        self._lock = threading.RLock()
        self._clocks: list[Clock] = [{HOST: 1}]
        self._memory: dict[int, _Memory] = {}
        self._pinned: list[torch.UntypedStorage] = []

    def add_stream(self) -> int:
        """Return the number of another stream."""
        with self._lock:
            self._clocks.append({})
            return len(self._clocks) - 1

    def pin(self, tensor: torch.Tensor) -> None:
        """Watch pinned memory."""
        storage = tensor.untyped_storage()
        with self._lock:
            self._pinned.append(storage)
            if storage.nbytes() == NUMBER_BYTES:
                hint(tensor)
            else:
                self._memory[storage.data_ptr()] = _Memory(StorageWeakRef(storage), pinned=True)

    # -- the host's calls ---------------------------------------------------------------------------------------------

    def enqueued(self, stream: int, name: str) -> Actor:
        """Return the node that the host enqueues."""
        with self._lock:
            clock, host = self._clocks[stream], self._clocks[HOST]
            _join(clock, host)
            clock[stream] = clock.get(stream, 0) + 1
            host[HOST] += 1
            self.nodes += 1
            return Actor(stream, dict(clock), name, self)

    def marked(self, stream: int) -> Clock:
        """Return what an event carries that is marked now."""
        with self._lock:
            carried = dict(self._clocks[stream])
            _join(carried, self._clocks[HOST])
            self._clocks[HOST][HOST] += 1
            return carried

    def held(self, stream: int, clock: Clock) -> None:
        """What is enqueued on `stream` from now on comes after an event."""
        with self._lock:
            _join(self._clocks[stream], clock)

    def host_waited(self, clock: Clock) -> None:
        """The host has found an event reached."""
        with self._lock:
            _join(self._clocks[HOST], clock)

    def host(self, name: str) -> Actor:
        """Return the host now."""
        return Actor(HOST, self._clocks[HOST], name, self)

    # -- accesses -----------------------------------------------------------------------------------------------------

    def watches(self, storage: int) -> bool:
        """Return whether an access to a storage may have to be ordered with another actor's."""
        memory = self._memory.get(storage)
        if len(self._clocks) > 2:
            return storage not in _hints or _hints[storage].expired()
        return memory is not None and memory.pinned

    def fresh(self, storage: torch.UntypedStorage) -> None:
        """Forget the accesses to memory that was freed."""
        with self._lock:
            memory = self._memory.get(storage.data_ptr())
            if memory is not None and not memory.pinned:
                del self._memory[storage.data_ptr()]

    def access(self, actor: Actor, storage: torch.UntypedStorage, runs: Runs, *, writes: bool) -> None:
        """Compare an access with those of the other actors, and keep it."""
        with self._lock:
            memory = self._memory.get(storage.data_ptr())
            if memory is None or memory.ref.expired():
                if actor.number == HOST:
                    return
                memory = self._memory[storage.data_ptr()] = _Memory(StorageWeakRef(storage))
            epoch = actor.clock.get(actor.number, 0)
            for (other, wrote), latest in memory.latest.items():
                if other == actor.number or not (writes or wrote):
                    continue
                self.compared += 1
                known = actor.clock.get(other, 0)
                if latest > known:
                    self._compare(actor, runs, writes, memory.accesses[other, wrote], other, known, wrote)
            memory.accesses.setdefault((actor.number, writes), {})[runs.tobytes()] = epoch, actor.name
            memory.latest[actor.number, writes] = epoch

    def _compare(
        self,
        actor: Actor,
        runs: Runs,
        writes: bool,
        others: dict[bytes, tuple[int, str]],
        other: int,
        known: int,
        wrote: bool,
    ) -> None:
        for packed, (epoch, name) in others.items():
            if epoch > known and _meet(runs, np.frombuffer(packed, dtype=np.int64).reshape(-1, 2)):
                what = [f"{_who(other)} {'writes' if wrote else 'reads'} in {name}"]
                what.append(f"{_who(actor.number)} {'writes' if writes else 'reads'} in {actor.name}")
                race = " while ".join(what)
                if race not in self.races and not TOLERATED & {name if not wrote else "", "" if writes else actor.name}:
                    self.races.append(race)


def _who(number: int) -> str:
    return "the host" if number == HOST else f"stream {number}"


def _join(clock: Clock, other: Clock) -> None:
    for actor, epoch in other.items():
        clock[actor] = max(epoch, clock.get(actor, 0))


def _meet(some: Runs, others: Runs) -> bool:
    """Return whether two lists of pieces have a byte in common."""
    after = np.searchsorted(others[:, 1], some[:, 0], side="right")  # the first piece that ends after a begin
    inside = after < len(others)
    return bool((others[after[inside], 0] < some[inside, 1]).any())


def runs_of(tensor: torch.Tensor) -> Runs:
    """Return the pieces of memory of a tensor's elements."""
    first, size = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous():
        return np.array([[first, first + tensor.numel() * size]], dtype=np.int64)
    places = np.zeros(1, dtype=np.int64)
    for count, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = np.add.outer(places, np.arange(count, dtype=np.int64) * stride).ravel()
    return _joined(first + places * size, size)


def _joined(addresses: npt.NDArray[Any], size: int) -> Runs:
    """Return the pieces that elements of `size` bytes are in."""
    first, last = int(addresses.min()), int(addresses.max())
    found = np.unique(addresses.astype(np.int64))
    if last - first == (len(found) - 1) * size:
        return np.array([[first, last + size]], dtype=np.int64)
    gaps = np.flatnonzero(np.diff(found) != size)
    begins = found[np.concatenate([[0], gaps + 1])]
    return np.stack([begins, found[np.concatenate([gaps, [len(found) - 1]])] + size], axis=1)


def run_as(actor: Actor, node: Callable[[], object]) -> None:
    """Run a node on this thread, whose accesses are the node's."""
    _running.actor = actor
    try:
        node()
    finally:
        _running.actor = None


def of_launch(launch: Launch) -> None:
    """Note the accesses of one launch of the interpreter on this thread."""
    actor = _running.actor
    if actor is None:
        return
    tensors = {
        value.untyped_storage().data_ptr(): value.untyped_storage()
        for value in launch.given.values()
        if isinstance(value, torch.Tensor)
    }
    found: dict[tuple[int, int, bool], list[npt.NDArray[Any]]] = {}
    for access in launch.accesses:
        if access.storage in tensors and actor.order.watches(access.storage):
            found.setdefault((access.storage, access.size, access.kind != "load"), []).append(access.addresses)
    for (storage, size, writes), addresses in found.items():
        actor.order.access(actor, tensors[storage], _joined(np.concatenate(addresses), size), writes=writes)


class Watch(TorchDispatchMode):
    """Notes the accesses of torch's operations: of the node that runs on this thread, else of the host."""

    def __init__(self, order: Order, ignores: Callable[[], bool]) -> None:
        super().__init__()
        self._order, self._ignores = order, ignores

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._ignores():
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        schema, actor = func._schema, _running.actor
        if not schema.is_mutable and all(value.alias_info is not None for value in schema.returns):
            return  # a view
        order = actor.order if actor is not None else self._order
        if actor is not None:
            for made in tree_leaves(out):
                if isinstance(made, torch.Tensor) and not schema.is_mutable and not made.is_mkldnn:
                    order.fresh(made.untyped_storage())
        named = dict(zip([argument.name for argument in schema.arguments], args, strict=False)) | kwargs
        for argument in schema.arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(named.get(argument.name)):
                if not isinstance(tensor, torch.Tensor) or tensor.is_mkldnn or not tensor.numel():
                    continue
                storage = tensor.untyped_storage()
                if order.watches(storage.data_ptr()):
                    by = actor or order.host(str(func.overloadpacket))
                    order.access(by, storage, runs_of(tensor), writes=writes)


_LATE_S, _YIELDS_S = 0.005, 0.25
"""The longest that a node waits for the host to look at an event, and for other streams: the host may wait for this
stream while another one waits for the host."""


class Turns:
    """Draws which of several streams runs its next node, and how far the device is after the host."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._ready: dict[int, bool] = {}
        """Streams with a node that may run now; True: it lets others run first."""
        self._ran, self._asked = 0, 0
        self.drawn = 0
        """Times that a stream with a node let another one, or the host, go first."""

    def asks(self) -> None:
        """The host looks at an event."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def take(self, stream: int) -> None:
        """Return when the next node of `stream` may run."""
        with self._changed:
            self._ready[stream] = False
            self._changed.notify_all()
            chance = self._random.random()
            if chance < 0.01:
                asked = self._asked
                self._yields(stream, lambda: self._asked > asked, _LATE_S)
            elif chance < 0.5 and self._others(stream):
                goal = self._ran + self._random.randint(1, 20)
                self._yields(stream, lambda: self._ran >= goal or not self._others(stream), _YIELDS_S)
            self._ran += 1
            self._changed.notify_all()

    def idles(self, stream: int) -> None:
        """The stream has no node that may run."""
        with self._changed:
            self._ready.pop(stream, None)
            self._changed.notify_all()

    def _yields(self, stream: int, until: Callable[[], bool], most_s: float) -> None:
        self._ready[stream] = True
        self.drawn += 1
        self._changed.notify_all()
        self._changed.wait_for(until, most_s)
        self._ready[stream] = False

    def _others(self, stream: int) -> bool:
        """Return whether another stream will run a node."""
        return any(not yields for other, yields in self._ready.items() if other != stream)


@dataclass(eq=False)
class Run:
    """The devices of one test: their orders, and the seed of their turns, if those are drawn."""

    seed: int | None = None
    orders: list[Order] = field(default_factory=list)
    turns: list[Turns] = field(default_factory=list)

    @property
    def races(self) -> list[str]:
        return [race for order in self.orders for race in order.races]


_runs: list[Run] = []


@contextmanager
def watched_run(seed: int | None = None) -> Iterator[Run]:
    """Collect the orders of the devices that are made inside the `with` block, and draw their turns from a seed."""
    _runs.append(run := Run(seed))
    try:
        yield run
    finally:
        _runs.pop()


def new_order() -> Order:
    """Return the order of another device."""
    order = Order()
    if _runs:
        _runs[-1].orders.append(order)
    return order


def new_turns() -> Turns | None:
    """Return the turns of another device; None: they are not drawn."""
    if not _runs or _runs[-1].seed is None:
        return None
    turns = Turns(_runs[-1].seed)
    _runs[-1].turns.append(turns)
    return turns
