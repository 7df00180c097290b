"""The executor of a CPU: each step runs at its launch, on the calling thread.

Not responsible for: assembling the parts (see executor.py), a GPU's executor (see device_executor.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.prefill_shapes import padded
from gpu_engine.core.draft_budget import DraftBudget
from gpu_engine.core.executor import Executor, StepParts, WarmsUp, assemble, history_tokens
from gpu_engine.core.prefill_graphs import Prefill
from gpu_engine.core.running import RunningSequence, SlotWriter
from gpu_engine.core.scheduler import Chunk
from gpu_engine.drafters.build import Builder
from gpu_engine.model.loaded_model import LoadedModel
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers
from gpu_engine.step.direct import DirectLauncher
from gpu_engine.step.native_launches import NativeLaunches
from gpu_engine.step.output_ring import OutputRing
from gpu_engine.step.prompt_rows import chunks_of, fill_prompts, prompt_rows
from gpu_engine.step.stream import ImmediateStream
from gpu_engine.step.stream_sync import InlineSync
from gpu_engine.step.sync import NoSync, Sync
from shared_mem.channel import EngineEnd

_WARM_UP_S = 0.4
"""Time after which the warm-up measures no more numbers of rows. What is not measured is learned from steps."""
_ROWS_S = 0.05
"""Time after which a number of rows is not run a third time: a millisecond of other work is little of a long run."""


def cpu_executor(
    config: EngineConfig,
    model: LoadedModel,
    channel: EngineEnd | None,
    num_pages: int,
    max_inflight_steps: int,
    *,
    drafter_builders: Mapping[str, Builder] | None = None,
) -> Executor:
    """Return an executor whose `launch` runs the whole step, on the calling thread."""
    S, R, stream = config.max_batch_size, config.num_rows, ImmediateStream()
    # One slot more than sequences have, for padding and the warm-up.
    slot = SlotBuffers.allocate(S + 1, R, history_tokens(config, model, max_inflight_steps), config.page_size)
    lane = LaneBuffers.allocate(S, R, model.vocab_size)
    launches = NativeLaunches(slot, lane, None if channel is None else channel.mask_address)
    sync = _inline_sync(config, channel, stream, launches)
    ring = OutputRing(stream, lane, sync.report, max_inflight_steps + 1)
    parts = StepParts.build(
        config,
        model,
        stream=stream,
        launches=launches,
        sync=sync,
        slot=slot,
        lane=lane,
        ring=ring,
        num_pages=num_pages,
        drafter_builders=drafter_builders,
    )
    program = parts.program()
    slot_writer = SlotWriter(
        slot,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        num_drafts=config.num_drafts,
        adapters=model.adapters is not None,
    )

    def warm_up(budget: DraftBudget, _: Sequence[WarmsUp]) -> None:
        sync.reserve(tuple(range(1, S + 1)))
        budget.seed(forward_ms(program.warm_up, min(S * R, config.step_rows or S * R)))

    return assemble(
        parts,
        launcher=DirectLauncher(program, slot, lane, ring),
        slot_writer=slot_writer,
        prefill=_prefill_in_one_forward(parts, slot_writer) if program.mixes else _prefill_each(parts, slot_writer),
        warm_up=warm_up,
        max_inflight_steps=max_inflight_steps,
        enter=_take_number_of_threads,
        probe=parts.cache.check,
        close=parts.cache.close,
        copy_page=parts.cache.copy_page,
        mixes=program.mixes,
    )


def _prefill_each(parts: StepParts, slot_writer: SlotWriter) -> Callable[[tuple[Chunk[RunningSequence], ...]], None]:
    """Return a prefill of one sequence at a time: on a CPU tokens cost the same together as one by one."""
    fill = Prefill(
        stream=parts.stream,
        model=parts.model,
        pages=parts.cache.pages,
        drafter=parts.drafter,
        slot_writer=slot_writer,
        shape_of=lambda _, longest: (1, padded(longest)),
        max_lanes=1,
        states=parts.cache.states,
    )

    def prefill(chunks: tuple[Chunk[RunningSequence], ...]) -> None:
        for chunk in chunks:
            fill((chunk,))

    return prefill


def _prefill_in_one_forward(
    parts: StepParts, slot_writer: SlotWriter
) -> Callable[[tuple[Chunk[RunningSequence], ...]], None]:
    """Return a prefill of any number of chunks in one forward."""
    model, slot = parts.model, parts.slot

    def prefill(chunks: tuple[Chunk[RunningSequence], ...]) -> None:
        for chunk in chunks:
            slot_writer.write_pages(chunk.sequence)
        with torch.inference_mode():
            places = [(chunk.sequence.slot, chunk.start, chunk.end) for chunk in chunks]
            rows = prompt_rows(slot, places, with_adapters=model.adapters is not None)
            fill_prompts(model, parts.cache.pages, rows)
            parts.drafter.prefill(chunks_of(slot, places), {})

    return prefill


def forward_ms(warm_up: Callable[[int], float], max_rows: int) -> dict[int, float]:
    """Run forwards of 1 to `max_rows` rows; return the shortest of three times of each, in milliseconds, by rows.

    The first run of a number of rows makes libraries plan. With a slow model the third run and the larger numbers are
    left out.
    """
    measured: dict[int, float] = {}
    ends_s = time.perf_counter() + _WARM_UP_S
    for num_rows in (1, 16, 4, 8, 2, 32, 24, 64):
        if num_rows <= max(max_rows, 1) and (len(measured) < 2 or time.perf_counter() < ends_s):
            times_s = [warm_up(num_rows), warm_up(num_rows)]
            if sum(times_s) < _ROWS_S:
                times_s.append(warm_up(num_rows))
            measured[num_rows] = min(times_s) * 1e3
    return measured


def _take_number_of_threads() -> None:
    """Give the calling thread the number of threads that was set on another one.

    Torch does so at a thread's first parallel operation. A step may have none; its native calls would use every core.
    """
    torch.set_num_threads(torch.get_num_threads())


def _inline_sync(
    config: EngineConfig, channel: EngineEnd | None, stream: ImmediateStream, launches: NativeLaunches
) -> Sync:
    if channel is None:
        return NoSync(stream, config.max_batch_size, config.num_rows)
    timeouts = {"row_timeout_ms": config.row_timeout_ms, "draft_timeout_ms": config.draft_timeout_ms}
    return InlineSync(stream, channel, launches, **timeouts)
