"""The weights of a model in Hugging Face's format, read from its safetensors files one at a time.

The files are read and not mapped: pages of a mapping count as the process's memory, and would be held next to the
packed weights. Invariant: a tensor that a header names lies in its file. Not responsible for: checkpoints of quantised
matrices (see quantised/checkpoint.py), names that a family's loader in transformers changes (see direct.py).

The format is https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_engine.model.files.early import SafetensorsError, files_of
from gpu_engine.model.files.pieces import FileBytes

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types that are read here."""
_LENGTH = 8
_LONGEST_HEADER = 100_000_000
"""The format's own bound."""


class _Place(NamedTuple):
    file: FileBytes
    dtype: torch.dtype | None
    """None: a type that is not read here."""
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class SafetensorsWeights:
    """The tensors of a folder's files.

    Args:
        folder: with `model.safetensors`, or with an index of several files.
        of_text: the model is the language model in a checkpoint that has others next to it, for images or audio.
    """

    def __init__(self, folder: Path, *, of_text: bool = False) -> None:
        self._folder, self._files, self._of_text = folder, list[FileBytes](), of_text
        self._places: dict[str, _Place] = {}
        try:
            for path in files_of(folder):
                self._files.append(FileBytes(path))
                self._places.update(_places_of(self._files[-1]))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> SafetensorsWeights:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    @property
    def plain(self) -> bool:
        """True: every tensor has a type that is read here."""
        return bool(self._places) and all(place.dtype is not None for place in self._places.values())

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a parameter; None: the files have none of that name."""
        place = self._place(name)
        return None if place is None else place.shape

    def _place(self, name: str) -> _Place | None:
        names = [name]
        if self._of_text:
            names += [f"model.language_model.{name.removeprefix('model.')}", f"language_model.{name}"]
        return next((self._places[each] for each in names if each in self._places), None)

    def _of(self, name: str) -> _Place:
        place = self._place(name)
        assert place is not None, name
        return place

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter in memory of its own."""
        place = self._of(name)
        if place.dtype is dtype:
            return torch.from_numpy(place.file.read(place.start, place.num_bytes)).view(dtype).view(place.shape)
        made = torch.empty(place.shape, dtype=dtype)
        rows = made.view(-1, *place.shape[-1:])
        for first, part in self.rows(name, dtype):
            rows[first : first + len(part)] = part
        return made

    def rows(self, name: str, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of a row of a parameter, a multiple of 32, and the next rows from it on, [n, K]."""
        place = self._of(name)
        assert place.dtype is not None, name
        for first, raw in place.file.slabs(place.start, math.prod(place.shape[:-1]), place.num_bytes):
            yield first, torch.from_numpy(raw).view(place.dtype).to(dtype)

    def __repr__(self) -> str:
        return f"<SafetensorsWeights {len(self._places)} tensors in {len(self._files)} files>"


def _places_of(file: FileBytes) -> Iterator[tuple[str, _Place]]:
    """Yield the tensors of a file by name."""
    name = file.path.name
    try:
        (length,) = file.read(0, _LENGTH).view("<u8").tolist()
        if length > min(_LONGEST_HEADER, file.size - _LENGTH):
            raise ValueError(f"its header has {length} bytes, and the file {file.size}")
        header: dict[str, Any] = json.loads(file.read(_LENGTH, length).tobytes())
        header.pop("__metadata__", None)
        for key, value in header.items():
            begin, end = value["data_offsets"]
            shape, dtype = tuple(value["shape"]), _DTYPES.get(value["dtype"])
            if _LENGTH + length + end > file.size:
                raise ValueError(f"{key} ends at byte {_LENGTH + length + end}, and the file has {file.size}")
            if dtype is not None and math.prod(shape) * dtype.itemsize != end - begin:
                raise ValueError(f"{key} is {list(shape)} in {end - begin} bytes")
            yield key, _Place(file, dtype, shape, _LENGTH + length + begin, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SafetensorsError(f"{name} is no complete safetensors file: {error}") from error
