"""The kernels of flags.cu, compiled as C++ and run on a CPU with the native end of the grammar process."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_engine.step.device.pinned import segment_numbers
from kernels.cuda.flags import COUNTER_WORDS, refusal, wait_launch
from shared_mem.channel import EngineEnd, GrammarEnd, Record
from shared_mem.layout import Layout, RowKind, Stage, Word
from shared_mem.segment import Segment

SLOTS, ROWS, VOCAB = 6, 4, 100
LAST, CURRENT, WAITED_NS, MISSING = range(4)
SHORT_NS = 100_000_000
ATTEMPTS = 20

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on PATH")


@pytest.fixture(scope="module")
def library(root: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("flags") / "flags_emulation.so"
    source = root / "tests/kernels/flags_emulation.cpp"
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-o", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(target))


class Device:
    """The device's end of one segment, and the buffers of one batch."""

    def __init__(self, library: ctypes.CDLL, segment: Segment) -> None:
        self._library = library
        self.cfg = np.array(segment_numbers(segment.layout, segment.address).values(), dtype=np.int64)
        self.counter, self.refused = np.zeros(COUNTER_WORDS, dtype=np.uint64), np.zeros(1, dtype=np.uint64)
        self.mask_SRW = np.zeros((SLOTS, ROWS, segment.layout.row_stride // 4), dtype=np.int32)
        self.set([])

    def set(self, slots: list[int]) -> None:
        """Start a batch: lane i has generation 10 + i, one committed token and one draft."""
        B = len(slots)
        self.slots, self.gens = np.array(slots, dtype=np.int32), np.arange(10, 10 + B, dtype=np.int32)
        self.commit_pos, self.n_commit, self.n_draft = np.array([[7], [1], [1]], dtype=np.int32).repeat(B, 1)
        self.need_rows = np.full(B, 3, dtype=np.uint32)
        self.tokens_BT = np.arange(B * 2 * ROWS, dtype=np.int32).reshape(B, 2 * ROWS)
        self.kinds_BR, self.forced_BR = np.full((B, ROWS), 77, dtype=np.uint8), np.full((B, ROWS), 77, dtype=np.int32)

    def post(self, stage: int = Stage.VERIFY) -> int:
        inputs = (self.slots, self.gens, self.commit_pos, self.n_commit, self.n_draft, self.need_rows, self.tokens_BT)
        at = [ctypes.c_void_p(a.ctypes.data) for a in (self.cfg, self.counter, *inputs, self.refused)]
        self._library.emulate_post(*at, len(self.slots), int(stage))
        return int(self.counter[CURRENT])

    def wait(self, rows_wanted: int = (1 << ROWS) - 1, timeout_ns: int = SHORT_NS, *, fetches: bool = True) -> None:
        (x, y), _ = wait_launch(len(self.slots), rows_wanted, fetches=fetches)
        arrays = (self.cfg, self.counter, self.slots, self.gens, self.kinds_BR, self.forced_BR, self.mask_SRW)
        at = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
        self._library.emulate_wait(x, y, *at, ctypes.c_uint32(rows_wanted), ctypes.c_uint64(timeout_ns))


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(Layout(SLOTS, ROWS, VOCAB)) as made:
        yield made


@pytest.fixture
def device(library: ctypes.CDLL, segment: Segment) -> Device:
    return Device(library, segment)


def test_records_arrive_as_posted(device: Device, segment: Segment) -> None:
    grammar = GrammarEnd(segment)
    device.set([4, -1, 0])
    assert device.post(Stage.DRAFT + 2) == 1
    assert grammar.wait(0, 1.0) == 1
    expected = [Record(4, 10, 7, (0,), (1,), 3, 3), Record(0, 12, 7, (16,), (17,), 3, 3)]
    assert sorted(grammar.records(1)) == sorted(expected)
    device.set([-1, -1])
    assert device.post() == 0, "a batch without a slot posts nothing"
    assert int(device.counter[LAST]) == 1


def test_answers_and_their_mask_rows_are_copied(device: Device, segment: Segment) -> None:
    grammar = GrammarEnd(segment)
    device.set([4, -1, 0])
    seq = device.post()
    grammar.mask_rows(seq)[4, 0] = 5
    grammar.mask_rows(seq)[4, 2] = 6
    grammar.publish(seq, 4, 10, [RowKind.APPLY, RowKind.FORCED, RowKind.APPLY], [-1, 42, -1])
    grammar.publish(seq, 0, 11, [RowKind.ALL] * ROWS)  # for another generation of the slot
    device.wait(rows_wanted=0b0111)
    assert device.kinds_BR[:, :3].tolist() == [[1, 2, 1], [0, 0, 0], [3, 3, 3]]
    assert device.forced_BR[:, :3].tolist() == [[-1, 42, -1], [-1] * 3, [-1] * 3]
    assert device.kinds_BR[:, 3].tolist() == [77] * 3, "a row that is not wanted is unchanged"
    assert device.mask_SRW[4].max(axis=1).tolist() == [5, 0, 6, 0]
    assert int(device.counter[MISSING]) == 1


def test_one_block_a_lane_reads_every_row_of_a_proposal(device: Device, segment: Segment) -> None:
    grammar = GrammarEnd(segment)
    device.set([2, 3])
    seq = device.post(Stage.PROPOSE)
    grammar.publish(seq, 2, 10, [RowKind.FORCED] * 3, [5, 6, 7])
    grammar.publish(seq, 3, 11, [])
    device.wait(rows_wanted=0b111, fetches=False)
    assert device.kinds_BR[:, :3].tolist() == [[RowKind.FORCED] * 3, [RowKind.DEFER] * 3]
    assert device.forced_BR[0, :3].tolist() == [5, 6, 7]
    assert wait_launch(2, 0b111, fetches=False)[0] == (2, 1)
    assert wait_launch(2, 0b111, fetches=True)[0] == (2, 3), "a row that is not wanted has no block"


@pytest.mark.parametrize("fetches", [False, True])
def test_all_blocks_of_a_wait_share_one_deadline(device: Device, segment: Segment, fetches: bool) -> None:
    device.set([0, 1, 2, 3, 4, 5])

    def waited_ns(rows_wanted: int = (1 << ROWS) - 1) -> tuple[int, int]:
        """Return the time of a wait that nothing answers: by the clock, and as the device counts it."""
        before, begun = int(device.counter[WAITED_NS]), time.monotonic_ns()
        device.post()
        device.wait(rows_wanted, fetches=fetches)
        return time.monotonic_ns() - begun, int(device.counter[WAITED_NS]) - before

    # Blocks run one after another here, so separate deadlines of six lanes would take six times as long, always. A wait
    # on a busy machine may take long as well, but not each time.
    for attempt in range(1, ATTEMPTS + 1):
        took, counted = waited_ns()
        assert min(took, counted) >= SHORT_NS
        assert (device.kinds_BR == RowKind.DEFER).all()
        assert int(device.counter[MISSING]) == 6 * attempt
        if max(took, counted) < 5 * SHORT_NS:
            break
    else:
        pytest.fail(f"the last of {ATTEMPTS} waits took {took} ns")
    assert waited_ns(rows_wanted=1)[1] >= SHORT_NS, "the next wait has a new deadline"


def test_the_abort_word_ends_a_wait(device: Device, segment: Segment) -> None:
    EngineEnd(segment).set_abort()
    device.set([0])
    device.post()
    device.wait(timeout_ns=3600 * 10**9)
    assert (device.kinds_BR == RowKind.DEFER).all()


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("slots", SLOTS, -1),
        ("n_commit", ROWS + 1, -2),
        ("n_commit", -1, -2),
        ("n_draft", ROWS, -3),
        ("n_draft", -1, -3),
        ("commit_pos", -1, -4),
    ],
)
def test_an_invalid_record_posts_nothing_and_its_lane_is_reported(
    device: Device, segment: Segment, field: str, value: int, status: int
) -> None:
    engine = EngineEnd(segment)
    device.set([0, 1, -1, 3])
    device.n_commit[2] = 1000  # a lane without a slot is ignored
    getattr(device, field)[1] = value
    before = segment.memory.copy()
    assert device.post() == 0
    assert refusal(torch.from_numpy(device.refused.view(np.int64))) == (1, status)
    assert (segment.memory == before).all()
    assert engine.last_seq == 0
    device.set([0, 1])
    assert device.post(Stage.DRAFT) == 1
    assert refusal(torch.from_numpy(device.refused.view(np.int64))) == (1, status), (
        "the first refusal of the step remains"
    )
    assert device.post() == 2
    assert refusal(torch.from_numpy(device.refused.view(np.int64))) is None


def test_the_host_continues_from_the_sequence_of_the_device(device: Device, segment: Segment) -> None:
    engine = EngineEnd(segment)
    device.set([1])
    for _ in range(3):
        device.post()
    assert engine.last_seq == 3, "the segment's newest sequence, from either poster"
    arrays = engine.batch_arrays(1)
    arrays.slots[0] = 1
    assert engine.post_batch(arrays) == 4
    assert int(segment.memory[segment.layout.word_offset(Word.REQ_SEQ)]) == 4
