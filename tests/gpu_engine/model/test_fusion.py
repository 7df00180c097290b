"""Fusing a model: the parts that are replaced, unchanged numbers, and parts that differ and are not replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention

from gpu_engine.model import attention
from gpu_engine.model.fused_forward import FusedForward
from gpu_engine.model.fused_layers import FusedAttention, FusedNorm, Rotation
from gpu_engine.model.fusion import (
    Bounds,
    Fused,
    FusedModelDiffers,
    NotRecognised,
    attention_of,
    fuse_parts,
    norm_of,
    verified,
)
from gpu_engine.model.linear import PackedByLibrary, joined
from gpu_engine.model.loader import load_model, prepare
from gpu_engine.model.probe import probe
from gpu_engine.model.recording import distance, recording
from kernels.blocks import can_multiply_blocks
from kernels.fused_arguments import HeadForm
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.model_logits import context, logits, some_ids

Saved = Callable[[str], Path]


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_is_fused_completely_with_unchanged_logits(saved: Saved, family: str, dtype: str) -> None:
    plain, fused = (
        load_model(config(model=str(saved(family)), dtype=dtype, fuse_parts=fuse)) for fuse in (False, True)
    )
    norms = {
        "gemma2": 9,
        "gemma3": 9,
        "gemma4": 13,
        "gemma4 small": 32,
        "gemma4 moe": 22,
        "glm4": 9,
        "cohere": 3,
        "cohere2": 3,
    }
    layers = plain.net.config.num_hidden_layers
    assert plain.fused == Fused()
    assert not [item for item in plain.net.modules() if isinstance(item, FusedNorm)]
    assert fused.fused.norms == norms.get(family, 5), fused.fused.left
    assert fused.fused.blocks == fused.fused.attentions == layers, fused.fused.left
    assert fused.fused.left == ()
    assert fused.fused.forward is not None
    for B, P, start in ((1, 50, 0), (3, 40, 17), (2, 30, 29)):
        ids = some_ids(B, P)
        want = logits(plain, ids, start=start)
        assert distance(logits(fused, ids, start=start), want) < (1e-4 if dtype == "float32" else 3e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "cohere2", "olmo2", "hunyuan", "gemma4", "gemma4 small", "gemma4 moe"]
)
def test_a_row_has_the_same_bits_for_any_number_of_rows(saved: Saved, family: str, dtype: str) -> None:
    model = load_model(config(model=str(saved(family)), dtype=dtype))
    assert model.fused.forward is not None
    ids = some_ids(5, 40)
    whole = logits(model, ids, start=20)
    for sequence in (0, 4):
        assert torch.equal(logits(model, ids[sequence : sequence + 1], start=20)[0], whole[sequence])
    for last in (21, 23):
        assert torch.equal(logits(model, ids[:1, :last], start=20)[0], whole[0, : last - 20])


FORMS = {
    "llama": ((Rotation.HALVES, Rotation.HALVES), HeadForm()),
    "smollm3": ((Rotation.HALVES, Rotation.NONE), HeadForm()),
    "exaone4": ((Rotation.HALVES, Rotation.NONE), HeadForm()),
    "olmo2": ((Rotation.HALVES, Rotation.HALVES), HeadForm(whole_norms=True)),
    "glm4": ((Rotation.NEIGHBOURS_REPEATED,) * 2, HeadForm(neighbours=True)),
    "ernie4_5": ((Rotation.NEIGHBOURS_REPEATED,) * 2, HeadForm(neighbours=True)),
    "cohere": ((Rotation.NEIGHBOURS,) * 2, HeadForm(neighbours=True)),
    "cohere2": ((Rotation.NEIGHBOURS, Rotation.NONE), HeadForm(neighbours=True)),
    "hunyuan": ((Rotation.HALVES, Rotation.HALVES), HeadForm(norms_last=True)),
}


@pytest.mark.parametrize("family", FORMS)
def test_the_form_of_an_attention_is_that_of_its_family(saved: Saved, family: str) -> None:
    model = load_model(config(model=str(saved(family))))
    attentions = [module for module in model.net.modules() if isinstance(module, FusedAttention)]
    rotations, form = FORMS[family]
    assert tuple(each.rotation for each in attentions) == rotations
    assert attentions[0].heads == form


@torch.inference_mode()
@pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")
@pytest.mark.parametrize("family", ["glm4", "cohere", "ernie4_5", "hunyuan"])
def test_no_other_form_takes_the_place_of_one_that_a_device_lacks(saved: Saved, tmp_path: Path, family: str) -> None:
    """In the positions of the record the channels with weights turn by less than the bound, so all forms are alike."""
    folder = tmp_path / "model"
    shutil.copytree(saved(family), folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["rope_parameters"] = {**settings["rope_parameters"], "rope_theta": 1e9}
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = load_file(folder / "model.safetensors")
    head_dim = settings.get("head_dim") or 16
    for name in tensors:
        if "q_proj" in name or "k_proj" in name:
            channels = torch.arange(len(tensors[name])) % head_dim
            tensors[name][(channels < head_dim // 4) | (channels % 4 < 2)] = 0.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    # Products over blocks are as they were when the parts of a model are fused.
    model = load_model(config(model=str(folder), dtype="bfloat16", quantization="int8", fuse_parts=False))
    seen = probe(model)
    module = next(module for module in model.net.modules() if hasattr(module, "o_proj"))
    place = (module, seen.record, seen.ctx.layers_seen[0], 0, Bounds.of(torch.bfloat16), 512)
    with attention.attending(seen.ctx):
        assert attention_of(*place, on_cpu=True).heads == FORMS[family][1]
        with pytest.raises(NotRecognised, match="away from it" if family != "hunyuan" else "after the rotation"):
            attention_of(*place, on_cpu=False)


@pytest.mark.parametrize("length", [32, 64])
def test_queries_that_grow_from_a_position_on_are_fused(saved: Saved, length: int) -> None:
    """The probe's positions are too small to see it."""
    folder = saved("ministral3")
    model = load_model(config(model=str(folder), dtype="float32", max_model_len=length))
    assert isinstance(model.fused.forward, FusedForward)
    grow = [layer.attention.query_factors_L for layer in model.fused.forward.layers]
    assert all((factors_L is not None) == (length == 64) for factors_L in grow)
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids_1P = some_ids(1, length)
    with torch.inference_mode():
        assert distance(logits(model, ids_1P)[0], net(ids_1P, use_cache=False).logits[0]) < 1e-4


