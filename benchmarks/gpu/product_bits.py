"""The section `products` of `bench_gpu`: bits and time of a model's products, by the number of rows.

Invariant: a row counts as equal only if all its bits are those that it has in the smallest tile.
Not responsible for: whole engines, whose answers tests/gpu/test_products.py compares.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks.gpu.bench_kernels import COLD_BYTES, time_us
from benchmarks.harness.tables import number
from gpu_engine.model.linear import BitChecks, InvariantLinear, random_rows

SHAPES = {
    "Llama 8B qkv": (6144, 4096),
    "Llama 8B output": (4096, 4096),
    "Llama 8B gate and up": (28_672, 4096),
    "Llama 8B down": (4096, 14_336),
    "Llama 8B head": (128_256, 4096),
    "SmolLM2 down": (576, 1536),
    "SmolLM2 head": (49_152, 576),
}
"""Outputs and inputs."""
ROWS = (1, 8, 16, 17, 32, 64, 65, 128, 192, 256, 512)
QUICK_ROWS = (1, 17, 65, 256)
HEADER = ["product", "rows", "kernel us", "cuBLAS us", "kernel's bits", "cuBLAS' bits", "the engine takes"]


def product_rows(device: str, quick: bool) -> tuple[list[list[str]], list[str]]:
    """Return a table's rows, and what must not be: bits of the kernel that depend on the number of rows."""
    cells, failures = list[list[str]](), list[str]()
    for name, (N, K) in SHAPES.items():
        if quick and "8B" in name:
            continue
        copies = [_linear(N, K, device, seed) for seed in range(max(1, min(16, COLD_BYTES // (2 * N * K))))]
        first, checks = copies[0], BitChecks()
        if not checks.kernel_agrees(first):
            failures.append(f"{name}: no kernel; the log says why")
            continue
        for rows in QUICK_ROWS if quick else ROWS:
            x = random_rows(first.weight, rows, rows)
            equal = torch.equal(first.by_kernel(x), first.by_kernel(x, smallest_tile=True))
            library = checks.library_agrees(first, rows)
            if not equal:
                failures.append(f"{name}: {rows} rows have other bits than in the smallest tile")
            ours = time_us([partial(linear.by_kernel, x) for linear in copies])
            theirs = time_us([partial(linear.by_library, x) for linear in copies])
            takes = "cuBLAS" if rows > 64 and library else "kernel"
            bits = ["equal" if same else "other" for same in (equal, library)]
            cells.append([name, str(rows), number(ours, 1), number(theirs, 1), *bits, takes])
        del copies, first
        torch.cuda.empty_cache()
    return cells, failures


def _linear(N: int, K: int, device: str, seed: int) -> InvariantLinear:
    made = nn.Linear(K, N, bias=False, device="meta").requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(N, K, generator=generator, device=device, dtype=torch.bfloat16) * K**-0.5
    made.weight = nn.Parameter(weight, requires_grad=False)
    return InvariantLinear(made)
