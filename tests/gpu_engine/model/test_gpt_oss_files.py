"""gpt-oss on a CPU, read expert by expert from GGUF files and from Hugging Face's checkpoints.

transformers' loader finds no experts in a GGUF file, so the comparison is with the model that was written.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config, PreTrainedTokenizerFast

from gpu_engine.model import attention
from gpu_engine.model.files.gguf_header import GGUFHeader
from gpu_engine.model.files.reading import configuration_of
from gpu_engine.model.loader import LoadedModel, ModelNotSupported, load_model, prepare, resolve_dtype
from gpu_engine.model.network import ModelFiles, read_network, read_tokenizer
from gpu_engine.model.quantised.linear import BlockLinear
from gpu_engine.model.recording import distance
from kernels.blocks import BlockKind, can_multiply_blocks
from tests.gpu_engine import gpt_oss_files
from tests.gpu_engine.harness import config
from tests.gpu_engine.model.file_need import need_of_file
from tests.gpu_engine.model.model_logits import logits, some_ids
from tests.gpu_engine.model.same_model import assert_same

needs_blocks = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")


def products(model: LoadedModel) -> list[BlockLinear]:
    return [
        module for name, module in model.net.named_modules() if ".experts." in name and isinstance(module, BlockLinear)
    ]


def as_written(settings: Any, net: Any) -> LoadedModel:
    """Return the model that a file was written from, prepared as one that was loaded."""
    attention.register()
    net.set_attn_implementation(attention.NAME)
    path = Path(settings.model)
    return prepare(settings, net, PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name))


def test_a_file_has_the_weights_of_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = gpt_oss_files.model()
    file = gpt_oss_files.write_gguf(net, tmp_path / "model.gguf")
    caplog.set_level(logging.INFO)
    settings = config(model=str(file), dtype="float32", quantization="none")
    got = load_model(settings)
    assert "through transformers" not in caplog.text
    assert "does not read" not in caplog.text
    ids_BP = some_ids(2, 60)
    with torch.inference_mode():
        want_BPV = net(ids_BP, use_cache=False).logits
    assert distance(logits(got, ids_BP), want_BPV) < 1e-4
    assert_same(got, as_written(settings, net))


def test_a_configuration_is_the_one_that_was_written(tmp_path: Path) -> None:
    net = gpt_oss_files.model()
    file = gpt_oss_files.write_gguf(net, tmp_path / "model.gguf")
    got, want = configuration_of(file, GGUFHeader(file)).to_dict(), net.config.to_dict()
    apart = {"dtype", "architectures", "name_or_path", "_name_or_path", "rms_norm_eps", "pad_token_id"}
    assert {key: got[key] for key in want.keys() - apart} == {key: want[key] for key in want.keys() - apart}


def test_a_file_without_a_scaled_rotation_has_none(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 150_000.0}
    file = gpt_oss_files.write_gguf(gpt_oss_files.model(rope_parameters=rope), tmp_path / "model.gguf")
    assert configuration_of(file, GGUFHeader(file)).rope_parameters == rope
    raw = gpt_oss_files.write_gguf(gpt_oss_files.model(), tmp_path / "other.gguf").read_bytes()
    file.write_bytes(raw.replace(b"\x04\0\0\0\0\0\0\0yarn", b"\x04\0\0\0\0\0\0\0turn"))
    with pytest.raises(ModelNotSupported, match=r"its rotation is scaled by 'turn', which no model of gpt-oss has$"):
        load_model(config(model=str(file)))


@needs_blocks
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
def test_experts_of_a_file_are_multiplied_by_their_own_blocks(tmp_path: Path, kind: str) -> None:
    net = gpt_oss_files.model()
    file = gpt_oss_files.write_gguf(net, tmp_path / "model.gguf", kind)
    got = load_model(config(model=str(file), dtype="auto"))
    assert len(products(got)) == 2 * 4 * got.num_layers
    assert {product.packed.kind for product in products(got)} == {BlockKind.F4}
    want = load_model(config(model=str(file), dtype="float32", quantization="none"))
    assert_experts_are_near(got, net)
    ids_BP = some_ids(2, 40)
    assert typical(logits(got, ids_BP).float(), logits(want, ids_BP)) < 0.15


@torch.inference_mode()
def assert_experts_are_near(got: LoadedModel, net: Any) -> None:
    """Compare each expert's products with those of transformers' experts, where gate and up alternate."""
    x_MH = torch.randn(3, net.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for layer, own in enumerate(net.model.layers):
        made, experts = got.net.model.layers[layer].mlp.experts, own.mlp.experts
        for expert in range(net.config.num_local_experts):
            gate_up_MC = x_MH @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
            want_MC = torch.cat([gate_up_MC[:, 0::2], gate_up_MC[:, 1::2]], dim=1)
            assert distance(made.gate_up[expert](x_MH), want_MC) < 2e-2
            middle_MI = gate_up_MC[:, : net.config.intermediate_size]
            want_MH = middle_MI @ experts.down_proj[expert] + experts.down_proj_bias[expert]
            assert distance(made.down[expert](middle_MI), want_MH) < 2e-2


def typical(got_BPV: torch.Tensor, want_BPV: torch.Tensor) -> float:
    """Return the median of the rows' distances: a row whose router has two nearly equal outputs may take the other."""
    far = [distance(got, want) for got, want in zip(got_BPV.flatten(0, 1), want_BPV.flatten(0, 1), strict=True)]
    return sorted(far)[len(far) // 2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blk.1.ffn_up_exps.weight", r"mlp\.experts\.gate_up\.0\.weight and 3 more"),
        ("blk.1.ffn_gate_exps.bias", r"mlp\.experts\.gate_up\.0\.bias and 3 more"),
        ("blk.1.ffn_down_exps.bias", r"mlp\.experts\.down\.0\.bias and 3 more"),
        ("blk.1.attn_sinks.weight", r"self_attn\.sinks"),
        ("blk.1.ffn_gate_inp.bias", r"mlp\.router\.bias"),
        ("blk.1.post_attention_norm.weight", r"post_attention_layernorm\.weight"),
    ],
)
def test_a_tensor_that_a_file_lacks_is_named(tmp_path: Path, name: str, words: str) -> None:
    file = gpt_oss_files.write_gguf(gpt_oss_files.model(), tmp_path / "model.gguf", without=name)
    with pytest.raises(ModelNotSupported, match=rf"^model: .* no weights for model\.layers\.1\.{words}$"):
        load_model(config(model=str(file)))


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    net = gpt_oss_files.model()
    experts = net.model.layers[1].mlp.experts
    experts.down_proj_bias.data = experts.down_proj_bias[:, :32].clone()
    file = gpt_oss_files.write_gguf(net, tmp_path / "model.gguf")
    with pytest.raises(ModelNotSupported, match=r"experts\.down\.0\.bias is \[32\], and the model's is \[64\]$"):
        load_model(config(model=str(file)))


