"""What bans, biases and penalties make of a beam's log-probabilities, token by token.

The order is the same as in sampling (kernels/native/accept.h), over log-probabilities in place of logits: bans and
biases, then the repetition penalty, then presence and frequency. transformers also applies its processors to
log-probabilities.

Invariant: pure; a token has at most one edit. Not responsible for: applying an edit (see kernels/logprobs.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from gpu_engine.api.request import Request
from kernels.logprobs import Edit


def edits_of(request: Request, stop_ids: Collection[int], answer: Sequence[int]) -> tuple[Edit, ...]:
    """Return the edits of the next row, after the prompt and `answer`; `stop_ids` are banned before `min_tokens`."""
    sampling = request.sampling
    rep, pres, freq = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
    penalises = (rep, pres, freq) != (1.0, 0.0, 0.0)
    early = len(answer) < sampling.min_tokens
    if not (penalises or early or sampling.bad_token_ids or sampling.bad_words or sampling.logit_bias):
        return ()
    added = dict(sampling.logit_bias)
    for token in (*sampling.bad_token_ids, *_ends_of_words(request, answer), *(stop_ids if early else ())):
        added[token] = -math.inf
    counts = Counter(answer) if penalises else Counter[int]()
    seen = {*request.prompt_ids, *answer} if penalises else set()
    edits = []
    for token in sorted({*added, *seen}):
        less = freq * counts[token] + pres if counts[token] else 0.0
        edits.append(Edit(token, added.get(token, 0.0), rep if token in seen else 1.0, less))
    return tuple(edits)


def _ends_of_words(request: Request, answer: Sequence[int]) -> list[int]:
    """Return the last token of each bad word whose other tokens are in place."""
    words = request.sampling.bad_words
    if not words:
        return []
    longest = max(map(len, words)) - 1
    tail = [*request.prompt_ids[-longest:], *answer][-longest:]
    return [
        word[-1]
        for word in words
        if len(word) <= len(tail) + 1 and tail[len(tail) - len(word) + 1 :] == list(word[:-1])
    ]
