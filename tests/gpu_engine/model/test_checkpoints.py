"""Quantised checkpoints: the weights that they state, products over their own integers, and errors that name a part."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gpu_engine.model.loader import LoadedModel, ModelNotSupported, load_model
from gpu_engine.model.quantised import choice
from gpu_engine.model.quantised.checkpoint import QuantisedCheckpoint, open_checkpoint
from gpu_engine.model.quantised.layouts import Parts, UnsupportedCheckpoint, layout_of
from gpu_engine.model.quantised.matrices import GroupedIntegers, NoBlocks
from gpu_engine.model.quantised.native import NativeForward
from gpu_engine.model.recording import distance
from kernels.blocks import can_multiply_blocks
from tests.gpu_engine import gpt_oss_files, published, tiny
from tests.gpu_engine.harness import answer_all, ask, config, tokens, unguided_engine, with_drafts
from tests.gpu_engine.model.model_logits import logits, some_ids
from tests.gpu_engine.published import Kind

with_blocks = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")

Saved = Callable[[str], Path]
Write = Callable[..., tuple[Path, Path]]

INTEGERS: dict[str, tuple[Callable[[], Kind], str]] = {
    "gptq of 4 bits": (lambda: published.gptq(), "14 matrices of 4 bits"),
    "gptq of 4 bits, symmetric, no g_idx": (lambda: published.gptq(symmetric=True, with_g_idx=False), "4 bits"),
    "gptq of 4 bits, one group": (lambda: published.gptq(group=-1), "4 bits"),
    "gptq of 8 bits": (lambda: published.gptq(8), "14 matrices of 8 bits"),
    "gptq_v2 of 4 bits": (lambda: published.gptq(version=2), "4 bits"),
    "gptq_v2 with the name of the first": (
        lambda: published.gptq(symmetric=True, version=2, named="gptq"),
        "4 bits",
    ),
    "awq": (lambda: published.awq(), "14 matrices of 4 bits"),
    "w4a16": (lambda: published.w4a16(), "14 matrices of 4 bits"),
    "w4a16, asymmetric": (lambda: published.w4a16(symmetric=False), "4 bits"),
    "w8a16 by channel": (lambda: published.w4a16(8, -1), "14 matrices of 8 bits"),
    "w8a8": (lambda: published.w8a8(), "14 matrices of 8 bits; without effect: input_activations"),
    "w8a8, asymmetric": (lambda: published.w8a8(symmetric=False), "8 bits"),
    "w8a8 by tensor, static inputs": (lambda: published.w8a8(static=True, per_tensor=True), "8 bits"),
}
"""Kinds that run from their own integers, and words of the log's line."""
NOT_INTEGERS: dict[str, tuple[Callable[[], Kind], str]] = {
    "gptq with desc_act": (lambda: published.gptq(desc_act=True), "its groups are not of neighbouring inputs"),
    "gptq with groups of 16": (lambda: published.gptq(group=16), "its groups of 16 inputs are no whole blocks of 32"),
    "w4a16 with actorder": (lambda: published.w4a16(act_order=True), "its groups are not of neighbouring inputs"),
    "fp8 by channel": (lambda: published.fp8_channel(), "FP8 has no product on a CPU"),
    "fp8 by tensor": (lambda: published.fp8_channel(per_tensor=True), "FP8 has no product on a CPU"),
    "fbgemm_fp8": (
        lambda: published.fp8_by(
            "fbgemm_fp8", {"activation_scale_ub": 1200.0}, {"input_scale_ub": torch.tensor([1200.0])}, per_tensor=False
        ),
        "FP8 has no product on a CPU",
    ),
    "fp8 by tensor, static inputs": (
        lambda: published.fp8_by(
            "fp8", {"activation_scheme": "static"}, {"input_scale": torch.tensor(0.02)}, per_tensor=True
        ),
        "fp8 (14 matrices of FP8; without effect: activation_scheme)",
    ),
    "fp8 by tile": (lambda: published.fp8_tiles(), "FP8 has no product on a CPU"),
    "fp8 by tile, compressed-tensors": (lambda: published.fp8_tiles(compressed=True), "FP8 has no product on a CPU"),
}
"""Kinds that are dequantised, and the reason in the log."""
KINDS = {**INTEGERS, **NOT_INTEGERS}


