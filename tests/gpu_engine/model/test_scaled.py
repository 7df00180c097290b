"""Scaled products of a GPU, on a CPU: Triton's interpreter quantises the rows, and torch multiplies there as well."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_engine.api.config import EngineConfig
from gpu_engine.model import attention
from gpu_engine.model.fusion import Bounds, fuse_parts
from gpu_engine.model.linear import joined
from gpu_engine.model.loaded_model import LoadedModel, ModelNotSupported
from gpu_engine.model.loader import prepare
from gpu_engine.model.quantised import choice
from gpu_engine.model.quantised.checkpoint import open_checkpoint
from gpu_engine.model.quantised.matrices import ScaledRows
from gpu_engine.model.quantised.scaled import ScaledKind, ScaledLinear, rounded_rows, scale_linears, why_not_scaled
from gpu_engine.model.recording import distance, recording
from tests.gpu_engine import published
from tests.gpu_engine.device.device_engine import device_engine
from tests.gpu_engine.device.device_requests import INTERPRETED
from tests.gpu_engine.harness import answer_all, answer_each, ask, config, tokens, with_drafts

pytestmark = INTERPRETED

CPU = torch.device("cpu")
KINDS = list(ScaledKind)
Saved = Callable[[str], Path]
Write = Callable[..., tuple[Path, Path]]


@pytest.fixture
def write(saved: Saved, tmp_path: Path) -> Write:
    return lambda kind, family="llama": published.write(saved(family), kind, tmp_path / "made")


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear_of(kind: ScaledKind, N: int, K: int, *, bias: bool = False) -> ScaledLinear:
    return ScaledLinear(rounded_rows(some(N, K, seed=N) / 8, kind), some(N, seed=2) if bias else None)


def gpu(**settings: Any) -> EngineConfig:
    return config(**{"device": "cuda", "dtype": "bfloat16", "quantization": "auto", **settings})


def scaled(settings: EngineConfig, net: Any, folder: Path | None = None, why: str | None = None) -> bool:
    """Replace the products as on a GPU, by ones on the CPU."""
    checkpoint = None if folder is None else open_checkpoint(folder)
    if checkpoint is not None:
        checkpoint.load(torch.float32, "eager")  # notes what its matrices are
    return choice.scale(settings, net, checkpoint, CPU, lambda kind, _: why and f"{kind.value} {why}")


def net_of(folder: Path) -> Any:
    checkpoint = open_checkpoint(folder)
    if checkpoint is not None:
        return checkpoint.load(torch.float32, "eager").eval().requires_grad_(False)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval().requires_grad_(False)


@torch.inference_mode()
def logits(net: Any) -> torch.Tensor:
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(3))
    out: torch.Tensor = net(input_ids=ids, use_cache=False).logits
    return out


class RoundsInputs(nn.Module):
    """The reference: a product in fp32 over inputs that were rounded as the kind says."""

    def __init__(self, linear: nn.Linear, kind: ScaledKind) -> None:
        super().__init__()
        self.linear, self.kind = linear, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = rounded_rows(x.reshape(-1, x.shape[-1]), self.kind)
        out: torch.Tensor = self.linear(rows.dequantised().view(x.shape))
        return out


def reference(net: Any, kind: ScaledKind) -> torch.Tensor:
    """Return the logits of a float model whose products round their inputs, except for the head's."""
    for parent in list(net.model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, RoundsInputs(child, kind))
    return logits(net)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 64), (17, 64), (33, 64), (0, 64)])
def test_a_product_of_any_shape_is_that_of_the_rounded_inputs(
    kind: ScaledKind, bias: bool, shape: tuple[int, ...]
) -> None:
    if bias and kind is ScaledKind.FP8:
        pytest.skip("torch adds a bias to FP8 products in 16-bit types alone: see the next test")
    x, product = some(*shape, seed=1), linear_of(kind, 48, 64, bias=bias)
    got = product(x)
    rows = rounded_rows(x.reshape(-1, 64), kind) if x.numel() else None
    inputs = x if rows is None else rows.dequantised().view(shape)
    want = nn.functional.linear(inputs, product.rows.dequantised(), product.bias)
    assert got.shape == (*shape[:-1], 48)
    # An integer may be rounded up where the other rule rounds to even.
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_in_bfloat16_adds_its_bias(kind: ScaledKind) -> None:
    rows = rounded_rows(some(48, 64), kind)
    product = ScaledLinear(rows, some(48, seed=2).bfloat16())
    x = some(3, 64, seed=1).bfloat16()
    got = product(x)
    assert got.dtype is torch.bfloat16
    assert product.bias is not None
    assert distance(got, nn.functional.linear(x.float(), rows.dequantised(), product.bias.float())) < 5e-2
    assert distance(got, nn.functional.linear(x.float(), rows.dequantised())) > 0.1


