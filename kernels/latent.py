"""Latent attention in its absorbed form, on a CPU: the cache has one vector a token for all heads.

A head's key is a product of the token's latent vector, next to a part that rotates and is the same for every head; its
value is another product of the latent. So queries are multiplied by the keys' matrix of their head, attention is that
of one KV head whose values are the first channels of its keys, and its outputs are multiplied by the values' matrix.
Invariant: a row depends only on itself, bit for bit. Not responsible for: the products before and after (see
gpu_engine/model/latent).

Shapes: N rows, B sequences, P query positions, H heads, L channels of the latent, C of a key's part that does not
rotate, R that rotate, V of a value, D of a key in the cache, K inputs and J outputs of a head's product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.blocks import BlockWeightsArgs, PackedBlocks, rows_bytes
from kernels.fused_arguments import NormKind, RMSNorm
from kernels.kv_pages import KVHeads, KVPages
from kernels.library import native
from kernels.paged_attention import joined_attention


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of latent attention."""

    heads: int
    unrotated: int
    """Channels of a head's keys and queries that do not rotate."""
    rotated: int
    values: int
    """Channels of a head's values."""
    latent: int

    @property
    def kv_heads(self) -> KVHeads:
        """The head in the cache: the latent, the part that rotates, and zeros up to a multiple of 16 channels."""
        return KVHeads(1, -(-(self.latent + self.rotated) // 16) * 16, self.latent)


class _RowsArgs(ctypes.Structure):
    """Mirror of `struct latent_rows_args`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("q", "kv", "weight", "cos", "sin", "queries", "keys")],
        *[(name, ctypes.c_int64) for name in ("rows", "q_stride", "kv_stride", "angle_stride", "heads", "unrotated")],
        *[(name, ctypes.c_int64) for name in ("rotated", "latent", "width")],
        ("eps", ctypes.c_float),
        *[(name, ctypes.c_int32) for name in ("bf16", "angles_bf16", "neighbours")],
    ]


class _HeadsArgs(ctypes.Structure):
    """Mirror of `struct head_products_args`."""

    _fields_ = [
        ("blocks", ctypes.POINTER(BlockWeightsArgs)),
        *[(name, ctypes.c_void_p) for name in ("weights", "x", "out", "scratch")],
        *[(name, ctypes.c_int64) for name in ("rows", "heads", "inputs", "outputs", "x_row", "x_head")],
        *[(name, ctypes.c_int64) for name in ("out_row", "out_head", "bf16")],
    ]


class HeadProducts:
    """One product for each head. Owns its memory.

    Args:
        weights: [H, K, J] in the dtype of the inputs, J a multiple of 16; or for each head a matrix [J, K] in blocks.
    """

    def __init__(self, weights: torch.Tensor | Sequence[PackedBlocks]) -> None:
        self.weights = weights.contiguous() if isinstance(weights, torch.Tensor) else tuple(weights)
        if isinstance(self.weights, torch.Tensor):
            H, K, J = self.weights.shape
            assert J % 16 == 0, J
            self._args = _HeadsArgs(None, self.weights.data_ptr())
        else:
            H, K, J = len(self.weights), self.weights[0].num_inputs, self.weights[0].num_outputs
            assert all((each.num_inputs, each.num_outputs) == (K, J) for each in self.weights)
            self._args = _HeadsArgs((BlockWeightsArgs * H)(*(each.args for each in self.weights)))
        self._args.heads, self._args.inputs, self._args.outputs = H, K, J

    def dense(self) -> torch.Tensor:
        """Return the weights, float32 [H, K, J]."""
        if isinstance(self.weights, torch.Tensor):
            return self.weights.float()
        return torch.stack([each.unpacked().dequantised().T for each in self.weights])

    def __call__(self, x_NHK: torch.Tensor, out_NHJ: torch.Tensor) -> None:
        """Write x @ weights of each head into `out_NHJ`, in the dtype of x: bfloat16 or float32. Both may be strided,
        but for their last dimension."""
        (N, H, K), args = x_NHK.shape, self._args
        assert (args.heads, args.inputs) == (H, K), x_NHK.shape
        assert out_NHJ.shape == (N, H, args.outputs), out_NHJ.shape
        assert x_NHK.stride(2) == out_NHJ.stride(2) == 1
        assert x_NHK.dtype == out_NHJ.dtype in (torch.bfloat16, torch.float32), x_NHK.dtype
        assert x_NHK.device.type == "cpu", x_NHK.device
        if isinstance(self.weights, torch.Tensor):
            assert self.weights.dtype == x_NHK.dtype, self.weights.dtype
        else:
            scratch = torch.empty(rows_bytes(N * H, K), dtype=torch.uint8)
            args.scratch = scratch.data_ptr()
        args.x, args.out, args.rows, args.bf16 = x_NHK.data_ptr(), out_NHJ.data_ptr(), N, x_NHK.dtype == torch.bfloat16
        args.x_row, args.x_head = x_NHK.stride()[:2]
        args.out_row, args.out_head = out_NHJ.stride()[:2]
        native().lockstep_head_products(ctypes.byref(args))

    def __repr__(self) -> str:
        return f"<HeadProducts {self._args.heads} of {self._args.outputs} x {self._args.inputs}>"


class AbsorbedAttention:
    """One layer's attention after the products that give queries, latents and shared keys. Not for two threads at
    once: the arguments belong to the object.

    Args:
        norm: of the latent.
        keys: [H, C] -> [H, L].
        values: [H, L] -> [H, V].
        neighbours: channels 2 i and 2 i + 1 are a pair, and not i and i + R / 2.
    """

    def __init__(
        self,
        shape: LatentShape,
        scale: float,
        norm: RMSNorm,
        keys: HeadProducts,
        values: HeadProducts,
        *,
        neighbours: bool,
    ) -> None:
        assert norm.kind == NormKind.ROUND_THEN_SCALE, norm.kind
        assert norm.weight_H.shape == (shape.latent,), norm.weight_H.shape
        assert norm.weight_H.is_contiguous()
        assert shape.latent % 16 == shape.rotated % 2 == 0, shape
        self.shape, self.scale, self.norm, self.keys, self.values = shape, scale, norm, keys, values
        self.neighbours = neighbours
        self._args = _RowsArgs(weight=norm.weight_H.data_ptr(), eps=norm.eps, neighbours=neighbours)
        self._args.heads, self._args.unrotated, self._args.rotated = shape.heads, shape.unrotated, shape.rotated
        self._args.latent, self._args.width = shape.latent, shape.kv_heads.width

    def __call__(
        self,
        q_NC: torch.Tensor,
        kv_NC: torch.Tensor,
        cos_NR: torch.Tensor,
        sin_NR: torch.Tensor,
        pages: KVPages,
        page_table_BN: torch.Tensor,
        positions_BP: torch.Tensor,
    ) -> torch.Tensor:
        """Return [B * P, H * V]; row b * P + j is position j of sequence b.

        `q_NC` has the heads' channels that do not rotate, and then those that do; `kv_NC` the latent before its norm,
        and the shared key; their rows may be strided. The first R / 2 of the angles are those of the pairs; they may be
        float32. Pages and positions as in `joined_attention`.
        """
        shape, args, dtype, N = self.shape, self._args, q_NC.dtype, positions_BP.numel()
        H, D, wide = shape.heads, args.width, shape.unrotated + shape.rotated
        assert q_NC.shape == (N, H * wide), (q_NC.shape, N)
        assert kv_NC.shape == (N, shape.latent + shape.rotated), (kv_NC.shape, N)
        assert q_NC.dtype == kv_NC.dtype == self.norm.weight_H.dtype, (q_NC.dtype, kv_NC.dtype)
        assert q_NC.stride(1) == kv_NC.stride(1) == cos_NR.stride(1) == sin_NR.stride(1) == 1
        assert cos_NR.shape == sin_NR.shape, (cos_NR.shape, sin_NR.shape)
        assert cos_NR.stride(0) == sin_NR.stride(0)
        assert len(cos_NR) == N, (cos_NR.shape, N)
        assert 2 * cos_NR.shape[1] >= shape.rotated, cos_NR.shape
        assert cos_NR.dtype == sin_NR.dtype in (dtype, torch.float32), (cos_NR.dtype, sin_NR.dtype)
        queries_NHD, keys_ND = torch.empty(N, H, D, dtype=dtype), torch.empty(N, D, dtype=dtype)
        args.q, args.kv, args.rows = q_NC.data_ptr(), kv_NC.data_ptr(), N
        args.cos, args.sin, args.angle_stride = cos_NR.data_ptr(), sin_NR.data_ptr(), cos_NR.stride(0)
        args.queries, args.keys = queries_NHD.data_ptr(), keys_ND.data_ptr()
        args.q_stride, args.kv_stride = q_NC.stride(0), kv_NC.stride(0)
        args.bf16, args.angles_bf16 = dtype == torch.bfloat16, cos_NR.dtype == torch.bfloat16
        native().lockstep_latent_rows(ctypes.byref(args))
        self.keys(q_NC.unflatten(1, (H, wide))[..., : shape.unrotated], queries_NHD[..., : shape.latent])
        B, P = positions_BP.shape
        attended_BPHL = joined_attention(
            queries_NHD.view(B, P, H, D),
            keys_ND.view(B, P, 1, D),
            pages,
            page_table_BN,
            positions_BP,
            scale=self.scale,
            values=shape.latent,
        )
        out_NHV = torch.empty(N, H, shape.values, dtype=dtype)
        self.values(attended_BPHL.view(N, H, shape.latent), out_NHV)
        return out_NHV.view(N, H * shape.values)

    def __repr__(self) -> str:
        return f"<AbsorbedAttention {self.shape}>"
