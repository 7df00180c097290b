"""The layout of the segment: its arithmetic, its header, and the same bytes in C and Python."""

from __future__ import annotations

import dataclasses
import itertools
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from shared_mem import native
from shared_mem.channel import EngineEnd, GrammarEnd
from shared_mem.errors import InvalidField, LayoutError, VersionSkew
from shared_mem.layout import HEADER_BYTES, LAYOUT_VERSION, PAGE, Layout, RowKind, Word
from shared_mem.segment import Segment

SHAPES = [
    Layout(num_slots=slots, num_rows=rows, vocab_size=vocab, num_recs=recs)
    for slots, rows, vocab, recs in itertools.product((1, 3, 64), (1, 4, 16), (1, 1000, 151936), (2, 16))
]


@pytest.mark.parametrize("layout", SHAPES, ids=str)
def test_regions_follow_each_other_without_overlap(layout: Layout) -> None:
    ends = [
        (0, HEADER_BYTES),
        (layout.words_offset, max(Word) + 128),
        (layout.rec_offset, layout.num_recs * layout.rec_entry_stride),
        (layout.ans_offset, layout.num_slots * layout.ans_stride),
        (layout.mask_offset, 2 * layout.mask_buffer_bytes),
        (layout.total_bytes, 0),
    ]
    for (start, size), (after, _) in itertools.pairwise(ends):
        assert start + size <= after
        assert after % PAGE == 0


@pytest.mark.parametrize("layout", SHAPES, ids=str)
def test_strides_hold_their_content_and_are_aligned(layout: Layout) -> None:
    rows = layout.num_rows
    assert layout.words == (layout.vocab_size + 31) // 32
    assert layout.row_stride % 64 == 0
    assert layout.row_stride >= layout.words * 4
    assert layout.rec_stride % 64 == 0
    assert layout.rec_stride >= 24 + 4 * (2 * rows - 1)
    assert layout.rec_head_bytes >= 16 + 2 * layout.num_slots
    assert layout.ans_stride % 128 == 0
    assert layout.ans_stride >= 12 + rows + 4 * rows + 8
    assert layout.ans_forced_offset % 4 == 0
    last_row = layout.row_offset(1, layout.num_slots - 1, rows - 1)
    assert last_row + layout.row_stride <= layout.total_bytes


def test_every_word_has_its_own_cache_lines() -> None:
    assert all(offset % 128 == 0 for offset in Word)
    assert len(set(Word)) == len(Word)


@pytest.mark.parametrize("layout", SHAPES, ids=str)
def test_header_round_trip(layout: Layout) -> None:
    assert Layout.from_header(layout.pack_header()) == layout
    assert Layout.from_header(layout.pack_header() + bytes(100)) == layout
    assert len(layout.pack_header()) == HEADER_BYTES


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_slots", 0),
        ("num_slots", 4097),
        ("num_rows", 0),
        ("num_rows", 17),
        ("vocab_size", 0),
        ("num_recs", 1),
        ("generation", 0),
    ],
)
def test_the_error_of_a_field_out_of_range_names_the_field(field: str, value: int) -> None:
    with pytest.raises(InvalidField, match=f"^{field}: {value} is not in") as caught:
        dataclasses.replace(Layout(4, 4, 1000), **{field: value})
    assert caught.value.field == field


def test_the_error_of_version_skew_names_both_versions() -> None:
    header = bytearray(Layout(4, 4, 1000).pack_header())
    struct.pack_into("<I", header, 8, LAYOUT_VERSION + 41)
    with pytest.raises(
        VersionSkew, match=f"version {LAYOUT_VERSION} here, {LAYOUT_VERSION + 41} in the peer"
    ) as caught:
        Layout.from_header(bytes(header))
    assert (caught.value.ours, caught.value.theirs) == (LAYOUT_VERSION, LAYOUT_VERSION + 41)


@pytest.mark.parametrize("position", range(0, HEADER_BYTES, 5))
def test_a_damaged_header_is_rejected(position: int) -> None:
    header = bytearray(Layout(4, 4, 1000).pack_header())
    header[position] ^= 0x40
    with pytest.raises((LayoutError, VersionSkew)):
        Layout.from_header(bytes(header))


