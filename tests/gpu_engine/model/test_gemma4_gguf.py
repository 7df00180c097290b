"""GGUF files of Gemma 4: heads of two sizes, keys and values that layers share, and a rotation of a part of each head.

transformers' loader does not describe such a file, so the comparison is with the model that was written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_engine.model.loader import ModelNotSupported, load_model
from gpu_engine.model.quantised.native import NativeForward
from gpu_engine.model.recording import distance
from kernels.blocks import can_multiply_blocks
from tests.gpu_engine.gguf_files import write_vocabulary
from tests.gpu_engine.harness import answer_all, ask, config, tokens, unguided_engine, with_drafts
from tests.gpu_engine.model.model_logits import logits, some_ids

Saved = Callable[[str], Path]


def write(
    net: Any,
    file: Path,
    kind: str = "F32",
    *,
    spare: bool = False,
    still: float = 1e30,
    vocabulary: Callable[[gguf.GGUFWriter, int], None] = write_vocabulary,
    **also: int,
) -> Path:
    """Write a model as llama.cpp's converter does.

    `spare`: with keys and values of the layers that have other layers' own, which no model reads; `still`: the factor
    of the frequencies that do not rotate; `vocabulary`: writes that; `also`: further keys.
    """
    c = net.config
    slides = [kind == "sliding_attention" for kind in c.layer_types]
    layers = [c.per_layer_config[layer] for layer in range(c.num_hidden_layers)]
    full, sliding = layers[slides.index(False)], layers[0]
    first_shared = c.num_hidden_layers - c.num_kv_shared_layers
    width = c.intermediate_size
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, c.num_hidden_layers)
    writer = gguf.GGUFWriter(file, "gemma4")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    doubled = [width * (1 + (layer >= first_shared)) for layer in range(c.num_hidden_layers)]
    writer.add_feed_forward_length(doubled if c.use_double_wide_mlp else width)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    writer.add_key_length(full.head_dim)
    writer.add_key_length_swa(sliding.head_dim)
    writer.add_sliding_window(c.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(c.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(c.hidden_size_per_layer_input)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_final_logit_softcapping(c.final_logit_softcapping)
    writer.add_rope_freq_base(c.rope_parameters["full_attention"]["rope_theta"])
    writer.add_float32("gemma4.rope.freq_base_swa", c.rope_parameters["sliding_attention"]["rope_theta"])
    for key, value in also.items():
        writer.add_uint32(f"gemma4.{key}", value)
    vocabulary(writer, c.vocab_size)
    rotated = int(full.head_dim * c.rope_parameters["full_attention"]["partial_rotary_factor"]) // 2
    factors = [1.0] * rotated + [still] * (full.head_dim // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    if c.enable_moe_block:
        writer.add_expert_count(c.num_experts)
        writer.add_expert_used_count(c.top_k_experts)
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    for name, tensor in net.state_dict().items():
        stem, part = name.removesuffix(".weight"), "weight"
        for of_router, place in (("router.scale", "router.proj"), ("router.per_expert_scale", "experts.down_proj")):
            if name.endswith(of_router):
                stem, part = name.replace(of_router, place), "scale"
        values = tensor.float().numpy()
        is_float = values.ndim < 2 or values.shape[-1] % 32 or "router" in name
        of_kind = gguf.GGMLQuantizationType["F32" if is_float else kind]
        writer.add_tensor(f"{names.get_name(stem)}.{part}", gguf.quants.quantize(values, of_kind), raw_dtype=of_kind)
    for layer in range(first_shared, c.num_hidden_layers) if spare else ():
        for part in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
            writer.add_tensor(f"blk.{layer}.{part}", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def net_of(saved: Saved) -> Callable[[str], Any]:
    return lambda family: AutoModelForCausalLM.from_pretrained(saved(family), dtype=torch.float32).eval()


@pytest.mark.parametrize("family", ["gemma4 small", "gemma4", "gemma4 moe"])
def test_a_file_has_the_logits_of_its_model(
    net_of: Callable[[str], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    net = net_of(family)
    file = write(net, tmp_path / "model.gguf", spare=True)
    with caplog.at_level("INFO"):
        model = load_model(config(model=str(file), dtype="float32"))
    assert not [line for line in caplog.messages if "through transformers" in line or "does not read" in line]
    ids_BP = some_ids(1, 60)
    with torch.inference_mode():
        assert distance(logits(model, ids_BP)[0], net(ids_BP, use_cache=False).logits[0]) < 1e-4


@pytest.mark.skipif(not can_multiply_blocks(), reason="products over blocks need AVX2")
@pytest.mark.parametrize("family", ["gemma4 small", "gemma4 moe"])
def test_blocks_of_a_file_are_multiplied_and_drafts_change_no_token(
    net_of: Callable[[str], Any], tmp_path: Path, family: str
) -> None:
    fields = {"model": str(write(net_of(family), tmp_path / "model.gguf", "Q8_0")), "dtype": "auto"}
    model = load_model(config(**fields))
    assert model.forms.startswith("8-bit blocks: ")
    assert isinstance(model.fused.forward, NativeForward)
    found = []
    for num_drafts in (0, 7):
        with unguided_engine(model, with_drafts(num_drafts, **fields)) as engine:
            asked = [ask(tokens(30 + n, n, repeat=10), max_tokens=30, ignore_eos=True) for n in range(3)]
            found.append(answer_all(engine, asked))
    assert found[0] == found[1]


def pieces(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Write a vocabulary of the kind that Gemma 4's files have: pieces of text, and a token for each byte."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
    bytes_of, texts = [f"<0x{byte:02X}>" for byte in range(256)], ["a", "b", "\u2581", "ab", "\u2581ab"]
    known = [*special, *bytes_of, *texts]
    unused = [f"<unused{at}>" for at in range(vocab_size - len(known))]
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list([*known, *unused])
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_token_types([3] * len(special) + [6] * 256 + [1] * len(texts) + [4] * len(unused))
    writer.add_token_merges(["a b", "\u2581 ab"])
    for at, name in enumerate(("pad", "eos", "bos", "unk")):
        writer.add_uint32(f"tokenizer.ggml.{name.replace('pad', 'padding').replace('unk', 'unknown')}_token_id", at)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)


def test_the_vocabulary_of_a_file_ends_a_turn(net_of: Callable[[str], Any], tmp_path: Path) -> None:
    """The file names the end of a text only. The chat template writes the first token of a prompt."""
    model = load_model(config(model=str(write(net_of("gemma4 small"), tmp_path / "model.gguf", vocabulary=pieces))))
    ids = model.tokenizer("ab ab!").input_ids
    assert model.tokenizer.convert_ids_to_tokens(ids) == ["ab", "\u2581ab", "<0x21>"]
    assert model.tokenizer.decode(ids) == "ab ab!"
    assert model.eos_token_ids == (1, model.tokenizer.convert_tokens_to_ids("<turn|>"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"expert_count": 4}, "its gemma4.expert_used_count is 0, and must be a number from 1 to its expert_count, 4"),
        ({"expert_count": 4, "expert_used_count": 2}, "its gemma4.expert_count is 4, and it has no router"),
        ({"still": 8.0}, "rope_freqs.weight has a factor that is neither 1 nor at least 1e+20"),
    ],
)
def test_a_file_that_is_no_such_model_is_refused(
    net_of: Callable[[str], Any], tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelNotSupported) as caught:
        load_model(config(model=str(write(net_of("gemma4"), tmp_path / "model.gguf", **options))))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
