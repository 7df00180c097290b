"""The kernels of aarch64, cross-compiled and run under qemu's emulation of a user's process.

Invariant: a product over blocks has the bits that it has on this machine. Not responsible for: speed, which an emulator
does not show; the order of memory, which an emulator on x86-64 makes stricter than a machine's.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import kernels
from kernels.blocks import BLOCK, PackedBlocks, can_multiply_blocks
from tests.kernels.block_cases import CASES, WIDTHS, rand

NATIVE = Path(kernels.__file__).parent / "native"
COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64-static")
UNITS = {"max": 9, "neoverse-n1": 8}
"""An emulated CPU -> the level of dispatch.c: with products of byte matrices, and with dot products only."""
OPTIONS = ("-std=gnu11", "-pthread", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-w")

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
    compile_ = [str(COMPILER), *OPTIONS, f"-I{NATIVE}", "-c"]

    def compile_one(name: str) -> Path:
        source = NATIVE / name if (NATIVE / name).exists() else Path(__file__).with_name(name)
        # baseline.c is linked, and not called by any test.
        options = ["-O0" if name == "baseline.c" else "-O2", str(source), "-o", f"{made}-{name}.o"]
        subprocess.run([*compile_, *options], check=True)
        return Path(f"{made}-{name}.o")

    sources = ("aarch64_dot.c", "aarch64_i8mm.c", "baseline.c", "dispatch.c", "team.c", "block_products.c")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    link = [str(COMPILER), "-static", "-pthread", *map(str, objects), "-lgomp", "-lm", "-o", str(made)]
    subprocess.run(link, check=True)
    return made


def message(product: PackedBlocks, x_MK: torch.Tensor) -> bytes:
    """Return a product as block_products.c reads it."""
    parts = [
        b"" if part is None else part.view(torch.uint8).numpy().tobytes()
        for part in (product.quants, product.scales, product.offsets, product.bias)
    ]
    head = (int(product.kind), product.num_outputs, product.num_inputs, len(x_MK), *map(len, parts))
    return struct.pack("<8q", *head) + b"".join(parts) + x_MK.numpy().tobytes()


def on(cpu: str, program: Path, sent: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [str(EMULATOR), "-cpu", cpu, str(program), *arguments]
    return subprocess.run(command, input=sent, capture_output=True, check=False)


def product_of(kind: str, N: int, K: int, bias_N: torch.Tensor | None = None) -> PackedBlocks:
    return PackedBlocks(CASES[kind](N, K), bias_N)


@pytest.fixture(scope="module")
def products() -> list[tuple[PackedBlocks, torch.Tensor]]:
    """Every width of a model, 1 to 128 rows, and outputs that fill a group or do not."""
    made = []
    for kind in CASES:
        for K in WIDTHS:
            product = product_of(kind, 33, K)
            made += [(product, rand(rows, K, seed=rows)) for rows in (1, 2, 3, 4, 7)]
        product, x_MK = product_of(kind, 70, 33 * BLOCK, rand(70, seed=2)), rand(128, 33 * BLOCK)
        made += [(product, x_MK[128 - rows :].contiguous()) for rows in range(1, 129)]
    return made


@pytest.mark.parametrize(("cpu", "level"), UNITS.items())
def test_products_over_blocks_have_the_bits_of_this_machine(
    program: Path, products: list[tuple[PackedBlocks, torch.Tensor]], cpu: str, level: int
) -> None:
    assert on(cpu, program, b"", "level").stdout == b"%d\n" % level
    done = on(cpu, program, b"".join(message(product, x_MK) for product, x_MK in products))
    assert (done.returncode, done.stderr) == (0, b"")
    found = torch.frombuffer(bytearray(done.stdout), dtype=torch.int32)
    wanted = [product(x_MK).view(torch.int32) for product, x_MK in products]
    for want_MN, got_n in zip(wanted, found.split([want.numel() for want in wanted]), strict=True):
        assert torch.equal(got_n.view_as(want_MN), want_MN)


def test_a_cpu_without_dot_products_of_bytes_has_no_such_products(program: Path) -> None:
    """Armv8.0's: the library says so, and calls no instruction that the CPU does not know."""
    assert on("cortex-a53", program, b"").returncode == 2