@pytest.mark.parametrize("size", [0, 7, 20, HEADER_BYTES - 1])
def test_a_short_header_is_rejected(size: int) -> None:
    with pytest.raises(LayoutError):
        Layout.from_header(Layout(4, 4, 1000).pack_header()[:size])


def test_c_has_the_same_word_offsets_and_abi() -> None:
    # The checkout's: a wheel has no C sources.
    header = (Path(__file__).parents[2] / "shared_mem" / "native" / "flags.h").read_text()
    names = {name: int(value) for name, value in re.findall(r"LS_(\w+) = (-?\d+)", header)}
    assert {word.name: names[word.name] for word in Word} == {word.name: word.value for word in Word}
    assert re.findall(r"#define LS_ABI (\d+)", header) == [str(native.ABI)]
    statuses = ("OK", "EMPTY", "NOT_IN_RING", "BAD_SLOT", "BAD_N_COMMIT", "BAD_N_DRAFT", "BAD_COMMIT_POS")
    assert {name: names[name] for name in statuses} == {name: getattr(native, name) for name in statuses}


def test_c_writes_records_at_the_offsets_of_the_layout(segment: Segment, layout: Layout) -> None:
    engine = EngineEnd(segment)
    engine.post([0], [1], [0], [0], [0], [[0] * 6])
    seq = engine.post([3, 1], [9, 8], [70, 60], [3, 1], [2, 0], [[1, 2, 3, 4, 5, 0], [6, 0, 0, 0, 0, 0]], stage=2)
    memory = segment.memory.tobytes()
    entry = layout.rec_entry_offset(seq)
    assert struct.unpack_from("<QII2H", memory, entry) == (seq, 2, 0, 3, 1)
    record = struct.unpack_from("<QIIHBBI5i", memory, layout.record_offset(seq, 3))
    assert record == (seq, 9, 70, 3, 2, 2, 0xFFFFFFFF, 1, 2, 3, 4, 5)
    assert struct.unpack_from("<QIIHBBIi", memory, layout.record_offset(seq, 1)) == (seq, 8, 60, 1, 0, 2, 0xFFFFFFFF, 6)
    assert struct.unpack_from("<Q", memory, layout.word_offset(Word.REQ_SEQ)) == (seq,)


def test_c_writes_answers_at_the_offsets_of_the_layout(segment: Segment, layout: Layout) -> None:
    end = GrammarEnd(segment)
    assert end.publish(5, 2, 4, [RowKind.APPLY, RowKind.FORCED], [-1, 77])
    at = layout.answer_offset(2)
    memory = segment.memory.tobytes()
    assert struct.unpack_from("<QI3B", memory, at) == (5, 4, RowKind.APPLY, RowKind.FORCED, RowKind.DEFER)
    assert struct.unpack_from("<3i", memory, at + layout.ans_forced_offset) == (-1, 77, -1)
    assert struct.unpack_from("<Q", memory, at + layout.ans_late_offset) == (0,)
    assert struct.unpack_from("<Q", memory, layout.word_offset(Word.DOORBELL)) == (1,)


def test_mask_rows_are_at_their_addresses(segment: Segment, layout: Layout) -> None:
    engine, grammar = EngineEnd(segment), GrammarEnd(segment)
    for seq, slot, row in itertools.product((4, 5), range(layout.num_slots), range(layout.num_rows)):
        grammar.mask_rows(seq)[slot, row] = np.int32(seq * 1000 + slot * 10 + row)
    for seq, slot, row in itertools.product((4, 5), range(layout.num_slots), range(layout.num_rows)):
        offset = grammar.row_address(seq, slot, row) - segment.address
        assert offset == layout.row_offset(seq, slot, row)
        words = segment.memory[offset : offset + layout.row_stride].view(np.int32)
        assert (words == seq * 1000 + slot * 10 + row).all()
        assert (engine.mask_rows(seq)[slot, row] == words).all()
    assert engine.mask_address(5) - engine.mask_address(4) == layout.mask_buffer_bytes