@pytest.mark.parametrize("rows", [4, 33, 40])
def test_a_product_that_is_cut_into_pieces_has_the_bits_of_a_whole_one(rows: int) -> None:
    """As on AMX; the last piece may have a single row."""
    matrix, x_MK = PackedByLibrary(torch.randn(48, 64), torch.randn(48)), torch.randn(rows, 64)
    whole_MN = matrix(x_MK)
    matrix.most_rows = 16
    assert torch.equal(matrix(x_MK), whole_MN)
    assert matrix._equal_rows() >= 2


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(("family", "layers"), [("llama", (0, 1, 2)), ("gemma4 small", (0, 5)), ("gemma4 small", (6,))])
@torch.inference_mode()
def test_requested_layer_inputs_are_returned(saved: Saved, family: str, layers: tuple[int, ...], fuse: bool) -> None:
    """The last number is after the last layer and the norm. The last three layers of Gemma 4 store nothing."""
    model = load_model(config(model=str(saved(family)), fuse_parts=fuse))
    ids = some_ids(2, 12)
    with_own = AutoModelForCausalLM.from_pretrained(saved(family), attn_implementation="eager").eval()
    states = with_own(input_ids=ids, output_hidden_states=True).hidden_states
    for run in (model.logits, model.prefill):
        hidden: dict[int, torch.Tensor | None] = dict.fromkeys(layers)
        ctx = context(model, 2, 12)
        ctx.hidden = hidden
        run(ids, ctx)
        for layer, got in hidden.items():
            assert got is not None
            assert distance(got, states[layer].reshape(24, -1)) < 1e-4


