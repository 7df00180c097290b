"""Reads an adapter's directory in PEFT's format: adapter_config.json and adapter_model.safetensors.

Invariant: whatever of an adapter this engine would not compute as PEFT does is an error that names the key, never left
out. Pickle files are never loaded. Not responsible for: whether the matrices fit a model (see places.py).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpu_engine.api.adapters import MAX_RANK, MAX_VIRTUAL_TOKENS

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20

_REFUSED_KEYS = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "whole modules are not replaced",
    "layer_replication": "layers are not replicated",
    "target_parameters": "parameters of experts are not adapted",
    "trainable_token_indices": "embeddings are not adapted",
    "lora_bias": "biases are not adapted",
    "use_qalora": "QALoRA is not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "Arrow routing is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "kasa_config": "KaSA is not supported",
    "use_bdlora": "BD-LoRA is not supported",
}
"""Keys of a LoRA configuration that must be unset, with the reason."""

_INITS_OF_BASES = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` with which PEFT changes the model's own weights before it adds the matrices."""

_LORA_KEY = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<side>[AB])\.weight")


class AdapterNotSupported(ValueError):
    """The adapter cannot be used; the message names the file, key or tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraMatrices:
    """What a LoRA adapter has for one module: y += scale * B (A x)."""

    a_RI: torch.Tensor
    """In the file's dtype."""
    b_OR: torch.Tensor
    scale: float


def stored_dtype(matrices: LoraMatrices) -> torch.dtype:
    """Return the dtype in which matrices are held: bfloat16 where the file has that, else float32."""
    narrow = matrices.a_RI.dtype == matrices.b_OR.dtype == torch.bfloat16
    return torch.bfloat16 if narrow else torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class LoraFiles:
    """A LoRA adapter: its matrices by the path of the module."""

    modules: dict[str, LoraMatrices]

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(len(matrices.a_RI) for matrices in self.modules.values())

    @property
    def memory_bytes(self) -> int:
        """Bytes of the matrices in memory."""
        every = self.modules.values()
        return sum(stored_dtype(m).itemsize * (m.a_RI.numel() + m.b_OR.numel()) for m in every)


@dataclass(frozen=True, slots=True, eq=False)
class PromptFiles:
    """A prompt adapter: the embeddings of its virtual tokens."""

    embeddings_TH: torch.Tensor
    """In the file's dtype."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the embeddings in float32."""
        return 4 * self.embeddings_TH.numel()


