"""Which files a model has, and mistakes in them that show without torch, which takes seconds to import.

Invariant: what is refused here would be refused later as well. Not responsible for: what needs the model, such as the
shapes that its configuration asks for (see filled.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from gpu_engine.model.names import ModelNotSupported, part_names

_BLOCK = "blk."
_ALIKE = frozenset({"gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen3"})
"""Architectures whose layers all have the same tensors. Those of hybrids differ."""
_LENGTH = 8
_LONGEST_HEADER = 100_000_000
"""The format's own bound."""


class SafetensorsError(ValueError):
    """A file is missing, or is no complete safetensors file; the message names it."""


def check_files(path: Path, setting: str) -> None:
    """Raise ModelNotSupported, with one line, for a GGUF file or a folder of safetensors that is damaged."""
    try:
        if path.is_file():
            _check_gguf(path)
        else:
            for file in files_of(path):
                _check_safetensors(file)
    except (OSError, ValueError) as error:
        raise ModelNotSupported(f"{setting}: {path} cannot be read; is it complete? {error}") from error


def _check_gguf(path: Path) -> None:
    from gpu_engine.model.files.gguf_header import GGUFHeader

    header = GGUFHeader(path, [path.with_name(name) for name in part_names(path.name)[1:]])
    if not header.is_known:
        raise ValueError(f"its architecture is {header.architecture!r}, which is not known here")
    if header.architecture not in _ALIKE:
        return
    blocks: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in header.tensors.items():
        if name.startswith(_BLOCK):
            number, _, part = name.removeprefix(_BLOCK).partition(".")
            blocks.setdefault(number, {})[part] = tensor.shape
    count = header.get("{arch}.block_count", 0)
    for number in map(str, range(count if isinstance(count, int) else 0)):
        own, first = blocks.get(number, {}), blocks.get("0", {})
        if missing := sorted(first.keys() - own.keys()) or sorted(own.keys() - first.keys()):
            at = number if missing[0] in first else "0"
            raise ValueError(f"it has no {_BLOCK}{at}.{missing[0]}, which other layers have")
        if other := [part for part in sorted(own) if own[part] != first[part]]:
            shapes = f"is {[*own[other[0]]]}, and in the first layer {[*first[other[0]]]}"
            raise ValueError(f"{_BLOCK}{number}.{other[0]} {shapes}")


def _check_safetensors(path: Path) -> None:
    with path.open("rb") as file:
        length, size = int.from_bytes(file.read(_LENGTH), "little"), path.stat().st_size
        if not 0 < length <= min(size, _LONGEST_HEADER):
            raise ValueError(f"{path.name} is no complete safetensors file")
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            end = _LENGTH + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"{path.name} is no complete safetensors file: its header is damaged") from error
    if end > size:
        raise ValueError(f"{path.name} is no complete safetensors file: it ends at byte {end}, and the file has {size}")


def files_of(folder: Path) -> list[Path]:
    """Return the safetensors files of a model; empty: it has none. Raises SafetensorsError where one is missing."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():  # before an index, as transformers has it
        return [single]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SafetensorsError(f"{index.name} is no index: {error!r}") from error
    for path in paths:
        if not path.is_file():
            raise SafetensorsError(f"{path.name}, which {index.name} names, is missing")
    return paths
