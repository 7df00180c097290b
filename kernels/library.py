"""Loads the CPU kernels: one plain shared library, no Python ABI.

The parallel loops of a dense model's kernels need an OpenMP runtime and must share torch's: two runtimes would mean two
thread pools that spin against each other. So the library is linked without one, and torch's is made visible before it
is opened. Forwards over blocks and sampling have a team of threads of their own (native/team.h), of the size that
`torch.set_num_threads` gives. Not responsible for: the kernels (see native/).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch


class KernelLibraryMissing(ImportError):
    """The native kernels were not built; reinstall the package where a C compiler is installed."""


@functools.cache
def native() -> ctypes.CDLL:
    """Return the native kernels; raise KernelLibraryMissing when they were not built."""
    return ctypes.CDLL(native_path())


@functools.cache
def native_short() -> ctypes.PyDLL:
    """Return the same kernels, called with the GIL held: for calls of a microsecond, which would wait longer to get it
    back."""
    return ctypes.PyDLL(native_path())


@functools.cache
def native_path() -> str:
    """Return the library's file, with what it needs made visible; raise KernelLibraryMissing where there is none."""
    built = sorted(Path(__file__).parent.glob("_native*.so"))
    if not built:
        raise KernelLibraryMissing("kernels/_native*.so is missing: install the package with gcc available")
    ctypes.CDLL(openmp_of(Path(torch.__file__).parent), mode=ctypes.RTLD_GLOBAL)
    return str(built[0])


def openmp_of(package: Path) -> str:
    """Return the OpenMP runtime that the torch in the folder `package` brings, or the system's name for one."""
    # Some builds carry it next to their own libraries, and others in the folder that auditwheel makes.
    folders = (package / "lib", package.with_name("torch.libs"))
    bundled = [path for folder in folders for path in sorted(folder.glob("libgomp*.so*"))]
    return str(bundled[0]) if bundled else "libgomp.so.1"


def address(tensor: torch.Tensor) -> int:
    """Return the address of a CPU tensor's first element; the caller holds the tensor while the address is used."""
    assert tensor.device.type == "cpu", tensor.device
    return tensor.data_ptr()
