"""Experts over blocks that run in one native call, next to whatever router a model has.

Invariant: the native call runs only after its outputs were compared with those of the experts one by one. Not
responsible for: the experts (see model/experts.py), a whole native forward, which chooses the experts too (native.py).
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from gpu_engine.model.experts import Experts
from gpu_engine.model.quantised.linear import BlockLinear
from gpu_engine.model.recording import distance
from kernels.mixture import GatedBlock, MixtureProducts, Scratch

log = logging.getLogger(__name__)

_ROUNDING = 5e-2
"""Largest relative distance of a row: experts one by one round between their products, and another integer of 8 bits
may come out of that."""
_ACTIVATION = 1e-2
"""The same of an activation."""
_ROWS = 4


def mix_natively(net: nn.Module, dtype: torch.dtype) -> int:
    """Let the mixtures of a model of this dtype run in one native call each, where their experts are blocks of the same
    form; return how many do. The log has the reason why one does not."""
    count, reasons, scratch = 0, dict[str, None](), Scratch()
    for module in net.modules():
        if type(module) is not Experts:
            continue
        try:
            module.native = _native_of(module, dtype, scratch)
            count += 1
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as why:
            reasons[str(why)] = None
    for reason in reasons:
        log.info("experts run one by one: %s", reason)
    return count


@torch.inference_mode()
def _native_of(experts: Experts, dtype: torch.dtype, scratch: Scratch) -> MixtureProducts:
    """Return all products of experts in one call. Raises ValueError."""
    blocks = [
        GatedBlock(gate_up.packed, down.packed)
        for gate_up, down in zip(experts.gate_up, experts.down, strict=True)
        if isinstance(gate_up, BlockLinear) and isinstance(down, BlockLinear)
    ]
    if len(blocks) < experts.count:
        raise ValueError("their products are not all over blocks")
    act = experts.activation(dtype, _ACTIVATION)
    if act is None:
        raise ValueError("their activation has no kernel")
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"they have no kernel for {str(dtype).removeprefix('torch.')}")
    native, random = MixtureProducts(blocks, act, scratch), torch.Generator().manual_seed(0)
    rows_NH = torch.randn(_ROWS, blocks[0].gate_up.num_inputs, generator=random).to(dtype)
    call = rows_NH, torch.arange(2 * _ROWS).view(_ROWS, 2) % experts.count, torch.rand(_ROWS, 2, generator=random)
    got_NH = native(*call)
    assert got_NH is not None
    if (far := distance(got_NH, experts(*call))) > _ROUNDING:
        raise ValueError(f"the native call's outputs are {far:.1e} away")
    return native
