"""The interpreter that the tests quicken has the values of Triton's own, for every pair of kinds of operands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]


@triton.jit
def pairs_kernel(x, y, sums, products, quotients, chosen, rows, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b, first = tl.load(x + at), tl.load(y + at), tl.load(x)
    tl.store(sums + at, (a + b + 1 + first - 3).to(tl.float64))
    tl.store(sums + N + at, (2 + b - a * 1.5 + a * 100 + b * 100.0).to(tl.float64))
    tl.store(products + at, (a * b * 2 * first + a * 100.0).to(tl.float64))
    tl.store(quotients + at, (a / (b * b + 1) + a / 2 + a / 2.0).to(tl.float64))
    tl.store(chosen + at, tl.where(a < b, a, b).to(tl.float64))
    tl.store(chosen + N + at, tl.where((a > 0) & (b <= 2) & (a != first), a, 0.0).to(tl.float64))
    grid = a[:, None] + b[None, :] * 2
    tl.store(rows + at[:, None] * N + at[None, :], grid.to(tl.float64))
    tl.store(rows + N * N + at, tl.sum(grid, axis=1).to(tl.float64))


def values() -> bytes:
    """Return the bytes of what the kernel computes for each pair of types."""
    found = []
    for one in DTYPES:
        for other in DTYPES:
            if (one is torch.uint8) == (other is torch.uint8):  # division of signed and unsigned numbers is refused
                x, y = (
                    torch.arange(start, start + 8).to(dtype)
                    for start, dtype in ((1, one), (-3 * (other is not torch.uint8), other))
                )
                parts = [torch.zeros(size, dtype=torch.float64) for size in (16, 8, 8, 16, 72)]
                pairs_kernel[(1,)](x, y, *parts, 8)
                found += parts
    return torch.cat(found).numpy().tobytes()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="for Triton's interpreter")
def test_values_are_those_of_the_plain_interpreter() -> None:
    code = f"from {__name__} import values; import sys; sys.stdout.buffer.write(values())"
    plain = subprocess.run([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, check=True).stdout
    assert values() == plain
    assert len(plain) > 10_000
