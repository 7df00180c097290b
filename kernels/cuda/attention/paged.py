"""Attention over the paged KV cache on a GPU: the launches after `kernels.paged_attention.paged_attention`.

Up to 16 query positions a sequence go to the decode kernels (a split of the context a program, then a combine; for
the rows of a tree a separate kernel, then the same combine), more to the prefill kernels. Invariant: a query's
result depends only on its own sequence, bit for bit, whichever kernel computes it: splits and blocks begin at absolute
positions, and their sizes follow from static shapes. No launch depends on data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.language.target_info import cuda_capability_geq

from kernels.cuda.attention.decode import combine_kernel, decode_kernel
from kernels.cuda.attention.prompt import prefill_kernel, store_kernel
from kernels.cuda.attention.tree_decode import tree_decode_kernel
from kernels.kv_pages import MAX_WIDTH, KVPages, check_limits

MAX_DECODE_QUERIES = 16
_LOG2_E = 1.4426950408889634
_MAX_SPLITS = 128
_MIN_SPLIT = 128
_COMBINE = 16
_PART = 32
"""Channels of a head that a matrix product takes at a time, at least."""


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Sizes of the decode kernels' blocks; `block_n` is part of the result's bits, the rest is speed.

    Chosen on an H200 (docs/log/), before heads came in parts: 128 sequences of 200 tokens took 56 us a layer with these
    sizes, and 188 with 4 warps for every split that the page table has room for.
    """

    block_n: int
    """Tokens of a block; a power of two that divides the split."""
    num_warps: int
    num_stages: int
    programs: int = 512
    """Number of (sequence, KV head) pairs that fill the chip. With fewer, the splits of a pair run
        at the same time; with more, one after the other."""
    part: int = _PART
    """Channels of a head that a matrix product takes at a time: fewer need fewer registers."""

    @classmethod
    def of(cls, head_dim: int, itemsize: int, heads: int = 1, *, tree: bool = False) -> DecodeTuning:
        """Return the sizes that suit the bytes of a head, and `heads` KV heads of a batch.

        Shared memory holds two stages of keys and values. Where programs are many, small ones wait less for each other.
        A tree has the blocks of a chain, and so its bits. Its kernel has two kinds of addresses, which leave no
        registers for a second stage; with one stage, parts of a head save none.
        """
        block_d = _block_d(head_dim)
        part, stages = (block_d, 1) if tree else (max(_PART, block_d // 4), 2)
        if block_d * itemsize > 256:
            return cls(block_n=32, num_warps=8, num_stages=stages, part=part)
        return cls(block_n=64, num_warps=4 if tree or heads < 32 else 2, num_stages=stages, part=part)


def _block_d(head_dim: int) -> int:
    width: int = triton.next_power_of_2(head_dim)
    return max(_PART, width)


def split_length(max_tokens: int) -> int:
    """Return the tokens of a split for page tables of `max_tokens`: short, so that one sequence fills the chip."""
    return max(_MIN_SPLIT, 1 << (-(-max_tokens // _MAX_SPLITS) - 1).bit_length())


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
    split_len: int | None = None,
    tuning: DecodeTuning | None = None,
) -> torch.Tensor:
    """Store the new keys and values, then attend; return [B, P, Hq, D], contiguous, in q's dtype.

    As `kernels.paged_attention.paged_attention`, and: the pages are token-major; a sequence's positions are
    consecutive (in a tree: each is the first one and the row's depth), with its padding (negative) at the end; fp16 is
    taken too; D is a multiple of 16 and at most 256.
    `split_len` (default: from the width of the page table) is part of the result's bits, so an engine never changes it.
    """
    (B, P, Hq, D), (Hkv, T) = q_BPHD.shape, pages.v.shape[1:3]
    _assert_arguments(q_BPHD, k_BPHD, v_BPHD, pages, page_table_BN, positions_BP)
    check_limits(window, chunk, sinks_H, Hq)
    kernel, of_tree = _of_tree(tree_rows_BRR, B, P)
    out = torch.empty(B, P, Hq, D, dtype=q_BPHD.dtype, device=q_BPHD.device)
    scales = (scale, softcap) if softcap else (scale * _LOG2_E, 0.0)
    strides = (*q_BPHD.stride()[:3], *k_BPHD.stride()[:3], *v_BPHD.stride()[:3], page_table_BN.stride(0))
    shape = {"D": D, "BLOCK_D": _block_d(D), "T": T, "G": Hq // Hkv, "SOFTCAP": softcap != 0.0}
    tuning = tuning or DecodeTuning.of(D, q_BPHD.element_size(), B * Hkv, tree=bool(of_tree))
    sinks, with_sinks = positions_BP if sinks_H is None else sinks_H, {"SINKS": sinks_H is not None}  # else not read
    split = split_len or split_length(page_table_BN.shape[1] * T)
    assert split % tuning.block_n == 0, (split, tuning)
    if P > MAX_DECODE_QUERIES:
        limits, sizes = (window, chunk, sinks, *scales), shape | with_sinks | {"SPLIT": split}
        _prefill(q_BPHD, k_BPHD, v_BPHD, pages, page_table_BN, positions_BP, out, strides, limits, sizes)
        return out
    splits, rows = -(-page_table_BN.shape[1] * T // split), P * (Hq // Hkv)
    partial = torch.empty(B * Hkv * rows, splits, D, dtype=torch.float32, device=out.device)
    weights = torch.empty(2, B * Hkv * rows, splits, dtype=torch.float32, device=out.device)
    tile, tiles = (16, -(-rows // 16)) if rows <= 16 else (32, -(-rows // 32))
    stripes = max(1, min(splits, tuning.programs // (tiles * B * Hkv)))
    kernel[(tiles, B * Hkv, stripes)](
        q_BPHD,
        k_BPHD,
        v_BPHD,
        pages.k,
        pages.v,
        page_table_BN,
        positions_BP,
        *of_tree,
        partial,
        weights[0],
        weights[1],
        *strides,
        P,
        Hkv,
        splits,
        window,
        chunk,
        *scales,
        stripes,
        **shape,
        SPLIT=split,
        QUERIES=triton.next_power_of_2(P),
        BLOCK_M=tile,
        BLOCK_N=tuning.block_n,
        PART=tuning.part,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    combine_kernel[(B * P * Hq,)](
        partial,
        weights[0],
        weights[1],
        positions_BP,
        out,
        P,
        Hq,
        splits,
        window,
        chunk,
        sinks,
        **{name: shape[name] for name in ("D", "BLOCK_D", "G")},
        **with_sinks,
        SPLIT=split,
        QUERIES=triton.next_power_of_2(P),
        COMBINE=min(_COMBINE, triton.next_power_of_2(splits)),
        num_warps=1 if D <= 128 else 2,
    )
    return out


def _of_tree(rows_BRR: torch.Tensor | None, num_batch: int, num_queries: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the kernel of a chain or of a tree, and the arguments that only the second one has."""
    if rows_BRR is None:
        return decode_kernel, ()
    assert num_queries <= MAX_DECODE_QUERIES, f"a tree of {num_queries} rows; at most {MAX_DECODE_QUERIES} are decoded"
    assert rows_BRR.dtype == torch.int32
    assert rows_BRR.is_contiguous()
    assert rows_BRR.shape[0] >= num_batch
    assert rows_BRR.shape[1] == rows_BRR.shape[2] >= num_queries
    return tree_decode_kernel, (rows_BRR, rows_BRR.shape[1])


def _assert_arguments(
    q_BPHD: torch.Tensor,
    k_BPHD: torch.Tensor,
    v_BPHD: torch.Tensor,
    pages: KVPages,
    page_table_BN: torch.Tensor,
    positions_BP: torch.Tensor,
) -> None:
    """Assert every shape, dtype and stride that the kernels take."""
    B, P, Hq, D = q_BPHD.shape
    Hkv, T = pages.v.shape[1], pages.v.shape[2]
    assert q_BPHD.dtype in (torch.bfloat16, torch.float16, torch.float32), q_BPHD.dtype
    assert all(t.dtype == q_BPHD.dtype for t in (k_BPHD, v_BPHD, pages.k, pages.v))
    assert k_BPHD.shape == v_BPHD.shape == (B, P, Hkv, D), (k_BPHD.shape, v_BPHD.shape)
    assert pages.token_major
    assert pages.k.shape == pages.v.shape == (pages.v.shape[0], Hkv, T, D)
    assert pages.k.is_contiguous()
    assert pages.v.is_contiguous()
    assert all(t.stride(3) == 1 for t in (q_BPHD, k_BPHD, v_BPHD))
    assert D % 16 == 0, D
    assert MAX_WIDTH["cuda"] >= D, D
    assert T % 16 == 0, T
    assert Hq % Hkv == 0, (Hq, Hkv)
    assert page_table_BN.dtype == positions_BP.dtype == torch.int32
    assert positions_BP.shape == (B, P)
    assert positions_BP.is_contiguous()
    assert page_table_BN.shape[0] >= B
    assert page_table_BN.stride(1) == 1


def _prefill(
    q_BPHD: torch.Tensor,
    k_BPHD: torch.Tensor,
    v_BPHD: torch.Tensor,
    pages: KVPages,
    page_table_BN: torch.Tensor,
    positions_BP: torch.Tensor,
    out: torch.Tensor,
    strides: tuple[int, ...],
    limits: tuple[int, int, torch.Tensor, float, float],
    shape: dict[str, int],
) -> None:
    """Launch the store and the attention of a prompt's chunk. `limits`: window, chunk, sinks, scale and softcap as the
    kernel takes them."""
    B, P, Hq, _ = q_BPHD.shape
    Hkv, D, T, BLOCK_D = pages.v.shape[1], shape["D"], shape["T"], shape["BLOCK_D"]
    tensors = (k_BPHD, v_BPHD, pages.k, pages.v, page_table_BN, positions_BP)
    store_kernel[(B * P,)](*tensors, *strides[3:], P, Hkv, D=D, BLOCK_D=BLOCK_D, T=T, num_warps=4)
    big = BLOCK_D * q_BPHD.element_size() > 256
    rows = 64 if P <= 64 or big else 128
    # Blocks of keys are those of the decode kernels: their size is part of the bits.
    tuning = DecodeTuning.of(D, q_BPHD.element_size())
    # There a matrix instruction of four warps reads keys and values from shared memory, and its sums are 16 wide.
    from_shared = cuda_capability_geq(9) and not cuda_capability_geq(12)
    prefill_kernel[(-(-P // rows), Hq, B)](
        q_BPHD,
        pages.k,
        pages.v,
        page_table_BN,
        positions_BP,
        out,
        *strides[:3],
        page_table_BN.stride(0),
        P,
        Hq,
        Hkv,
        *limits,
        **shape,
        BLOCK_M=rows,
        BLOCK_N=tuning.block_n,
        PART=BLOCK_D if from_shared or BLOCK_D > 128 else tuning.part,
        SUMS=16 if from_shared else 8,
        num_warps=8 if rows == 128 or big else 4,
        num_stages=2,
    )
