"""The cost of synchronising a CUDA graph with another process: host callbacks and device flags on one GPU, in one run.

    python -m benchmarks bench_sync --replays 100000

A peer process answers each post with the sequence number in every word of every row. For each mode a graph is
captured: post, some device work, wait, fetch, check; the check counts every word that is not the sequence number of
its post. The table shows the microseconds that a pair of post and wait adds to a replay, for work that takes longer
than the answer.
Not responsible for: grammars, models.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gpu_engine.step.device.pinned import PinnedSegment
from kernels.cuda.flags import DeviceFlags
from kernels.cuda.host_launch import launch_host_function
from kernels.cuda.nvrtc import INT, POINTER, ULONG, check, kernel
from shared_mem.batch import BatchArrays
from shared_mem.channel import EngineEnd, HostCall
from shared_mem.handover import connect, send_segment
from shared_mem.layout import Layout
from shared_mem.segment import Segment

_CHECK = """
// Every word of the lanes' rows must be the sequence that was waited for, and every row must have come.
extern "C" __global__ void check_rows(const unsigned long long *seq, const unsigned char *kinds, const int *mask,
                                      unsigned long long *bad, int words) {
    int row = blockIdx.x;
    if (kinds[row] != 1) { if (threadIdx.x == 0) atomicAdd(&bad[0], 1ull); return; }
    for (int i = threadIdx.x; i < words; i += blockDim.x)
        if (mask[(long long)row * words + i] != (int)(*seq & 0x7fffffff)) atomicAdd(&bad[1], 1ull);
}
extern "C" __global__ void work(unsigned long long ns) {
    unsigned long long t, start;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); while (t - start < ns);
}
"""


MODES = ("host_callback", "host_callback spin", "device_flag")
_AT_ONCE = 10_000
"""So many replays are enqueued before the device is waited for."""


class Bench:
    """One segment, one peer, and the graphs over them."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args = args
        self.layout = Layout(args.slots, args.rows, args.vocab)
        self.segment = Segment.create(self.layout)
        command = [sys.executable, "-m", "benchmarks.gpu.sync_peer", str(directory / "s"), str(args.spin_us)]
        self.peer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.peer.stdout is not None
        assert self.peer.stdout.readline() == "listening\n"
        self.socket = connect(directory / "s")
        send_segment(self.socket, self.segment)
        source = directory / "check.cu"
        source.write_text(_CHECK)
        self.check_rows = kernel(source, "check_rows", [POINTER] * 4 + [INT])
        self.work = kernel(source, "work", [ULONG])
        self.bad = torch.zeros(2, dtype=torch.int64, device="cuda")
        B, R = args.slots, args.rows

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device="cuda")

        self.slots = torch.arange(B, dtype=torch.int32, device="cuda")
        self.gens, self.pos, self.n = ints(B), ints(B), ints(B)
        self.need_rows, self.tokens = torch.full((B,), -1, dtype=torch.int32, device="cuda"), ints(B, 2 * R)
        self.kinds = torch.zeros(B, R, dtype=torch.uint8, device="cuda")
        self.forced = ints(B, R)

    def capture(self, body: Callable[[], None]) -> tuple[torch.cuda.CUDAGraph, int]:
        """Return a graph of `pairs` times the body, and how many nodes it has."""
        body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(self.args.pairs):
                body()
        from cuda.bindings import driver

        nodes = check(driver.cuGraphGetNodes(driver.CUgraph(graph.raw_cuda_graph())))[1]
        return graph, int(nodes)

    def replay(self, graph: torch.cuda.CUDAGraph, times: int) -> tuple[float, int]:
        """Replay `times` times, or until the limit; return the mean microseconds of one pair, and how many replays."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        until_s, done = time.monotonic() + self.args.limit_s, 0
        begin.record()
        while done < times and time.monotonic() < until_s:
            count = min(times - done, _AT_ONCE)
            for _ in range(count):
                graph.replay()
            done += count
            if times > _AT_ONCE:
                torch.cuda.synchronize()
                if done % (10 * _AT_ONCE) == 0:
                    print(f"{done} of {times} replays", file=sys.stderr, flush=True)
        end.record()
        end.synchronize()
        total_us: float = begin.elapsed_time(end) * 1e3
        return total_us / done / int(self.args.pairs), done

    def device_flag(self, flags: DeviceFlags) -> None:
        """Post and wait as kernels."""
        flags.post(self.slots, self.gens, self.pos, self.n, self.n, self.need_rows, self.tokens, 0)
        self.work((1, 1), 1, self.args.work_ns)
        flags.wait(self.slots, self.gens, self.kinds, self.forced, rows_wanted=0xFFFF, timeout_ns=2 * 10**9)
        self._check(flags.counter[1:2], flags)

    def host_callback(self, flags: DeviceFlags, host: HostArrays, *, low_latency: bool) -> None:
        """Post and wait as native host functions."""
        launch_host_function(host.post.function, host.post.user_data, low_latency=low_latency)
        self.work((1, 1), 1, self.args.work_ns)
        launch_host_function(host.wait.function, host.wait.user_data, low_latency=low_latency)
        host.answers.copy_(host.pinned_answers, non_blocking=True)
        flags.fetch(host.seq, self.slots, host.kinds_BR, rows_wanted=0xFFFF)
        self._check(host.seq, flags, host.kinds_BR)

    def _check(self, seq: torch.Tensor, flags: DeviceFlags, kinds: torch.Tensor | None = None) -> None:
        values = (seq, self.kinds if kinds is None else kinds, flags.mask_SRW, self.bad)
        rows = self.args.slots * self.args.rows
        self.check_rows((rows, 1), 256, *[t.data_ptr() for t in values], flags.mask_SRW.shape[2])

    def floor(self, flags: DeviceFlags) -> None:
        """The same work without meeting anybody."""
        self.work((1, 1), 1, self.args.work_ns)
        self._check(flags.counter[1:2], flags)


@dataclass(frozen=True)
class HostArrays:
    """A batch's arrays in pinned memory, the answers' copy on the device, and the two host functions over them."""

    arrays: BatchArrays
    post: HostCall
    wait: HostCall
    pinned_answers: torch.Tensor
    answers: torch.Tensor
    kinds_BR: torch.Tensor
    seq: torch.Tensor

    @classmethod
    def of(cls, end: EngineEnd, batch: int, rows: int) -> HostArrays:
        """Return arrays whose lanes are slots 0 to B - 1."""
        pinned = torch.zeros(BatchArrays.nbytes(batch, rows), dtype=torch.uint8, pin_memory=True)
        arrays, post, wait = end.host_calls(batch, timeout_s=2.0, memory=pinned.numpy())
        arrays.slots[:] = range(batch)
        places = BatchArrays.fields(batch, rows)
        begin = places["kinds"][0]
        answers = torch.zeros(len(pinned) - begin, dtype=torch.uint8, device="cuda")
        at = places["awaited"][0] - begin
        kinds = answers[: batch * rows].view(batch, rows)
        return cls(arrays, post, wait, pinned[begin:], answers, kinds, answers[at : at + 8].view(torch.int64))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=2000, help="replays of each graph (default 2000)")
    parser.add_argument("--pairs", type=int, default=10, help="post/wait pairs in one graph (default 10)")
    parser.add_argument("--slots", type=int, default=1, help="lanes that post and wait (default 1)")
    parser.add_argument("--rows", type=int, default=4, help="mask rows a lane, K + 1 (default 4)")
    parser.add_argument("--vocab", type=int, default=128256, help="columns of a row (default 128256)")
    parser.add_argument("--work-ns", type=int, default=100_000, help="device work between the two (default 100 us)")
    parser.add_argument("--spin-us", type=float, default=1e6, help="the peer spins so long, then parks (default 1 s)")
    parser.add_argument("--limit-s", type=float, default=300.0, help="stop the replays of a way after this long")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; exit 1 when a row was stale, torn or missing."""
    args = parse(argv)
    if not torch.cuda.is_available():
        print("bench_sync needs a CUDA device; there is none here")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{args.slots} lanes x {args.rows} rows, V={args.vocab}")
    head = ("sync", "nodes/pair", "us/pair", "exposed us", "pairs", "rows lost", "words wrong")
    print("{:20} {:>10} {:>9} {:>10} {:>9} {:>9} {:>11}".format(*head))
    failures = 0
    for f in figures(args):
        failures += f.lost + f.wrong
        cost = f"{f.nodes:10.1f} {f.us:9.2f} {f.exposed_us:10.2f}"
        print(f"{f.mode:20} {cost} {f.pairs:9d} {f.lost:9d} {f.wrong:11d}", flush=True)
    return 1 if failures else 0


