"""Models that several threads load at once, and checkpoints that lack a weight."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from gpu_engine.model.experts import refuse_grouped_products
from gpu_engine.model.loader import LoadedModel, ModelNotSupported, load_model
from tests.gpu_engine import tiny
from tests.gpu_engine.harness import config

THREADS = 3


def test_threads_that_load_at_once_leave_transformers_as_it_was(saved: Callable[[str], Path]) -> None:
    settings = config(model=str(saved("qwen2")), dtype="float32")  # with tied weights
    before, barrier = PreTrainedModel.tie_weights, Barrier(THREADS)

    def load(_: int) -> LoadedModel:
        barrier.wait(30)
        return load_model(settings)

    try:
        for _ in range(4):
            with ThreadPoolExecutor(THREADS) as pool:
                models = list(pool.map(load, range(THREADS)))
            assert len({model.num_parameters for model in models}) == 1
            assert PreTrainedModel.tie_weights is before
    finally:
        PreTrainedModel.tie_weights = before


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_that_is_loaded_beside_an_engine_has_every_bit_of_one_that_is_not(
    saved: Callable[[str], Path], family: str, dtype: str
) -> None:
    """Tables that a module computes, such as rotary frequencies, stay in float32."""
    settings = config(model=str(saved(family)), dtype=dtype, quantization="none")
    usual, beside = (load_model(settings, beside=beside).net for beside in (False, True))
    for kind in ("named_parameters", "named_buffers"):
        want, got = (dict(getattr(net, kind)(remove_duplicate=False)) for net in (usual, beside))
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert got[name].dtype == tensor.dtype, name
            assert torch.equal(got[name], tensor), name
    frequencies = [buffer for name, buffer in usual.named_buffers() if name.endswith("inv_freq")]
    assert frequencies
    assert {buffer.dtype for buffer in frequencies} == {torch.float32}


@pytest.mark.parametrize(
    ("left_out", "words"),
    [("o_proj", r"self_attn\.o_proj\.weight and 1 more$"), ("embed_tokens", r"embed_tokens\.weight$")],
)
def test_a_checkpoint_without_a_weight_is_refused_by_its_name(
    saved: Callable[[str], Path], tmp_path: Path, left_out: str, words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved("llama"), folder)
    (file,) = folder.glob("*.safetensors")
    state = {name: tensor for name, tensor in load_file(file).items() if left_out not in name}
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ModelNotSupported, match=rf"cannot be loaded: it has no weights for [a-z0-9_.]*{words}"):
        load_model(config(model=str(folder), dtype="float32"))


def test_a_directory_without_a_tokenizer_is_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers makes a tokenizer of one special token for it."""
    folder = tmp_path / "model"
    shutil.copytree(saved("qwen2"), folder)
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(ModelNotSupported, match=r"model: .* has no tokenizer: .* add its tokenizer\.json"):
        load_model(config(model=str(folder), dtype="float32"))


def test_a_model_that_generates_no_text_is_refused_in_one_line(tmp_path: Path) -> None:
    for name in ("BertForMaskedLM", "LlamaForSequenceClassification"):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "model_type": "llama"}))
        with pytest.raises(ModelNotSupported, match=rf"^model: .* is a {name}, which generates no text[^\n]*$"):
            load_model(config(model=str(tmp_path)))


def test_a_wrong_path_is_refused_before_torch_is_imported() -> None:
    command = [sys.executable, "-m", "gpu_engine", "serve", "--grammar", "none", "--listen", "127.0.0.1:0"]
    for flags in (["--model", "nowhere"], ["--drafter", "decoupled", "--draft-model", "nowhere"]):
        done = subprocess.run(
            [command[0], "-X", "importtime", *command[1:], *flags], capture_output=True, text=True, check=False
        )
        lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
        setting = flags[-2].strip("-").replace("-", "_")
        assert lines == [
            f"error: {setting}: nowhere is neither a directory, a GGUF file, a hub id (owner/name, or owner/name:KIND "
            "for a GGUF file) nor 'embedded'"
        ]
        assert "gpu_engine.server" in done.stderr
        assert not [line for line in done.stderr.splitlines() if line.endswith(" torch")]


