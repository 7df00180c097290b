"""Weights in blocks of 32 inputs, 4 or 8 bits each, and their product with activations of 8 bits, on a CPU.

The formats are GGUF's: a block of 4 bits is Q4_1 (integers 0 to 15, a scale, an offset), a block of 8 bits is Q8_0
(integers -127 to 127, a scale). Activations are quantised in the product, 8 bits with a scale for every 32 (Q8_1).
Invariant: a row's result has the same bits for any number of rows. Not responsible for: the source of the blocks (see
gpu_engine/model/quantised), a whole forward (see forward.py).

Shapes: N outputs, K inputs, B = K / 32 blocks, G = N / 16 rounded up to an even number, M rows.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.library import native

BLOCK = 32
"""Inputs of a block; the inputs of a product are a multiple of it."""
_LANES = 16
"""Outputs that are packed together: those of a vector."""
_GROUP = 32
"""Outputs are padded to a multiple of it."""


class BlockKind(enum.IntEnum):
    """Bits of a weight, with the values of `blocks.h`."""

    Q4 = 0
    Q8 = 1


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A quantised matrix, not packed: weight = scale * quant + offset."""

    kind: BlockKind
    quants_NK: torch.Tensor
    """uint8: 0 to 15; int8 for 8 bits."""
    scales_NB: torch.Tensor
    """float16."""
    offsets_NB: torch.Tensor | None
    """float16, always with 4 bits; None: no offset."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, K = self.quants_NK.shape
        return N, K

    def dequantised(self) -> torch.Tensor:
        """Return the weights, float32 [N, K]."""
        N, K = self.shape
        weights_NBk = self.quants_NK.float().view(N, K // BLOCK, BLOCK)
        weights_NBk *= self.scales_NB.float()[..., None]
        if self.offsets_NB is not None:
            weights_NBk += self.offsets_NB.float()[..., None]
        return weights_NBk.view(N, K)

    def rows(self, rows: torch.Tensor) -> Blocks:
        """Return the matrix of some outputs, in the order of `rows`."""
        offsets = None if self.offsets_NB is None else self.offsets_NB[rows]
        return Blocks(self.kind, self.quants_NK[rows], self.scales_NB[rows], offsets)

    @classmethod
    def joined(cls, parts: Sequence[Blocks]) -> Blocks:
        """Return the matrix with the outputs of all parts, which have the same inputs. Parts of different kinds give 8
        bits with offsets, which is exact."""
        if len({part.kind for part in parts}) > 1:
            parts = [
                cls(BlockKind.Q8, part.quants_NK.to(torch.int8), part.scales_NB, part.offsets_NB) for part in parts
            ]
        offsets = None
        if any(part.offsets_NB is not None for part in parts):
            offsets = torch.cat([_offsets(part) for part in parts])
        quants = torch.cat([part.quants_NK for part in parts])
        return cls(parts[0].kind, quants, torch.cat([part.scales_NB for part in parts]), offsets)


def _offsets(part: Blocks) -> torch.Tensor:
    return torch.zeros_like(part.scales_NB) if part.offsets_NB is None else part.offsets_NB


def can_multiply_blocks() -> bool:
    """Return whether this CPU multiplies bytes fast enough for blocks to pay: x86-64 with AVX2."""
    return int(native().lockstep_cpu_level()) >= 3


def quantised(weight_NK: torch.Tensor, kind: BlockKind) -> Blocks:
    """Quantise a matrix by rounding to nearest: by the largest magnitude of a block (8 bits), or by its range (4 bits).

    K is a multiple of 32.
    """
    N, K = weight_NK.shape
    assert K % BLOCK == 0, K
    x_NBk = weight_NK.float().view(N, K // BLOCK, BLOCK)
    if kind is BlockKind.Q8:
        scales_NB = (x_NBk.abs().amax(dim=2) / 127).half()
        q_NBk = _ratio(x_NBk, scales_NB).round().clamp(-127, 127).to(torch.int8)
        return Blocks(kind, q_NBk.view(N, K), scales_NB, None)
    offsets_NB = x_NBk.amin(dim=2).half()
    scales_NB = ((x_NBk.amax(dim=2) - offsets_NB.float()) / 15).half()
    q_NBk = _ratio(x_NBk - offsets_NB.float()[..., None], scales_NB).round().clamp(0, 15).to(torch.uint8)
    return Blocks(kind, q_NBk.view(N, K), scales_NB, offsets_NB)


def _ratio(x_NBk: torch.Tensor, scales_NB: torch.Tensor) -> torch.Tensor:
    """Divide, and give 0 where the scale is 0."""
    scales_NB1 = scales_NB.float()[..., None]
    return torch.where(scales_NB1 > 0, x_NBk / scales_NB1, 0)


class BlockWeightsArgs(ctypes.Structure):
    """Mirror of `struct block_weights`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("quants", "scales", "offsets", "bias")],
        *[(name, ctypes.c_int64) for name in ("outputs", "inputs", "kind")],
    ]


