"""Fills the rows of many xgrammar matchers: level by level, each level in one call of the library on its own threads.

Invariant: after a call a matcher has advanced over the drafts that it accepted, and the result says how many. The
library handles stop tokens and special tokens itself; `special` clears only the bits beyond the vocabulary.
Not responsible for: the rows of a single matcher (see backend.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xgrammar
from numpy.typing import NDArray

from grammar_service.backends.backend import Chain, Filled, MatcherFailed
from grammar_service.grammar.vocabulary import Vocabulary
from service_runtime.cores import usable_cores
from shared_mem.chains import SpecialWords

CORES_FOR_DRAFTS = 8
"""The fewest cores with which chains with drafts are faster in one call than row by row (docs/log.md)."""


class XgrammarFiller:
    """The chain filler of all xgrammar matchers over one vocabulary; see `ChainFiller`.

    `never`: tokens that no row allows and no matcher accepts. `full`: the row of all tokens, int32 [W].
    """

    def __init__(self, vocabulary: Vocabulary, never: frozenset[int], full: NDArray[np.int32]) -> None:
        self.never = never
        tail = full[-1:].view(np.uint32)
        self.special = SpecialWords(np.array([len(full) - 1], dtype=np.int32), tail, np.zeros_like(tail))
        # Each level of drafts is one call, which pays only if several threads share its rows.
        self.follows_drafts = usable_cores() >= CORES_FOR_DRAFTS
        self._size = vocabulary.size
        self._apart = never | frozenset(vocabulary.stop_ids)
        self._pools: list[xgrammar.BatchGrammarMatcher] = []
        """Thread pools of the library that no call uses now."""

    def all_plain(self, tokens: Sequence[int]) -> bool:
        """Check each token: the library prints a line about each special token."""
        apart, size = self._apart, self._size
        return all(0 <= token < size and token not in apart for token in tokens)

    def accept(self, matcher: Any, tokens: Sequence[int]) -> int:
        """Advance over the tokens one by one."""
        accept = matcher.inner.accept_token
        try:
            for accepted, token in enumerate(tokens):
                if not accept(token):
                    return accepted
        except RuntimeError as error:
            raise MatcherFailed(str(error)) from None
        return len(tokens)

    def fill(self, chains: Sequence[Chain], rows: NDArray[np.int32], threads: int) -> Filled:
        """Fill the first row of every chain, then the next row of each chain whose draft is legal, and so on."""
        try:
            pool = self._pools.pop()
        except IndexError:
            pool = xgrammar.BatchGrammarMatcher(max_threads=threads)
        tensor = torch.from_numpy(rows)
        num_accepted = [0] * len(chains)
        active, level = list(range(len(chains))), 0
        try:
            while active:
                active = [i for i in active if not level or self._accepts_draft(chains[i], level, num_accepted, i)]
                if active:
                    inners, places = [chains[i].matcher.inner for i in active], [chains[i].row + level for i in active]
                    pool.batch_fill_next_token_bitmask(inners, tensor, places)
                level += 1
        except RuntimeError:
            # The library does not say which matcher failed, so all of them count as failed.
            return Filled([-1] * len(chains), [False] * len(chains))
        self._pools.append(pool)
        return Filled(num_accepted, [False] * len(chains))

    def _accepts_draft(self, chain: Chain, level: int, num_accepted: list[int], i: int) -> bool:
        if level > len(chain.drafts) or not chain.matcher.inner.accept_token(chain.drafts[level - 1]):
            return False
        num_accepted[i] = level
        return True

    def __repr__(self) -> str:
        return f"<XgrammarFiller idle pools={len(self._pools)}>"
