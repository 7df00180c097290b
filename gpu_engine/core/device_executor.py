"""Builds the executor of an engine's steps on a device: graphs over a stream. Imports Triton.

`device_executor` works over any `Stream`; `cuda_executor` adds the CUDA stream, the registered segment and the sync.
Invariant: `close` releases everything that is registered or captured here, in the opposite order. Not responsible for:
the CPU's executor (see cpu_executor.py), assembling the parts (see executor.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
import triton

from gpu_engine.api.config import EngineConfig
from gpu_engine.core.device_slot_writer import DeviceSlotWriter
from gpu_engine.core.draft_budget import DraftBudget
from gpu_engine.core.executor import Executor, StepParts, WarmsUp, assemble, history_tokens
from gpu_engine.core.never_ran import say_what_never_ran
from gpu_engine.core.prefill_graphs import Prefill
from gpu_engine.drafters.build import Builder, captured_drafter
from gpu_engine.model.adapters.device_pool import DeviceAdapterPool
from gpu_engine.model.adapters.pool import AdapterPool
from gpu_engine.model.loader import LoadedModel
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers
from gpu_engine.step.device.adapter_copies import AdapterCopies
from gpu_engine.step.device.cuda_stream import CudaStream
from gpu_engine.step.device.cuda_sync import cuda_sync
from gpu_engine.step.device.graphs import StepGraphs, StepRows, lane_buckets
from gpu_engine.step.device.pinned import PinnedSegment
from gpu_engine.step.device.rank_graphs import AnnouncingStream
from gpu_engine.step.device.syncs import DeviceFlagSync, HostCallbackSync
from gpu_engine.step.device.triton_launches import TritonLaunches
from gpu_engine.step.output_ring import OutputRing
from gpu_engine.step.processing.processing import Processing
from gpu_engine.step.stream import Stream
from gpu_engine.step.sync import NoSync, Sync
from kernels.cuda.row_state import DeviceRows, RowScratch, SlotRows
from kernels.cuda.tree_acceptance import PathCompaction
from shared_mem.channel import EngineEnd

MAX_RULES = 512
"""Numbers of one slot's stops and bans on a device."""


