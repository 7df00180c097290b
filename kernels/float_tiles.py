"""Matrices of bfloat16 and their products on a CPU's matrix unit (AMX).

Invariant: a row's result has the same bits for any number of rows and threads. oneDNN's products of up to 32 rows also
have these bits; above that it sums in other orders, by the number of rows.

Not responsible for: the permission to use tiles (see matrix_unit.py), products of other CPUs (see
gpu_engine/model/linear.py).

Shapes: N outputs, K inputs, G = N / 32 rounded up, M rows.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch

from kernels.library import native

STEP = 32
"""Inputs of a tile; the inputs of a product are a multiple of it."""
_ROWS, _OUTPUTS, _GROUP = 16, 16, 32


class _Args(ctypes.Structure):
    """Mirror of `struct float_tiles_args`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("weights", "bias", "x", "out", "scratch")],
        *[(name, ctypes.c_int64) for name in ("rows", "inputs", "outputs")],
    ]


class FloatTiles:
    """A matrix in tiles. Owns its memory.

    Args:
        weight_NK: bfloat16, on the CPU, with a multiple of 32 inputs; not kept.
        bias_N: in any float dtype, or None.
    """

    usable: ClassVar[bool] = False
    """This process may multiply on tiles. `use_units` of matrix_unit.py sets it."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> None:
        assert self.fits(weight_NK), (weight_NK.shape, weight_NK.dtype)
        self.num_outputs, self.num_inputs = weight_NK.shape
        missing = -self.num_outputs % _GROUP
        steps = self.num_inputs // STEP
        # [group, step, half, pair of inputs, output, input of the pair]
        self.tiles = torch.empty(-(-self.num_outputs // _GROUP), steps, 2, STEP // 2, _OUTPUTS, 2, dtype=torch.bfloat16)
        whole = self.num_outputs // _GROUP
        self.tiles[:whole] = _tiles(weight_NK[: whole * _GROUP])
        if missing:
            self.tiles[whole:] = _tiles(torch.nn.functional.pad(weight_NK[whole * _GROUP :], (0, 0, 0, missing)))
        self.bias = None if bias_N is None else torch.nn.functional.pad(bias_N.float(), (0, missing))

    @classmethod
    def fits(cls, weight_NK: torch.Tensor) -> bool:
        """Return whether a matrix can be in tiles."""
        on_cpu = weight_NK.device.type == "cpu"
        return on_cpu and weight_NK.dtype is torch.bfloat16 and weight_NK.shape[1] % STEP == 0

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self.tiles.nbytes

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias, bfloat16 [M, K] -> [M, N]."""
        rows, x_MK = len(x_MK), x_MK.contiguous()
        assert x_MK.dtype is torch.bfloat16, x_MK.dtype
        assert x_MK.shape[1] == self.num_inputs, x_MK.shape
        out_MN = torch.empty(rows, self.num_outputs, dtype=torch.bfloat16)
        if not rows:
            return out_MN
        scratch = torch.empty(-(-rows // _ROWS) * _ROWS * self.num_inputs, dtype=torch.bfloat16)
        native().lockstep_float_tiles(ctypes.byref(self.arguments(x_MK, out_MN, scratch)))
        return out_MN

    def arguments(self, x_MK: torch.Tensor, out_MN: torch.Tensor, scratch: torch.Tensor) -> _Args:
        """Return the arguments of the native product; the caller holds the tensors."""
        bias = None if self.bias is None else self.bias.data_ptr()
        places = self.tiles.data_ptr(), bias, x_MK.data_ptr(), out_MN.data_ptr(), scratch.data_ptr()
        return _Args(*places, len(x_MK), self.num_inputs, self.num_outputs)

    def __repr__(self) -> str:
        return f"<FloatTiles {self.num_outputs} x {self.num_inputs}>"


def _tiles(weight_NK: torch.Tensor) -> torch.Tensor:
    N, K = weight_NK.shape
    return weight_NK.reshape(N // _GROUP, 2, _OUTPUTS, K // STEP, STEP // 2, 2).permute(0, 3, 1, 4, 2, 5)
