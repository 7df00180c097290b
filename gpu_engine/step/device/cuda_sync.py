"""Builds the sync of a CUDA device, with the kernels that it needs. Imports Triton, see triton_launches.py.

Invariant: kernels are compiled here, before any capture. Not responsible for: the mechanisms (see syncs.py).
"""

from __future__ import annotations

from collections.abc import Callable

from gpu_engine.step.device.pinned import PinnedSegment
from gpu_engine.step.device.syncs import DeviceFlagSync, FlagKernels, HostCallbackSync
from gpu_engine.step.device.triton_launches import TritonLaunches
from gpu_engine.step.stream import Stream
from kernels.cuda.flags import DeviceFlags, SegmentNumbers
from shared_mem.channel import EngineEnd


def cuda_sync(
    mode: str,
    stream: Stream,
    channel: EngineEnd,
    pinned: PinnedSegment,
    *,
    row_timeout_ms: float,
    draft_timeout_ms: float = 5.0,
    make_flags: Callable[[SegmentNumbers, int], FlagKernels] = DeviceFlags,
) -> HostCallbackSync | DeviceFlagSync:
    """Return the sync of a mode, "host_callback" or "device_flag", with everything that it needs on the current device.

    `pinned` is the registered segment of `channel`; it stays registered until the last graph over the sync is gone.
    `make_flags` compiles the kernels for the segment's numbers and its newest sequence.
    """
    # The kernels continue after the newest sequence in the segment, which an earlier executor may have posted.
    flags = make_flags(pinned.numbers(), channel.last_seq)
    # The fetch and the wait put rows into the store, which `cache_rows` reads.
    launches = TritonLaunches(flags.mask_SRW[None])
    timeouts = {"row_timeout_ms": row_timeout_ms, "draft_timeout_ms": draft_timeout_ms}
    match mode:
        case "host_callback":
            return HostCallbackSync(stream, channel, flags.mask_SRW, launches, flags, **timeouts)
        case "device_flag":
            return DeviceFlagSync(stream, channel, flags, launches, **timeouts)
    raise ValueError(f"mode: {mode!r} is not host_callback or device_flag")
