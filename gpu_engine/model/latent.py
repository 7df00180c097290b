"""Replaces transformers' latent attention (MLA) on a CPU by one that caches a token's latent vector, and not the keys
and values of every head.

The product that expands a latent becomes two for each head, with which queries and outputs are multiplied instead (see
kernels/latent.py). Invariant: a replaced module keeps its other products, with what quantised them; the expansion is
rounded from its own floats. Not responsible for: comparing the model before and after (see probe.py), the attention of
a GPU, of ranks and of models that take adapters, which cache the expanded keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gpu_engine.api.config import EngineConfig
from gpu_engine.model.attention import AttentionContext, LayerAttention
from gpu_engine.model.fused_layers import RowAttention, attend_by_sequence
from gpu_engine.model.linear import joined
from kernels.blocks import BLOCK, BlockKind, PackedBlocks, quantised
from kernels.fused import RMSNorm, rms_norm
from kernels.fused_arguments import NormKind
from kernels.kv_pages import MAX_WIDTH
from kernels.latent import AbsorbedAttention, HeadProducts, LatentShape

_NEIGHBOURS: dict[str, Callable[[Any], bool]] = {
    "AXK1Attention": lambda config: config.rope_interleave,
    "DeepseekV2Attention": lambda config: True,
    "DeepseekV3Attention": lambda config: config.rope_interleave,
    "Glm4MoeLiteAttention": lambda config: config.rope_interleave,
    "MiniCPM3Attention": lambda config: False,
    "YoutuAttention": lambda config: config.rope_interleave,
}
"""By the name of the class in transformers: whether its configuration has neighbouring channels rotate together."""
_COMPLEX = "DeepseekV2RotaryEmbedding"
"""The rotary embedding whose result is complex numbers, one for each pair of channels."""
EXPANSION = "kv_b_proj"
"""The name of the product that expands a latent."""


class LatentExpansion(nn.Module):
    """Replaces the product that expands latents, [..., L] -> [..., H * (C + V)], by one for each head and part.

    Args:
        weight_NL: the product's, rows by head, of a head's keys and then of its values; not kept.
        kind: of the blocks that the weights are rounded to; None: they stay floats. A product whose inputs are no whole
            blocks stays floats too.
    """

    def __init__(self, shape: LatentShape, weight_NL: torch.Tensor, kind: BlockKind | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = shape.latent, shape.heads * (shape.unrotated + shape.values)
        keys_HCL, values_HVL = (
            weight_NL.detach().unflatten(0, (shape.heads, -1)).split((shape.unrotated, shape.values), dim=1)
        )
        self.keys, self.values = HeadProducts(keys_HCL), HeadProducts(values_HVL.transpose(1, 2))
        if kind is not None:
            self.quantise(kind)

    def quantise(self, kind: BlockKind) -> None:
        """Round floats to blocks."""
        self.keys, self.values = _rounded(self.keys, kind), _rounded(self.values, kind)

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        """Return the heads' keys and values, in the dtype of the latents; for a comparison."""
        weights_HNL = torch.cat([self.keys.dense(), self.values.dense().transpose(1, 2)], dim=1)
        return nn.functional.linear(latent, weights_HNL.flatten(0, 1).to(latent.dtype))


def _rounded(products: HeadProducts, kind: BlockKind) -> HeadProducts:
    weights = products.weights
    if not isinstance(weights, torch.Tensor) or weights.shape[1] % BLOCK:
        return products
    return HeadProducts([PackedBlocks(quantised(each_KJ.T.contiguous(), kind)) for each_KJ in weights])


