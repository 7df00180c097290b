"""Falcon-H1's multipliers in its weights: outputs stay what they are, in every form of a product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from gpu_engine.model.linear import Product, joined, multiply_outputs
from gpu_engine.model.quantised.linear import BlockLinear
from gpu_engine.model.recording import distance
from gpu_engine.model.recurrent.multipliers import fold_multipliers
from kernels.blocks import BlockKind, can_multiply_blocks
from tests.gpu_engine.model.model_logits import some_ids
from tests.gpu_engine.model.recurrent.families import CONFIGS, tiny
from tests.kernels.block_cases import random_blocks

needs_blocks = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")

FACTORS_N = torch.linspace(0.2, 3.0, 70)


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def is_multiplied(product: Product, bound: float) -> bool:
    x_MK = some(5, 64, seed=1)
    want_MN = product(x_MK) * FACTORS_N
    multiply_outputs(product, FACTORS_N)
    return bool(distance(product(x_MK), want_MN) < bound)


@pytest.mark.parametrize("biased", [False, True])
def test_outputs_of_floats_are_multiplied(biased: bool) -> None:
    assert is_multiplied(nn.Linear(64, 70, bias=biased).requires_grad_(False), 1e-6)


@needs_blocks
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", BlockKind)
def test_outputs_of_blocks_are_multiplied(kind: BlockKind, biased: bool) -> None:
    """But for one more rounding of a block's scale."""
    assert is_multiplied(BlockLinear.of(random_blocks(kind, 70, 64, 3), some(70, seed=2) if biased else None), 1e-3)


@needs_blocks
def test_a_multiplied_product_is_joined_with_its_bias() -> None:
    """The packed weights have a bias of their own, next to the module's."""
    kind, factors_N, x_MK = BlockKind.Q8, torch.linspace(0.2, 3.0, 64), some(5, 64, seed=1)
    product = BlockLinear.of(random_blocks(kind, 64, 64, 3), some(64, seed=2))
    other = BlockLinear.of(random_blocks(kind, 64, 64, 4), some(64, seed=5))
    want_MN = torch.cat([product(x_MK) * factors_N, other(x_MK)], dim=1)
    multiply_outputs(product, factors_N)
    assert distance(joined([product, other])(x_MK), want_MN) < 1e-3


def test_no_multiplier_is_left() -> None:
    own: Any = tiny("falcon_h1")
    ids_BP = some_ids(2, 20)
    want_BPV = own(ids_BP, use_cache=False).logits
    folded = fold_multipliers(own)
    layers = own.config.num_hidden_layers
    names = ("in_proj", "k_proj", "gate_proj", "down_proj")  # the others of this model are 1
    assert {name.rpartition(".")[2] for name in folded} == set(names)
    assert len(folded) == len(names) * layers
    assert distance(own(ids_BP, use_cache=False).logits, want_BPV) < 1e-5
    assert fold_multipliers(own) == {}


def test_a_multiplier_of_inputs_does_not_go_past_a_bias() -> None:
    config = CONFIGS["falcon_h1"]()
    config.attention_bias, config.attention_in_multiplier = True, 0.5
    net = AutoModelForCausalLM.from_config(config)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert fold_multipliers(net) == {}
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert net.model.layers[0].attention_in_multiplier == 0.5
