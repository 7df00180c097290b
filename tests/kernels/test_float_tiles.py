"""Products of bfloat16 on x86-64's matrix unit, and oneDNN's next to them: a row's bits are those of any other call.

Where this CPU has no such unit, the library's source runs over emulated tiles. Not responsible for: speed.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_engine.model.linear import PackedByLibrary, PackedLinear
from kernels.float_tiles import STEP, FloatTiles
from kernels.library import native
from kernels.matrix_unit import float_trial, use_units
from tests.kernels.block_cases import rand
from tests.kernels.library_copy import NATIVE, OPTIONS

HERE = Path(__file__).parent
WIDTHS = (STEP, 17 * STEP, 33 * STEP)
"""One step; a block of steps and one more; two blocks and one more."""


def has_unit() -> bool:
    return int(native().lockstep_tiles_permission()) == 0 and bool(native().lockstep_has_float_tiles())


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if int(native().lockstep_cpu_level()) < 4 or int(native().lockstep_cpu_level()) > 5:
        pytest.skip("the kernel's other instructions are those of AVX-512")
    native()  # makes the OpenMP runtime visible
    made = tmp_path_factory.mktemp("float_tiles") / "tiles.so"
    source, tiles = str(NATIVE / "float_tiles.c"), str(HERE / "emulated_tiles.h")
    command = ["gcc", "-O2", "-fPIC", "-shared", *OPTIONS, "-include", tiles, f"-I{NATIVE}", source]
    subprocess.run([*command, "-lm", "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def product(library: ctypes.CDLL, matrix: FloatTiles, x_MK: torch.Tensor) -> torch.Tensor:
    out_MN = torch.full((len(x_MK), matrix.num_outputs), float("nan"), dtype=torch.bfloat16)
    scratch = torch.full((-(-len(x_MK) // 16) * 16 * matrix.num_inputs,), float("nan"), dtype=torch.bfloat16)
    x_MK = x_MK.contiguous()
    library.lockstep_float_tiles(ctypes.byref(matrix.arguments(x_MK, out_MN, scratch)))
    return out_MN


def exact(weight_NK: torch.Tensor, bias_N: torch.Tensor | None, x_MK: torch.Tensor) -> torch.Tensor:
    """The product in fp32, in the order of the manual's pseudo code of TDPBF16PS: even and odd inputs apart."""
    sums_MN = torch.zeros(len(x_MK), len(weight_NK), dtype=torch.float32)
    for k in range(0, weight_NK.shape[1], STEP):
        parts = []
        for first in (0, 1):
            part_MN = torch.zeros_like(sums_MN)
            for i in range(k + first, k + STEP, 2):
                # A product of two bf16 numbers is exact in float64; the sum is rounded once more, to fp32.
                wide = part_MN.double() + x_MK[:, i, None].double() * weight_NK[None, :, i].double()
                part_MN = wide.float()
            parts.append(part_MN)
        sums_MN += parts[0] + parts[1]
    if bias_N is not None:
        sums_MN += bias_N.float()
    return sums_MN.to(torch.bfloat16)


def cases(K: int, *, biased: bool) -> tuple[FloatTiles, torch.Tensor, torch.Tensor | None]:
    weight_NK, bias_N = rand(70, K).to(torch.bfloat16), rand(70, seed=3) if biased else None
    return FloatTiles(weight_NK, bias_N), weight_NK, bias_N


@pytest.mark.parametrize("K", WIDTHS)
@pytest.mark.parametrize("biased", [False, True])
def test_tiles_sum_as_the_manual_says(emulated: ctypes.CDLL, K: int, biased: bool) -> None:
    matrix, weight_NK, bias_N = cases(K, biased=biased)
    x_MK = rand(37, K, seed=5).to(torch.bfloat16)
    want = exact(weight_NK, bias_N, x_MK)
    assert torch.equal(product(emulated, matrix, x_MK), want)
    if has_unit():
        assert torch.equal(product(native(), matrix, x_MK), want)


def test_any_number_of_rows_on_any_number_of_threads_has_the_same_bits(emulated: ctypes.CDLL) -> None:
    matrix, _, _ = cases(17 * STEP, biased=True)
    x_MK = rand(300, 17 * STEP).to(torch.bfloat16)
    for library in (native(), emulated) if has_unit() else (emulated,):
        want = product(library, matrix, x_MK)
        for rows in (1, 2, 7, 15, 16, 17, 31, 32, 33, 100, 255, 256, 257):
            torch.set_num_threads(1 + rows % 3)
            assert torch.equal(product(library, matrix, x_MK[300 - rows :]), want[300 - rows :]), rows


@pytest.mark.skipif(not has_unit(), reason="needs AMX with bfloat16")
def test_calls_from_python_have_the_bits_of_the_native_product() -> None:
    matrix, _, _ = cases(WIDTHS[1], biased=True)
    x_MK = rand(20, WIDTHS[1]).to(torch.bfloat16)
    assert torch.equal(matrix(x_MK), product(native(), matrix, x_MK))
    assert torch.equal(matrix(x_MK[::2]), product(native(), matrix, x_MK[::2]))
    assert matrix(x_MK[:0]).shape == (0, 70)


@pytest.mark.skipif(not has_unit(), reason="needs AMX with bfloat16")
def test_layers_multiply_on_tiles_where_the_process_may_and_have_the_library_s_bits(tmp_path: Path) -> None:
    layer, x_BMK = torch.nn.Linear(2 * STEP, 70).bfloat16(), rand(3, 30, 2 * STEP).to(torch.bfloat16)
    use_units(lambda: tmp_path / "units.json", matrix=True)
    tiled = PackedLinear(layer)
    use_units(lambda: tmp_path / "units.json", matrix=False)
    plain = PackedLinear(layer)
    assert (type(tiled.packed), type(plain.packed)) == (FloatTiles, PackedByLibrary)
    assert (tiled.pairs, plain.pairs) == (False, True)
    assert torch.equal(tiled(x_BMK), plain(x_BMK))


def test_a_first_product_runs_in_a_child(emulated: ctypes.CDLL) -> None:
    assert float_trial(emulated.lockstep_float_tiles_alone) == ""


def test_wrong_sums_are_seen_in_the_child(tmp_path: Path) -> None:
    source, made = tmp_path / "wrong.c", tmp_path / "wrong.so"
    source.write_text("void wrong(const void *a) { (void)a; }")
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    assert float_trial(ctypes.CDLL(str(made)).wrong) == "is wrong"


def test_matrices_that_do_not_fit_tiles_are_left_to_the_library() -> None:
    assert FloatTiles.fits(torch.empty(3, 64, dtype=torch.bfloat16))
    assert not FloatTiles.fits(torch.empty(3, 65, dtype=torch.bfloat16))
    assert not FloatTiles.fits(torch.empty(3, 64))


@pytest.mark.parametrize("shape", [(256, 576), (8192, 576), (1024, 2048)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_oneDNN_gives_a_row_the_same_bits_in_calls_of_any_size(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """With AMX, a plain call of 33 bfloat16 rows differs from one of two."""
    N, K = shape
    packed = PackedByLibrary(rand(N, K).to(dtype), None)
    x_MK = rand(300, K, seed=7).to(dtype)
    want = torch.cat([packed(pair) for pair in x_MK.split(2)])
    for rows in (1, 3, 16, 32, 33, 34, 40, 64, 65, 97, 128, 200, 257, 300):
        assert torch.equal(packed(x_MK[:rows]), want[:rows]), rows
