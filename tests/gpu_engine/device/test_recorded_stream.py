"""The recorded stream behaves as a CUDA stream does: order, asynchrony, capture, sticky errors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from tests.gpu_engine.device.recorded_stream import DeviceFailed, ReadsBack, RecordedStream, opaque

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture
def stream() -> Iterator[RecordedStream]:
    made = RecordedStream()
    yield made
    made.before = None
    made.close()


def test_capture_runs_nothing_and_a_replay_repeats_operations_in_order(stream: RecordedStream) -> None:
    x, y, host, count = torch.zeros(3), torch.zeros(3), torch.zeros(3), [1]
    emitted: list[object] = []
    note = CALLBACK(lambda data: emitted.append((data, host.tolist())))

    def body() -> None:
        y.copy_(torch.where(x > 1, x * 2, x + 1))
        x.add_(count[0])

    with stream.capture() as graph:
        stream.kernel(body)
        stream.copy(host, y)
        stream.host(ctypes.cast(note, ctypes.c_void_p).value or 0, 5)
    assert graph.kinds == ["kernel", "copy", "host"]
    assert (x.sum(), y.sum(), emitted) == (0, 0, [])
    count[0] = 100  # a number that was read from the host at capture
    for _ in range(3):
        graph.replay()
    stream.synchronize()
    assert emitted == [(5, [1.0] * 3), (5, [2.0] * 3), (5, [4.0] * 3)]
    assert x.tolist() == [3.0] * 3


@pytest.mark.parametrize("captured", [True, False])
def test_reading_back_is_an_error(stream: RecordedStream, captured: bool) -> None:
    x = torch.ones(3)

    def body() -> None:
        x.mul_(int(x.max()))

    if captured:
        with pytest.raises(ReadsBack), stream.capture():
            stream.kernel(body)
    else:
        stream.kernel(body)
        with pytest.raises(DeviceFailed, match="ReadsBack"):
            stream.synchronize()


def test_native_kernels_run_at_every_replay(stream: RecordedStream) -> None:
    x, seen = torch.zeros(1), []

    @opaque
    def native(tensor: torch.Tensor) -> None:
        seen.append(tensor.item())

    def body() -> None:
        x.add_(1)
        native(x)

    with stream.capture() as graph:
        stream.kernel(body)
    assert seen == []
    graph.replay()
    graph.replay()
    stream.kernel(body)
    stream.synchronize()
    assert seen == [1, 2, 3]


def test_after_an_error_no_host_function_runs(stream: RecordedStream) -> None:
    emitted: list[object] = []
    note = CALLBACK(emitted.append)
    address = ctypes.cast(note, ctypes.c_void_p).value or 0
    stream.host(address, 1)
    stream.synchronize()
    stream.fail()
    with pytest.raises(DeviceFailed, match="illegal memory access"):
        stream.host(address, 2)
    with pytest.raises(DeviceFailed):
        stream.synchronize()
    assert emitted == [1]
