"""Chooses how the products of a model are quantised, and replaces them: by blocks on a CPU, by scaled rows on a GPU.

Invariant: a quantisation that was asked for by name is used or refused in one line that names the setting. Not
responsible for: the formats (see kernels/blocks.py, scaled.py), reading a file's own numbers (see gguf_blocks.py,
checkpoint.py).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from gpu_engine.api.config import EngineConfig
from gpu_engine.model.files.filled import MakeProduct, Weights
from gpu_engine.model.latent import EXPANSION, LatentExpansion, latent_shapes
from gpu_engine.model.loaded_model import ModelNotSupported
from gpu_engine.model.quantised.checkpoint import QuantisedCheckpoint
from gpu_engine.model.quantised.linear import (
    BlockLinear,
    BlocksOf,
    check_product,
    quantise_linears,
    some_rows,
    why_not_blocks,
)
from gpu_engine.model.quantised.matrices import ScaledRows
from gpu_engine.model.quantised.scaled import ScaledKind, ScaledLinear, rounded_rows, scale_linears, why_not_scaled
from kernels.blocks import BlockKind, Blocks, PackedBlocks, RawBlocks, can_multiply_blocks, quantised
from kernels.latent import LatentShape

log = logging.getLogger(__name__)

WhyNot = Callable[[ScaledKind, torch.device], str | None]
_BLOCKS = {
    BlockKind.Q4: "4-bit blocks",
    BlockKind.Q8: "8-bit blocks",
    BlockKind.F4: "4-bit floats",
    BlockKind.L4: "4-bit levels",
    BlockKind.Q5: "5-bit blocks",
    BlockKind.Q6: "6-bit blocks",
    BlockKind.P4: "4-bit blocks of two scales",
}


def forms_of(net: nn.Module) -> str:
    """Return the forms of the quantised products of a model with their number, for a reader; empty: it has none."""
    forms: Counter[str] = Counter()
    for module in net.modules():
        if isinstance(module, BlockLinear):
            forms[_BLOCKS[module.packed.kind]] += 1
        elif isinstance(module, ScaledLinear):
            forms[f"{module.kind.value} rows"] += 1
    return ", ".join(f"{form}: {count}" for form, count in sorted(forms.items()))


def quantise(
    config: EngineConfig,
    net: Any,
    gguf_file: Path | None,
    checkpoint: QuantisedCheckpoint | None = None,
    *,
    can_multiply: Callable[[], bool] = can_multiply_blocks,
    why_not: WhyNot = why_not_scaled,
) -> bool:
    """Replace the products of a loaded model as `config.quantization` says; return whether they were replaced.

    `gguf_file` is the file that the model came from, and `checkpoint` the quantised checkpoint, or None. The model is
    on the CPU; products of a GPU are made there. Raises ModelNotSupported.
    """
    if not config.on_cpu:
        return scale(config, net, checkpoint, torch.device(config.device), why_not)
    wanted, possible = config.quantization, can_multiply()
    if wanted not in ("none", "auto") and not possible:
        raise ModelNotSupported(f"quantization: {wanted} needs a CPU with AVX2, or an aarch64 one with dot products")
    if checkpoint is not None:
        why = why_floats(config, possible=possible) or checkpoint.why_no_blocks(net)
        if why is not None:
            log.info("dequantised the weights to %s: %s: %s", _dtype_of(net), checkpoint, why)
            if wanted in ("none", "auto"):
                return False
        count = quantise_linears(net, _rounded(config, checkpoint))
        log.info("quantised %d products: %s, %s", count, wanted, checkpoint.usage(count))
        return True
    if wanted == "none" or (wanted == "auto" and not (possible and gguf_file and config.dtype == "auto")):
        return False
    file = None
    if gguf_file is not None:
        from gpu_engine.model.quantised.gguf_blocks import GGUFBlocks  # its library is installed only for GGUF files

        file = GGUFBlocks(gguf_file)
    if wanted == "auto" and not (file and file.quantised):
        return False
    count = quantise_linears(net, file.of if file is not None and wanted != "int8" else _rounded(config, None))
    log.info("quantised %d products: %s", count, file if file and wanted != "int8" else wanted)
    return True


class OwnBlocks(Protocol):
    """Files that have matrices in blocks."""

    @property
    def quantised(self) -> bool:
        """True: most matrices are quantised."""

    def blocks_kind(self, name: str) -> BlockKind | None:
        """Return the kind of the product over a matrix's own blocks; None: it has no such product."""

    def has_offsets(self, name: str) -> bool:
        """Return whether a matrix's own blocks have offsets next to their scales."""

    def kind_name(self, name: str) -> str:
        """Return the name of a parameter's type."""

    def product(self, name: str, bias: torch.Tensor | None) -> BlockLinear:
        """Return the product by the blocks of a matrix that has a `blocks_kind`."""


