"""The adapters' weights of a model on a GPU: stacks of a fixed size, which captured graphs read by an adapter's number.

A load writes into the part of its number; nothing is captured anew. A forward is captured twice: without any node of
adapters, and with the products of all. Invariant: nothing moves or grows after the start, and no part is written whose
number a sequence has. Not responsible for: names and users (see registry.py), the order of writes and replays (see
step/device/adapter_copies.py), which forward has adapters (`AttentionContext.adapters_B`).

Shapes: M adapters, T virtual tokens of one adapter, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gpu_engine.api.adapters import AdapterLimits
from gpu_engine.model.adapters.peft_files import AdapterNotSupported, LoraFiles, PromptFiles
from gpu_engine.model.adapters.places import AdaptedProduct, Places, wrap_products
from gpu_engine.model.adapters.virtual import refuse_unlike
from kernels.low_rank import MAX_PARTS
from kernels.low_rank_stacks import LowRankStacks, ProductStack

if TYPE_CHECKING:
    from gpu_engine.model.attention import AttentionContext

Writes = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Parts of the device's memory, and their new contents on the CPU."""
STAGED_ALIGNMENT = 16
Write = Callable[[Writes], None]
AddLowRank = Callable[[torch.Tensor, torch.Tensor, ProductStack, torch.Tensor, int], None]


@dataclass(slots=True)
class _Rows:
    """The rows of a forward over wrapped products."""

    numbers_B: torch.Tensor
    each: int
    """Rows of a sequence."""


