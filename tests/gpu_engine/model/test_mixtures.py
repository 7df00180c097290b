"""Mixtures of experts on a CPU: read expert by expert, quantised, and native where their form is known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gpu_engine.model.adapters.places import AdaptedProduct
from gpu_engine.model.experts import Experts
from gpu_engine.model.files.architectures import width_of_experts
from gpu_engine.model.files.gguf_header import GGUFHeader
from gpu_engine.model.files.reading import configuration_of
from gpu_engine.model.files.safetensors_weights import SafetensorsWeights
from gpu_engine.model.fused_forward import FusedForward
from gpu_engine.model.fusion import NotRecognised, chosen_experts_of
from gpu_engine.model.loader import LoadedModel, ModelNotSupported, load_model
from gpu_engine.model.network import ModelFiles, read_network
from gpu_engine.model.quantised.linear import BlockLinear
from gpu_engine.model.quantised.native import NativeForward, with_native
from gpu_engine.model.recording import distance, recording
from kernels.blocks import BlockKind, can_multiply_blocks
from kernels.fused_arguments import Activation
from kernels.mixture import Choice
from tests.gpu_engine import gguf_files, tiny
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.model_logits import (
    assert_same_bits_in_any_company,
    assert_same_bits_on_every_unit,
    logits,
    some_ids,
)
from tests.gpu_engine.model.same_model import assert_same, by_transformers

needs_blocks = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")

_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2}
KNOWN: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**tiny._SHAPE, **_EXPERTS, head_dim=32, moe_intermediate_size=32),
    "qwen3_moe renormalised": lambda: Qwen3MoeConfig(
        **tiny._SHAPE, **_EXPERTS, head_dim=32, moe_intermediate_size=64, norm_topk_prob=True
    ),
    "mixtral": lambda: MixtralConfig(**tiny._SHAPE, num_local_experts=5, num_experts_per_tok=3),
    "olmoe": lambda: OlmoeConfig(**tiny._SHAPE, **_EXPERTS),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **tiny._SHAPE, **_EXPERTS, moe_intermediate_size=32, shared_expert_intermediate_size=160, mlp_only_layers=[1]
    ),
    "granitemoe": lambda: GraniteMoeConfig(
        **tiny._SHAPE, num_local_experts=6, num_experts_per_tok=2, embedding_multiplier=3.0, residual_multiplier=0.5
    ),
    "ernie4_5_moe": lambda: Ernie4_5_MoeConfig(
        **tiny._SHAPE,
        head_dim=32,
        moe_num_experts=6,
        moe_k=2,
        moe_intermediate_size=32,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=1,
    ),
    "glm4_moe": lambda: Glm4MoeConfig(
        **tiny._SHAPE,
        head_dim=32,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "minimax_m2": lambda: tiny.OWN_FORWARD["minimax_m2"](),
}
"""Families whose mixtures are in the native forward."""
THROUGH_LIBRARY = ("granitemoe", "ernie4_5_moe", "glm4_moe")
"""Those whose weights transformers converts, or of which it keeps a part in float32."""
OTHER: dict[str, Callable[[], PreTrainedConfig]] = {
    "deepseek_v2": lambda: tiny.OWN_FORWARD["deepseek_v2"](),
}
"""Families whose products by head have no whole blocks as inputs in this size, and so no native forward."""


def typical(got_NV: torch.Tensor, want_NV: torch.Tensor) -> float:
    """Return the median of the rows' distances: a row whose router has two nearly equal outputs may take the other."""
    pairs = zip(got_NV.flatten(0, -2), want_NV.flatten(0, -2), strict=True)
    far = sorted(distance(got, want) for got, want in pairs)
    return far[len(far) // 2]


def products(model: LoadedModel) -> list[BlockLinear]:
    return [
        module for name, module in model.net.named_modules() if ".experts." in name and isinstance(module, BlockLinear)
    ]


@needs_blocks
@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("quantization", ["int8", "q4"])
def test_mixtures_of_a_known_form_run_in_one_native_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, quantization: str
) -> None:
    folder = str(tiny.save(KNOWN[family](), tmp_path))
    caplog.set_level(logging.INFO)
    native = load_model(config(model=folder, dtype="bfloat16", quantization=quantization))
    assert ("through transformers" in caplog.text) == (family in THROUGH_LIBRARY)
    loop = load_model(config(model=folder, dtype="bfloat16", quantization=quantization, fuse_parts=False))
    assert isinstance(native.fused.forward, NativeForward), native.fused.left
    assert len(native.fused.mixtures) == sum(type(module) is Experts for module in native.net.modules()) > 0
    assert loop.fused.forward is None
    ids_BP = some_ids(3, 40)
    assert typical(logits(native, ids_BP), logits(loop, ids_BP).float()) < 5e-2


