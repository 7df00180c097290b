"""`@hostfunc` with a fake driver: real C callbacks on a separate thread, and graphs as lists of calls."""

from __future__ import annotations

import ctypes
import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from kernels.hostfunc import HostCall, HostFunction, HostFunctionError, HostFunctions

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass(eq=False)
class FakeDriver:
    """One stream with its own thread, as in CUDA; a captured graph is a list of (function, user data)."""

    owns: bool = True
    refuse: bool = False
    capture: int = 0
    nodes: list[tuple[int, int]] = field(default_factory=list)
    owned: list[tuple[int, int]] = field(default_factory=list)
    ran_on: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="cuda callbacks")
        self._thread.start()

    def _serve(self) -> None:
        while (node := self._queue.get()) is not None:
            function, user_data = node
            self.ran_on.append(threading.current_thread().name)
            CALLBACK(function)(user_data)

    def capture_id(self) -> int:
        return self.capture

    def launch(self, function: int, user_data: int) -> None:
        if self.refuse:
            raise RuntimeError("CUDA_ERROR_INVALID_HANDLE")
        if self.capture:
            self.nodes.append((function, user_data))
        else:
            self._queue.put((function, user_data))

    def own(self, user_data: int, destroy: int) -> bool:
        if self.owns:
            self.owned.append((user_data, destroy))
        return self.owns

    def replay(self) -> None:
        for node in self.nodes:
            self._queue.put(node)

    def destroy_graph(self) -> None:
        """Destroy a graph as the driver does: the destructors run on a thread that Python did not start."""
        self.nodes.clear()
        while self.owned:
            user_data, destroy = self.owned.pop()
            CALLBACK(destroy)(user_data)

    def synchronize(self) -> None:
        done = threading.Event()
        marker = CALLBACK(lambda _: done.set())
        self._queue.put((ctypes.cast(marker, ctypes.c_void_p).value or 0, 0))
        assert done.wait(60)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(10)


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    fake = FakeDriver()
    yield fake
    fake.close()


@pytest.fixture
def functions(driver: FakeDriver) -> HostFunctions:
    return HostFunctions(driver)


@pytest.fixture
def nothing(functions: HostFunctions) -> HostFunction[[]]:
    return functions.hostfunc(lambda: None)


class Argument:
    """An argument that can be referenced weakly."""


def captured(driver: FakeDriver, *calls: Callable[[], HostCall | None], capture: int = 7) -> list[HostCall]:
    driver.capture = capture
    made = [call() for call in calls]
    driver.capture = 0
    assert None not in made
    return [call for call in made if call is not None]


def test_call_outside_a_graph_runs_once_on_the_other_thread_and_frees_its_arguments(
    driver: FakeDriver, functions: HostFunctions
) -> None:
    seen: list[object] = []
    argument = Argument()
    watched = weakref.ref(argument)

    @functions.hostfunc
    def note(what: Argument, *, twice: bool) -> None:
        seen.append((type(what).__name__, twice))

    assert note(argument, twice=True) is None
    del argument
    driver.synchronize()
    functions.check()
    gc.collect()
    assert seen == [("Argument", True)]
    assert watched() is None
    assert driver.ran_on[0] == "cuda callbacks"
    stats = functions.stats()
    assert (stats.runs, stats.waiting, stats.captured) == (1, 0, 0)


def test_captured_calls_run_at_every_replay_and_the_end_of_their_graph_frees_the_arguments(
    driver: FakeDriver, functions: HostFunctions
) -> None:
    total, argument = [0], Argument()
    watched = weakref.ref(argument)

    @functions.hostfunc
    def increase(by: int, what: Argument) -> None:
        total[0] += by

    captured(driver, partial(increase, 1, argument), partial(increase, 1, argument))
    del argument
    assert total == [0]
    for _ in range(10):
        driver.replay()
    driver.synchronize()
    functions.check()
    assert total == [20]
    assert functions.stats().captured == 2
    assert watched() is not None
    driver.destroy_graph()
    assert functions.stats().captured == 0
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("how", ["call", "context", "capture"])
def test_a_release_frees_early_and_a_later_replay_raises_an_error(
    driver: FakeDriver, functions: HostFunctions, nothing: HostFunction[[]], how: str
) -> None:
    captured(driver, nothing, capture=1)
    first, second = captured(driver, nothing, nothing)
    match how:
        case "call":
            first.release()
            second.release()
        case "context":
            with first, second:
                driver.replay()
                driver.synchronize()
        case _:
            functions.release(first.capture_id)
    assert functions.stats().captured == 1, "the call of another capture stays"
    functions.check()
    driver.replay()
    driver.synchronize()
    with pytest.raises(HostFunctionError, match=r"released .*\(and 1 more\)"):
        functions.check()
    driver.destroy_graph()
    assert functions.stats().captured == 0


def test_without_user_objects_a_call_lives_until_its_release(
    driver: FakeDriver, functions: HostFunctions, nothing: HostFunction[[]]
) -> None:
    driver.owns = False
    (call,) = captured(driver, nothing)
    driver.destroy_graph()
    assert functions.stats().captured == 1
    call.release()
    assert functions.stats().captured == 0


def test_errors_are_recorded_reported_and_raised_at_the_next_call(driver: FakeDriver, functions: HostFunctions) -> None:
    reported: list[str] = []

    @functions.hostfunc(on_error=lambda error: reported.append(str(error)))
    def fail(text: str) -> None:
        raise ValueError(text)

    fail("first")
    fail_silently: HostFunction[[]] = functions.hostfunc(lambda: [][0])
    driver.synchronize()
    assert reported == ["first"]
    with pytest.raises(HostFunctionError, match="fail: ValueError: first") as caught:
        fail("second")
    assert isinstance(caught.value.__cause__, ValueError)
    functions.check()
    fail_silently()
    driver.synchronize()
    with pytest.raises(HostFunctionError, match="IndexError"):
        functions.check()
    assert functions.stats().errors == 2

    def worse(error: BaseException) -> None:
        raise KeyError("worse")

    functions.hostfunc(on_error=worse)(lambda: [][0])()
    driver.synchronize()
    with pytest.raises(HostFunctionError, match=r"IndexError.*\(and 1 more\)"):
        functions.check()


def test_a_refused_launch_holds_no_arguments(
    driver: FakeDriver, functions: HostFunctions, nothing: HostFunction[[]]
) -> None:
    driver.refuse = True
    with pytest.raises(RuntimeError, match="INVALID_HANDLE"):
        nothing()
    assert functions.stats().waiting == 0
