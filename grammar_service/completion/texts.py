"""The tokens of a vocabulary, grouped for the search for an answer's end: closing brackets, words, punctuation.

The groups are built once per vocabulary. Invariant: a token without text (special, stop, padding) is in no group, so
the search never chooses it for its text.

Not responsible for: the bytes of a token (see grammar/token_bytes.py), the search (see search.py).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from grammar_service.grammar.mask_rows import Ids, Words, count_tokens, has_tokens, token_ids
from grammar_service.grammar.token_bytes import MAX_TOKEN_BYTES, TokenBytes
from grammar_service.grammar.vocabulary import Vocabulary

_STRUCTURE = re.compile(rb'(?:[\[\]{}",:0-9]|null|true|false)+')
_NO_WORD = re.compile(rb'[\x00-\x1f"\\\\]')
_PUNCTUATED = re.compile(rb"[{}\[\],:<>]")
_CLOSING_BYTES, _OPENING_BYTES = b"}]", b"{["
_LONG_WORD = 10
"""Letters of a word that is long enough to fill a string."""
_MANY = 4096
"""Tokens that a row cannot lack for only their spelling."""


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Bytes of every token, and groups of tokens in the order in which a search tries them."""

    texts: tuple[bytes, ...]
    """By token id; empty for a token without text."""
    stop_ids: tuple[int, ...]
    num_words: int
    structure: Ids
    """Tokens of JSON punctuation and short values; the ones that close most brackets come first."""
    quoted: NDArray[np.bool_]
    """Bool, aligned with `structure`: the token begins with a quotation mark."""
    cost: NDArray[np.float64]
    """Float, aligned with `structure`: below 0 the token closes more than it opens."""
    words: Ids
    """Tokens of only ASCII letters, the long and common ones first."""
    punctuation: Ids
    """Tokens of a single byte that often ends something."""
    classes: tuple[Words, ...]
    """Rows, int32 [W], of tokens that are interchangeable in free text: words, digits, punctuation, white space."""
    prefixes: Ids
    """By token id: the token whose text is the longest proper beginning of its text; -1: none is."""
    tokens: TokenBytes = field(repr=False)
    choices: dict[bytes, list[int]] = field(default_factory=dict, repr=False)
    """Row -> the tokens that a search tries there (`search.choices_of`)."""

    @staticmethod
    def of(vocabulary: Vocabulary) -> TokenTexts:
        """Return the texts of a vocabulary. Any thread; the last vocabulary is cached."""
        with _LOCK:
            if vocabulary.digest not in _LAST:
                _LAST.clear()
                _LAST[vocabulary.digest] = _texts(vocabulary)
            return _LAST[vocabulary.digest]

    def text(self, tokens: Sequence[int]) -> bytes:
        """Return the concatenated bytes of `tokens`."""
        return self.tokens.text(tokens)

    def spell(self, text: bytes, at: int = 0) -> tuple[int, ...] | None:
        """Return the fewest tokens that make `text[at:]`; see `TokenBytes.spell`."""
        return self.tokens.spell(text, at)

    def is_half(self, token: int) -> bool:
        """Return whether a token's text begins or ends within a character, or ends within an escape."""
        text = self.texts[token]
        return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1 or not _whole(text)

    def begins_all(self, row: Words, others: Words) -> bool:
        """Return whether each token of `others` has its text begun by a token of `row`, or is half a character."""
        if count_tokens(others) > _MANY:
            return False
        missing = np.array(token_ids(others, _MANY), dtype=np.int64)
        begins = missing
        while len(missing):
            begins = self.prefixes[begins]
            # -1 reads some token here, and is left out.
            begun = has_tokens(row, begins) & (begins >= 0)
            ended = missing[~begun & (begins < 0)]
            if not all(self.is_half(int(token)) for token in ended):
                return False
            missing, begins = missing[~begun & (begins >= 0)], begins[~begun & (begins >= 0)]
        return True

    def __repr__(self) -> str:
        return f"<TokenTexts {len(self.texts)} tokens, {len(self.structure)} of them structure>"


_LOCK = threading.Lock()
_LAST: dict[str, TokenTexts] = {}
"""Guarded by the lock; one entry."""


def _texts(vocabulary: Vocabulary) -> TokenTexts:
    tokens = TokenBytes.of(vocabulary)
    texts, ids = tokens.texts, tokens.ids
    ranked = sorted((_cost(text), -len(text), i) for i, text in enumerate(texts) if _STRUCTURE.fullmatch(text))
    structure = np.array([i for _, _, i in ranked], dtype=np.int64)
    letters = [i for i, text in enumerate(texts) if text.isalpha() and text.isascii() and len(text) <= MAX_TOKEN_BYTES]
    # Common words have low ids.
    letters.sort(key=lambda i: (-min(len(texts[i]), _LONG_WORD), i))
    punctuation = [ids[c] for c in (bytes([b]) for b in b"\n<>)]}.;|/*-+=!`'_ \"\\") if c in ids]
    return TokenTexts(
        texts,
        vocabulary.stop_ids,
        vocabulary.num_words,
        structure,
        np.array([texts[i].startswith(b'"') for i in structure], dtype=bool),
        np.array([cost for cost, _, _ in ranked]),
        np.array(letters, dtype=np.int64),
        np.array(punctuation, dtype=np.int64),
        _classes(texts, vocabulary.num_words),
        _prefixes(tokens),
        tokens,
    )


def _prefixes(tokens: TokenBytes) -> Ids:
    ids = tokens.ids
    found = np.full(len(tokens.texts), -1, dtype=np.int64)
    for token, text in enumerate(tokens.texts):
        for end in range(len(text) - 1, 0, -1):
            if (begin := ids.get(text[:end])) is not None:
                found[token] = begin
                break
    return found


def _cost(text: bytes) -> float:
    """Return roughly how far from the end `text` leaves an answer: the brackets that it opens less those it closes."""
    opened = sum(text.count(c) for c in _OPENING_BYTES) - sum(text.count(c) for c in _CLOSING_BYTES)
    return opened + 0.6 * text.count(b",") + 0.3 * text.count(b":") + 0.2 * (text.count(b'"') % 2)


def _classes(texts: Sequence[bytes], num_words: int) -> tuple[Words, ...]:
    rows = np.zeros((4, num_words * 32), dtype=bool)
    for token, text in enumerate(texts):
        if not text or _NO_WORD.search(text) or not _whole(text):
            continue
        if text.isspace():
            rows[3, token] = True
        elif text.isdigit():
            rows[1, token] = True
        else:
            rows[2 if _PUNCTUATED.search(text) else 0, token] = True
    return tuple(np.packbits(row, bitorder="little").view(np.int32) for row in rows)


def _whole(text: bytes) -> bool:
    """Return whether `text` neither begins nor ends within a character."""
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