def read_adapter(folder: Path, max_bytes: int) -> LoraFiles | PromptFiles:
    """Return the adapter of a directory. Raises AdapterNotSupported, or FileNotFoundError where it has no adapter.

    An adapter that needs more than `max_bytes` is refused before its weights are read.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG_FILE}")
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise AdapterNotSupported(f"{CONFIG_FILE}: has more than {_MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise AdapterNotSupported(f"{CONFIG_FILE}: is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterNotSupported(f"{CONFIG_FILE}: is no JSON object")
    kind = config.get("peft_type")
    if kind not in ("LORA", "PROMPT_TUNING"):
        raise AdapterNotSupported(f"peft_type: {kind!r} is not supported; LORA and PROMPT_TUNING are")
    tensors = _tensors(folder, max_bytes)
    return _lora(config, tensors) if kind == "LORA" else _prompt(config, tensors)


def _tensors(folder: Path, max_bytes: int) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        others = sorted(item.name for item in folder.iterdir() if item.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        reason = f"; {others[0]} is a pickle, which is never loaded" if others else ""
        raise AdapterNotSupported(f"{folder} has no {WEIGHTS_FILE}{reason}")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
            widths = {key: 2 if part.get_dtype() == "BF16" else 4 for key, part in slices.items()}
            size = sum(widths[key] * math.prod(part.get_shape()) for key, part in slices.items())
            if size > max_bytes:
                raise AdapterNotSupported(f"{WEIGHTS_FILE}: {size} bytes, and max_adapter_bytes is {max_bytes}")
            return {key: file.get_tensor(key) for key in slices}
    except SafetensorError as error:
        raise AdapterNotSupported(f"{WEIGHTS_FILE}: {error}") from error


def _lora(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> LoraFiles:
    for key, reason in _REFUSED_KEYS.items():
        if config.get(key):
            raise AdapterNotSupported(f"{key}: {reason}")
    if (bias := config.get("bias", "none")) != "none":
        raise AdapterNotSupported(f"bias: {bias!r} changes the model's biases; only 'none' is supported")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_INITS_OF_BASES):
        raise AdapterNotSupported(
            f"init_lora_weights: {init!r} changes the model's own weights; save the adapter converted to LoRA "
            "(save_pretrained's path_initial_model_for_weight_conversion)"
        )
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _LORA_KEY.fullmatch(key)
        if match is None:
            raise AdapterNotSupported(f"{key}: {_why_not(key)}")
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise AdapterNotSupported(
                f"{key}: has the shape {list(tensor.shape)} and {tensor.dtype}, no matrix of floats"
            )
        found.setdefault(match["path"], {})[match["side"]] = tensor
    if not found:
        raise AdapterNotSupported(f"{WEIGHTS_FILE}: has no tensor")
    return LoraFiles({path: _matrices(path, sides, config) for path, sides in sorted(found.items())})


def _why_not(key: str) -> str:
    if "lora_magnitude" in key:
        return "a magnitude of DoRA, which is not supported"
    if "lora_embedding" in key:
        return "a matrix of an embedding; embeddings are not adapted"
    if ".base_layer." in key:
        return "a weight of the model itself; embeddings and the output head are not adapted"
    if key.endswith(".bias"):
        return "a bias; biases are not adapted"
    return "is no matrix of LoRA (base_model.model.PATH.lora_A.weight or lora_B.weight)"


def _matrices(path: str, sides: dict[str, torch.Tensor], config: dict[str, Any]) -> LoraMatrices:
    if set(sides) != {"A", "B"}:
        raise AdapterNotSupported(f"{path}: has only lora_{next(iter(sides))}")
    a_RI, b_OR = sides["A"], sides["B"]
    rank = _number(config, "rank_pattern", "r", path)
    if len(a_RI) != rank or b_OR.shape[1] != rank:
        raise AdapterNotSupported(f"{path}: lora_A {list(a_RI.shape)} and lora_B {list(b_OR.shape)}, of rank {rank:g}")
    if rank > MAX_RANK:
        raise AdapterNotSupported(f"{path}: rank {rank:g}, at most {MAX_RANK} is supported")
    alpha = _number(config, "alpha_pattern", "lora_alpha", path)
    return LoraMatrices(a_RI, b_OR, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _number(config: dict[str, Any], pattern: str, key: str, path: str) -> float:
    """Return a module's own number where a pattern has its path, as PEFT looks it up, else that of all modules."""
    patterns = config.get(pattern) or {}
    if not isinstance(patterns, dict):
        raise AdapterNotSupported(f"{pattern}: is no object")
    try:
        name = next((name for name in patterns if re.match(rf"(.*\.)?({name})$", path)), None)
    except re.error as error:
        raise AdapterNotSupported(f"{pattern}: a key is no regular expression: {error}") from error
    value = config.get(key) if name is None else patterns[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise AdapterNotSupported(f"{key}: {value!r} is no positive number")
    return value


def _prompt(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> PromptFiles:
    if set(tensors) != {"prompt_embeddings"}:
        raise AdapterNotSupported(f"{WEIGHTS_FILE}: has {sorted(tensors)}, prompt tuning has only prompt_embeddings")
    if (copies := config.get("num_transformer_submodules") or 1) != 1:
        raise AdapterNotSupported(f"num_transformer_submodules: {copies!r}; one is supported")
    embeddings = tensors["prompt_embeddings"]
    if embeddings.dim() != 2 or not embeddings.is_floating_point():
        raise AdapterNotSupported(f"prompt_embeddings: has the shape {list(embeddings.shape)}, no matrix of floats")
    if (count := config.get("num_virtual_tokens")) != len(embeddings):
        raise AdapterNotSupported(f"prompt_embeddings: {len(embeddings)} rows, and num_virtual_tokens is {count!r}")
    if len(embeddings) not in range(1, MAX_VIRTUAL_TOKENS + 1):
        raise AdapterNotSupported(f"num_virtual_tokens: is {count}, must be in [1, {MAX_VIRTUAL_TOKENS}]")
    return PromptFiles(embeddings)
