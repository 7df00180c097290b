"""What a step costs as a graph and without one, and what meeting the grammar process adds to it. One GPU, one run.

    python -m benchmarks bench_graph --steps 5000

A step is: post, some device work, await, a check of every row, outputs into the ring; the peer process answers with the
sequence in every word. Shown for each way: microseconds a step on the device's clock, what that is above the unguided
graph, microseconds of host time a launch takes, and rows that were wrong or did not come.

Not responsible for: models, grammars.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu.server import CountedGraph, CountingStream
from benchmarks.gpu.sync_peer import attached
from gpu_engine.model.loader import load_kernels_eagerly
from gpu_engine.step.buffers import LaneBuffers, SlotBuffers, StepBatch
from gpu_engine.step.device.cuda_sync import cuda_sync
from gpu_engine.step.device.graphs import StepGraphs, StepRows
from gpu_engine.step.device.pinned import PinnedSegment
from gpu_engine.step.handle import StepHandle
from gpu_engine.step.output_ring import OutputRing
from gpu_engine.step.stream_sync import StreamSync
from kernels.cuda.nvrtc import ULONG, Kernel, kernel
from shared_mem.channel import EngineEnd
from shared_mem.layout import Layout, RowKind
from shared_mem.segment import Segment

_WORK = """
extern "C" __global__ void work(unsigned long long ns) {
    unsigned long long now, start;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
}
"""
_MODES = ("host_callback", "host_callback spin", "device_flag")


@dataclass(eq=False)
class BenchStep:
    """One step over the stream's seam."""

    lane: LaneBuffers
    sync: StreamSync
    ring: OutputRing
    work: Kernel
    work_ns: int

    def __post_init__(self) -> None:
        self.bad_2 = torch.zeros(2, dtype=torch.int64, device=self.sync.stream.device)
        """Rows with a wrong word, rows that did not come."""

    def __call__(self, batch: StepBatch) -> None:
        """Enqueue it."""
        stream = self.sync.stream
        stream.kernel(self._begin, batch)
        self.sync.post(batch)
        stream.kernel(self.work, (1, 1), 1, self.work_ns)
        self.sync.await_rows(batch)
        stream.kernel(self._check, batch)
        stream.kernel(self.sync.launches.advance, batch, self.sync.store)
        self.ring.pack(batch)

    def _begin(self, batch: StepBatch) -> None:
        self.lane.num_drafts_B.fill_(batch.num_rows - 1)

    def _check(self, batch: StepBatch) -> None:
        lane, B = batch.lane, batch.num_lanes
        lane.result.num_emitted_B[:B].fill_(1)
        if batch.any_guided:
            words_BRW = self.sync.store.mask_SRW[lane.slots_B[:B].clamp(min=0).long()]
            other_BR = (words_BRW != (self.sync.post_seq & 0x7FFFFFFF)).any(2)
            real_B1, apply_BR = (lane.slots_B[:B] >= 0)[:, None], lane.kinds_BR[:B] == int(RowKind.APPLY)
            self.bad_2 += torch.stack([(other_BR & apply_BR & real_B1).sum(), (~apply_BR & real_B1).sum()])


@dataclass(frozen=True)
class Figures:
    """What a step took."""

    step_us: float
    launch_us: float
    nodes: int = 0
    """Of the graph; 0: eager."""


@dataclass(frozen=True)
class Lane:
    """A lane of the steps that are measured."""

    slot: int
    slot_gen: int = 1


def _start(graphs: StepGraphs, lanes: tuple[Lane, ...], guided: bool) -> StepHandle[Lane]:
    handle = StepHandle(lanes, (guided,) * len(lanes))
    graphs.launch(handle)
    return handle


