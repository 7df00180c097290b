"""A CUDA stream without CUDA: CPU tensors replace device memory, and a thread replaces the device.

It behaves like CUDA in the order of one stream, in asynchrony, in host functions called through their C address, and in
capture. A capture runs a kernel's Python once: the torch operations are recorded with the tensors and constants of that
moment, and a replay repeats the operations, not the Python. So a number that was read from the host at capture never
changes, and reading a tensor back is an error. Memory that a capture wrote is restored, since a real capture runs
nothing. After a device error nothing runs any more, host functions included. It does not imitate timing, nor races
between kernels. `opaque` marks a stand-in for a native kernel, which is called again at each replay.
"""

from __future__ import annotations

import ctypes
import functools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.gpu_engine.device.happens_before import Clock, Order, Turns, Watch, new_order, new_turns, run_as
from tests.kernels.checked_interpreter import is_checking, poisoned

P = ParamSpec("P")
Node = Callable[[], object]

PATIENCE_S = 300.0
"""Seconds after which a wait fails its test."""

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_aten = torch.ops.aten
_READS_BACK = {
    _aten._local_scalar_dense,
    _aten.nonzero,
    _aten.masked_select,
    _aten.equal,
    _aten.is_nonzero,
    _aten._unique2,
    _aten.bincount,
}
_LEAVES_UNWRITTEN = {_aten.empty, _aten.empty_like, _aten.new_empty}


class _Currents(threading.local):
    """The current streams of a thread by device, as `RecordedStream.place` names it; the current device comes last.

    The stream of the steps is current on its device from the start, as after `CudaStream.activate`.
    """

    def __init__(self) -> None:
        self.streams: dict[torch.device | None, RecordedStream] = {}


class DeviceFailed(RuntimeError):
    """Every call after a device error raises this, as CUDA's sticky errors do."""


class ReadsBack(AssertionError):
    """A kernel reads a value back to the host, which is impossible in a graph."""


@dataclass(eq=False)
class _Tracer(TorchDispatchMode):
    """Records torch's operations; `restore` writes back the memory that they changed."""

    nodes: list[Node]
    saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(default_factory=dict)
    touched: dict[int, StorageWeakRef] = field(default_factory=dict)
    """The memory of every argument, by its address."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _READS_BACK or (
            func.overloadpacket is _aten.index and any(t is not None and t.dtype == torch.bool for t in args[1])
        ):
            raise ReadsBack(f"{func} in a captured kernel")
        self.touched |= _memory(args, kwargs)
        named = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
        written = [
            leaf
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(named.get(argument.name))
            if isinstance(leaf, torch.Tensor)
        ]
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.saved:
                self.saved[storage.data_ptr()] = (storage, storage.clone())
        out = func(*args, **kwargs)
        if written:
            self.nodes.append(lambda: func(*args, **kwargs))
        elif func.overloadpacket in _LEAVES_UNWRITTEN and is_checking():
            self.nodes.append(functools.partial(poisoned, out))
        elif any(value.alias_info is None for value in func._schema.returns):
            self.nodes.append(functools.partial(_compute, func, args, kwargs, tree_leaves(out)))
        return out

    def restore(self) -> None:
        for storage, before in self.saved.values():
            storage.copy_(before)


def _memory(*values: object) -> dict[int, StorageWeakRef]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and not leaf.is_mkldnn)
    storages = (leaf.untyped_storage() for leaf in leaves)
    return {storage.data_ptr(): StorageWeakRef(storage) for storage in storages}


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: list[Any]) -> None:
    """Repeat an operation, with its results in the memory that they had at the capture."""
    for old, new in zip(out, tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            old.copy_(new)


class _Tracing(threading.local):
    tracer: _Tracer | None = None


_tracing = _Tracing()


def is_capturing() -> bool:
    """Return whether a capture of this thread traces a kernel now."""
    return _tracing.tracer is not None


def opaque(function: Callable[P, None]) -> Callable[P, None]:
    """Mark a stand-in for a native kernel: a replay calls it again with the arguments of the capture."""

    @functools.wraps(function)
    def launch(*args: P.args, **kwargs: P.kwargs) -> None:
        if (tracer := _tracing.tracer) is not None:
            tracer.nodes.append(lambda: function(*args, **kwargs))
            tracer.touched |= _memory(args, kwargs)
        else:
            with _disable_current_modes():
                function(*args, **kwargs)

    return launch


@dataclass(eq=False)
class RecordedGraph:
    stream: RecordedStream
    nodes: list[Node] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    """"kernel", "copy" and "host" in order; one call of `Stream.kernel` is one kernel."""
    parts: list[tuple[str, int]] = field(default_factory=list)
    """In the same order: the name of the kernel's function, or the kind, and its number of nodes."""
    replays: int = 0
    touched: set[int] = field(default_factory=set)
    """Addresses of the memory that its kernels get."""

    def replay(self) -> None:
        assert self.nodes, "the graph was reset"
        self.stream._check_current()
        self.replays += 1
        names = [name for name, count in self.parts for _ in range(count)]
        for node, name in zip(self.nodes, names, strict=True):
            self.stream._enqueue(node, name)

    def reset(self) -> None:
        self.nodes = []


