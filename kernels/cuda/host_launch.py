"""Host functions through the CUDA driver: enqueue a C function, query a capture, make a graph own a callback.

Invariant: function and user data reach the driver as plain numbers, and no callback needs the GIL. So
libcuda is called through ctypes: cuda-bindings (13.3, runtime and driver alike) puts its own trampoline into the
graph, which takes the GIL and frees its argument after the first run; a replay finds nothing there. Not responsible
for: Python functions (see kernels/hostfunc.py), the C functions that the engine enqueues (see
gpu_engine/step/post_buffers.py).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from kernels.cuda.nvrtc import CudaError, check


class HostFunctionError(RuntimeError):
    """A host function raised on the CUDA thread; the first error is the cause, the message counts the others."""


class CudaHostDriver:
    """CUDA's driver, on torch's current stream.

    Args:
        low_latency: dispatch by spinning instead of by an interrupt, where the driver has it (CUDA 13.2):
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
            # The last reference calls the destructor, later, on its own thread: only then may the semaphore be freed.
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

    Both numbers must be valid for as long as a graph can be replayed. Raises CudaError when the driver refuses.
    """
    enqueue(_libcuda(), torch.cuda.current_stream().cuda_stream, function, user_data, low_latency=low_latency)


def enqueue(library: ctypes.CDLL, stream: int, function: int, user_data: int, *, low_latency: bool = False) -> None:
    """As `launch_host_function`, on a stream's handle and with a driver library of the caller's."""
    handle, address, argument = (ctypes.c_void_p(number) for number in (stream, function, user_data))
    if low_latency and spins(library):
        status = library.cuLaunchHostFunc_v2(handle, address, argument, ctypes.c_uint(_SPIN_WAIT))
    else:
        status = library.cuLaunchHostFunc(handle, address, argument)
    if status != 0:
        raise CudaError(f"cuLaunchHostFunc: {_name(library, status)}")


def spins(library: ctypes.CDLL) -> bool:
    """Return whether a driver library dispatches host functions by spinning on request."""
    version = ctypes.c_int()
    status = library.cuDriverGetVersion(ctypes.byref(version))
    return status == 0 and version.value >= _FIRST_WITH_SPIN_WAIT and hasattr(library, "cuLaunchHostFunc_v2")


def has_low_latency_dispatch() -> bool:
    """Return whether this machine's driver can dispatch host functions by spinning."""
    return spins(_libcuda())


@functools.cache
def _libcuda() -> ctypes.CDLL:
    """Return the driver, which torch has loaded already. Calls release the GIL."""
    return ctypes.CDLL("libcuda.so.1")


def _name(library: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    found = library.cuGetErrorName(status, ctypes.byref(text)) == 0 and text.value
    return text.value.decode() if found and text.value else f"CUDA error {status}"
