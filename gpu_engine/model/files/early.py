"""Which files a model has, and mistakes in them that show without torch, which takes seconds to import.

Invariant: what is refused here would be refused later as well. Not responsible for: what needs the model, such as
tensors that only some models of a family have (see filled.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_engine.model.files.architectures import ARCHITECTURES, WITH_EXPERTS, check_experts, has_experts
from gpu_engine.model.files.expected import of_config, of_header
from gpu_engine.model.names import ModelNotSupported, one_line, part_names

if TYPE_CHECKING:  # the library of GGUF files is loaded for one
    from gpu_engine.model.files.gguf_header import GGUFHeader

_NO_GENERATION = re.compile(
    r"For(MaskedLM|PreTraining|NextSentencePrediction|MultipleChoice|QuestionAnswering|\w*Classification)$"
)
"""Architectures without a next token."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_BLOCK = "blk."
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
"""Type -> bits of a value. A tensor of one of these types has the shape that the model has."""
_LENGTH = 8
_LONGEST_HEADER = 100_000_000
"""The format's own bound."""


_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
"""Keys of a configuration that say how many layers a model has."""


class _NotServed(ValueError):
    """A file is whole, and of a model that is not served."""


class SafetensorsError(ValueError):
    """A file is missing, or is no complete safetensors file; the message names it."""


def check_files(path: Path, setting: str) -> None:
    """Raise ModelNotSupported, with one line, for a GGUF file or a folder of safetensors that is damaged, or that has
    no model that can be served."""
    try:
        if path.is_file():
            _check_gguf(path)
        else:
            config = checked_config(path, setting)
            _check_folder(path, config)
    except ModelNotSupported:  # says what it is about
        raise
    except _NotServed as error:
        raise ModelNotSupported(f"{setting}: {path} cannot be loaded: {error}") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelNotSupported(f"{setting}: {path} cannot be read; is it complete? {one_line(error)}") from error


