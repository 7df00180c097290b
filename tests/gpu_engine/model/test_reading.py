"""Models that are read tensor by tensor: the bits of transformers' own loader, their memory, and files that misfit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gpu_engine.model import attention
from gpu_engine.model.files.architectures import ARCHITECTURES, WITH_EXPERTS
from gpu_engine.model.files.early import SafetensorsError, files_of
from gpu_engine.model.files.filled import loaders, unfilled
from gpu_engine.model.files.gguf_header import GGUFHeader
from gpu_engine.model.files.gguf_weights import GGUFWeights
from gpu_engine.model.files.need import OF_LOADER, WORKING, Need, need_of, refuse_too_large, say_need
from gpu_engine.model.files.reading import configuration_of
from gpu_engine.model.files.safetensors_weights import SafetensorsWeights
from gpu_engine.model.linear import PackedLinear
from gpu_engine.model.loaded_model import KnownVocabulary
from gpu_engine.model.loader import LoadedModel, ModelNotSupported, load_model
from gpu_engine.model.quantised.choice import products_while_reading
from gpu_engine.model.quantised.linear import BlockLinear
from kernels.blocks import can_multiply_blocks
from tests.gpu_engine import gguf_files, tiny
from tests.gpu_engine.harness import config
from tests.gpu_engine.model import mixture_gguf_files
from tests.gpu_engine.model.file_need import need_of_file
from tests.gpu_engine.model.model_logits import logits, some_ids
from tests.gpu_engine.model.recurrent import hybrid_gguf_files
from tests.gpu_engine.model.same_model import assert_same, by_transformers

needs_avx2 = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")


def rows() -> list[Any]:
    """Return each family in each precision; half of the rows, with each of both among them, are slow."""
    settings = (("auto", "auto"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "q4"))
    return [
        pytest.param(family, *setting, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, family in enumerate(gguf_files.FAMILIES)
        for j, setting in enumerate(settings)
    ]


@needs_avx2
@pytest.mark.parametrize(("family", "dtype", "quantization"), rows())
def test_a_gguf_file_gives_the_bits_of_transformers_loader(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, dtype: str, quantization: str
) -> None:
    file = gguf_files.write(gguf_files.FAMILIES[family](), tmp_path / "model.gguf")
    settings = config(model=str(file), dtype=dtype, quantization=quantization)
    with caplog.at_level("INFO"):
        got = load_model(settings)
    assert not [line for line in caplog.messages if "through transformers" in line]
    assert_same(got, by_transformers(settings))


def test_the_parts_of_a_file_are_one_model(tmp_path: Path) -> None:
    made = gguf_files.FAMILIES["llama"]()
    whole = gguf_files.write(made, tmp_path / "whole.gguf")
    first = gguf_files.write(made, tmp_path / "model.gguf", in_part=6)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert (first, len(parts)) == (parts[0], 4)
    assert_same(load_model(config(model=str(parts[2]))), load_model(config(model=str(whole))))
    twice = parts[1].read_bytes()
    parts[1].unlink()
    for name in (parts[0], parts[3]):
        with pytest.raises(ModelNotSupported, match=rf"^model: {name} is one of 4 parts, .* no {parts[1].name}$"):
            load_model(config(model=str(name)))
    parts[1].write_bytes(twice[:-200])
    with pytest.raises(ModelNotSupported, match=rf"is the file complete\? {parts[1].name}: .* ends at byte"):
        load_model(config(model=str(first)))
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelNotSupported, match=rf"{parts[2].name} has \S+, which an earlier part has"):
        load_model(config(model=str(first)))


def rotary(kind: str, **parameters: Any) -> PreTrainedConfig:
    made = gguf_files.FAMILIES[kind]()
    given = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32, **parameters}
    own = {"original_max_position_embeddings": 32} if kind == "phi3" else {}
    return type(made)(**{**made.to_diff_dict(), **own, "rope_parameters": given})


LLAMA_3 = rotary("llama", rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
LONG, SHORT = [1.0 + at for at in range(8)], [1.0 + at / 8 for at in range(8)]
PHI_3 = rotary("phi3", rope_type="longrope", factor=16.0, long_factor=LONG, short_factor=SHORT)


@pytest.mark.parametrize(("wanted", "length"), [(LLAMA_3, 60), (PHI_3, 30)])
def test_rotary_factors_of_a_file_are_the_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: Any, length: int
) -> None:
    turned_R = ROPE_INIT_FUNCTIONS["llama3"](LLAMA_3, device=torch.device("cpu"))[0]
    also = {"rope_freqs.weight": (10_000 ** -(torch.arange(8) / 8) / turned_R).numpy()}
    if wanted is PHI_3:
        factors = {"long": LONG, "short": SHORT}
        also = {f"rope_factors_{name}.weight": np.array(given, np.float32) for name, given in factors.items()}
    file = gguf_files.write(wanted, tmp_path / "model.gguf", ["F32"], also=also)
    made = config(model=str(file), dtype="float32", quantization="none", max_model_len=length)
    got = load_model(made)
    assert not [line for line in caplog.messages if "does not read" in line]
    net = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    net.model.rotary_emb = type(net.model.rotary_emb)(wanted)
    ids_1P = some_ids(1, length)
    want_PV = net(ids_1P).logits[0]
    assert torch.allclose(logits(got, ids_1P)[0], want_PV, atol=1e-4)
    net.model.rotary_emb = type(net.model.rotary_emb)(gguf_files.FAMILIES[wanted.model_type]())
    assert not torch.allclose(net(ids_1P).logits[0], want_PV, atol=1e-2)


def test_rotary_factors_without_an_original_length_are_refused(tmp_path: Path) -> None:
    also = {f"rope_factors_{name}.weight": np.ones(8, np.float32) for name in ("long", "short")}
    file = gguf_files.write(PHI_3, tmp_path / "model.gguf", also=also)
    raw, key = file.read_bytes(), b"original_context_length\x04\x00\x00\x00"
    before, _, after = raw.partition(key)
    file.write_bytes(before + key + bytes(4) + after[4:])
    with pytest.raises(ModelNotSupported, match=r"original_context_length is 0, and must be a positive integer$"):
        load_model(config(model=str(file)))


def test_every_architecture_that_is_read_is_compared() -> None:
    families = (gguf_files.FAMILIES | gguf_files.DENSE).values()
    written = {gguf_files.architecture_of(family()) for family in families}
    written |= {"gemma4", "qwen2vl", "qwen3vl"}  # test_gemma4_gguf.py and test_dense_gguf.py have them
    assert written | set(hybrid_gguf_files.FAMILIES) == set(ARCHITECTURES)
    apart = {"gemma4", "gpt-oss", "qwen3moe"}  # test_gemma4_gguf.py, test_gpt_oss_files.py, test_mixtures.py
    mixtures = {family.split()[0] for family in mixture_gguf_files.CONFIGS}
    assert set(hybrid_gguf_files.WITH_EXPERTS) | mixtures | apart == set(WITH_EXPERTS)


@pytest.mark.parametrize("family", gguf_files.FAMILIES)
def test_a_configuration_needs_no_vocabulary(tmp_path: Path, family: str) -> None:
    file = gguf_files.write(gguf_files.FAMILIES[family](), tmp_path / "model.gguf")
    got = configuration_of(file, GGUFHeader(file)).to_dict()
    assert got == AutoConfig.from_pretrained(tmp_path, gguf_file=file.name).to_dict()


@needs_avx2
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", "none"), ("bfloat16", "q4"), ("float32", "int8")])
def test_a_folder_gives_the_bits_of_transformers_loader(
    saved: Callable[[str], Path], caplog: pytest.LogCaptureFixture, family: str, dtype: str, quantization: str
) -> None:
    settings = config(model=str(saved(family)), dtype=dtype, quantization=quantization)
    with caplog.at_level("INFO"):
        got = load_model(settings)
    assert not [line for line in caplog.messages if "through transformers" in line]
    assert_same(got, by_transformers(settings))


@pytest.fixture
def sharded(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(saved("llama"), folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for at, part in enumerate((sorted(state)[::2], sorted(state)[1::2])):
        save_file({name: state[name] for name in part}, folder / f"part-{at}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, f"part-{at}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_folder_of_several_files_is_one_model(sharded: Path, saved: Callable[[str], Path]) -> None:
    whole, parts = (load_model(config(model=str(path))) for path in (saved("llama"), sharded))
    assert_same(parts, whole)


def cut(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def test_files_of_a_folder_that_are_cut_or_missing_are_refused_in_one_line(sharded: Path) -> None:
    cut(sharded / "part-1.safetensors")
    with pytest.raises(
        ModelNotSupported,
        match=r"^model: .* part-1\.safetensors is no complete safetensors file: [^\n]+, and the file has \d+$",
    ):
        load_model(config(model=str(sharded)))
    (sharded / "part-1.safetensors").unlink()
    with pytest.raises(
        ModelNotSupported,
        match=r"^model: .* part-1\.safetensors, which model\.safetensors\.index\.json names, is missing$",
    ):
        load_model(config(model=str(sharded)))


def test_a_wrong_value_in_a_configuration_is_refused_in_one_line(sharded: Path, tmp_path: Path) -> None:
    file = sharded / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_attention_heads": 3}))
    wrong = r"its configuration has a wrong value: [^\n]+ not a multiple of the number of attention heads \(\d+\)\.$"
    with pytest.raises(ModelNotSupported, match=rf"^model: {sharded} cannot be loaded: {wrong}"):
        load_model(config(model=str(sharded)))
    made = gguf_files.write(gguf_files.FAMILIES["llama"](), tmp_path / "model.gguf")
    key = b"attention.head_count\x04\x00\x00\x00"
    before, _, after = made.read_bytes().partition(key)
    made.write_bytes(before + key + b"\x03" + after[1:])
    with pytest.raises(ModelNotSupported, match=rf"^model: {made} cannot be read; is the file complete\? {wrong}"):
        load_model(config(model=str(made)))


def test_a_gguf_file_that_is_cut_is_refused_in_one_line_that_names_a_tensor(tmp_path: Path) -> None:
    file = gguf_files.write(gguf_files.FAMILIES["llama"](), tmp_path / "model.gguf")
    cut(file)
    with pytest.raises(
        ModelNotSupported,
        match=r"^model: .* is the file complete\? blk\.\d\.[a-z_]+\.weight ends at byte \d+, and the file has \d+$",
    ):
        load_model(config(model=str(file)))


def test_a_gguf_file_without_a_weight_or_with_one_of_another_shape_is_refused_by_its_name(tmp_path: Path) -> None:
    shape = gguf_files.FAMILIES["llama"]()
    file = gguf_files.write(shape, tmp_path / "model.gguf")
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(
        ModelNotSupported, match=r"^model: .* it has no weights for model\.layers\.1\.mlp\.up_proj\.weight$"
    ):
        load_model(config(model=str(file)))
    shape.intermediate_size = 128
    file = gguf_files.write(shape, tmp_path / "other.gguf")
    key = b"llama.feed_forward_length" + (4).to_bytes(4, "little")
    whole = file.read_bytes()
    file.write_bytes(whole.replace(key + (128).to_bytes(4, "little"), key + (96).to_bytes(4, "little")))
    with pytest.raises(ModelNotSupported, match=r"^model: .* is \[128, 64\], and the model's is \[96, 64\]$"):
        load_model(config(model=str(file)))


def test_tensors_that_the_model_does_not_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shape = gguf_files.FAMILIES["llama"]()
    shape.num_hidden_layers = 3
    file = gguf_files.write(shape, tmp_path / "model.gguf")
    key = b"llama.block_count" + (4).to_bytes(4, "little")
    whole = file.read_bytes()
    file.write_bytes(whole.replace(key + (3).to_bytes(4, "little"), key + (2).to_bytes(4, "little")))
    assert load_model(config(model=str(file))).net.config.num_hidden_layers == 2
    (warned,) = (record.getMessage() for record in caplog.records if "does not read" in record.getMessage())
    assert warned.startswith(f"{file} has tensors")
    assert warned.count("blk.2.") == warned.count("blk.") == 9


def test_few_threads_read_a_model() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(64)
        assert loaders() == 8
        torch.set_num_threads(1)
        assert loaders() == 1
    finally:
        torch.set_num_threads(before)


def test_a_folder_that_cannot_be_read_leaves_no_file_open(saved: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(saved("llama") / "model.safetensors", tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"no header")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SafetensorsError, match=r"b\.safetensors is no complete safetensors file"):
        SafetensorsWeights(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_file_comes_before_an_index(saved: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(saved("llama") / "model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "lost.safetensors"}}')
    assert files_of(tmp_path) == [tmp_path / "model.safetensors"]


def test_a_start_that_does_not_fit_is_refused_with_its_numbers_and_what_to_lower() -> None:
    need = Need(weights=4_700_000_000, working=600_000_000)
    refuse_too_large(need, 5_300_000_000, "model", rounds=False)
    refuse_too_large(need, None, "model", rounds=False)
    for rounds, hint in ((True, "fewer bits a weight"), (False, 'quantization to "q4"')):
        with pytest.raises(
            ModelNotSupported, match=rf"^draft_model: .* 4\.70 GB and 0\.60 GB more .* 5\.29 GB .* free; .*{hint}"
        ):
            refuse_too_large(need, 5_290_000_000, "draft_model", rounds=rounds)
    with pytest.raises(
        ModelNotSupported, match=r"^kv_cache_tokens: 9000 tokens do not fit: .* 1\.00 GB of KV cache.* lower kv_cache"
    ):
        say_need(need, 9000, 1_000_000_000, 6_200_000_000)


def bytes_of(model: LoadedModel) -> int:
    """Return what the weights of a model take."""
    taken = sum(parameter.nbytes for parameter in model.net.parameters())
    for module in model.net.modules():
        if isinstance(module, BlockLinear | PackedLinear):
            taken += module.packed.num_bytes + (0 if module.bias is None else module.bias.nbytes)
    return taken


@needs_avx2
@pytest.mark.parametrize("kinds", [["Q4_0"], ["Q4_1"], ["Q5_1"], ["Q4_0", "Q5_1"], ["Q5_0", "Q8_0", "Q4_1"]])
def test_the_need_of_a_file_counts_offsets_and_joined_products(tmp_path: Path, kinds: list[str]) -> None:
    file = gguf_files.write(gguf_files.FAMILIES["llama"](), tmp_path / "model.gguf", kinds)
    settings = config(model=str(file), dtype="auto", quantization="auto")
    _, need = need_of_file(settings)
    assert need.weights == pytest.approx(bytes_of(load_model(settings)), rel=0.02)


@needs_avx2
@pytest.mark.parametrize("quantization", ["none", "q4", "int8"])
def test_the_need_of_the_weights_is_what_they_take(saved: Callable[[str], Path], quantization: str) -> None:
    settings = config(model=str(saved("qwen2")), quantization=quantization)  # with tied weights
    attention.register()
    with SafetensorsWeights(Path(settings.model)) as weights:
        net = unfilled(configuration_of(Path(settings.model), None), torch.float32, attention.NAME)
        products = products_while_reading(settings, net, weights, None, torch.float32, of_gguf=False)
        need = need_of(net, weights, products, torch.float32)
    if products is None:  # the output head is larger than two joined layers, and is joined with nothing
        assert need.working == net.lm_head.weight.numel() * 4 + WORKING + loaders() * OF_LOADER
    assert need.weights == pytest.approx(bytes_of(load_model(settings)), rel=0.05)


def test_a_layer_of_experts_is_held_while_they_are_packed(tmp_path: Path) -> None:
    experts = {"enable_moe_block": True, "num_experts": 16, "top_k_experts": 2, "moe_intermediate_size": 32}
    folder = tiny.save(tiny.gemma4(**experts), tmp_path)
    with SafetensorsWeights(folder) as weights:
        attention.register()
        net = unfilled(configuration_of(folder, None), torch.float32, attention.NAME)
        need = need_of(net, weights, None, torch.float32)
    stacked = sum(weight.numel() * 4 for weight in net.model.layers[0].experts.parameters())
    assert need.working == stacked + WORKING + loaders() * OF_LOADER


@needs_avx2
def test_products_are_read_while_another_thread_makes_a_model_in_bfloat16(tmp_path: Path) -> None:
    """transformers sets torch's default dtype meanwhile, in which not every number of a row exists."""
    family = gguf_files.FAMILIES["llama"]()
    family.intermediate_size = 1056
    file = gguf_files.write(family, tmp_path / "model.gguf", ["Q4_0"])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with GGUFWeights(GGUFHeader(file)) as weights:
            assert weights.product("model.layers.0.mlp.up_proj.weight", None).out_features == 1056
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("as_file", [True, False])
def test_the_vocabulary_is_known_before_the_weights_are_read(
    tmp_path: Path, as_file: bool, saved: Callable[[str], Path]
) -> None:
    known, stages = list[KnownVocabulary](), list[str]()

    def hear(vocabulary: KnownVocabulary) -> None:
        known.append(vocabulary)
        stages.append("known")

    file = gguf_files.write(gguf_files.FAMILIES["llama"](), tmp_path / "model.gguf")
    settings = config(model=str(file if as_file else saved("llama")))
    model = load_model(settings, lambda stage, done: stages.append(stage), known=hear)
    (vocabulary,) = known
    assert vocabulary.tokenizer is model.tokenizer
    assert (vocabulary.vocab_size, vocabulary.eos_token_ids) == (model.vocab_size, model.eos_token_ids)
    assert stages.index("known") < stages.index("preparing the weights")


