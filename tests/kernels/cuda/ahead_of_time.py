"""Compiles the kernels for a GPU that is not there: a Triton driver that loads and launches nothing.

The wrappers run as they would, over CPU tensors, so each kernel is compiled with the very types, strides and constants
that it gets on a device. Run in a process of its own: TRITON_INTERPRET must not be set before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

MAX_SHARED = 232_448
"""Bytes of shared memory that a program may have on compute capability 9.0."""


class _Utils:
    def __init__(self) -> None:
        self.binaries: list[tuple[str, bytes]] = []

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED, "multiprocessor_count": 132}

    def load_binary(self, name: str, binary: bytes, *_: object) -> tuple[int, int, int, int, int]:
        self.binaries.append((name, binary))
        return 0, 0, 0, 0, 1024

    def unload_module(self, *_: object) -> None: ...


class NoDevice:
    """Triton's driver protocol for compute capability 9.0."""

    def __init__(self) -> None:
        self.utils = _Utils()

    @property
    def binaries(self) -> list[tuple[str, bytes]]:
        """Name and machine code of each kernel, in order of first use."""
        return self.utils.binaries

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_, **__: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def install() -> NoDevice:
    """Make the driver without a device Triton's own."""
    driver = NoDevice()
    triton.runtime.driver.set_active(driver)
    return driver
