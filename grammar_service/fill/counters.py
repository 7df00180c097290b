"""What one worker has counted since its start.

Invariant: counting takes no lock. Arrays have a row per slot, which one thread at a time writes; the plain numbers may
miss one of two that are counted at the same moment. Not here: what a scrape makes of them (metrics.py).
"""

from __future__ import annotations

import collections

import numpy as np

from grammar_service.metrics import FillTimes
from shared_mem.batch import Int32Array
from shared_mem.layout import RowKind

_SAMPLES = 4096


class Counters:
    """Counters of answers, rows and times."""

    def __init__(self, num_slots: int) -> None:
        self.tallies = np.zeros((num_slots, len(RowKind)), dtype=np.int64)
        """Rows of each slot by kind."""
        self.records = self.overruns = self.batched_records = 0
        self.late_answers = self.late_rows = self.reused_rows = self.filled_rows = self.refilled_rows = 0
        self.proposed_tokens = 0
        self.fill_times = FillTimes(num_slots)
        self._fill_ns: collections.deque[int] = collections.deque(maxlen=_SAMPLES)

    def took(self, slot: int, ns: int) -> None:
        """Count the time of one record."""
        self._fill_ns.append(ns)
        self.fill_times.observe(slot, ns)

    def took_together(self, slots: Int32Array, ns: int) -> None:
        """Count the time of records that were answered together: `ns` is each one's share."""
        self._fill_ns.extend([ns] * len(slots))
        self.fill_times.observe(slots, ns)

    def rows_by_kind(self) -> dict[str, int]:
        """Return how many rows were answered with each kind."""
        totals = self.tallies.sum(axis=0)
        return {kind.name: int(totals[kind]) for kind in RowKind}

    def stats(self) -> dict[str, float]:
        """Return counters, and fill times of the last records in microseconds."""
        samples = np.asarray(list(self._fill_ns) or [0]) / 1e3
        out: dict[str, float] = {"records": self.records, "overruns": self.overruns}
        out.update(batched_records=self.batched_records, late_answers=self.late_answers, late_rows=self.late_rows)
        out.update(filled_rows=self.filled_rows, refilled_rows=self.refilled_rows, reused_rows=self.reused_rows)
        out.update(proposed_tokens=self.proposed_tokens)
        out.update(fill_p50_us=float(np.percentile(samples, 50)), fill_p99_us=float(np.percentile(samples, 99)))
        return out

    def __repr__(self) -> str:
        return f"<Books records={self.records} filled_rows={self.filled_rows}>"
