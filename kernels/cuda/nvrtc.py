"""CUDA C at run time: compile a source file with NVRTC, launch its kernels on torch's current stream.

Invariant: everything is loaded before the first launch that may wait, since loading a module during a wait can
deadlock. Launches are captured like any other. Not responsible for: the kernels
(see flags.cu).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class CudaError(RuntimeError):
    """A driver or compiler call failed; the message has its name and its log."""


def check(result: tuple[Any, ...]) -> Any:
    """Return the results of a cuda-bindings call besides its status; raise CudaError when the status is not success."""
    status, *values = result
    if int(status) != 0:
        raise CudaError(str(status))
    return values[0] if len(values) == 1 else tuple(values)


class Kernel:
    """One compiled kernel. Owns nothing; its module lives as long as the process."""

    def __init__(self, function: Any, name: str, types: tuple[Any, ...]) -> None:
        self._function, self._name, self._types = function, name, types

    def __call__(self, grid: tuple[int, int], block: int, *values: int) -> None:
        """Launch on torch's current stream: grid (x, y), `block` threads, arguments as plain numbers and addresses."""
        from cuda.bindings import driver

        stream = torch.cuda.current_stream().cuda_stream
        arguments = (values, self._types)
        check(driver.cuLaunchKernel(self._function, *grid, 1, block, 1, 1, 0, stream, arguments, 0))

    def __repr__(self) -> str:
        return f"<Kernel {self._name}>"


def compile_cubin(source: str, name: str, architecture: str) -> bytes:
    """Return machine code of CUDA C for an architecture like "sm_90"; needs no GPU."""
    from cuda.bindings import nvrtc

    program = check(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status) != 0:
        text = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, text))
        raise CudaError(f"{name}: {status}\n{text.decode()}")
    code = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, code))
    return bytes(code)


@functools.cache
def load(path: Path) -> Any:
    """Return the loaded module of a source file, compiled for the current device. Call it before any capture."""
    from cuda.bindings import driver

    torch.cuda.init()
    major, minor = torch.cuda.get_device_capability()
    torch.cuda.current_stream().synchronize()  # the primary context is current from here on
    return check(driver.cuModuleLoadData(compile_cubin(path.read_text(), path.name, f"sm_{major}{minor}")))


def kernel(path: Path, name: str, types: Sequence[Any]) -> Kernel:
    """Return one kernel of a source file; `types` are the ctypes of its parameters."""
    from cuda.bindings import driver

    return Kernel(check(driver.cuModuleGetFunction(load(path), name.encode())), name, tuple(types))


POINTER, INT, UINT, ULONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_ulonglong
"""Parameter types of kernels."""
