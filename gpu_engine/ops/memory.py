"""How many bytes an engine's weights, pages and buffers take, summed over the tensors that it holds.

Invariant: memory that two tensors share counts once.

Not responsible for: the memory of Python, torch, CUDA's context, captured graphs, activations and logits, the network
and pages of a drafter inside the step, the shared segment (see shared_mem/layout.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gpu_engine.api.stats import MemoryUse
from gpu_engine.model.loaded_model import LoadedModel
from gpu_engine.model.states import SequenceStates
from kernels.forward import Forward
from kernels.kv_pages import KVPages

_HOLDERS = ("torch.nn.", "transformers.models.", "gpu_engine.model.", "kernels.")
"""Packages whose objects hold weights."""


def memory_use(
    model: LoadedModel, pages: Sequence[KVPages], *buffers: object, states: SequenceStates | None = None
) -> MemoryUse:
    """Return the memory of an engine on this rank.

    Args:
        model: the target.
        pages: its KV cache, one entry a layer with attention.
        buffers: tensors, and dataclasses of tensors.
        states: of the recurrent layers; None: it has none.

    """
    cache = _page_bytes(pages)
    fields = (tensor for each in buffers for tensor in _fields(each))
    return MemoryUse(
        weight_bytes(model), cache, _distinct(fields), state_bytes=states.num_bytes if states is not None else 0
    )


def with_draft_model(
    use: MemoryUse, model: LoadedModel, pages: Sequence[KVPages], buffers: Sequence[object] = ()
) -> MemoryUse:
    """Return `use` with the weights and the pages of a decoupled draft model, and with its own buffers."""
    fields = (tensor for each in buffers for tensor in _fields(each))
    return use._replace(draft_bytes=weight_bytes(model) + _page_bytes(pages) + _distinct(fields))


def weight_bytes(model: LoadedModel) -> int:
    """Return the bytes of the weights and tables that a loaded model holds, copies included.

    These are all tensors that its modules and its fused parts refer to; KV pages, scratch memory and logits do not
    count.
    """
    return _distinct(_tensors(model))


def _page_bytes(pages: Sequence[KVPages]) -> int:
    return sum(part.nbytes for layer in pages for part in layer.tensors)


def _distinct(tensors: Iterator[torch.Tensor]) -> int:
    """Return the bytes of the memory that the tensors share."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        # oneDNN's packed weights have no storage of torch's, and no two share one.
        if tensor.is_mkldnn:
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


def _fields(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _fields(getattr(value, field.name))


def _tensors(model: LoadedModel) -> Iterator[torch.Tensor]:
    """Yield every tensor that the model or its fused parts refer to; one tensor comes once."""
    seen: set[int] = set()
    waiting: list[Any] = [model.net, model.fused]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        else:
            waiting += _referred(item)


def _referred(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, list | tuple):
        return list(item)
    if isinstance(item, type | KVPages) or not type(item).__module__.startswith(_HOLDERS):
        return []
    slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    fields = [*getattr(item, "__dict__", {}).values(), *(getattr(item, name) for name in slots if hasattr(item, name))]
    # The native forward's own tensors are its scratch memory and its logits.
    return [field for field in fields if not (isinstance(item, Forward) and isinstance(field, torch.Tensor))]
