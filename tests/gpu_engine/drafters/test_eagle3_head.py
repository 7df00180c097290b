"""The EAGLE3 head: files of the public format, and rejected files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_engine.drafters.heads.eagle3_files import load_head
from gpu_engine.drafters.heads.eagle3_head import Eagle3Head, default_aux_layers
from gpu_engine.drafters.heads.formats import HeadNotUsable
from tests.gpu_engine.eagle import VD, H, V, make_head, save_head, shape_for, target_config


def test_a_saved_head_has_the_public_format_and_is_loaded_unchanged(tmp_path: Path) -> None:
    head = make_head()
    save_head(head, tmp_path)
    again = load_head(tmp_path, target_config(), torch.float32)
    assert again.config == head.config
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=0)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["fc.weight"].shape == (H, 3 * H)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (H, 2 * H)
    assert tensors["lm_head.weight"].shape == (VD, H)
    assert {"norm.weight", "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"} <= tensors.keys()
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (written["draft_vocab_size"], written["num_hidden_layers"]) == (VD, 1)
    # Draft id d is target id d + d2t[d], and t2d marks the target ids that have one.
    ids = torch.arange(VD) + tensors["d2t"]
    assert ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist() == head.target_ids.tolist()


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_tensor_names_of_other_trainers_are_accepted(tmp_path: Path, prefix: str) -> None:
    head = make_head()
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {prefix + name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    renamed["embed_tokens.weight"] = torch.zeros(V, H)
    del renamed[prefix + "t2d"]
    save_file(renamed, tmp_path / "model.safetensors")
    again = load_head(tmp_path, target_config(), torch.float32)
    torch.testing.assert_close(again.t2d, head.t2d)
    torch.testing.assert_close(again.midlayer.mlp.up_proj.weight, head.midlayer.mlp.up_proj.weight)


def test_a_head_with_the_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    torch.manual_seed(0)
    head = Eagle3Head(shape_for(target_config(), V))
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}, tmp_path / "model.safetensors")
    assert load_head(tmp_path, target_config(), torch.float32).target_ids.tolist() == list(range(V))


def test_the_frequencies_of_the_rotary_embedding_stay_exact_in_bfloat16(tmp_path: Path) -> None:
    save_head(make_head(), tmp_path)
    position = torch.tensor([101])
    exact, _ = make_head().angles(position, torch.zeros(1))
    rounded, _ = load_head(tmp_path, target_config(), torch.bfloat16).angles(position, torch.zeros(1))
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0)


REFUSALS = {
    "vocab_size is 64, and the target has 65": ({}, {"vocab_size": V + 1}),
    "target_hidden_size is 64, and the target has 40": ({}, {"hidden_size": 40}),
    "three of the target's 2 layers": ({}, {"num_hidden_layers": 2}),
    "d2t is [20], and [21] fits": ({"draft_vocab_size": 21}, {}),
    "not the config of an EAGLE3 head": ({"num_attention_heads": None}, {}),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_the_error_of_an_unsuitable_head_names_the_mismatch(tmp_path: Path, words: str) -> None:
    ours, theirs = REFUSALS[words]
    save_head(make_head(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ours))
    with pytest.raises(HeadNotUsable) as refusal:
        load_head(tmp_path, target_config(**theirs), torch.float32)
    assert words in str(refusal.value)


@pytest.mark.parametrize("wrong", [V, -V, 0])
def test_a_map_with_an_invalid_or_repeated_id_is_rejected(tmp_path: Path, wrong: int) -> None:
    head = make_head()
    head.d2t[1] = wrong if wrong else head.d2t[0] - 1
    save_head(head, tmp_path)
    with pytest.raises(HeadNotUsable, match="d2t does not name"):
        load_head(tmp_path, target_config(), torch.float32)


def test_files_that_cannot_be_read_and_missing_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(HeadNotUsable, match=r"draft_model: cannot read .*config\.json: No such file"):
        load_head(tmp_path, target_config(), torch.float32)
    save_head(make_head(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["midlayer.hidden_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(HeadNotUsable, match=r"midlayer\.hidden_norm\.weight is missing"):
        load_head(tmp_path, target_config(), torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(HeadNotUsable, match=r"model.safetensors cannot be read"):
        load_head(tmp_path, target_config(), torch.float32)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 6, 32])
def test_the_default_auxiliary_layers_exist(num_layers: int) -> None:
    assert all(0 <= layer < num_layers for layer in default_aux_layers(num_layers))
    assert num_layers != 32 or default_aux_layers(num_layers) == (2, 16, 29)
