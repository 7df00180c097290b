"""Weights in blocks of 32 inputs, 4 to 8 bits each, and their product with activations of 8 bits, on a CPU.

The formats are GGUF's: a block of 4 bits is Q4_0 (integers 0 to 15 that stand for -8 to 7, a scale), Q4_1 (0 to 15,
a scale, an offset), MXFP4 (codes of floats, a scale) or IQ4_NL (codes of levels, a scale), a block of 5 bits is Q5_0 or
Q5_1, a block of 8 bits is Q8_0 (integers -127 to 127, a scale). A block of Q3_K or Q6_K has two scales.
Activations are quantised in the product, 8 bits with a scale for every 32 (Q8_1).
Invariant: a row's result has the same bits for any number of rows. Not responsible for: the source of the blocks (see
gpu_engine/model/quantised), a whole forward (see forward.py).

Shapes: N outputs, K inputs, B = K / 32 blocks, G = N / 16 rounded up to an even number, M rows, S = B times a block's
scales.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels import huge_pages
from kernels.library import native
from kernels.vector_unit import WITH_BLOCKS, unit_level

BLOCK = 32
"""Inputs of a block; the inputs of a product are a multiple of it."""
_LANES = 16
"""Outputs that are packed together: those of a vector."""
_GROUP = 32
"""Outputs are padded to a multiple of it."""


class BlockKind(enum.IntEnum):
    """What a block has for each weight, with the values of `blocks.h`."""

    Q4 = 0
    """An integer of 4 bits."""
    Q8 = 1
    """An integer of 8 bits."""
    F4 = 2
    """The code of a float of 4 bits (e2m1): a sign, 2 bits of exponent, 1 bit of mantissa. It has no offsets."""
    L4 = 3
    """The code of one of the 16 levels of IQ4_NL, which are integers of 8 bits. It has no offsets."""
    Q5 = 4
    """An integer of 5 bits."""
    Q6 = 5
    """An integer of 6 bits. Either half of the inputs has a scale."""
    P4 = 6
    """An integer of 4 bits. Either half of the inputs has a scale. It has no offsets."""

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return {BlockKind.Q8: 8, BlockKind.Q5: 5, BlockKind.Q6: 6}.get(self, 4)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's weights."""
        return BLOCK * self.bits // 8

    @property
    def scales(self) -> int:
        """Scales of a block: one, or one for either half of its inputs."""
        return 2 if self in (BlockKind.Q6, BlockKind.P4) else 1

    def middle(self, *, offsets: bool) -> int:
        """Return the integer that gives a weight of zero, before an offset. `offsets`: the blocks have them."""
        if self is BlockKind.Q6:
            return 32
        return 0 if offsets else {BlockKind.Q4: 8, BlockKind.P4: 8, BlockKind.Q5: 16}.get(self, 0)


BLOCK_FORMS = (
    (BlockKind.Q4, False),
    (BlockKind.Q4, True),
    (BlockKind.Q5, False),
    (BlockKind.Q5, True),
    (BlockKind.Q6, False),
    (BlockKind.Q6, True),
    (BlockKind.Q8, False),
    (BlockKind.Q8, True),
    (BlockKind.F4, False),
    (BlockKind.L4, False),
    (BlockKind.P4, False),
)
"""Each kind that a product takes, and whether the blocks have offsets."""

