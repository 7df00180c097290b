"""Puts an engine's machinery together for its device: what seats, prefills, steps and meets the grammar process.

On a CPU the program runs at the launch. On a CUDA device it is captured and replayed; `device_executor` does that over
any `Stream`. One invariant: what is registered or captured here is given back by `close`, in the opposite order. Not
here: who runs (scheduler.py), the order of a turn (loop.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.core.device_prefill import DevicePrefill
from gpu_engine.core.device_running import DeviceSlotWriter
from gpu_engine.core.graph_runner import GraphRunner
from gpu_engine.core.runner import StepRunner, SynchronousRunner
from gpu_engine.core.running import SequenceState, SlotWriter
from gpu_engine.core.scheduler import Chunk
from gpu_engine.drafters.build import build_device_drafter, build_drafter
from gpu_engine.model.loader import LoadedModel
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers
from gpu_engine.step.device.graphs import StepGraphs, StepRows, lane_buckets
from gpu_engine.step.device.ring import OutputRing
from gpu_engine.step.device_program import DeviceStep, FreeSync
from gpu_engine.step.program import StepProgram
from gpu_engine.step.stream import CudaStream, Stream
from gpu_engine.step.sync import InlineSync, NoSync, Sync
from kernels.cuda.row_state import DeviceRows, RowScratch, SlotRows
from shared_mem.channel import EngineEnd

if TYPE_CHECKING:
    from gpu_engine.step.device.syncs import DeviceFlagSync, HostCallbackSync

MAX_RULES = 512
"""Numbers of one slot's stops and bans on a device."""


@dataclass(frozen=True, slots=True)
class Executor:
    """What the loop drives. Everything but `slot_writer.check` is the engine thread's once that runs."""

    slot_writer: SlotWriter
    sync: Sync
    runner: StepRunner
    prefill: Callable[[tuple[Chunk[SequenceState], ...]], None]
    """Fill the caches with these chunks of different sequences, which fit one of the configuration's shapes."""
    warm_up: Callable[[], None]
    """Run every shape once; capture. Before the first request, after `enter`."""
    enter: Callable[[], None]
    """To be called on a thread before it calls anything else here."""
    probe: Callable[[], None]
    """Wait for the device. Raises when it can run nothing any more: errors of a device are for good."""
    close: Callable[[], None]
    """Wait for the device and free what it may have used. Once, at the end."""


class BuildExecutor(Protocol):
    """How an engine gets its machinery; a test gives another one."""

    def __call__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        channel: EngineEnd | None,
        num_pages: int,
        max_inflight_steps: int,
    ) -> Executor:
        """Allocate everything for steps of `max_inflight_steps` in flight."""


def build_executor(
    config: EngineConfig, model: LoadedModel, channel: EngineEnd | None, num_pages: int, max_inflight_steps: int
) -> Executor:
    """Return the machinery of `config.device`."""
    if model.device.type == "cpu":
        return _cpu_executor(config, model, channel, num_pages, max_inflight_steps)
    return cuda_executor(config, model, channel, num_pages, max_inflight_steps)


def _history_tokens(config: EngineConfig, model: LoadedModel, max_inflight_steps: int) -> int:
    """Return the longest history: every step in flight may write R tokens behind the last that the host knows."""
    return model.max_model_len + config.num_rows * (max_inflight_steps + 1)


def _cpu_executor(
    config: EngineConfig, model: LoadedModel, channel: EngineEnd | None, num_pages: int, max_inflight_steps: int
) -> Executor:
    S, R = config.max_batch_size, config.num_rows
    slot_writer = SlotWriter(
        SlotBuffers.allocate(S, R, _history_tokens(config, model, max_inflight_steps), config.page_size),
        LaneBuffers.allocate(S, R, model.vocab_size),
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        num_drafts=config.num_drafts,
        step_rows=config.max_step_rows,
    )
    sync: InlineSync | NoSync = NoSync()
    if channel is not None:
        timeouts = {"row_timeout_ms": config.row_timeout_ms, "draft_timeout_ms": config.draft_timeout_ms}
        sync = InlineSync(channel, S, **timeouts)
    drafter = build_drafter(config, model, sync, num_pages)
    program = StepProgram(model, model.allocate_pages(num_pages, config.page_size), sync, drafter)

    def prefill(chunks: tuple[Chunk[SequenceState], ...]) -> None:
        for chunk in chunks:
            program.prefill(slot_writer.one(chunk.sequence), chunk.start, chunk.end)

    def warm_up() -> None:
        for num_rows in sorted({1, R}):
            program.warm_up(slot_writer.slot, slot_writer.lane, num_rows)

    runner = SynchronousRunner(program, slot_writer, max_inflight_steps)

    def nothing() -> None:
        pass

    return Executor(slot_writer, sync, runner, prefill, warm_up, enter=nothing, probe=nothing, close=nothing)


