"""Fills the rows of many llguidance matchers in one call, on the library's own thread pool.

Invariant: after a call every matcher is in the state that it had before, because the library rolls the drafts back. A
matcher that fails is reported. Rows are written as the library computes them: the caller applies `special` to them.
Not responsible for: the rows of a single matcher (see backend.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from grammar_service.backends.backend import Chain, Filled, MatcherFailed
from grammar_service.grammar.vocabulary import Vocabulary
from shared_mem.chains import SpecialWords


class LlguidanceFiller:
    """The chain filler of all llguidance matchers over one vocabulary; see `ChainFiller`."""

    follows_drafts = True

    def __init__(self, vocabulary: Vocabulary, special: SpecialWords) -> None:
        self.special = special
        self._size = vocabulary.size
        self._never = frozenset(vocabulary.special) | frozenset(vocabulary.stop_ids)
        self._idle: list[LLExecutor] = []
        """Executors that no call uses now. Each has its own threads,
        so a call that hangs does not block the next one."""

    def all_plain(self, tokens: Sequence[int]) -> bool:
        """Check each token: a token out of range would put the library's matcher into its error state."""
        never, size = self._never, self._size
        return all(0 <= token < size and token not in never for token in tokens)

    def accept(self, matcher: Any, tokens: Sequence[int]) -> int:
        """Advance over all tokens in one call of the library."""
        inner = matcher.inner
        accepted: int = inner.try_consume_tokens(tokens)
        if accepted < len(tokens) and inner.is_error():
            raise MatcherFailed(inner.get_error())
        return accepted

    def fill(self, chains: Sequence[Chain], rows: NDArray[np.int32], threads: int) -> Filled:
        """Fill all single rows in one call of the library, and all chains with drafts in another."""
        try:
            executor = self._idle.pop()
        except IndexError:
            executor = LLExecutor(threads)  # made on demand, because compile workers never fill chains
        place = rows.ctypes.data, rows.strides[0], len(rows)
        if single := [(chain.matcher.inner, chain.row) for chain in chains if not chain.drafts]:
            executor.unsafe_compute_mask_ptr(single, *place)
        if longer := [(chain.matcher.inner, chain.row, chain.drafts) for chain in chains if chain.drafts]:
            executor.unsafe_compute_mask_ptr_with_draft_token(longer, *place)
        self._idle.append(executor)
        inners = [chain.matcher.inner for chain in chains]
        return Filled([-inner.is_error() for inner in inners], [inner.is_accepting() for inner in inners])

    def __repr__(self) -> str:
        return f"<LlguidanceFiller idle pools={len(self._idle)}>"
