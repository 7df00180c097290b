"""The header of a GGUF file: its metadata without the vocabulary, and where its tensors lie.

A vocabulary has some hundred thousand strings, which the library that reads whole files turns into as many arrays;
here they are passed over. Invariant: a header that was read names only tensors that lie in the file. Not responsible
for: the tokenizer, and what the tensors mean (see gguf_weights.py).

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""By the number of a type: how `struct` reads it."""
_LONG = 4096
"""Arrays with more elements belong to a vocabulary; their length is read, and not their elements."""
_HEADER = 1 << 30
"""No header is longer: a number beyond it is damaged."""


class GGUFError(ValueError):
    """A file that is no GGUF file, or not a complete one; the message does not name it."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    """In torch's order: outputs, then inputs."""
    kind: GGMLQuantizationType
    file: Path
    """The file that has it: a part, if the model has several."""
    start: int
    """In that file, in bytes."""
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, the last dimension."""
        return self.num_bytes // math.prod(self.shape[:-1])

    def part(self, number: int) -> GGUFTensor:
        """Return the matrix of one expert, of those that the tensor has stacked, under the tensor's name."""
        size = self.num_bytes // self.shape[0]
        return replace(self, shape=self.shape[1:], start=self.start + number * size, num_bytes=size)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind.name} {list(self.shape)})"


@dataclass(frozen=True, slots=True)
class _Entry:
    """A key of the metadata with its place in the file."""

    key: str
    value: Any
    """A number, a string, a list, or for a long array its length."""
    begin: int
    end: int
    is_long: bool


