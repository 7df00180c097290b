"""Rows of many xgrammar matchers: level by level, each level in one call of the library on its own threads.

Invariant: a matcher ends behind the drafts that it has accepted, and says behind how many. Rows are the library's own:
it sees to stop tokens and special ones by itself, and what is left is the tail of the last word. Not here: one matcher
by itself (xgrammar.py).
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


class XgrammarFiller:
    """See `backends.ChainFiller`. `never`: tokens that no row offers and no matcher takes."""

    def __init__(self, vocabulary: Vocabulary, never: frozenset[int], full: NDArray[np.int32]) -> None:
        self.never = never
        tail = full[-1:].view(np.uint32)
        self.special = SpecialWords(np.array([len(full) - 1], dtype=np.int32), tail, np.zeros_like(tail))
        # A call a draft costs more than it saves on two cores (docs/log.md): there must be threads to share it.
        self.follows_drafts = usable_cores() >= CORES_FOR_DRAFTS
        self._size = vocabulary.size
        self._apart = never | frozenset(vocabulary.stop_ids)
        self._pools: list[xgrammar.BatchGrammarMatcher] = []
        """Those that no thread uses now; each has threads of its own."""

    def all_plain(self, tokens: Sequence[int]) -> bool:
        """Look at each token: about a special one the library prints a line."""
        apart, size = self._apart, self._size
        return all(0 <= token < size and token not in apart for token in tokens)

    def accept(self, matcher: Any, tokens: Sequence[int]) -> int:
        """Move over one token after the other."""
        accept = matcher.inner.accept_token
        try:
            for taken, token in enumerate(tokens):
                if not accept(token):
                    return taken
        except RuntimeError as error:
            raise MatcherFailed(str(error)) from None
        return len(tokens)

    def fill(self, chains: Sequence[Chain], rows: NDArray[np.int32], threads: int) -> Filled:
        """Fill the first row of every chain, then the next one of those whose draft is legal, and so on."""
        try:
            pool = self._pools.pop()
        except IndexError:
            pool = xgrammar.BatchGrammarMatcher(max_threads=threads)
        tensor = torch.from_numpy(rows)
        stands = [0] * len(chains)
        going, level = list(range(len(chains))), 0
        try:
            while going:
                going = [i for i in going if not level or self._passes(chains[i], level, stands, i)]
                if going:
                    inners, places = [chains[i].matcher.inner for i in going], [chains[i].row + level for i in going]
                    pool.batch_fill_next_token_bitmask(inners, tensor, places)
                level += 1
        except RuntimeError:
            # It does not say which one.
            return Filled([-1] * len(chains), [False] * len(chains))
        self._pools.append(pool)
        return Filled(stands, [False] * len(chains))

    def _passes(self, chain: Chain, level: int, stands: list[int], i: int) -> bool:
        if level > len(chain.drafts) or not chain.matcher.inner.accept_token(chain.drafts[level - 1]):
            return False
        stands[i] = level
        return True

    def __repr__(self) -> str:
        return f"<XgrammarFiller idle pools={len(self._pools)}>"