@needs_blocks
@pytest.mark.parametrize("family", [*KNOWN, *OTHER])
def test_experts_are_quantised_and_the_logits_stay_near(tmp_path: Path, family: str) -> None:
    folder = str(tiny.save((KNOWN | OTHER)[family](), tmp_path))
    got, want = (load_model(config(model=folder, dtype="float32", quantization=kind)) for kind in ("int8", "none"))
    assert len(products(got)) > 2 * got.num_layers
    assert {product.packed.kind for product in products(got)} == {BlockKind.Q8}
    assert not products(want)
    assert got.num_parameters == want.num_parameters
    ids_BP = some_ids(2, 30)
    assert typical(logits(got, ids_BP), logits(want, ids_BP)) < 5e-2


@needs_blocks
@pytest.mark.parametrize(
    ("far", "noise", "is_native"),
    [
        (0.19, 0.0, True),
        (0.21, 0.0, False),
        (0.21, 0.11, True),
        (0.21, 0.1, False),
        (0.49, 1.0, True),
        (0.51, 1.0, False),
    ],
)
def test_a_native_mixture_may_differ_as_far_as_the_models_own_forwards(
    tmp_path: Path, far: float, noise: float, is_native: bool
) -> None:
    folder = str(tiny.save(KNOWN["mixtral"](), tmp_path))
    model = load_model(config(model=folder, dtype="bfloat16", quantization="int8", max_adapter_bytes=1 << 20))
    assert isinstance(model.fused.forward, FusedForward)  # adapters keep it out of the native call
    for layer in model.fused.forward.layers:
        for name, product in layer.attention.products():
            assert isinstance(product, AdaptedProduct)
            layer.attention.replace_product(name, product._product[0])
    logits_NV = torch.zeros(1, 1)
    made = with_native(model.fused, logits_NV, lambda forward: logits_NV, lambda got, want: far, lambda: noise)
    assert isinstance(made.forward, NativeForward) is is_native


