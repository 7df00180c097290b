"""Host functions through the CUDA driver: enqueue a C function, ask about a capture, give a graph something to own.

One invariant: function and user data reach the driver as the numbers that they are. (The runtime's Python binding wraps
them in memory that is freed after the first run, so a replay finds nothing there; it is not used.) Not here: Python
functions (kernels/hostfunc.py), and which C functions the engine enqueues.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.cuda.nvrtc import check


class HostFunctionError(RuntimeError):
    """A host function raised on the CUDA thread; the first error is the cause, the message counts the others."""


class CudaHostDriver:
    """CUDA through cuda-bindings, on torch's current stream.

    Args:
        low_latency: dispatch by spinning instead of by an interrupt, where driver and bindings have it (CUDA 13.2):
            quicker by some 30 microseconds, and a core is busy while a graph with host nodes runs.
    """

    def __init__(self, *, low_latency: bool = False) -> None:
        self.low_latency = low_latency

    def capture_id(self) -> int:
        """Ask the current stream."""
        from cuda.bindings import driver

        status, number, _ = self._capture()
        if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            return int(number)
        if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED:
            raise HostFunctionError("the capture of this stream has failed already")
        return 0

    def launch(self, function: int, user_data: int) -> None:
        """Enqueue on the current stream."""
        launch_host_function(function, user_data, low_latency=self.low_latency)

    def own(self, user_data: int, destroy: int) -> bool:
        """Move a reference of a user object into the graph; its executables take references of their own."""
        from cuda.bindings import driver

        graph = self._capture()[2]
        flag = int(driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
        status, created = driver.cuUserObjectCreate(user_data, driver.CUhostFn(destroy), 1, flag)
        if int(status) != 0:
            return False
        move = int(driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE)
        (status,) = driver.cuGraphRetainUserObject(graph, created, 1, move)
        if int(status) != 0:
            # The last reference calls the destructor, later, on its own thread: the semaphore is then not ours to free.
            raise HostFunctionError(f"cuGraphRetainUserObject: {status}")
        return True

    @staticmethod
    def _capture() -> tuple[Any, Any, Any]:
        """Return status, id and graph of the current stream's capture."""
        from cuda.bindings import driver

        status, number, graph, *_ = check(driver.cuStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream))
        return status, number, graph


_SPIN_WAIT = 1
"""CU_HOST_TASK_SPINWAIT."""
_FIRST_WITH_SPIN_WAIT = 13020
"""CUDA version."""


def launch_host_function(function: int, user_data: int, *, low_latency: bool = False) -> None:
    """Enqueue the C function `void function(void *user_data)` on torch's current stream; captured like any launch.

    The driver keeps the two numbers as they are (the runtime's Python binding would wrap them in memory that is freed
    after one run, so it is not used here). Both must be valid for as long as a graph can be replayed.
    """
    from cuda.bindings import driver

    stream = torch.cuda.current_stream().cuda_stream
    if low_latency and has_low_latency_dispatch():
        check(driver.cuLaunchHostFunc_v2(stream, driver.CUhostFn(function), user_data, _SPIN_WAIT))
    else:
        check(driver.cuLaunchHostFunc(stream, driver.CUhostFn(function), user_data))


def has_low_latency_dispatch() -> bool:
    """Return whether driver and bindings can dispatch host functions by spinning."""
    from cuda.bindings import driver

    return hasattr(driver, "cuLaunchHostFunc_v2") and int(check(driver.cuDriverGetVersion())) >= _FIRST_WITH_SPIN_WAIT
