"""The layout of the shared segment: a descriptor that both processes compute from the same few numbers.

Invariant: two `Layout`s with equal fields describe equal bytes; a header with other numbers is rejected. One process
writes each 128-byte line (the writer is named below), so no line is ever contended by two writers.

    HDR    offset 0, one page                                                             engine, once
           magic "LOCKSTEP" | u32 version | u32 header bytes | u64 generation | u64 total bytes
           | u32 num_slots, num_rows, vocab_size, num_recs | u64 strides and offsets | u32 crc32 of all that

    WORDS  one page, one word per 128-byte line
           +0    req_seq        u64  engine step      newest posted sequence; 0: none yet
           +128  abort          u64  engine watchdog  0 run, anything else: every wait of the engine ends at once
           +256  hb_engine      u64  engine host      CLOCK_MONOTONIC ns of its last heartbeat; 0: none yet
           +384  hb_grammar     u64  grammar          the same
           +512  permissive     u32  engine host      1: warm-up and capture, every row is answered ALL
           +640  grammar_parked u32  grammar          1: the process sleeps on req_seq, the poster must wake it
           +768  engine_parked  u32  engine step      1: the step sleeps on doorbell, the publisher must wake it
           +896  doorbell       u64  grammar          counts published answers

    REC    [num_recs] ring, entry seq % num_recs                                          engine step
           head  u64 seq | u32 n | u32 0 | u16 slots[num_slots]                           n slots are in this record
           [num_slots] by slot, rec_stride apart:
                 u64 seq | u32 slot_gen | u32 commit_pos | u16 n_commit | u8 n_draft | u8 stage | u32 need_rows
                 | i32 tokens[2R - 1]                 n_commit committed, then n_draft drafts, without a gap

    ANS    [num_slots], ans_stride apart                                                  grammar
           u64 seq | u32 slot_gen | u8 kind[R] (padded to 4) | i32 forced[R] (padded to 8) | u64 late
                 late = seq: published with rows missing; each changes once from DEFER, then late to 0 after the last

    MASK   [2][num_slots][R], row_stride apart; buffer = seq & 1                          grammar
           W little-endian words, bit v % 32 of word v / 32: token v is legal; the rest of the stride is not defined

R = num_rows: the largest number of drafts of a step, plus one. Row j is the mask of the token that follows drafts[:j].
`commit_pos` is the number of answer tokens that were committed before the tokens of the record. Handling a record
twice, known by (slot_gen, commit_pos), must change nothing. Not responsible for: memory (see segment.py), ordering
(see native/flags.c), and the meaning of the calls (see channel.py).
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass

from shared_mem.errors import InvalidField, LayoutError, VersionSkew

LAYOUT_VERSION = 7
"""Grows with every change of the bytes above or of their meaning; both processes must have the same version."""

MAX_ROWS = 16
MAX_SLOTS = 4096
MAX_VOCAB = 1 << 22
MAX_RECS = 1024

LINE = 128
"""Distance between words of different writers: two 64-byte lines, since CPUs prefetch in pairs."""

PAGE = 4096

_MAGIC = b"LOCKSTEP"
_PREFIX = struct.Struct("<8sII")
_FIELDS = struct.Struct("<QQIIII10Q")
_CRC = struct.Struct("<I")
HEADER_BYTES = _PREFIX.size + _FIELDS.size + _CRC.size
"""Bytes of `Layout.pack_header`."""


class RowKind(enum.IntEnum):
    """The grammar process's answer for one row."""

    ALL = 0
    """Every token is legal; the mask row is not written."""
    APPLY = 1
    """The mask row says which tokens are legal."""
    FORCED = 2
    """One token is legal: `forced`. The mask row says the same."""
    DEFER = 3
    """The answer is late: nothing may be emitted at this position in this step."""
    DEAD_END = 4
    """No token is legal: the request ends."""
    ERROR = 5
    """The matcher rejected a committed token, or failed: the request ends."""


STEERED = -2
"""In place of a forced token, at a row that is not FORCED: budgeted completion narrowed this row or an earlier one, so
that the answer ends within `max_tokens`."""


