"""The kernels of aarch64, cross-compiled and run under qemu's emulation of a user's process.

Invariant: a product over blocks, and a whole forward, has the bits that it has on this machine. Not responsible for:
speed, which an emulator does not show; the order of memory, which an emulator on x86-64 makes stricter than a
machine's.
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

from gpu_engine.model.loader import load_model
from gpu_engine.model.quantised.native import NativeForward
from gpu_engine.model.states import SequenceStates
from kernels.accept import gumbel_noise
from kernels.blocks import BLOCK, PackedBlocks, can_multiply_blocks
from tests.gpu_engine import hybrids, tiny
from tests.gpu_engine.harness import config
from tests.gpu_engine.model import latent_families
from tests.gpu_engine.model.model_logits import context, some_ids
from tests.kernels.block_cases import CASES, WIDTHS, rand
from tests.kernels.forward_images import ForwardImage
from tests.kernels.library_copy import NATIVE, OPTIONS
from tests.kernels.vector_units import assert_same_on_every_unit

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64-static")
UNITS = {"max": 9, "neoverse-n1": 8}
"""An emulated CPU -> the level of dispatch.c: with products of byte matrices, and with dot products only."""
FORWARDS = (
    *("llama", "qwen3", "gemma2", "gemma4", "gemma4 moe", "gpt_oss", "cohere2", "mixtral"),
    *("bamba", "falcon_h1 with norms", "lfm2 moe", "nemotron_h moe", "qwen3_5", "qwen3_5 moe"),
    *("deepseek_v3", "minicpm3"),
)
"""Families that have each part of a native forward between them."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        COMPILER is None or EMULATOR is None, reason="needs gcc-aarch64-linux-gnu and qemu-user-static of Debian"
    ),
    pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2"),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The library with each program, by the program's name."""
    made = tmp_path_factory.mktemp("aarch64") / "of"
    compile_ = [str(COMPILER), *OPTIONS, f"-I{NATIVE}", "-c"]

    def compile_one(name: str) -> Path:
        source = NATIVE / name if (NATIVE / name).exists() else Path(__file__).with_name(name)
        # baseline.c is linked, and not called by any test.
        options = ["-O0" if name == "baseline.c" else "-O2", str(source), "-o", f"{made}-{name}.o"]
        subprocess.run([*compile_, *options], check=True)
        return Path(f"{made}-{name}.o")

    sources = ("aarch64_dot.c", "aarch64_i8mm.c", "baseline.c", "dispatch.c", "team.c")
    names = ("block_products", "forward_image")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, (*sources, *(f"{name}.c" for name in names))))
    programs = {}
    for name, own in zip(names, objects[len(sources) :], strict=True):
        programs[name] = made.with_name(name)
        linked = [*map(str, objects[: len(sources)]), str(own), "-lgomp", "-lm", "-o", str(programs[name])]
        subprocess.run([str(COMPILER), "-static", "-pthread", *linked], check=True)
    return programs


@pytest.fixture(scope="module")
def program(programs: dict[str, Path]) -> Path:
    return programs["block_products"]


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


def saved(family: str, folder: Path) -> Path:
    if family in latent_families.FAMILIES:
        return tiny.save(latent_families.FAMILIES[family](), folder)
    return hybrids.save(family, folder)


@torch.inference_mode()
def forward_of(folder: Path, dtype: str) -> tuple[bytes, torch.Tensor]:
    """Return a forward of 60 rows as forward_image.c reads it, and its logits here."""
    model = load_model(config(model=str(folder), dtype=dtype, quantization="q4"))
    assert isinstance(model.fused.forward, NativeForward), model.fused.left
    ids_BP, ctx = some_ids(3, 20), context(model, 3, 20)
    if model.recurrent:
        states = SequenceStates(model.recurrent, num_slots=3, max_rows=2)
        ctx.recurrent = states.forward_of([0, 1, 2], [0] * 3, [20] * 3, [20] * 3)
    model.logits(ids_BP, ctx)
    image = ForwardImage(model.fused.forward._forward)
    return image.message(), model.logits(ids_BP, ctx).clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FORWARDS)
def test_a_forward_has_the_bits_of_this_machine(
    programs: dict[str, Path], family: str, dtype: str, tmp_path: Path
) -> None:
    sent, want_NV = forward_of(saved(family, tmp_path), dtype)
    for cpu in UNITS:
        done = on(cpu, programs["forward_image"], sent)
        assert (done.returncode, done.stderr) == (0, b"")
        assert torch.equal(torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view_as(want_NV), want_NV), cpu


def test_the_noise_of_sampling_has_the_bits_of_this_machine_and_of_each_of_its_units(
    programs: dict[str, Path],
) -> None:
    where = (1 << 63 | 77, 123456, 4096)
    want_V = gumbel_noise(*where)
    assert_same_on_every_unit(lambda: gumbel_noise(*where))
    for cpu in UNITS:
        done = on(cpu, programs["forward_image"], b"", *map(str, where))
        assert (done.returncode, done.stderr) == (0, b"")
        assert torch.equal(torch.frombuffer(bytearray(done.stdout), dtype=torch.float32), want_V), cpu


def test_a_cpu_without_dot_products_of_bytes_has_no_such_products(program: Path) -> None:
    """Armv8.0's: the library says so, and calls no instruction that the CPU does not know."""
    assert on("cortex-a53", program, b"").returncode == 2
