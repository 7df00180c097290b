"""Products on x86-64's matrix unit, over emulated tiles: the vector units' bits, for any rows, widths and threads.

The library's own source runs; only the six operations on tiles are emulated, after Intel's pseudo code. Not responsible
for: speed, and what the unit itself does, which no machine of the tests has.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.blocks import BLOCK, LinearCall, PackedBlocks
from kernels.library import native
from kernels.matrix_unit import trial
from tests.kernels.block_cases import CASES, WIDTHS, rand
from tests.kernels.library_copy import NATIVE, OPTIONS, SCALAR, build, package_copy, set_level

HERE = Path(__file__).parent
FORWARDS = (
    "test_masked_head.py",
    "test_quantised.py::test_a_row_has_the_same_bits_whatever_else_is_in_the_call",
    "test_quantised.py::test_rows_of_a_forward_that_threads_share_by_rows_are_those_of_one_thread",
    "test_mixtures.py::test_a_row_has_the_same_bits_in_any_company_and_on_every_unit",
    "test_latent.py::test_a_forward_of_many_rows_has_the_bits_of_few",
    "test_latent.py::test_rows_that_two_members_share_have_the_same_bits_in_smaller_calls",
    "recurrent/test_forwards.py::test_a_row_has_the_same_bits_with_any_drafts_and_in_any_company",
    "recurrent/test_forwards.py::test_rows_that_threads_share_by_rows_are_those_of_one_thread",
)
"""Tests of models whose calls of many rows are compared with calls of few, which fill no tile."""
UNITS = ("x86_64_v3", "x86_64_avxvnni", "x86_64_v4", "x86_64_vnni")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        int(native().lockstep_cpu_level()) != 5,
        reason="the emulated unit is the one with AVX-512 and VNNI",
    ),
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    native()  # makes the OpenMP runtime visible
    made = tmp_path_factory.mktemp("tiles") / "tiles.so"
    sources = [HERE / "tile_products.c", NATIVE / "team.c"]
    command = ["gcc", "-O2", "-fPIC", "-shared", *OPTIONS, f"-I{NATIVE}", *map(str, sources), "-lm", "-o", str(made)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(made))
    library.dots_of_tiles.restype = ctypes.c_int64
    return library


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def result(function: Any, product: PackedBlocks, x_MK: torch.Tensor, tile_rows: int = 0) -> str:
    """The hash of a product's bits."""
    call = LinearCall(product, x_MK, tile_rows)
    function(ctypes.byref(call.args))
    return hashlib.sha256(call.out_MN.view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("case", CASES)
def test_every_unit_and_plain_c_have_the_bits_of_tiles(emulated: ctypes.CDLL, case: str) -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    units = [native()[f"lockstep_block_linear_{u}"] for u in UNITS if u != "x86_64_avxvnni" or "avx_vnni" in flags]
    for K in WIDTHS:
        product = PackedBlocks(CASES[case](33, K), rand(33, seed=2))
        for rows in (1, 5, 33):
            x_MK = rand(rows, K, seed=rows)
            want = result(emulated.reference_block_linear, product, x_MK)
            assert result(emulated.lockstep_block_linear_emulated, product, x_MK, 1) == want, (K, rows)
            for unit in units:
                assert result(unit, product, x_MK) == want, (unit, K, rows)


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_rows_on_any_number_of_threads_has_the_same_bits(emulated: ctypes.CDLL, case: str) -> None:
    for N, K in ((33, BLOCK), (70, 37 * BLOCK)):  # one block; three panels
        product = PackedBlocks(CASES[case](N, K))
        x_MK = rand(128, K).to(torch.bfloat16 if case == "4 bits" else torch.float32)
        for rows in range(1, 129):
            torch.set_num_threads(1 + rows % 3)
            part_MK = x_MK[128 - rows :].contiguous()
            want = result(native().lockstep_block_linear, product, part_MK)
            before = emulated.dots_of_tiles()
            least = (16, 32, 48)[rows % 5 % 3]
            assert result(emulated.lockstep_block_linear_emulated, product, part_MK, least) == want, (K, rows)
            assert (emulated.dots_of_tiles() > before) == (rows >= least), rows
            assert emulated.tiles_in_use() == 0


@pytest.mark.parametrize(("case", "least"), [("4 bits", 8), ("4 bits with offsets", 12)])
def test_many_rows_that_fill_no_tile_share_one_with_the_rows_before_them(
    emulated: ctypes.CDLL, case: str, least: int
) -> None:
    product = PackedBlocks(CASES[case](33, BLOCK))

    def dots(rows: int) -> int:
        before = emulated.dots_of_tiles()
        result(emulated.lockstep_block_linear_emulated, product, rand(rows, BLOCK), 16)
        return int(emulated.dots_of_tiles() - before)

    assert dots(32) == dots(31) == dots(16 + least) > dots(16 + least - 1) == dots(16) > 0
    assert dots(64) == dots(48 + least) > dots(48 + least - 1) == dots(48)


def test_a_first_product_runs_in_a_child(emulated: ctypes.CDLL) -> None:
    assert trial(emulated.lockstep_block_linear_alone_emulated) == ""


def test_operations_on_tiles_are_those_of_the_compiler(tmp_path: Path) -> None:
    """Operands in another order would be other products; the emulation has the order by name."""
    code = []
    for options in ((f"-I{NATIVE}",), ("-DINTRINSICS", "-mamx-tile", "-mamx-int8")):
        made = tmp_path / f"{len(code)}.o"
        source = str(HERE / "tile_instructions.c")
        subprocess.run(["gcc", "-O2", "-w", "-pthread", *options, "-c", source, "-o", str(made)], check=True)
        listed = ["objdump", "-d", "--no-show-raw-insn", "-j", ".text.tiles", str(made)]
        listing = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
        code.append(
            [line.split(":", 1)[1].split() for line in listing.splitlines() if "tmm" in line or "tiler" in line]
        )
    assert len(code[0]) == 6
    assert code[0] == code[1]


@pytest.fixture(scope="module")
def over_tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, whose products of 16 rows and more run on tiles."""
    folder = tmp_path_factory.mktemp("package")
    package = package_copy(folder)
    set_level(package / "native" / "dispatch.c", 5)
    tiles = ("-include", str(HERE / "emulated_tiles.h"), "-DTILES_FROM(w)=1")
    build(package, ["x86_64_vnni.c", "dispatch.c", *SCALAR], ("-O1", *tiles))
    return folder


@pytest.mark.parametrize("name", FORWARDS)
def test_whole_forwards_over_tiles_have_the_bits_of_few_rows(root: Path, over_tiles: Path, name: str) -> None:
    """Forwards and masked heads run calls of many rows on tiles here."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"]
    # Of the dense models, one.
    command += ["-o", f"pythonpath={over_tiles} . client", "-k", "llama or not test_quantised"]
    command += [f"tests/gpu_engine/model/{name}"]
    done = subprocess.run(command, cwd=root, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " passed" in done.stdout
    assert "tiles: in use" in done.stderr