class Stage(enum.IntEnum):
    """The part of a step that posted a record."""

    VERIFY = 0
    """Committed tokens and a whole chain of drafts; R rows are wanted."""
    DRAFT = 1
    """One draft step; the k-th one is stage DRAFT + k."""
    PROPOSE = 64
    """Committed tokens and no drafts. Requests no row, but the jump-forward tokens after the committed ones, at most as
    many as `need_rows` has bits. The answer has FORCED and a token at k = 0, 1, ..., then another kind. They are
    proposals: no mask is written, and nothing is cached. The next record has the same committed tokens again."""
    FORK = 65
    """The slot's matcher becomes a copy of another slot's, at its first `commit_pos` tokens: the one committed token of
    the record is the number of that slot. With the record's own slot there, the matcher goes back. The record has a new
    slot_gen: a fork that gets lost leaves no matcher that the slot's next record fits. There is no answer. All records
    of such a post are forks."""
    TREE = 66
    """Committed tokens and a whole tree of drafts (`node`); R rows are wanted. Row j + 1 is the one after draft j and
    the drafts on the way to it. Only a GPU posts it, in place of VERIFY."""


PARENT_SHIFT = 24
"""Bits of the token in a draft of a TREE record; the parent is above them."""


def node(token: int, parent: int) -> int:
    """Return a draft of a tree as an int32 of a record. `parent`: 0 for the committed tokens, j + 1 for draft j."""
    return token | parent << PARENT_SHIFT


def token_of(draft: int) -> int:
    """Return the token of a draft."""
    return draft & (1 << PARENT_SHIFT) - 1


def parent_of(draft: int) -> int:
    """Return the parent of a draft; see `node`."""
    return draft >> PARENT_SHIFT


class Word(enum.IntEnum):
    """Offsets of the words from `Layout.words_offset`, in bytes; native/flags.h has the same numbers."""

    REQ_SEQ = 0
    ABORT = 128
    HB_ENGINE = 256
    HB_GRAMMAR = 384
    PERMISSIVE = 512
    GRAMMAR_PARKED = 640
    ENGINE_PARKED = 768
    DOORBELL = 896


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