CODE_VALUES = {
    BlockKind.F4: torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8),
    BlockKind.L4: torch.tensor(
        [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8
    ),
}
"""What the codes of a kind stand for: twice the value of a float, or a level."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A quantised matrix, not packed: weight = scale * (quant - middle) + offset, with one scale for a block or for
    either half of it. The kind says the middle.

    The quant of a code is the integer that the code stands for.
    """

    kind: BlockKind
    quants_NK: torch.Tensor
    """uint8: an integer of up to 6 bits, or a code; int8 for 8 bits."""
    scales_NS: torch.Tensor
    """float16."""
    offsets_NB: torch.Tensor | None
    """float16, or None."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, K = self.quants_NK.shape
        return N, K

    def integers(self) -> torch.Tensor:
        """Return what the scales multiply, int8 [N, K]: integers less the middle, or the values of codes."""
        if (values := CODE_VALUES.get(self.kind)) is not None:
            return values[self.quants_NK.int()]
        return self.quants_NK.to(torch.int8) - self.kind.middle(offsets=self.offsets_NB is not None)

    def dequantised(self) -> torch.Tensor:
        """Return the weights, float32 [N, K]."""
        N, K = self.shape
        weights_NSk = self.integers().float().view(N, self.scales_NS.shape[1], -1)
        weights_NSk *= self.scales_NS.float()[..., None]
        weights_NBk = weights_NSk.view(N, K // BLOCK, BLOCK)
        if self.offsets_NB is not None:
            weights_NBk += self.offsets_NB.float()[..., None]
        return weights_NBk.view(N, K)

    def rows(self, rows: torch.Tensor) -> Blocks:
        """Return the matrix of some outputs, in the order of `rows`."""
        offsets = None if self.offsets_NB is None else self.offsets_NB[rows]
        return Blocks(self.kind, self.quants_NK[rows], self.scales_NS[rows], offsets)

    def columns(self, blocks: torch.Tensor) -> Blocks:
        """Return the matrix with its blocks of inputs in the order of `blocks`."""
        N, K = self.shape
        offsets = None if self.offsets_NB is None else self.offsets_NB[:, blocks]
        quants, scales = (part.view(N, K // BLOCK, -1)[:, blocks] for part in (self.quants_NK, self.scales_NS))
        return Blocks(self.kind, quants.view(N, K), scales.view(N, -1), offsets)

    @classmethod
    def joined(cls, parts: Sequence[Blocks]) -> Blocks:
        """Return the matrix with the outputs of all parts, which have the same inputs. Parts of different kinds give
        the one of fewest bits that holds them all; that is exact, unless one has two scales in a block and another has
        codes or 8 bits."""
        kind = joined_kind({part.kind for part in parts})
        offsets = any(part.offsets_NB is not None for part in parts)
        parts = [part._of_kind(kind, offsets=offsets) for part in parts]
        return cls(
            kind,
            torch.cat([part.quants_NK for part in parts]),
            torch.cat([part.scales_NS for part in parts]),
            torch.cat([part.offsets_NB for part in parts if part.offsets_NB is not None]) if offsets else None,
        )

    def _of_kind(self, kind: BlockKind, *, offsets: bool) -> Blocks:
        """Return the same weights as blocks of `kind`, with offsets if `offsets`."""
        if kind is self.kind and offsets == (self.offsets_NB is not None):
            return self
        if self.kind.scales > kind.scales:
            return quantised(self.dequantised(), kind)._of_kind(kind, offsets=offsets)
        own, offsets_NB = self.offsets_NB is not None, self.offsets_NB
        if offsets and not own:
            offsets_NB = _offsets_of(kind, self.scales_NS)[:, :: self.kind.scales]
        quants_NK = (self.integers() + kind.middle(offsets=own)).to(torch.int8 if kind is BlockKind.Q8 else torch.uint8)
        scales_NS = self.scales_NS.repeat_interleave(kind.scales // self.kind.scales, dim=1)
        return Blocks(kind, quants_NK, scales_NS, offsets_NB)


def joined_kind(kinds: set[BlockKind]) -> BlockKind:
    """Return the kind of a matrix that is joined from parts of `kinds`."""
    if len(kinds) == 1:
        return next(iter(kinds))
    if kinds & {BlockKind.Q8, *CODE_VALUES}:
        return BlockKind.Q8
    return BlockKind.Q5 if kinds == {BlockKind.Q4, BlockKind.Q5} else BlockKind.Q6


def _offsets_of(kind: BlockKind, scales: torch.Tensor) -> torch.Tensor:
    """Return, for each scale, the offset of blocks that have none of their own."""
    lower = kind.middle(offsets=True) - kind.middle(offsets=False)
    return scales * lower if lower else torch.zeros_like(scales)


def packed_bytes(kind: BlockKind, shape: tuple[int, int], *, offsets: bool = False) -> int:
    """Return about what a matrix [N, K] takes in the layout of the product. `offsets`: its blocks have them."""
    N, K = shape
    in_block = kind.block_bytes + 2 * kind.scales + 2 * offsets
    return -(-N // _GROUP) * _GROUP * (K // BLOCK) * in_block


def rows_bytes(M: int, K: int) -> int:
    """Return what a product needs for its quantised activations: `block_rows_bytes` of `blocks.h`."""
    return M * (K + K // BLOCK * 24) + 256


def can_multiply_blocks() -> bool:
    """Return whether this CPU multiplies bytes fast enough for blocks to pay: x86-64 with AVX2, or aarch64 with dot
    products of bytes (Armv8.2)."""
    return unit_level() >= WITH_BLOCKS


def quantised(weight_NK: torch.Tensor, kind: BlockKind) -> Blocks:
    """Quantise a matrix by rounding to nearest: by the largest magnitude of a block (8 bits), or by its range (4 bits).

    K is a multiple of 32. Nothing is rounded to another kind.
    """
    N, K = weight_NK.shape
    assert K % BLOCK == 0, K
    assert kind in (BlockKind.Q4, BlockKind.Q8), kind
    is_bf16 = weight_NK.dtype is torch.bfloat16
    x_NK = weight_NK.detach().contiguous() if is_bf16 else weight_NK.detach().float().contiguous()
    assert x_NK.device.type == "cpu", x_NK.device
    quants_NK = torch.empty(N, K, dtype=torch.uint8 if kind is BlockKind.Q4 else torch.int8)
    scales_NB = torch.empty(N, K // BLOCK, dtype=torch.float16)
    offsets_NB = torch.empty_like(scales_NB) if kind is BlockKind.Q4 else None
    args = _RoundArgs(x_NK.data_ptr(), scales_NB.numel(), is_bf16, quants_NK.data_ptr(), scales_NB.data_ptr())
    args.offsets = None if offsets_NB is None else offsets_NB.data_ptr()
    native().lockstep_round_blocks(ctypes.byref(args))
    return Blocks(kind, quants_NK, scales_NB, offsets_NB)


class BlockWeightsArgs(ctypes.Structure):
    """Mirror of `struct block_weights`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("quants", "scales", "offsets", "bias")],
        *[(name, ctypes.c_int64) for name in ("outputs", "inputs", "kind", "tile_rows")],
    ]


