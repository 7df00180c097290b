"""Moves many llguidance matchers and fills their rows, a few one by one and many on the library's own thread pool.

Invariant: after a fill every matcher is in the state that it had before, because the library rolls the drafts back. A
matcher that fails is reported. Rows are written as the library computes them: the caller applies `special` to them.
Not responsible for: the rows of a single matcher (see backend.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from grammar_service.backends.backend import Filled, MatcherFailed
from grammar_service.grammar.vocabulary import Vocabulary
from shared_mem.chains import SpecialWords

FEW_CHAINS = 16
"""Up to this many chains take less time one after the other than on the library's thread pool (docs/log/)."""


class LlguidanceFiller:
    """The chain filler of all llguidance matchers over one vocabulary; see `ChainFiller`.

    `library_stop`: the stop token that the library itself knows.
    """

    threaded = True

    def __init__(self, vocabulary: Vocabulary, special: SpecialWords, library_stop: int) -> None:
        self.special = special
        self.plain = vocabulary.plain_tokens()
        self._size = vocabulary.size
        self._stops = frozenset(vocabulary.stop_ids)
        self._never = frozenset(vocabulary.special) | self._stops
        self._library_stop = library_stop
        has_stop = special.stops != 0
        self._stop_columns, self._stop_bits = special.at[has_stop], special.stops[has_stop].view(np.int32)
        self._idle: list[LLExecutor] = []
        """Executors that no call uses now. Each has its own threads,
        so a call that hangs does not block the next one."""

    def may_follow(self, matcher: Any, tokens: Sequence[int]) -> bool:
        """Validate all tokens in one call of the library.

        It takes a tenth of the time in which a matcher moves and comes back: at the end of its grammar, a matcher that
        moves writes a report.
        """
        inner = matcher.inner
        ends = bool(tokens) and tokens[-1] in self._stops
        plain = tokens[:-1] if ends else tokens
        if matcher.terminated or not self._all_plain(plain):
            return False
        if ends and not plain:
            return bool(inner.is_accepting())
        # The library knows only one stop token.
        asked = (*plain, self._library_stop) if ends else plain
        legal: int = inner.validate_tokens(asked)
        if legal < len(asked) and inner.is_error():
            raise MatcherFailed(inner.get_error())
        return legal == len(asked)

    def accept_each(self, matchers: Sequence[Any], tokens: Sequence[list[int]]) -> list[int]:
        """Make one call of the library for each matcher. Its parallel call would break a matcher on an illegal token,
        and accepts one token."""
        pairs = list(zip((matcher.inner for matcher in matchers), tokens, strict=True))
        counts = [inner.try_consume_tokens(new) if new else 0 for inner, new in pairs]
        return [
            -1 if count < len(new) and inner.is_error() else count
            for count, (inner, new) in zip(counts, pairs, strict=True)
        ]

    def fill(
        self, matchers: Sequence[Any], drafts: Sequence[list[int]], rows: NDArray[np.int32], stride: int, threads: int
    ) -> Filled:
        """Fill all chains: a few with one call of the library each, many with two calls on its thread pool."""
        inners = [matcher.inner for matcher in matchers]
        first = range(0, len(inners) * stride, stride)
        if len(inners) <= FEW_CHAINS:
            _fill_each(inners, drafts, rows, stride)
        else:
            self._fill_together(list(zip(inners, first, drafts, strict=True)), rows, threads)
        for matcher in matchers:
            matcher.masked()
        # The library's state after a failure allows only a stop token, and an answer that is complete allows one,
        # too. So a first row without a stop token needs no further question.
        ends = rows[first.start : first.stop : stride][:, self._stop_columns] & self._stop_bits
        asked = np.flatnonzero(ends.any(axis=1)).tolist()
        return Filled(
            [i for i, inner in enumerate(inners) if inner.is_error()], [i for i in asked if inners[i].is_accepting()]
        )

    def _fill_together(self, chains: list[tuple[Any, int, list[int]]], rows: NDArray[np.int32], threads: int) -> None:
        # All chains with drafts go in one call, and all first rows in another: those of chains a second time, because
        # the library's rollback over the drafts leaves rows in its parser; see `LlguidanceMatcher.rollback`.
        try:
            executor = self._idle.pop()
        except IndexError:
            executor = LLExecutor(threads)  # made on demand, because compile workers never fill chains
        place = rows.ctypes.data, rows.strides[0], len(rows)
        if longer := [chain for chain in chains if chain[2]]:
            executor.unsafe_compute_mask_ptr_with_draft_token(longer, *place)
        executor.unsafe_compute_mask_ptr([chain[:2] for chain in chains], *place)
        self._idle.append(executor)

    def _all_plain(self, tokens: Sequence[int]) -> bool:
        # A token out of range would put the library's matcher into its error state.
        return not tokens or (min(tokens) >= 0 and max(tokens) < self._size and self._never.isdisjoint(tokens))

    def __repr__(self) -> str:
        return f"<LlguidanceFiller idle pools={len(self._idle)}>"


def _fill_each(inners: list[Any], drafts: Sequence[list[int]], rows: NDArray[np.int32], stride: int) -> None:
    # Without the GIL, on this thread. Each call gets the address of its first row.
    base, row_bytes = rows.ctypes.data, rows.strides[0]
    for i, (inner, tokens) in enumerate(zip(inners, drafts, strict=True)):
        address = base + i * stride * row_bytes
        if tokens:
            inner.unsafe_compute_mask_ptr_with_draft_token(address, row_bytes, tokens)
        # The first row once more after drafts: see `_fill_together`.
        inner.unsafe_compute_mask_ptr(address, row_bytes)
