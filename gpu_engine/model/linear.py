"""Linear layers with the interface of `nn.Linear`: tiles or oneDNN's prepacked products on a CPU, our kernel on a GPU,
and cuBLAS where its bits are the kernel's.

Packing once saves the reorder that a plain product does at every call (2x per step, measured in docs/log/).
Invariant: a row's result has the same bits for any number of rows; on a GPU that holds in the 16-bit types. oneDNN
guarantees it only between two rows and a limit that is found at load: a single row is doubled, and larger calls are
cut.

Not responsible for: weights in blocks (see quantised/linear.py), weights of 8 bits on a GPU (see quantised/scaled.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gpu_engine.model.names import ModelNotSupported
from gpu_engine.model.quantised.linear import BlockLinear, joined_blocks
from gpu_engine.model.quantised.scaled import ScaledLinear, joined_scaled
from gpu_engine.model.recording import distance
from kernels.float_tiles import FloatTiles
from kernels.fused_arguments import Activation
from kernels.library import native

if TYPE_CHECKING:
    from kernels.cuda.products import Tile

log = logging.getLogger(__name__)

_ROUNDING = 1e-2
"""Largest relative distance of two products in a 16-bit type that counts as equal."""
_ROWS_HINT = 8
"""Rows that the packed layout is tuned for: a verify step of one sequence."""


class PackedLinear(nn.Module):
    """`nn.Linear` on a CPU, with its weight in tiles of the matrix unit or in oneDNN's own layout. Holds no reference
    to the original weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().contiguous()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.packed = (
            FloatTiles(weight, self.bias)
            if FloatTiles.usable and FloatTiles.fits(weight)
            else PackedByLibrary(weight, self.bias)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias; [..., in_features] -> [..., out_features]."""
        return self.packed(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    @property
    def pairs(self) -> bool:
        """A single row is computed as two equal rows."""
        return isinstance(self.packed, PackedByLibrary)

    def extra_repr(self) -> str:
        """Name the shape."""
        return f"in_features={self.in_features}, out_features={self.out_features}, packed={self.packed!r}"


class PackedByLibrary:
    """A matrix in oneDNN's own layout. Raises ModelNotSupported where the CPU has no products of its type.

    With AMX, oneDNN sums the products of many rows of 16 bits in other orders, so calls are cut into pieces of as many
    rows as have the bits of two.
    """

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self.num_outputs, self.num_inputs = weight_NK.shape
        if weight_NK.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            raise ModelNotSupported(
                "dtype: torch has no products of bfloat16 for this CPU; they need AVX-512, AVX-NE-CONVERT, or bf16 of "
                "Armv8.6. Use float32, or a quantization"
            )
        self._layout: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK, _ROWS_HINT)
        self._bias, self._dtype = bias_N, weight_NK.dtype
        self._product = torch.ops.mkldnn._linear_pointwise.default
        # Only on tiles does oneDNN sum in other orders: always, if the CPU has them, whatever our own setting is.
        may_differ = weight_NK.dtype.itemsize == 2 and bool(native().lockstep_has_float_tiles())
        self.most_rows = self._equal_rows() if may_differ else 0
        """Rows of a piece; 0: all of a call."""

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self._layout.nbytes

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias, [M, K] -> [M, N]."""
        if len(x_MK) == 1:
            return self._whole(torch.cat([x_MK, x_MK]))[:1]
        if not self.most_rows or len(x_MK) <= self.most_rows:
            return self._whole(x_MK)
        pieces = list(x_MK.split(self.most_rows))
        if len(pieces[-1]) == 1:
            pieces[-1] = torch.cat([pieces[-1], pieces[-1]])
        return torch.cat([self._whole(piece) for piece in pieces])[: len(x_MK)]

    def _whole(self, x_MK: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._product(x_MK, self._layout, self._bias, "none", [], "")
        return out

    def _equal_rows(self) -> int:
        """Return the rows up to which a row has the bits that it has in a call of two, as far as they are compared."""
        kind = (self.num_outputs, self.num_inputs, self._dtype, torch.get_num_threads())
        if kind not in _EQUAL_ROWS:
            x_MK = torch.randn(_MANY_ROWS[-1], self.num_inputs, generator=torch.Generator().manual_seed(0))
            x_MK = x_MK.to(self._dtype)
            pairs = torch.cat([self._whole(pair) for pair in x_MK[:_PIECE].split(2)])
            want = torch.cat([pairs, *(self._whole(piece) for piece in x_MK[_PIECE:].split(_PIECE))])
            first = next((rows for rows in _MANY_ROWS if not torch.equal(self._whole(x_MK[:rows]), want[:rows])), None)
            _EQUAL_ROWS[kind] = max(rows for rows in (2, *_MANY_ROWS) if first is None or rows < first)
        return _EQUAL_ROWS[kind]

    def __repr__(self) -> str:
        return f"<PackedByLibrary {self.num_outputs} x {self.num_inputs}>"


_MANY_ROWS = (4, 8, 16, 24, 32, 33, 48, 64, 65, *range(80, 257, 16))
"""Numbers of rows that are compared; a forward with prompts has a multiple of 16."""
_PIECE = 16
"""Rows of a call whose bits the others must have; it has those of two."""
_EQUAL_ROWS: dict[tuple[int, int, torch.dtype, int], int] = {}
"""By shape, type and threads. Matrices of one kind are compared once a process."""


def has_weights(module: nn.Module) -> bool:
    """Return whether a module has parameters, or products, whose weights may be blocks and so no parameters."""
    return any(
        hasattr(part, "in_features") or next(part.parameters(recurse=False), None) is not None
        for part in module.modules()
    )


class InvariantLinear(nn.Module):
    """`nn.Linear` on a GPU. Shares the weight; a row has the same bits beside any others (kernels/cuda/products.py).

    The library multiplies more than `_OWN_ROWS` rows, for numbers of rows at which its bits are those of the kernel.
    `checks`: None shares those of the process.
    """

    def __init__(self, linear: nn.Linear, checks: BitChecks | None = None) -> None:
        super().__init__()
        from kernels.cuda.fused import gated  # a CPU install has no Triton
        from kernels.cuda.products import gated_product, product

        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, _bias(linear)
        self._product, self._product_gated, self._gated = product, gated_product, gated
        self._checks = checks or CHECKS
        self.kind = _Kind(self.weight.shape, self.weight.dtype, self.weight.device, self.bias is not None)
        """What the bits of a product depend on, next to the numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias; [..., in_features] -> [..., out_features]."""
        rows = x.numel() // self.in_features
        if rows == 0 or (rows > _OWN_ROWS and self._checks.library_agrees(self, rows)):
            return self.by_library(x)
        return self.by_kernel(x.reshape(rows, self.in_features)).view(*x.shape[:-1], self.out_features)

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product as cuBLAS computes it; [..., in_features] -> [..., out_features]."""
        return nn.functional.linear(x, self.weight, self.bias)

    def by_kernel(self, x_MK: torch.Tensor, *, smallest_tile: bool = False) -> torch.Tensor:
        """Return the product as the kernel computes it, [M, K] -> [M, N]: in the fastest tile that the device may
        use, or in the smallest."""
        return self._product(x_MK, self.weight, self.bias, tile=self._checks.tile_of(self, smallest=smallest_tile))

    def gated(self, x_NK: torch.Tensor, act: Activation) -> torch.Tensor:
        """Return act(gate) * up of a product whose outputs are gate and then up: in one launch for few rows."""
        if not 0 < len(x_NK) <= _OWN_ROWS:
            return self._gated(self(x_NK), act)
        return self._product_gated(x_NK, self.weight, act, self.bias, tile=self._checks.tile_of(self))

    def gates_in_one(self, act: Activation) -> bool:
        """Return whether `gated` has the bits of the two kernels. Each kind of matrix is compared once."""
        return self._checks.gates_agree(self, act)

    def gates_apart(self, x_NK: torch.Tensor, act: Activation) -> torch.Tensor:
        """Return the same from two launches."""
        return self._gated(self(x_NK), act)

    def extra_repr(self) -> str:
        """Name the shape."""
        return f"in_features={self.in_features}, out_features={self.out_features}, invariant"


class _Kind(NamedTuple):
    """A kind of matrix; all of one kind are compared once."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    biased: bool

    def __str__(self) -> str:
        return f"{tuple(self.shape)}"


Draw = Callable[[torch.Tensor, int, int], torch.Tensor]
"""Returns inputs [rows, K] for a weight [N, K], a number of rows and a seed."""


def random_rows(weight_NK: torch.Tensor, rows: int, seed: int) -> torch.Tensor:
    """Return normally distributed inputs on the weight's device, in its dtype."""
    device = weight_NK.device
    made = torch.randn(rows, weight_NK.shape[1], generator=torch.Generator(device).manual_seed(seed), device=device)
    return made.to(weight_NK.dtype)


class BitChecks:
    """Which ways to multiply have equal bits on this device, compared once a kind of matrix and number of rows.

    Two sums of one product in another order differ in fp32, and after rounding to 16 bits in one output of some
    10,000. A comparison therefore covers `outputs` of them, or `most_draws` inputs: with fewer it could miss a split
    of K.
    """

    def __init__(self, outputs: int = 1 << 20, most_draws: int = 16, draw: Draw = random_rows) -> None:
        self._outputs, self._most_draws, self._draw = outputs, most_draws, draw
        self._smallest: dict[_Kind, bool] = {}
        self._library: dict[tuple[_Kind, int], bool] = {}
        self._gates: dict[tuple[_Kind, Activation], bool] = {}

    def tile_of(self, linear: InvariantLinear, *, smallest: bool = False) -> Tile | None:
        """Return the tile that the kernel must use; None: the fastest."""
        if not smallest and not self._smallest.get(linear.kind):
            return None
        from kernels.cuda.products import Tile, shared_bytes  # a CPU install has no Triton

        N, K = linear.weight.shape
        return Tile.of(1, N, K, shared_bytes(linear.weight.device))

    def kernel_agrees(self, linear: InvariantLinear) -> bool:
        """Return whether the kernel builds and gives the library's numbers, to rounding. Compares the bits of its
        tiles too: where they differ, as two matrix instructions may, every number of rows uses the smallest tile."""
        kind = linear.kind
        if kind in self._smallest:
            return True
        try:
            x_MK = self._draw(linear.weight, 3, 0)
            far = distance(linear.by_kernel(x_MK), linear.by_library(x_MK))
            equal = all(self._same(linear, rows, linear.by_kernel) for rows in _TILED_ROWS)
        except Exception as error:  # of the compiler: a kernel that does not build must not end the start
            log.warning("products of %s go to cuBLAS: %s: %s", kind, type(error).__name__, error)
            return False
        if far > _ROUNDING:
            log.warning("products of %s go to cuBLAS: ours are %.1e away", kind, far)
            return False
        if not equal:
            log.warning("products of %s are slower: the kernel's tiles differ in their bits on this device", kind)
        self._smallest[kind] = not equal
        return True

    def library_agrees(self, linear: InvariantLinear, rows: int) -> bool:
        """Return whether the library's product of so many rows has the kernel's bits. Where it has not, the tile of so
        many rows is compared as well.

        Compares at the first call, which may not be captured: within a capture, what was not compared is False.
        """
        known = self._library.get((linear.kind, rows))
        if known is not None:
            return known
        if linear.weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        try:
            agrees = self._same(linear, rows, linear.by_library)
            if not agrees and not self._same(linear, rows, linear.by_kernel):
                self._smallest[linear.kind] = True
        except torch.OutOfMemoryError as error:
            log.warning("products of %s by %d rows use our kernel: no memory to compare: %s", linear.kind, rows, error)
            agrees = False
        self._library[linear.kind, rows] = agrees
        log.debug("products of %s by %d rows: %s", linear.kind, rows, "cuBLAS" if agrees else "ours")
        return agrees

    def gates_agree(self, linear: InvariantLinear, act: Activation) -> bool:
        """Return whether a product and its activation in one kernel have the bits of the two kernels."""
        key = linear.kind, act
        if key not in self._gates:
            try:
                self._gates[key] = all(
                    torch.equal(linear.gated(x_MK, act), linear.gates_apart(x_MK, act))
                    for rows in (3, *_TILED_ROWS)
                    for x_MK in self._draws(linear, rows)
                )
            except Exception as error:  # of the compiler, as above
                log.warning("%s: %s", type(error).__name__, error)
                self._gates[key] = False
            if not self._gates[key]:
                log.warning("products of %s and their activation are two kernels", linear.kind)
        return self._gates[key]

    def _same(self, linear: InvariantLinear, rows: int, other: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Return whether `other` has the bits of the smallest tile. False for weights that could not show it."""
        for x_MK in self._draws(linear, rows):
            want_MN = linear.by_kernel(x_MK, smallest_tile=True)
            if not torch.equal(other(x_MK), want_MN) or not bool((want_MN != want_MN[0, 0]).any()):
                return False
        return True

    def _draws(self, linear: InvariantLinear, rows: int) -> Iterator[torch.Tensor]:
        """Yield as many random inputs as it takes for enough outputs."""
        for seed in range(min(self._most_draws, -(-self._outputs // (rows * linear.out_features)))):
            yield self._draw(linear.weight, rows, seed)

    def __repr__(self) -> str:
        return f"<BitChecks of {len(self._smallest)} kinds, {len(self._library)} by rows>"


CHECKS = BitChecks()
"""Of this process: verdicts depend on the device and its libraries only."""
_OWN_ROWS = 64
"""Up to so many rows the kernel is as fast as cuBLAS or faster (docs/log/)."""
_TILED_ROWS = (32, _OWN_ROWS)
"""Numbers of rows that use another tile than a few rows do."""


def invariant(linear: nn.Linear) -> nn.Module:
    """Return the same product with our kernel, where that takes it and agrees; else `linear`."""
    weight = linear.weight
    suits = weight.device.type == "cuda" and weight.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()
    if not suits or weight.shape[1] % 8:
        return linear
    made = InvariantLinear(linear)
    return made if CHECKS.kernel_agrees(made) else linear


def sum_in_fp32() -> None:
    """Have cuBLAS add parts of a sum of 16-bit products in fp32. For this process."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def replace_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` of a model on a GPU in place, where `invariant` has a kernel; return how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (better := invariant(child)) is not child:
                setattr(parent, name, better)
                count += 1
    return count


def replace_conv1d(model: nn.Module) -> int:
    """Replace every `Conv1D` of GPT-2's families, an `nn.Linear` with a transposed weight, by that; return how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not Conv1D:
                continue
            linear = nn.Linear(child.nx, child.nf, device="meta")
            linear.weight = nn.Parameter(child.weight.detach().T.contiguous(), requires_grad=False)
            linear.bias = nn.Parameter(child.bias.detach(), requires_grad=False)
            setattr(parent, name, linear)
            count += 1
    return count


def can_pack() -> bool:
    """Return whether torch has oneDNN's prepacked products."""
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


Product = nn.Linear | BlockLinear | ScaledLinear


def is_product(module: nn.Module) -> TypeGuard[Product]:
    """Return whether a module is a product in one of the forms that it has before it is packed or joined."""
    return type(module) in (nn.Linear, BlockLinear, ScaledLinear)


@torch.no_grad()
def multiply_outputs(linear: Product, factors_N: torch.Tensor) -> None:
    """Multiply the outputs of a product, in its weights; `factors_N` is float32, on any device."""
    if isinstance(linear, BlockLinear):
        linear.packed.multiply(factors_N)
    elif isinstance(linear, ScaledLinear):
        linear.scales_1N *= factors_N.to(linear.scales_1N.device)
    else:
        factors_N = factors_N.to(linear.weight.device)
        weight_NK = (linear.weight.float() * factors_N[:, None]).to(linear.weight.dtype)
        linear.weight = nn.Parameter(weight_NK, requires_grad=False)
    if linear.bias is not None:
        bias_N = (linear.bias.float() * factors_N.to(linear.bias.device)).to(linear.bias.dtype)
        linear.bias = nn.Parameter(bias_N, requires_grad=False) if isinstance(linear, nn.Linear) else bias_N


def joined(linears: Sequence[Product]) -> nn.Module:
    """Return one product for several of the same input, outputs side by side, in the form that suits its device.

    Holds a copy of the weights. Raises ValueError when inputs or biases differ in kind.
    """
    over_blocks = [item for item in linears if isinstance(item, BlockLinear)]
    scaled = [item for item in linears if isinstance(item, ScaledLinear)]
    if len(over_blocks) not in (0, len(linears)) or len(scaled) not in (0, len(linears)):
        raise ValueError(f"products of different kinds: {list(linears)}")
    if over_blocks:
        return joined_blocks(over_blocks)
    if scaled:
        return joined_scaled(scaled)
    return _joined_floats([item for item in linears if isinstance(item, nn.Linear)])


def _joined_floats(linears: Sequence[nn.Linear]) -> nn.Module:
    first, biases = linears[0], [_bias(item) for item in linears]
    given = [bias for bias in biases if bias is not None]
    if any(item.in_features != first.in_features for item in linears) or len(given) not in (0, len(linears)):
        raise ValueError(f"products with different inputs or biases: {list(linears)}")
    if len(linears) == 1:
        whole = first
    else:
        whole = nn.Linear(first.in_features, sum(item.out_features for item in linears), device="meta")
        whole.weight = nn.Parameter(torch.cat(tuple(item.weight for item in linears)), requires_grad=False)
        bias = nn.Parameter(torch.cat(given), requires_grad=False) if given else None
        whole.register_parameter("bias", bias)
    return PackedLinear(whole) if first.weight.device.type == "cpu" and can_pack() else invariant(whole)


def _bias(linear: nn.Linear) -> torch.Tensor | None:
    return linear.bias


def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` of a CPU model in place; return how many. A no-op where oneDNN is not built in."""
    if not can_pack():
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    count = len(found)
    while found:  # the list lets go of a weight as soon as that is packed
        parent, name, child = found.pop()
        setattr(parent, name, PackedLinear(child))
    return count
