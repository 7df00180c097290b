"""Attention over a paged KV cache, with the store of the new keys and values in front.

Invariant: a query's result depends only on its own sequence, bit for bit, whatever else is in the batch. Shapes:
B sequences, P query positions, Hq query heads, Hkv KV heads, D head size, T tokens a page. Not responsible for: page
allocation (see gpu_engine/core/kv_cache.py).
"""

from __future__ import annotations

import ctypes

import torch

from kernels.kv_pages import MAX_WIDTH, KVPages, check_limits
from kernels.library import address, native

__all__ = ["AttentionArgs", "KVPages", "joined_attention", "paged_attention"]

_LONGS = (
    "q_stride_b",
    "q_stride_p",
    "q_stride_h",
    "k_stride_b",
    "k_stride_p",
    "k_stride_h",
    "v_stride_b",
    "v_stride_p",
)
_POINTERS = ("q", "k", "v", "out", "k_pages", "v_pages", "k_scales", "v_scales", "page_table", "positions")
_INTS = ("num_batch", "num_queries", "num_heads", "num_kv_heads", "head_dim", "page_size", "kind", "window")


class AttentionArgs(ctypes.Structure):
    """Mirror of `struct paged_attention_args`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in _POINTERS],
        *[(name, ctypes.c_int64) for name in (*_LONGS, "v_stride_h", "table_stride")],
        *[(name, ctypes.c_int32) for name in _INTS],
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("io_bf16", ctypes.c_int32),
        ("chunk", ctypes.c_int32),
        ("sinks", ctypes.c_void_p),
        ("values", ctypes.c_int64),
    ]


def paged_attention(
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
    tree_rows_BRR: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store the new keys and values, then attend; return [B, P, Hq, D], contiguous, in q's dtype.

    `page_table_BN` int32: page numbers of each sequence, covering every position in use. `positions_BP` int32:
    absolute position of each query, ascending in P; a negative one is padding (nothing is stored, the result is 0). A
    query at position p sees positions (p - window, p], or [0, p] with window 0; with a `chunk` instead of a window,
    those of [p // chunk * chunk, p]. `sinks_H` fp32, contiguous: a further logit of each query head, which takes its
    part of the weights and has no value (gpt-oss). `tree_rows_BRR` int32 (`TreeRows.rows_BRR`), on a GPU: the queries
    of a sequence are the rows of a tree, which see the positions before the first row, and the rows on the way
    to themselves; the key of row j is stored j after that of the first row. q, k, v may be strided; D must be
    contiguous and a multiple of 16, at most 576; T a multiple of 16. The pages have q's dtype or, on a CPU, int8.
    """
    if pages.token_major:
        from kernels.cuda.attention import paged as device  # a CPU install has no Triton

        return device.paged_attention(
            q_BPHD,
            k_BPHD,
            v_BPHD,
            pages,
            page_table_BN,
            positions_BP,
            scale=scale,
            softcap=softcap,
            window=window,
            chunk=chunk,
            sinks_H=sinks_H,
            tree_rows_BRR=tree_rows_BRR,
        )
    assert tree_rows_BRR is None, "trees of drafts are attended to only on a GPU"
    (B, P, Hq, D), (Hkv, T) = q_BPHD.shape, pages.v.shape[1:3]
    assert q_BPHD.dtype in (torch.bfloat16, torch.float32), q_BPHD.dtype
    assert all(t.dtype == q_BPHD.dtype for t in (k_BPHD, v_BPHD))
    assert pages.k.dtype == pages.v.dtype in (q_BPHD.dtype, torch.int8), (pages.k.dtype, q_BPHD.dtype)
    assert k_BPHD.shape == v_BPHD.shape == (B, P, Hkv, D), (k_BPHD.shape, v_BPHD.shape)
    assert pages.k.shape == (pages.v.shape[0], Hkv, D, T)
    assert all(t.is_contiguous() for t in pages.tensors)
    assert all(t.stride(3) == 1 for t in (q_BPHD, k_BPHD, v_BPHD))
    assert D % 16 == T % 16 == 0, (D, T)
    assert MAX_WIDTH["cpu"] >= D, D
    assert Hq % Hkv == 0, (Hq, Hkv)
    assert page_table_BN.dtype == positions_BP.dtype == torch.int32
    assert positions_BP.shape == (B, P)
    assert positions_BP.is_contiguous()
    assert page_table_BN.shape[0] >= B
    assert page_table_BN.stride(1) == 1
    check_limits(window, chunk, sinks_H, Hq)
    out_BPHD = torch.empty(B, P, Hq, D, dtype=q_BPHD.dtype)
    args = AttentionArgs(
        *[address(t) for t in (q_BPHD, k_BPHD, v_BPHD, out_BPHD, pages.k, pages.v)],
        *pages.scales,
        *[address(t) for t in (page_table_BN, positions_BP)],
        *q_BPHD.stride()[:3],
        *k_BPHD.stride()[:3],
        *v_BPHD.stride()[:3],
        page_table_BN.stride(0),
        B,
        P,
        Hq,
        Hkv,
        D,
        T,
        pages.kind,
        window,
        scale,
        softcap,
        int(q_BPHD.dtype == torch.bfloat16),
        chunk,
        None if sinks_H is None else address(sinks_H),
    )
    native().lockstep_paged_attention(ctypes.byref(args))
    return out_BPHD


