"""When a CPU's matrix unit (AMX) computes products over blocks: with the vector unit's bits, and where it is faster.
Products of bfloat16 run on it if a first one in a child process was right (see float_tiles.py).

A process opens the unit before it makes its matrices. A first product runs in a child process; then each kind and width
of a matrix is compared with the vector unit's product, bit for bit, and both are timed at some numbers of rows. The
choices are kept in a file, by CPU and by build of the library. Invariant: no bit of a result depends on any of this.
Not responsible for: the products (see native/amx.h), the place of the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import logging
import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.blocks import BLOCK, BLOCK_FORMS, BlockKind, LinearCall, PackedBlocks, no_rows
from kernels.float_tiles import STEP, FloatTiles
from kernels.library import native, native_path
from kernels.vector_unit import WITH_TILES, unit_level, unit_name

log = logging.getLogger(__name__)

ROWS = (16, 32, 48)
"""Numbers of rows that are timed: a tile has 16, and up to three of them share weights that are unpacked once."""
GAIN = 1.05
"""The unit is chosen from the rows on where it is at least so much faster, there and at all larger numbers."""
BUDGET_S = 0.3
"""For the timings of one start. Later widths take the choice of the nearest one, and are timed at another start."""
CHOICES = (0, *ROWS)
_KEY = re.compile(rf"(?:{'|'.join(BlockKind.__members__)})(?: with offsets)?, \d{{1,9}} inputs")
_ROUNDS = 11
_WEIGHTS = 1 << 19
"""Of a matrix that is timed, or somewhat more: it lies in the second cache."""
_OUTPUTS = 256
"""The fewest outputs of that matrix: rows are quantised and laid out once for all of them, which has to be little."""
_MAX_CPUS, _MAX_CHOICES = 8, 64
"""Of the file."""

Linear = Callable[[Any], None]
"""Computes the product of a `LinearCall`'s arguments, by reference, on the calling thread."""


