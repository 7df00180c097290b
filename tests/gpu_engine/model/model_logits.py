"""Logits of a model over pages of its own, of a whole forward or after a prefill."""

from __future__ import annotations

import torch

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.loader import LoadedModel
from gpu_engine.model.states import SequenceStates
from tests.kernels.vector_units import assert_same_on_every_unit


def some_ids(B: int, P: int) -> torch.Tensor:
    return torch.randint(0, 256, (B, P), generator=torch.Generator().manual_seed(P))


def context(model: LoadedModel, B: int, P: int) -> AttentionContext:
    """Return a context of P positions of B sequences, whose pages are in random order."""
    table = torch.randperm(4 * B, generator=torch.Generator().manual_seed(0)).view(B, 4).int()
    positions_BP = torch.arange(P, dtype=torch.int32).expand(B, P).contiguous()
    return AttentionContext(model.allocate_pages(4 * B, 16), table, positions_BP)


@torch.inference_mode()
def logits(model: LoadedModel, ids_BP: torch.Tensor, *, start: int = 0) -> torch.Tensor:
    """Return [B, P - start, V] in memory of their own, of sequences whose first `start` tokens were prefilled."""
    (B, P), ctx = ids_BP.shape, context(model, *ids_BP.shape)
    parts = [
        AttentionContext(ctx.pages, ctx.page_table_BN, ctx.positions_BP[:, part].contiguous())
        for part in (slice(0, start), slice(start, P))
    ]
    if model.recurrent:
        states = SequenceStates(model.recurrent, num_slots=B, max_rows=0)
        for part, first, count in zip(parts, (0, start), (start, P - start), strict=True):
            if count:
                part.recurrent = states.forward_of(list(range(B)), [first] * B, [count] * B, [count] * B)
    if start:
        model.prefill(ids_BP[:, :start], parts[0])
    return model.logits(ids_BP[:, start:], parts[1]).view(B, P - start, -1).clone()


@torch.inference_mode()
def assert_same_bits_in_any_company(model: LoadedModel) -> None:
    """Assert that a row's logits do not depend on what else is in its forward: other sequences, other tokens."""
    ids_BP = some_ids(5, 33)
    whole_BPV = logits(model, ids_BP)
    assert torch.equal(logits(model, ids_BP[2:3]), whole_BPV[2:3])
    ctx = context(model, 5, 33)
    for begin, end in ((0, 1), (1, 9), (9, 32), (32, 33)):
        part = AttentionContext(ctx.pages, ctx.page_table_BN, ctx.positions_BP[:, begin:end].contiguous())
        got_NV = model.logits(ids_BP[:, begin:end], part)
        assert torch.equal(got_NV.view(5, end - begin, -1), whole_BPV[:, begin:end])


def assert_same_bits_on_every_unit(model: LoadedModel) -> None:
    """Assert that a native forward's logits do not depend on the vector unit, after a prompt that it has prefilled."""
    ids_BP = some_ids(3, 40)
    assert_same_on_every_unit(lambda: logits(model, ids_BP, start=24))
