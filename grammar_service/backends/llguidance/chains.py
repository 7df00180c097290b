"""Rows of many llguidance matchers in one call: the library's own thread pool goes along every chain of drafts.

Invariant: behind a call every matcher stands where it stood, since the library takes the drafts back; one that it has
failed on is reported and never asked again. Rows are the library's own: stop tokens and other special ones are sorted
out by whoever reads them. Not here: one matcher by itself (llguidance.py).
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
    """See `backends.ChainFiller`."""

    follows_drafts = True

    def __init__(self, vocabulary: Vocabulary, special: SpecialWords) -> None:
        self.special = special
        self._size = vocabulary.size
        self._never = frozenset(vocabulary.special) | frozenset(vocabulary.stop_ids)
        self._idle: list[LLExecutor] = []
        """Those that no thread uses now; each has threads of its own, which a call that hangs keeps."""

    def all_plain(self, tokens: Sequence[int]) -> bool:
        """Look at each token: one out of range would be an error of the whole matcher."""
        never, size = self._never, self._size
        return all(0 <= token < size and token not in never for token in tokens)

    def accept(self, matcher: Any, tokens: Sequence[int]) -> int:
        """Move over all of them in one call."""
        inner = matcher.inner
        taken: int = inner.try_consume_tokens(tokens)
        if taken < len(tokens) and inner.is_error():
            raise MatcherFailed(inner.get_error())
        return taken

    def fill(self, chains: Sequence[Chain], rows: NDArray[np.int32], threads: int) -> Filled:
        """Fill chains with drafts and rows without, each in one call of the library."""
        try:
            executor = self._idle.pop()
        except IndexError:
            executor = LLExecutor(threads)  # late: a backend in a compile worker needs no threads
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