class MatrixUnit:
    """The unit, once this process may use it; one thread at a time calls it.

    Args:
        linear: the product.
        file: keeps the choices; None: they are made anew.
        cpu: names CPU and build in the file.
        clock: seconds.
    """

    def __init__(
        self, linear: Linear, file: Path | None, cpu: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._linear, self._file, self._cpu, self._clock = linear, file, cpu, clock
        self._kept = {} if file is None else _read(file).get(cpu, {})
        self.chosen: dict[str, int] = {}
        """Kind and width of a matrix -> rows; 0: never."""
        self._spent_s = 0.0
        self.differs = ""
        """The matrix whose products were not equal; it and all later ones do without the unit."""

    def rows_from(self, kind: BlockKind, offsets: bool, num_inputs: int) -> int:
        """Return the rows from which on the unit computes products by such a matrix; 0: never. As
        `PackedBlocks.tile_rows`."""
        key = f"{kind.name}{' with offsets' if offsets else ''}, {num_inputs} inputs"
        if key not in self.chosen and not self.differs:
            self.chosen[key] = 0  # for the matrices that are made here
            self.chosen[key] = self._choose(key, kind, offsets, num_inputs)
        return 0 if self.differs else self.chosen[key]

    def _choose(self, key: str, kind: BlockKind, offsets: bool, num_inputs: int) -> int:
        for rows in (16, 33, 47):
            tiled, plain = pair(_random(kind, offsets, 70, num_inputs), rows)
            for call in (tiled, plain):
                self._linear(ctypes.byref(call.args))
            if not torch.equal(tiled.out_MN.view(torch.int32), plain.out_MN.view(torch.int32)):
                self.differs = key
                log.warning("AMX is not used: its products differ from the vector unit's (%s, %d rows)", key, rows)
                return 0
        if key in self._kept:
            return self._kept[key]
        if self._spent_s >= BUDGET_S:
            return self._nearest(kind, offsets, num_inputs)
        begin = self._clock()
        rows = self._measured(kind, offsets, num_inputs)
        self._spent_s += self._clock() - begin
        self._keep(key, rows)
        return rows

    def _measured(self, kind: BlockKind, offsets: bool, num_inputs: int) -> int:
        """Return the smallest number of rows from which on the unit is faster.

        With offsets it is 32 at least: the unit's gain is small there, and a forward of 16 rows has none, because its
        weights come from memory.
        """
        weights = _random(kind, offsets, max(_OUTPUTS, _WEIGHTS // num_inputs // 32 * 32), num_inputs)
        best = 0
        for rows in reversed(ROWS[1:] if offsets else ROWS):
            calls, gains = pair(weights, rows), []
            # In turn, and the median of the ratios: others may use the core's other thread for some milliseconds.
            for _ in range(_ROUNDS):
                tiled_s, plain_s = (self._timed(call) for call in calls)
                gains.append(plain_s / tiled_s)
            if statistics.median(gains) < GAIN:
                return best
            best = rows
        return best

    def _timed(self, call: LinearCall) -> float:
        begin = self._clock()
        self._linear(ctypes.byref(call.args))
        return self._clock() - begin

    def _nearest(self, kind: BlockKind, offsets: bool, num_inputs: int) -> int:
        head = f"{kind.name}{' with offsets' if offsets else ''}, "
        of_kind = {key.removeprefix(head): rows for key, rows in self._kept.items() if key.startswith(head)}
        known = {int(key.removesuffix(" inputs")): rows for key, rows in of_kind.items()}
        return known[min(known, key=lambda inputs: abs(inputs - num_inputs))] if known else 0

    def _keep(self, key: str, rows: int) -> None:
        self._kept[key] = rows
        if self._file is None:
            return
        # Read again: another process may have written since.
        cpus = _read(self._file)
        mine = {**cpus.pop(self._cpu, {}), key: rows}
        kept = {**cpus, self._cpu: dict(list(mine.items())[-_MAX_CHOICES:])}
        try:
            _write(self._file, dict(list(kept.items())[-_MAX_CPUS:]))
        except OSError as error:
            log.info("the choice between units is not kept: %s", error)
            self._file = None


@dataclass(frozen=True, slots=True)
class Units:
    """What computes products over blocks; as text, for a log."""

    vector: str
    matrix: MatrixUnit | None
    refusal: str = ""
    """Why a matrix unit that is there is not used."""
    floats: bool = False
    """The matrix unit also multiplies bfloat16."""

    def __str__(self) -> str:
        if self.matrix is None:
            return self.vector + (f" ({self.refusal})" if self.refusal else "")
        if self.matrix.differs:
            return f"{self.vector} (AMX gave other bits)"
        rows = sorted({rows for rows in self.matrix.chosen.values() if rows})
        if not self.matrix.chosen:
            return self.vector
        if not rows:
            return f"{self.vector} (AMX is not faster)"
        span = f"{rows[0]} to {rows[-1]}" if rows[0] < rows[-1] else str(rows[0])
        return f"{self.vector}, and AMX from {span} rows on"


def use_units(file: Callable[[], Path], *, matrix: bool) -> Units:
    """Have matrices that are made from now on use the units of this CPU; return them.

    `file`: where choices are kept; asked only where there is a matrix unit. `matrix`: use that as well.
    """
    units = _opened(file) if matrix else Units(unit_name(), None)
    PackedBlocks.tile_rows = staticmethod(no_rows if units.matrix is None else units.matrix.rows_from)
    FloatTiles.usable = units.floats
    return units


@functools.cache
def _opened(file: Callable[[], Path]) -> Units:
    vector = unit_name()
    if unit_level() != WITH_TILES:
        return Units(vector, None)
    refusal = int(native().lockstep_tiles_permission())
    if refusal > 0:
        return Units(vector, None, f"the system refuses AMX: {errno.errorcode.get(refusal, refusal)}")
    if refusal < 0:
        return Units(vector, None)
    if why := trial(native().lockstep_block_linear_alone):
        log.warning("AMX is not used: a first product %s", why)
        return Units(vector, None, f"AMX's first product {why}")
    try:
        kept: Path | None = file()
    except RuntimeError as error:  # there is no home directory
        log.info("the choice between units is not kept: %s", error)
        kept = None
    unit = MatrixUnit(native().lockstep_block_linear_alone, kept, f"{cpu_name()} {_build()}")
    return Units(vector, unit, floats=_float_tiles())


def _float_tiles() -> bool:
    if not native().lockstep_has_float_tiles():
        return False
    if why := float_trial(native().lockstep_float_tiles_alone):
        log.warning("AMX multiplies no bfloat16: its first product %s", why)
    return not why


def float_trial(product: Any) -> str:
    """Return why the first product of bfloat16 on tiles must be the last, or nothing. It runs in a child process.

    The numbers are small integers, so every sum is exact and has one result.
    """
    generator = torch.Generator().manual_seed(0)
    weight_NK, x_MK = (torch.randint(-1, 2, (rows, 2 * STEP), generator=generator).bfloat16() for rows in (40, 20))
    matrix, want_MN = FloatTiles(weight_NK), (x_MK.float() @ weight_NK.float().T).bfloat16()
    outs = [torch.zeros_like(want_MN) for _ in range(2)]
    scratch = torch.empty(2 * 16 * x_MK.shape[1], dtype=torch.bfloat16)
    both = [ctypes.byref(matrix.arguments(x_MK, out_MN, scratch)) for out_MN in outs]
    memory = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (outs[0], want_MN)]
    address = ctypes.cast(product, ctypes.c_void_p)
    ended = int(native().lockstep_tiles_trial(address, *both, *memory, ctypes.c_int64(want_MN.nbytes)))
    return "is wrong" if ended == 1 else _end(ended)


def _end(ended: int) -> str:
    """Return how the child of a trial ended, if it did not compare."""
    if not ended:
        return ""
    return f"ended by {signal.Signals(ended).name}" if ended > 0 else "had no process to run in"


def trial(linear: Any) -> str:
    """Return why the first product on tiles must be the last, or nothing. It runs in a child process."""
    for kind, offsets in BLOCK_FORMS:
        tiled, plain = pair(_random(kind, offsets, 70, 33 * BLOCK), 47)
        address = ctypes.cast(linear, ctypes.c_void_p)
        memory = [ctypes.c_void_p(call.out_MN.data_ptr()) for call in (tiled, plain)]
        size = ctypes.c_int64(plain.out_MN.numel() * 4)
        both = ctypes.byref(tiled.args), ctypes.byref(plain.args)
        ended = int(native().lockstep_tiles_trial(address, *both, *memory, size))
        if ended == 1:
            return f"differs from the vector unit's ({kind.name}{' with offsets' if offsets else ''})"
        if why := _end(ended):
            return why
    return ""


def pair(weights: PackedBlocks, num_rows: int) -> tuple[LinearCall, LinearCall]:
    """Return the same product of random rows with tiles, and without."""
    x_MK = torch.randn(num_rows, weights.num_inputs, generator=torch.Generator().manual_seed(num_rows))
    return LinearCall(weights, x_MK, 1), LinearCall(weights, x_MK, 0)


def _random(kind: BlockKind, offsets: bool, num_outputs: int, num_inputs: int) -> PackedBlocks:
    generator = torch.Generator().manual_seed(0)
    made = PackedBlocks.unfilled(kind, (num_outputs, num_inputs), offsets=offsets)
    made.quants.random_(0, 256, generator=generator)
    for part in (made.scales, made.offsets):
        if part is not None:
            part.copy_(torch.randn(part.shape, generator=generator))
    return made


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return what the system says of the first CPU's model."""
    fields = dict.fromkeys(("vendor_id", "cpu family", "model", "stepping", "model name"), "?")
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().partition("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            if name.strip() in fields:
                fields[name.strip()] = value.strip()
    return " ".join(fields.values())


def _build() -> str:
    """Return what tells builds of the library apart: another one may have other speeds."""
    made = os.stat(native_path())
    return f"{made.st_size}-{int(made.st_mtime)}"


def _read(file: Path) -> dict[str, dict[str, int]]:
    """Return the choices by CPU; of a file that is missing or damaged, none."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        cpu: {
            key: rows for key, rows in choices.items() if _KEY.fullmatch(key) and type(rows) is int and rows in CHOICES
        }
        for cpu, choices in found.items()
        if isinstance(choices, dict)
    }


def _write(file: Path, cpus: dict[str, dict[str, int]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".", delete=False) as made:
        try:
            json.dump(cpus, made)
            made.flush()
            os.replace(made.name, file)
        except BaseException:
            os.unlink(made.name)
            raise
