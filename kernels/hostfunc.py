"""`@hostfunc`: a Python function as a callback on the current CUDA stream, in graphs too, replayed at will.

A captured call is owned by its graph: when the last graph that can replay it is destroyed, its arguments are freed;
or earlier, by `release`. A call outside a capture is freed after its one run. Invariant: the driver never holds the
address of a Python object. It holds a number that is looked up when the callback runs, so a replay after a release is
a recorded error, not a crash. Not responsible for: the engine, which uses only native host functions.

WARNING. The callback takes the GIL on a thread of CUDA, which may hold a lock of the driver. A thread that holds the
GIL and waits for that lock (in a synchronising copy, a lazily loaded kernel, an allocation) stops the process for good.
Every such call must release the GIL, in every library of the process. For that reason the engine never uses this
module: its host nodes are C functions (shared_mem), or there are none. A callback must not call CUDA, and must not wait
for CUDA.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, ParamSpec, Protocol, overload

from kernels.cuda.host_launch import CudaHostDriver, HostFunctionError

P = ParamSpec("P")
OnError = Callable[[BaseException], None]

_MOST_ERRORS = 64
"""Number of errors whose text is stored; later ones are only counted."""
_SEMAPHORE_BYTES = 64
"""At least sizeof(sem_t); 32 in glibc."""
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class HostDriver(Protocol):
    """The part of CUDA that host functions need: the current stream, and its capture."""

    def capture_id(self) -> int:
        """Return the number of the current stream's capture, unique in the process; 0: it is not capturing."""

    def launch(self, function: int, user_data: int) -> None:
        """Enqueue `void function(void *user_data)`."""

    def own(self, user_data: int, destroy: int) -> bool:
        """Let the graph under capture call `destroy(user_data)` at its end; False when the driver cannot."""


@dataclass(slots=True, eq=False)
class HostCall:
    """One call in a graph. Release it when no replay can be in flight; a replay after that is a recorded error."""

    number: int
    capture_id: int
    name: str
    _functions: HostFunctions

    def release(self) -> None:
        """Free the function and its arguments. Idempotent."""
        self._functions.release(self)

    def __enter__(self) -> HostCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    run: Callable[[], object]
    on_error: OnError | None
    capture_id: int


@dataclass(slots=True)
class HostFunctionStats:
    """Counters since the start, and gauges of now."""

    runs: int = 0
    errors: int = 0
    waiting: int = 0
    """Calls outside a graph that have not run yet."""
    captured: int = 0
    """Calls that graphs own."""


class HostFunction(Generic[P]):
    """A function whose calls are enqueued; made by `hostfunc`."""

    def __init__(self, functions: HostFunctions, function: Callable[P, object], on_error: OnError | None) -> None:
        self._functions, self._on_error = functions, on_error
        self.function = function
        """The plain function."""
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", repr(function))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> HostCall | None:
        """Enqueue on the current stream; return the call when a graph captured it, else None.

        Holds references to the arguments. Raises HostFunctionError when an earlier host function failed.
        """
        self._functions.check()
        return self._functions.enqueue(self.__name__, lambda: self.function(*args, **kwargs), self._on_error)

    def __repr__(self) -> str:
        return f"<hostfunc {self.__name__}>"


