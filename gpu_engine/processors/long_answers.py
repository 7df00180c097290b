"""An answer's end becomes more likely with its length: a processor that is called for all sequences of a step.

As transformers' `exponential_decay_length_penalty`: after `start` tokens of the answer the logit x of each
end-of-sequence token becomes x + |x| (factor^(tokens after start) - 1).

Shapes: N rows, V columns of the logits, E end-of-sequence tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_engine.api.processors import ProcessorRequest, ProcessorSetup, SequenceRows

_MOST = 1e9
"""Upper bound of the power: the logit stays finite."""


class LengthPenalty:
    """Raises the logits of the end-of-sequence tokens with each token of a long answer.

    A request's arguments are `start`, a number of tokens (an integer >= 0), and `factor`, a number in [1, 2].
    """

    def __init__(self, setup: ProcessorSetup) -> None:
        if setup.options:
            raise ValueError(f"knows no option {next(iter(setup.options))!r}")
        self._eos = torch.tensor(setup.eos_token_ids, dtype=torch.int64, device=setup.device)

    def prepare(self, request: ProcessorRequest) -> tuple[int, float]:
        """Return both. Raises ValueError."""
        if set(request.arguments) != {"start", "factor"}:
            raise ValueError("needs two arguments, start and factor")
        start, factor = request.arguments["start"], request.arguments["factor"]
        if type(start) is not int or start < 0:
            raise ValueError("start is not an integer from 0 on")
        if type(factor) not in (int, float) or not 1 <= factor <= 2:
            raise ValueError("factor is not a number in [1, 2]")
        return start, float(factor)

    def process_batch(self, sequences: Sequence[SequenceRows], logits_NV: torch.Tensor) -> torch.Tensor:
        """Raise the logits of the end-of-sequence tokens, for all rows at once."""
        scale = [
            min(factor ** min(max(len(rows.prefix(j)) - rows.prompt_length - start, 0), 1024), _MOST) - 1
            for rows in sequences
            for start, factor in (rows.arguments,)
            for j in range(rows.num_rows)
        ]
        scale_N1 = torch.tensor(scale, dtype=torch.float32, device=logits_NV.device)[:, None]
        end_NE = logits_NV[:, self._eos]
        logits_NV[:, self._eos] = end_NE + end_NE.abs() * scale_N1
        return logits_NV