@pytest.mark.parametrize(
    ("kind", "counts"), [(ScaledKind.INT8, (1, 2, 16, 17, 33, 39)), (ScaledKind.FP8, (1, 2, 7, 16))]
)
def test_a_row_has_the_same_bits_for_any_number_of_rows(kind: ScaledKind, counts: tuple[int, ...]) -> None:
    product, most = linear_of(kind, 80, 96), max(counts)
    x = some(most, 96)
    whole = product(x)
    for count in counts:
        assert torch.equal(product(x[:count]), whole[:count])
        assert torch.equal(product(x[most - count :]), whole[most - count :])


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_to_nearest_and_keeps_rows_of_zeros(kind: ScaledKind) -> None:
    weight = some(6, 64)
    weight[2] = 0
    rows = rounded_rows(weight, kind)
    assert torch.equal(rows.dequantised()[2], weight[2])
    assert distance(rows.dequantised(), weight) < (0.01 if kind is ScaledKind.INT8 else 0.03)
    assert ScaledKind.of(rows) is kind


@pytest.mark.parametrize("kind", KINDS)
def test_joined_products_have_the_outputs_side_by_side(kind: ScaledKind) -> None:
    parts = [linear_of(kind, N, 64, bias=True) for N in (32, 16)]
    whole, x = joined(parts), some(3, 64).bfloat16()
    for part in (*parts, whole):
        assert isinstance(part, ScaledLinear)
        part.bias = None if part.bias is None else part.bias.bfloat16()
    torch.testing.assert_close(whole(x), torch.cat([part(x) for part in parts], dim=1))
    (other,) = set(KINDS) - {kind}
    for others in (linear_of(other, 32, 64), nn.Linear(64, 32), linear_of(kind, 32, 64, bias=True)):
        with pytest.raises(ValueError, match="products"):
            joined([linear_of(kind, 32, 64), others])


FULL = {
    "w8a8": (published.w8a8, "int8"),
    "w8a8 by tensor, static inputs": (partial(published.w8a8, static=True, per_tensor=True), "int8"),
    "fp8 by channel": (published.fp8_channel, "fp8"),
    "fp8 by tensor": (partial(published.fp8_channel, per_tensor=True), "fp8"),
    "fbgemm_fp8": (
        partial(published.fp8_by, "fbgemm_fp8", {}, {"input_scale_ub": torch.tensor([1200.0])}, per_tensor=False),
        "fp8",
    ),
}
"""Kinds that run from the checkpoint's own numbers."""
NOT_FULL: list[tuple[Callable[[], published.Kind], str]] = [
    (published.gptq, "its integers have 4 bits"),
    (partial(published.gptq, 8, group=-1, symmetric=True), "it states no inputs of 8 bits"),
    (partial(published.w4a16, 8, -1), "it states no inputs of 8 bits"),
    (partial(published.w8a8, symmetric=False), "it has zero points"),
    (published.fp8_tiles, "its outputs have several scales"),
]
"""Kinds that are dequantised, and the reason in the log."""


