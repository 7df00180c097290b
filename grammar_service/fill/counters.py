"""What one worker has counted since its start.

Invariant: counting takes no lock. Arrays have a row per slot, which one thread at a time writes. The plain numbers may
miss one of two increments that happen at the same moment.

Not responsible for: the metrics that are made of these numbers (see metrics.py).
"""

from __future__ import annotations

import collections
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from shared_mem.batch import Int32Array
from shared_mem.layout import RowKind

FILL_BOUNDS_S = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1.0)
"""Upper bounds of the buckets of the fill times; one more bucket has the rest."""

_BOUNDS_NS = tuple(int(bound * 1e9) for bound in FILL_BOUNDS_S)
_NUM_SAMPLES = 4096
"""The last fill times, for the percentiles of `Counters.stats`."""


class FillTimes:
    """A histogram of fill times with a row per slot. Two threads never share a slot, so a row has one writer."""

    def __init__(self, num_slots: int) -> None:
        self._counts = np.zeros((num_slots, len(_BOUNDS_NS) + 1), dtype=np.int64)
        self._sum_ns = np.zeros(num_slots, dtype=np.int64)

    def observe(self, slots: int | Int32Array, ns: int) -> None:
        """Count one record of each of `slots`, one slot or several different ones, that took `ns` nanoseconds."""
        self._counts[slots, bisect_left(_BOUNDS_NS, ns)] += 1
        self._sum_ns[slots] += ns

    def totals(self) -> tuple[tuple[int, ...], int]:
        """Return the counts per bucket, not cumulated, and the sum in nanoseconds."""
        return tuple(self._counts.sum(axis=0).tolist()), int(self._sum_ns.sum())

    def __repr__(self) -> str:
        return f"<FillTimes records={int(self._counts.sum())}>"


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """A snapshot of a worker's counters."""

    records: int = 0
    overruns: int = 0
    filled_rows: int = 0
    gaps: int = 0
    rebuilds: int = 0
    matchers: int = 0
    """A gauge: bound matchers at the time of the snapshot."""
    rows_by_kind: dict[str, int] = field(default_factory=dict)
    fill_counts: tuple[int, ...] = (0,) * (len(_BOUNDS_NS) + 1)
    fill_sum_ns: int = 0

    def plus(self, other: WorkerCounts) -> WorkerCounts:
        """Return the sum of both; the gauge is `other`'s."""
        kinds = {*self.rows_by_kind, *other.rows_by_kind}
        return WorkerCounts(
            records=self.records + other.records,
            overruns=self.overruns + other.overruns,
            filled_rows=self.filled_rows + other.filled_rows,
            gaps=self.gaps + other.gaps,
            rebuilds=self.rebuilds + other.rebuilds,
            matchers=other.matchers,
            rows_by_kind={kind: self.rows_by_kind.get(kind, 0) + other.rows_by_kind.get(kind, 0) for kind in kinds},
            fill_counts=tuple(a + b for a, b in zip(self.fill_counts, other.fill_counts, strict=True)),
            fill_sum_ns=self.fill_sum_ns + other.fill_sum_ns,
        )


class Counters:
    """Counters of answers, rows and fill times."""

    def __init__(self, num_slots: int) -> None:
        self.tallies = np.zeros((num_slots, len(RowKind)), dtype=np.int64)
        """Answered rows of each slot by kind."""
        self.records = self.overruns = self.batched_records = 0
        self.late_answers = self.late_rows = self.filled_rows = 0
        self.proposed_tokens = self.dropped_proposals = 0
        """Jump-forward tokens, and proposals that came too late."""
        self.fill_times = FillTimes(num_slots)
        self._fill_ns: collections.deque[int] = collections.deque(maxlen=_NUM_SAMPLES)

    def took(self, slot: int, ns: int) -> None:
        """Count the time of one record."""
        self._fill_ns.append(ns)
        self.fill_times.observe(slot, ns)

    def took_together(self, slots: Int32Array, ns: int) -> None:
        """Count the time of records that were answered together; `ns` is the share of each."""
        self._fill_ns.extend([ns] * len(slots))
        self.fill_times.observe(slots, ns)

    def rows_by_kind(self) -> dict[str, int]:
        """Return the number of answered rows of each kind."""
        totals = self.tallies.sum(axis=0)
        return {kind.name: int(totals[kind]) for kind in RowKind}

    def stats(self) -> dict[str, float]:
        """Return the counters, and percentiles of the last fill times in microseconds."""
        samples = np.asarray(list(self._fill_ns) or [0]) / 1e3
        out: dict[str, float] = {"records": self.records, "overruns": self.overruns}
        out.update(batched_records=self.batched_records, late_answers=self.late_answers, late_rows=self.late_rows)
        out.update(filled_rows=self.filled_rows)
        out.update(proposed_tokens=self.proposed_tokens)
        out.update(dropped_proposals=self.dropped_proposals)
        out.update(fill_p50_us=float(np.percentile(samples, 50)), fill_p99_us=float(np.percentile(samples, 99)))
        return out

    def __repr__(self) -> str:
        return f"<Counters records={self.records} filled_rows={self.filled_rows}>"