class _LinearArgs(ctypes.Structure):
    """Mirror of `struct block_linear_args`."""

    _fields_ = [
        ("weights", BlockWeightsArgs),
        *[(name, ctypes.c_void_p) for name in ("x", "out", "scratch")],
        *[(name, ctypes.c_int64) for name in ("rows", "bf16")],
    ]


class _BlockSource(ctypes.Structure):
    """Mirror of `struct block_source`."""

    _fields_ = [("first", ctypes.c_void_p), *[(name, ctypes.c_int64) for name in ("row_bytes", "block_bytes")]]


class _PackArgs(ctypes.Structure):
    """Mirror of `struct pack_args`."""

    _fields_ = [
        *[(name, _BlockSource) for name in ("quants", "scales", "offsets")],
        *[(name, ctypes.c_void_p) for name in ("order", "out_quants", "out_scales", "out_offsets")],
        *[(name, ctypes.c_int64) for name in ("rows", "blocks", "words", "parts")],
        ("flip", ctypes.c_uint32),
    ]


class _RoundArgs(ctypes.Structure):
    """Mirror of `struct round_args`."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("blocks", "bf16")],
        *[(name, ctypes.c_void_p) for name in ("quants", "scales", "offsets")],
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """A number, or the integers, of every block of a matrix: where the first lies, and the way to the next."""

    memory: torch.Tensor
    """Contiguous, on the CPU."""
    start: int
    """Of the first block's, in bytes. So are the strides."""
    row_bytes: int
    block_bytes: int

    @classmethod
    def of(cls, values_NBk: torch.Tensor) -> Field:
        """Return the field of a tensor of its own, [N, B] or [N, B, bytes]."""
        values_NBk = values_NBk.contiguous()
        bytes_of = [stride * values_NBk.element_size() for stride in values_NBk.stride()]
        return cls(values_NBk, 0, bytes_of[0], bytes_of[1])

    def source(self) -> _BlockSource:
        """Return it as an argument; the caller holds the field."""
        assert self.memory.is_contiguous()
        assert self.memory.device.type == "cpu"
        return _BlockSource(self.memory.data_ptr() + self.start, self.row_bytes, self.block_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class RawBlocks:
    """The blocks of some rows as they lie in memory. Integers or codes of 4 bits: 16 bytes, input j in the low half of
    byte j, input j + 16 in the high half; 5 and 6 bits: 20 and 24 bytes, as the words of `blocks.h` have them; 8 bits:
    32 bytes."""

    quants: Field
    scales: Field
    """float16; the step to the next is that of a scale."""
    offsets: Field | None
    """float16."""

    @classmethod
    def of(cls, blocks: Blocks) -> RawBlocks:
        """Return the blocks of a matrix with an integer in each byte."""
        (N, K), quants_NK = blocks.shape, blocks.quants_NK
        bytes_NBk = quants_NK.reshape(N, K // BLOCK, BLOCK)
        if blocks.kind is not BlockKind.Q8:
            bytes_NBk = _in_words(bytes_NBk, blocks.kind.bits)
        offsets = None if blocks.offsets_NB is None else Field.of(blocks.offsets_NB)
        return cls(Field.of(bytes_NBk), Field.of(blocks.scales_NS), offsets)


def _in_words(quants_NBk: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the bytes of blocks of 4 to 6 bits, [N, B, 4 * bits], as their words have them (see blocks.h)."""
    N, B, _ = quants_NBk.shape
    if bits == 6:
        words = quants_NBk.view(N, B, 2, 4, 4)
        two_of_last = words[..., 3:, :] >> _SHIFTS[:3, None] << 6
        return (words[..., :3, :] | two_of_last).view(N, B, 24)
    low, high = quants_NBk.view(N, B, 2, BLOCK // 2).unbind(2)
    nibbles = (low & 15) | high << 4
    if bits == 4:
        return nibbles
    fifth = (low >> 4 | high >> 4 << 1).view(N, B, 4, 4) << _SHIFTS[:, None]
    return torch.cat([fifth.sum(2, dtype=torch.uint8), nibbles], dim=2)


def _of_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers of blocks of 4 to 6 bits, [..., 8, 16, 4] of words [..., bits, 16, 4]."""
    if bits == 6:
        parts = words.unflatten(-3, (2, 3))
        last = (parts >> 6 << _SHIFTS[:3, None, None]).sum(-3, keepdim=True, dtype=torch.uint8)
        return torch.cat([parts & 63, last], dim=-3).flatten(-4, -3)
    nibbles = words[..., -4:, :, :]
    made = torch.stack([nibbles & 15, nibbles >> 4], dim=-4)
    if bits == 5:
        fifth = words[..., :1, :, :] >> _SHIFTS[:, None, None]
        made |= torch.stack([fifth & 1, fifth >> 1 & 1], dim=-4) << 4
    return made.flatten(-4, -3)


_SHIFTS = torch.arange(0, 8, 2, dtype=torch.uint8)


def no_rows(kind: BlockKind, offsets: bool, num_inputs: int) -> int:
    """Return 0: no product runs on a matrix unit."""
    return 0


class PackedBlocks:
    """A quantised matrix in the layout of the product. Owns its memory.

    Args:
        blocks: the matrix; not kept.
        bias: [N] in any float dtype, or None.
    """

    tile_rows: ClassVar[Callable[[BlockKind, bool, int], int]] = staticmethod(no_rows)
    """(kind, whether it has offsets, inputs) -> the rows at once from which on the matrix unit multiplies by a matrix
    that is made from now on; 0: never. `use_units` of matrix_unit.py sets it."""

    def __init__(self, blocks: Blocks, bias: torch.Tensor | None = None) -> None:
        self._allocate(blocks.kind, blocks.shape, blocks.offsets_NB is not None, bias)
        self.put(0, blocks.shape[0], RawBlocks.of(blocks))

    @classmethod
    def unfilled(
        cls,
        kind: BlockKind,
        shape: tuple[int, int],
        *,
        offsets: bool,
        bias: torch.Tensor | None = None,
        lasts: bool = False,
    ) -> PackedBlocks:
        """Return a matrix [N, K] with no defined content: `put` gives it every row. `lasts`: see `huge_pages.empty`."""
        made = cls.__new__(cls)
        made._allocate(kind, shape, offsets, bias, lasts)
        return made

    def _allocate(
        self, kind: BlockKind, shape: tuple[int, int], offsets: bool, bias: torch.Tensor | None, lasts: bool = False
    ) -> None:
        self.kind, (self.num_outputs, self.num_inputs) = kind, shape
        assert self.num_inputs % BLOCK == 0, self.num_inputs
        assert can_multiply_blocks(), "this CPU has neither AVX2 nor aarch64's dot products"
        groups, blocks = -(-self.num_outputs // _GROUP), self.num_inputs // BLOCK
        self.quants = huge_pages.empty(groups, blocks, 2, self._words, _LANES, 4, dtype=torch.uint8, lasts=lasts)
        self.scales = huge_pages.empty(groups, blocks * kind.scales, _GROUP, dtype=torch.float16, lasts=lasts)
        self.offsets = huge_pages.empty(groups, blocks, _GROUP, dtype=torch.float16, lasts=lasts) if offsets else None
        self.bias = None if bias is None else _padded(bias.float()).clone()  # not the caller's memory
        self.args = BlockWeightsArgs(
            self.quants.data_ptr(),
            self.scales.data_ptr(),
            None if self.offsets is None else self.offsets.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self.num_outputs,
            self.num_inputs,
            self.kind,
            type(self).tile_rows(self.kind, offsets, self.num_inputs),
        )

    @property
    def _words(self) -> int:
        """Words of four bytes in a block."""
        return self.kind.block_bytes // 4

    def put(self, first: int, count: int, raw: RawBlocks, order: torch.Tensor | None = None) -> None:
        """Fill the outputs from `first` on, a multiple of 32: all of their groups, or the last of the matrix.

        Rows without offsets may go to a matrix that has them; not the other way round.
        `order` [count], int64: the row in `raw` of each output; None: the same order.
        """
        assert first % _GROUP == 0, first
        assert count % _GROUP == 0 or first + count == self.num_outputs, (first, count)
        assert raw.offsets is None or self.offsets is not None
        assert order is None or (order.dtype == torch.int64 and order.is_contiguous() and len(order) == count)
        group = first // _GROUP
        args = _PackArgs(
            raw.quants.source(),
            raw.scales.source(),
            _BlockSource() if raw.offsets is None else raw.offsets.source(),
            None if order is None else order.data_ptr(),
            self.quants[group:].data_ptr(),
            self.scales[group:].data_ptr(),
            None if self.offsets is None else self.offsets[group:].data_ptr(),
            count,
            self.num_inputs // BLOCK,
            self._words,
            self.kind.scales,
            0x80808080 if self.kind is BlockKind.Q8 else 0,
        )
        native().lockstep_pack_blocks(ctypes.byref(args))
        if raw.offsets is None and self.offsets is not None:
            groups = slice(group, group + -(-count // _GROUP))
            self.offsets[groups] = _offsets_of(self.kind, self.scales[groups])[:, :: self.kind.scales]

    def multiply(self, factors_N: torch.Tensor) -> None:
        """Multiply each output by a factor, in place. The numbers of the blocks are rounded once more."""
        factors = _padded(factors_N.float()).view(-1, 1, _GROUP)
        for part in (self.scales, self.offsets):
            if part is not None:
                part.mul_(factors)
        if self.bias is not None:
            self.bias.mul_(factors.flatten())

    def unpacked(self) -> Blocks:
        """Return the matrix with an integer in each byte."""
        N, K = self.num_outputs, self.num_inputs
        parts = self.quants if self.kind is BlockKind.Q8 else _of_words(self.quants, self.kind.bits)
        quants_NK = parts.permute(0, 2, 4, 1, 3, 5).reshape(-1, K)[:N]
        if self.kind is BlockKind.Q8:
            quants_NK = (quants_NK ^ 128).view(torch.int8)
        scales_NS, offsets_NB = (
            None if part is None else part.transpose(1, 2).reshape(-1, part.shape[1])[:N]
            for part in (self.scales, self.offsets)
        )
        assert scales_NS is not None
        return Blocks(self.kind, quants_NK, scales_NS, offsets_NB)

    @classmethod
    def joined(cls, parts: Sequence[PackedBlocks], bias: torch.Tensor | None = None) -> PackedBlocks:
        """Return the matrix with the outputs of all parts, which have the same inputs; as `Blocks.joined`. It lasts as
        long as the model that it is made for."""
        whole = all(part.num_outputs % _GROUP == 0 for part in parts[:-1])
        if not whole or len({(part.kind, part.offsets is None) for part in parts}) > 1:
            return cls(Blocks.joined([part.unpacked() for part in parts]), bias)
        first = parts[0]
        shape = sum(part.num_outputs for part in parts), first.num_inputs
        made = cls.unfilled(first.kind, shape, offsets=first.offsets is not None, bias=bias, lasts=True)
        torch.cat([part.quants for part in parts], out=made.quants)
        torch.cat([part.scales for part in parts], out=made.scales)
        if made.offsets is not None:
            torch.cat([part.offsets for part in parts if part.offsets is not None], out=made.offsets)
        return made

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
        call = LinearCall(self, x_MK)
        if M:
            native().lockstep_block_linear(ctypes.byref(call.args))
        return call.out_MN

    def __repr__(self) -> str:
        return f"<PackedBlocks {self.num_inputs} -> {self.num_outputs} {self.kind.name}>"


class LinearCall:
    """The arguments of one product by itself, and the memory that they point to.

    `tile_rows`: in place of the matrix's own; with a number other than 0 the process may use tiles.
    """

    def __init__(self, weights: PackedBlocks, x_MK: torch.Tensor, tile_rows: int | None = None) -> None:
        M, K = x_MK.shape
        self._owned = weights, x_MK
        self.out_MN = torch.empty(M, weights.num_outputs, dtype=x_MK.dtype)
        self._scratch = torch.empty(rows_bytes(M, K), dtype=torch.uint8)
        self.args = _LinearArgs(
            weights.args,
            x_MK.data_ptr(),
            self.out_MN.data_ptr(),
            self._scratch.data_ptr(),
            M,
            x_MK.dtype == torch.bfloat16,
        )
        if tile_rows is not None:
            self.args.weights.tile_rows = tile_rows


def _padded(rows_N: torch.Tensor) -> torch.Tensor:
    """Append zeros up to a whole group of outputs."""
    missing = -len(rows_N) % _GROUP
    return (
        torch.cat([rows_N, rows_N.new_zeros(missing, *rows_N.shape[1:])]).contiguous()
        if missing
        else rows_N.contiguous()
    )