@pytest.mark.parametrize(
    "name", [name if name in ("w8a8", "fp8 by tensor") else pytest.param(name, marks=pytest.mark.slow) for name in FULL]
)
def test_a_checkpoint_runs_from_its_own_numbers(write: Write, name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, kind = FULL[name]
    quantised, floats = write(make())
    net = net_of(quantised)
    head = net.get_output_embeddings()
    with caplog.at_level(logging.INFO):
        assert scaled(gpu(), net, quantised)
    (line,) = [record.message for record in caplog.records if "quantised" in record.message]
    assert line.startswith("quantised 14 products: auto, 14 from ")
    assert line.endswith(", 0 rounded from the weights")
    products = [module for module in net.modules() if isinstance(module, ScaledLinear)]
    assert {product.kind.value for product in products} == {kind}
    assert net.get_output_embeddings() is head, "the checkpoint left it in 16 bits"
    # Rounding in another order may give a neighbouring number of 8 bits. Unrounded inputs are 0.1 and more away.
    assert distance(logits(net), reference(net_of(floats), ScaledKind(kind))) < 2e-2


@pytest.mark.parametrize(
    ("make", "settings", "why", "words"),
    [
        *((make, {}, None, words) for make, words in NOT_FULL),
        (published.fp8_channel, {"quantization": "none"}, None, "quantization is none"),
        (published.fp8_channel, {"dtype": "float32"}, None, "dtype is float32"),
        (published.fp8_channel, {}, "needs a GPU", "fp8 needs a GPU"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_checkpoint_is_dequantised_with_the_reason(
    write: Write,
    make: Callable[[], published.Kind],
    settings: dict[str, str],
    why: str | None,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    quantised, _ = write(make())
    with caplog.at_level(logging.INFO):
        assert not scaled(gpu(**settings), net_of(quantised), quantised, why)
    (line,) = [record.message for record in caplog.records if "quantised" in record.message]
    assert line.startswith("dequantised the weights to ")
    assert words in line


@pytest.mark.parametrize("kind", [ScaledKind.FP8, pytest.param(ScaledKind.INT8, marks=pytest.mark.slow)])
def test_a_named_kind_rounds_a_float_model_but_for_its_head(
    saved: Saved, kind: ScaledKind, caplog: pytest.LogCaptureFixture
) -> None:
    net, rounded = net_of(saved("llama")), net_of(saved("llama"))
    for linear in (module for module in rounded.model.modules() if isinstance(module, nn.Linear)):
        linear.weight = nn.Parameter(rounded_rows(linear.weight, kind).dequantised(), requires_grad=False)
    with caplog.at_level(logging.INFO):
        assert scaled(gpu(quantization=kind.value), net)
    assert f"quantised 14 products: {kind.value}" in caplog.text
    assert type(net.get_output_embeddings()) is nn.Linear
    assert distance(logits(net), reference(rounded, kind)) < 2e-2


@pytest.mark.slow
def test_a_named_kind_takes_own_numbers_of_that_kind_and_rounds_others(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, _ = write(published.w8a8())
    for kind, own in ((ScaledKind.INT8, 14), (ScaledKind.FP8, 0)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert scaled(gpu(quantization=kind.value), net_of(quantised), quantised)
        assert f"quantised 14 products: {kind.value}, {own} from" in caplog.text
        assert f"{14 - own} rounded from the weights" in caplog.text


@pytest.mark.parametrize(("kind", "need"), [(ScaledKind.INT8, (8, 0)), (ScaledKind.FP8, (8, 9))])
def test_a_device_without_the_products_is_refused_in_one_line(
    saved: Saved, kind: ScaledKind, need: tuple[int, int]
) -> None:
    assert why_not_scaled(kind, CPU, lambda _: need) is None, "a small product was tried"
    old = partial(why_not_scaled, capability_of=lambda _: (7, 5))
    with pytest.raises(ModelNotSupported) as error:
        choice.quantise(gpu(quantization=kind.value), net_of(saved("llama")), None, why_not=old)
    assert str(error.value) == (
        f"quantization: {kind.value} needs a GPU of compute capability {need[0]}.{need[1]}, and cuda has 7.5"
    )
    if kind is ScaledKind.FP8:
        why = why_not_scaled(kind, torch.device("meta"), lambda _: (9, 0))  # torch has no products on it
        assert why is not None
        assert why.startswith("fp8 products fail on meta: ")
        assert "\n" not in why


def test_a_product_that_differs_from_its_matrix_ends_the_start(saved: Saved) -> None:
    def wrong(name: str, linear: nn.Linear) -> ScaledRows:
        rows = rounded_rows(linear.weight, ScaledKind.INT8)
        return ScaledRows(rows.values_NK.view(torch.uint8).view(torch.float8_e4m3fn), rows.scales_N)

    with pytest.raises(RuntimeError, match=r"product of model\.layers\.0\.self_attn\.q_proj is .* away|nan away"):
        scale_linears(net_of(saved("llama")), wrong, CPU)


def test_sizes_that_torch_does_not_multiply_stay(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24), nn.Linear(32, 48)).requires_grad_(False)
    with caplog.at_level(logging.INFO):
        assert scale_linears(net, lambda _, linear: rounded_rows(linear.weight, ScaledKind.INT8), CPU) == 1
    assert "not quantised: 0 has 24 inputs and 32 outputs, no multiples of 16" in caplog.text
    assert [type(part) for part in net] == [nn.Linear, nn.Linear, ScaledLinear]


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_over_scaled_products_are_fused(saved: Saved, kind: ScaledKind) -> None:
    net = net_of(saved("llama"))
    assert scaled(gpu(quantization=kind.value), net)
    with recording(net) as record:
        want = net(input_ids=torch.arange(10)[None], use_cache=False).logits
    fused = fuse_parts(net, record, {}, Bounds.of(torch.float32, rough=True), 10)
    assert (fused.blocks, fused.norms) == (2, 5), fused.left
    assert distance(net(input_ids=torch.arange(10)[None], use_cache=False).logits, want) < 0.1


@pytest.fixture(scope="module")
def small(saved: Saved) -> LoadedModel:
    folder = saved("llama")
    attention.register()
    net = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention.NAME).requires_grad_(False)
    assert scaled(gpu(quantization="int8"), net)
    settings = config(model=str(folder), quantization="none", fuse_parts=False)
    return prepare(settings, net, AutoTokenizer.from_pretrained(folder))


@pytest.mark.slow
def test_tokens_of_captured_steps_are_those_of_eager_ones_with_and_without_drafts(small: LoadedModel) -> None:
    sizes = {"max_batch_size": 2, "max_model_len": 64, "max_batched_tokens": 32}

    def answers() -> list[Any]:
        return [
            ask(tokens(6, 1), max_tokens=5, ignore_eos=True),
            ask(tokens(9, 2), max_tokens=3, temperature=0.8, seed=3, ignore_eos=True),
        ]

    with device_engine(small, with_drafts(0, device="cuda", enforce_eager=True, **sizes)) as (engine, _):
        want = answer_each(engine, answers())
    # The same model without rounding drafts: most of its drafts are right, and some are not.
    with device_engine(small, with_drafts(2, device="cuda", draft_model=small.name, fuse_parts=False, **sizes)) as (
        engine,
        _,
    ):
        assert answer_all(engine, answers()) == want
        assert engine.stats().accepted_draft_tokens > 0