def checked_config(folder: Path, setting: str) -> dict[str, Any]:
    """Return the `config.json` of a folder. Raises ModelNotSupported for one that is no model in Hugging Face's format,
    has nothing but pickles, generates no text, needs code of its own, or is of a family that transformers lacks."""
    if not (folder / "config.json").is_file():
        raise ModelNotSupported(f"{setting}: {folder} has no config.json, so it is no model in Hugging Face's format")
    if not any(folder.glob("*.safetensors")) and any(path.suffix in _PICKLES for path in folder.iterdir()):
        raise ModelNotSupported(f"{setting}: {folder} {without_weights(path.name for path in folder.iterdir())}")
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ModelNotSupported(f"{setting}: {folder}/config.json is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelNotSupported(f"{setting}: {folder}/config.json is no JSON object")
    kind = config.get("model_type")
    names = [name for name in config.get("architectures") or () if _NO_GENERATION.search(str(name))]
    if names:
        raise ModelNotSupported(
            f"{setting}: {folder} is a {names[0]}, which generates no text: a model for that is needed"
        )
    if of_config(config) is not None or kind is None or _is_family(str(kind)):
        return config
    if "auto_map" in config:
        raise ModelNotSupported(
            f"{setting}: {folder} needs code of its own for its family {kind!r} (auto_map in config.json); code of a "
            "model's repository is never run, and there is no setting for it"
        )
    raise ModelNotSupported(f"{setting}: {folder} is of the family {kind!r}, which is not known here")


def without_weights(files: Iterable[str]) -> str:
    """Return what the files of a folder or a repository without safetensors have."""
    pickles = sorted(name for name in files if name.endswith(_PICKLES) and "/" not in name)
    if not pickles:
        return "has no safetensors file"
    more = f" and {len(pickles) - 1} more" if len(pickles) > 1 else ""
    return (
        f"has its weights only in {pickles[0]}{more}: a pickle may run any code when it is read; "
        "only safetensors are read, so convert it, or ask for a revision that has them"
    )


def _is_family(kind: str) -> bool:
    """Return whether transformers has a configuration of this type. Takes half a second, and no torch."""
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    return kind in CONFIG_MAPPING_NAMES or kind == "gpt-sw3"  # which the library adds where it has torch


def _check_gguf(path: Path) -> None:
    from gpu_engine.model.files.gguf_header import GGUFHeader

    header = GGUFHeader(path, [path.with_name(name) for name in part_names(path.name)[1:]])
    if not header.is_known:
        raise _NotServed(f"its architecture is {header.architecture!r}, which is not known here")
    _bound_layers(header.get("{arch}.block_count"), len(header.tensors))
    if header.architecture not in ARCHITECTURES | WITH_EXPERTS:
        if not _is_converted(header.architecture):
            raise _NotServed(f"its architecture is {header.architecture!r}, which is not served")
        return
    check_experts(header)
    if has_experts(header):  # the loader says what it makes of a mixture of experts
        return
    if header.get("tokenizer.ggml.tokens") is None:
        raise ValueError("it has no tokenizer.ggml.tokens, the vocabulary")
    if (expected := of_header(header)) is not None:
        expected.check_gguf({name: tensor.shape for name, tensor in header.tensors.items()})
    elif header.architecture != "gemma4":  # whose layers differ in shape; the loader has the shapes
        _compare_layers(header)


def _bound_layers(count: object, num_tensors: int) -> None:
    """Raise ValueError for more layers than tensors. A library that makes each layer first would not come to an end."""
    if isinstance(count, int) and count > num_tensors:
        raise ValueError(f"it has {count} layers by its configuration, and {num_tensors} tensors")


def _is_converted(architecture: str) -> bool:
    """Return whether transformers may read files of an architecture. Takes half a second, and no torch."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

    def plain(name: str) -> str:
        return name.replace("-", "").replace("_", "")

    known = {plain(name) for name in (*GGUF_CONFIG_MAPPING, *GGUF_CONFIG_ARCHS)}
    return plain(architecture) in known or "t5" in architecture  # it renames some files of T5


def _compare_layers(header: GGUFHeader) -> None:
    """Raise ValueError for a layer of a hybrid that lacks a tensor of its kind, or has one in another shape.

    Biases are left out, since a model may read none, and so are tensors that no model of the architecture has.
    """
    from gguf import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES

    if "token_embd.weight" not in header.tensors:
        raise ValueError("it has no token_embd.weight")
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
    known = {TENSOR_NAMES[tensor].removeprefix("blk.{bid}.") for tensor in MODEL_TENSORS[arch]}
    blocks: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in header.tensors.items():
        number, _, part = name.removeprefix(_BLOCK).partition(".")
        if name.startswith(_BLOCK) and part.removesuffix(".weight") in known:
            blocks.setdefault(number, {})[part] = tensor.shape
    count, drafting = (header.get(f"{{arch}}.{key}", 0) for key in ("block_count", "nextn_predict_layers"))
    if isinstance(widths := header.get("{arch}.feed_forward_length"), list):  # they say which layers there are
        count = len(widths)
    if not isinstance(count, int) or not isinstance(drafting, int):
        return
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for number in map(str, range(count - drafting)):
        if number not in blocks:
            raise ValueError(f"it has no tensor of the layer {_BLOCK}{number}")
        layers[number] = blocks[number]
    for number, own in layers.items():
        for at, other in layers.items():
            if own.keys() < other.keys():  # layers of different kinds have tensors that the others lack
                lost = min(other.keys() - own.keys())
                raise ValueError(f"it has no {_BLOCK}{number}.{lost}, which other layers have")
            if wrong := [part for part in sorted(own.keys() & other.keys()) if own[part] != other[part]]:
                shapes = f"is {[*own[wrong[0]]]}, and in layer {at} {[*other[wrong[0]]]}"
                raise ValueError(f"{_BLOCK}{number}.{wrong[0]} {shapes}")


def _check_folder(folder: Path, config: dict[str, Any]) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    is_plain = not any(config.get(key) for key in ("quantization_config", "compression_config"))
    for file in files_of(folder):
        for name, (kind, shape) in _safetensors_of(file).items():
            shapes[name] = shape
            is_plain &= kind in _BITS
    if not shapes:
        raise ValueError(f"the folder {without_weights(())}")
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in _COUNTS:
            _bound_layers(part.get(key), len(shapes))
    expected = of_config(config)
    # The library finds tensors under names that do not begin with the model's.
    if expected is not None and is_plain and any(name.startswith("model.layers.") for name in shapes):
        expected.check_own(shapes, tied=config.get("tie_word_embeddings") is not False)


def _safetensors_of(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the types and the shapes of a file's tensors. Raises ValueError."""
    tensors = {}
    with path.open("rb") as file:
        length, size = int.from_bytes(file.read(_LENGTH), "little"), path.stat().st_size
        if not 0 < length <= min(size, _LONGEST_HEADER):
            raise ValueError(f"{path.name} is no complete safetensors file")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = _LENGTH + length
            for name, entry in header.items():
                kind, shape, (begin, after) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
                end = max(end, _LENGTH + length + after)
                if kind in _BITS and math.prod(shape) * _BITS[kind] != 8 * (after - begin):
                    raise ValueError(f"{name} is {[*shape]} in {after - begin} bytes")
                tensors[name] = kind, shape
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"{path.name} is no complete safetensors file: its header is damaged: {error}") from error
    if end > size:
        raise ValueError(f"{path.name} is no complete safetensors file: it ends at byte {end}, and the file has {size}")
    return tensors


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
