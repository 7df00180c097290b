"""Models over blocks: the native forward's numbers and bits, a file's own blocks, and refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from gpu_engine.model.attention import AttentionContext
from gpu_engine.model.fused_forward import FusedForward
from gpu_engine.model.loader import ModelNotSupported, load_model
from gpu_engine.model.quantised import choice
from gpu_engine.model.quantised.linear import BlockLinear, check_product, joined_blocks, quantise_linears
from gpu_engine.model.quantised.native import NativeForward
from gpu_engine.model.recording import distance, typical_distance
from kernels.blocks import BlockKind, Blocks, can_multiply_blocks, quantised
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.model_logits import assert_same_bits_on_every_unit, context, logits, some_ids

pytestmark = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")

Saved = Callable[[str], Path]


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["int8", "q4"])
def test_every_family_runs_as_one_native_call(saved: Saved, family: str, dtype: str, quantization: str) -> None:
    settings = {"model": str(saved(family)), "dtype": dtype, "quantization": quantization}
    loop, native = (load_model(config(**settings, fuse_parts=fuse)) for fuse in (False, True))
    assert loop.quantised
    assert loop.fused.forward is None
    assert isinstance(native.fused.forward, NativeForward), native.fused.left
    ids_BP = some_ids(3, 40)
    # The loop rounds to the dtype before each quantisation, which then finds other integers, or other experts.
    bound = 2e-2 if dtype == "float32" else 0.1 if family == "gemma4 moe" else 6e-2
    assert distance(logits(native, ids_BP), logits(loop, ids_BP).float()) < bound
    assert_same_bits_on_every_unit(native)


@pytest.mark.parametrize("family", tiny.OWN_FORWARD)
def test_a_family_with_a_forward_of_its_own_is_quantised_too(saved: Saved, family: str) -> None:
    plain, model = (load_model(config(model=str(saved(family)), quantization=kind)) for kind in ("none", "int8"))
    assert model.quantised or family in ("gpt2", "gpt2 by layer")  # whose products are no linear layers
    ids_BP = some_ids(3, 40)
    got_NV, want_NV = (logits(each, ids_BP).flatten(0, 1) for each in (model, plain))
    assert typical_distance(got_NV, want_NV) < 0.1  # a mixture may choose other experts for a row


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "gemma2", "cohere2", "olmo2", "hunyuan", "ministral3", "gemma4", "gemma4 small", "gemma4 moe"],
)
def test_a_row_has_the_same_bits_whatever_else_is_in_the_call(saved: Saved, family: str) -> None:
    model = load_model(config(model=str(saved(family)), dtype="bfloat16", quantization="q4"))
    ids_BP = some_ids(5, 33)
    whole_BPV = logits(model, ids_BP)
    assert torch.equal(logits(model, ids_BP[2:3]), whole_BPV[2:3])
    assert torch.equal(logits(model, ids_BP[:, :20]), whole_BPV[:, :20])
    with torch.inference_mode():  # token by token, and in chunks
        ctx = context(model, 5, 33)
        for begin, end in ((0, 1), (1, 9), (9, 32), (32, 33)):
            part = AttentionContext(ctx.pages, ctx.page_table_BN, ctx.positions_BP[:, begin:end].contiguous())
            if end < 10:
                model.prefill(ids_BP[:, begin:end], part)
                continue
            got_NV = model.logits(ids_BP[:, begin:end], part)
            assert torch.equal(got_NV.view(5, end - begin, -1), whole_BPV[:, begin:end])


@torch.inference_mode()
@pytest.mark.parametrize("strided", [False, True])
def test_a_forward_reads_what_its_tensors_hold_now(saved: Saved, strided: bool) -> None:
    model = load_model(config(model=str(saved("llama")), dtype="bfloat16", quantization="q4"))
    tokens_BP, ids_BP = some_ids(3, 24), torch.zeros(24, 3, dtype=torch.int64).T
    ctx = context(model, 3, 24)
    if not strided:
        ids_BP = ids_BP.contiguous()
    want_NV = model.logits(tokens_BP, ctx).clone()
    ids_BP.copy_(tokens_BP.flip(0))
    model.logits(ids_BP, ctx)
    ids_BP.copy_(tokens_BP)
    assert torch.equal(model.logits(ids_BP, ctx), want_NV)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2", "granite", "gemma4", "gemma4 small"])
def test_rows_of_a_forward_that_threads_share_by_rows_are_those_of_one_thread(saved: Saved, family: str) -> None:
    model = load_model(config(model=str(saved(family)), dtype="bfloat16", quantization="q4"))
    ids_BP, before, got = some_ids(5, 50), torch.get_num_threads(), []  # 250 rows: 48 for each of five members
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            ctx = context(model, 5, 50)
            whole_BPV = model.logits(ids_BP, ctx).view(5, 50, -1).clone()
            filled = context(model, 5, 50)
            model.prefill(ids_BP, filled)
            used = ctx.page_table_BN[:, :3].flatten().long()  # whole pages of a sequence
            for of_logits, alone in zip(ctx.pages, filled.pages, strict=True):
                assert torch.equal(of_logits.k[used], alone.k[used])
                assert torch.equal(of_logits.v[used], alone.v[used])
            got.append((whole_BPV, [page.k[used].clone() for page in ctx.pages]))
    finally:
        torch.set_num_threads(before)
    for whole_BPV, keys in got[1:]:
        assert torch.equal(whole_BPV, got[0][0])
        assert all(torch.equal(k, want) for k, want in zip(keys, got[0][1], strict=True))
    assert torch.equal(logits(model, ids_BP[2:3]), got[0][0][2:3])


@pytest.mark.parametrize(("family", "is_native"), [("granite", True), ("cohere2", False)])
def test_adapters_keep_blocks_next_to_attention_out_of_the_native_call(
    saved: Saved, family: str, is_native: bool
) -> None:
    """The low-rank half of the block's product would have to outlive that of the attention's output."""
    settings = config(model=str(saved(family)), dtype="bfloat16", quantization="q4", max_adapter_bytes=1 << 20)
    forward = load_model(settings).fused.forward
    assert isinstance(forward, NativeForward if is_native else FusedForward)


@torch.inference_mode()
def test_padding_is_not_computed_and_writes_nothing(saved: Saved) -> None:
    model = load_model(config(model=str(saved("llama")), dtype="bfloat16", quantization="int8"))
    ids_BP, ctx = some_ids(3, 8), context(model, 3, 8)
    want_BPV = model.logits(ids_BP, ctx).view(3, 8, -1).clone()
    padded = context(model, 3, 8)
    padded.positions_BP[0, 5:] = padded.positions_BP[1] = -1
    got_BPV = model.logits(ids_BP, padded).view(3, 8, -1)
    assert torch.equal(got_BPV[0, :5], want_BPV[0, :5])
    assert torch.equal(got_BPV[2], want_BPV[2])
    for page, whole in zip(padded.pages, ctx.pages, strict=True):
        for sequence, tokens in ((0, 5), (1, 0), (2, 8)):
            at = int(padded.page_table_BN[sequence, 0])
            assert torch.equal(page.v[at, :, :tokens], whole.v[at, :, :tokens])
            assert not page.v[at, :, tokens:].any()
            assert not page.k[at, :, :, tokens:].any()


@torch.inference_mode()
@pytest.mark.parametrize(("family", "layers"), [("llama", (0, 1, 2)), ("gemma4 small", (2, 4)), ("gemma4 small", (6,))])
def test_the_states_that_a_drafter_wants_are_those_of_the_loop(
    saved: Saved, family: str, layers: tuple[int, ...]
) -> None:
    """The last three layers of Gemma 4 store nothing, and a forward without logits stops where it can."""
    settings = {"model": str(saved(family)), "dtype": "float32", "quantization": "int8"}
    loop, native = (load_model(config(**settings, fuse_parts=fuse)) for fuse in (False, True))
    ids_BP, taken = some_ids(2, 9), []
    for model in (loop, native):
        ctx = context(model, 2, 9)
        ctx.hidden = dict.fromkeys(layers)
        model.prefill(ids_BP, ctx)
        taken.append(ctx.hidden)
    for layer, want in taken[0].items():
        assert distance(taken[1][layer], want) < 2e-2, layer


def test_products_with_inputs_that_are_no_whole_blocks_stay(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(64, 8), nn.Linear(40, 8)).requires_grad_(False)
    with caplog.at_level(logging.INFO):
        assert quantise_linears(net, lambda _, linear: quantised(linear.weight, BlockKind.Q8)) == 1
    assert isinstance(net[0], BlockLinear)
    assert type(net[1]) is nn.Linear
    assert "1 has 40 inputs" in caplog.text


def test_a_product_that_differs_from_its_matrix_or_its_neighbour_is_an_error() -> None:
    class Wrong(Blocks):
        def dequantised(self) -> torch.Tensor:
            return 2 * super().dequantised()

    right = quantised(torch.randn(8, 64), BlockKind.Q8)
    wrong = Wrong(right.kind, right.quants_NK, right.scales_NS, None)
    with pytest.raises(RuntimeError, match="0 is 5"):
        quantise_linears(nn.Sequential(nn.Linear(64, 8)).requires_grad_(False), lambda *_: wrong)
    with pytest.raises(ValueError, match="biases"):
        joined_blocks([BlockLinear.of(right, None), BlockLinear.of(right, torch.zeros(8))])


def test_what_decides_on_blocks(saved: Saved, tmp_path: Path) -> None:
    def choose(**settings: str) -> bool:
        linear, path = nn.Linear(32, 32), tmp_path / "m.gguf"
        return choice.quantise(config(**settings), linear, path, can_multiply=lambda: False)

    with pytest.raises(ModelNotSupported, match="quantization: q4 needs a CPU with AVX2"):
        choose(quantization="q4")
    assert not choose(quantization="auto", dtype="auto")
    with pytest.raises(ValueError, match="quantization: 'fp3' is not one of auto, none, int8, q4"):
        config(quantization="fp3")
    assert not load_model(config(model=str(saved("llama")), dtype="auto")).quantised, "it came from no GGUF file"


def test_a_gate_with_one_output_is_not_refused_for_sums_that_are_near_zero() -> None:
    """A model has one in each layer; of three sums each, one gate in twenty was refused."""
    for seed in range(60):
        matrix = quantised(torch.randn(1, 64, generator=torch.Generator().manual_seed(seed)), BlockKind.Q4)
        check_product("gate", BlockLinear.of(matrix, None), torch.arange(1), matrix.dequantised())
