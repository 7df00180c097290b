"""Attention over the pages straight from a joined q, k, v product: head norms, rotary, store, attend.

A layer's arguments never change, so on a CPU they are built once and a call fills in addresses and sizes: building
them in every call took as long as the kernels at one row. Invariant: the result is that of `rotate` and
`paged_attention`, bit for bit. Not responsible for: products, and the ownership of pages (see
gpu_engine/core/kv_cache.py).
"""

from __future__ import annotations

import ctypes

import torch

from kernels.fused import RMSNorm, RotaryArgs, check_rotate, rotate
from kernels.fused_arguments import LLAMA_HEADS, HeadForm
from kernels.kv_pages import MAX_WIDTH, check_limits
from kernels.library import native
from kernels.paged_attention import AttentionArgs, KVPages, paged_attention


class QkvAttention:
    """One layer's attention after its q, k, v product. Not for two threads at once: the arguments belong to the
    object."""

    def __init__(
        self,
        heads: tuple[int, int],
        head_dim: int,
        scale: float,
        softcap: float = 0.0,
        window: int = 0,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sinks_H: torch.Tensor | None = None,
        form: HeadForm = LLAMA_HEADS,
        v_norm: RMSNorm | None = None,
        *,
        stores: bool = True,
    ) -> None:
        check_limits(window, 0, sinks_H, heads[0])
        self.heads, self.head_dim, self.form, self.stores = heads, head_dim, form, stores
        self.q_norm, self.k_norm, self.v_norm = q_norm, k_norm, v_norm
        self.scale, self.softcap, self.window, self.sinks_H = scale, softcap, window, sinks_H
        self._rotated = heads if stores else (heads[0], 0)
        self._rotary = RotaryArgs.of(self._rotated, head_dim, q_norm, k_norm, v_norm, form)
        self._args = AttentionArgs(scale=scale, softcap=softcap, window=window, head_dim=head_dim)
        self._args.sinks = None if sinks_H is None else sinks_H.data_ptr()
        self._args.num_heads, self._args.num_kv_heads = heads
        for name in ("q_stride_h", "k_stride_h", "v_stride_h"):
            setattr(self._args, name, head_dim)
        self._checked: tuple[object, ...] = ()

    def __call__(
        self,
        qkv_NC: torch.Tensor,
        cos_NR: torch.Tensor,
        sin_NR: torch.Tensor,
        pages: KVPages,
        page_table_BN: torch.Tensor,
        positions_BP: torch.Tensor,
        tree_rows_BRR: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [N, Hq * D]; row b * P + j is position j of sequence b. `qkv_NC`, contiguous, is changed.

        C is (Hq + 2 Hkv) * D: query heads, key heads, value heads; without `stores` Hq * D, and the pages have the keys
        and values of these positions. N may be more than B * P: the rows after that are
        padding, and its results are 0. The rest as in `rotate` and `paged_attention`.
        """
        (Hq, Hkv), D = self.heads, self.head_dim
        B, P = positions_BP.shape
        if pages.token_major:
            padding = len(qkv_NC) - B * P
            qkv_NC = qkv_NC[: B * P]
            rotate(
                qkv_NC,
                cos_NR,
                sin_NR,
                heads=self._rotated,
                head_dim=D,
                q_norm=self.q_norm,
                k_norm=self.k_norm,
                v_norm=self.v_norm,
                form=self.form,
            )
            q_BPHD, *own = qkv_NC.view(B, P, -1, D).split((Hq, Hkv, Hkv) if self.stores else Hq, dim=2)
            # The kernel stores in every call.
            k_BPHD, v_BPHD = own if self.stores else _stored(pages, page_table_BN, positions_BP)
            out_BPHD = paged_attention(
                q_BPHD,
                k_BPHD,
                v_BPHD,
                pages,
                page_table_BN,
                positions_BP,
                scale=self.scale,
                softcap=self.softcap,
                window=self.window,
                sinks_H=self.sinks_H,
                tree_rows_BRR=tree_rows_BRR,
            )
            out_NC = out_BPHD.view(B * P, Hq * D)
            return torch.nn.functional.pad(out_NC, (0, 0, 0, padding)) if padding else out_NC
        assert tree_rows_BRR is None, "trees of drafts are attended to only on a GPU"
        k, v = pages.k, pages.v
        shapes = (
            *(
                qkv_NC.dtype,
                qkv_NC.shape,
                cos_NR.dtype,
                cos_NR.shape,
                page_table_BN.shape,
                page_table_BN.stride(0),
                B,
                P,
            ),
            *(k.data_ptr(), v.data_ptr(), k.shape, v.shape, k.dtype, *pages.scales),
        )
        if shapes != self._checked:
            self._check(qkv_NC, cos_NR, sin_NR, pages, page_table_BN, positions_BP)
            self._checked = shapes
        assert qkv_NC.is_contiguous()
        assert positions_BP.is_contiguous()
        make = torch.empty if len(qkv_NC) == B * P else torch.zeros
        out_NC = make(len(qkv_NC), Hq * D, dtype=qkv_NC.dtype)
        start, size = qkv_NC.data_ptr(), qkv_NC.element_size()
        rotary, args, library = self._rotary, self._args, native()
        rotary.qkv, rotary.cos, rotary.sin = start, cos_NR.data_ptr(), sin_NR.data_ptr()
        library.lockstep_rotary(ctypes.byref(rotary))
        args.q = start
        if self.stores:
            args.k, args.v = start + Hq * D * size, start + (Hq + Hkv) * D * size
        args.out, args.page_table, args.positions = out_NC.data_ptr(), page_table_BN.data_ptr(), positions_BP.data_ptr()
        library.lockstep_paged_attention(ctypes.byref(args))
        return out_NC

    def _check(
        self,
        qkv_NC: torch.Tensor,
        cos_NR: torch.Tensor,
        sin_NR: torch.Tensor,
        pages: KVPages,
        page_table_BN: torch.Tensor,
        positions_BP: torch.Tensor,
    ) -> None:
        """Assert the shapes that the kernels take, and store the arguments that depend on them."""
        (Hq, Hkv), D, (B, P), T = self.heads, self.head_dim, positions_BP.shape, pages.v.shape[2]
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm, "v_norm": self.v_norm}
        check_rotate(qkv_NC[: B * P], cos_NR, sin_NR, heads=self._rotated, head_dim=D, **norms, form=self.form)
        assert qkv_NC.device.type == "cpu", qkv_NC.device
        assert qkv_NC.dtype in (torch.bfloat16, torch.float32), qkv_NC.dtype
        assert pages.k.dtype == pages.v.dtype in (qkv_NC.dtype, torch.int8), (qkv_NC.dtype, pages.k.dtype)
        assert qkv_NC.shape[1] == (Hq + 2 * Hkv if self.stores else Hq) * D, (qkv_NC.shape, positions_BP.shape)
        assert len(qkv_NC) >= B * P, (qkv_NC.shape, positions_BP.shape)
        assert pages.k.shape == (pages.v.shape[0], Hkv, D, T), pages.k.shape
        assert pages.v.shape[1:] == (Hkv, T, D), pages.v.shape
        assert all(part.is_contiguous() for part in pages.tensors)
        assert D % 16 == T % 16 == 0, (D, T)
        assert MAX_WIDTH["cpu"] >= D, D
        assert Hq % Hkv == 0, (Hq, Hkv)
        assert page_table_BN.dtype == positions_BP.dtype == torch.int32
        assert page_table_BN.shape[0] >= B
        assert page_table_BN.stride(1) == 1
        args, width, bf16 = self._args, qkv_NC.shape[1], int(qkv_NC.dtype == torch.bfloat16)
        for part in "qkv":
            setattr(args, f"{part}_stride_p", width)
            setattr(args, f"{part}_stride_b", width * P)
        args.k_pages, args.v_pages, args.table_stride = pages.k.data_ptr(), pages.v.data_ptr(), page_table_BN.stride(0)
        args.k_scales, args.v_scales = pages.scales
        args.num_batch, args.num_queries, args.page_size, args.kind, args.io_bf16 = B, P, T, pages.kind, bf16
        rotary = self._rotary
        rotary.rows, rotary.stride, rotary.rotated, rotary.bf16 = B * P, width, cos_NR.shape[1], bf16
        rotary.angles_bf16 = cos_NR.dtype == torch.bfloat16

    def __repr__(self) -> str:
        return f"<QkvAttention {self.heads[0]} over {self.heads[1]} heads of {self.head_dim}>"


def _stored(
    pages: KVPages, page_table_BN: torch.Tensor, positions_BP: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values that pages have at some positions, [B, P, Hkv, D] each."""
    T, places_BP = pages.v.shape[2], positions_BP.clamp(min=0).long()
    numbers_BP = page_table_BN[: len(places_BP)].gather(1, places_BP // T).long()
    return pages.k_NHTD[numbers_BP, :, places_BP % T], pages.v[numbers_BP, :, places_BP % T]
