"""`python -m benchmarks bench_channel`: the round trip of a step through shared memory, between two real processes.

Invariant: a round is the engine's post, the other process's records, rows and publish, and the engine's await, timed
in the engine's process. All wait policies run in one call on the same segment shape.
Not responsible for: matchers; the other process copies a finished row, so a figure is the floor of every mask latency.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.tables import number, table
from shared_mem.channel import DEFAULT_SPIN_NS, EngineEnd, GrammarEnd
from shared_mem.errors import InvalidField
from shared_mem.handover import SOCKET_NAME, connect, hung_up, listen, recv_segment, send_segment
from shared_mem.layout import Layout, RowKind
from shared_mem.segment import Segment

POLICIES = {"spin": 10**12, "brief": DEFAULT_SPIN_NS, "park": 0}
"""How long both sides spin before they sleep on a futex, in nanoseconds."""

EXAMPLES = """
examples:
  python -m benchmarks bench_channel                                one slot, the rows of K = 7, a vocabulary of 49152
  python -m benchmarks bench_channel --slots 16 --vocab 151936      a large batch and a large vocabulary
  python -m benchmarks bench_channel --policy park --rounds 200000  one policy, a better tail

reading the table:
  policy    spin: never sleep, needs a core to itself; brief: spin for 20 us, then sleep; park: sleep at once
  p50 ...   microseconds per round at that percentile, Python on both sides included
  wait      mean of the time inside the await; the rest is the engine's own post and call overhead
  slow      rounds above a millisecond: the scheduler gave a core to somebody else
"""


@dataclass(frozen=True, slots=True)
class Result:
    """One policy's rounds. `rounds_us` is sorted."""

    policy: str
    rounds_us: list[float]
    wait_us: float

    def percentile(self, share: float) -> float:
        """Return the round time below which `share` of the rounds are, in microseconds."""
        return self.rounds_us[min(int(len(self.rounds_us) * share), len(self.rounds_us) - 1)]


def serve_peer(path: Path, spin_ns: int) -> None:
    """Be the grammar process: copy a ready row for every wanted one, until the engine hangs up."""
    with listen(path) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
    with connection, recv_segment(connection) as segment:
        end = GrammarEnd(segment)
        rows = end.layout.num_rows
        ready = np.arange(rows * end.row_stride, dtype=np.uint8)
        kinds, last = [RowKind.APPLY] * rows, end.start_seq
        while True:
            newest = end.wait(last, timeout_s=0.1, spin_ns=min(spin_ns, 10**8))
            if newest == last and hung_up(connection):
                return
            for seq in range(last + 1, newest + 1):
                for record in end.records(seq):
                    ctypes.memmove(end.row_address(seq, record.slot, 0), ready.ctypes.data, ready.nbytes)
                    end.publish(seq, record.slot, record.slot_gen, kinds)
            last = newest


@contextmanager
def attached(layout: Layout, spin_ns: int) -> Iterator[EngineEnd]:
    """Start the other process, give it a segment, and end it."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as directory:
        path = Path(directory) / SOCKET_NAME
        command = [
            sys.executable,
            "-m",
            "benchmarks.speed.bench_channel",
            "--peer",
            str(path),
            "--spin-ns",
            str(spin_ns),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as peer:
            try:
                assert peer.stdout is not None
                if peer.stdout.readline() != b"listening\n":
                    raise SystemExit("the other process did not start")
                with Segment.create(layout) as segment, connect(path) as sock:
                    send_segment(sock, segment)
                    yield EngineEnd(segment, spin_ns)
            finally:
                peer.kill()


def measure(layout: Layout, slots: int, policy: str, rounds: int) -> Result:
    """Run `rounds` rounds (and a tenth more before, to warm up) of `slots` slots under one policy."""
    with attached(layout, POLICIES[policy]) as end:
        arrays = end.batch_arrays(slots)
        arrays.slots[:] = np.arange(slots)
        arrays.n_commit[:] = 1
        arrays.n_draft[:] = layout.num_rows - 1
        times_ns, waits_ns = [], 0
        for index in range(-(rounds // 10), rounds):
            started = time.perf_counter_ns()
            result = end.await_batch(arrays, end.post_batch(arrays), timeout_s=10)
            ended = time.perf_counter_ns()
            if result.num_missing:
                raise SystemExit(f"round {index}: {result.num_missing} slots were not answered within 10 s")
            if index >= 0:
                times_ns.append(ended - started)
                waits_ns += result.waited_ns
    return Result(policy, sorted(t / 1e3 for t in times_ns), waits_ns / rounds / 1e3)


def report(results: list[Result]) -> str:
    """Return the table."""
    rows = [
        [
            result.policy,
            *(number(result.percentile(share), 1) for share in (0.5, 0.99, 0.999)),
            number(result.rounds_us[-1], 0),
            number(result.wait_us, 1),
            f"{sum(t > 1000 for t in result.rounds_us)} of {len(result.rounds_us)}",
        ]
        for result in results
    ]
    return table(["policy", "p50 us", "p99 us", "p99.9 us", "max us", "wait us", "slow"], rows)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks bench_channel",
        description="Measure round trips of the shared-memory channel between two processes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=20_000, help="rounds per policy (default %(default)s)")
    add("--slots", type=int, default=1, help="slots per round (default %(default)s)")
    add("--rows", type=int, default=8, help="rows per slot, K + 1 (default %(default)s)")
    add("--vocab", type=int, default=49152, help="vocabulary (default %(default)s)")
    add("--policy", choices=[*POLICIES, "all"], default="all", help="how both sides wait (default %(default)s)")
    add("--peer", type=Path, help=argparse.SUPPRESS)
    add("--spin-ns", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Measure and print."""
    parser = build_parser()
    options = parser.parse_args()
    if options.peer is not None:
        serve_peer(options.peer, options.spin_ns)
        return 0
    if options.rounds < 1 or options.slots < 1:
        parser.error("--rounds and --slots: at least 1")
    try:
        layout = Layout(num_slots=options.slots, num_rows=options.rows, vocab_size=options.vocab)
    except InvalidField as error:
        parser.error(str(error))
    chosen = POLICIES if options.policy == "all" else [options.policy]
    cores = len(os.sched_getaffinity(0))
    print(f"{options.slots} slots x {options.rows} rows x {layout.row_stride} bytes, {cores} cores\n")
    print(report([measure(layout, options.slots, policy, options.rounds) for policy in chosen]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
