"""Tensors of the model that a request may ask for: which there are, which rows of them it wants, and rows on their way.

A row belongs to one position of prompt and answer, 0 being the first token of the prompt. The row of a token of the
answer is the row of the position before it, from which it was drawn.

Invariant: only values; a name that is in a `WantedOutput` is one of the model's. Not responsible for: checking names
(see front/outputs_field.py), computing rows (see step/outputs/tensors.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

LOGITS = "logits"
HIDDEN_STATES = "hidden_states."
"""Followed by the number of a layer: the states after that layer; 0: the states before the first one."""

MAX_ROW_BYTES = 16 << 20
"""The most bytes of one row of all outputs of a request."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The form of a tensor's rows."""

    dtype: str
    """ "float32", "bfloat16" or "float16"."""
    shape: tuple[int, ...]
    """The shape of one row."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return _BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """A tensor that a request asks for."""

    name: str
    """The name in the response."""
    source: str
    """Its name among the model's outputs."""
    spec: OutputSpec
    context: bool
    """Rows of the prompt's tokens."""
    answer: bool
    """Rows of the answer's tokens."""

    def rows(self, first: int, prompt_length: int, end: int) -> range:
        """Return the wanted positions below `end`. `first`: tokens of the prompt that the prefix cache had."""
        begin = first if self.context else prompt_length - 1
        return range(begin, max(begin, end if self.answer else min(end, prompt_length)))

    def most_rows(self, prompt_length: int, max_tokens: int) -> int:
        """Return how many rows there are at most."""
        both = self.context and self.answer
        return self.context * prompt_length + self.answer * max_tokens - both


@dataclass(frozen=True, slots=True, eq=False)
class OutputRows:
    """Rows of one tensor, from position `start` on."""

    name: str
    spec: OutputSpec
    start: int
    data: np.ndarray[Any, np.dtype[np.uint8]]
    """[rows, bytes of a row], little endian."""

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + len(self.data)

    def before(self, end: int) -> OutputRows:
        """Return the rows of positions below `end`."""
        return self if self.end <= end else OutputRows(self.name, self.spec, self.start, self.data[: end - self.start])

    def __repr__(self) -> str:
        return f"<OutputRows {self.name} [{self.start}, {self.end}) of {self.spec.dtype} {self.spec.shape}>"


def most_bytes(wanted: Iterable[WantedOutput], prompt_length: int, max_tokens: int) -> int:
    """Return the bytes of all rows that one sequence may have."""
    return sum(each.spec.row_bytes * each.most_rows(prompt_length, max_tokens) for each in wanted)


def row_bytes(wanted: Iterable[WantedOutput]) -> int:
    """Return the bytes of one row of each source."""
    return sum({each.source: each.spec.row_bytes for each in wanted}.values())
