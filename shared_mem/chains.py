"""Rows of many slots that a matcher library has filled, before they are published: private arrays for one native call.

Invariant: the library writes only into these arrays, so that a call that never returns can be abandoned together with
its arrays; only `GrammarEnd.publish_chains` copies rows to the segment. One thread at a time. Not
responsible for: choosing the slots, and answering the chains that this call leaves out (see
grammar_service/fill/batch.py).
"""

from __future__ import annotations

import ctypes
import secrets
from ctypes import POINTER, c_int32, c_uint32, c_uint64, c_void_p
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from shared_mem import native
from shared_mem.batch import ByteArray, Int32Array
from shared_mem.layout import Layout, RowKind
from shared_mem.records import Records

DONE, STALE, SLOW = 0, 1, 2
"""States of a chain: `LS_CHAIN_...` in native/chains.h."""


class SpecialWords(NamedTuple):
    """Words of a row that hold tokens with special rules, or bits of no token. Arrays of one length."""

    at: Int32Array
    keep: npt.NDArray[np.uint32]
    """Bits of each word that are never cleared."""
    stops: npt.NDArray[np.uint32]
    """Bits of stop tokens; they are cleared where the answer is not complete."""


class _Args(ctypes.Structure):
    """`struct ls_chains_args`."""

    _fields_: ClassVar = [
        ("view", POINTER(native.View)),
        *((name, c_void_p) for name in ("rows", "masks", "special_at", "special_keep", "special_stops")),
        *((name, c_void_p) for name in ("which", "slots", "slot_gens", "first", "n_draft", "accepting", "states")),
        *((name, c_void_p) for name in ("drafts", "kinds", "forced", "tallies", "published")),
        ("seq", c_uint64),
        ("mark", c_uint64),
        ("row_stride", c_uint32),
        ("words", c_uint32),
        ("vocab_size", c_uint32),
        ("num_special", c_int32),
        ("count", c_int32),
        ("publishes", c_int32),
        ("answered", c_int32),
        ("num_rows", c_int32),
    ]

    answered: int
    num_rows: int


_take = native.holding("ls_take_chains")
_take.argtypes, _take.restype = [c_void_p, c_void_p], None
_publish = native.releasing("ls_publish_chains")
_publish.argtypes, _publish.restype = [c_void_p], None
_publish_answers = native.holding("ls_publish_answers")
_publish_answers.argtypes, _publish_answers.restype = [c_void_p], None


class ChainArrays:
    """At most `max_chains` chains: `take` records, let the library write `rows`, then `publish`; or `take` records,
    write `kinds` and `forced`, then `publish_answers`.

    A chain is the rows `first`, `first` + 1, ... `n_draft` of one slot's answer, and the drafts between them.
    """

    which: Int32Array
    """[max_chains] numbers of the records, written by `take`."""
    slots: Int32Array
    """[max_chains] written by `take`."""
    slot_gens: Int32Array
    """[max_chains] written by `take`."""
    first: Int32Array
    """[max_chains] written by `take`: the first row that is wanted."""
    n_draft: Int32Array
    """[max_chains] written by `take`: drafts of the record; the last row."""
    drafts: Int32Array
    """[max_chains, R] written by `take`: the drafts after the first row, each a token of the vocabulary."""
    accepting: ByteArray
    """[max_chains] in: 1 where the answer is complete at the first row."""
    states: ByteArray
    """[max_chains] in: SLOW leaves a chain out (`take` sets DONE); out: DONE, STALE or SLOW."""
    kinds: ByteArray
    """[max_chains, R] out of `publish`, in of `publish_answers`."""
    forced: Int32Array
    """[max_chains, R] like `kinds`."""

    def __init__(self, layout: Layout, max_chains: int) -> None:
        rows = layout.num_rows
        self.max_chains, self.count = max_chains, 0
        self.rows = np.zeros((max_chains * rows, layout.words), dtype=np.int32)
        """[max_chains * R, W] in, by the library: row `first` of chain i at i * R, and so on."""
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
            ("which", "slots", "slot_gens", "first", "n_draft"), (max_chains,)
        )
        shapes |= dict.fromkeys(("drafts", "forced"), (max_chains, rows))
        for name, shape in shapes.items():
            setattr(self, name, np.zeros(shape, dtype=np.int32))
        self.accepting, self.states = np.zeros((2, max_chains), dtype=np.uint8)
        self.kinds = np.zeros((max_chains, rows), dtype=np.uint8)
        self._args = _Args(row_stride=layout.row_stride, words=layout.words, vocab_size=layout.vocab_size)
        for name in (*shapes, "rows", "accepting", "states", "kinds"):
            setattr(self._args, name, native.address_of(getattr(self, name)))
        self._pointer = ctypes.addressof(self._args)
        self._references: tuple[object, ...] = ()
        self._special: SpecialWords | None = None

    def bind(self, view: native.View, tallies: npt.NDArray[np.int64], published: npt.NDArray[np.int64]) -> None:
        """Set the view that answers are published to, the row counts, int64 [num_slots, kinds], and the counts of
        published and of stale answers, int64 [2, num_slots]. Holds references to all of them."""
        for name, array, shape in (
            ("tallies", tallies, (view.num_slots, len(RowKind))),
            ("published", published, (2, view.num_slots)),
        ):
            if array.shape != shape or array.dtype != np.int64:
                raise ValueError(f"{name}: must be int64 {list(shape)}")
            setattr(self._args, name, native.address_of(array))
        self._args.view = ctypes.pointer(view)
        self._references = (view, tallies, published)

    def take(self, records: Records, which: list[int]) -> None:
        """Take the records of these numbers, at most `max_chains`, and mark every row as not written.

        Each record has a first wanted row, and each of its tokens is a token of the vocabulary.
        """
        self.count = self._args.count = len(which)
        self.which[: self.count] = which
        self._args.mark = secrets.randbits(64)
        _take(self._pointer, records.pointer)

    def publish(self, seq: int, masks: int, special: SpecialWords, *, publishes: bool) -> None:
        """Classify the rows of the taken chains, copy them to the mask buffer at `masks`, and publish.
        Releases the GIL.

        `publishes` False: does not publish.
        """
        args = self._args
        args.seq, args.masks, args.publishes = seq, masks, publishes
        if special is not self._special:
            self._special = special
            args.num_special = len(special.at)
            args.special_at, args.special_keep, args.special_stops = map(native.address_of, special)
        _publish(self._pointer)

    def publish_answers(self, seq: int) -> None:
        """Publish `kinds` and `forced` of the taken chains."""
        self._args.seq = seq
        _publish_answers(self._pointer)

    @property
    def num_answered(self) -> int:
        """Chains that `publish` handled."""
        return self._args.answered

    @property
    def num_rows(self) -> int:
        """Rows of these chains that were written."""
        return self._args.num_rows

    def __repr__(self) -> str:
        return f"ChainArrays(max_chains={self.max_chains}, {self.rows.nbytes >> 10} KiB of rows)"
