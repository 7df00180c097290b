"""No n-gram of prompt and answer occurs twice: a processor that is captured with the step.

As transformers' `no_repeat_ngram_size`, but an end-of-sequence token is never forbidden, so that an answer can end.
With a grammar it may leave no legal token, since grammars repeat their own signs; the request then ends with
GRAMMAR_ERROR.

Shapes: N rows, L tokens, V columns of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from gpu_engine.api.processors import CapturedRows, ProcessorRequest, ProcessorSetup

MAX_SIZE = 16
"""The longest n-gram: a captured step compares so many tokens, whatever its requests ask for."""


class NoRepeatedNgrams:
    """Argument `size`: n, an integer in [1, 16]."""

    capturable: Literal[True] = True
    num_arguments = 1

    def __init__(self, setup: ProcessorSetup) -> None:
        if setup.options:
            raise ValueError(f"knows no option {next(iter(setup.options))!r}")
        self._eos = torch.tensor(setup.eos_token_ids, dtype=torch.int64, device=setup.device)

    def prepare(self, request: ProcessorRequest) -> Sequence[float]:
        """Return the size. Raises ValueError."""
        size = request.arguments.get("size")
        if set(request.arguments) != {"size"} or type(size) is not int or not 1 <= size <= MAX_SIZE:
            raise ValueError(f"needs one argument, size, an integer in [1, {MAX_SIZE}]")
        return (size,)

    def process_rows(self, rows: CapturedRows, logits_NV: torch.Tensor) -> torch.Tensor:
        """Forbid each token that ended an earlier n-gram whose other tokens are the last ones of the row's prefix."""
        tokens_NL, (N, V) = rows.tokens_NL, logits_NV.shape
        length_N1, size_N1 = rows.length_N[:, None], rows.arguments_NA[:, :1].long()
        place_L = torch.arange(tokens_NL.shape[1], device=tokens_NL.device)
        repeats_NL = (place_L >= size_N1 - 1) & (place_L < length_N1)
        for back in range(1, min(MAX_SIZE, tokens_NL.shape[1])):
            last_N1 = tokens_NL.gather(1, (length_N1 - back).clamp(min=0).long())
            # The first places end no n-gram that is longer than `back`.
            repeats_NL[:, back:] &= (tokens_NL[:, :-back] == last_N1) | (size_N1 <= back)
        forbidden_NV = torch.zeros(N, V + 1, dtype=torch.bool, device=logits_NV.device)
        # Virtual tokens of a prompt adapter have ids after the vocabulary.
        forbidden_NV.scatter_(1, torch.where(repeats_NL, tokens_NL, V).clamp(max=V).long(), True)
        forbidden_NV.index_fill_(1, self._eos, False)
        return logits_NV.masked_fill(forbidden_NV[:, :V], -torch.inf)
