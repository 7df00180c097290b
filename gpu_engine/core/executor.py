"""The executor, which runs the engine's steps, and the one function that assembles it.

Each device provides the same list of parts (`StepParts`): its stream, launches, sync and buffers. The drafter, the KV
cache, the logits processors and the step program are built from these parts in the same way for every device.
Invariant: `close` releases everything that the executor registered or captured, in reverse order. Not responsible for:
the parts of a device (see cpu_executor.py, device_executor.py), the choice by device (see build_executor.py), which
sequences run (see scheduler.py), the order of an iteration (see loop.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from gpu_engine.api.config import EngineConfig
from gpu_engine.api.processors import Processors
from gpu_engine.api.stats import MemoryUse
from gpu_engine.core.draft_budget import DraftBudget, EveryDraft
from gpu_engine.core.runner import LauncherRunner, StepRunner
from gpu_engine.core.running import RunningSequence, SlotWriter
from gpu_engine.core.scheduler import Chunk
from gpu_engine.drafters.build import Builder, DrafterParts, build_drafter, exchanging_drafter, suffix_drafter
from gpu_engine.drafters.decoupled import ExchangingDrafter
from gpu_engine.drafters.head_tree import TreeLaunches
from gpu_engine.drafters.suffix import SuffixDrafter
from gpu_engine.model.cache_size import cache_dtype, num_snapshots
from gpu_engine.model.loaded_model import LoadedModel
from gpu_engine.model.states import SequenceStates
from gpu_engine.ops.memory import memory_use
from gpu_engine.processors.loading import load_processors
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers
from gpu_engine.step.device.adapter_copies import AdapterCopies
from gpu_engine.step.direct import StepLauncher
from gpu_engine.step.launches import StepLaunches
from gpu_engine.step.output_ring import OutputRing
from gpu_engine.step.outputs.tensors import TensorOutputs, scratch_pages
from gpu_engine.step.processing.processing import Processing
from gpu_engine.step.program import Compaction, Drafter, StepProgram
from gpu_engine.step.prompt_scorer import PromptScorer
from gpu_engine.step.stream import Stream
from gpu_engine.step.sync import Sync
from kernels.cuda.row_state import DeviceRows, SlotRows
from kernels.kv_pages import KVPages, copy_page


@dataclass(frozen=True, slots=True)
class Executor:
    """The parts that the loop drives. Once the engine thread runs, others use nothing but `slot_writer.check`."""

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
    """Copy one page of the target's cache into another, after the steps in flight."""
    stream: Stream
    """Orders the steps and every copy."""
    pages: list[KVPages]
    """The target's KV cache, layer by layer."""
    states: SequenceStates | None = None
    """Of the target's recurrent layers; None: it has none."""
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
    memory: MemoryUse = field(default_factory=MemoryUse)
    """What the executor and the model hold."""


def lookahead(config: EngineConfig, max_inflight_steps: int) -> int:
    """Return how many positions after the last known token the steps in flight and the next one may write.

    Every step may advance a sequence by R tokens. After the last of them a drafting network stores the keys of its own
    drafts.
    """
    return config.num_rows * (max_inflight_steps + 1) + config.draft_reach


def _draft_budget(config: EngineConfig) -> DraftBudget:
    """Return the budget of the drafter that the configuration names."""
    computes = config.drafts_by_net or config.drafts_decoupled
    kind = EveryDraft if config.verifies_every_draft else DraftBudget
    return kind(
        most_rows=config.step_rows, by_length=not computes, may_pause=not config.drafts_by_net, computes=computes
    )


def history_tokens(config: EngineConfig, model: LoadedModel, max_inflight_steps: int) -> int:
    """Return the longest history: a sequence's tokens, and the positions that the steps in flight may write."""
    return model.max_model_len + lookahead(config, max_inflight_steps)


def _nothing() -> None:
    """A CPU has nothing to wait for."""


