"""The choice between a vector and a matrix unit: by measured time, and only with equal bits.

Not responsible for: products.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.blocks import BLOCK_FORMS, BlockKind, PackedBlocks, can_multiply_blocks, quantised
from kernels.library import native
from kernels.matrix_unit import BUDGET_S, MatrixUnit, Units, trial, use_units
from tests.kernels.block_cases import rand

pytestmark = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")


class Machine:
    """Computes every product on the vector unit; `tiles` and `vectors` are microseconds by rows."""

    def __init__(self, tiles: Callable[[int], float], vectors: Callable[[int], float], wrong_width: int = 0) -> None:
        self._times, self._wrong_width = (vectors, tiles), wrong_width
        self.now_s, self.timed = 0.0, 0

    def clock(self) -> float:
        self.timed += 1
        return self.now_s

    def linear(self, reference: Any) -> None:
        args = reference._obj
        tile_rows, args.weights.tile_rows = args.weights.tile_rows, 0
        native().lockstep_block_linear_alone(ctypes.byref(args))
        args.weights.tile_rows = tile_rows
        if tile_rows and args.weights.inputs == self._wrong_width:
            ctypes.c_float.from_address(args.out).value += 1.0
        self.now_s += self._times[tile_rows != 0](args.rows) * 1e-6

    def unit(self, file: Path | None = None, cpu: str = "this one") -> MatrixUnit:
        return MatrixUnit(self.linear, file, cpu, self.clock)


def by_tiles(rows: int) -> float:
    """Microseconds of a machine that unpacks weights once for all tiles."""
    return 14.0 + rows / 2


def test_the_unit_is_chosen_from_the_rows_on_where_it_is_faster_at_all_later_ones() -> None:
    assert Machine(by_tiles, lambda rows: rows).unit().rows_from(BlockKind.Q4, False, 64) == 32
    assert Machine(by_tiles, lambda rows: 2.0 * rows).unit().rows_from(BlockKind.Q4, False, 64) == 16
    assert Machine(by_tiles, lambda rows: 33.0).unit().rows_from(BlockKind.Q4, False, 64) == 0  # at 16 and 32 only
    assert Machine(by_tiles, by_tiles).unit().rows_from(BlockKind.Q4, False, 64) == 0
    assert Machine(by_tiles, lambda rows: 2.0 * rows).unit().rows_from(BlockKind.Q4, True, 64) == 32  # with offsets


def test_a_choice_is_kept_by_cpu_and_not_timed_again(tmp_path: Path) -> None:
    file = tmp_path / "new" / "units.json"
    assert Machine(by_tiles, lambda rows: 2.0 * rows).unit(file).rows_from(BlockKind.Q8, False, 96) == 16
    again = Machine(by_tiles, by_tiles)
    assert again.unit(file).rows_from(BlockKind.Q8, False, 96) == 16
    assert again.timed == 0
    assert again.unit(file, "another").rows_from(BlockKind.Q8, False, 96) == 0
    assert set(json.loads(file.read_text())) == {"this one", "another"}
    for number in range(9):
        again.unit(file, f"cpu {number}").rows_from(BlockKind.Q8, False, 96)
    assert len(json.loads(file.read_text())) == 8
    assert [path.name for path in file.parent.iterdir()] == ["units.json"]


def test_a_choice_of_every_kind_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "units.json"
    first = Machine(by_tiles, lambda rows: 2.0 * rows).unit(file)
    chosen = [32 if offsets else 16 for _, offsets in BLOCK_FORMS]
    assert [first.rows_from(*form, 64) for form in BLOCK_FORMS] == chosen
    again = Machine(by_tiles, by_tiles)
    assert [again.unit(file).rows_from(*form, 64) for form in BLOCK_FORMS] == chosen
    assert again.timed == 0


def test_a_unit_that_is_faster_now_and_then_is_not_chosen() -> None:
    calls = itertools.count()

    def unsteady(rows: int) -> float:
        return by_tiles(rows) * (0.5 if next(calls) % 4 == 0 else 1.0)

    assert Machine(unsteady, by_tiles).unit().rows_from(BlockKind.Q4, False, 64) == 0


@pytest.mark.parametrize(
    "content",
    ["", "[]", "\0", '{"this one": 16}', '{"this one": {"Q8, 64 inputs": 7}}', '{"this one": {"Q8, 64 inputs": "16"}}'],
)
def test_a_damaged_file_is_measured_again_and_replaced(content: str, tmp_path: Path) -> None:
    file = tmp_path / "units.json"
    file.write_text(content)
    assert Machine(by_tiles, lambda rows: 2.0 * rows).unit(file).rows_from(BlockKind.Q8, False, 64) == 16
    assert json.loads(file.read_text()) == {"this one": {"Q8, 64 inputs": 16}}


def test_a_place_that_takes_no_file_costs_nothing_but_the_next_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unit = Machine(by_tiles, lambda rows: 2.0 * rows).unit(tmp_path / "file" / "units.json")
    assert [unit.rows_from(BlockKind.Q4, False, inputs) for inputs in (64, 96)] == [16, 16]


def test_other_bits_end_the_use_of_the_unit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unit = Machine(by_tiles, lambda rows: 2.0 * rows, wrong_width=96).unit(tmp_path / "units.json")
    with caplog.at_level(logging.WARNING):
        assert [unit.rows_from(BlockKind.Q4, False, inputs) for inputs in (64, 96, 64, 128)] == [16, 0, 0, 0]
    assert caplog.text.count("AMX is not used: its products differ") == 1
    assert str(Units("AVX-512", unit)) == "AVX-512 (AMX gave other bits)"


def test_a_slow_machine_times_few_widths_at_a_start(tmp_path: Path) -> None:
    slow = Machine(lambda rows: 1e6 * BUDGET_S, lambda rows: 2e6 * BUDGET_S)
    unit = slow.unit(tmp_path / "units.json")
    assert unit.rows_from(BlockKind.Q4, False, 64) == 16
    timed = slow.timed
    assert unit.rows_from(BlockKind.Q4, False, 96) == 16
    assert unit.rows_from(BlockKind.Q8, False, 96) == 0
    assert slow.timed == timed
    assert str(Units("AVX-512", unit)) == "AVX-512, and AMX from 16 rows on"


@pytest.mark.skipif(int(native().lockstep_cpu_level()) != 5, reason="tiles are in the kernels of AVX-512 with VNNI")
@pytest.mark.skipif(int(native().lockstep_tiles_permission()) == 0, reason="this machine runs instructions on tiles")
def test_a_machine_that_faults_on_tiles_costs_a_child() -> None:
    assert trial(native().lockstep_block_linear_alone) == "ended by SIGILL"


HANDLED = """
import ctypes, os, sys
from kernels.library import native
libc = ctypes.CDLL(None)
aborts = ctypes.cast(libc.abort, ctypes.c_void_p)
assert libc.__register_atfork(None, None, aborts, None) == 0
forked = os.fork()
print(os.WTERMSIG(os.waitpid(forked, 0)[1]))
memory = ctypes.create_string_buffer(8)
harmless = ctypes.cast(libc.labs, ctypes.c_void_p)
sys.stdout.write(str(native().lockstep_tiles_trial(harmless, None, None, memory, memory, ctypes.c_int64(8))))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="registers a handler with a function of glibc")
def test_a_trial_runs_no_handler_of_a_library_that_forks() -> None:
    ended = subprocess.run([sys.executable, "-c", HANDLED], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(int(signal.SIGABRT)), "0"]


def test_matrices_without_a_matrix_unit_have_no_rows_for_it() -> None:
    units = use_units(lambda: Path("unused"), matrix=False)
    assert units.matrix is None
    assert PackedBlocks(quantised(rand(4, 32), BlockKind.Q8)).args.tile_rows == 0
