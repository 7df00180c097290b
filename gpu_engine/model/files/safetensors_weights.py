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
from gpu_engine.model.files.pieces import EXPERT, GROUP, FileBytes, check_parts

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types that are read here."""
_LENGTH = 8
_LONGEST_HEADER = 100_000_000
"""The format's own bound."""


class Place(NamedTuple):
    """Where a tensor lies."""

    file: FileBytes
    dtype: torch.dtype | None
    """None: a type that is not read here."""
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def part(self, number: int) -> Place:
        """Return the matrix of one expert, of those that a tensor has stacked."""
        size = self.num_bytes // self.shape[0]
        return self._replace(shape=self.shape[1:], start=self.start + number * size, num_bytes=size)

    def bytes(self) -> torch.Tensor:
        """Return the tensor of a type with one byte for each number, uint8."""
        return torch.from_numpy(self.file.read(self.start, self.num_bytes)).view(self.shape)

    def values(self) -> torch.Tensor:
        """Return the tensor of a type that is read here."""
        assert self.dtype is not None, self
        return torch.from_numpy(self.file.read(self.start, self.num_bytes)).view(self.dtype).view(self.shape)


_OF_EXPERT = {"gate_up": (("gate_proj", "up_proj"), ("w1", "w3")), "down": (("down_proj",), ("w2",))}
"""Product -> the names of the matrices that have its rows one after another, in the files of one family or another."""


class SafetensorsWeights:
    """The tensors of a folder's files.

    Args:
        folder: with `model.safetensors`, or with an index of several files.
        of_text: the model is the language model in a checkpoint that has others next to it, for images or audio.
    """

    def __init__(self, folder: Path, *, of_text: bool = False) -> None:
        self._folder, self._files, self._of_text = folder, list[FileBytes](), of_text
        self._places: dict[str, Place] = {}
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
        places = self._find(name)
        if len(places) < 2:
            return places[0].shape if places else None
        return (sum(place.shape[0] for place in places), *places[0].shape[1:])

    def _find(self, name: str) -> tuple[Place, ...]:
        """Return where a parameter lies: nowhere, or in one or two places whose rows it has one after another."""
        expert = EXPERT.fullmatch(name)
        if expert is None or expert[4] == "bias":
            place = self._place(name)
            return () if place is None else (place,)
        mixture, product, number = expert[1], expert[2], int(expert[3])
        if (whole := self._place(f"{mixture}.{product}_proj")) is not None:
            (whole,) = check_parts(name, 3, [whole])
            return (whole.part(number),) if number < whole.shape[0] else ()
        for parts in _OF_EXPERT[product]:
            found = [self._place(f"{mixture}.{number}.{part}.weight") for part in parts]
            if None not in found:
                return check_parts(name, 2, [place for place in found if place is not None])
        return ()

    def _place(self, name: str) -> Place | None:
        names = [name, name.replace(".mlp.", ".block_sparse_moe.")]
        if self._of_text:
            names += [f"model.language_model.{name.removeprefix('model.')}", f"language_model.{name}"]
        return next((self._places[each] for each in names if each in self._places), None)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter in memory of its own."""
        place, *others = self._find(name)
        if place.dtype is dtype and not others:
            return place.values()
        shape = self.shape(name)
        assert shape is not None
        made = torch.empty(shape, dtype=dtype)
        rows = made.view(-1, *shape[-1:])
        for first, part in self.rows(name, dtype):
            rows[first : first + len(part)] = part
        return made

    def rows(self, name: str, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of a row of a parameter, a multiple of 32, and the next rows from it on, [n, K]."""
        begin, places = 0, self._find(name)
        if len(places) > 1 and places[0].shape[0] % GROUP:
            yield 0, torch.cat([part.clone() for place in places for _, part in _rows_of(place, dtype)])
            return
        for place in places:
            for first, part in _rows_of(place, dtype):
                yield begin + first, part
            begin += place.shape[0]

    def __repr__(self) -> str:
        return f"<SafetensorsWeights {len(self._places)} tensors in {len(self._files)} files>"


def _rows_of(place: Place, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    assert place.dtype is not None, place
    for first, raw in place.file.slabs(place.start, math.prod(place.shape[:-1]), place.num_bytes):
        yield first, torch.from_numpy(raw).view(place.dtype).to(dtype)


def _places_of(file: FileBytes) -> Iterator[tuple[str, Place]]:
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
            yield key, Place(file, dtype, shape, _LENGTH + length + begin, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SafetensorsError(f"{name} is no complete safetensors file: {error}") from error
