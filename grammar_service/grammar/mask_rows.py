"""Mask rows as sets of tokens: bit t % 32 of word t / 32 is token t.

Invariant: nothing here writes. Rows are int32 words whose bits beyond the vocabulary are 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shared_mem.layout import RowKind

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
    return int.from_bytes(words.tobytes(), "little").bit_count()


def first(words: Words, most: int) -> list[int]:
    """Return the first tokens of a row in order, at most so many."""
    at = np.flatnonzero(words)[:most]
    part = np.zeros_like(words)
    part[at] = words[at]
    return few(part, 32 * most)[:most]


def spread(words: Words) -> tuple[int, int, int]:
    """Return the first token of a row that has some, one from its middle, and the last."""
    at = np.flatnonzero(words)
    low, middle, high = (int(words[i]) & 0xFFFFFFFF for i in (at[0], at[len(at) // 2], at[-1]))
    return (
        32 * int(at[0]) + _lowest(low),
        32 * int(at[len(at) // 2]) + _lowest(middle),
        32 * int(at[-1]) + high.bit_length() - 1,
    )


def _lowest(word: int) -> int:
    return (word & -word).bit_length() - 1


class Classifier:
    """Tells from a filled row what kind it is. `vocab_size` columns; bits beyond them are 0."""

    def __init__(self, vocab_size: int) -> None:
        self.num_words = (vocab_size + 31) // 32
        bits = np.zeros(self.num_words * 32, dtype=bool)
        bits[:vocab_size] = True
        self._full: Words = np.packbits(bits, bitorder="little").view(np.int32)

    def classify(self, row: Words) -> tuple[RowKind, int]:
        """Return the kind and, for FORCED, the token (else -1)."""
        words = row[: self.num_words]
        # Counting words costs a fifth of counting bits, and nearly every row has many words.
        used = int(np.count_nonzero(words))
        if used == 0:
            return RowKind.DEAD_END, -1
        if used == 1:
            at = int(np.flatnonzero(words)[0])
            word = int(words[at]) & 0xFFFFFFFF
            if word & (word - 1) == 0:
                return RowKind.FORCED, at * 32 + word.bit_length() - 1
        if words[0] == self._full[0] and used == self.num_words and bool((words == self._full).all()):
            return RowKind.ALL, -1
        return RowKind.APPLY, -1
