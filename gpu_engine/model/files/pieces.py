"""Reads pieces of a file into memory of their own.

Not by mapping it: pages of a mapping count as the process's memory until they are dropped. Not responsible for: the
meaning of the bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

_SLAB = 4 << 20
"""Bytes that are read at once: they stay in a core's cache while they are packed."""
GROUP = 32
"""Rows are read in groups, as products pack them."""
EXPERT = re.compile(r"(.*\.experts)\.(gate_up|down)\.(\d+)\.(weight|bias)")
"""A parameter of one expert's product (see model/experts.py): mixture, product, number, which of both."""


class Shaped(Protocol):
    """A tensor of a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""


S = TypeVar("S", bound=Shaped)


def check_parts(name: str, dims: int, parts: Sequence[S]) -> tuple[S, ...]:
    """Return the tensors that make the product `name` of one expert, or of all. Raises ValueError where they do not
    have one shape of so many dimensions."""
    shapes = [list(part.shape) for part in parts]
    if any(shape != shapes[0] or len(shape) != dims for shape in shapes):
        raise ValueError(
            f"{name} is made of {' and '.join(map(str, shapes))}, which have not one shape of {dims} numbers"
        )
    return tuple(parts)


def _memory(count: int) -> npt.NDArray[np.uint8]:
    memory: npt.NDArray[np.uint8] = torch.empty(count, dtype=torch.uint8).numpy()  # aligned as kernels like it
    return memory


class FileBytes:
    """An open file. For any thread.

    Args:
        path: the file, which must not change meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._file).st_size

    def read(self, start: int, count: int) -> npt.NDArray[np.uint8]:
        """Return bytes of the file. Raises ValueError where it has become shorter."""
        return self._into(_memory(count), start)

    def _into(self, into: npt.NDArray[np.uint8], start: int) -> npt.NDArray[np.uint8]:
        view: Any = into
        count = len(into)
        done = 0
        while done < count:
            got = os.preadv(self._file, [memoryview(view)[done:]], start + done)
            if not got:
                raise ValueError(f"{self.path.name} ends at byte {start + done}, and {count - done} more are needed")
            done += got
        return into

    def slabs(self, start: int, rows: int, num_bytes: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """Yield the number of a row, a multiple of 32, and the bytes of the next rows from it on, [n, bytes of a row].

        The rows begin at `start`, and take `num_bytes` together. The bytes are valid until the next ones are asked for.
        """
        if not rows:
            return
        row_bytes = num_bytes // rows
        step = max(1, _SLAB // max(1, row_bytes) // GROUP) * GROUP
        into = _memory(min(step, rows) * row_bytes)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            raw = self._into(into[: count * row_bytes], start + first * row_bytes)
            yield first, raw.reshape(count, row_bytes)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __repr__(self) -> str:
        return f"<FileBytes {self.path}>"
