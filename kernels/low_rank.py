"""Low-rank matrices next to a model's products (LoRA) on a CPU: their memory, and the product y += B (scale * A x).

Invariant: a row depends only on its own input and its own adapter, bit for bit, whatever else is in the call; a row
without an adapter is not touched. Not responsible for: which files an adapter comes from, and which row has which
adapter (see gpu_engine/model/adapters/).

Shapes: N rows, R rank, I inputs, O outputs of a part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.library import native

MAX_PARTS = 3
"""Products that may be joined to one: those of q, k and v."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRankPart:
    """The matrices of one product, which is joined with others to one."""

    a_RI: torch.Tensor
    """bfloat16 or float32, contiguous."""
    b_RO: torch.Tensor
    """In the same dtype, contiguous."""
    begin: int
    """The first of its outputs among those of the joined product."""
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """R."""
        return len(self.a_RI)


class _Part(ctypes.Structure):
    """Mirror of `struct low_rank_part`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("a", "b")],
        *[(name, ctypes.c_int64) for name in ("rank", "begin", "end")],
        ("scale", ctypes.c_float),
        ("bf16", ctypes.c_int32),
    ]


class _LowRank(ctypes.Structure):
    """Mirror of `struct low_rank`."""

    _fields_ = [("parts", _Part * MAX_PARTS), *[(name, ctypes.c_int64) for name in ("num_parts", "inputs")]]


class _Args(ctypes.Structure):
    """Mirror of `struct low_rank_args`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("adapters", "numbers", "x", "y", "scratch")],
        *[(name, ctypes.c_int64) for name in ("product", "count", "rows_each", "rows", "inputs", "outputs", "rank")],
        ("bf16", ctypes.c_int32),
    ]


class LowRankTable:
    """The adapters of one model, by number; number 0 is none. Owns what it points to.

    An entry is written while no forward has a row with its number; then one thread may write it while another computes.
    """

    def __init__(self, num_products: int, max_adapters: int) -> None:
        self.num_products = num_products
        self._entries = (ctypes.c_void_p * (max_adapters + 1))()
        self._owned: dict[int, tuple[object, ...]] = {}
        self._ranks: dict[int, int] = {}
        """Replaced, never changed: another thread may read it."""
        self._args = _Args()
        self._scratch = torch.empty(0)

    @property
    def address(self) -> int:
        """Address of the table, for native code."""
        return ctypes.addressof(self._entries)

    @property
    def max_rank(self) -> int:
        """The most that the ranks of a product's parts are together, over all adapters."""
        return max(self._ranks.values(), default=0)

    def put(self, number: int, products: Mapping[int, Sequence[LowRankPart]]) -> None:
        """Make adapter `number` of the parts of each product that it changes."""
        assert 0 < number < len(self._entries), number
        assert number not in self._owned, number
        rows = (_LowRank * self.num_products)()
        for product, parts in products.items():
            assert 0 < len(parts) <= MAX_PARTS, parts
            rows[product].num_parts, rows[product].inputs = len(parts), parts[0].a_RI.shape[1]
            for row, part in zip(rows[product].parts, parts, strict=False):
                assert part.a_RI.dtype == part.b_RO.dtype
                assert part.a_RI.dtype in (torch.bfloat16, torch.float32), part.a_RI.dtype
                assert part.a_RI.is_contiguous()
                assert part.b_RO.is_contiguous()
                assert part.a_RI.shape == (len(part.b_RO), rows[product].inputs), part
                row.a, row.b, row.rank = part.a_RI.data_ptr(), part.b_RO.data_ptr(), part.rank
                row.begin, row.end = part.begin, part.begin + part.b_RO.shape[1]
                row.scale, row.bf16 = part.scale, part.a_RI.dtype == torch.bfloat16
        self._owned[number] = (rows, products)
        rank = max((sum(part.rank for part in parts) for parts in products.values()), default=0)
        self._ranks = {**self._ranks, number: rank}
        self._entries[number] = ctypes.addressof(rows)

    def remove(self, number: int) -> None:
        """Release the memory of adapter `number`."""
        self._entries[number] = None
        self._ranks = {other: rank for other, rank in self._ranks.items() if other != number}
        del self._owned[number]

    def add(self, product: int, x_NI: torch.Tensor, y_NO: torch.Tensor, numbers_B: torch.Tensor, each: int) -> None:
        """Add what the rows' adapters have for `product` to `y_NO`, in place.

        `x_NI` and `y_NO` are bfloat16 or float32 and contiguous. `numbers_B` int32: row r has the adapter
        `numbers_B[r // each]`, and rows after the last sequence have that one's. Not for two threads at once.
        """
        args = self._args
        assert x_NI.dtype == y_NO.dtype, (x_NI.dtype, y_NO.dtype)
        assert x_NI.dtype in (torch.bfloat16, torch.float32), x_NI.dtype
        assert x_NI.is_contiguous()
        assert y_NO.is_contiguous()
        assert numbers_B.dtype == torch.int32
        assert numbers_B.is_contiguous()
        args.rows, args.inputs = x_NI.shape
        args.outputs, args.rank, args.bf16 = y_NO.shape[1], self.max_rank, x_NI.dtype == torch.bfloat16
        if self._scratch.numel() < args.rows * args.rank:
            self._scratch = torch.empty(args.rows * args.rank)
        args.adapters, args.numbers, args.scratch = self.address, numbers_B.data_ptr(), self._scratch.data_ptr()
        args.product, args.count, args.rows_each = product, len(numbers_B), each
        args.x, args.y = x_NI.data_ptr(), y_NO.data_ptr()
        native().lockstep_low_rank(ctypes.byref(args))

    def __repr__(self) -> str:
        return f"<LowRankTable of {len(self._owned)} adapters, {self.num_products} products>"