class Noted(nn.Module):
    """A product that notes its calls."""

    def __init__(self, inner: nn.Module, number: int, calls: list[int]) -> None:
        super().__init__()
        self.inner, self.number, self.calls = inner, number, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(self.number)
        out: torch.Tensor = self.inner(x)
        return out


@torch.inference_mode()
def test_a_fill_ends_with_the_last_layer_that_stores(saved: Saved) -> None:
    model, ids = load_model(config(model=str(saved("gemma4 small")))), some_ids(2, 12)
    seen: list[int] = []
    for layer, module in enumerate(model.net.get_decoder().layers):
        module.mlp.replace_product("gate_up", Noted(module.mlp.gate_up, layer, seen))
    filled, whole = (context(model, 2, 12) for _ in range(2))
    model.prefill(ids, filled)
    assert seen == [0, 1]
    model.logits(ids, whole)
    assert seen[2:] == [0, 1, 2, 3, 4, 5]
    for page, want in zip(filled.pages, whole.pages, strict=True):
        assert torch.equal(page.k, want.k)
        assert torch.equal(page.v, want.v)


@pytest.mark.parametrize(("family", "rows"), [("gemma2", 2), ("phi", 24)])  # gemma2 caps its logits; phi is not fused
@torch.inference_mode()
def test_the_head_is_computed_only_for_the_rows_that_are_wanted(saved: Saved, family: str, rows: int) -> None:
    model = load_model(config(model=str(saved(family))))
    seen: list[int] = []
    model.net.get_output_embeddings().register_forward_hook(lambda _, x, out: seen.append(out.numel() // out.shape[-1]))
    ids, rows_N = some_ids(2, 12), torch.tensor([5, 23])
    want = model.logits(ids, context(model, 2, 12))[rows_N]
    assert torch.equal(model.logits_of(ids, context(model, 2, 12), rows_N), want)
    assert seen == [24, rows]


def test_a_model_with_an_unusual_loop_keeps_its_own_forward_over_fused_parts(tmp_path: Path) -> None:
    """Its configuration names a scale that its forward does not have."""
    tiny.save(LlamaConfig(**tiny._SHAPE, residual_multiplier=0.5), tmp_path)
    plain, fused = (load_model(config(model=str(tmp_path), fuse_parts=fuse)) for fuse in (False, True))
    assert (fused.fused.attentions, fused.fused.blocks, fused.fused.norms) == (2, 2, 5)
    assert fused.fused.forward is None
    (reason,) = fused.fused.left
    assert reason.startswith("forward: its logits are ")
    ids = some_ids(2, 30)
    assert distance(logits(fused, ids, start=20), logits(plain, ids, start=20)) < 1e-4


class Doubled(nn.Module):
    """A module with the children of a gated block that doubles its result."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        for name, child in mlp.named_children():
            setattr(self, name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = nn.functional.silu(self.gate_proj(x))
        out: torch.Tensor = self.down_proj(gate * self.up_proj(x)) * 2.0
        return out


@torch.inference_mode()
def test_a_module_that_differs_is_not_replaced_and_is_reported(saved: Saved) -> None:
    attention.register()
    net = AutoModelForCausalLM.from_pretrained(saved("llama"), attn_implementation="eager").eval()
    stranger = net.model.layers[1].mlp = Doubled(net.model.layers[1].mlp)
    ids = some_ids(1, 10)
    with recording(net) as record:
        want = net(input_ids=ids, use_cache=False).logits[0]
    fused = fuse_parts(net, record, {}, Bounds.of(torch.float32), 10)
    assert (fused.blocks, fused.norms, fused.attentions) == (1, 5, 0)
    assert net.model.layers[1].mlp is stranger
    assert len(fused.left) == 1
    assert fused.left[0].startswith("blocks: Doubled its fused form is ")
    settled = verified(
        net,
        fused,
        record,
        want,
        lambda forward: net(input_ids=ids, use_cache=False).logits[0],
        Bounds.of(torch.float32),
    )
    assert settled.forward is None
    assert settled.left[1:] == (
        "forward: a layer of ['input_layernorm', 'mlp', 'post_attention_layernorm', 'self_attn']",
    )


@torch.inference_mode()
def test_a_fused_forward_with_other_logits_is_rejected(saved: Saved) -> None:
    net = AutoModelForCausalLM.from_pretrained(saved("llama"), attn_implementation="eager").eval()
    with recording(net) as record:
        want = net(input_ids=some_ids(1, 10), use_cache=False).logits[0]
    fused = fuse_parts(net, record, {}, Bounds.of(torch.float32), 10)
    with pytest.raises(FusedModelDiffers, match="away"):
        verified(net, fused, record, want, lambda forward: want * 1.1, Bounds.of(torch.float32))
    # In bfloat16 two right forwards of this model differ by `noise` through rounding alone; in float32 they do not.
    for away, dtype, noise in ((1.1, torch.float32, 0.1), (1.06, torch.bfloat16, 0.02), (1.1, torch.bfloat16, 0.1)):
        with pytest.raises(FusedModelDiffers, match="away"):
            verified(net, fused, record, want, lambda forward, away=away: want * away, Bounds.of(dtype), noise)  # type: ignore[misc]
    bfloat16 = Bounds.of(torch.bfloat16)
    assert verified(net, fused, record, want, lambda forward: want * 1.06, bfloat16, 0.035).norms == fused.norms


class Louder(Gemma4TextAttention):
    """An attention that doubles its result."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return 2.0 * out, weights


def test_a_layer_that_shares_keys_and_is_not_fused_needs_an_unfused_model(saved: Saved) -> None:
    """transformers hands it the keys of an earlier layer, and a fused layer hands on none."""
    attention.register()
    folder = saved("gemma4 small")
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention.NAME).eval()
    net.model.layers[5].self_attn.__class__ = Louder
    with pytest.raises(FusedModelDiffers, match="a part lacks 'full_attention'"):
        prepare(config(model=str(folder)), net, PreTrainedTokenizerFast.from_pretrained(folder))


class TripledNorm(nn.RMSNorm):
    """An RMSNorm that triples its result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3.0 * super().forward(x)


@torch.inference_mode()
def test_a_norm_with_a_bias_or_another_formula_is_not_recognised() -> None:
    tripled = TripledNorm(16, eps=1e-6)
    for norm, reason in ((nn.LayerNorm(16), "is no norm with a weight and no bias"), (tripled, "away from it")):
        with recording(norm) as record:
            norm(torch.randn(3, 16) + 1.0)
        with pytest.raises(NotRecognised, match=reason):
            norm_of(norm, record, 1e-5)


def test_products_of_different_kinds_are_not_joined() -> None:
    with pytest.raises(ValueError, match="different inputs or biases"):
        joined([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
    with pytest.raises(ValueError, match="different inputs or biases"):
        joined([nn.Linear(4, 4), nn.Linear(5, 4)])


@torch.inference_mode()
def test_a_recording_ends_with_its_context_and_lists_modules_called_once() -> None:
    layer = nn.Linear(2, 2)
    with recording(layer) as record:
        layer(torch.ones(1, 2))
    layer(torch.ones(1, 2))
    assert torch.equal(record.only(layer).args[0], torch.ones(1, 2))
    with pytest.raises(ValueError, match="called 0 times"):
        record.only(nn.Linear(2, 2))