@dataclass(frozen=True, slots=True)
class TargetCache:
    """The target's KV cache, with the calls that its ranks add to an executor."""

    pages: list[KVPages]
    check: Callable[[], None]
    """Raise for a lost rank."""
    close: Callable[[], None]
    copy_page: Callable[[int, int], None]
    states: SequenceStates | None = None
    """Of the model's recurrent layers; None: it has none."""

    @staticmethod
    def allocate(
        model: LoadedModel,
        num_pages: int,
        page_size: int,
        *,
        token_major: bool,
        dtype: torch.dtype,
        states: SequenceStates | None = None,
    ) -> TargetCache:
        """Allocate the cache, on each rank of the model. `token_major`: the layout that a device's kernels read."""
        pages = model.allocate_pages(num_pages, page_size, token_major=token_major or None, dtype=dtype)
        if model.ranks is None:
            return TargetCache(pages, _nothing, _nothing, partial(copy_page, pages), states)
        model.ranks.allocate_pages(num_pages, page_size)
        return TargetCache(pages, model.ranks.check, model.ranks.close, partial(model.ranks.copy_page, pages))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The parts of an executor's steps."""

    config: EngineConfig
    model: LoadedModel
    stream: Stream
    launches: StepLaunches
    sync: Sync
    slot: SlotBuffers
    lane: LaneBuffers
    ring: OutputRing
    cache: TargetCache
    drafter: Drafter
    processors: Processors
    processing: Processing | None

    @staticmethod
    def build(
        config: EngineConfig,
        model: LoadedModel,
        *,
        stream: Stream,
        launches: StepLaunches,
        sync: Sync,
        slot: SlotBuffers,
        lane: LaneBuffers,
        ring: OutputRing,
        num_pages: int,
        token_major: bool = False,
        trees: TreeLaunches | None = None,
        rows: SlotRows | None = None,
        drafter_builders: Mapping[str, Builder] | None = None,
    ) -> StepParts:
        """Build the drafter, allocate the KV cache, and load the logits processors over the parts of a device.

        `trees` and `rows` are a GPU's; `drafter_builders` replaces the known drafters.
        """
        drafter_parts = DrafterParts(
            config=config,
            target=model,
            stream=stream,
            launches=launches,
            sync=sync,
            num_pages=num_pages,
            token_major=token_major,
            slot=slot,
            lane=lane,
            trees=trees,
            rows=rows,
        )
        drafter = build_drafter(drafter_parts, drafter_builders)
        num_cached = num_pages + scratch_pages(config.page_size)
        states = None
        if model.recurrent:
            states = SequenceStates(
                model.recurrent,
                num_slots=config.max_batch_size,
                max_rows=config.num_rows,
                num_snapshots=num_snapshots(config, model, num_pages),
                device=torch.device(stream.device),
                on_device=token_major,
                enqueue=stream.kernel,
            )
        dtype = cache_dtype(config, model.dtype)
        cache = TargetCache.allocate(
            model, num_cached, config.page_size, token_major=token_major, dtype=dtype, states=states
        )
        processors = load_processors(config.logits_processors, model, torch.device(stream.device))
        return StepParts(
            config=config,
            model=model,
            stream=stream,
            launches=launches,
            sync=sync,
            slot=slot,
            lane=lane,
            ring=ring,
            cache=cache,
            drafter=drafter,
            processors=processors,
            processing=Processing.of(processors, stream, launches, slot),
        )

    def program(self, sampling: DeviceRows | None = None, compaction: Compaction | None = None) -> StepProgram:
        """Return the step program. `sampling` and `compaction` are a GPU's."""
        return StepProgram(
            stream=self.stream,
            launches=self.launches,
            model=self.model,
            pages=self.cache.pages,
            states=self.cache.states,
            sync=self.sync,
            drafter=self.drafter,
            slot=self.slot,
            lane=self.lane,
            ring=self.ring,
            rows=sampling,
            processing=self.processing,
            compaction=compaction,
        )


class WarmsUp(Protocol):
    """A forward of its own, which runs once before the first request."""

    def warm_up(self) -> None:
        """Run it."""


WarmUp = Callable[[DraftBudget, Sequence[WarmsUp]], None]
"""Runs every shape once, and measures the steps for the budget; gets the forwards next to the steps and the
prefills."""


def assemble(
    parts: StepParts,
    *,
    launcher: StepLauncher,
    slot_writer: SlotWriter,
    prefill: Callable[[tuple[Chunk[RunningSequence], ...]], None],
    warm_up: WarmUp,
    max_inflight_steps: int,
    enter: Callable[[], None] = _nothing,
    probe: Callable[[], None],
    close: Callable[[], None],
    copy_page: Callable[[int, int], None],
    mixes: bool = False,
    adapter_copies: AdapterCopies | None = None,
    sampling_buffers: Sequence[object] = (),
) -> Executor:
    """Return the executor of these parts. The arguments are what a device does in its own way; see `Executor`."""
    config, model, stream, pages = parts.config, parts.model, parts.stream, parts.cache.pages
    budget = _draft_budget(config)
    scorer = PromptScorer(
        stream=stream,
        launches=parts.launches,
        model=model,
        pages=pages,
        drafter=parts.drafter,
        slot=parts.slot,
        states=parts.cache.states,
    )
    tensors = TensorOutputs(stream=stream, model=model, pages=pages, slot=parts.slot, page_size=config.page_size)
    return Executor(
        slot_writer=slot_writer,
        sync=parts.sync,
        runner=LauncherRunner(launcher, slot_writer, parts.sync, budget, max_inflight_steps),
        prefill=prefill,
        scorer=scorer,
        tensors=tensors,
        warm_up=partial(warm_up, budget, (scorer, tensors)),
        enter=enter,
        probe=probe,
        close=close,
        copy_page=copy_page,
        mixes=mixes,
        processors=parts.processors,
        suffix=suffix_drafter(parts.drafter),
        decoupled=exchanging_drafter(parts.drafter),
        adapter_copies=adapter_copies,
        pages=pages,
        states=parts.cache.states,
        stream=stream,
        memory=memory_use(model, pages, parts.slot, parts.lane, *sampling_buffers, states=parts.cache.states),
    )
