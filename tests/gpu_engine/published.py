"""Writes tiny checkpoints in the layouts of compressed-tensors, GPTQ, AWQ and FP8, with the weights that they state.

Integers are packed one by one with Python's own arithmetic, and weights are computed from them in float64: none of the
loader's code is used. Invariant: a checkpoint's folder differs from the float model's only in the quantised matrices
and the configuration. Not responsible for: loading them (see model/test_checkpoints.py).

Shapes: N outputs, K inputs, G groups of inputs, W words.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

_Array = npt.NDArray[Any]


@dataclass
class Stored:
    """One matrix as a checkpoint stores it."""

    tensors: dict[str, torch.Tensor]
    """By the end of the name."""
    weight_NK: _Array
    """The weight that they state, float64."""


@dataclass
class Kind:
    """A kind of checkpoint."""

    config: dict[str, Any]
    """`quantization_config`."""
    store: Callable[[_Array], Stored]
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    """More tensors of every matrix."""


def packed(ints: _Array, bits: int) -> torch.Tensor:
    """Pack the integers of each row into words of 32 bits, the first in the lowest bits: [R, C] -> int32 [R, W]."""
    per_word = 32 // bits
    rows = []
    for row in ints.tolist():
        row += [0] * (-len(row) % per_word)
        words = [
            sum(value << (bits * place) for place, value in enumerate(row[at : at + per_word]))
            for at in range(0, len(row), per_word)
        ]
        rows.append(words)
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))


def grouped(
    weight_NK: _Array, bits: int, groups_K: _Array, *, symmetric: bool, scale: type = np.float16
) -> tuple[_Array, _Array, _Array, _Array]:
    """Return unsigned integers [N, K], scales [N, G], unsigned zero points [N, G], and the weight that they state."""
    N = len(weight_NK)
    G, top = int(groups_K.max()) + 1, (1 << bits) - 1
    scales_NG, zeros_NG = np.zeros((N, G), dtype=scale), np.full((N, G), (top + 1) // 2)
    for g in range(G):
        part = weight_NK[:, groups_K == g]
        if symmetric:
            scales_NG[:, g] = np.abs(part).max(axis=1) / (top // 2)
        else:
            least, most = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scales_NG[:, g] = (most - least) / top
            zeros_NG[:, g] = np.round(-least / scales_NG[:, g]).clip(1, top)
    wide_NK, zero_NK = scales_NG.astype(np.float64)[:, groups_K], zeros_NG[:, groups_K]
    ints_NK = (np.round(weight_NK / wide_NK) + zero_NK).clip(0, top).astype(np.int64)
    return ints_NK, scales_NG, zeros_NG, (ints_NK - zero_NK) * wide_NK


def neighbours(K: int, group: int) -> _Array:
    """The group of each input, where neighbours are a group. -1: one group."""
    return np.arange(K) // (K if group == -1 else group)


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = False,
    version: int = 1,
    named: str | None = None,
    desc_act: bool = False,
    with_g_idx: bool = True,
) -> Kind:
    """AutoGPTQ's layout. `version` is how zero points are stored, `named` what the configuration says of that."""

    def store(weight_NK: _Array) -> Stored:
        groups_K = neighbours(weight_NK.shape[1], group)
        if desc_act:
            groups_K = np.random.default_rng(0).permutation(groups_K)
        ints_NK, scales_NG, zeros_NG, stated_NK = grouped(weight_NK, bits, groups_K, symmetric=symmetric)
        tensors = {
            "qweight": packed(ints_NK, bits).T.contiguous(),
            "qzeros": packed(zeros_NG.T - (version == 1), bits),
            "scales": torch.from_numpy(scales_NG.T.copy()),
        }
        if with_g_idx:
            tensors["g_idx"] = torch.from_numpy(groups_K.astype(np.int32))
        return Stored(tensors, stated_NK)

    name = named or ("gptq" if version == 1 else "gptq_v2")
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": symmetric}
    return Kind({**config, "checkpoint_format": name, "true_sequential": True}, store)


def awq(group: int = 32) -> Kind:
    """AutoAWQ's layout "gemm"."""

    def interleaved(ints_RN: _Array) -> torch.Tensor:
        rows = []
        for row in ints_RN.tolist():
            ordered = [row[at + out] for at in range(0, len(row), 8) for out in (0, 2, 4, 6, 1, 3, 5, 7)]
            rows.append(ordered)
        return packed(np.array(rows), 4)

    def store(weight_NK: _Array) -> Stored:
        groups_K = neighbours(weight_NK.shape[1], group)
        ints_NK, scales_NG, zeros_NG, stated_NK = grouped(weight_NK, 4, groups_K, symmetric=False)
        scales = torch.from_numpy(scales_NG.T.copy())
        return Stored(
            {"qweight": interleaved(ints_NK.T), "qzeros": interleaved(zeros_NG.T), "scales": scales}, stated_NK
        )

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Kind({**config, "modules_to_not_convert": None}, store)


def _compressed(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "global_compression_ratio": None,
    }


