"""The kernels of aarch64, cross-compiled and run under qemu's emulation of a user's process.

Invariant: a product over blocks has the bits that it has on this machine. Not responsible for: speed, which an emulator
does not show; the order of memory, which an emulator on x86-64 makes stricter than a machine's.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

import kernels
from kernels.blocks import BlockKind, PackedBlocks, can_multiply_blocks, quantised
from tests.kernels.block_cases import rand, with_offsets

NATIVE = Path(kernels.__file__).parent / "native"
COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64-static")
OPTIONS = ("-std=gnu11", "-static", "-pthread", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-w")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        COMPILER is None or EMULATOR is None, reason="needs gcc-aarch64-linux-gnu and qemu-user-static of Debian"
    ),
    pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("aarch64") / "block_products"
    baseline = made.with_name("baseline.o")  # linked, and not called by any test
    compile_ = [str(COMPILER), *OPTIONS, f"-I{NATIVE}"]
    subprocess.run([*compile_, "-O0", "-c", str(NATIVE / "baseline.c"), "-o", str(baseline)], check=True)
    sources = [*(NATIVE / name for name in ("aarch64_dot.c", "dispatch.c", "team.c")), baseline]
    program = [Path(__file__).with_name("block_products.c"), *sources]
    subprocess.run([*compile_, "-O2", *map(str, program), "-lm", "-o", str(made)], check=True)
    return made


def message(product: PackedBlocks, x_MK: torch.Tensor) -> bytes:
    """Return a product as block_products.c reads it."""
    parts = [
        b"" if part is None else part.view(torch.uint8).numpy().tobytes()
        for part in (product.quants, product.scales, product.offsets, product.bias)
    ]
    head = (int(product.kind), product.num_outputs, product.num_inputs, len(x_MK), *map(len, parts))
    return struct.pack("<8q", *head) + b"".join(parts) + x_MK.numpy().tobytes()


def on(cpu: str, program: Path, sent: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [str(EMULATOR), "-cpu", cpu, str(program)]
    return subprocess.run(command, input=sent, capture_output=True, check=False)


def test_products_over_blocks_have_the_bits_of_this_machine(program: Path) -> None:
    matrices = [
        partial(quantised, kind=BlockKind.Q4),
        partial(quantised, kind=BlockKind.Q8),
        lambda weight_NK: with_offsets(*weight_NK.shape),
    ]
    products = [
        (PackedBlocks(matrix(rand(N, K)), bias_N), rand(rows, K, seed=rows))
        for matrix in matrices
        for N, K, bias_N in ((576, 576, None), (70, 1536, rand(70, seed=2)))
        for rows in (1, 2, 7, 33, 128)
    ]
    done = on("max", program, b"".join(message(product, x_MK) for product, x_MK in products))
    assert (done.returncode, done.stderr) == (0, b"")
    found = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32)
    wanted = [product(x_MK) for product, x_MK in products]
    for want_MN, got_n in zip(wanted, found.split([want.numel() for want in wanted]), strict=True):
        assert torch.equal(got_n.view_as(want_MN), want_MN)


def test_a_cpu_without_dot_products_of_bytes_has_no_such_products(program: Path) -> None:
    """Armv8.0's: the library says so, and calls no instruction that the CPU does not know."""
    assert on("cortex-a53", program, b"").returncode == 2
