"""Bitmasks: fetched, judged and applied, against plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda.bitmask import EMPTY_DRAFT, apply_bitmask

ALL, APPLY, FORCED, DEFER, DEAD_END = 0, 1, 2, 3, 4


def packed(legal: torch.Tensor) -> torch.Tensor:
    """bool [..., V] -> int32 [..., W], with the bits past the vocabulary set."""
    V = legal.shape[-1]
    padded = torch.ones(*legal.shape[:-1], (V + 31) // 32 * 32, dtype=torch.int64)
    padded[..., :V] = legal
    words = (padded.unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1)
    return words.to(torch.uint32).view(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pruned", [False, True])
def test_apply_sets_what_is_illegal(device: torch.device, dtype: torch.dtype, pruned: bool) -> None:
    V, B, R, P = 130, 4, 3, 2
    g = torch.Generator().manual_seed(1)
    kept = torch.randperm(V, generator=g)[:50].sort().values if pruned else torch.arange(V)
    legal = torch.rand(B, R, V, generator=g) < 0.4
    legal[1, 1] = False
    if pruned:
        legal[1, 0, kept] = False
    kinds = torch.tensor([[ALL, APPLY, APPLY], [APPLY, APPLY, APPLY], [FORCED, DEFER, ALL], [APPLY, APPLY, APPLY]])
    slots = torch.tensor([2, 1, 0, -1])
    forced = torch.full((B, R), int(kept[7]))
    logits = torch.randn(B * P, len(kept), generator=g).to(dtype)
    got, status = logits.to(device), torch.full((B, R), 99, dtype=torch.uint8, device=device)
    apply_bitmask(
        *(got, slots.int().to(device), kinds.to(torch.uint8).to(device), forced.int().to(device)),
        *(packed(legal).to(device), status),
        num_rows=P,
        d2t_V=(kept - torch.arange(len(kept))).int().to(device) if pruned else None,
    )
    want = logits.clone()
    for b, j in ((0, 1), (1, 0)):
        if not (pruned and b == 1):
            want[b * P + j, ~legal[slots[b], j, kept]] = -torch.inf
    want[2 * P] = torch.where(kept == kept[7], want[2 * P], -torch.inf)
    assert torch.equal(got.cpu(), want)
    empty = EMPTY_DRAFT if pruned else DEAD_END
    first = EMPTY_DRAFT if pruned else APPLY
    assert status[:, :P].tolist() == [[ALL, APPLY], [first, empty], [FORCED, DEFER], [ALL, ALL]]