def w4a16(bits: int = 4, group: int = 32, *, symmetric: bool = True, act_order: bool = False) -> Kind:
    """compressed-tensors "pack-quantized"; scales in bfloat16, as its models have them."""

    def store(weight_NK: _Array) -> Stored:
        N, K = weight_NK.shape
        groups_K = neighbours(K, group)
        if act_order:
            groups_K = np.random.default_rng(1).permutation(groups_K)
        ints_NK, scales_NG, zeros_NG, _ = grouped(weight_NK, bits, groups_K, symmetric=symmetric, scale=np.float32)
        scales = torch.from_numpy(scales_NG).bfloat16()
        tensors = {
            "weight_packed": packed(ints_NK, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([N, K]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed(zeros_NG.T, bits).T.contiguous()
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(groups_K.astype(np.int32))
        stated_NK = (ints_NK - zeros_NG[:, groups_K]) * scales.double().numpy()[:, groups_K]
        return Stored(tensors, stated_NK)

    strategy = (
        {"strategy": "channel", "group_size": None} if group == -1 else {"strategy": "group", "group_size": group}
    )
    order = {"actorder": "group" if act_order else None}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, **strategy, **order}
    return Kind(_compressed("pack-quantized", weights), store)


def w8a8(*, symmetric: bool = True, static: bool = False, per_tensor: bool = False) -> Kind:
    """compressed-tensors "int-quantized": a scale for each output, or one for all."""

    def store(weight_NK: _Array) -> Stored:
        flat = weight_NK.reshape(1, -1) if per_tensor else weight_NK
        ints, scales_NG, zeros_NG, stated = grouped(
            flat, 8, neighbours(flat.shape[1], -1), symmetric=symmetric, scale=np.float32
        )
        tensors = {
            "weight": torch.from_numpy((ints - 128).astype(np.int8).reshape(weight_NK.shape)),
            "weight_scale": torch.from_numpy(scales_NG if not per_tensor else scales_NG.reshape(1)),
        }
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy((zeros_NG - 128).astype(np.int8))
        return Stored(tensors, stated.reshape(weight_NK.shape))

    weights = {
        "num_bits": 8,
        "type": "int",
        "symmetric": symmetric,
        "dynamic": False,
        "strategy": "tensor" if per_tensor else "channel",
    }
    how = {"dynamic": False, "strategy": "tensor"} if static else {"dynamic": True, "strategy": "token"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, **how}
    extra = {"input_scale": torch.tensor([0.02])} if static else {}
    return Kind(_compressed("int-quantized", weights, inputs), store, extra)


def _as_floats(weight_NK: _Array, scale_NK: _Array) -> tuple[torch.Tensor, _Array]:
    floats_NK = torch.from_numpy(weight_NK / scale_NK).to(torch.float8_e4m3fn)
    return floats_NK, floats_NK.double().numpy() * scale_NK


def fp8_channel(*, per_tensor: bool = False) -> Kind:
    """compressed-tensors "float-quantized": a scale for each output, or one for all."""

    def store(weight_NK: _Array) -> Stored:
        most = np.abs(weight_NK).max(axis=None if per_tensor else 1, keepdims=True)
        scale = (most / 448).astype(np.float32)
        floats_NK, stated_NK = _as_floats(weight_NK, np.broadcast_to(scale.astype(np.float64), weight_NK.shape))
        stored = torch.from_numpy(scale.reshape(1) if per_tensor else scale)
        return Stored({"weight": floats_NK, "weight_scale": stored}, stated_NK)

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor" if per_tensor else "channel"}
    return Kind(_compressed("float-quantized", weights, {"num_bits": 8, "type": "float", "dynamic": True}), store)


def fp8_by(method: str, config: dict[str, Any], extra: dict[str, torch.Tensor], *, per_tensor: bool) -> Kind:
    """FP8 of another writer with the same names: fbgemm's by output, AutoFP8's (vLLM's `fp8`) by tensor."""
    return Kind({"quant_method": method, **config}, fp8_channel(per_tensor=per_tensor).store, extra)


def fp8_tiles(tile: int = 40, *, compressed: bool = False) -> Kind:
    """transformers' `fp8`: a scale for each square tile; the last tiles of a side may be smaller. compressed-tensors
    names the same tensors differently."""

    def store(weight_NK: _Array) -> Stored:
        N, K = weight_NK.shape
        scales = np.zeros((-(-N // tile), -(-K // tile)), dtype=np.float32)
        scale_NK = np.zeros((N, K))
        for row in range(len(scales)):
            for column in range(scales.shape[1]):
                where = np.s_[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
                scales[row, column] = np.abs(weight_NK[where]).max() / 448
                scale_NK[where] = scales[row, column]
        floats_NK, stated_NK = _as_floats(weight_NK, scale_NK)
        name = "weight_scale" if compressed else "weight_scale_inv"
        return Stored({"weight": floats_NK, name: torch.from_numpy(scales)}, stated_NK)

    if compressed:
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [tile, tile]}
        return Kind(_compressed("float-quantized", weights), store)
    shape = {"weight_block_size": [tile, tile], "modules_to_not_convert": ["lm_head"]}
    return Kind({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **shape}, store)


def write(source: Path, kind: Kind, folder: Path, *, shards: int = 1) -> tuple[Path, Path]:
    """Write a float model's checkpoint of a kind; return its folder, and one with the float weights that it states."""
    quantised, floats = folder / "quantised", folder / "floats"
    for made in (quantised, floats):
        shutil.copytree(source, made)
    stored: dict[str, torch.Tensor] = {}
    stated = load_file(source / "model.safetensors")
    for name, weight in list(stated.items()):
        base, _, end = name.rpartition(".")
        if end != "weight" or weight.dim() != 2 or ".layers." not in name:
            stored[name] = weight
            continue
        matrix = kind.store(weight.double().numpy())
        stored.update({f"{base}.{part}": tensor for part, tensor in matrix.tensors.items()})
        stored.update({f"{base}.{part}": tensor.clone() for part, tensor in kind.extra.items()})
        stated[name] = torch.from_numpy(matrix.weight_NK).float()
    save_file(stated, floats / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": kind.config}))
    save_tensors(stored, quantised, shards)
    return quantised, floats


def save_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, shards: int = 1) -> None:
    """Write `model.safetensors`, or that many files and their index; tensors of one matrix go to different files."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = {name: f"model-{at % shards + 1:05}-of-{shards:05}.safetensors" for at, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        part = {name: tensors[name] for name in tensors if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