class GGUFHeader:
    """The header of one file, or of a model's parts.

    Args:
        path: the file. It may change afterwards: what is read later is then another model's.
        parts: the further parts of a model whose first part is `path`. Only their tensors are read.
    """

    def __init__(self, path: Path, parts: Sequence[Path] = ()) -> None:
        self.num_parts = 1 + len(parts)
        self.path, self.size = path, path.stat().st_size
        with path.open("rb") as file:
            self._bytes = _Bytes(np.memmap(file, np.uint8, "r") if self.size else np.empty(0, np.uint8))
        try:
            self._read()
        except (struct.error, UnicodeDecodeError) as error:
            raise GGUFError(f"its header is damaged, or ends too early: {error}") from error
        del self._bytes
        expected = self._values.get("split.count", 1)
        if parts and expected != self.num_parts:
            raise GGUFError(f"it says that it has {expected} parts, and its name that it has {self.num_parts}")
        for part in parts:
            self._add(part)
        count = self._values.get("split.tensors.count", len(self.tensors))
        if parts and count != len(self.tensors):
            raise GGUFError(f"its parts have {len(self.tensors)} tensors of {count}")

    def _add(self, part: Path) -> None:
        try:
            tensors = GGUFHeader(part).tensors
        except GGUFError as error:
            raise GGUFError(f"{part.name}: {error}") from error
        if twice := sorted(tensors.keys() & self.tensors.keys()):
            raise GGUFError(f"{part.name} has {twice[0]}, which an earlier part has")
        self.tensors |= tensors

    def _read(self) -> None:
        source = self._bytes
        if source.take(4) != _MAGIC:
            raise GGUFError("it does not begin with the four bytes GGUF")
        (version,) = source.numbers("I")
        if version not in _VERSIONS:
            raise GGUFError(f"it has version {version} of the format, and versions 2 and 3 are read")
        count, num_entries = source.numbers("QQ")
        self._version, self._entries = version, [self._entry() for _ in range(num_entries)]
        self._values = {entry.key: entry.value for entry in self._entries}
        places = [self._place() for _ in range(count)]
        alignment = self._values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise GGUFError(f"general.alignment is {alignment!r}, and must be a positive integer")
        begin = -(-source.at // alignment) * alignment
        self.tensors = {place[0]: self._tensor(*place, begin) for place in places}
        self.architecture = str(self._values.get("general.architecture", ""))
        self._fixed = [(e.key, source.between(e.begin, e.end)) for e in self._entries if not e.is_long]

    def _entry(self) -> _Entry:
        source, begin = self._bytes, self._bytes.at
        key = source.string()
        (kind,) = source.numbers("I")
        value, is_long = self._value(kind)
        return _Entry(key, value, begin, source.at, is_long)

    def _value(self, kind: int) -> tuple[Any, bool]:
        source = self._bytes
        if kind == _STRING:
            return source.string(), False
        if kind != _ARRAY:
            return source.numbers(_format(kind))[0], False
        of, count = source.numbers("IQ")
        if of == _STRING and count > _LONG:
            for _ in range(count):
                source.skip(source.numbers("Q")[0])
            return count, True
        if of == _STRING:
            return [source.string() for _ in range(count)], False
        if count > _LONG:
            source.skip(count * struct.calcsize(f"<{_format(of)}"))
            return count, True
        return list(source.numbers(f"{count}{_format(of)}")), False

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        source = self._bytes
        name = source.string()
        (dims,) = source.numbers("I")
        shape = source.numbers(f"{dims}Q")
        kind, offset = source.numbers("IQ")
        return name, tuple(reversed(shape)), kind, offset

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int, begin: int) -> GGUFTensor:
        try:
            kind = GGMLQuantizationType(number)
            in_block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise GGUFError(f"{name} has the type {number}, which is not known here") from None
        if not shape or shape[-1] % in_block:
            raise GGUFError(f"{name} is {list(shape)}, no whole blocks of {in_block}")
        size = math.prod(shape) // in_block * block_bytes
        if begin + offset + size > self.size:
            raise GGUFError(f"{name} ends at byte {begin + offset + size}, and the file has {self.size}")
        return GGUFTensor(name, shape, kind, self.path, begin + offset, size)

    @property
    def is_known(self) -> bool:
        """Whether the architecture is one that llama.cpp has; few of them are served."""
        return self.architecture in MODEL_ARCH_NAMES.values()

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return a value of the metadata; for a long array its length. "{arch}" stands for the architecture."""
        return self._values.get(key.format(arch=self.architecture), otherwise)

    def without_vocabulary(self, *, counted: bool = False) -> bytes:
        """Return a file of this metadata without its long arrays, and of tensors with these names and no elements.

        It has what a configuration is made from. The size of the vocabulary is a key of its own there; if it is
        `counted`, the vocabulary is an array of as many empty strings.
        """
        entries = [raw for _, raw in self._fixed]
        size = self.get("tokenizer.ggml.tokens")
        if counted and isinstance(size, int):
            entries.append(
                _string("tokenizer.ggml.tokens") + struct.pack("<IIQ", _ARRAY, _STRING, size) + bytes(8 * size)
            )
        if size is not None and self.get("{arch}.vocab_size") is None:
            count = size if isinstance(size, int) else len(size)
            entries.append(_string(f"{self.architecture}.vocab_size") + struct.pack("<II", 4, count))
        table = [_string(name) + struct.pack("<IQIQ", 1, 0, 0, 0) for name in self.tensors]
        head = _MAGIC + struct.pack("<IQQ", self._version, len(table), len(entries))
        raw = b"".join([head, *entries, *table])
        return raw + bytes(-len(raw) % int(self.get("general.alignment", 32)) + 32)

    def __repr__(self) -> str:
        return f"<GGUFHeader {self.architecture} {len(self.tensors)} tensors>"


class _Bytes:
    """Reads a file's header from its begin on. Raises struct.error at the end of the file."""

    def __init__(self, source: Any) -> None:
        self._view, self.at = memoryview(source), 0

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Return the next numbers."""
        found = struct.unpack_from(f"<{form}", self._view, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def skip(self, count: int) -> None:
        """Pass over bytes."""
        if not 0 <= count <= min(_HEADER, len(self._view) - self.at):
            raise struct.error(f"{count} bytes at byte {self.at} of {len(self._view)}")
        self.at += count

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        begin = self.at
        self.skip(count)
        return self.between(begin, self.at)

    def between(self, begin: int, end: int) -> bytes:
        """Return bytes that were read."""
        return bytes(self._view[begin:end])

    def string(self) -> str:
        """Return the next string."""
        return self.take(self.numbers("Q")[0]).decode()


def _format(kind: int) -> str:
    if kind not in _NUMBERS:
        raise struct.error(f"a value has the type {kind}")
    return _NUMBERS[kind]


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