def joined_attention(
    q_BPHD: torch.Tensor,
    k_BPHD: torch.Tensor,
    pages: KVPages,
    page_table_BN: torch.Tensor,
    positions_BP: torch.Tensor,
    *,
    scale: float,
    values: int,
) -> torch.Tensor:
    """The same on a CPU where a value is the first channels of its key, and so is stored once.

    Return [B, P, Hq, values], contiguous; `values` is a multiple of 16. The pages are `joined`; the rest as in
    `paged_attention`.
    """
    (B, P, Hq, D), (Hkv, T) = q_BPHD.shape, pages.v.shape[1:3]
    assert q_BPHD.dtype == k_BPHD.dtype in (torch.bfloat16, torch.float32), (q_BPHD.dtype, k_BPHD.dtype)
    assert pages.joined
    assert pages.v.dtype in (q_BPHD.dtype, torch.int8), (pages.v.dtype, q_BPHD.dtype)
    assert pages.v.shape[1:] == (Hkv, T, D), (pages.v.shape, q_BPHD.shape)
    assert k_BPHD.shape == (B, P, Hkv, D), (k_BPHD.shape, q_BPHD.shape)
    assert all(part.is_contiguous() for part in pages.tensors)
    assert q_BPHD.stride(3) == k_BPHD.stride(3) == 1
    assert D % 16 == T % 16 == values % 16 == 0, (D, T, values)
    assert 0 < values <= D <= MAX_WIDTH["cpu"], (values, D)
    assert Hq % Hkv == 0, (Hq, Hkv)
    assert page_table_BN.dtype == positions_BP.dtype == torch.int32
    assert positions_BP.shape == (B, P)
    assert positions_BP.is_contiguous()
    assert page_table_BN.shape[0] >= B
    assert page_table_BN.stride(1) == 1
    out_BPHV = torch.empty(B, P, Hq, values, dtype=q_BPHD.dtype)
    args = AttentionArgs(q=address(q_BPHD), k=address(k_BPHD), out=address(out_BPHV), v_pages=address(pages.v))
    args.v_scales, args.page_table, args.positions = pages.scales[1], address(page_table_BN), address(positions_BP)
    args.q_stride_b, args.q_stride_p, args.q_stride_h = q_BPHD.stride()[:3]
    args.k_stride_b, args.k_stride_p, args.k_stride_h = k_BPHD.stride()[:3]
    args.table_stride, args.num_batch, args.num_queries, args.num_heads = page_table_BN.stride(0), B, P, Hq
    args.num_kv_heads, args.head_dim, args.page_size, args.kind, args.values = Hkv, D, T, pages.kind, values
    args.scale, args.io_bf16 = scale, q_BPHD.dtype == torch.bfloat16
    native().lockstep_paged_attention(ctypes.byref(args))
    return out_BPHV
