"""Builds the executor of an engine's steps: slot writer, sync, runner, prefill.

This module has the CPU's executor; device_executor.py has the CUDA one. Both run the same step program. Invariant:
`close` releases everything that the executor registered or captured, in the opposite order. Not responsible for: the
choice by device (see build_executor.py), which sequences run (see scheduler.py), the order of an iteration (see
loop.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.page_transfer import PageFormat
from gpu_engine.api.prefill_shapes import padded
from gpu_engine.api.processors import Processors
from gpu_engine.api.stats import MemoryUse
from gpu_engine.core.draft_budget import DraftBudget, EveryDraft
from gpu_engine.core.prefill_graphs import Prefill
from gpu_engine.core.runner import LauncherRunner, StepRunner
from gpu_engine.core.running import RunningSequence, SlotWriter
from gpu_engine.core.scheduler import Chunk
from gpu_engine.core.transfer.mover import PageMover, weights_digest
from gpu_engine.drafters.build import Builder, DrafterParts, build_drafter, exchanging_drafter, suffix_drafter
from gpu_engine.drafters.decoupled import ExchangingDrafter
from gpu_engine.drafters.suffix import SuffixDrafter
from gpu_engine.model.loaded_model import LoadedModel
from gpu_engine.ops.memory import memory_use
from gpu_engine.processors.loading import load_processors
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers
from gpu_engine.step.device.adapter_copies import AdapterCopies
from gpu_engine.step.direct import DirectLauncher
from gpu_engine.step.native_launches import NativeLaunches
from gpu_engine.step.output_ring import OutputRing
from gpu_engine.step.outputs.tensors import TensorOutputs, scratch_pages
from gpu_engine.step.processing.processing import Processing
from gpu_engine.step.program import StepProgram
from gpu_engine.step.prompt_rows import chunks_of, fill_prompts, prompt_rows
from gpu_engine.step.prompt_scorer import PromptScorer
from gpu_engine.step.stream import ImmediateStream, Stream
from gpu_engine.step.stream_sync import InlineSync
from gpu_engine.step.sync import NoSync, Sync
from kernels.kv_pages import KVPages, copy_page
from shared_mem.channel import EngineEnd

_WARM_UP_S = 2.0
"""Time after which the warm-up measures no more numbers of rows."""


@dataclass(frozen=True, slots=True)
class Executor:
    """The parts that the loop drives. Once the engine thread runs, it alone uses everything but `slot_writer.check`."""

    slot_writer: SlotWriter
    sync: Sync
    runner: StepRunner
    prefill: Callable[[tuple[Chunk[RunningSequence], ...]], None]
    """Fill the caches with these chunks of different sequences, which fit one of the configuration's shapes."""
    scorer: PromptScorer
    """Fills the caches with a chunk, and returns the log-probabilities of its tokens."""
    tensors: TensorOutputs
    """Computes the tensors that requests ask for."""
    warm_up: Callable[[], None]
    """Run every shape once; capture. Before the first request, after `enter`."""
    enter: Callable[[], None]
    """Prepare the calling thread for the other calls. Called once on each such thread, first."""
    probe: Callable[[], None]
    """Wait for the device. Raises when the device has failed: errors of a device are permanent."""
    close: Callable[[], None]
    """Wait for the device and free the memory that it may have used. Once, at the end."""
    copy_page: Callable[[int, int], None]
    """Copy one page of the target's cache into another, behind the steps in flight."""
    mixes: bool = False
    """Chunks may share the forward of a step: `runner.launch` takes them. Then `prefill` puts any number of chunks into
    one forward."""
    processors: Processors = field(default_factory=Processors)
    """The logits processors that requests may name."""
    suffix: SuffixDrafter | None = None
    """The drafter, if it drafts from earlier answers: it learns which sequence has a slot, and what each answered."""
    decoupled: ExchangingDrafter | None = None
    """The drafter, if its model can be exchanged."""
    adapter_copies: AdapterCopies | None = None
    """Writes adapters between the steps of a device. None: the model takes none, or its memory is the CPU's."""
    mover: PageMover | None = None
    """Copies pages from and for other engines. None: the role is "both"."""
    memory: MemoryUse = field(default_factory=MemoryUse)
    """What the executor and the model hold."""


def lookahead(config: EngineConfig, max_inflight_steps: int) -> int:
    """Return how many positions behind the last known token the steps in flight and the next one may write.

    Every step may advance a sequence by R tokens. Behind the last of them a drafting network stores the keys of its own
    drafts.
    """
    return config.num_rows * (max_inflight_steps + 1) + config.draft_reach


def draft_budget(config: EngineConfig) -> DraftBudget:
    """Return the budget of the drafter that the configuration names."""
    computes = config.drafts_by_net or config.drafts_decoupled
    kind = EveryDraft if config.verifies_every_draft else DraftBudget
    return kind(
        most_rows=config.step_rows, by_length=not computes, may_pause=not config.drafts_by_net, computes=computes
    )


def _forward_ms(warm_up: Callable[[int], float], max_rows: int) -> dict[int, float]:
    """Run forwards of 1 to `max_rows` rows; return the shortest of three times of each, in milliseconds, by rows.

    The first run of a number of rows makes libraries plan. With a slow model the larger numbers are left out.
    """
    measured: dict[int, float] = {}
    ends_s = time.perf_counter() + _WARM_UP_S
    for num_rows in (1, 16, 4, 8, 2, 32, 24, 64):
        if num_rows <= max(max_rows, 1) and (len(measured) < 2 or time.perf_counter() < ends_s):
            measured[num_rows] = min(warm_up(num_rows) for _ in range(3)) * 1e3
    return measured


