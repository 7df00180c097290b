"""Mask rows as sets of tokens: bit t % 32 of word t / 32 is token t.

Invariant: nothing here writes. Rows are int32 words whose bits beyond the vocabulary are 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int32]
Ids = NDArray[np.int64]


def has(words: Words, token: int) -> bool:
    """Say whether a token is in a row."""
    return bool(int(words[token >> 5]) >> (token & 31) & 1)


def among(words: Words, ids: Ids) -> NDArray[np.bool_]:
    """Say of each of `ids` whether it is in a row."""
    found: NDArray[np.bool_] = (words[ids >> 5] >> (ids & 31) & 1).astype(bool)
    return found


def few(words: Words, most: int) -> list[int]:
    """Return the tokens of a row in order, empty when there are more than `most`."""
    at = np.flatnonzero(words)
    if len(at) > most:
        return []
    bits = np.unpackbits(words[at].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    return (at[word] * 32 + bit).tolist() if len(bit) <= most else []


def count(words: Words) -> int:
    """Return the number of tokens in a row."""
    return int(np.unpackbits(words.view(np.uint8)).sum())