@dataclass(frozen=True, slots=True)
class PairFigures:
    """What one way of meeting cost."""

    mode: str
    nodes: float
    """Nodes of the graph a pair, with the work and the check."""
    us: float
    """Microseconds a pair."""
    exposed_us: float
    """Those above the same work without a pair."""
    pairs: int
    lost: int
    """Rows that did not come in time."""
    wrong: int
    """Words that were not their post's."""


def figures(args: argparse.Namespace, modes: Sequence[str] = MODES) -> Iterator[PairFigures]:
    """Measure every way in turn, the work without a pair ("none") first. `args.limit_s` bounds each way's replays."""
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(args, Path(directory))
        with PinnedSegment(bench.segment) as pinned:
            flags, end = DeviceFlags(pinned.numbers(), bench.segment.start_seq), EngineEnd(bench.segment)
            graph, nodes = bench.capture(lambda: bench.floor(flags))
            base = statistics.median(bench.replay(graph, 200)[0] for _ in range(5))
            yield PairFigures("none", nodes / args.pairs, base, 0.0, 0, 0, 0)
            host = HostArrays.of(end, args.slots, args.rows)
            for mode in modes:
                body = partial(bench.host_callback, flags, host, low_latency=mode.endswith("spin"))
                if mode == "device_flag":  # one counter at a time: the device goes on where the host stopped
                    flags.counter[0] = end.last_seq
                    body = partial(bench.device_flag, flags)
                graph, nodes = bench.capture(body)
                bench.replay(graph, 50)
                bench.bad.zero_()
                took, times = bench.replay(graph, args.replays)
                lost, wrong = bench.bad.tolist()
                yield PairFigures(mode, nodes / args.pairs, took, took - base, times * args.pairs, lost, wrong)
            torch.cuda.synchronize()
        bench.socket.close()
        bench.peer.wait(timeout=10)
