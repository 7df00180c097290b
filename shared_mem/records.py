"""The records of one post, as the grammar process reads them: one record as a value, all of them as arrays.

Invariant: a private copy. The engine may overwrite the ring meanwhile, and any thread may read the copy. Not
responsible for: the copy itself (see grammar_end.py), and what a record asks for (see grammar_service/fill/).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_int32, c_void_p
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from shared_mem import native
from shared_mem.batch import Int32Array

NUM_FIELDS = 8
"""`LS_FIELDS` of native/chains.h: slot, slot_gen, commit_pos, n_commit, n_draft, stage, need_rows, first."""


class Record(NamedTuple):
    """One slot's record of one post."""

    slot: int
    slot_gen: int
    commit_pos: int
    """Answer tokens committed before `committed`."""
    committed: tuple[int, ...]
    drafts: tuple[int, ...]
    """Draft tokens; the nodes of a TREE record, see `shared_mem.layout.node`."""
    stage: int
    need_rows: int = 0xFFFFFFFF
    """Bit j set: row j is wanted."""


class _Arrays(ctypes.Structure):
    """`struct ls_record_arrays`."""

    _fields_: ClassVar = [("fields", c_void_p), ("tokens", c_void_p), ("count", c_int32), ("token_stride", c_int32)]


_plain = native.holding("ls_plain_records")
_plain.argtypes, _plain.restype = [c_void_p, c_void_p, c_int32, c_void_p], None


class Records:
    """The n records of one post. Each attribute that is a list has one entry per record and must not be changed.

    Args:
        seq: the sequence number of the post.
        fields: int32 [NUM_FIELDS, n], C-contiguous; this object keeps it.
        tokens: int32 [n, T], C-contiguous; this object keeps it.
    """

    def __init__(self, seq: int, fields: Int32Array, tokens: Int32Array) -> None:
        self.seq = seq
        self._fields, self._tokens = fields, tokens
        self._arrays: _Arrays | None = None
        lists: list[list[int]] = fields.tolist()
        self.slots, self.slot_gens, self.commit_pos, self.n_commit, self.n_draft, self.stage = lists[:6]
        self.need_rows = [rows & 0xFFFFFFFF for rows in lists[6]]
        """Wanted rows, one bit each."""
        self.first = lists[7]
        """The first wanted row, if every row after it is wanted too; else -1."""
        self.tokens: list[list[int]] = tokens.tolist()
        """`n_commit` committed tokens, then `n_draft` drafts, then tokens without a meaning."""

    @property
    def pointer(self) -> int:
        """Address of a `struct ls_record_arrays`, valid as long as this object."""
        if self._arrays is None:
            # Made on demand: a post with few records needs none.
            count, stride = self._tokens.shape
            fields, tokens = native.address_of(self._fields), native.address_of(self._tokens)
            self._arrays = _Arrays(fields, tokens, count, stride)
        return ctypes.addressof(self._arrays)

    def plain(self, table: npt.NDArray[np.uint8]) -> list[int]:
        """Return 1 for each record whose tokens t all have table[t] = 1, else 0. `table` is uint8 [vocab_size].

        The candidates of a proposal do not count.
        """
        out = np.zeros(len(self.slots), dtype=np.uint8)
        _plain(self.pointer, native.address_of(table), len(table), native.address_of(out))
        found: list[int] = out.tolist()
        return found

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: int) -> Record:
        at, end = self.n_commit[index], self.n_commit[index] + self.n_draft[index]
        tokens = self.tokens[index]
        return Record(
            self.slots[index],
            self.slot_gens[index],
            self.commit_pos[index],
            tuple(tokens[:at]),
            tuple(tokens[at:end]),
            self.stage[index],
            self.need_rows[index],
        )

    def __iter__(self) -> Iterator[Record]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"<Records of {self.seq}: {len(self)} slots>"