def cuda_executor(
    config: EngineConfig,
    model: LoadedModel,
    channel: EngineEnd | None,
    num_pages: int,
    max_inflight_steps: int,
    *,
    stream: CudaStream | None = None,
) -> Executor:
    """Register the segment, compile, and assemble over a CUDA stream on the model's device; None: an own one."""
    from gpu_engine.step.device.pinned import PinnedSegment
    from gpu_engine.step.device.syncs import cuda_sync

    with torch.cuda.device(model.device), ExitStack() as stack:
        stream = stream or CudaStream(model.device)
        sync: HostCallbackSync | DeviceFlagSync | None = None
        if channel is not None:
            pinned = stack.enter_context(PinnedSegment(channel.segment))
            timeouts = {"row_timeout_ms": config.row_timeout_ms, "draft_timeout_ms": config.draft_timeout_ms}
            mode = "host_callback" if config.sync == "auto" else config.sync
            sync = cuda_sync(mode, stream, channel, pinned, **timeouts)
        made = device_executor(config, model, channel, num_pages, max_inflight_steps, stream=stream, sync=sync)
        registered = stack.pop_all()

    def close() -> None:
        # Unregistered when the last replay has ended, also when that one failed.
        with torch.cuda.device(model.device), registered:
            made.close()

    return replace(made, enter=stream.activate, close=close)


def device_executor(
    config: EngineConfig,
    model: LoadedModel,
    channel: EngineEnd | None,
    num_pages: int,
    max_inflight_steps: int,
    *,
    stream: Stream,
    sync: HostCallbackSync | DeviceFlagSync | None,
) -> Executor:
    """Assemble over `stream`, on whose device the model is; `sync` over the same stream goes with a channel."""
    assert (channel is None) == (sync is None)
    S, R, V, device = config.max_batch_size, config.num_rows, model.vocab_size, stream.device
    meets: HostCallbackSync | DeviceFlagSync | FreeSync = sync or FreeSync(stream)
    # Every slot's rows begin at 16 bytes: Triton would compile a kernel anew for the first slot whose row does not.
    whole = 4 * config.page_size
    history_tokens = -(-(_history_tokens(config, model, max_inflight_steps) + R) // whole) * whole - R
    # One slot more than sequences have, for padded lanes and the warm-up.
    slot = SlotBuffers.allocate(S + 1, R, history_tokens, config.page_size, device)
    assert slot.page_table_SN.shape[1] % 4 == 0
    lane = LaneBuffers.allocate(S, R, V, device)
    masks_SRW = torch.zeros(1, 1, 4, dtype=torch.int32, device=device) if sync is None else sync.store.mask_SRW
    rows = SlotRows.allocate(S + 1, V, masks_SRW, slot.done_S, max_rules=MAX_RULES)
    ring = OutputRing(stream, lane, None if sync is None else sync.report)
    buckets, guided = lane_buckets(S), sync is not None
    step_rows = StepRows(config.num_drafts + 1, R, config.max_step_rows)
    pages = model.allocate_pages(num_pages, config.page_size, token_major=True)
    drafter = build_device_drafter(config, model, stream, meets, num_pages)
    step = DeviceStep(
        stream,
        model,
        pages,
        meets,
        drafter,
        slot,
        lane,
        DeviceRows(rows, RowScratch.allocate(max(b * step_rows.of(b, guided) for b in buckets), V, device)),
        ring,
    )
    graphs = StepGraphs(stream, step, slot, lane, ring, buckets, step_rows, guided=guided, eager=config.enforce_eager)
    told = {"max_model_len": model.max_model_len, "num_drafts": config.num_drafts}
    slot_writer = DeviceSlotWriter(stream, slot, lane, rows, eos_token_ids=model.eos_token_ids, **told)

    prefill = DevicePrefill(stream, model, pages, drafter, slot_writer, config.prefill_shapes)

    def warm_up() -> None:
        if sync is not None:
            sync.reserve(buckets)
        prefill.warm_up()  # before the first wait is captured
        graphs.capture(channel)

    return Executor(
        slot_writer,
        meets,
        GraphRunner(graphs, slot_writer, meets, max_inflight_steps),
        prefill,
        warm_up,
        enter=lambda: None,
        probe=stream.synchronize,
        close=graphs.close,
    )