class DeviceAdapterPool:
    """Owned by a `LoadedModel`. Forwards are for one thread at a time; `put` and `remove` are for any, one at a time.

    Args:
        net: the model, fused and on its device.
        vocab_size: columns of the logits.
        limits: of the settings.
        add: `kernels.cuda.low_rank.add_low_rank`.
        no_prompts: why this server takes no prompt adapters; "" where it does.
        folded: see `Places`.

    Raises AdapterNotSupported when the stacks need more than the limits allow.
    """

    def __init__(
        self,
        net: Any,
        vocab_size: int,
        limits: AdapterLimits,
        add: AddLowRank,
        *,
        no_prompts: str = "",
        folded: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        embedding = net.get_input_embeddings()
        weight: torch.Tensor = embedding.weight
        self.places, self._add = Places(net, folded=folded), add
        tokens = 0 if no_prompts else limits.max_virtual_tokens
        self.lora_bytes = LowRankStacks.num_bytes(self.places.shapes, limits.max_lora_rank, weight.dtype)
        self.prompt_bytes = tokens * weight.shape[1] * weight.dtype.itemsize
        _refuse_large(limits, self.lora_bytes, self.prompt_bytes)
        self._stacks = LowRankStacks(
            self.places.shapes, limits.max_adapters, limits.max_lora_rank, weight.dtype, weight.device
        )
        self._virtual = DeviceVirtualEmbeddings(
            embedding, vocab_size, (limits.max_adapters, tokens), self._adapts, no_prompts
        )
        self._rows: _Rows | None = None
        self._write: Write = _write_now
        wrap_products(self.places, lambda number, product: AdaptedProduct(product, number, self), self._adapts)

    @property
    def staging_bytes(self) -> int:
        """The most that one `put` writes, with each part of it at a multiple of `STAGED_ALIGNMENT`."""
        parts = 2 * MAX_PARTS * self.places.num_products + 2
        return max(self.lora_bytes, self.prompt_bytes) + STAGED_ALIGNMENT * parts

    def write_with(self, write: Write | None) -> None:
        """Write through `write` from now on, which puts its copies between the replays; None: at once, while none
        runs."""
        self._write = write or _write_now

    def memory_bytes(self, files: LoraFiles | PromptFiles) -> int:
        """Return what an adapter takes of the stacks: as much as any other one of its kind."""
        return self.lora_bytes if isinstance(files, LoraFiles) else self.prompt_bytes

    def check(self, files: LoraFiles | PromptFiles) -> None:
        """Raise AdapterNotSupported, with the tensor and both shapes, where an adapter does not fit the model."""
        if isinstance(files, PromptFiles):
            self._virtual.check(files)
        else:
            self.places.check(files)

    def put(self, number: int, files: LoraFiles) -> None:
        """Make adapter `number` of these matrices, which were checked. Blocks until they are on the device."""
        self._write(self._stacks.writes(number, self.places.parts_of(files)))

    def remove(self, number: int) -> None:
        """Do nothing: no sequence has the number, and the next adapter of that number overwrites it."""

    def put_prompt(self, number: int, files: PromptFiles) -> int:
        """Make prompt adapter `number` of these embeddings, which were checked; return the id of its first virtual
        token. Blocks as `put`."""
        self._write([self._virtual.write(number, files)])
        return self._virtual.first_token(number)

    def remove_prompt(self, number: int) -> None:
        """Do nothing, as `remove`."""

    def begin(self, ctx: AttentionContext) -> bool:
        """Prepare for a forward; return whether it has the products of adapters, and then call `end` after it."""
        if ctx.adapters_B is None:
            return False
        self._rows = _Rows(ctx.adapters_B.contiguous(), ctx.positions_BP.shape[1])
        return True

    def end(self) -> None:
        """The forward has ended."""
        self._rows = None

    def add(self, product: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add what the rows' adapters have for a product to its output, in place; the rows are those of the forward."""
        if self._rows is not None:
            x_NI, y_NO = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
            self._add(x_NI, y_NO, self._stacks.products[product], self._rows.numbers_B, self._rows.each)

    def _adapts(self) -> bool:
        return self._rows is not None

    def __repr__(self) -> str:
        return f"<DeviceAdapterPool {self._stacks} over {self.places}>"


class DeviceVirtualEmbeddings:
    """The embeddings of prompt adapters, whose ids are after those of the model's embedding.

    Adapter `number` has the T ids from `first_token` on. A forward looks every id up in both tables, and reads none on
    the host.

    Args:
        embedding: of the model. In forwards with adapters its calls return the adapters' rows as well.
        vocab_size: columns of the logits.
        size: (M, T).
        adapts: whether the forward that runs has adapters.
        refusal: why this server takes no prompt adapters; "" where it does.
    """

    def __init__(
        self, embedding: nn.Module, vocab_size: int, size: tuple[int, int], adapts: Callable[[], bool], refusal: str
    ) -> None:
        weight: Any = embedding.weight
        self._num_ids, self._hidden, self._size, self._adapts = int(weight.shape[0]), weight.shape[1], size, adapts
        self._refusal = refusal
        if self._num_ids < vocab_size:
            self._refusal = f"the embedding has {self._num_ids} rows for {vocab_size} tokens"
        self._table_MTH = torch.zeros(*size, self._hidden, dtype=weight.dtype, device=weight.device)
        self._ids: torch.Tensor | None = None
        if not self._refusal:
            embedding.register_forward_pre_hook(self._before)
            embedding.register_forward_hook(self._after)

    def check(self, files: PromptFiles) -> None:
        """Raise AdapterNotSupported where the embeddings do not fit the model."""
        refuse_unlike(files, self._hidden, self._refusal)

    def first_token(self, number: int) -> int:
        """Return the id of an adapter's first virtual token."""
        return self._num_ids + (number - 1) * self._size[1]

    def write(self, number: int, files: PromptFiles) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an adapter's part of the table, and its content."""
        rows_TH = files.embeddings_TH.to(self._table_MTH.dtype).contiguous()
        return self._table_MTH[number - 1, : len(rows_TH)], rows_TH

    def _before(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if not self._adapts():
            return None
        self._ids = args[0]
        return args[0].clamp(max=self._num_ids - 1), *args[1:]

    def _after(self, module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor | None:
        ids, self._ids = self._ids, None
        if ids is None:
            return None
        table_VH = self._table_MTH.view(-1, self._hidden)
        rows = table_VH[(ids - self._num_ids).clamp(min=0, max=len(table_VH) - 1)]
        return torch.where((ids >= self._num_ids)[..., None], rows.to(out.dtype), out)

    def __repr__(self) -> str:
        return f"<DeviceVirtualEmbeddings of {self._size[0]} adapters>"


def _refuse_large(limits: AdapterLimits, lora_bytes: int, prompt_bytes: int) -> None:
    needed = limits.max_adapters * (lora_bytes + prompt_bytes)
    if needed > limits.max_adapter_bytes:
        raise AdapterNotSupported(
            f"max_adapter_bytes: is {limits.max_adapter_bytes}, and {limits.max_adapters} adapters of each kind "
            f"(max_adapters) of rank {limits.max_lora_rank} (max_lora_rank) and {limits.max_virtual_tokens} virtual "
            f"tokens (max_virtual_tokens) take {needed} bytes of a GPU with this model"
        )


def _write_now(writes: Writes) -> None:
    for target, source in writes:
        target.copy_(source)