def test_tensors_of_gate_and_up_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    net = gpt_oss_files.model()
    file = gpt_oss_files.write_gguf(net, tmp_path / "model.gguf", apart={"blk.0.ffn_up_exps.bias": (4, 64)})
    with pytest.raises(ModelNotSupported, match=r"gate_up\.bias of layer 0 is made of \[4, 96\] and \[4, 64\], which"):
        load_model(config(model=str(file)))


@needs_blocks
def test_the_need_of_a_file_is_what_its_blocks_take(tmp_path: Path) -> None:
    file = gpt_oss_files.write_gguf(gpt_oss_files.model(), tmp_path / "model.gguf", "Q8_0")
    settings = config(model=str(file), dtype="auto")
    net, need = need_of_file(settings)
    taken = sum(product.packed.num_bytes for product in products(load_model(settings)))
    assert taken > 2 * 4 * 2 * 64 * 96 * 17 / 32
    assert need.weights > taken
    assert need.weights < 1.5 * taken + sum(p.numel() for p in net.parameters() if p.dim() < 2) * 2 + 300 * 64 * 4


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("expert_count", 0, r"its gpt-oss\.expert_count is 0, and a gpt-oss has experts$"),
        ("expert_count", 1 << 31, r"its gpt-oss\.expert_count is 2147483648, and blk\.0\.ffn_gate_inp\.weight has 4$"),
        ("expert_used_count", 0, r"its gpt-oss\.expert_used_count is 0, and must be a number from 1 to .*, 4$"),
        ("expert_used_count", 7, r"its gpt-oss\.expert_used_count is 7, and must be a number from 1 to .*, 4$"),
    ],
)
def test_numbers_of_experts_that_do_not_fit_are_named(tmp_path: Path, key: str, value: int, words: str) -> None:
    file = gpt_oss_files.write_gguf(gpt_oss_files.model(), tmp_path / "model.gguf")
    raw, name = file.read_bytes(), f"gpt-oss.{key}".encode()
    begin = raw.index(name) + len(name) + 4
    file.write_bytes(raw[:begin] + value.to_bytes(4, "little") + raw[begin + 4 :])
    with pytest.raises(ModelNotSupported, match=words):
        load_model(config(model=str(file)))


