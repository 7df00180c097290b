"""The toy step with its surroundings: a segment, a stream, a sync of either kind and graphs; and its peer processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_engine.step.buffers import LaneBuffers, SlotBuffers
from gpu_engine.step.device.graphs import StepGraphs, StepRows
from gpu_engine.step.device.syncs import DeviceFlagSync, HostCallbackSync
from gpu_engine.step.handle import StepHandle
from gpu_engine.step.launches import StepLaunches
from gpu_engine.step.output_ring import OutputRing, StepOutputs
from shared_mem.channel import EngineEnd, GrammarEnd
from shared_mem.handover import connect, send_segment
from shared_mem.layout import Layout
from shared_mem.segment import Segment
from tests.gpu_engine.device.fake_flags import FakeFlags
from tests.gpu_engine.device.recorded_stream import PATIENCE_S, RecordedStream, opaque
from tests.gpu_engine.device.toy_step import PROMPT, PatternStep, ToyStep
from tests.gpu_engine.step.torch_launches import TorchLaunches
from tests.gpu_engine.tiny import VOCAB
from tests.gpu_engine.toy_sidecar import Automaton, Matcher, ToySidecar

MODES = ("host_callback", "device_flag")
SLOTS, ROWS = 4, 3


def segment_rows(segment: Segment) -> torch.Tensor:
    """Return a segment's mask rows in place, int32 [2, S, R, W']: `TritonLaunches` reads them once it is registered."""
    layout, at = segment.layout, segment.layout.mask_offset
    rows = torch.from_numpy(segment.memory)[at : at + 2 * layout.mask_buffer_bytes].view(torch.int32)
    return rows.view(2, layout.num_slots, layout.num_rows, -1)


@dataclass(frozen=True)
class Lane:
    """A lane of a toy step: its slot, the slot's generation, and whether the lane waits for mask rows."""

    slot: int
    slot_gen: int
    guided: bool


@dataclass(eq=False)
class Toys:
    segment: Segment
    channel: EngineEnd
    sync: HostCallbackSync | DeviceFlagSync
    step: ToyStep
    graphs: StepGraphs

    def assign_slot(self, slot: int) -> None:
        """Assign the slot to a new sequence as the engine does it: enqueued after the steps in flight."""
        buffers = self.step.slot
        self.sync.forget(slot)

        def write() -> None:
            buffers.length_S[slot] = PROMPT
            buffers.params.prompt_length_S[slot] = PROMPT
            buffers.posted_S[slot] = 0
            buffers.num_drafts_S[slot] = 0
            buffers.done_S[slot] = False

        self.sync.stream.kernel(write)

    def count_patterns(self) -> PatternStep:
        """Let the graphs run a step that checks the pattern peer's rows. Call it before the capture."""
        step = PatternStep(self.step.lane, self.sync, self.graphs.ring)
        self.graphs.program = step
        return step

    def launch(self, slots: list[int], *, guided: bool = True, gen: int = 1) -> StepOutputs:
        """Run one step and return its outputs."""
        return self.graphs.read(self.start([Lane(slot, gen, guided) for slot in slots]))

    def start(self, lanes: list[Lane]) -> StepHandle[Lane]:
        """Launch one step."""
        return start(self.graphs, lanes)


@dataclass(eq=False)
class RecordedToys(Toys):
    stream: RecordedStream


class OpaqueLaunches:
    """Launches that read tensors freely, as those of Triton's interpreter; the stream treats them as native."""

    def __init__(self, launches: StepLaunches) -> None:
        self.pack, self.advance = opaque(launches.pack), opaque(launches.advance)
        self.cache_rows, self.take_jump_forward = opaque(launches.cache_rows), opaque(launches.take_jump_forward)


def start(graphs: StepGraphs, lanes: list[Lane]) -> StepHandle[Lane]:
    """Launch one step over these lanes."""
    handle = StepHandle(tuple(lanes), tuple(lane.guided for lane in lanes))
    graphs.launch(handle)
    return handle


def tokens_of(outputs: StepOutputs) -> dict[int, list[int]]:
    """Return slot -> tokens; padded lanes must have emitted nothing."""
    emitted = {}
    for lane, slot in enumerate(outputs.slots):
        count = outputs.num_emitted[lane]
        assert slot >= 0 or count == 0
        if slot >= 0:
            emitted[slot] = outputs.emitted[lane][:count]
    return emitted


