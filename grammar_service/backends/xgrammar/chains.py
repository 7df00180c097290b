"""Moves many xgrammar matchers and fills their rows: chains with drafts one after the other, single rows in one call.

Invariant: after a fill every matcher is in the state that it had before, because the library rolls the drafts back. The
library handles stop tokens and special tokens itself; `special` clears only the bits beyond the vocabulary.
Not responsible for: the rows of a single matcher (see backend.py), more than one thread (see
grammar_service/fill/work_queues.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xgrammar
from numpy.typing import NDArray

from grammar_service.backends.backend import Filled, MatcherFailed
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.vocabulary import Vocabulary
from shared_mem.chains import SpecialWords
from shared_mem.layout import MAX_ROWS


class XgrammarFiller:
    """The chain filler of all xgrammar matchers over one vocabulary; see `ChainFiller`.

    `never`: tokens that no row allows and no matcher accepts. `full`: the row of all tokens, int32 [W].
    """

    threaded = False

    def __init__(self, vocabulary: Vocabulary, never: frozenset[int], full: NDArray[np.int32]) -> None:
        self.never = never
        tail = full[-1:].view(np.uint32)
        self.special = SpecialWords(np.array([len(full) - 1], dtype=np.int32), tail, np.zeros_like(tail))
        self.plain = vocabulary.plain_tokens()
        self._size = vocabulary.size
        self._stops = frozenset(vocabulary.stop_ids)
        self._apart = never | self._stops
        self._vocabulary = vocabulary
        self._texts: TokenBytes | None = None
        # A chain of n rows as the library's tree: row i has the child i + 1 and no sibling.
        self._children = [torch.tensor([*range(1, n), -1]) for n in range(1, MAX_ROWS + 1)]
        self._siblings = [torch.full((n,), -1) for n in range(1, MAX_ROWS + 1)]

    def may_follow(self, matcher: Any, tokens: Sequence[int]) -> bool:
        """Accept the text of the tokens in one call, which the library counts as one token, and take it back."""
        ends = bool(tokens) and tokens[-1] in self._stops
        plain = tokens[:-1] if ends else tokens
        if matcher.terminated or not self._all_plain(plain):
            return False
        inner = matcher.inner
        try:
            if not plain:
                return not ends or bool(inner.is_completed())
            if self._texts is None:
                self._texts = TokenBytes.of(self._vocabulary)
            if not inner.accept_string(self._texts.text(plain)):
                return False
            legal = not ends or bool(inner.is_completed())
            inner.rollback(1)
        except RuntimeError as error:
            raise MatcherFailed(str(error)) from None
        return legal

    def accept_each(self, matchers: Sequence[Any], tokens: Sequence[list[int]]) -> list[int]:
        """Advance one matcher after the other: the library's call for many takes as long (docs/log/)."""
        return [self._accepted(matcher, new) if new else 0 for matcher, new in zip(matchers, tokens, strict=True)]

    def _accepted(self, matcher: Any, tokens: list[int]) -> int:
        accept = matcher.inner.accept_token
        try:
            return next((number for number, token in enumerate(tokens) if not accept(token)), len(tokens))
        except RuntimeError:
            return -1

    def _all_plain(self, tokens: Sequence[int]) -> bool:
        # The library prints a line about each special token.
        return not tokens or (min(tokens) >= 0 and max(tokens) < self._size and self._apart.isdisjoint(tokens))

    def fill(
        self, matchers: Sequence[Any], drafts: Sequence[list[int]], rows: NDArray[np.int32], stride: int, threads: int
    ) -> Filled:
        """Fill each chain with drafts in one call, which follows them and comes back, and all other chains in another.

        Both calls run on the calling thread, without the GIL: on two cores the library's own threads cost more than
        they save (docs/log/).
        """
        tensor = torch.from_numpy(rows)
        failed, single = [], []
        for i, (matcher, tokens) in enumerate(zip(matchers, drafts, strict=True)):
            if not tokens:
                single.append(i)
            elif not self._fill_chain(matcher.inner, tokens, tensor[i * stride : i * stride + len(tokens) + 1]):
                failed.append(i)
        if single:
            pool = xgrammar.BatchGrammarMatcher(max_threads=1)
            try:
                pool.batch_fill_next_token_bitmask(
                    [matchers[i].inner for i in single], tensor, [i * stride for i in single]
                )
            except RuntimeError:
                # The library does not say which matcher failed, so all of them count as failed.
                failed += single
        return Filled(failed, [])

    def _fill_chain(self, inner: xgrammar.GrammarMatcher, drafts: list[int], rows: torch.Tensor) -> bool:
        count = len(drafts)
        try:
            # The root of the tree has no token.
            inner.traverse_draft_tree(self._children[count], self._siblings[count], torch.tensor([0, *drafts]), rows)
        except RuntimeError:
            return False
        return True

    def __repr__(self) -> str:
        return f"<XgrammarFiller vocabulary={self._size}>"
