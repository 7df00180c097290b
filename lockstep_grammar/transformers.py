"""A logits processor for transformers' `generate`: a grammar for each sequence, computed in the grammar process.

    processor = GrammarProcessor(compiled, prompt_length, max_new_tokens=200)
    model.generate(**inputs, max_new_tokens=200, logits_processor=[processor])

Invariant: no position is unmasked. An error of a matcher is raised out of `generate`, because `generate` has no way to
end one sequence of a batch; with `keeps_errors` that sequence ends with a stop token instead, and its error is kept.

One processor serves one call of `generate`, without beams: a beam changes the tokens of a row under its matcher, which
moves the matcher of the row each time. Not responsible for: rows and restarts (see client.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lockstep_grammar.client import Compiled, Matcher
from lockstep_grammar.errors import GrammarError, MatcherFailed


class GrammarProcessor:
    """A transformers `LogitsProcessor`; a sequence that has ended keeps only stop tokens.

    Args:
        compiled: the grammar of all sequences.
        prompt_length: tokens of `input_ids` before the answers, padding included.
        max_new_tokens: the limit that `generate` has; near it rows are narrowed so that the answers end in time. 0: not
            known, and they are not.
        keeps_errors: a sequence whose matcher fails ends with a stop token, and `errors` has why. False: the error is
            raised.
    """

    def __init__(
        self, compiled: Compiled, prompt_length: int, *, max_new_tokens: int = 0, keeps_errors: bool = False
    ) -> None:
        self._compiled, self._prompt_length = compiled, prompt_length
        self._max_tokens, self._keeps_errors = max_new_tokens, keeps_errors
        self._matchers: dict[int, Matcher] = {}
        self.errors: dict[int, GrammarError] = {}
        """Sequence -> why its matcher failed."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return the scores [B, V] with minus infinity for each illegal token."""
        vocab_size = scores.shape[-1]
        legal = np.zeros((len(input_ids), vocab_size), dtype=bool)
        answers: list[list[int]] = input_ids[:, self._prompt_length :].tolist()
        running = [b for b, answer in enumerate(answers) if self._advance(b, answer)]
        for b in range(len(answers)):
            if b not in running or not self._fill(b, legal[b]):
                legal[b, list(self._compiled.grammars.stop_token_ids)] = True
        mask = torch.from_numpy(~legal).to(scores.device)
        return scores.masked_fill(mask, -float("inf"))

    def _advance(self, b: int, answer: list[int]) -> bool:
        """Bring a sequence's matcher to its tokens, and ask for its row. False: the sequence has ended."""
        matcher = self._matchers.get(b)
        if matcher is None:
            matcher = self._matchers[b] = self._compiled.open(self._max_tokens)
        common = 0
        while common < min(len(answer), len(matcher.tokens)) and matcher.tokens[common] == answer[common]:
            common += 1
        try:
            matcher.rollback(len(matcher.tokens) - common)
            for token in answer[common:]:
                if matcher.terminated:
                    return False  # padding after the stop token
                if not matcher.accept(token):
                    raise MatcherFailed(f"sequence {b}: token {token} at {len(matcher.tokens)} is illegal")
            matcher.post()
        except GrammarError as error:
            return self._failed(b, error)
        return not matcher.terminated

    def _fill(self, b: int, legal: np.ndarray) -> bool:
        try:
            row = self._matchers[b].row()
        except GrammarError as error:
            return self._failed(b, error)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: len(legal)]
        legal[: len(bits)] = bits.astype(bool)
        return True

    def _failed(self, b: int, error: GrammarError) -> bool:
        if not self._keeps_errors:
            raise error
        self.errors.setdefault(b, error)
        return False

    def __repr__(self) -> str:
        return f"<GrammarProcessor sequences={len(self._matchers)} errors={len(self.errors)}>"