@dataclass(eq=False)
class HostFunctions:
    """The calls of one process that CUDA may still make. Thread-safe."""

    driver: HostDriver
    _entries: dict[int, _Entry] = field(default_factory=dict)
    _owned: dict[int, int] = field(default_factory=dict)
    """Address of a semaphore that its graph posts at the end -> number of the call."""
    _errors: deque[tuple[str, BaseException]] = field(default_factory=lambda: deque(maxlen=_MOST_ERRORS))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _runs: int = 0
    _failures: int = 0

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._libc = ctypes.CDLL(None)
        self._libc.calloc.restype = ctypes.c_void_p
        for name in ("sem_init", "sem_trywait", "free"):
            getattr(self._libc, name).argtypes = [ctypes.c_void_p]
        self._libc.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        # CUDA reports the end of a graph on its own thread.
        # A C function receives it, so that the GIL is not taken there.
        self._sem_post = ctypes.cast(self._libc.sem_post, ctypes.c_void_p).value or 0
        self._trampoline = _HOST_FUNCTION(self._run)
        self._address = ctypes.cast(self._trampoline, ctypes.c_void_p).value or 0

    @overload
    def hostfunc(self, function: Callable[P, object], /) -> HostFunction[P]: ...

    @overload
    def hostfunc(self, /, *, on_error: OnError | None = None) -> Callable[[Callable[P, object]], HostFunction[P]]: ...

    def hostfunc(self, function: Callable[P, object] | None = None, /, *, on_error: OnError | None = None) -> Any:
        """Decorate a function: its calls run as callbacks of the current CUDA stream.

        Args:
            function: what to call; its result is dropped. It must not call CUDA, nor wait for CUDA.
            on_error: called with the exception, on the CUDA thread, under the same rules. The error is recorded too.
        """
        if function is None:
            return lambda inner: HostFunction(self, inner, on_error)
        return HostFunction(self, function, on_error)

    def enqueue(self, name: str, run: Callable[[], object], on_error: OnError | None) -> HostCall | None:
        """Enqueue one call on the current stream."""
        self._sweep()
        capture_id = self.driver.capture_id()
        number = next(self._numbers)
        with self._lock:
            self._entries[number] = _Entry(name, run, on_error, capture_id)
        try:
            if capture_id:
                self._give_to_graph(number)
            self.driver.launch(self._address, number)
        except BaseException:
            with self._lock:
                self._entries.pop(number, None)
            raise
        return HostCall(number, capture_id, name, self) if capture_id else None

    def release(self, what: HostCall | int) -> None:
        """Free one captured call, or all calls of a capture id (`HostCall.capture_id`). No replay may be in flight."""
        with self._lock:
            if isinstance(what, HostCall):
                self._entries.pop(what.number, None)
            else:
                for number in [n for n, entry in self._entries.items() if entry.capture_id == what != 0]:
                    del self._entries[number]

    def check(self) -> None:
        """Raise HostFunctionError when a host function failed since the last check."""
        with self._lock:
            if not self._errors:
                return
            (name, first), more = self._errors[0], len(self._errors) - 1
            self._errors.clear()
        text = f"{name}: {type(first).__name__}: {first}" + (f" (and {more} more)" if more else "")
        raise HostFunctionError(text) from first

    def stats(self) -> HostFunctionStats:
        """Return counters and gauges."""
        self._sweep()
        with self._lock:
            captured = sum(entry.capture_id != 0 for entry in self._entries.values())
            return HostFunctionStats(self._runs, self._failures, len(self._entries) - captured, captured)

    def _run(self, user_data: int | None) -> None:
        """The callback, on CUDA's thread. Nothing may leave it: ctypes would only print it."""
        with self._lock:
            entry = self._entries.get(user_data or 0)
            if entry is not None and not entry.capture_id:
                del self._entries[user_data or 0]
            self._runs += 1
        if entry is None:
            self._fail(
                "a released call", HostFunctionError("a graph was replayed after its host function was released")
            )
            return
        try:
            entry.run()
        except BaseException as error:
            self._fail(entry.name, error)
            if entry.on_error is not None:
                try:
                    entry.on_error(error)
                except BaseException as second:
                    self._fail(f"on_error of {entry.name}", second)

    def _fail(self, name: str, error: BaseException) -> None:
        with self._lock:
            self._failures += 1
            if len(self._errors) < _MOST_ERRORS:
                self._errors.append((name, error))

    def _give_to_graph(self, number: int) -> None:
        semaphore = self._libc.calloc(1, _SEMAPHORE_BYTES)
        if not semaphore or self._libc.sem_init(semaphore, 0, 0) != 0:
            raise MemoryError("no memory for a semaphore")
        if self.driver.own(semaphore, self._sem_post):
            with self._lock:
                self._owned[semaphore] = number
        else:
            self._libc.free(semaphore)

    def _sweep(self) -> None:
        """Free the calls of graphs that are gone."""
        with self._lock:
            for semaphore in [s for s in self._owned if self._libc.sem_trywait(s) == 0]:
                self._entries.pop(self._owned.pop(semaphore), None)
                self._libc.free(semaphore)

    def __repr__(self) -> str:
        return f"HostFunctions({self.stats()})"


_PROCESS = HostFunctions(CudaHostDriver())
hostfunc = _PROCESS.hostfunc
"""The decorator; see `HostFunctions.hostfunc`."""
check = _PROCESS.check
"""Raise the recorded errors of host functions; see `HostFunctions.check`."""
release = _PROCESS.release
"""Free captured calls; see `HostFunctions.release`."""
stats = _PROCESS.stats
"""Counters and gauges; see `HostFunctions.stats`."""