def history_tokens(config: EngineConfig, model: LoadedModel, max_inflight_steps: int) -> int:
    """Return the longest history: a sequence's tokens, and the positions that the steps in flight may write."""
    return model.max_model_len + lookahead(config, max_inflight_steps)


def page_mover(config: EngineConfig, model: LoadedModel, stream: Stream, pages: list[KVPages]) -> PageMover | None:
    """Return what copies pages from and for other engines; None for one that does neither."""
    if not config.transfer.moves_pages:
        return None
    layout = "token-major" if pages[0].token_major else "channel-major"
    sizes = (model.num_layers, model.num_kv_heads, model.head_dim)
    form = PageFormat(weights_digest(model), model.dtype_name, config.page_size, layout, *sizes)
    return PageMover(stream, pages, form)


def _take_number_of_threads() -> None:
    """Give the calling thread the number of threads that was set on another one.

    Torch does so at a thread's first parallel operation. A step may have none; its native calls would use every core.
    """
    torch.set_num_threads(torch.get_num_threads())


def _nothing() -> None:
    """A CPU has nothing to wait for."""


def _inline_sync(
    config: EngineConfig, channel: EngineEnd | None, stream: ImmediateStream, launches: NativeLaunches
) -> Sync:
    if channel is None:
        return NoSync(stream, config.max_batch_size, config.num_rows)
    timeouts = {"row_timeout_ms": config.row_timeout_ms, "draft_timeout_ms": config.draft_timeout_ms}
    return InlineSync(stream, channel, launches, **timeouts)


def pages_and_calls(
    model: LoadedModel, num_pages: int, page_size: int, *, token_major: bool | None = None
) -> tuple[list[KVPages], Callable[[], None], Callable[[], None], Callable[[int, int], None]]:
    """Allocate the target's cache, on each of its ranks; return it with the ranks' part of the executor's `probe`,
    `close` and `copy_page`."""
    pages, ranks = model.allocate_pages(num_pages, page_size, token_major=token_major), model.ranks
    if ranks is None:
        return pages, _nothing, _nothing, partial(copy_page, pages)
    ranks.allocate_pages(num_pages, page_size)
    return pages, ranks.check, ranks.close, partial(ranks.copy_page, pages)


def cpu_executor(
    config: EngineConfig,
    model: LoadedModel,
    channel: EngineEnd | None,
    num_pages: int,
    max_inflight_steps: int,
    *,
    drafter_builders: Mapping[str, Builder] | None = None,
) -> Executor:
    """Return an executor whose steps run at their launch, on the calling thread."""
    S, R, stream = config.max_batch_size, config.num_rows, ImmediateStream()
    # One slot more than sequences have, for padding and the warm-up.
    slot = SlotBuffers.allocate(S + 1, R, history_tokens(config, model, max_inflight_steps), config.page_size)
    lane = LaneBuffers.allocate(S, R, model.vocab_size)
    launches = NativeLaunches(slot, lane, None if channel is None else channel.mask_rows)
    sync = _inline_sync(config, channel, stream, launches)
    parts = DrafterParts(config, model, stream, launches, sync, num_pages, False, slot, lane)
    drafter = build_drafter(parts, drafter_builders)
    pages, probe, close, copy = pages_and_calls(model, num_pages + scratch_pages(config.page_size), config.page_size)
    ring = OutputRing(stream, lane, sync.report, max_inflight_steps + 1)
    processors = load_processors(config.logits_processors, model, model.device)
    processing = Processing.of(processors, stream, launches, slot)
    program = StepProgram(stream, launches, model, pages, sync, drafter, slot, lane, ring, processing=processing)
    limits = {"max_model_len": model.max_model_len, "num_drafts": config.num_drafts}
    slot_writer = SlotWriter(slot, eos_token_ids=model.eos_token_ids, adapters=model.adapters is not None, **limits)
    launcher, budget = DirectLauncher(program, slot, lane, ring), draft_budget(config)
    # One sequence at a time: on a CPU tokens cost the same together and alone.
    fill = Prefill(stream, model, pages, drafter, slot_writer, lambda _, longest: (1, padded(longest)), max_lanes=1)

    def prefill(chunks: tuple[Chunk[RunningSequence], ...]) -> None:
        for chunk in chunks:
            fill((chunk,))

    def prefill_together(chunks: tuple[Chunk[RunningSequence], ...]) -> None:
        for chunk in chunks:
            slot_writer.write_pages(chunk.sequence)
        with torch.inference_mode():
            parts = [(chunk.sequence.slot, chunk.start, chunk.end) for chunk in chunks]
            fill_prompts(model, pages, prompt_rows(slot, parts, with_adapters=model.adapters is not None))
            drafter.prefill(chunks_of(slot, parts), {})

    def warm_up() -> None:
        sync.reserve(tuple(range(1, S + 1)))
        budget.seed(_forward_ms(program.warm_up, min(S * R, config.step_rows or S * R)))

    runner = LauncherRunner(launcher, slot_writer, sync, budget, max_inflight_steps)
    fills = prefill_together if program.mixes else prefill
    scorer = PromptScorer(stream, launches, model, pages, drafter, slot)
    tensors = TensorOutputs(stream, model, pages, slot, config.page_size)
    return Executor(
        *(slot_writer, sync, runner, fills, scorer, tensors, warm_up),
        *(_take_number_of_threads, probe, close, copy),
        mixes=program.mixes,
        processors=processors,
        suffix=suffix_drafter(drafter),
        decoupled=exchanging_drafter(drafter),
        mover=page_mover(config, model, stream, pages),
        memory=memory_use(model, pages, slot, lane),
    )