def test_the_sampling_defaults_of_a_model_are_said(
    saved: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, other = tmp_path / "model", tmp_path / "other"
    shutil.copytree(saved("qwen2"), folder)
    other.mkdir()
    for place, values in ((folder, {"temperature": 0.6, "top_k": 20}), (other, {"top_p": 0.9})):
        (place / "generation_config.json").write_text(json.dumps(values))
    found = {}
    with caplog.at_level("INFO"):
        for setting in ("auto", "none", str(other)):
            model = load_model(config(model=str(folder), dtype="float32", generation_config=setting))
            found[setting] = model.sampling_defaults
    assert found == {"auto": {"temperature": 0.6, "top_k": 20}, "none": {}, str(other): {"top_p": 0.9}}
    assert "requests that leave them out have temperature 0.6, top_k 20 (generation_config.json of the model)" in (
        caplog.messages
    )
    with pytest.raises(ModelNotSupported, match=r"^generation_config: nowhere is not auto, none or a directory with"):
        load_model(config(model=str(folder), dtype="float32", generation_config="nowhere"))


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF" + (3).to_bytes(4, "little") + 8 * b"\1", b"no model at all"])
def test_a_file_that_is_cut_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(
        ModelNotSupported, match=r"^model: .*model\.gguf cannot be read; is the file complete\? [^\n]+$"
    ):
        load_model(config(model=str(file)))


@pytest.mark.parametrize(
    ("asked", "cache", "served", "said"),
    [
        (1000, 0, 512, "max_model_len is 1000, which is more than the model has: 512 tokens are served"),
        (256, 0, 256, "sequences of up to 256 tokens (as set; the model has 512); KV cache of 1024 tokens, 1 MB"),
        (0, 0, 512, "sequences of up to 512 tokens (all that the model has); KV cache of 2048 tokens, 1 MB"),
        (0, 300, 300, "sequences of up to 300 tokens (by default, or as the memory allows; the model has 512); "),
    ],
)
def test_the_length_of_sequences_and_the_size_of_the_cache_are_said(
    saved: Callable[[str], Path], caplog: pytest.LogCaptureFixture, asked: int, cache: int, served: int, said: str
) -> None:
    with caplog.at_level("INFO"):
        model = load_model(config(model=str(saved("llama")), max_model_len=asked, kv_cache_tokens=cache))
    assert model.max_model_len == served
    assert any(said in line for line in caplog.messages), caplog.messages


def test_a_mixture_whose_grouped_products_cannot_be_captured_is_refused() -> None:
    net, whole = (
        AutoModelForCausalLM.from_config(tiny.OWN_FORWARD[family](), dtype=torch.bfloat16)
        for family in ("qwen3_moe", "llama4")  # Llama 4 multiplies every row by every expert
    )
    refuse_grouped_products(net, lambda: (9, 0))
    refuse_grouped_products(net, lambda: (10, 3))
    with pytest.raises(ModelNotSupported, match=r"experts in bfloat16 on compute capability 8\.9.* enforce_eager"):
        refuse_grouped_products(net, lambda: (8, 9))
    with pytest.raises(ModelNotSupported, match=r"experts in float32 on compute capability 9\.0"):
        refuse_grouped_products(net.float(), lambda: (9, 0))
    refuse_grouped_products(whole.float(), lambda: (8, 9))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names the units of x86-64")
def test_bfloat16_is_refused_on_a_cpu_without_products_of_it(root: Path) -> None:
    # A matrix that oneDNN multiplies on every CPU: a whole model would be served where the CPU has a matrix unit.
    program = "import torch\nfrom gpu_engine.model.linear import PackedByLibrary\n"
    program += "PackedByLibrary(torch.zeros(32, 32, dtype=torch.bfloat16), None)"
    command, environment = [sys.executable, "-c", program], os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 1
    assert "ModelNotSupported: dtype: torch has no products of bfloat16 for this CPU; " in done.stderr.splitlines()[-1]