def test_more_experts_than_any_model_has_are_refused(tmp_path: Path) -> None:
    _, folder = gpt_oss_files.write_folders(gpt_oss_files.model(), tmp_path)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"num_local_experts": 4', '"num_local_experts": 2000000000'))
    with pytest.raises(ModelNotSupported, match=r"its mixtures have 2000000000 experts, and at most 8192 are read$"):
        load_model(config(model=str(folder)))


def test_a_rank_and_a_gpu_get_one_line(tmp_path: Path) -> None:
    settings = config(model=str(gpt_oss_files.write_gguf(gpt_oss_files.model(), tmp_path / "model.gguf")))
    files = ModelFiles.open(Path(settings.model), "model", torch.float32, whole=False)
    with pytest.raises(ModelNotSupported, match=r"architecture gpt-oss are read by one process, on a CPU$"):
        read_network(settings, files, lambda stage, done: None)


def test_a_vocabulary_of_a_file_is_split_as_its_kind_says(tmp_path: Path) -> None:
    file = gpt_oss_files.write_gguf(gpt_oss_files.model(), tmp_path / "model.gguf", pre="gpt-4o")
    tokenizer = read_tokenizer(ModelFiles.open(file, "model", torch.float32))
    split = tokenizer.backend_tokenizer.pre_tokenizer
    assert split is not None
    assert [text for text, _ in split.pre_tokenize_str("helloWorld's 12345")] == [
        "hello",
        "World's",
        "\u0120",
        "123",
        "45",
    ]


def through_transformers(settings: Any) -> LoadedModel:
    """Return the model as transformers loads it, with experts that it has dequantised."""
    attention.register()
    folder, given = Path(settings.model), {}
    if "quantization_config" in (folder / "config.json").read_text():
        given = {"quantization_config": Mxfp4Config(dequantize=True)}
    dtype = resolve_dtype(settings.dtype, torch.device("cpu"))
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention.NAME, **given)
    return prepare(settings, net, AutoTokenizer.from_pretrained(folder))


@needs_blocks
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int8")]
)
def test_a_folder_gives_the_bits_of_transformers_loader(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, packed: bool, dtype: str, quantization: str
) -> None:
    folder = gpt_oss_files.write_folders(gpt_oss_files.model(), tmp_path)[packed]
    caplog.set_level(logging.INFO)
    settings = config(model=str(folder), dtype=dtype, quantization=quantization)
    got = load_model(settings)
    assert "through transformers" not in caplog.text
    assert_same(got, through_transformers(settings))


@needs_blocks
@pytest.mark.parametrize(("quantization", "others"), [("auto", BlockKind.Q8), ("q4", BlockKind.Q4)])
def test_experts_of_a_folder_are_multiplied_by_their_own_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, quantization: str, others: BlockKind
) -> None:
    net = gpt_oss_files.model()
    plain, packed = gpt_oss_files.write_folders(net, tmp_path)
    caplog.set_level(logging.INFO)
    got = load_model(config(model=str(packed), dtype="auto", quantization=quantization))
    assert "quantised 25 products: 16 of MXFP4, 9 rounded again" in caplog.text
    assert {product.packed.kind for product in products(got)} == {BlockKind.F4}
    layer = got.net.model.layers[0].self_attn
    assert (layer.output.packed.kind, got.net.lm_head.packed.kind) == (others, BlockKind.Q8)
    assert_experts_are_near(got, net)
    if quantization == "auto":  # 4 bits are few for random matrices
        want = load_model(config(model=str(plain), dtype="float32", quantization="none"))
        ids_BP = some_ids(2, 40)
        assert typical(logits(got, ids_BP).float(), logits(want, ids_BP)) < 0.15


