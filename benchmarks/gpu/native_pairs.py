"""The pair of post and await without a GPU: the native functions of a graph's host nodes, called one after the other.

Invariant: the other end is a process, as for a graph, and every word of every row is checked.
Not responsible for: graphs (see bench_graph.py).
"""

from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import dataclass

from benchmarks.gpu.sync_peer import attached
from shared_mem.channel import EngineEnd
from shared_mem.layout import Layout, RowKind
from shared_mem.segment import Segment

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_LIMIT_S = 100.0


@dataclass(frozen=True, slots=True)
class NativeFigures:
    """As `bench_sync.PairFigures`."""

    mode: str
    us: float
    exposed_us: float
    pairs: int
    lost: int
    wrong: int


def native_pairs(count: int, *, rows: int, vocab: int, work_us: float) -> NativeFigures:
    """Post and await `count` times with so much work between the two, or as often as fits into 100 s."""
    lost = wrong = done = 0
    spent_ns, until_s = 0, time.monotonic() + _LIMIT_S
    with Segment.create(Layout(1, rows, vocab)) as segment:
        end = EngineEnd(segment)
        arrays, post, wait = end.host_calls(1, timeout_s=2.0)
        arrays.slots[:] = 0
        post_now, wait_now = _FUNCTION(post.function), _FUNCTION(wait.function)
        with attached(segment, spin_us=50.0):
            while done < count and time.monotonic() < until_s:
                start_ns = time.perf_counter_ns()
                post_now(post.user_data)
                while time.perf_counter_ns() - start_ns < work_us * 1e3:
                    pass
                wait_now(wait.user_data)
                spent_ns += time.perf_counter_ns() - start_ns
                done += 1
                seq = int(arrays.awaited[0])
                here = arrays.kinds[0] == int(RowKind.APPLY)
                lost += rows - int(here.sum())
                words = end.mask_rows(seq)[0][:, : (vocab + 31) // 32]
                wrong += int((words[here] != seq & 0x7FFFFFFF).sum())
                if done % 100_000 == 0:
                    print(f"{done} of {count} pairs", file=sys.stderr, flush=True)
    us = spent_ns / 1e3 / done
    return NativeFigures("native calls", us, us - work_us, done, lost, wrong)