_LOADS = """
import sys
from pathlib import Path
from gpu_engine.api.config import EngineConfig
from gpu_engine.model.loader import load_model
from gpu_engine.model import attention

def peak(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

load_model(EngineConfig(device="cpu", model=sys.argv[1], max_model_len=64, kv_cache_tokens=64, num_threads=1))
before = peak("VmHWM")
model = load_model(EngineConfig(device="cpu", model=sys.argv[2], max_model_len=64, kv_cache_tokens=64, num_threads=1))
print(before, peak("VmHWM"), model.weights)
"""
"""Loads two models, the first for what every load takes."""


@pytest.mark.slow
@needs_avx2
def test_a_load_takes_little_more_memory_than_its_file(tmp_path: Path) -> None:
    """Through float32 it would take four bytes a weight, seven times the file."""
    small, large = gguf_files.FAMILIES["llama"](), gguf_files.FAMILIES["llama"]()
    large.hidden_size, large.intermediate_size, large.num_hidden_layers = 1024, 4096, 12
    large.num_attention_heads, large.head_dim, large.num_key_value_heads = 16, 64, 8
    files = [gguf_files.write(shape, tmp_path / f"{at}.gguf", ["Q4_0"]) for at, shape in enumerate((small, large))]
    command = [sys.executable, "-c", _LOADS, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    before, peak, *weights = done.stdout.split()
    assert "4-bit" in weights
    file = files[1].stat().st_size
    assert file > 90e6
    assert int(peak) - int(before) < 1.15 * file + 120e6