def _require_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidField(field, f"{value} is not in [{low}, {high}]")


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of one segment. Sizes, strides and offsets are in bytes, from the start of the segment."""

    num_slots: int
    """Sequences that run at once, 1 to 4096."""
    num_rows: int
    """R, the largest number of drafts of a step, plus one: 1 to 16."""
    vocab_size: int
    """V: columns of the logits, padding included."""
    num_recs: int = 16
    """Entries of the record ring: so many posts may be unread."""
    generation: int = 1
    """Which segment of this engine; never 0, grows with every new one."""

    def __post_init__(self) -> None:
        _require_range("num_slots", self.num_slots, 1, MAX_SLOTS)
        _require_range("num_rows", self.num_rows, 1, MAX_ROWS)
        _require_range("vocab_size", self.vocab_size, 1, MAX_VOCAB)
        _require_range("num_recs", self.num_recs, 2, MAX_RECS)
        _require_range("generation", self.generation, 1, (1 << 64) - 1)

    @property
    def words(self) -> int:
        """W: 32-bit words of one mask."""
        return -(-self.vocab_size // 32)

    @property
    def row_stride(self) -> int:
        """Distance between mask rows; a multiple of 64."""
        return _align(self.words * 4, 64)

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of one record: R committed and R - 1 drafts."""
        return 2 * self.num_rows - 1

    @property
    def rec_head_bytes(self) -> int:
        """Head of a ring entry, before its first record."""
        return _align(16 + 2 * self.num_slots, LINE)

    @property
    def rec_stride(self) -> int:
        """Distance between the records of one ring entry; a multiple of 64."""
        return _align(24 + 4 * self.max_tokens, 64)

    @property
    def rec_entry_stride(self) -> int:
        """Distance between ring entries."""
        return _align(self.rec_head_bytes + self.num_slots * self.rec_stride, LINE)

    @property
    def ans_forced_offset(self) -> int:
        """`forced` inside an answer; `kind` is at 12."""
        return 12 + _align(self.num_rows, 4)

    @property
    def ans_late_offset(self) -> int:
        """`late` inside an answer."""
        return _align(self.ans_forced_offset + 4 * self.num_rows, 8)

    @property
    def ans_stride(self) -> int:
        """Distance between answers; whole lines, so that sidecar threads with different slots share none."""
        return _align(self.ans_late_offset + 8, LINE)

    @property
    def words_offset(self) -> int:
        """First word."""
        return PAGE

    @property
    def rec_offset(self) -> int:
        """First ring entry."""
        return 2 * PAGE

    @property
    def ans_offset(self) -> int:
        """Answer of slot 0."""
        return _align(self.rec_offset + self.num_recs * self.rec_entry_stride, PAGE)

    @property
    def mask_offset(self) -> int:
        """Row 0 of slot 0 in buffer 0."""
        return _align(self.ans_offset + self.num_slots * self.ans_stride, PAGE)

    @property
    def mask_buffer_bytes(self) -> int:
        """One of the two mask buffers."""
        return self.num_slots * self.num_rows * self.row_stride

    @property
    def total_bytes(self) -> int:
        """Size of the segment; whole pages."""
        return _align(self.mask_offset + 2 * self.mask_buffer_bytes, PAGE)

    def word_offset(self, word: Word) -> int:
        """Return the offset of one word."""
        return self.words_offset + word

    def rec_entry_offset(self, seq: int) -> int:
        """Return the offset of the ring entry that `seq` uses."""
        return self.rec_offset + (seq % self.num_recs) * self.rec_entry_stride

    def record_offset(self, seq: int, slot: int) -> int:
        """Return the offset of a slot's record under `seq`."""
        return self.rec_entry_offset(seq) + self.rec_head_bytes + slot * self.rec_stride

    def answer_offset(self, slot: int) -> int:
        """Return the offset of a slot's answer."""
        return self.ans_offset + slot * self.ans_stride

    def row_offset(self, seq: int, slot: int, row: int) -> int:
        """Return the offset of a mask row under `seq`."""
        return self.mask_offset + (seq & 1) * self.mask_buffer_bytes + (slot * self.num_rows + row) * self.row_stride

    def _derived(self) -> tuple[int, ...]:
        return (
            self.row_stride,
            self.rec_head_bytes,
            self.rec_stride,
            self.rec_entry_stride,
            self.ans_stride,
            self.words_offset,
            self.rec_offset,
            self.ans_offset,
            self.mask_offset,
            self.mask_buffer_bytes,
        )

    def pack_header(self) -> bytes:
        """Return HDR: `HEADER_BYTES` bytes for offset 0 of the segment."""
        fields = _FIELDS.pack(
            self.generation,
            self.total_bytes,
            self.num_slots,
            self.num_rows,
            self.vocab_size,
            self.num_recs,
            *self._derived(),
        )
        body = _PREFIX.pack(_MAGIC, LAYOUT_VERSION, HEADER_BYTES) + fields
        return body + _CRC.pack(zlib.crc32(body))

    @staticmethod
    def from_header(header: bytes) -> Layout:
        """Return the layout that `header` (the first bytes of a segment) describes.

        Raises:
            LayoutError: too short, not a segment, damaged, or its sizes do not match its shape.
            VersionSkew: written by another layout version.
        """
        if len(header) < _PREFIX.size:
            raise LayoutError(f"a header has at least {_PREFIX.size} bytes, this one {len(header)}")
        magic, version, header_bytes = _PREFIX.unpack_from(header)
        if magic != _MAGIC:
            raise LayoutError(f"not a segment: it starts with {magic!r}, not {_MAGIC!r}")
        if version != LAYOUT_VERSION:
            raise VersionSkew(ours=LAYOUT_VERSION, theirs=version)
        if header_bytes != HEADER_BYTES or len(header) < HEADER_BYTES:
            raise LayoutError(f"a header has {HEADER_BYTES} bytes, this one says {header_bytes} and has {len(header)}")
        body_bytes = HEADER_BYTES - _CRC.size
        (crc,) = _CRC.unpack_from(header, body_bytes)
        if crc != zlib.crc32(header[:body_bytes]):
            raise LayoutError("the header is damaged: its checksum does not fit")
        generation, total, slots, rows, vocab, recs, *derived = _FIELDS.unpack_from(header, _PREFIX.size)
        try:
            layout = Layout(slots, rows, vocab, recs, generation)
        except InvalidField as error:
            raise LayoutError(f"header: {error}") from error
        if total != layout.total_bytes or tuple(derived) != layout._derived():
            raise LayoutError("the header's sizes and offsets do not match its shape")
        return layout
