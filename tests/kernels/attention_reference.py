"""Paged attention in plain torch, the reference for the tests of both kernels, and their inputs."""

from __future__ import annotations

import torch

from kernels.paged_attention import KVPages


def paged_attention_reference(
    q_BPHD: torch.Tensor,
    k_BPHD: torch.Tensor,
    v_BPHD: torch.Tensor,
    pages: KVPages,
    page_table_BN: torch.Tensor,
    positions_BP: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    chunk: int = 0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `kernels.paged_attention.paged_attention` in plain torch and float32."""
    B, _, Hq, D = q_BPHD.shape
    Hkv, T = pages.v.shape[1], pages.v.shape[2]
    live_BP = positions_BP >= 0
    where_BP = positions_BP.clamp(min=0).long()
    page_BP = page_table_BN[:B].long().gather(1, where_BP // T)
    b, p = live_BP.nonzero(as_tuple=True)
    pages.k_NHTD[page_BP[b, p], :, where_BP[b, p] % T] = k_BPHD[b, p]
    pages.v[page_BP[b, p], :, where_BP[b, p] % T] = v_BPHD[b, p]
    table = page_table_BN[:B, : int(where_BP.max()) // T + 1].long()
    k_BHLD = pages.k_NHTD[table].permute(0, 2, 1, 3, 4).reshape(B, Hkv, -1, D).float()
    v_BHLD = pages.v[table].permute(0, 2, 1, 3, 4).reshape(B, Hkv, -1, D).float()
    k_BHLD, v_BHLD = (t.repeat_interleave(Hq // Hkv, dim=1) for t in (k_BHLD, v_BHLD))
    scores_BHPL = torch.einsum("bphd,bhld->bhpl", q_BPHD.float() * scale, k_BHLD)
    if softcap:
        scores_BHPL = softcap * torch.tanh(scores_BHPL / softcap)
    key = torch.arange(k_BHLD.shape[2], device=q_BPHD.device)
    legal_BPL = key <= positions_BP[..., None]
    if window:
        legal_BPL &= key > positions_BP[..., None] - window
    if chunk:
        legal_BPL &= key >= positions_BP[..., None] // chunk * chunk
    scores_BHPL = scores_BHPL.masked_fill(~legal_BPL[:, None], float("-inf"))
    if sinks_H is not None:
        sinks_BHP1 = sinks_H.view(1, Hq, 1, 1).expand(*scores_BHPL.shape[:3], 1)
        scores_BHPL = torch.cat([scores_BHPL, sinks_BHP1], dim=-1)
    weights = torch.softmax(scores_BHPL, dim=-1)[..., : len(key)]
    out = torch.einsum("bhpl,bhld->bphd", weights.nan_to_num(0.0), v_BHLD)
    return out.to(q_BPHD.dtype)


def pages_of(N: int, Hkv: int, T: int, D: int, dtype: torch.dtype, target: torch.device | None, seed: int) -> KVPages:
    """Return pages of random numbers; `target` None: in the layout of the native kernel."""
    g = torch.Generator().manual_seed(seed)
    pages = KVPages.allocate(N, Hkv, D, T, dtype, target or torch.device("cpu"), token_major=target is not None)
    for part in (pages.k_NHTD, pages.v):
        part.copy_(torch.randn(N, Hkv, T, D, generator=g))
    return pages


def inputs(
    B: int, P: int, Hq: int, Hkv: int, D: int, dtype: torch.dtype, target: torch.device | None
) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(P)
    return [torch.randn(B, P, h, D, generator=g).to(target or "cpu", dtype) for h in (Hq, Hkv, Hkv)]


def table_of(B: int, N: int, target: torch.device | None, *, spare: int = 1) -> torch.Tensor:
    """Return N pages of each sequence, in random order, of `spare` times as many."""
    order = torch.randperm(spare * B * N, generator=torch.Generator().manual_seed(2))
    return order[: B * N].view(B, N).int().to(target or "cpu")
