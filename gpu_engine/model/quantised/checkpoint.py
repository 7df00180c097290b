"""A quantised checkpoint in Hugging Face's format: reads its matrices, and loads a model with their weights.

transformers would ask for the package of each kind of quantisation; here a model is made from the configuration without
its `quantization_config`, and loaded from the dequantised weights. Invariant: every matrix of the model is one of the
checkpoint, or an error names it. Not responsible for: the order of bits (see layouts.py), whether a model runs from the
checkpoint's own integers (see choice.py).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from gpu_engine.model.quantised.layouts import STATISTICS, Parts, UnsupportedCheckpoint, layout_of
from gpu_engine.model.quantised.matrices import Matrix, NoBlocks, NoScaledRows, ScaledRows
from gpu_engine.model.recording import distance
from kernels.blocks import BlockKind, Blocks

_SAME = 1e-2
"""Largest relative distance of two roundings of one matrix."""
_ROWS = 64
"""Rows of a matrix that are compared with the weight that was loaded: another order of them shows in any."""
_PACKED = frozenset({"I8", "U8", "I32", "F8_E4M3", "F8_E5M2"})
"""Types of tensors that mean nothing without their matrix."""
_KEYS = ("quantization_config", "compression_config")


def open_checkpoint(folder: Path) -> QuantisedCheckpoint | None:
    """Return the quantised checkpoint in a folder, or None where its configuration names no quantisation.

    Raises UnsupportedCheckpoint for a kind that is not read, and OSError or ValueError for a broken file.
    """
    config = _config_of(folder)
    return None if config is None or has_mxfp4_experts(folder) else QuantisedCheckpoint(folder, config)


def has_mxfp4_experts(folder: Path) -> bool:
    """Return whether a folder holds gpt-oss with experts in MXFP4, which transformers dequantises by itself."""
    config = _config_of(folder)
    whole = json.loads((folder / "config.json").read_text())
    return config is not None and config.get("quant_method") == "mxfp4" and whole.get("model_type") == "gpt_oss"


def _config_of(folder: Path) -> dict[str, Any] | None:
    """Return `quantization_config`; old checkpoints of AutoGPTQ and AutoAWQ have it in a separate file."""
    whole = json.loads((folder / "config.json").read_text())
    for holder in (whole, whole.get("text_config") or {}):
        for key in _KEYS:
            if holder.get(key):
                return dict(holder[key])
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (folder / name).is_file():
            return {"quant_method": method, **json.loads((folder / name).read_text())}
    return None


class QuantisedCheckpoint:
    """The tensors of one quantised checkpoint. Keeps its files open.

    Args:
        folder: a directory with safetensors files, sharded or not.
        config: its `quantization_config`.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._folder, self._layout = folder, layout_of(config)
        self._files = _files(folder)
        self._plain: list[str] = []
        self._matrices: dict[str, list[str]] = defaultdict(list)
        """By name of the matrix: the ends of its tensors' names."""
        self._sort_names()
        self._kinds: Counter[str] = Counter()
        self.row_types: set[torch.dtype] = set()
        """Types of the matrices that have a scale for each output. Writer: `load`."""
        self._no_blocks: str | None = None
        self._no_rows: str | None = None
        self._used = 0

    def _sort_names(self) -> None:
        names = [name.rpartition(".") for name in self._files]
        marked = {name for name, _, end in names if end in self._layout.marks}
        for name, _, end in names:
            if name in marked and end in self._layout.parts:
                self._matrices[name].append(end)
            elif end in self._layout.parts - {"weight"}:  # of AutoAWQ's scaled activations, or of half a matrix
                raise UnsupportedCheckpoint(f"{name}.{end} is no part of a matrix of {self._layout.kind}")
            elif end not in STATISTICS:
                self._plain.append(f"{name}.{end}" if name else end)
        if not marked:
            raise UnsupportedCheckpoint(f"it has no tensor .{self._layout.marks[0]}, which {self._layout.kind} has")
        for name in self._plain:
            dtype = self._files[name].get_slice(name).get_dtype()
            if dtype in _PACKED:
                raise UnsupportedCheckpoint(f"{name} is {dtype} and no part of a matrix of {self._layout.kind}")

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def _matrix(self, name: str) -> Matrix:
        return self._layout.read(Parts(name, {end: self._tensor(f"{name}.{end}") for end in self._matrices[name]}))

    def _state(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return every weight of the model, the matrices dequantised to `dtype`; note what has no blocks, and no
        rows."""
        state = {name: self._tensor(name) for name in self._plain}
        for name in self._matrices:
            matrix = self._matrix(name)
            self._kinds[matrix.kind] += 1
            state[f"{name}.weight"] = matrix.dequantised().to(dtype)
            if self._no_blocks is None:
                try:
                    matrix.blocks()
                except NoBlocks as why:
                    self._no_blocks = f"{name}: {why}"
            if self._no_rows is None:
                try:
                    self.row_types.add(matrix.rows().values_NK.dtype)
                except NoScaledRows as why:
                    self._no_rows = f"{name}: {why}"
        return state

    def load(self, dtype: torch.dtype, attention: str) -> Any:
        """Return the transformers model with the dequantised weights, on the CPU.

        Raises UnsupportedCheckpoint, or transformers' OSError or ValueError.
        """
        config: Any = AutoConfig.from_pretrained(self._folder, trust_remote_code=False)
        for holder in (config, config.get_text_config()):
            for key in _KEYS:
                if hasattr(holder, key):
                    delattr(holder, key)
        with torch.device("meta"):  # the automatic class takes no weights; the model's own class does
            model_class: Any = type(AutoModelForCausalLM.from_config(config, dtype=dtype))
        options = {"dtype": dtype, "attn_implementation": attention, "ignore_mismatched_sizes": True}
        try:
            net, info = model_class.from_pretrained(
                None, config=config, state_dict=self._state(dtype), output_loading_info=True, **options
            )
        except RuntimeError as error:
            raise UnsupportedCheckpoint(f"its weights do not fit the model: {error}") from error
        for name, have, want in sorted(info["mismatched_keys"]):
            raise UnsupportedCheckpoint(f"{name} is {list(have)}, and the model's is {list(want)}")
        missing = sorted(info["missing_keys"])
        if missing:
            rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UnsupportedCheckpoint(f"it has no weights for {missing[0]}{rest}")
        if (self._folder / "generation_config.json").is_file():
            net.generation_config = GenerationConfig.from_pretrained(self._folder)
        return net

    def why_no_blocks(self, net: nn.Module) -> str | None:
        """Return why the loaded model cannot run from the checkpoint's own integers, or None where it can."""
        return self._no_blocks or self._why_other_names(net)

    def why_no_rows(self, net: nn.Module) -> str | None:
        """Return why the loaded model cannot run from scaled rows as the checkpoint states them, or None where it
        can."""
        if self._no_rows is None and not self._layout.short_inputs:
            return "it states no inputs of 8 bits"
        return self._no_rows or self._why_other_names(net)

    def _why_other_names(self, net: nn.Module) -> str | None:
        linears = {name for name, module in net.named_modules() if type(module) is nn.Linear}
        return None if linears & self._matrices.keys() else "its matrices have other names in the model"

    def of(self, name: str, linear: nn.Linear, *, only: BlockKind | None = None) -> Blocks | None:
        """Return the blocks of a product: the checkpoint's own integers, or None where it has none of the kind `only`
        (None: any) that give the weight that was loaded."""
        own = self._own_blocks(name, linear, only)
        self._used += own is not None
        return own

    def rows_of(self, name: str, linear: nn.Linear, *, only: torch.dtype | None = None) -> ScaledRows | None:
        """Return the scaled rows of a product, or None where the checkpoint has none of the type `only` (None: any)
        that give the weight that was loaded."""
        own = self._own_rows(name, linear, only)
        self._used += own is not None
        return own

    def _own_rows(self, name: str, linear: nn.Linear, only: torch.dtype | None) -> ScaledRows | None:
        if name not in self._matrices:
            return None
        try:
            rows = self._matrix(name).rows()
        except NoScaledRows:
            return None
        if rows.values_NK.shape != linear.weight.shape or only not in (None, rows.values_NK.dtype):
            return None
        some = _some_rows(linear)
        part = ScaledRows(rows.values_NK[some], rows.scales_N[some])
        return rows if distance(part.dequantised(), linear.weight[some]) < _SAME else None

    def _own_blocks(self, name: str, linear: nn.Linear, only: BlockKind | None) -> Blocks | None:
        if name not in self._matrices:
            return None
        try:
            blocks = self._matrix(name).blocks()
        except NoBlocks:
            return None
        if blocks.shape != tuple(linear.weight.shape) or only not in (None, blocks.kind):
            return None
        rows = _some_rows(linear)
        return blocks if distance(blocks.rows(rows).dequantised(), linear.weight[rows]) < _SAME else None

    def usage(self, num_products: int) -> str:
        """For the log: how many of the quantised products have the checkpoint's own numbers, how many do not, and the
        matrices of no such product, for example of experts."""
        left = len(self._matrices) - self._used
        dequantised = f", {left} of the matrices dequantised" if left else ""
        return f"{self._used} from {self}, {num_products - self._used} rounded from the weights{dequantised}"

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} matrices of {kind}" for kind, count in self._kinds.items())
        unused = f"; without effect: {', '.join(self._layout.unused)}" if self._layout.unused else ""
        return f"{self._layout.kind} ({kinds}{unused})"

    def __repr__(self) -> str:
        return f"<QuantisedCheckpoint {self}>"


def _some_rows(linear: nn.Linear) -> torch.Tensor:
    return torch.linspace(0, len(linear.weight) - 1, min(_ROWS, len(linear.weight))).long()


def _files(folder: Path) -> dict[str, Any]:
    """Return the open file of each tensor."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text()).get("weight_map") or {}
        paths = [folder / file for file in sorted(set(weight_map.values()))]
    else:
        weight_map = {}
        paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UnsupportedCheckpoint("a quantised checkpoint is read from safetensors files, and it has none")
    files: dict[str, Any] = {}
    for path in paths:
        if not path.is_file():
            raise UnsupportedCheckpoint(f"{path.name}, which {index.name} names, is missing")
        try:
            opened: Any = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise UnsupportedCheckpoint(f"{path.name} is no safetensors file: {error}") from error
        files.update(dict.fromkeys(opened.keys(), opened))
    lost = sorted(weight_map.keys() - files.keys())
    if lost:
        raise UnsupportedCheckpoint(f"{lost[0]}, which {index.name} names, is in no file")
    return files