def build_executor(
    segment: Segment,
    channel: EngineEnd,
    sync: HostCallbackSync | DeviceFlagSync,
    *,
    eager: bool = False,
    drafts: int = ROWS - 1,
    buckets: tuple[int, ...] = (1, 2, 4),
) -> tuple[Segment, EngineEnd, HostCallbackSync | DeviceFlagSync, ToyStep, StepGraphs]:
    """Build buffers, ring, step and graphs for a sync, and return the fields of `Toys`."""
    stream, vocab = sync.stream, channel.layout.vocab_size
    slot = SlotBuffers.allocate(SLOTS + 1, ROWS, 2000, 16, stream.device)
    lane = LaneBuffers.allocate(SLOTS, ROWS, vocab, stream.device)
    ring = OutputRing(stream, lane, sync.report)
    step = ToyStep(slot, lane, sync, ring, drafts)
    return (
        segment,
        channel,
        sync,
        step,
        StepGraphs(stream, step, slot, lane, ring, buckets, StepRows(ROWS, ROWS), eager=eager),
    )


@contextmanager
def toys(
    mode: str,
    *,
    eager: bool = False,
    drafts: int = ROWS - 1,
    row_timeout_ms: float = 20_000.0,
    draft_timeout_ms: float = 20_000.0,
    buckets: tuple[int, ...] = (1, 2, 4),
    vocab: int = VOCAB,
    triton: bool = False,
) -> Iterator[RecordedToys]:
    """Run the toy step on a recorded stream with a sync; close everything in the right order."""
    with Segment.create(Layout(SLOTS, ROWS, vocab)) as segment:
        channel = EngineEnd(segment)
        stream = RecordedStream()
        flags = FakeFlags(channel)
        timeouts = {"row_timeout_ms": row_timeout_ms, "draft_timeout_ms": draft_timeout_ms}
        launches: Any = TorchLaunches(ROWS, stream.device)
        if triton:
            from gpu_engine.step.device.triton_launches import TritonLaunches  # not every installation has Triton

            # With host functions the rows are in the segment; the wait of the flags has fetched them.
            rows = segment_rows(segment) if mode == "host_callback" else flags.mask_SRW[None]
            launches = OpaqueLaunches(TritonLaunches(rows))
        sync: HostCallbackSync | DeviceFlagSync
        if mode == "host_callback":
            sync = HostCallbackSync(stream, channel, flags.mask_SRW, launches, None if triton else flags, **timeouts)
        else:
            sync = DeviceFlagSync(stream, channel, flags, launches, **timeouts)
        try:
            made = build_executor(segment, channel, sync, eager=eager, drafts=drafts, buckets=buckets)
            yield RecordedToys(*made, stream=stream)
        finally:
            stream.before = None
            stream.close()


@contextmanager
def sidecar_of(toys: Toys, before: Callable[..., None] | None = None) -> Iterator[ToySidecar]:
    """Run the toy grammar process as a thread; at the end no record may have broken the protocol."""
    sidecar = ToySidecar(GrammarEnd(toys.segment), before)
    thread = threading.Thread(target=sidecar.run, name="toy sidecar", daemon=True)
    thread.start()
    try:
        yield sidecar
        assert sidecar.problems == []
    finally:
        sidecar.stopping = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def open_slot(toys: Toys, sidecar: ToySidecar, slot: int, gen: int = 1, length: int = 1500) -> None:
    """Assign the slot to a sequence with a matcher; return when the matcher is bound."""
    bound = threading.Event()
    sidecar.bind(slot, Matcher(gen, Automaton(length), []), bound.set)
    assert bound.wait(PATIENCE_S)
    toys.assign_slot(slot)


@contextmanager
def pattern_peer(t: Toys, directory: Path, spin_us: float = 2000.0) -> Iterator[subprocess.Popen[str]]:
    """Run a process that answers every record with rows whose words are all the record's sequence number."""
    command = [sys.executable, "-m", "benchmarks.gpu.sync_peer", str(directory / "s"), str(spin_us)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
        try:
            assert peer.stdout is not None
            assert peer.stdout.readline() == "listening\n"
            with connect(directory / "s") as socket:
                send_segment(socket, t.segment)
                yield peer
                socket.close()
                peer.wait(PATIENCE_S)
        finally:
            peer.kill()
