"""Products are timed on both units, with equal results, and wrong flags are named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import kernels
from benchmarks.speed.bench_products import (
    LEAST_TILE_ROWS,
    best_ns,
    cell,
    main,
    measure,
    peaks,
    random_blocks,
    shape_of,
)
from kernels.blocks import BlockKind, LinearCall, can_multiply_blocks

pytestmark = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")


def test_a_product_has_a_figure_for_each_unit_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shapes", "64x64,32x96", "--rows", "1,5", "--kinds", "q4", "--rounds", "1"]) == 0
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| q4")]
    assert [(line[2].strip(), line[3].strip()) for line in lines] == [
        ("64 x 64", "1"),
        ("64 x 64", "5"),
        ("32 x 96", "1"),
        ("32 x 96", "5"),
    ]
    assert all(float(line[4].split("(")[0]) >= 0 for line in lines)


def test_a_share_needs_a_peak() -> None:
    assert cell(100.0, 400.0) == "100 (25.0%)"
    assert cell(100.0, math.nan) == "100"
    assert cell(math.nan, 400.0) == "-"
    assert all(value > 0 for value in peaks().values())


def test_without_a_matrix_unit_only_the_vector_unit_is_timed() -> None:
    weights = random_blocks(BlockKind.Q8, False, (32, 64))
    vector, matrix = measure(weights, 8, 1, tiles=False)
    assert vector > 0
    assert math.isnan(matrix)


def test_the_shortest_round_counts() -> None:
    weights = random_blocks(BlockKind.Q4, True, (32, 32))
    x_MK = weights.scales.new_ones(4, 32).float()
    one, other = best_ns([LinearCall(weights, x_MK, 0)] * 2, 3)
    assert 0 < one < math.inf
    assert 0 < other < math.inf


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--shapes", "64x48"], "'64x48' is not OUTPUTSxINPUTS with inputs that 32 divides"),
        (["--shapes", "64"], "'64' is not OUTPUTSxINPUTS"),
        (["--rows", "0"], "'0' is no number of rows"),
        (["--kinds", "q5"], "'q5' is none of q4, q8"),
        (["--rounds", "0"], "--rounds: at least 1"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
    assert shape_of("64x96") == (64, 96)


def test_the_fewest_rows_of_a_tile_are_those_of_the_kernel() -> None:
    header = (Path(kernels.__file__).parent / "native" / "amx.h").read_text()
    assert f"#define LEAST_TILE_ROWS {LEAST_TILE_ROWS} " in header