class ReadProducts:
    """The products over blocks that take the places of a model's linear layers while its files are read.

    Args:
        weights: the files.
        own: the same, where they may have blocks; None: every matrix is rounded.
        dtype: the one that a matrix without a product over its own blocks has before it is rounded.
        rounded: to what, but for the output head, which has 8 bits.
        expansions: the latent attentions whose expansions are rounded from floats, by the expansions' paths.
    """

    def __init__(
        self,
        weights: Weights,
        own: OwnBlocks | None,
        dtype: torch.dtype,
        rounded: BlockKind,
        expansions: Mapping[str, LatentShape],
    ) -> None:
        self._weights, self._own, self._dtype, self._rounded = weights, own, dtype, rounded
        self._expansions = expansions
        self._used: Counter[str] = Counter()
        """Matrices whose own blocks are multiplied, by their type in the file."""
        self._again = 0
        self._lock = threading.Lock()

    def of(self, path: str, parent: nn.Module, linear: nn.Linear) -> MakeProduct | None:
        """Return what makes the product in a layer's place; None: the layer stays, and the log names it."""
        if path in self._expansions:
            return self._expand
        if (why := why_not_blocks(linear, parent)) is not None:
            log.info("not quantised: %s %s", path, why)
            return None
        return self._make

    def _own_of(self, path: str, source: str) -> OwnBlocks | None:
        """Return the files, if the product in the place of the layer `path` is over the blocks that they have."""
        if self._own is None or path in self._expansions or self._own.blocks_kind(source) is None:
            return None
        return self._own

    def kind_of(self, path: str, source: str) -> BlockKind:
        """Return the kind of the product in the place of the layer `path`, whose weight the files call `source`."""
        own = self._own_of(path, source)
        kind = None if own is None else own.blocks_kind(source)
        return kind if kind is not None else BlockKind.Q8 if path == "lm_head" else self._rounded

    def has_offsets(self, path: str, source: str) -> bool:
        """Return whether the product in the place of the layer `path`, whose weight is `source`, has offsets."""
        own = self._own_of(path, source)
        return self.kind_of(path, source) is BlockKind.Q4 if own is None else own.has_offsets(source)

    def _expand(self, path: str, source: str, bias: torch.Tensor | None) -> LatentExpansion:
        return LatentExpansion(self._expansions[path], self._weights.tensor(source, self._dtype), self._rounded)

    def _make(self, path: str, source: str, bias: torch.Tensor | None) -> BlockLinear:
        own = self._own_of(path, source)
        with self._lock:
            if own is not None:
                self._used[own.kind_name(source)] += 1
            else:
                self._again += 1
        if own is not None:
            return own.product(source, bias)
        return rounded_product(path, self._weights, source, self._dtype, self.kind_of(path, source), bias)

    def __str__(self) -> str:
        """For the log: the kinds of the products."""
        if self._own is None:
            return "q4" if self._rounded is BlockKind.Q4 else "int8"
        kinds = [f"{count} of {kind}" for kind, count in sorted(self._used.items())]
        return ", ".join([*kinds, *([f"{self._again} rounded again"] if self._again else [])])


def rounded_kind(config: EngineConfig, *, of_gguf: bool) -> BlockKind:
    """Return what matrices without blocks of their own are rounded to, except for the output head, which has 8 bits.

    `of_gguf`: the model comes from a GGUF file, whose matrices have blocks of their own with "q4".
    """
    return BlockKind.Q4 if config.quantization == "q4" and not of_gguf else BlockKind.Q8


def products_while_reading(
    config: EngineConfig, net: nn.Module, weights: Weights, own: OwnBlocks | None, dtype: torch.dtype, *, of_gguf: bool
) -> ReadProducts | None:
    """Return the products of a model that is read for a CPU, or None where `config.quantization` leaves its weights.

    `own`: the files, if they may have blocks; `of_gguf`: see `rounded_kind`. Raises ModelNotSupported.
    """
    wanted, possible = config.quantization, can_multiply_blocks()
    if wanted not in ("none", "auto") and not possible:
        raise ModelNotSupported(f"quantization: {wanted} needs a CPU with AVX2, or an aarch64 one with dot products")
    takes = possible and own is not None and config.dtype == "auto" and own.quantised
    if wanted == "none" or (wanted == "auto" and not takes):
        return None
    expansions = {f"{path}.{EXPANSION}": shape for path, shape in latent_shapes(config, net).items()}
    own = None if wanted == "int8" else own
    return ReadProducts(weights, own, dtype, rounded_kind(config, of_gguf=of_gguf), expansions)