class LatentAttention(RowAttention):
    """Replaces transformers' latent attention on a CPU.

    Args:
        inner: the module, whose expansion is a `LatentExpansion`.
        neighbours: channels 2 i and 2 i + 1 are a pair, and not i and i + R / 2.
    """

    def __init__(self, inner: nn.Module, shape: LatentShape, *, neighbours: bool) -> None:
        super().__init__()
        own: Any = inner
        expansion: LatentExpansion = own.kv_b_proj
        self.layer_idx, self.num_key_value_groups = int(own.layer_idx), shape.heads
        compresses = getattr(own, "q_proj", None) is None
        self.first = joined([own.q_a_proj if compresses else own.q_proj, own.kv_a_proj_with_mqa])
        self.query = joined([own.q_b_proj]) if compresses else None
        self.output = joined([own.o_proj])
        self.query_norm = _norm(own.q_a_layernorm) if compresses else None
        parts = _norm(own.kv_a_layernorm), expansion.keys, expansion.values
        self.core = AbsorbedAttention(shape, float(own.scaling), *parts, neighbours=neighbours)
        heads = shape.kv_heads
        self.shape = LayerAttention(shape.heads, heads.number, heads.width, self.core.scale, 0.0, 0)

    def products(self) -> list[tuple[str, nn.Module]]:
        """Return the products by name, in the order of their use, but for those by head."""
        names = ("first", "query", "output")
        return [(name, product) for name in names if (product := getattr(self, name)) is not None]

    def attend(
        self, x_NH: torch.Tensor, cos_NR: torch.Tensor, sin_NR: torch.Tensor, ctx: AttentionContext
    ) -> torch.Tensor:
        """See `RowAttention`."""
        shape, ctx.layers_seen[self.layer_idx] = self.core.shape, self.shape
        first_NC: torch.Tensor = self.first(x_NH)
        q_NC, kv_NC = first_NC.tensor_split((-shape.latent - shape.rotated,), dim=1)
        if self.query is not None and self.query_norm is not None:
            q_NC = self.query(rms_norm(q_NC, self.query_norm))
        pages = ctx.pages[self.layer_idx]

        def run(rows: slice, page_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.core(q_NC[rows], kv_NC[rows], cos_NR[rows], sin_NR[rows], pages, page_table, positions)

        out_NH: torch.Tensor = self.output(attend_by_sequence(ctx, len(x_NH), run))
        return out_NH


def _norm(module: Any) -> RMSNorm:
    return RMSNorm(module.weight.detach().contiguous(), float(module.variance_epsilon), NormKind.ROUND_THEN_SCALE)


class PairedRotaryEmbedding(nn.Module):
    """Gives the complex numbers of `inner` as cosines and sines, float32 [B, P, R / 2]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both."""
        turns_BPR = self.inner(x, position_ids)
        return turns_BPR.real, turns_BPR.imag


def latent_shapes(config: EngineConfig, net: nn.Module) -> dict[str, LatentShape]:
    """Return the latent attentions that `replace_latent` replaces, by their paths; the model may have no memory yet."""
    if not config.on_cpu or config.tensor_parallel_size > 1 or config.takes_adapters:
        return {}
    found = {path: _shape_of(module) for path, module in net.named_modules() if type(module).__name__ in _NEIGHBOURS}
    return {path: shape for path, shape in found.items() if shape is not None}


def _shape_of(module: Any) -> LatentShape | None:
    """Return the sizes of a module; None: the kernels do not take them."""
    shape = LatentShape(
        module.num_heads, module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim, module.kv_lora_rank
    )
    # Queries without a bias are not joined with a latent that has one.
    joins = getattr(module, "q_proj", None) is None or module.kv_a_proj_with_mqa.bias is None
    fits = shape.latent % 16 == shape.values % 16 == shape.rotated % 2 == 0
    return shape if joins and fits and shape.kv_heads.width <= MAX_WIDTH["cpu"] else None


def take_expansions(net: nn.Module, shapes: Mapping[str, LatentShape]) -> None:
    """Replace the products that expand latents, where they are linear layers yet."""
    for path, shape in shapes.items():
        module: Any = net.get_submodule(path)
        if isinstance(module.kv_b_proj, nn.Linear):
            module.kv_b_proj = LatentExpansion(shape, module.kv_b_proj.weight)


def quantise_expansions(net: nn.Module, kind: BlockKind) -> None:
    """Round the products that expand latents."""
    for module in net.modules():
        if isinstance(module, LatentExpansion):
            module.quantise(kind)


def replace_latent(net: Any, shapes: Mapping[str, LatentShape]) -> None:
    """Replace the latent attentions of a model, whose expansions were taken."""
    for path, shape in shapes.items():
        parent, _, name = path.rpartition(".")
        inner: Any = net.get_submodule(path)
        neighbours = _NEIGHBOURS[type(inner).__name__](inner.config)
        setattr(net.get_submodule(parent), name, LatentAttention(inner, shape, neighbours=neighbours))
    decoder = net.get_decoder()
    for name, child in list(decoder.named_children()):
        if shapes and type(child).__name__ == _COMPLEX:
            setattr(decoder, name, PairedRotaryEmbedding(child))