@needs_blocks
@torch.inference_mode()
@pytest.mark.parametrize("family", [*OTHER, "qwen2_moe", "deepseek_v3", "minimax_m2", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_of_any_router_run_in_one_native_call(tmp_path: Path, family: str, dtype: str) -> None:
    made = (tiny.OWN_FORWARD | KNOWN | OTHER)[family]()
    model = load_model(config(model=str(tiny.save(made, tmp_path)), dtype=dtype, quantization="int8", fuse_parts=False))
    experts = [module for module in model.net.modules() if type(module) is Experts]
    assert experts
    ids_BP = some_ids(2, 30)
    assert all(each.native is not None for each in experts)
    got_NV = logits(model, ids_BP).float()
    for each in experts:
        each.native = None
    want_NV = logits(model, ids_BP).float()
    assert typical(got_NV, want_NV) < (1e-2 if dtype == "float32" else 5e-2)
    assert not torch.equal(got_NV, want_NV), "the native call adds in another order"


@needs_blocks
@torch.inference_mode()
def test_experts_without_a_kernel_run_one_by_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(tiny.save(Qwen2MoeConfig(**tiny._SHAPE, **_EXPERTS, hidden_act="relu"), tmp_path))
    caplog.set_level(logging.INFO)
    model = load_model(config(model=folder, dtype="bfloat16", quantization="int8"))
    assert "experts run one by one: their activation has no kernel" in caplog.text
    assert not any(module.native for module in model.net.modules() if type(module) is Experts)


@needs_blocks
@torch.inference_mode()
def test_a_number_that_no_expert_has_adds_nothing(tmp_path: Path) -> None:
    folder = str(tiny.save(KNOWN["qwen3_moe"](), tmp_path))
    model = load_model(config(model=folder, dtype="float32", quantization="int8"))
    experts = next(module for module in model.net.modules() if type(module) is Experts)
    rows_NH, weights_Nk = torch.randn(3, 64), torch.ones(3, 2)
    got_NH = experts(rows_NH, torch.tensor([[0, 6], [6, 6], [2, 1]]), weights_Nk)
    only_NH = experts(rows_NH, torch.tensor([[0, 1], [0, 1], [2, 1]]), weights_Nk)
    assert not got_NH[1].any()
    assert distance(got_NH[0], experts.one(0, rows_NH[:1])[0]) < 1e-6
    assert distance(got_NH[2], only_NH[2]) < 1e-5


@pytest.mark.parametrize("family", KNOWN)
def test_weights_that_are_read_by_expert_are_those_of_transformers_loader(tmp_path: Path, family: str) -> None:
    folder = str(tiny.save(KNOWN[family](), tmp_path))
    settings = config(model=folder, dtype="float32", quantization="none")
    got = load_model(settings)
    assert isinstance(got.fused.forward, FusedForward), got.fused.left
    assert_same(got, by_transformers(settings))


@needs_blocks
def test_files_with_stacked_experts_are_read_by_expert(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One tensor for a product of all experts is what transformers has in memory."""
    source = tiny.save(KNOWN["qwen3_moe"](), tmp_path / "source")
    want = load_model(config(model=str(source), quantization="q4"))
    apart, stacked = load_file(source / "model.safetensors"), {}
    for layer in range(2):
        of_layer = f"model.layers.{layer}.mlp.experts"
        parts = [[apart.pop(f"{of_layer}.{e}.{p}_proj.weight") for e in range(6)] for p in ("gate", "up", "down")]
        stacked[f"{of_layer}.gate_up_proj"] = torch.cat([torch.stack(part) for part in parts[:2]], dim=1)
        stacked[f"{of_layer}.down_proj"] = torch.stack(parts[2])
    save_file(apart | stacked, source / "model.safetensors", {"format": "pt"})
    caplog.set_level(logging.INFO)
    got = load_model(config(model=str(source), quantization="q4"))
    assert "through transformers" not in caplog.text
    assert torch.equal(logits(got, some_ids(2, 20)), logits(want, some_ids(2, 20)))


def test_an_expert_that_the_files_lack_is_named(tmp_path: Path) -> None:
    folder = tiny.save(KNOWN["qwen3_moe"](), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotSupported, match=r"no weights for model\.layers\.1\.mlp\.experts\.gate_up\.4\.weight$"):
        load_model(config(model=str(folder), quantization="none"))


def qwen3_moe_file(folder: Path, width: int = 32, **options: Any) -> Path:
    made = Qwen3MoeConfig(
        **gguf_files._SHAPE, **_EXPERTS, head_dim=32, moe_intermediate_size=width, norm_topk_prob=True
    )
    return gguf_files.write(made, folder / "model.gguf", **options)


@needs_blocks
@pytest.mark.parametrize("kinds", [("Q4_0",), ("Q8_0",), ("Q4_1", "Q8_0", "Q5_0"), ("BF16",)])
def test_a_gguf_file_of_experts_runs_over_its_own_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kinds: tuple[str, ...]
) -> None:
    file = qwen3_moe_file(tmp_path, kinds=kinds)
    caplog.set_level(logging.INFO)
    got = load_model(config(model=str(file), dtype="auto"))
    assert "through transformers" not in caplog.text
    assert "does not read" not in caplog.text
    whole = load_model(config(model=str(file), dtype="float32", quantization="none"))
    if kinds == ("BF16",):
        assert not got.quantised
    else:
        assert isinstance(got.fused.forward, NativeForward), got.fused.left
        assert len(products(got)) == 2 * 6 * got.num_layers
    ids_BP = some_ids(2, 30)
    assert typical(logits(got, ids_BP).float(), logits(whole, ids_BP)) < 0.15


def test_a_gguf_file_of_experts_has_the_weights_that_transformers_reads(tmp_path: Path) -> None:
    """transformers takes the width of experts from its class, and not from the file: here it is the class's."""
    file = qwen3_moe_file(tmp_path, width=768)
    settings = config(model=str(file), dtype="float32", quantization="none")
    assert_same(load_model(settings), by_transformers(settings))


def test_the_width_of_experts_is_the_files(tmp_path: Path) -> None:
    file = qwen3_moe_file(tmp_path, width=96)
    made = configuration_of(file, GGUFHeader(file))
    assert (made.moe_intermediate_size, made.norm_topk_prob) == (96, True)


@needs_blocks
@torch.inference_mode()
@pytest.mark.parametrize("family", KNOWN)
def test_a_row_has_the_same_bits_in_any_company_and_on_every_unit(tmp_path: Path, family: str) -> None:
    model = load_model(config(model=str(tiny.save(KNOWN[family](), tmp_path)), dtype="bfloat16", quantization="q4"))
    assert isinstance(model.fused.forward, NativeForward)
    assert_same_bits_in_any_company(model)
    assert_same_bits_on_every_unit(model)


def test_a_rank_and_a_gpu_get_a_gguf_file_through_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They have no product for each expert."""
    settings = config(model=str(qwen3_moe_file(tmp_path, width=768)), dtype="float32", quantization="none")
    caplog.set_level(logging.INFO)
    files = ModelFiles.open(Path(settings.model), "model", torch.float32, whole=False)
    net = read_network(settings, files, lambda stage, done: None).net
    assert "through transformers" in caplog.text
    assert net.model.layers[1].mlp.experts.gate_up_proj.shape == (6, 2 * 768, 64)


@pytest.mark.parametrize(
    "shape", [(32, 32), (32,), (), (32, 1), (31, 64)], ids=["narrower", "flat", "a scalar", "one column", "fewer rows"]
)
@pytest.mark.parametrize("quantization", ["none", pytest.param("q4", marks=needs_blocks)])
def test_a_matrix_of_an_expert_in_another_shape_is_named(
    tmp_path: Path, shape: tuple[int, ...], quantization: str
) -> None:
    folder = tiny.save(KNOWN["qwen3_moe"](), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.4.up_proj.weight"] = torch.ones(shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotSupported, match=r"experts\.gate_up\.4\.weight is made of .* not one shape"):
        load_model(config(model=str(folder), quantization=quantization))


def test_a_scalar_of_a_file_has_the_shape_of_a_scalar(tmp_path: Path) -> None:
    save_file({"model.scale": torch.tensor(2.0)}, tmp_path / "model.safetensors", {"format": "pt"})
    with SafetensorsWeights(tmp_path) as weights:
        assert weights.shape("model.scale") == ()
        assert weights.shape("model.other") is None


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ({"expert_feed_forward_length": 96}, 96),
        ({"feed_forward_length": 192, "expert_used_count": 2}, 96),
        ({"feed_forward_length": 192}, None),
        ({"expert_feed_forward_length": [96, 96]}, None),
        ({}, None),
    ],
)
def test_the_width_of_experts_is_one_number(keys: dict[str, Any], width: int | None) -> None:
    header: Any = SimpleNamespace(architecture="qwen3moe", get=lambda key: keys.get(key.removeprefix("{arch}.")))
    if width is not None:
        assert width_of_experts(header) == width
        return
    with pytest.raises(ValueError, match=r"^its qwen3moe\.expert_feed_forward_length is .*, and must be one number$"):
        width_of_experts(header)


class Block(nn.Module):
    """A mixture whose parts a test changes."""

    def __init__(self) -> None:
        super().__init__()
        made: Any = Qwen3MoeForCausalLM(KNOWN["qwen3_moe"]())
        self.gate, experts = made.model.layers[0].mlp.gate, made.model.layers[0].mlp.experts
        for weight in (self.gate.weight, experts.gate_up_proj, experts.down_proj):
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) / 4
        self.experts = Experts(experts)
        self.before = self.between = self.after = lambda x: x

    def forward(self, x_BPH: torch.Tensor) -> torch.Tensor:
        rows_NH = x_BPH.flatten(0, 1)
        _, weights_Nk, chosen_Nk = self.gate(self.before(rows_NH))
        return self.after(self.experts(rows_NH, chosen_Nk, self.between(weights_Nk))).view(x_BPH.shape)


class Tanh(nn.Module):
    """A router of no known kind."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight = inner.weight

    def forward(self, x_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        outputs_NE = nn.functional.linear(x_NH, self.weight)
        return outputs_NE, *outputs_NE.tanh().topk(2)


class Sigmoid(nn.Module):
    """A router of DeepSeek V3's kind, whose correction moves no choice of a few rows, and whose outputs are small."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(inner.get_parameter("weight").detach() / 50)
        self.e_score_correction_bias = nn.Buffer(torch.linspace(-1e-6, 1e-6, len(self.weight)))

    def forward(self, x_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        outputs_NE = nn.functional.linear(x_NH, self.weight)
        shares_NE = outputs_NE.sigmoid()
        chosen_Nk = (shares_NE + self.e_score_correction_bias).topk(2).indices
        weights_Nk = shares_NE.gather(1, chosen_Nk)
        return outputs_NE, weights_Nk / weights_Nk.sum(-1, keepdim=True), chosen_Nk


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "weights are scaled": (lambda b: setattr(b, "between", lambda x: 1.1 * x), "what its router returns"),
    "the router's input is scaled": (lambda b: setattr(b, "before", lambda x: 1.1 * x), "do not get its input"),
    "the output is scaled": (lambda b: setattr(b, "after", lambda x: 1.1 * x), "its output is not the experts'"),
    "tanh": (lambda b: setattr(b, "gate", Tanh(b.gate)), "the highest outputs by their softmax or sigmoid"),
    "relu": (lambda b: setattr(b.experts.inner, "act_fn", nn.ReLU()), "another activation"),
    "bounded": (
        lambda b: setattr(b.experts.inner, "act_fn", nn.Sequential(nn.Hardtanh(-1e9, 7.0), nn.SiLU())),
        "another activation",
    ),
    "two routers": (lambda b: setattr(b, "other", Tanh(b.gate)), "has the parts"),
    "groups": (
        lambda b: (setattr(b.gate, "n_group", 3), setattr(b.gate, "topk_group", 1)),
        "the highest outputs by their softmax or sigmoid",
    ),
    "unequal groups": (
        lambda b: (setattr(b.gate, "n_group", 5), setattr(b.gate, "topk_group", 1)),
        "experts are in 5 groups",
    ),
    "two shared experts": (
        lambda b: (setattr(b, "other", nn.Linear(4, 4)), setattr(b, "another", nn.Linear(4, 4))),
        r"has the further parts \['another', 'other'\]",
    ),
    "a shared expert that was not called": (lambda b: setattr(b, "other", nn.Linear(4, 4)), "called 0 times"),
    "a router with one result": (
        lambda b: setattr(b.gate, "forward", lambda x: nn.functional.linear(x, b.gate.weight)),
        "",
    ),
}


@torch.inference_mode()
@pytest.mark.parametrize("change", [None, *CHANGES])
def test_only_the_known_form_is_recognised(change: str | None) -> None:
    block, x_BPH = Block(), torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(2))
    if change is not None:
        CHANGES[change][0](block)
    block.experts._gate = block.experts._halves
    try:
        with recording(block) as record:
            block(x_BPH)
    except ValueError:  # the block itself takes no such router
        assert change == "a router with one result"
        return
    if change is None:
        found = chosen_experts_of(block, record, 1e-3)
        assert asdict(found.choice) == asdict(Choice(2, renormalises=False))
        assert (found.act, found.has_shared, found.experts) == (Activation.SILU, False, block.experts)
        return
    with pytest.raises(NotRecognised, match=CHANGES[change][1]):
        chosen_experts_of(block, record, 1e-3)


@torch.inference_mode()
def test_the_nearest_choice_is_taken_with_every_correction() -> None:
    """The softmax of these outputs, and a choice without the correction, are within the bound as well."""
    block, x_BPH = Block(), torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(2))
    block.gate = Sigmoid(block.gate)
    block.experts._gate = block.experts._halves
    with recording(block) as record:
        block(x_BPH)
    choice = chosen_experts_of(block, record, 1e-2).choice
    assert (choice.chosen, choice.renormalises, choice.of_sigmoid, choice.scale) == (2, True, True, 1.0)
    assert choice.correction_E is not None
    assert torch.equal(choice.correction_E, block.gate.e_score_correction_bias)
    outputs_NE = record.only(block.gate).output[0]
    softmax = Choice(2, renormalises=True)
    assert distance(softmax(outputs_NE)[0], choice(outputs_NE)[0]) < 1e-2


FORMS = {
    "qwen2_moe": (True, False, False, 1.0),
    "granitemoe": (False, False, False, 1.0),
    "ernie4_5_moe": (True, False, True, 1.0),
    "glm4_moe": (True, True, True, 2.5),
    "minimax_m2": (False, True, True, 1.0),
}


@pytest.mark.parametrize("family", FORMS)
def test_the_form_of_a_mixture_is_that_of_its_family(tmp_path: Path, family: str) -> None:
    """Whether it has a shared expert, sigmoids, and a correction, and its scale."""
    model = load_model(config(model=str(tiny.save(KNOWN[family](), tmp_path))))
    for each in model.fused.mixtures.values():
        choice = each.choice
        found = (each.has_shared, choice.of_sigmoid, choice.correction_E is not None, choice.scale)
        assert found == FORMS[family]
    assert model.fused.mixtures


@needs_blocks
def test_adapters_keep_mixtures_out_of_the_native_call(tmp_path: Path) -> None:
    """They number the products of gated blocks. Attention takes them."""
    folder = str(tiny.save(KNOWN["mixtral"](), tmp_path))
    model = load_model(config(model=folder, dtype="bfloat16", quantization="int8", max_adapter_bytes=1 << 20))
    assert model.quantised
    assert len(model.fused.mixtures) == 2
    assert isinstance(model.fused.forward, FusedForward)
