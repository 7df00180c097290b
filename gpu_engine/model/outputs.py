"""The tensors of a model by name: its logits, the states between its layers, and the results of its modules.

`logits` and `hidden_states.L` come from the forward that also serves requests. The result of a module comes from the
model's own forward, over the fused parts, with a hook on the module. Invariant: a name is offered only if a forward has
given one tensor with a row for each token under it. Not responsible for: choosing tokens and pages (see
step/outputs/tensors.py).

Shapes: P tokens of one sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gpu_engine.api.output_tensors import HIDDEN_STATES, LOGITS, OutputSpec
from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.experts import WideGate
from gpu_engine.model.loaded_model import LoadedModel
from gpu_engine.model.recording import recording

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_TOKENS = 7
"""Of the trial: no model has another dimension of this size."""
_PAGE_SIZE = 16


@torch.inference_mode()
def find_outputs(model: LoadedModel) -> dict[str, OutputSpec]:
    """Run a few tokens and return the form of every output's rows, by name. Memory of the model's forward is reused."""
    ids_1P = torch.arange(_TOKENS, device=model.device)[None] * 37 % model.vocab_size
    names = (LOGITS, *(f"{HIDDEN_STATES}{layer}" for layer in range(model.num_layers + 1)))
    rows = compute(model, names, ids_1P, _context(model))
    with recording(model.net) as record:
        model.own_forward(ids_1P, _context(model))
    inner = {module.inner for module in model.net.modules() if isinstance(module, WideGate)}
    for name, module in model.net.named_modules():
        calls = record.calls.get(_own(module), ()) if module not in inner else ()
        result = _rows(calls[0].output, _TOKENS) if name and len(calls) == 1 else None
        if result is not None and _TOKENS not in result.shape[1:]:
            rows[name] = result
    return {
        name: OutputSpec(_DTYPES[result.dtype], tuple(result.shape[1:]))
        for name, result in rows.items()
        if result.dtype in _DTYPES
    }


def compute(
    model: LoadedModel, names: Sequence[str], ids_1P: torch.Tensor, ctx: AttentionContext
) -> dict[str, torch.Tensor]:
    """Return the named outputs at P tokens, [P, ...] each, on the model's device; rows of padding are garbage.

    Writes keys and values into the pages of `ctx`. `logits` is valid until the next forward.
    """
    found: dict[str, torch.Tensor] = {}
    layers = {int(name.removeprefix(HIDDEN_STATES)): name for name in names if name.startswith(HIDDEN_STATES)}
    modules = [name for name in names if name != LOGITS and not name.startswith(HIDDEN_STATES)]
    if modules:
        found |= _of_modules(model, modules, ids_1P, _with_hidden(ctx, None))
    if layers or LOGITS in names:
        hidden: dict[int, torch.Tensor | None] = dict.fromkeys(layers)
        context = _with_hidden(ctx, hidden)
        if LOGITS in names:
            found[LOGITS] = model.logits(ids_1P, context)
        else:
            model.prefill(ids_1P, context)
        for layer, name in layers.items():
            states = hidden[layer]
            assert states is not None, name
            found[name] = states
    return found


def _of_modules(
    model: LoadedModel, names: Sequence[str], ids_1P: torch.Tensor, ctx: AttentionContext
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, _: nn.Module, args: Any, output: Any) -> None:
        rows = _rows(output, ids_1P.shape[1])
        assert rows is not None, name
        found[name] = rows

    modules = [_own(model.net.get_submodule(name)) for name in names]
    handles = [
        module.register_forward_hook(functools.partial(keep, name)) for name, module in zip(names, modules, strict=True)
    ]
    try:
        model.own_forward(ids_1P, ctx)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _own(module: nn.Module) -> nn.Module:
    """Return what has the result of transformers' module."""
    return module.inner if isinstance(module, WideGate) else module


def _rows(output: Any, num_tokens: int) -> torch.Tensor | None:
    """Return a module's result, or the first part of it, as [P, ...]; None where it has no row for each token."""
    first = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(first, torch.Tensor):
        return None
    if first.dim() >= 3 and first.shape[:2] == (1, num_tokens):
        return first[0]
    return first if first.dim() >= 2 and first.shape[0] == num_tokens else None


def _with_hidden(ctx: AttentionContext, hidden: dict[int, torch.Tensor | None] | None) -> AttentionContext:
    return replace(ctx, hidden=hidden)


def _context(model: LoadedModel) -> AttentionContext:
    return AttentionContext(
        model.allocate_pages(1, _PAGE_SIZE),
        torch.zeros(1, 1, dtype=torch.int32, device=model.device),
        torch.arange(_TOKENS, dtype=torch.int32, device=model.device)[None],
    )
