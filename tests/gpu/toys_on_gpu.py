"""The toy step of tests/gpu_engine/device on a GPU: CudaStream, the registered segment, compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpu_engine.step.device.cuda_stream import CudaStream
from gpu_engine.step.device.cuda_sync import cuda_sync
from gpu_engine.step.device.pinned import PinnedSegment
from shared_mem.channel import EngineEnd
from shared_mem.layout import Layout
from shared_mem.segment import Segment
from tests.gpu_engine.device.bench_of_toys import ROWS, SLOTS, Toys, build_executor
from tests.gpu_engine.tiny import VOCAB

BIG_VOCAB = 128_256


@contextmanager
def toys_on_gpu(
    mode: str,
    *,
    eager: bool = False,
    drafts: int = ROWS - 1,
    row_timeout_ms: float = 20_000.0,
    draft_timeout_ms: float = 20_000.0,
    vocab: int = VOCAB,
) -> Iterator[Toys]:
    """As `toys`, on a GPU; the graphs are destroyed before the segment is unregistered."""
    with Segment.create(Layout(SLOTS, ROWS, vocab)) as segment, PinnedSegment(segment) as pinned:
        channel, stream = EngineEnd(segment), CudaStream()
        stream.activate()
        try:
            timeouts = {"row_timeout_ms": row_timeout_ms, "draft_timeout_ms": draft_timeout_ms}
            sync = cuda_sync(mode, stream, channel, pinned, **timeouts)
            toys = Toys(*build_executor(segment, channel, sync, eager=eager, drafts=drafts))
            try:
                yield toys
            finally:
                toys.graphs.close()
        finally:
            torch.cuda.set_stream(torch.cuda.default_stream())
