"""A graph of only a post and a wait, replayed very often, with both mechanisms: no row is stale, torn or lost.

Not responsible for: whole steps (see test_failures.py), which cannot be replayed as often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from benchmarks.gpu.sync_peer import attached
from gpu_engine.step.post_buffers import HostPostBuffers, PostBuffers
from shared_mem.channel import EngineEnd
from shared_mem.layout import Layout, RowKind
from shared_mem.segment import Segment
from tests.gpu_engine.device.bench_of_toys import MODES
from tests.gpu_engine.device.fake_flags import FakeFlags
from tests.gpu_engine.device.recorded_stream import RecordedStream, opaque

SLOTS, ROWS, VOCAB = 2, 2, 256
TIMEOUT_NS = 20 * 10**9
COUNT = 100_000
"""Replays of the long case, which take less than a minute; `python -m benchmarks bench_gpu` does a million on a GPU."""


class Pair:
    """Posts every slot, waits, and checks the rows; `wrong` and `missing` count words and rows."""

    def __init__(self, mode: str, stream: RecordedStream, channel: EngineEnd) -> None:
        self.mode, self.stream, self.channel, self.flags = mode, stream, channel, FakeFlags(channel)
        self.seen = self.wrong = self.missing = self.last = 0
        self.box: PostBuffers
        if mode == "host_callback":
            timeouts = {"timeout_ns": TIMEOUT_NS, "draft_timeout_ns": TIMEOUT_NS}
            self.box = HostPostBuffers(stream, channel, SLOTS, **timeouts)
        else:
            self.box = PostBuffers(SLOTS, ROWS, stream.device)
            self.box.awaited = self.flags.counter[1:2]
        self.box.slots.copy_(torch.arange(SLOTS))
        self.box.need_rows.fill_(-1)

    def enqueue(self) -> None:
        box = self.box
        if isinstance(box, HostPostBuffers):
            box.post(self.stream, 0)
            box.wait(self.stream, 0)
        else:
            inputs = (box.slots, box.slot_gens, box.commit_pos, box.n_commit, box.n_draft, box.need_rows, box.tokens)
            self.stream.kernel(self.flags.post, *inputs, 0)
            self.stream.kernel(self._wait)
        self.stream.kernel(opaque(self.check))

    def _wait(self) -> None:
        box = self.box
        outputs = (box.slots, box.slot_gens, box.kinds, box.forced)
        self.flags.wait(*outputs, rows_wanted=3, timeout_ns=TIMEOUT_NS)

    def check(self) -> None:
        seq, words = int(self.box.awaited), VOCAB // 32
        rows_SRW = self.channel.mask_rows(seq)[:, :, :words]
        self.missing += int((self.box.kinds != int(RowKind.APPLY)).sum()) or seq != self.last + 1
        self.wrong += int((rows_SRW != seq & 0x7FFFFFFF).sum())
        self.last, self.seen = seq, self.seen + 1


@contextmanager
def replays_of(mode: str) -> Iterator[tuple[Pair, Callable[[int], None]]]:
    """Yield the pair, and a function that replays its graph a number of times."""
    stream = RecordedStream()
    try:
        with Segment.create(Layout(SLOTS, ROWS, VOCAB)) as segment:
            pair = Pair(mode, stream, EngineEnd(segment))
            with stream.capture() as graph:
                pair.enqueue()
            with attached(segment, spin_us=20.0):

                def replay(count: int) -> None:
                    for done in range(count):
                        graph.replay()
                        if done % 1000 == 999:  # the queue of a real stream is bounded, too
                            stream.synchronize()
                    stream.synchronize()

                yield pair, replay
    finally:
        stream.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [2000, pytest.param(COUNT, marks=pytest.mark.slow)], ids=["short", "long"])
def test_every_replay_gets_the_rows_of_its_own_post(mode: str, count: int) -> None:
    with replays_of(mode) as (pair, replay):
        replay(count)
        assert (pair.seen, pair.missing, pair.wrong) == (count, 0, 0)