def cuda_executor(
    config: EngineConfig,
    model: LoadedModel,
    channel: EngineEnd | None,
    num_pages: int,
    max_inflight_steps: int,
    *,
    stream: CudaStream | None = None,
) -> Executor:
    """Register the segment, compile, and build over a CUDA stream on the model's device; None: a new stream."""
    with torch.cuda.device(model.device), ExitStack() as stack:
        # A draft model's reading, hundreds of tokens at a time, is not to delay the many small kernels of a step.
        stream = stream or CudaStream(model.device, urgent=True)
        sync: HostCallbackSync | DeviceFlagSync | None = None
        if channel is not None:
            pinned = stack.enter_context(PinnedSegment(channel.segment))
            mode = "host_callback" if config.sync == "auto" else config.sync
            sync = cuda_sync(
                mode,
                stream,
                channel,
                pinned,
                row_timeout_ms=config.row_timeout_ms,
                draft_timeout_ms=config.draft_timeout_ms,
            )
        made = device_executor(config, model, channel, num_pages, max_inflight_steps, stream=stream, sync=sync)
        registered = stack.pop_all()

    def close() -> None:
        # The segment is unregistered when the last replay has ended, also when that one failed.
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
    drafter_builders: Mapping[str, Builder] | None = None,
) -> Executor:
    """Build over `stream`, on whose device the model is. A channel needs a `sync` over the same stream."""
    assert (channel is None) == (sync is None)
    say_what_never_ran(config, stream.device, triton.__version__, recurrent=bool(model.recurrent))
    if model.ranks is not None:
        assert model.ranks.plans is not None, f"{model.ranks} have no devices"
        stream = AnnouncingStream(stream, model.ranks.plans)
    S, R, V, device = config.max_batch_size, config.num_rows, model.vocab_size, stream.device
    # Every slot's rows begin at 16 bytes: Triton would compile a kernel anew for the first slot whose row does not.
    whole = 4 * config.page_size
    tokens = -(-(history_tokens(config, model, max_inflight_steps) + R) // whole) * whole - R
    slot, lane = _buffers(config, tokens, V, device)
    step_sync: Sync = NoSync(stream, S + 1, R) if sync is None else sync
    launches = TritonLaunches() if sync is None else sync.launches
    assert isinstance(launches, TritonLaunches), f"{launches} are not a device's"
    rows = SlotRows.allocate(S + 1, V, step_sync.store.mask_SRW, slot.done_S, max_rules=MAX_RULES)
    ring = OutputRing(stream, lane, step_sync.report)
    parts = StepParts.build(
        config,
        model,
        stream=stream,
        launches=launches,
        sync=step_sync,
        slot=slot,
        lane=lane,
        ring=ring,
        num_pages=num_pages,
        token_major=True,
        trees=launches,
        rows=rows,
        drafter_builders=drafter_builders,
    )
    buckets, guided = lane_buckets(S), sync is not None
    step_rows = StepRows(config.num_drafts + 1, R, config.max_step_rows, links=config.drafts_by_net)
    sampling = DeviceRows(rows, RowScratch.allocate(max(b * step_rows.of(b, guided) for b in buckets), V, device))
    program = parts.program(sampling, PathCompaction(parts.cache.pages) if config.verifies_trees else None)
    graphs = StepGraphs(
        stream=stream,
        program=program,
        slot=slot,
        lane=lane,
        ring=ring,
        buckets=buckets,
        rows=step_rows,
        guided=guided,
        eager=config.enforce_eager,
        processing=parts.processing,
        adapts=model.adapters is not None,
        drafter=captured_drafter(parts.drafter),
    )
    slot_writer = _slot_writer(config, model, stream, slot, rows, parts.processing)
    shapes = config.prefill_shapes
    prefill = Prefill(
        stream=stream,
        model=model,
        pages=parts.cache.pages,
        drafter=parts.drafter,
        slot_writer=slot_writer,
        shape_of=shapes.of,
        max_lanes=max(lanes for lanes, _ in shapes.every),
        states=parts.cache.states,
    )
    copies = _adapter_copies(stream, model.adapters)

    def warm_up(budget: DraftBudget, forwards: Sequence[WarmsUp]) -> None:
        step_sync.reserve(graphs.buckets)
        _warm_up(stream, prefill, forwards, graphs, budget, channel, shapes.every)

    return assemble(
        parts,
        launcher=graphs,
        slot_writer=slot_writer,
        prefill=prefill,
        warm_up=warm_up,
        max_inflight_steps=max_inflight_steps,
        probe=partial(_probe, parts.cache.check, stream),
        close=partial(_close, graphs, prefill, parts.cache.close, model.adapters, copies),
        copy_page=partial(stream.kernel, parts.cache.copy_page),
        adapter_copies=copies,
        sampling_buffers=(rows.rules_SX, rows.seen_SV, rows.biases, sampling.scratch),
    )


def _buffers(
    config: EngineConfig, num_tokens: int, vocab_size: int, device: torch.device
) -> tuple[SlotBuffers, LaneBuffers]:
    """Return the step's buffers."""
    S, R, trees = config.max_batch_size, config.num_rows, config.verifies_trees
    # One slot more than sequences have, for padded lanes and the warm-up.
    slot = SlotBuffers.allocate(S + 1, R, num_tokens, config.page_size, device, trees=trees)
    assert slot.page_table_SN.shape[1] % 4 == 0
    return slot, LaneBuffers.allocate(S, R, vocab_size, device, trees=trees)


def _probe(check_ranks: Callable[[], None], stream: Stream) -> None:
    check_ranks()  # a lost rank is the reason of a device that failed in a collective
    stream.synchronize()


def _slot_writer(
    config: EngineConfig,
    model: LoadedModel,
    stream: Stream,
    slot: SlotBuffers,
    rows: SlotRows,
    processing: Processing | None,
) -> DeviceSlotWriter:
    return DeviceSlotWriter(
        stream=stream,
        device=slot,
        rows=rows,
        processing=None if processing is None else processing.slots,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        num_drafts=config.num_drafts,
        adapters=model.adapters is not None,
    )


def _adapter_copies(stream: Stream, pool: AdapterPool | DeviceAdapterPool | None) -> AdapterCopies | None:
    """Return what writes adapters from now on, in the order of the stream; None: the model takes none."""
    if pool is None:
        return None
    assert isinstance(pool, DeviceAdapterPool), f"{pool} is a CPU's"
    copies = AdapterCopies(stream, pool.staging_bytes)
    pool.write_with(copies.write)
    return copies


def _close(
    graphs: StepGraphs,
    prefill: Prefill,
    end_ranks: Callable[[], None],
    pool: AdapterPool | DeviceAdapterPool | None,
    copies: AdapterCopies | None,
) -> None:
    with ExitStack() as stack:  # in the opposite order, whatever fails
        stack.callback(end_ranks)
        if isinstance(pool, DeviceAdapterPool):
            stack.callback(pool.write_with, None)
        stack.callback(prefill.close)
        stack.callback(graphs.close)  # waits for the device
        if copies is not None:
            copies.close()


def _warm_up(
    stream: Stream,
    prefill: Prefill,
    forwards: Sequence[WarmsUp],
    graphs: StepGraphs,
    budget: DraftBudget,
    channel: EngineEnd | None,
    shapes: tuple[tuple[int, int], ...],
) -> None:
    """Run every prefill shape and every step once, capture both, and measure the steps."""
    prefill.warm_up(shapes)  # loads every kernel before the first wait is captured
    for forward in forwards:
        forward.warm_up()
    graphs.capture(channel)
    budget.seed(graphs.ms_by_rows)
    if not graphs.eager:
        prefill.capture(shapes)  # after the steps: a capture that fails leaves the steps' captures as they are
    # The first replay of a graph allocates. A capture empties the allocator's cache, and a shape that is not captured
    # allocates there. Either could wait for the device while a step there waits for the grammar process.
    for forward in forwards:
        forward.warm_up()
    prefill.warm_up(shapes)
    stream.synchronize()
