"""Falcon-H1's multipliers, which go into the weights that they follow.

A layer of it then has the parts of other hybrids' layers; the files of llama.cpp have such weights. Invariant: either
no multiplier is left in the layers, or all are as they were. Not responsible for: those of the embedding and of the
head (see fused_forward.py), comparing the model before and after (see probe.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpu_engine.model.linear import Product, is_product, multiply_outputs

_LAYER = "FalconH1DecoderLayer"


def fold_multipliers(net: nn.Module) -> dict[str, torch.Tensor]:
    """Multiply the weights of Falcon-H1's layers, in place; return the factors of each product's outputs by its name,
    float32 [N].

    Nothing changes where a product is of another kind, or has a bias next to a multiplier of its inputs.
    """
    layers: list[Any] = [module for module in net.modules() if type(module).__name__ == _LAYER]
    factors = [factor for layer in layers for factor in _factors_of(layer)]
    if not all(is_product(each) and (each.bias is None or of_inputs == 1.0) for each, of_inputs, _ in factors):
        return {}
    names = {module: name for name, module in net.named_modules()}
    folded = {}
    for product, of_inputs, of_outputs in factors:
        factors_N = torch.as_tensor(of_inputs * of_outputs, dtype=torch.float32).expand(product.out_features)
        if bool((factors_N != 1.0).any()):
            multiply_outputs(product, factors_N)
            folded[names[product]] = factors_N.cpu()
    for layer in layers:
        layer.attention_in_multiplier = layer.attn_out_multiplier = layer.ssm_out_multiplier = 1.0
        layer.self_attn.key_multiplier = layer.mamba.ssm_in_multiplier = 1.0
        layer.feed_forward.gate_multiplier = layer.feed_forward.down_multiplier = 1.0
        layer.mamba.mup_vector.fill_(1.0)
    return folded


def _factors_of(layer: Any) -> list[tuple[Product, float, torch.Tensor | float]]:
    """Return the products of a layer, each with the multipliers of its inputs and of its outputs."""
    attention, mixer, block = layer.self_attn, layer.mamba, layer.feed_forward
    before = float(layer.attention_in_multiplier)
    return [
        (attention.q_proj, before, 1.0),
        (attention.k_proj, before, float(attention.key_multiplier)),
        (attention.v_proj, before, 1.0),
        (attention.o_proj, 1.0, float(layer.attn_out_multiplier)),
        (mixer.in_proj, float(mixer.ssm_in_multiplier), mixer.mup_vector.detach().float().flatten()),
        (mixer.out_proj, 1.0, float(layer.ssm_out_multiplier)),
        (block.gate_proj, 1.0, float(block.gate_multiplier)),
        (block.down_proj, 1.0, float(block.down_multiplier)),
    ]
