"""Latent attention: the answers of transformers from a cache of latent vectors, in every forward.

Not responsible for: the kernels (see tests/kernels/test_latent.py), the tiny families of every other test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_engine.model.fused_forward import FusedForward
from gpu_engine.model.latent import LatentAttention, LatentExpansion
from gpu_engine.model.loader import LoadedModel, load_model
from gpu_engine.model.quantised.native import NativeForward
from gpu_engine.model.recording import distance, typical_distance
from kernels.blocks import can_multiply_blocks
from kernels.kv_pages import KVHeads
from kernels.latent import LatentShape
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import (
    answer_all,
    answer_each,
    ask,
    config,
    executor_of,
    tokens,
    unguided_engine,
    with_drafts,
)
from tests.gpu_engine.model.latent_families import FAMILIES, family
from tests.gpu_engine.model.model_logits import assert_same_bits_on_every_unit, logits, some_ids

needs_blocks = pytest.mark.skipif(not can_multiply_blocks(), reason="this CPU has no products over blocks")


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny.save(FAMILIES[request.param](), tmp_path)


def attentions(model: LoadedModel) -> list[LatentAttention]:
    return [module for module in model.net.modules() if isinstance(module, LatentAttention)]


@needs_blocks
@pytest.mark.parametrize("name", ["minicpm3", "youtu"])
def test_rows_that_two_members_share_have_the_same_bits_in_smaller_calls(name: str, tmp_path: Path) -> None:
    """From 48 rows a member on, members take rows of their own through layers: each writes where no other one does."""
    model = load_model(config(model=str(tiny.save(FAMILIES[name](), tmp_path)), dtype="float32", quantization="int8"))
    assert isinstance(model.fused.forward, NativeForward)
    ids_BP = some_ids(12, 20)
    few_BPV = torch.cat([logits(model, ids_BP[at : at + 2]) for at in range(0, 12, 2)])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(8):
            assert torch.equal(logits(model, ids_BP), few_BPV)
    finally:
        torch.set_num_threads(threads)


def test_answers_equal_those_of_transformers_and_use_the_prefix_cache(folder: Path) -> None:
    model = load_model(config(model=str(folder)))
    assert model.kv_heads == (KVHeads(1, 80, 64),) * 2
    assert len(attentions(model)) == model.num_layers == model.fused.attentions == 2
    assert isinstance(model.fused.forward, FusedForward), model.fused.left
    prompts = [tokens(70, 1, repeat=20), tokens(9, 2), tokens(33, 3)]
    expected = [tiny.generate(folder, prompt, 30) for prompt in prompts]
    for num_drafts in (0, 7):
        with unguided_engine(model, with_drafts(num_drafts, max_batched_tokens=32)) as engine:
            assert answer_all(engine, [ask(prompt, ignore_eos=True, max_tokens=30) for prompt in prompts]) == expected
            assert answer_each(engine, [ask(prompt, ignore_eos=True, max_tokens=30) for prompt in prompts]) == expected
            assert engine.stats().cached_tokens == 64 + 32
            assert all(len(page.tensors) == 1 for page in executor_of(engine).pages)


@needs_blocks
@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "int8"), ("float32", "q4"), ("bfloat16", "q4")])
def test_a_quantised_model_is_one_native_call_near_its_floats(folder: Path, dtype: str, quantization: str) -> None:
    model = load_model(config(model=str(folder), dtype=dtype, quantization=quantization))
    assert isinstance(model.fused.forward, NativeForward), model.fused.left
    assert_same_bits_on_every_unit(model)
    loop = load_model(config(model=str(folder), dtype=dtype, quantization=quantization, fuse_parts=False))
    assert all(not isinstance(part.core.keys.weights, torch.Tensor) for part in attentions(loop))
    ids_BP = some_ids(3, 40)
    of_loop = logits(loop, ids_BP).float().flatten(0, -2)
    assert typical_distance(logits(model, ids_BP).flatten(0, -2), of_loop) < (1e-3 if dtype == "float32" else 0.1)
    if quantization == "int8":
        floats = logits(load_model(config(model=str(folder))), ids_BP).flatten(0, -2)
        assert typical_distance(of_loop, floats) < 0.1


@needs_blocks
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_drafts_and_company_change_no_token_of_the_native_forward(folder: Path, kv_cache_dtype: str) -> None:
    fields = {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": kv_cache_dtype}
    model = load_model(config(model=str(folder), **fields))
    prompts = [tokens(70, 1, repeat=20), tokens(9, 2), tokens(33, 3, repeat=11)]

    def asked() -> list[Any]:
        return [ask(prompt, ignore_eos=True, max_tokens=30) for prompt in prompts]

    with unguided_engine(model, with_drafts(0, **fields)) as engine:
        expected = answer_each(engine, asked())
    with unguided_engine(model, with_drafts(7, **fields)) as engine:
        assert answer_all(engine, asked()) == expected


def test_a_forward_of_many_rows_has_the_bits_of_few(tmp_path: Path) -> None:
    """Members of the native forward share the rows of a model without experts, where there are many."""
    folder = tiny.save(FAMILIES["youtu"](), tmp_path)
    model = load_model(
        config(model=str(folder), dtype="bfloat16", quantization="q4" if can_multiply_blocks() else "none")
    )
    ids_BP = some_ids(5, 60)
    whole = logits(model, ids_BP).clone()
    for at in (0, 3):
        assert torch.equal(logits(model, ids_BP[at : at + 1])[0], whole[at])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kv_lora_rank": 40}, "a latent is whole vectors"),
        ({"kv_lora_rank": 640}, "attention has at most 576 channels"),
        ({"v_head_dim": 24}, "so are values"),
    ],
)
def test_other_sizes_keep_the_expanded_form(tmp_path: Path, fields: dict[str, Any], why: str) -> None:
    folder = tiny.save(family("deepseek_v3", n_group=1, topk_group=1, **fields)(), tmp_path)
    model = load_model(config(model=str(folder)))
    assert not attentions(model), why
    assert {heads.number for heads in model.kv_heads} == {4}


def test_a_model_that_takes_adapters_keeps_the_expanded_form(tmp_path: Path) -> None:
    folder = tiny.save(FAMILIES["deepseek_v3"](), tmp_path)
    model = load_model(config(model=str(folder), max_adapter_bytes=1 << 20))
    assert not attentions(model)
    assert {heads.number for heads in model.kv_heads} == {4}


def test_an_expansion_has_the_product_that_it_replaces() -> None:
    shape = LatentShape(heads=3, unrotated=32, rotated=8, values=48, latent=64)
    weight_NL = torch.randn(shape.heads * (shape.unrotated + shape.values), shape.latent)
    latent = torch.randn(2, 5, shape.latent)
    made = LatentExpansion(shape, weight_NL)
    assert distance(made(latent), latent @ weight_NL.T) < 1e-6
    assert (made.in_features, made.out_features) == (weight_NL.shape[1], weight_NL.shape[0])
