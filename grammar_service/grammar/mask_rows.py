"""Mask rows as sets of tokens: bit t % 32 of word t // 32 is token t.

Invariant: nothing here writes to a row. A row is int32 [W]; its bits beyond the vocabulary are 0.
Not responsible for: filling a row (see backends/), publishing it (see fill/).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shared_mem.layout import RowKind

Words = NDArray[np.int32]
Ids = NDArray[np.int64]


def has_token(words: Words, token: int) -> bool:
    """Return whether a row contains a token."""
    return bool(int(words[token >> 5]) >> (token & 31) & 1)


def has_tokens(words: Words, ids: Ids) -> NDArray[np.bool_]:
    """Return, for each of `ids` [N], whether a row contains it: bool [N]."""
    found: NDArray[np.bool_] = (words[ids >> 5] >> (ids & 31) & 1).astype(bool)
    return found


def token_ids(words: Words, limit: int) -> list[int]:
    """Return the tokens of a row in ascending order, or an empty list if there are more than `limit`."""
    used = np.flatnonzero(words)
    if len(used) > limit:
        return []
    bits = np.unpackbits(words[used].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    return (used[word] * 32 + bit).tolist() if len(bit) <= limit else []


def count_tokens(words: Words) -> int:
    """Return the number of tokens in a row."""
    return int.from_bytes(words.tobytes(), "little").bit_count()


def first_token_ids(words: Words, limit: int) -> list[int]:
    """Return the lowest tokens of a row in ascending order, at most `limit`."""
    used = np.flatnonzero(words)[:limit]
    part = np.zeros_like(words)
    part[used] = words[used]
    return token_ids(part, 32 * limit)[:limit]


def spread_token_ids(words: Words) -> tuple[int, int, int]:
    """Return the lowest token of a row that is not empty, one from the middle word in use, and the highest."""
    used = np.flatnonzero(words)
    low, middle, high = (int(words[i]) & 0xFFFFFFFF for i in (used[0], used[len(used) // 2], used[-1]))
    return (
        32 * int(used[0]) + _lowest_bit(low),
        32 * int(used[len(used) // 2]) + _lowest_bit(middle),
        32 * int(used[-1]) + high.bit_length() - 1,
    )


def _lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1


class Classifier:
    """Finds the kind of a filled row of `vocab_size` tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.num_words = (vocab_size + 31) // 32
        bits = np.zeros(self.num_words * 32, dtype=bool)
        bits[:vocab_size] = True
        self._full: Words = np.packbits(bits, bitorder="little").view(np.int32)

    def classify(self, row: Words) -> tuple[RowKind, int]:
        """Return the kind of `row`, int32 [>= W], and its token if the kind is FORCED, else -1."""
        words = row[: self.num_words]
        # Counting words in use takes a fifth of the time of counting bits, and nearly every row uses many words.
        used = int(np.count_nonzero(words))
        if used == 0:
            return RowKind.DEAD_END, -1
        if used == 1:
            index = int(np.flatnonzero(words)[0])
            word = int(words[index]) & 0xFFFFFFFF
            if word & (word - 1) == 0:
                return RowKind.FORCED, index * 32 + word.bit_length() - 1
        if words[0] == self._full[0] and used == self.num_words and bool((words == self._full).all()):
            return RowKind.ALL, -1
        return RowKind.APPLY, -1
