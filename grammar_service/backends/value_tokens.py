"""The tokens that verification looks at, and the values that they end.

The values that the tokens of a row end depend only on the place in the text and on the row, and the rows within a
string are alike, so the last answers are kept. Invariant: what is kept equals what would be found anew. Any thread may
use it. Not responsible for: whether a value is valid (see verified.py), places in a text (see json_schema/places.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from grammar_service.backends.json_schema.places import ENDS, QUOTE, SPACE, Place, ends
from grammar_service.grammar.mask_rows import token_ids
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.vocabulary import Vocabulary

MAX_KEPT = 128
"""Pairs of a place and a row whose ends are kept; some 30 KB each."""


class Part(NamedTuple):
    """The beginning of some tokens, after which a value is complete."""

    text: bytes
    place: Place
    """After it."""
    ends_string: bool
    """It ends the string that is open before it, and nothing else."""


class TokenEnds(NamedTuple):
    """The values that the tokens of a row end."""

    parts: tuple[Part, ...]
    groups: tuple[tuple[tuple[int, ...], list[int]], ...]
    """(indices of parts, tokens that have them), the shortest tokens first."""
    of_string: dict[int, bytes]
    """The `parts` that end the open string, which is a value."""
    beyond: tuple[tuple[tuple[int, ...], list[int]], ...]
    """The `groups` that also end another value."""


@dataclass(frozen=True, slots=True)
class ValueTokens:
    """Rows of the tokens that verification looks at. They depend only on the vocabulary, and its grammars share
    them."""

    texts: tuple[bytes, ...]
    """The bytes of each token; see `TokenBytes`."""
    stops: frozenset[int]
    ending: NDArray[np.int32]
    """[W] bits of the tokens with a byte after which a value may be complete."""
    quoting: NDArray[np.int32]
    """[W] bits of the tokens with a quote. One of the quotes may end a string."""
    stop_words: NDArray[np.int32]
    """[W] bits of the stop tokens."""
    space: NDArray[np.int32]
    """[W] bits of the tokens with only white space."""
    longest: int
    """Bytes of the longest token."""
    _kept: dict[tuple[Place, bytes], TokenEnds] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(vocabulary: Vocabulary) -> ValueTokens:
        """Return the rows of a vocabulary. Takes about 13 ms for 50,000 tokens."""
        texts = TokenBytes.of(vocabulary).texts
        ending = [token for token, spelled in enumerate(texts) if not ENDS.isdisjoint(spelled)]
        quoting = [token for token in ending if QUOTE in texts[token]]
        return ValueTokens(
            texts,
            frozenset(vocabulary.stop_ids),
            _words(ending, vocabulary.num_words),
            _words(quoting, vocabulary.num_words),
            _words(list(vocabulary.stop_ids), vocabulary.num_words),
            _words([t for t, text in enumerate(texts) if text and not text.strip(SPACE)], vocabulary.num_words),
            max(map(len, texts), default=0),
        )

    def ends_at(self, place: Place, words: NDArray[np.int32]) -> TokenEnds:
        """Return the values that the tokens of a row, int32 [W], end at a place. The caller changes nothing of it."""
        candidates = words & (self.quoting if place.in_string else self.ending)
        key = place, candidates.tobytes()
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            found = self._kept[key] = self._find_ends(place, token_ids(candidates, 32 * len(candidates)))
        return found

    def _find_ends(self, place: Place, candidates: list[int]) -> TokenEnds:
        parts: dict[bytes, Part] = {}
        at: dict[bytes, int] = {}
        groups: dict[tuple[int, ...], list[int]] = {}
        in_value = place.in_string and not place.is_name
        for token in sorted(candidates, key=lambda token: len(self.texts[token])):
            text, indices = self.texts[token], list[int]()
            for length, behind in ends(place, text):
                part = text[:length]
                index = at.setdefault(part, len(at))
                parts.setdefault(part, Part(part, behind, ends_string=in_value and not indices))
                indices.append(index)
            if indices:
                groups.setdefault(tuple(indices), []).append(token)
        of_string = {at[part.text]: part.text for part in parts.values() if part.ends_string}
        beyond = tuple(group for group in groups.items() if not of_string.keys() >= set(group[0]))
        return TokenEnds(tuple(parts.values()), tuple(groups.items()), of_string, beyond)


def take_out(words: NDArray[np.int32], tokens: Sequence[int]) -> bool:
    """Clear the bits of some tokens, at least one, in a row; return True."""
    words &= ~_words(tokens, len(words))
    return True


def _words(tokens: Sequence[int], num_words: int) -> NDArray[np.int32]:
    bits = np.zeros(num_words * 32, dtype=bool)
    bits[list(tokens)] = True
    words: NDArray[np.int32] = np.packbits(bits, bitorder="little").view(np.int32)
    return words
