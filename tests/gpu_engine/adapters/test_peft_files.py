"""Directories in PEFT's format: what is read as PEFT reads it, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gpu_engine.model.adapters.peft_files import AdapterNotSupported, LoraFiles, PromptFiles, read_adapter

PATH = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{PATH}"


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def lora(folder: Path, rank: int = 4, *, extra: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    tensors = {f"{KEY}.lora_A.weight": torch.ones(rank, 8), f"{KEY}.lora_B.weight": torch.ones(6, rank)}
    whole = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none", **config}
    return write(folder, whole, tensors | (extra or {}))


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 2}}, 2.0),
        ({"r": 16, "rank_pattern": {"q_proj": 4}}, 2.0),
        ({"r": 16, "rank_pattern": {r".*\.0\..*q_proj": 4}}, 2.0),
        ({"modules_to_save": [], "use_dora": False, "layer_replication": None}, 2.0),
    ],
)
def test_the_scale_is_pefts(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    files = read_adapter(lora(tmp_path, **config), 1 << 20)
    assert isinstance(files, LoraFiles)
    assert files.modules[PATH].scale == scale
    assert (files.rank, files.memory_bytes) == (4, 4 * (4 * 8 + 6 * 4))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora: DoRA is not supported"),
        ({"bias": "all"}, "bias: 'all' changes the model's biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: whole modules are not replaced"),
        ({"layer_replication": [[0, 2]]}, "layer_replication: layers are not replicated"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters: parameters of experts"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices: embeddings are not adapted"),
        ({"use_bdlora": {"lora_a_is_blockdiagonal": ["q_proj"]}}, "use_bdlora: BD-LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4' changes the model's own weights"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens: activated LoRA"),
        ({"peft_type": "P_TUNING"}, "peft_type: 'P_TUNING' is not supported; LORA and PROMPT_TUNING are"),
        ({"peft_type": "PREFIX_TUNING"}, "peft_type: 'PREFIX_TUNING' is not supported"),
        ({"r": 8}, rf"{PATH}: lora_A \[4, 8\] and lora_B \[6, 4\], of rank 8"),
        ({"lora_alpha": "x"}, "lora_alpha: 'x' is no positive number"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern: a key is no regular expression"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterNotSupported, match=message):
        read_adapter(lora(tmp_path, **config), 1 << 20)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (f"{KEY}.lora_magnitude_vector", "a magnitude of DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embeddings are not adapted"),
        (f"{KEY}.bias", "biases are not adapted"),
        ("base_model.model.lm_head.base_layer.weight", "the output head are not adapted"),
        ("base_model.model.lm_head.weight", "is no matrix of LoRA"),
    ],
)
def test_a_tensor_without_a_meaning_is_refused_by_name(key: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterNotSupported, match=f"{key}: .*{message}"):
        read_adapter(lora(tmp_path, extra={key: torch.ones(2, 2)}), 1 << 20)


def test_a_side_alone_a_large_rank_and_a_large_file_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, {"peft_type": "LORA", "r": 4, "lora_alpha": 8}, {f"{KEY}.lora_A.weight": torch.ones(4, 8)})
    with pytest.raises(AdapterNotSupported, match=f"{PATH}: has only lora_A"):
        read_adapter(folder, 1 << 20)
    with pytest.raises(AdapterNotSupported, match="rank 257, at most 256"):
        read_adapter(lora(tmp_path, 257), 1 << 20)
    with pytest.raises(AdapterNotSupported, match="224 bytes, and max_adapter_bytes is 223"):
        read_adapter(lora(tmp_path), 223)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    write(tmp_path, {"peft_type": "LORA", "r": 4, "lora_alpha": 8})
    torch.save({}, tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterNotSupported, match=r"has no adapter_model.safetensors; adapter_model.bin is a pickle"):
        read_adapter(tmp_path, 1 << 20)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config.json"):
        read_adapter(tmp_path, 1 << 20)
    for text in ("{", "[]"):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(AdapterNotSupported, match=r"adapter_config.json: is no JSON"):
            read_adapter(tmp_path, 1 << 20)
    lora(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with pytest.raises(AdapterNotSupported, match=r"adapter_model.safetensors: "):
        read_adapter(tmp_path, 1 << 20)


def test_prompt_embeddings_have_the_size_that_the_configuration_says(tmp_path: Path) -> None:
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3, "num_transformer_submodules": 1}
    files = read_adapter(write(tmp_path, config, {"prompt_embeddings": torch.ones(3, 8)}), 1 << 20)
    assert isinstance(files, PromptFiles)
    assert files.memory_bytes == 96
    with pytest.raises(AdapterNotSupported, match="prompt_embeddings: 3 rows, and num_virtual_tokens is 4"):
        read_adapter(write(tmp_path, {**config, "num_virtual_tokens": 4}), 1 << 20)
    with pytest.raises(AdapterNotSupported, match="num_transformer_submodules: 2"):
        read_adapter(write(tmp_path, {**config, "num_transformer_submodules": 2}), 1 << 20)
    with pytest.raises(AdapterNotSupported, match="prompt tuning has only prompt_embeddings"):
        read_adapter(write(tmp_path, config, {"a": torch.ones(3, 8)}), 1 << 20)
