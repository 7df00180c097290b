"""Matrix products of Triton's interpreter that add their terms in order, as a GPU's matrix instructions do.

The interpreter multiplies with numpy, whose library sums in an order that depends on the CPU and on the block's shape.
Invariant: an element has the same bits in a block of any shape, and after any cut of its channels into parts. Not
responsible for: the order of an instruction's own terms, which is a GPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest


@contextmanager
def ordered_sums() -> Iterator[None]:
    """Add the terms of every product in this process in the order of their channels, after the sum that there is."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self: object, a: Any, b: Any, d: Any, *_: object) -> Any:
        dtype = d.data.dtype
        assert all(np.issubdtype(each.data.dtype, np.floating) for each in (a, b, d)), "the interpreter keeps bits"
        total_MN, a_MK, b_KN = d.data.copy(), a.data.astype(dtype), b.data.astype(dtype)
        for k in range(b_KN.shape[0]):
            total_MN += a_MK[:, k, None] * b_KN[k]
        return TensorHandle(total_MN, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield
