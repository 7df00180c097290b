"""`@hostfunc` in real graphs: replays, the ownership of arguments by the graph, errors, and both kinds of dispatch."""

from __future__ import annotations

import gc
import runpy
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from kernels.hostfunc import CudaHostDriver, HostFunctionError, HostFunctions

pytestmark = pytest.mark.gpu


class Argument:
    """An argument that can be referenced weakly."""


@pytest.fixture(params=[False, True], ids=["interrupt", "spin"])
def functions(request: pytest.FixtureRequest) -> HostFunctions:
    return HostFunctions(CudaHostDriver(low_latency=request.param))


def test_example_prints_twenties(root: Path) -> None:
    example = runpy.run_path(str(root / "examples/hostfunc.py"))
    assert example["main"]().tolist() == [20] * 10


def test_replays_count_and_arguments_are_freed_with_the_graph(functions: HostFunctions) -> None:
    seen = [0]

    @functions.hostfunc
    def count(argument: Argument) -> None:
        seen[0] += 1

    argument = Argument()
    watched = weakref.ref(argument)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        assert count(argument) is not None
    del argument
    with torch.cuda.stream(stream):
        for _ in range(100):
            graph.replay()
    stream.synchronize()
    functions.check()
    assert seen == [100]
    assert functions.stats().captured == 1
    graph.reset()
    del graph
    deadline_s = time.monotonic() + 30
    while functions.stats().captured:  # the driver destroys user objects on its own thread
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    gc.collect()
    assert watched() is None


def test_eager_call_is_ordered_with_device_work(functions: HostFunctions) -> None:
    x, host = torch.zeros(1, device="cuda"), torch.zeros(1, pin_memory=True)
    seen: list[float] = []

    @functions.hostfunc
    def look() -> None:
        seen.append(float(host[0]))

    for value in range(1, 6):
        x.fill_(value)
        host.copy_(x, non_blocking=True)
        look()
    torch.cuda.synchronize()
    functions.check()
    assert seen == [1, 2, 3, 4, 5]
    assert functions.stats().waiting == 0


def test_an_error_is_raised_at_the_next_check_and_the_stream_continues(functions: HostFunctions) -> None:
    reported = threading.Event()

    @functions.hostfunc(on_error=lambda error: reported.set())
    def fail() -> None:
        raise ValueError("on the CUDA thread")

    fail()
    torch.cuda.synchronize()
    assert reported.is_set()
    with pytest.raises(HostFunctionError, match="on the CUDA thread"):
        functions.check()


def test_a_release_before_a_replay_raises_an_error(functions: HostFunctions) -> None:
    @functions.hostfunc
    def nothing() -> None: ...

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call = nothing()
    assert call is not None
    call.release()
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(HostFunctionError, match="released"):
        functions.check()