@pytest.fixture
def write(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Return a function from a kind to the folders of its checkpoint and of the float weights that it states."""
    return lambda kind, family="llama", **options: published.write(
        saved(family), kind, tmp_path_factory.mktemp("made"), **options
    )


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(config(model=str(folder), **settings))


def assert_same_weights(quantised: Path, floats: Path) -> None:
    """Only the order of fp32 roundings in a weight differs: 1e-7 of it."""
    got, want = (load(folder, dtype="float32", quantization="none") for folder in (quantised, floats))
    assert not got.quantised
    assert distance(logits(got, some_ids(2, 20)), logits(want, some_ids(2, 20))) < 1e-5


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "quantised" in record.message]


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_weights_are_those_that_the_checkpoint_states(write: Write, kind: str) -> None:
    assert_same_weights(*write(KINDS[kind][0]()))


@with_blocks
@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_run_natively(write: Write, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    make, words = INTEGERS[kind]
    quantised, floats = write(make())
    native = load(quantised, dtype="auto")
    assert native.quantised
    assert isinstance(native.fused.forward, NativeForward), native.fused.left
    (line,) = lines_of(caplog)
    assert line.startswith("quantised 15 products: auto, 14 from ")
    assert words in line
    assert line.endswith(", 1 rounded from the weights")  # the output head, which no kind quantises
    want = logits(load(floats, dtype="float32", quantization="none"), some_ids(3, 40))
    # Activations of 8 bits, and a head rounded to 8: 4e-2 in this model. A zero point off by one gives 1.3.
    assert distance(logits(native, some_ids(3, 40)).float(), want) < 6e-2


def test_a_zero_point_of_8_needs_no_offset() -> None:
    generator = torch.Generator().manual_seed(0)
    quants_NK = torch.randint(0, 16, (6, 128), generator=generator, dtype=torch.uint8)
    scales_NG, zeros_NG = torch.randn(6, 2, generator=generator), torch.full((6, 2), 8, dtype=torch.int16)
    made = GroupedIntegers(4, quants_NK, scales_NG.half(), zeros_NG).blocks()
    assert made.offsets_NB is None
    assert torch.equal(made.dequantised(), GroupedIntegers(4, quants_NK, scales_NG.half(), zeros_NG).dequantised())
    zeros_NG[3, 1] = 7
    assert GroupedIntegers(4, quants_NK, scales_NG, zeros_NG).blocks().offsets_NB is not None


@with_blocks
@pytest.mark.parametrize("kind", ["gptq of 4 bits", "w8a8, asymmetric"])
def test_a_row_has_the_same_bits_for_any_number_of_rows(write: Write, kind: str) -> None:
    model = load(write(KINDS[kind][0]())[0], dtype="auto")
    ids_BP = some_ids(5, 33)
    whole_BPV = logits(model, ids_BP)
    for sequences, count in ((1, 33), (5, 1), (3, 8), (2, 32)):
        assert torch.equal(logits(model, ids_BP[:sequences, :count]), whole_BPV[:sequences, :count])


@pytest.mark.parametrize("kind", NOT_INTEGERS)
def test_a_kind_without_a_product_is_dequantised_and_one_line_says_why(
    write: Write, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, words = NOT_INTEGERS[kind]
    assert not load(write(make())[0], dtype="auto").quantised
    (line,) = lines_of(caplog)
    assert line.startswith("dequantised the weights to ")
    assert words in line


@with_blocks
@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (
            "gptq of 4 bits",
            {"quantization": "none", "dtype": "auto"},
            ["dequantised the weights", "quantization is none"],
        ),
        ("gptq of 4 bits", {"dtype": "float32"}, ["dequantised the weights", "dtype is float32"]),
        # Integers of 8 bits are kept; others, and weights without blocks, are rounded where a quantisation is named.
        ("w8a8", {"quantization": "int8", "dtype": "float32"}, ["quantised 15 products: int8, 14 from", "1 rounded"]),
        ("awq", {"quantization": "int8", "dtype": "float32"}, ["quantised 15 products: int8, 0 from", "15 rounded"]),
        ("fp8 by channel", {"quantization": "int8", "dtype": "float32"}, ["quantised 15 products: int8, 0 from"]),
    ],
)
def test_settings_choose_between_the_integers_and_the_weights(
    write: Write, kind: str, settings: dict[str, str], words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert load(write(KINDS[kind][0]())[0], **settings).quantised == (settings.get("quantization") == "int8")
    assert [part for part in words if caplog.text.count(part) != 1] == []


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda", "it states no inputs of 8 bits"),
        ("cpu", "its integers are multiplied only on CPUs with AVX2"),
    ],
)
def test_other_processors_get_the_dequantised_weights(
    write: Write, device: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = open_checkpoint(write(published.gptq())[0])
    wanted = config(dtype="auto", quantization="auto", device=device)
    assert not choice.quantise(wanted, nn.Linear(32, 32), None, checkpoint, can_multiply=lambda: False)
    assert words in caplog.text


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_families_with_biases_tied_heads_and_joined_products_load(write: Write, family: str) -> None:
    quantised, floats = write(published.gptq(), family)
    assert_same_weights(quantised, floats)
    if can_multiply_blocks():
        native, want = load(quantised, dtype="float32", quantization="q4"), load(floats, dtype="float32")
        assert isinstance(native.fused.forward, NativeForward), native.fused.left
        assert distance(logits(native, some_ids(1, 20)), logits(want, some_ids(1, 20))) < 4e-2


@with_blocks
def test_experts_are_dequantised_and_the_line_counts_them(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers joins the experts of a layer into one tensor. A router has fewer outputs than a word."""
    source = tiny.save(tiny.qwen3_moe(), tmp_path / "source")
    quantised, floats = published.write(source, published.gptq(), tmp_path / "made")
    assert_same_weights(quantised, floats)
    caplog.clear()
    assert load(quantised, dtype="auto").quantised
    assert "quantised 25 products: auto, 8 from gptq (34 matrices of 4 bits)" in caplog.text
    assert "17 rounded from the weights, 26 of the matrices dequantised" in caplog.text


@pytest.mark.parametrize("kind", ["gptq of 4 bits", "w4a16, asymmetric", "fp8 by tile"])
def test_shards_may_part_the_tensors_of_a_matrix(write: Write, kind: str) -> None:
    quantised, floats = write(KINDS[kind][0](), shards=3)
    assert not (quantised / "model.safetensors").exists()
    assert_same_weights(quantised, floats)


def test_a_configuration_in_a_file_of_its_own_is_read(write: Write) -> None:
    quantised, floats = write(published.gptq())
    whole = json.loads((quantised / "config.json").read_text())
    old = whole.pop("quantization_config")
    del old["quant_method"]
    (quantised / "config.json").write_text(json.dumps(whole))
    (quantised / "quantize_config.json").write_text(json.dumps(old))
    assert_same_weights(quantised, floats)


def test_the_end_tokens_of_the_generation_configuration_are_kept(write: Write) -> None:
    quantised, floats = write(published.awq())
    (quantised / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert {7, 9} <= set(load(quantised, quantization="none").eos_token_ids)
    assert not {7, 9} & set(load(floats, quantization="none").eos_token_ids)


def matrix_of(kind: Kind, weight_NK: np.ndarray) -> tuple[Any, np.ndarray]:
    stored = kind.store(weight_NK)
    return layout_of(kind.config).read(Parts("m", stored.tensors)), stored.weight_NK


@pytest.mark.parametrize("kind", INTEGERS)
def test_blocks_have_the_weights_that_the_checkpoint_states(kind: str) -> None:
    """Half precision's rounding of a scale and of an offset: 2^-11 of each, far below a step."""
    matrix, stated_NK = matrix_of(INTEGERS[kind][0](), np.random.default_rng(0).standard_normal((64, 96)) * 0.02)
    far_NK = (matrix.blocks().dequantised().double() - torch.from_numpy(stated_NK)).abs()
    steps_NK = matrix.scales_NG.double().repeat_interleave(96 // matrix.scales_NG.shape[1], 1)
    assert float((far_NK / steps_NK).max()) < (0.01 if matrix.bits == 4 else 0.13)
    if "symmetric" in kind and "asymmetric" not in kind:
        assert torch.equal(matrix.blocks().dequantised().double(), torch.from_numpy(stated_NK))


def test_zero_points_that_borrowed_in_the_packed_word_are_restored() -> None:
    """GPTQModel subtracts one from each integer of a whole word: a zero point of 0 borrows from its neighbour."""
    kind = published.gptq(version=2)
    stored = kind.store(np.random.default_rng(0).standard_normal((8, 32)))
    zeros = [0, 8, 0, 0, 15, 1, 0, 3]
    ones = sum(1 << (4 * place) for place in range(8))
    word = (sum(zero << (4 * place) for place, zero in enumerate(zeros)) - ones) % (1 << 32)
    stored.tensors["qzeros"] = torch.from_numpy(np.array([[word]], dtype=np.uint32).view(np.int32))
    matrix = layout_of({**kind.config, "checkpoint_format": "gptq"}).read(Parts("m", stored.tensors))
    assert matrix.zeros_NG[:, 0].tolist() == zeros


@pytest.mark.parametrize("case", ["zero points in bytes", "no group index"])
def test_other_forms_of_the_same_tensors(case: str) -> None:
    kind = published.w4a16(symmetric=case == "no group index")
    weight_NK = np.random.default_rng(0).standard_normal((40, 64))
    (want, stated_NK), tensors = matrix_of(kind, weight_NK), kind.store(weight_NK).tensors
    if case == "no group index":
        tensors["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    else:
        tensors["weight_zero_point"] = (want.zeros_NG - 8).to(torch.int8)
    got = layout_of(kind.config).read(Parts("m", tensors))
    torch.testing.assert_close(got.dequantised().double(), torch.from_numpy(stated_NK))


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_scales_outside_half_precision_have_no_blocks(scale: float) -> None:
    matrix, stated_NK = matrix_of(published.w8a8(), np.random.default_rng(0).standard_normal((8, 32)) * scale * 127)
    with pytest.raises(NoBlocks, match="its scales do not fit half precision"):
        matrix.blocks()
    torch.testing.assert_close(matrix.dequantised().double(), torch.from_numpy(stated_NK), rtol=1e-6, atol=0)


def test_a_row_of_tiny_weights_does_not_cost_the_matrix_its_blocks() -> None:
    weight_NK = np.random.default_rng(0).standard_normal((8, 32))
    weight_NK[3] *= 1e-7
    matrix, stated_NK = matrix_of(published.w8a8(), weight_NK)
    far_NK = (matrix.blocks().dequantised().double() - torch.from_numpy(stated_NK)).abs()
    assert float(far_NK.max()) < 127 * 2**-11 * float(matrix.scales_NG.max())


COMPRESSED = published.w4a16().config
REFUSED: dict[str, dict[str, Any]] = {
    "quant_method is bitsandbytes; read are compressed-tensors, gptq, awq, fp8": {"quant_method": "bitsandbytes"},
    "quant_method is mxfp4": {"quant_method": "mxfp4"},
    "format is marlin-24; read are int-quantized": {**COMPRESSED, "format": "marlin-24"},
    "format is nvfp4-pack-quantized": {
        **COMPRESSED,
        "format": "mixed-precision",
        "config_groups": {"group_0": {"format": "nvfp4-pack-quantized"}},
    },
    "sparsity_config.format is sparse-24-bitmask": {**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}},
    "transform_config: rotations of activations": {**COMPRESSED, "transform_config": {"config_groups": {"R1": {}}}},
    "bits is 3; read are 4, 8": {**published.gptq().config, "bits": 3},
    "checkpoint_format is marlin; read are gptq, gptq_v2": {**published.gptq().config, "checkpoint_format": "marlin"},
    "version is gemv; read is gemm": {**published.awq().config, "version": "GEMV"},
    "bits is 8; read is 4": {**published.awq().config, "bits": 8},
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_kind_that_is_not_read_is_refused_by_name(saved: Saved, tmp_path: Path, words: str) -> None:
    folder, _ = published.write(saved("llama"), Kind(REFUSED[words], published.gptq().store), tmp_path / "made")
    with pytest.raises(ModelNotSupported, match=f"^model: .*quantization_config.{words}"):
        load(folder)


Q_PROJ = "model.layers.0.self_attn.q_proj"
BROKEN: dict[str, tuple[Callable[[], Kind], Callable[[dict[str, torch.Tensor]], object]]] = {
    "q_proj.qzeros is missing": (published.gptq, lambda t: t.pop(f"{Q_PROJ}.qzeros")),
    r"q_proj.qzeros is int32 \[1, 8\], which is not \[2, 64\] of 4 or 8 bits": (
        published.gptq,
        lambda t: t.update({f"{Q_PROJ}.qzeros": t[f"{Q_PROJ}.qzeros"][:1].clone()}),
    ),
    r"q_proj.scales is float16 \[2, 32\], which is not \[groups, 64\]": (
        published.awq,
        lambda t: t.update({f"{Q_PROJ}.scales": t[f"{Q_PROJ}.scales"][:, :32].clone()}),
    ),
    r"q_proj.qweight is int64": (published.awq, lambda t: t.update({f"{Q_PROJ}.qweight": torch.zeros(2, 2).long()})),
    "q_proj.g_idx has groups outside 0 to 1": (published.gptq, lambda t: t[f"{Q_PROJ}.g_idx"].fill_(2)),
    r"q_proj.g_idx is int32 \[3\], which is not the group of each of 64 inputs": (
        published.gptq,
        lambda t: t.update({f"{Q_PROJ}.g_idx": torch.zeros(3, dtype=torch.int32)}),
    ),
    r"q_proj.weight_packed is int32 \[64, 7\], which is not \[64, 64\] of 4 or 8 bits": (
        published.w4a16,
        lambda t: t.update({f"{Q_PROJ}.weight_packed": t[f"{Q_PROJ}.weight_packed"][:, :7].clone()}),
    ),
    r"q_proj: 64 inputs in 3 groups": (
        published.w4a16,
        lambda t: t.update({f"{Q_PROJ}.weight_scale": torch.ones(64, 3)}),
    ),
    r"q_proj.weight_scale_inv is float32 \[3, 3\], which is not a scale for each 40 x 40 of \[64, 64\]": (
        published.fp8_tiles,
        lambda t: t.update({f"{Q_PROJ}.weight_scale_inv": torch.ones(3, 3)}),
    ),
    r"q_proj.weight is float32 \[64, 64\], which is not a matrix of int8 or of FP8": (
        published.w8a8,
        lambda t: t.update({f"{Q_PROJ}.weight": torch.zeros(64, 64)}),
    ),
    r"q_proj.weight is I8 and no part of a matrix of compressed-tensors int-quantized": (
        published.w8a8,
        lambda t: t.pop(f"{Q_PROJ}.weight_scale"),
    ),
    r"q_proj.weight is \[8, 64\], and the model's is \[64, 64\]": (
        published.w8a8,
        lambda t: t.update({f"{Q_PROJ}.{end}": t[f"{Q_PROJ}.{end}"][:8].clone() for end in ("weight", "weight_scale")}),
    ),
    "layers.0.mlp.act.scales is no part of a matrix of awq": (
        published.awq,
        lambda t: t.update({"model.layers.0.mlp.act.scales": torch.ones(96)}),
    ),
    "q_proj.g_idx is no part of a matrix of gptq": (published.gptq, lambda t: t.pop(f"{Q_PROJ}.qweight")),
    "it has no weights for model.norm.weight": (published.awq, lambda t: t.pop("model.norm.weight")),
}


@pytest.mark.parametrize("words", BROKEN)
def test_a_tensor_that_does_not_fit_is_named(write: Write, words: str) -> None:
    make, breaks = BROKEN[words]
    folder, _ = write(make())
    tensors = load_file(folder / "model.safetensors")
    breaks(tensors)
    published.save_tensors(tensors, folder)
    with pytest.raises(ModelNotSupported, match=f"^model: .*{words}"):
        load(folder)


def test_a_checkpoint_without_quantised_matrices_is_refused(saved: Saved, tmp_path: Path) -> None:
    _, floats = published.write(saved("llama"), published.gptq(), tmp_path / "made")
    with pytest.raises(UnsupportedCheckpoint, match=r"it has no tensor .qweight, which gptq has"):
        QuantisedCheckpoint(floats, published.gptq().config)


def test_files_that_are_not_there_or_cut_off_are_named(write: Write) -> None:
    folder, _ = write(published.gptq(), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        ModelNotSupported, match=r"model-00002-of-00003.safetensors, which .*index.json names, is missing"
    ):
        load(folder)
    folder, _ = write(published.gptq())
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelNotSupported, match=r"model.safetensors is no safetensors file"):
        load(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelNotSupported, match=r"has its weights only in pytorch_model\.bin: a pickle"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelNotSupported, match="is read from safetensors files, and it has none"):
        load(folder)


def test_a_model_without_quantisation_has_no_checkpoint(saved: Saved) -> None:
    assert open_checkpoint(saved("llama")) is None


def test_experts_in_mxfp4_are_dequantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, packed = gpt_oss_files.write_folders(gpt_oss_files.model(), tmp_path)
    got = load_model(config(model=str(packed)))
    assert "dequantised the experts to float32: dtype is float32" in caplog.text
    want = load_model(config(model=str(plain)))
    prompt = tokens(30, 4)
    answers = []
    for model in (got, want):
        with unguided_engine(model, with_drafts(3)) as engine:
            answers += answer_all(engine, [ask(prompt, ignore_eos=True)])
    assert answers[0] == answers[1] == tiny.generate(plain, prompt, 40)
