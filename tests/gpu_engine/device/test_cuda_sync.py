"""How the sync of a CUDA device begins, with stand-ins for its kernels and without a registered segment."""

from __future__ import annotations

import pytest

from gpu_engine.step.device.pinned import PinnedSegment
from kernels.cuda.flags import SegmentNumbers
from shared_mem.channel import EngineEnd
from shared_mem.layout import Layout
from shared_mem.segment import Segment
from tests.gpu_engine.device.bench_of_toys import MODES
from tests.gpu_engine.device.fake_flags import FakeFlags
from tests.gpu_engine.device.recorded_stream import RecordedStream


@pytest.mark.parametrize("mode", MODES)
def test_a_second_sync_on_a_channel_begins_behind_the_newest_sequence(mode: str) -> None:
    pytest.importorskip("triton")
    from gpu_engine.step.device.cuda_sync import cuda_sync

    stream, begins = RecordedStream(), []
    with Segment.create(Layout(2, 2, 64)) as segment:
        channel = EngineEnd(segment)

        def make_flags(numbers: SegmentNumbers, start_seq: int) -> FakeFlags:
            begins.append((numbers.num_slots, start_seq))
            return FakeFlags(channel)

        # A device posts without the channel, as this second end does.
        device = EngineEnd(segment)
        try:
            for _ in range(2):
                cuda_sync(mode, stream, channel, PinnedSegment(segment), row_timeout_ms=1.0, make_flags=make_flags)
                for _ in range(3):
                    device.post([0], [1], [0], [0], [0], [[0]])
        finally:
            stream.close()
    assert begins == [(2, 0), (2, 3)]