@needs_blocks
def test_a_folder_and_a_file_with_the_same_blocks_are_one_model(tmp_path: Path) -> None:
    net = gpt_oss_files.model()
    file = gpt_oss_files.write_gguf(net, tmp_path / "model.gguf")
    _, folder = gpt_oss_files.write_folders(net, tmp_path)
    of_folder, of_file = (load_model(config(model=str(path), dtype="auto")) for path in (folder, file))
    assert of_folder.forms == of_file.forms == "4-bit floats: 16, 8-bit blocks: 9"
    assert torch.equal(logits(of_folder, some_ids(2, 40)), logits(of_file, some_ids(2, 40)))


def test_a_folder_of_several_files_is_one_model(tmp_path: Path) -> None:
    _, folder = gpt_oss_files.write_folders(gpt_oss_files.model(), tmp_path)
    want = load_model(config(model=str(folder)))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for at, part in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"part-{at}.safetensors", {"format": "pt"})
        weight_map |= dict.fromkeys(part, f"part-{at}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(load_model(config(model=str(folder))), want)


EXPERTS = "model.layers.1.mlp.experts"
BROKEN: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    rf"no weights for {EXPERTS}.gate_up.0.weight": lambda t: t.pop(f"{EXPERTS}.gate_up_proj_scales"),
    rf"no weights for {EXPERTS}.down.0.weight": lambda t: t.pop(f"{EXPERTS}.down_proj_blocks"),
    rf"no weights for {EXPERTS}.down.0.bias": lambda t: t.pop(f"{EXPERTS}.down_proj_bias"),
    rf"no weights for {EXPERTS}.gate_up.3.weight": lambda t: t.update(
        {
            f"{EXPERTS}.gate_up_proj_{end}": t[f"{EXPERTS}.gate_up_proj_{end}"][:3].clone()
            for end in ("blocks", "scales")
        }
    ),
    r"gate_up_proj has blocks of \[4, 192, 2, 16\] and scales of \[4, 192, 1\], which are not": lambda t: t.update(
        {f"{EXPERTS}.gate_up_proj_scales": t[f"{EXPERTS}.gate_up_proj_scales"][:, :, :1].clone()}
    ),
    r"down_proj has blocks of .*, which are not bytes": lambda t: t.update(
        {f"{EXPERTS}.down_proj_blocks": t[f"{EXPERTS}.down_proj_blocks"].short()}
    ),
    r"experts.down.0.bias is \[32\], and the model's is \[64\]": lambda t: t.update(
        {f"{EXPERTS}.down_proj_bias": t[f"{EXPERTS}.down_proj_bias"][:, :32].clone()}
    ),
    r"experts.gate_up.0.bias is made of \[768\], which": lambda t: t.update(
        {f"{EXPERTS}.gate_up_proj_bias": t[f"{EXPERTS}.gate_up_proj_bias"].flatten()}
    ),
}


@pytest.mark.parametrize("words", BROKEN)
def test_a_tensor_of_a_folder_that_does_not_fit_is_named(tmp_path: Path, words: str) -> None:
    _, folder = gpt_oss_files.write_folders(gpt_oss_files.model(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    BROKEN[words](tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotSupported, match=rf"^model: [^\n]*{words}"):
        load_model(config(model=str(folder)))


def test_a_rank_gets_a_folder_through_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has no product for each expert."""
    net = gpt_oss_files.model()
    _, folder = gpt_oss_files.write_folders(net, tmp_path)
    files = ModelFiles.open(folder, "model", torch.float32, whole=False)
    caplog.set_level(logging.INFO)
    got = read_network(config(model=str(folder)), files, lambda stage, done: None).net
    assert "dequantised the experts to float32" in caplog.text
    assert torch.equal(got.model.layers[1].mlp.experts.gate_up_proj, net.model.layers[1].mlp.experts.gate_up_proj)