class _LinearArgs(ctypes.Structure):
    """Mirror of `struct block_linear_args`."""

    _fields_ = [
        ("weights", BlockWeightsArgs),
        *[(name, ctypes.c_void_p) for name in ("x", "out", "scratch")],
        *[(name, ctypes.c_int64) for name in ("rows", "bf16")],
    ]


class PackedBlocks:
    """A quantised matrix in the layout of the product. Owns its memory.

    Args:
        blocks: the matrix; not kept.
        bias: [N] in any float dtype, or None.
    """

    def __init__(self, blocks: Blocks, bias: torch.Tensor | None = None) -> None:
        self.kind, (self.num_outputs, self.num_inputs) = blocks.kind, blocks.shape
        assert self.num_inputs % BLOCK == 0, self.num_inputs
        assert can_multiply_blocks(), "this CPU has no AVX2"
        self.quants = _packed(blocks)
        self.scales = _by_group(blocks.scales_NB)
        self.offsets = None if blocks.offsets_NB is None else _by_group(blocks.offsets_NB)
        self.bias = None if bias is None else _padded(bias.float())
        self.args = BlockWeightsArgs(
            self.quants.data_ptr(),
            self.scales.data_ptr(),
            None if self.offsets is None else self.offsets.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self.num_outputs,
            self.num_inputs,
            self.kind,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights: what a product reads."""
        parts = (self.quants, self.scales, self.offsets)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias, [M, N] in the dtype of x: bfloat16 or float32, contiguous."""
        assert x_MK.dtype in (torch.bfloat16, torch.float32), x_MK.dtype
        assert x_MK.device.type == "cpu", x_MK.device
        assert x_MK.is_contiguous()
        M, K = x_MK.shape
        assert self.num_inputs == K, (K, self.num_inputs)
        out_MN = torch.empty(M, self.num_outputs, dtype=x_MK.dtype)
        scratch = torch.empty(M * (K + K // BLOCK * 12) + 256, dtype=torch.uint8)
        args = _LinearArgs(
            self.args,
            x_MK.data_ptr(),
            out_MN.data_ptr(),
            scratch.data_ptr(),
            M,
            x_MK.dtype == torch.bfloat16,
        )
        if M:
            native().lockstep_block_linear(ctypes.byref(args))
        return out_MN

    def __repr__(self) -> str:
        return f"<PackedBlocks {self.num_inputs} -> {self.num_outputs} {self.kind.name}>"


def _padded(rows_N: torch.Tensor) -> torch.Tensor:
    """Append zeros up to a whole group of outputs."""
    missing = -len(rows_N) % _GROUP
    return (
        torch.cat([rows_N, rows_N.new_zeros(missing, *rows_N.shape[1:])]).contiguous()
        if missing
        else rows_N.contiguous()
    )


def _by_group(scales_NB: torch.Tensor) -> torch.Tensor:
    """[N, B] -> [G / 2, B, 2, 16]."""
    padded_NB = _padded(scales_NB)
    return padded_NB.view(-1, _GROUP, padded_NB.shape[1]).transpose(1, 2).contiguous()


def _packed(blocks: Blocks) -> torch.Tensor:
    """Return the bytes of blocks.h: 16 outputs side by side, four inputs of each in a lane."""
    padded_NK = _padded(blocks.quants_NK)
    N, K = padded_NK.shape
    # [G / 2, 2, 16 outputs, B, 8 parts of a block, 4 inputs] -> [G / 2, B, 2, 8, 16, 4]
    parts = padded_NK.view(N // _GROUP, 2, _LANES, K // BLOCK, 8, 4).permute(0, 3, 1, 4, 2, 5)
    if blocks.kind is BlockKind.Q8:
        return (parts.contiguous().view(torch.uint8) ^ 128).contiguous()
    return (parts[:, :, :, :4] | parts[:, :, :, 4:] << 4).contiguous()
