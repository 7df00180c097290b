"""Mask rows through a real segment: the sidecar's worker answers, and each row is also computed directly.

Invariant: every step posts right and wrong drafts, so rows after rollbacks are compared.
Not responsible for: verdicts, tables (see maskbench.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from grammar_service.backends.backend import Compiled
from grammar_service.fill.matchers import SlotMatcher
from grammar_service.fill.worker import Worker
from shared_mem.channel import AwaitResult, EngineEnd, GrammarEnd
from shared_mem.layout import Layout, RowKind
from shared_mem.segment import Segment

NUM_ROWS = 4
"""Rows per record: three drafts."""
TIMEOUT_S = 60.0
"""Bound of the wait for all rows of one record."""


class SharedRows:
    """A worker with a real segment, asked as an engine asks: the other way to the same masks.

    A row that misses the deadline of the worker is waited for and compared like any other.

    Args:
        vocab_size: tokens of a row.
        row_deadline_ms: see `Worker`.
    """

    def __init__(self, vocab_size: int, row_deadline_ms: float = 2.0) -> None:
        layout = Layout(num_slots=1, num_rows=NUM_ROWS, vocab_size=vocab_size)
        self._segment = Segment.create(layout)
        self._engine = EngineEnd(self._segment)
        self._worker = Worker(GrammarEnd(self._segment), row_deadline_ms=row_deadline_ms)
        self._worker.start()
        self._gen = 0
        self._random = random.Random(0)

    def compare(
        self, compiled: Compiled, tokens: Sequence[int], direct: Sequence[NDArray[np.int32]]
    ) -> tuple[int, int]:
        """Walk `tokens` in steps of 1 to 4 with true and false drafts; return how many rows came, and how many differ.

        `direct` holds the row before each token, and the one after the last.
        """
        self._gen += 1
        self._worker.bind(0, SlotMatcher.bind(self._gen, compiled.matcher, ()))
        words = direct[0].size
        at, rows, differing = 0, 0, 0
        step: Sequence[int] = ()
        while at <= len(tokens):
            drafts = list(tokens[at : at + NUM_ROWS - 1])
            if drafts and self._random.random() < 0.5:
                drafts[self._random.randrange(len(drafts))] = self._random.randrange(words * 32)
            said = [*step, *drafts]
            seq = self._engine.post([0], [self._gen], [at - len(step)], [len(step)], [len(drafts)], [said])
            kinds = self._await_all_rows(seq).kinds[0]
            true = next((i for i, draft in enumerate(drafts) if draft != tokens[at + i]), len(drafts))
            for row in range(true + 1):
                rows += 1
                differing += not _equal(kinds[row], self._engine.mask_rows(seq)[0, row, :words], direct[at + row])
            taken = self._random.randrange(true + 1) + 1
            step = tokens[at : at + taken]
            at += taken
        return rows, differing

    def _await_all_rows(self, seq: int) -> AwaitResult:
        """Await the answer, and the rows that the worker adds to it after its deadline."""
        until = time.monotonic() + TIMEOUT_S
        while True:
            result = self._engine.await_rows(seq, [0], [self._gen], timeout_s=TIMEOUT_S)
            if not result.num_late or time.monotonic() > until:
                return result
            time.sleep(1e-4)

    @property
    def num_late(self) -> int:
        """Answers that the worker published before all their rows were filled."""
        return int(self._worker.stats()["late_answers"])

    def close(self) -> None:
        """Stop the worker and unmap."""
        self._worker.stop()
        self._segment.close()


def _equal(kind: int, shared: NDArray[np.int32], direct: NDArray[np.int32]) -> bool:
    if kind in (RowKind.APPLY, RowKind.FORCED):
        return bool((shared == direct).all())
    return kind == RowKind.DEAD_END and not direct.any()
