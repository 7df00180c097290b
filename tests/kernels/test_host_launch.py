"""Host functions reach the driver with unchanged addresses: a fake driver library in C stores its arguments."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
from kernels.cuda.host_launch import enqueue, spins
from kernels.cuda.nvrtc import CudaError

SOURCE = """
#include <stdint.h>
uintptr_t given[4];
int version = 13000, answer = 0;
int cuDriverGetVersion(int *at) { *at = version; return 0; }
static int keep(void *stream, void *function, void *data, unsigned mode) {
    given[0] = (uintptr_t)stream; given[1] = (uintptr_t)function; given[2] = (uintptr_t)data; given[3] = mode;
    return answer;
}
int cuLaunchHostFunc(void *stream, void *function, void *data) { return keep(stream, function, data, 0); }
#ifdef SPINS
int cuLaunchHostFunc_v2(void *stream, void *function, void *data, unsigned mode) {
    return keep(stream, function, data, mode);
}
#endif
int cuGetErrorName(int status, const char **name) { *name = "CUDA_ERROR_INVALID_HANDLE"; return status != 400; }
"""
FUNCTION, DATA, STREAM = 0x7FFF_1234_5678, 0xFFFF_8765_4321, 0x1_2345_6789
"""Values wider than an int, which a call without argument types would truncate."""


def driver(folder: Path, *flags: str) -> ctypes.CDLL:
    source, library = folder / "driver.c", folder / "libcuda.so"
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", *flags, "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


def given(library: ctypes.CDLL) -> list[int]:
    return list((ctypes.c_size_t * 4).in_dll(library, "given"))


@pytest.mark.parametrize("low_latency", [False, True])
def test_the_driver_gets_the_function_itself(tmp_path: Path, low_latency: bool) -> None:
    library = driver(tmp_path)
    enqueue(library, STREAM, FUNCTION, DATA, low_latency=low_latency)
    assert given(library) == [STREAM, FUNCTION, DATA, 0]


@pytest.mark.parametrize(("version", "mode"), [(13010, 0), (13020, 1)])
def test_spinning_is_requested_if_the_driver_supports_it(tmp_path: Path, version: int, mode: int) -> None:
    library = driver(tmp_path, "-DSPINS")
    ctypes.c_int.in_dll(library, "version").value = version
    enqueue(library, STREAM, FUNCTION, DATA, low_latency=True)
    assert given(library) == [STREAM, FUNCTION, DATA, mode]
    assert spins(library) == bool(mode)
    enqueue(library, STREAM, FUNCTION, DATA)
    assert given(library)[3] == 0


@pytest.mark.parametrize(("status", "message"), [(400, "CUDA_ERROR_INVALID_HANDLE"), (999, "CUDA error 999")])
def test_the_error_of_a_refused_launch_names_the_reason(tmp_path: Path, status: int, message: str) -> None:
    library = driver(tmp_path)
    ctypes.c_int.in_dll(library, "answer").value = status
    with pytest.raises(CudaError, match=message):
        enqueue(library, STREAM, FUNCTION, DATA)
