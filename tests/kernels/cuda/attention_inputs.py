"""Inputs and pages of the attention kernels."""

from __future__ import annotations

import torch

from kernels.paged_attention import KVPages


def pages_of(N: int, Hkv: int, T: int, D: int, dtype: torch.dtype, device: torch.device, seed: int) -> KVPages:
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(N, Hkv, T, D, generator=g).to(device, dtype) for _ in range(2))
    return KVPages(k, v, token_major=True)


def inputs(B: int, P: int, Hq: int, Hkv: int, D: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(P)
    return [torch.randn(B, P, h, D, generator=g).to(device, dtype) for h in (Hq, Hkv, Hkv)]