@dataclass(eq=False)
class RecordedEvent:
    stream: RecordedStream
    _mark: tuple[threading.Event, Clock] = field(default_factory=lambda: (threading.Event(), {}))

    def mark(self) -> None:
        self.stream._check_current()
        self.mark_here()

    def mark_here(self) -> None:
        self._mark = flag, _ = threading.Event(), self.stream.order.marked(self.stream.number)
        self.stream._queue.put(flag.set)

    def hold(self, stream: RecordedStream) -> None:
        """Have `stream` wait for the point as it is marked now."""
        flag, clock = self._mark

        def hold() -> None:
            stream._idles()
            assert flag.wait(PATIENCE_S), "the stream beside does not come to the event"

        stream.order.held(stream.number, clock)
        stream._queue.put(hold)

    def reached(self) -> bool:
        self.stream._asks()
        self.stream._raise()
        flag, clock = self._mark
        if not flag.is_set():
            return False
        self.stream.order.host_waited(clock)
        return True

    def wait(self) -> None:
        self.stream._asks()
        flag, clock = self._mark
        assert flag.wait(PATIENCE_S), "the stream does not come to the event"
        self.stream._raise()
        self.stream.order.host_waited(clock)


@dataclass(eq=False)
class RecordedStream:
    """The stream. The device's thread calls `before` before every node; it may block, and an exception of it is a
    device error."""

    before: Callable[[Node], None] | None = None
    runs_at_once: bool = False
    drops: bool = False
    """While it is set, nodes are captured as usual, and the device runs none; events are reached."""
    trace: bool = True
    """False: every kernel counts as native: replays call it again, and it may read tensors (Triton's interpreter)."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ran: int = 0
    skipped: int = 0
    """Nodes that were not run because the device had failed."""
    eager: list[str] = field(default_factory=list)
    """Kinds of the nodes that were enqueued outside a capture."""
    failure: BaseException | None = None
    parent: RecordedStream | None = None
    """The stream that this one is next to: one device, which fails and drops nodes as a whole."""
    place: torch.device | None = None
    """The device; None: that of the steps."""
    crossings: int = 0
    """Copies from another device, or to one, that were enqueued here."""
    order: Order = field(default_factory=new_order)
    """Of the device, as are the turns."""
    turns: Turns | None = field(default_factory=new_turns)
    """None: each stream runs its nodes as soon as it may."""
    _beside: list[RecordedStream] = field(default_factory=list)
    _graph: RecordedGraph | None = None
    _currents: _Currents = field(default_factory=_Currents)
    _places: dict[int, tuple[StorageWeakRef, torch.device | None]] = field(default_factory=dict)
    """The devices of memory by its address."""

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.order, self.turns = self.parent.order, self.parent.turns
            self._currents, self._places = self.parent._currents, self.parent._places
        self.number = self.order.add_stream()
        self._queue: queue.SimpleQueue[Node | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._thread.start()

    # -- calls of the program -----------------------------------------------------------------------------------------

    def kernel(self, function: Callable[..., None], *args: object) -> None:
        if not self.trace:
            self._put("kernel", lambda: function(*args), _name_of(function))
            return
        if self._graph is None:
            self._put("kernel", functools.partial(_guarded, function, args), _name_of(function))
            return
        tracer, before = _Tracer(self._graph.nodes), len(self._graph.nodes)
        _tracing.tracer = tracer
        try:
            with torch.inference_mode(False), torch.no_grad(), tracer:
                function(*args)
        finally:
            _tracing.tracer = None
            tracer.restore()
        self._graph.touched |= set(tracer.touched)
        self._places |= {at: (ref, self.place) for at, ref in tracer.touched.items()}
        self._graph.kinds.append("kernel")
        self._graph.parts.append((function.__name__, len(self._graph.nodes) - before))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape
        assert target.dtype == source.dtype
        assert target.is_contiguous()
        assert source.is_contiguous()
        node, source_at, target_at = (
            functools.partial(target.copy_, source),
            self._place_of(source),
            self._place_of(target),
        )
        if source_at == target_at:
            self._put("copy", node)
            return
        assert self._graph is None, "no graph has a copy between devices"
        copies, receives = self._current_of(source_at), self._current_of(target_at)
        self._check_current()
        ready, copied = RecordedEvent(receives), RecordedEvent(copies)
        ready.mark_here()
        ready.hold(copies)
        copies.eager.append("copy")
        copies._enqueue(node, "copy")
        copied.mark_here()
        copied.hold(receives)
        copies.crossings += 1

    def host(self, function: int, user_data: int) -> None:
        call = _HOST_FUNCTION(function)
        self._put("host", lambda: call(user_data))

    def event(self) -> RecordedEvent:
        return RecordedEvent(self)

    @contextmanager
    def capture(self) -> Iterator[RecordedGraph]:
        self._raise()
        assert self._graph is None, "captures do not nest"
        self._graph = graph = RecordedGraph(self)
        try:
            yield graph
        finally:
            self._graph = None

    def pinned(self, num_bytes: int) -> torch.Tensor:
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.order.pin(memory)
        return memory

    def synchronize(self) -> None:
        assert self._graph is None, "cudaErrorStreamCaptureUnsupported"
        event = self.event()
        event.mark_here()
        event.wait()

    def beside(self, device: torch.device | None = None) -> RecordedStream:
        stream = type(self)(self.before, trace=self.trace, parent=self, place=device)
        self._beside.append(stream)
        return stream

    def anew(self) -> RecordedStream:
        return self

    @contextmanager
    def current(self) -> Iterator[None]:
        streams = self._currents.streams
        before = dict(streams)
        streams.pop(self.place, None)
        streams[self.place] = self
        try:
            yield
        finally:
            streams.clear()
            streams.update(before)

    def after(self, event: RecordedEvent) -> None:
        assert self._graph is None, "graphs of two streams are captured apart"
        event.hold(self)

    # -- the device ---------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException | None = None) -> None:
        """Break the context: no further node runs."""
        self.failure = error or RuntimeError("an illegal memory access was encountered")

    def close(self) -> None:
        for stream in self._beside:
            stream.close()
        self._queue.put(None)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _check_current(self) -> None:
        """Check that what is enqueued now comes to this stream."""
        current = next(reversed(self._currents.streams.values()), self._device)
        assert current is self, f"stream {self.number} is not the current one, which is stream {current.number}"

    def _current_of(self, place: torch.device | None) -> RecordedStream:
        found = self._currents.streams.get(place, None if place is not None else self._device)
        assert found is not None, f"a copy waits for the default stream of {place}"
        return found

    def _place_of(self, tensor: torch.Tensor) -> torch.device | None:
        """Return the device of memory; this stream's where no kernel had it yet, as pinned memory."""
        ref, place = self._places.get(tensor.untyped_storage().data_ptr(), (None, None))
        return self.place if ref is None or ref.expired() else place

    def _put(self, kind: str, node: Node, name: str = "") -> None:
        self._check_current()
        if self._graph is not None:
            self._graph.nodes.append(node)
            self._graph.kinds.append(kind)
            self._graph.parts.append((kind, 1))
        else:
            self.eager.append(kind)
            self._enqueue(node, name or kind)

    def _enqueue(self, node: Node, name: str) -> None:
        self._raise()
        if self._device.drops:
            return
        actor = self.order.enqueued(self.number, name)
        self._queue.put(functools.partial(self._run, functools.partial(run_as, actor, node)))

    def _run(self, node: Node) -> None:
        if self.turns is not None:
            self.turns.take(self.number)
        device = self._device
        if device.failure is None and self.before is not None:
            try:
                self.before(node)
            except Exception as error:
                device.failure = error
        if device.failure is not None:
            self.skipped += 1
            return
        self.ran += 1
        try:
            node()
        except Exception as error:
            device.failure = error

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        with Watch(self.order, ignores=lambda: False) if self.order.active else nullcontext():
            while (node := self._next()) is not None:
                node()

    def _next(self) -> Node | None:
        if self._queue.empty():
            self._idles()
        return self._queue.get()

    def _idles(self) -> None:
        if self.turns is not None:
            self.turns.idles(self.number)

    def _asks(self) -> None:
        if self.turns is not None:
            self.turns.asks()

    def _raise(self) -> None:
        failure = self._device.failure
        if failure is not None:
            raise DeviceFailed(f"{type(failure).__name__}: {failure}") from failure

    @property
    def _device(self) -> RecordedStream:
        return self if self.parent is None else self.parent


def _name_of(function: Callable[..., None]) -> str:
    return getattr(function, "__name__", type(function).__name__)


class _NoReadingBack(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in _READS_BACK:
            raise ReadsBack(f"{func} in a kernel")
        return func(*args, **(kwargs or {}))


def _guarded(function: Callable[..., None], args: tuple[object, ...]) -> None:
    with _NoReadingBack():
        function(*args)
