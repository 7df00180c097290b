"""GGUF files of families that transformers reads from no such file: their configurations, weights and words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, Qwen2Config, Qwen3Config

from gpu_engine.model.loader import LoadedModel, ModelNotSupported, load_model
from gpu_engine.model.quantised.native import NativeForward
from gpu_engine.model.recording import distance, typical_distance
from kernels.blocks import can_multiply_blocks
from tests.fakes import EOS
from tests.gpu_engine import gguf_files
from tests.gpu_engine.gguf_files import DENSE, drawn, write
from tests.gpu_engine.harness import answer_all, ask, config, tokens, unguided_engine, with_drafts
from tests.gpu_engine.model.model_logits import logits, some_ids

needs_avx2 = pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")


def far(model: LoadedModel, own: Any, apart: Any = distance) -> float:
    """Return how far a model's logits are from those of transformers' model, for more tokens than a window has."""
    ids_1P = some_ids(1, 60)
    with torch.inference_mode():
        return float(apart(logits(model, ids_1P)[0].float(), own(ids_1P, use_cache=False).logits[0]))


@pytest.mark.parametrize("family", DENSE)
def test_a_file_has_the_logits_of_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str) -> None:
    made = DENSE[family]()
    with caplog.at_level("INFO"):
        model = load_model(config(model=str(write(made, tmp_path / "model.gguf", ["F32"])), dtype="float32"))
    assert not [line for line in caplog.messages if "through transformers" in line or "does not read" in line]
    assert type(model.net.config) is type(made)
    assert far(model, drawn(made)) < 1e-4


@needs_avx2
@pytest.mark.parametrize("family", DENSE)
def test_blocks_of_a_file_are_multiplied(tmp_path: Path, family: str) -> None:
    made = DENSE[family]()
    model = load_model(config(model=str(write(made, tmp_path / "model.gguf", ["Q8_0"])), dtype="auto"))
    assert model.forms.startswith("8-bit blocks: ")
    # Norms with a row for each head have no native form.
    others = ("cohere with norms of heads",)
    assert isinstance(model.fused.forward, NativeForward) is (family not in others), model.fused.left
    assert far(model, drawn(made), typical_distance) < 0.2


@needs_avx2
@pytest.mark.parametrize("family", DENSE)
def test_drafts_change_no_token(tmp_path: Path, family: str) -> None:
    fields = {"model": str(write(DENSE[family](), tmp_path / "model.gguf", ["Q8_0"])), "dtype": "auto"}
    model, found = load_model(config(**fields)), []
    for num_drafts in (0, 7):
        with unguided_engine(model, with_drafts(num_drafts, **fields)) as engine:
            asked = [ask(tokens(30 + n, n, repeat=10), max_tokens=30, ignore_eos=True) for n in range(3)]
            found.append(answer_all(engine, asked))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("arch", "made"),
    [
        ("mistral3", MistralConfig(**gguf_files._SHAPE, head_dim=32, sliding_window=None)),
        ("qwen2vl", Qwen2Config(**gguf_files._SHAPE)),
        ("qwen3vl", Qwen3Config(**gguf_files._SHAPE, head_dim=32)),
    ],
)
def test_a_file_of_text_and_images_has_the_logits_of_its_language_model(tmp_path: Path, arch: str, made: Any) -> None:
    keys = {"rope.dimension_sections": [4, 2, 2, 0]} if "vl" in arch else {}
    file = write(made, tmp_path / "model.gguf", ["F32"], arch=arch, keys=keys)
    model = load_model(config(model=str(file), dtype="float32"))
    assert type(model.net.config) is type(made)
    assert model.fused.forward is not None
    assert far(model, drawn(made)) < 1e-4


def test_rotary_factors_of_a_file_are_the_models(tmp_path: Path) -> None:
    """As in the files of EXAONE 4, which is scaled as Llama 3 is."""
    made = DENSE["exaone4 without windows"]()
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    made.rope_parameters = {**made.rope_parameters, **scaled, "original_max_position_embeddings": 32}
    own = drawn(made)
    turned_R = own.model.rotary_emb.inv_freq
    factors = (50_000.0 ** -(torch.arange(8) / 8) / turned_R).numpy().astype(np.float32)
    also = {"rope_freqs.weight": factors}
    file = write(made, tmp_path / "model.gguf", ["F32"], also=also)
    assert factors.max() > 2.0
    assert far(load_model(config(model=str(file), dtype="float32")), own) < 1e-4


@pytest.mark.parametrize(
    ("family", "keys", "problem"),
    [
        ("granite", {"rope.scaling.finetuned": False}, "it is a Granite without rotation, which is not described"),
        ("granite", {"expert_count": 4}, "it is a mixture of experts of the architecture granite, which is not read"),
        ("glm4", {"rope.dimension_sections": [4, 4, 0, 0]}, "its rotation has sections, as in a model of images"),
        ("glm4", {"rope.dimension_count": 2**32 - 2}, "is 4294967294, and must be an even number up to 32"),
        ("granite", {"attention.key_length": 2**32 - 1}, "key_length is 4294967295, and must be from 1 to 65536"),
        ("cohere2", {"rope.dimension_count": 8}, "8 of 16 channels of a head rotate, and in its family all do"),
        (
            "seed_oss",
            {"rope.scaling.type": "longrope"},
            r"rope.scaling.type is 'longrope'; none, linear and yarn are read",
        ),
        ("mistral3", {"rope.scaling.type": "none"}, "its queries grow with their position, and its rotation is not"),
        ("olmo2", {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True]}, "wrong value"),
    ],
)
def test_a_file_that_is_no_such_model_is_refused(
    tmp_path: Path, family: str, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelNotSupported) as caught:
        load_model(config(model=str(write(DENSE[family](), tmp_path / "model.gguf", keys=keys))))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    made = DENSE["exaone4 without windows"]()
    keys = {"block_count": made.num_hidden_layers + 1, "nextn_predict_layers": 1}
    also = {f"blk.{made.num_hidden_layers}.nextn.eh_proj.weight": np.zeros((2, 2), np.float32)}
    file = write(made, tmp_path / "model.gguf", ["F32"], also=also, keys=keys)
    assert far(load_model(config(model=str(file), dtype="float32")), drawn(made)) < 1e-4


def test_every_token_that_ends_a_turn_ends_an_answer(tmp_path: Path) -> None:
    file = write(DENSE["glm4"](), tmp_path / "model.gguf", keys={"tokenizer.ggml.eot_token_id": EOS + 1})
    assert load_model(config(model=str(file))).eos_token_ids == (EOS, EOS + 1)


_AS_GPT_2 = "a.x-4.0 exaone4 gigachat gpt-2 granite-docling jais mellum mpt olmo phi-2 trillion"
_AS_LLAMA_3 = "chatglm-bpe dbrx smaug-bpe"
_AS_LLAMA_3_WHOLE = "falcon-h1 falcon3 glm4 glm5 lfm2 llama-bpe llama-v3 llama3 midm-2.0 pixtral"
_SPLITS = {
    _AS_GPT_2: "IT|'s| | 1234|?|\n| .|aB|=|\u4f60\u30ab|\u30fb",
    "command-r minerva-7b refact smollm starcoder": "IT|'s|  |1|2|3|4|?|\n| .|aB|=|\u4f60\u30ab|\u30fb",
    f"{_AS_LLAMA_3} {_AS_LLAMA_3_WHOLE}": "IT|'s| | |123|4|?\n| .|aB|=\u4f60\u30ab|\u30fb",
    "minicpm5": "IT|'s|  |123|4|?\n| .|aB|=\u4f60\u30ab|\u30fb",
    "seed-coder": "IT|'s| | |1|2|3|4|?|\n| .|aB|=\u4f60\u30ab|\u30fb",
    "tekken": "IT|'s| | |1|2|3|4|?\n| .|a|B|=\u4f60\u30ab|\u30fb",
    "deepseek-v3 hunyuan-dense joyai-llm": "IT|'s|  |123|4|?\n| .|aB|=|\u4f60\u30ab|\u30fb",
    "deepseek-llm": "IT|'|s|  |1|2|3|4|?|\n| .|aB|=|\u4f60\u30ab\u30fb",
    "deepseek-coder": "IT|'|s|  |1|2|3|4|?|\n| .|aB|=|\u4f60\u30ab|\u30fb",
    "kimi-k2": "IT's| | |123|4|?\n| .|a|B|=|\u4f60|\u30ab|\u30fb",
}
"""By the names of vocabularies, the words that llama.cpp splits a text into. Two names differ, as the models' own
tokenizers do: llama.cpp keeps `1234` together for `deepseek-llm`, and `aB` for `kimi-k2`."""


@pytest.mark.parametrize(
    ("name", "words"), [(name, words) for names, words in _SPLITS.items() for name in names.split()]
)
def test_text_is_split_as_a_file_says(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, words: str) -> None:
    file = write(DENSE["granite"](), tmp_path / "model.gguf", keys={"tokenizer.ggml.pre": name})
    tokenizer = load_model(config(model=str(file))).tokenizer.backend_tokenizer
    text = words.replace("|", "")
    found = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert "|".join(text[start:end] for _, (start, end) in found) == words
    # A word that is a token is not merged from its parts.
    assert tokenizer.model.ignore_merges is (name in {"minicpm5", "tekken", *_AS_LLAMA_3_WHOLE.split()})
    assert not [line for line in caplog.messages if "splits text" in line]


@pytest.mark.parametrize(("name", "warnings"), [("superbpe", 1), ("qwen2", 0), (None, 0)])
def test_a_way_to_split_text_that_is_not_known_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str | None, warnings: int
) -> None:
    keys = {} if name is None else {"tokenizer.ggml.pre": name}
    load_model(config(model=str(write(DENSE["granite"](), tmp_path / "model.gguf", keys=keys))))
    found = [line for line in caplog.messages if "splits text" in line]
    assert len(found) == warnings
    assert all(f"{name!r}" in line for line in found)