def rounded_product(
    path: str, weights: Weights, source: str, dtype: torch.dtype, kind: BlockKind, bias: torch.Tensor | None
) -> BlockLinear:
    """Return a product over a matrix that is rounded to nearest while it is read.

    Raises RuntimeError where it differs from the rounded matrix.
    """
    shape = weights.shape(source)
    assert shape is not None, source
    N, K = shape
    packed = PackedBlocks.unfilled(kind, (N, K), offsets=kind is BlockKind.Q4, bias=bias)
    rows_n, wanted = some_rows(N), []
    for first, part_nK in weights.rows(source, dtype):
        blocks = quantised(part_nK, kind)
        packed.put(first, len(part_nK), RawBlocks.of(blocks))
        here_n = rows_n[(rows_n >= first) & (rows_n < first + len(part_nK))] - first
        wanted.append(blocks.rows(here_n).dequantised())
    product = BlockLinear(packed, bias)
    check_product(path, product, rows_n, torch.cat(wanted))
    return product


def scale(
    config: EngineConfig, net: Any, checkpoint: QuantisedCheckpoint | None, device: torch.device, why_not: WhyNot
) -> bool:
    """Replace the products of a model by scaled ones on `device`; as `quantise`.

    A named kind rounds the weights, except for the output head, and takes a checkpoint's own numbers of that kind.
    "auto" takes those of a checkpoint that was made for inputs of 8 bits, and rounds nothing.
    """
    named = ScaledKind(config.quantization) if config.quantization not in ("auto", "none") else None
    if named is not None and (why := why_not(named, device)) is not None:
        raise ModelNotSupported(f"quantization: {why}")
    if named is None:
        if checkpoint is None:
            return False
        why = _why_not_scaled(config, net, checkpoint, device, why_not)
        if why is not None:
            log.info("dequantised the weights to %s: %s: %s", _dtype_of(net), checkpoint, why)
            return False
    head, only = net.get_output_embeddings(), named.numbers.dtype if named else None

    def rows(name: str, linear: nn.Linear) -> ScaledRows | None:
        own = None if checkpoint is None else checkpoint.rows_of(name, linear, only=only)
        if own is not None or named is None or linear is head:
            return own
        return rounded_rows(linear.weight.to(device), named)

    count = scale_linears(net, rows, device)
    usage = "" if checkpoint is None else f", {checkpoint.usage(count)}"
    log.info("quantised %d products: %s%s", count, config.quantization, usage)
    return True


def _why_not_scaled(
    config: EngineConfig, net: nn.Module, checkpoint: QuantisedCheckpoint, device: torch.device, why_not: WhyNot
) -> str | None:
    """Return why "auto" or "none" does not take the checkpoint's own numbers on a GPU, or None where it does."""
    if config.quantization == "none":
        return "quantization is none"
    if config.dtype == "float32":
        return "dtype is float32"
    why = checkpoint.why_no_rows(net)
    if why is not None:
        return why
    kinds = (kind for kind in ScaledKind if kind.numbers.dtype in checkpoint.row_types)
    return next((why for kind in kinds if (why := why_not(kind, device)) is not None), None)


def _dtype_of(net: nn.Module) -> str:
    return str(next(net.parameters()).dtype).removeprefix("torch.")


def why_floats(config: EngineConfig, *, possible: bool) -> str | None:
    """Return why a CPU's products do not run from the own numbers of any quantised checkpoint, or None where they may.

    `possible`: the CPU multiplies blocks.
    """
    if config.quantization == "none":
        return "quantization is none"
    if not possible:
        return "its integers are multiplied only on CPUs with AVX2, or of aarch64 with dot products"
    if config.quantization == "auto" and config.dtype != "auto":
        return f"dtype is {config.dtype}"
    return None


def _rounded(config: EngineConfig, checkpoint: QuantisedCheckpoint | None) -> BlocksOf:
    """The checkpoint's own blocks, where it has them; else rounding to nearest, with 8 bits for the output head."""

    def blocks(name: str, linear: nn.Linear) -> Blocks:
        kind = BlockKind.Q8 if name == "lm_head" else rounded_kind(config, of_gguf=False)
        only = kind if config.quantization == "int8" else None
        own = None if checkpoint is None else checkpoint.of(name, linear, only=only)
        return quantised(linear.weight, kind) if own is None else own

    return blocks