def _drive(graphs: StepGraphs, lanes: tuple[Lane, ...], guided: bool, steps: int) -> Figures:
    """Launch one step ahead of the one that is read, as the engine does."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flying, launches = _start(graphs, lanes, guided), []
    begin.record()
    for _ in range(steps):
        start = time.perf_counter_ns()
        following = _start(graphs, lanes, guided)
        launches.append(time.perf_counter_ns() - start)
        graphs.read(flying)
        flying = following
    end.record()
    graphs.read(flying)
    end.synchronize()
    return Figures(begin.elapsed_time(end) * 1e3 / steps, statistics.median(launches) / 1e3)


def measure(args: argparse.Namespace, mode: str, work: Kernel) -> dict[str, tuple[Figures, list[int]]]:
    """Return the figures of one mode: "free" and "guided", each as graph and eager."""
    kind_of, _, spin = mode.partition(" ")
    figures = {}
    B, R = args.lanes, args.rows
    stream = CountingStream(low_latency_host=bool(spin))
    stream.activate()
    for eager in (False, True):
        with Segment.create(Layout(B, R, args.vocab)) as segment, PinnedSegment(segment) as pinned:
            channel = EngineEnd(segment)
            sync = cuda_sync(kind_of, stream, channel, pinned, row_timeout_ms=2000.0)
            slot = SlotBuffers.allocate(B, R, 64, 16, stream.device)
            lane = LaneBuffers.allocate(B, R, args.vocab, stream.device)
            ring = OutputRing(stream, lane, sync.report)
            step = BenchStep(lane, sync, ring, work, args.work_ns)
            graphs = StepGraphs(stream, step, slot, lane, ring, (B,), StepRows(R, R), eager=eager)
            try:
                graphs.capture(channel)
                with attached(segment, args.spin_us):
                    for kind in ("free", "guided"):
                        lanes, guided = tuple(Lane(s) for s in range(B)), kind == "guided"
                        _drive(graphs, lanes, guided, 50)
                        step.bad_2.zero_()
                        best = min(
                            (_drive(graphs, lanes, guided, args.steps) for _ in range(3)), key=lambda f: f.step_us
                        )
                        graph = graphs.captured.get((B, R, guided))
                        nodes = graph.num_nodes if isinstance(graph, CountedGraph) else 0
                        name = f"{kind} {'eager' if eager else 'graph'}"
                        figures[name] = (replace(best, nodes=nodes), step.bad_2.tolist())
            finally:
                graphs.close()
    return figures


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steps of each measurement (default 2000)")
    parser.add_argument("--lanes", type=int, default=4, help="lanes of a step (default 4)")
    parser.add_argument("--rows", type=int, default=4, help="mask rows a lane, K + 1 (default 4)")
    parser.add_argument("--vocab", type=int, default=128256, help="columns of a row (default 128256)")
    parser.add_argument("--work-ns", type=int, default=500_000, help="device work that hides the peer (default 500 us)")
    parser.add_argument("--spin-us", type=float, default=1e6, help="the peer spins so long, then parks (default 1 s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; exit 1 when a row was stale or missing, 2 without a GPU."""
    args = parse(argv)
    if not torch.cuda.is_available():
        print("bench_graph needs a CUDA device; there is none here")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{args.lanes} lanes x {args.rows} rows, V={args.vocab}, {args.work_ns / 1e3:g} us of work")
    head = ("sync", "step", "nodes", "us/step", "exposed us", "launch us", "wrong", "lost")
    print("{:20} {:13} {:>5} {:>9} {:>11} {:>10} {:>6} {:>6}".format(*head))
    failures = 0
    for mode, figures in all_modes(args):
        floor = figures["free graph"][0].step_us
        for name, (measured, (wrong, lost)) in figures.items():
            failures += wrong + lost
            exposed = f"{measured.step_us - floor:11.2f}"
            print(f"{mode:20} {name:13} {measured.nodes or '-':>5} {measured.step_us:9.2f} {exposed}", end="")
            print(f" {measured.launch_us:10.2f} {wrong:6d} {lost:6d}")
    return 1 if failures else 0


def all_modes(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, tuple[Figures, list[int]]]]]:
    """Measure every way in turn; see `measure`."""
    load_kernels_eagerly()
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "work.cu"
        source.write_text(_WORK)
        work = kernel(source, "work", [ULONG])
        for mode in _MODES:
            yield mode, measure(args, mode, work)
