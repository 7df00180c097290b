"""Adapters in PEFT's format for the tests, made of a seed, and the model that one of them is merged into.

Invariant: `merge` is the reference: W + scale * B A in float32, as PEFT's `merge_and_unload` computes it.
Not responsible for: models (see tests/gpu_engine/tiny.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_lora(
    model: Path,
    folder: Path,
    *,
    targets: Sequence[str] = EVERY,
    rank: int = 4,
    ranks: dict[str, int] | None = None,
    seed: int = 0,
    gain: float = 0.5,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a LoRA adapter with random matrices for every module of `model` whose name ends with a target."""
    generator = torch.Generator().manual_seed(seed)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tensors = {}
    for path, module in net.named_modules():
        if path.rpartition(".")[2] not in targets:
            continue
        inputs, outputs = shape_of(module)
        r = (ranks or {}).get(path.rpartition(".")[2], rank)
        key = f"base_model.model.{path}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(r, inputs, generator=generator) / math.sqrt(inputs)
        tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, r, generator=generator) * gain / math.sqrt(r)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: tensor.to(dtype).contiguous() for key, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    whole = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets), "bias": "none"}
    whole |= {"rank_pattern": ranks or {}, "use_rslora": False, **config}
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    return folder


def save_prompt(folder: Path, *, tokens: int, hidden: int, seed: int = 0, **config: Any) -> Path:
    """Write a prompt adapter with random embeddings."""
    folder.mkdir(parents=True, exist_ok=True)
    embeddings = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed))
    save_file({"prompt_embeddings": embeddings}, folder / "adapter_model.safetensors")
    whole = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": tokens, "token_dim": hidden, **config}
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    return folder


def shape_of(module: nn.Module) -> tuple[int, int]:
    """Return (inputs, outputs) of a product."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return module.nx, module.nf  # type: ignore[return-value]  # Conv1D


def merge(net: nn.Module, folder: Path) -> nn.Module:
    """Merge an adapter into a float32 model, in place."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for key, a_RI in tensors.items():
        if ".lora_A." not in key:
            continue
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b_OR, rank = tensors[key.replace("lora_A", "lora_B")], len(a_RI)
        alpha = config.get("alpha_pattern", {}).get(path.rpartition(".")[2], config["lora_alpha"])
        delta = b_OR.float() @ a_RI.float() * (alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
        module: Any = net.get_submodule(path)
        module.weight.data += delta if isinstance(module, nn.Linear) else delta.T
    return net


def merged_answer(model: Path, adapter: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the greedy answer of transformers' own model with the adapter merged into it."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    merge(net, adapter)
    net.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = net.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer
