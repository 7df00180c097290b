"""The adapters' weights of one loaded model, and the rows of the forward that runs which have one.

A forward without such a row runs as if there were no adapters. Invariant: a row of the model has the same bits whatever
adapters other rows have. Not responsible for: names, memory bounds and the count of an adapter's users (see
registry.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gpu_engine.api.adapters import MAX_ADAPTERS
from gpu_engine.model.adapters.peft_files import LoraFiles, PromptFiles
from gpu_engine.model.adapters.places import AdaptedProduct, Places, wrap_products
from gpu_engine.model.adapters.virtual import VirtualEmbeddings
from kernels.forward import SequenceAdapters
from kernels.low_rank import LowRankTable

if TYPE_CHECKING:
    from gpu_engine.model.attention import AttentionContext


@dataclass(slots=True)
class _Rows:
    """The rows of a forward over wrapped products."""

    numbers_B: torch.Tensor
    each: int
    """Rows of a sequence."""
    padded: bool = False
    """There may be rows after the last sequence. They have the adapter of that one, and their results are not used."""


class AdapterPool:
    """Owned by a `LoadedModel`. Forwards are for one thread at a time; `put` and `remove` are for any.

    Args:
        net: the model, fused and packed.
        vocab_size: columns of the logits.
        no_prompts: why this server takes no prompt adapters; "" where it does.
        first: the modules whose products come first, in this order.
        folded: see `Places`.
    """

    def __init__(
        self,
        net: Any,
        vocab_size: int,
        *,
        no_prompts: str = "",
        first: Sequence[nn.Module] = (),
        folded: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self.places = Places(net, first, folded)
        self._virtual = VirtualEmbeddings(net.get_input_embeddings(), vocab_size, no_prompts)
        self._table = LowRankTable(self.places.num_products, MAX_ADAPTERS)
        self._rows: _Rows | None = None
        # A native forward takes the adapters itself; the model's own modules then run only for outputs of modules.
        wrap_products(self.places, lambda number, product: AdaptedProduct(product, number, self))

    def check(self, files: LoraFiles | PromptFiles) -> None:
        """Raise AdapterNotSupported, with the tensor and both shapes, where an adapter does not fit the model."""
        if isinstance(files, PromptFiles):
            self._virtual.check(files)
        else:
            self.places.check(files)

    def memory_bytes(self, files: LoraFiles | PromptFiles) -> int:
        """Return the bytes of an adapter's weights as they are held."""
        return files.memory_bytes

    def put(self, number: int, files: LoraFiles) -> None:
        """Make adapter `number` of these matrices, which were checked."""
        self._table.put(number, self.places.parts_of(files))

    def remove(self, number: int) -> None:
        """Release the memory of adapter `number`, which no sequence uses."""
        self._table.remove(number)

    def put_prompt(self, number: int, files: PromptFiles) -> int:
        """Make prompt adapter `number` of these embeddings, which were checked; return the id of its first virtual
        token."""
        return self._virtual.put(number, files)

    def remove_prompt(self, number: int) -> None:
        """Release the memory of prompt adapter `number`, which no sequence uses."""
        self._virtual.remove(number)

    def begin(self, ctx: AttentionContext) -> bool:
        """Prepare for a forward; return whether one of its rows has a LoRA adapter, and then call `end` after it."""
        ctx.virtual_VH = self._virtual.table_VH
        numbers_S, (B, P) = ctx.adapters_B, ctx.positions_BP.shape
        prompts = None if ctx.prompts is None else ctx.prompts.adapters_C
        if prompts is not None:
            numbers_S = torch.cat([prompts.new_zeros(B) if numbers_S is None else numbers_S, prompts])
        if numbers_S is None or not numbers_S.any():
            return False
        ctx.adapters = SequenceAdapters(self._table, numbers_S)
        if ctx.prompts is None:
            self._rows = _Rows(numbers_S, max(P, 1))
        else:
            counts_S = torch.tensor([P] * B + list(ctx.prompts.counts))
            self._rows = _Rows(numbers_S.repeat_interleave(counts_S), 1, padded=True)
        return True

    def end(self) -> None:
        """The forward has ended."""
        self._rows = None

    def add(self, product: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add what the rows' adapters have for a product to its output, in place; the rows are those of the forward."""
        rows = self._rows
        if rows is None:
            return
        x_NI, y_NO = x.reshape(-1, x.shape[-1]).contiguous(), y.view(-1, y.shape[-1])
        count = len(rows.numbers_B) * rows.each
        # A single row is computed twice by some products (see fused_forward.py).
        exact = len(x_NI) == count or (count == 1 and len(x_NI) == 2)
        assert exact or (rows.padded and len(x_NI) > count), (x.shape, count)
        self._table.add(product, x_NI, y_NO, rows.numbers_B, rows.each)

    def __repr__(self) -> str:
        return f"<AdapterPool {self._table} over {self.places}>"
