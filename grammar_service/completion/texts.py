"""A vocabulary as bytes, sorted for the search of an answer's end: which tokens close things, which are only words.

Invariant: a token without text (special, stop, padding) is in no group and is never chosen for its text. Made once per
vocabulary, from tokenizer.json alone. Not here: grammars.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grammar_service.grammar.mask_rows import Ids, Words
from grammar_service.grammar.vocabulary import Vocabulary

_STRUCTURE = re.compile(rb'(?:[\[\]{}",:0-9]|null|true|false)+')
_NO_WORD = re.compile(rb'[\x00-\x1f"\\\\]')
_PUNCTUATED = re.compile(rb"[{}\[\],:<>]")
_CLOSING, _OPENING = b"}]", b"{["
_LONGEST = 32
"""Bytes of the longest token that is used to spell a text."""
_WORD = 10
"""Letters of a word that is long enough to fill a string."""
_MEMORY = 4096
"""Spellings that are remembered."""


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Bytes of every token, and groups of tokens in the order in which a search tries them."""

    texts: tuple[bytes, ...]
    """By id; empty for a token that is no text."""
    stop_ids: tuple[int, ...]
    num_words: int
    structure: Ids
    """JSON punctuation and short values, what closes most comes first."""
    quoted: NDArray[np.bool_]
    """Of `structure`: begins with a quotation mark."""
    cost: NDArray[np.float64]
    """Of `structure`: below 0 closes more than it opens."""
    words: Ids
    """ASCII letters only, the long and common ones first."""
    punctuation: Ids
    """Single bytes that often end something."""
    classes: tuple[Words, ...]
    """Bit rows of tokens that mean the same within free text: words, digits, punctuation, white space."""
    ids: dict[bytes, int] = field(repr=False)
    choices: dict[bytes, list[int]] = field(default_factory=dict, repr=False)
    """Row -> what a search tries there (`closing_choices`)."""
    _spelled: dict[bytes, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(vocabulary: Vocabulary) -> TokenTexts:
        """Return the texts of a vocabulary; the last one is kept, and any thread may ask."""
        with _LOCK:
            if vocabulary.digest not in _LAST:
                _LAST.clear()
                _LAST[vocabulary.digest] = _texts(vocabulary)
            return _LAST[vocabulary.digest]

    def text(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of some tokens."""
        return b"".join(self.texts[token] for token in tokens)

    def spell(self, text: bytes) -> tuple[int, ...] | None:
        """Return the fewest tokens that make `text`, long ones first; None when the vocabulary cannot."""
        found = self._spelled.get(text)
        if found is None:
            best: list[tuple[int, int]] = [(0, -1)] * (len(text) + 1)
            for i in range(len(text) - 1, -1, -1):
                # Fewest tokens, then the longest first one: the least pair.
                options = [
                    (best[j][0] + 1, -j)
                    for j in range(i + 1, min(i + _LONGEST, len(text)) + 1)
                    if best[j][0] < _NEVER and text[i:j] in self.ids
                ]
                best[i] = min(options, default=(_NEVER, -1))
            if best[0][0] >= _NEVER:
                return None
            out, at = [], 0
            while at < len(text):
                end = -best[at][1]
                out.append(self.ids[text[at:end]])
                at = end
            if len(self._spelled) >= _MEMORY:
                self._spelled.clear()
            found = self._spelled[text] = tuple(out)
        return found

    def is_half(self, token: int) -> bool:
        """Say whether a token's text begins or ends within a character, or ends within an escape."""
        text = self.texts[token]
        return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1 or not _whole(text)

    def __repr__(self) -> str:
        return f"<TokenTexts {len(self.texts)} tokens, {len(self.structure)} of them structure>"


_NEVER = 1 << 30
_LOCK = threading.Lock()
_LAST: dict[str, TokenTexts] = {}
"""Guarded by the lock; one entry."""


def _texts(vocabulary: Vocabulary) -> TokenTexts:
    texts = _decoded(vocabulary)
    ids: dict[bytes, int] = {}
    for token, text in enumerate(texts):
        if text:
            ids.setdefault(text, token)
    ranked = sorted((_cost(text), -len(text), i) for i, text in enumerate(texts) if _STRUCTURE.fullmatch(text))
    structure = np.array([i for _, _, i in ranked], dtype=np.int64)
    letters = [i for i, text in enumerate(texts) if text.isalpha() and text.isascii() and len(text) <= _LONGEST]
    # Low ids are common words.
    letters.sort(key=lambda i: (-min(len(texts[i]), _WORD), i))
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
        ids,
    )


def _cost(text: bytes) -> float:
    """Say how far from the end `text` leaves an answer, roughly: what it opens less what it closes."""
    opened = sum(text.count(c) for c in _OPENING) - sum(text.count(c) for c in _CLOSING)
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
    """Say whether `text` neither begins nor ends within a character."""
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _decoded(vocabulary: Vocabulary) -> tuple[bytes, ...]:
    """Return the bytes of every token, as the decoder named in tokenizer.json reads them."""
    document = json.loads(vocabulary.tokenizer_json)
    vocab = document["model"].get("vocab") or {}
    pairs = ((entry[0], i) for i, entry in enumerate(vocab)) if isinstance(vocab, list) else vocab.items()
    kinds = {name for part in ("decoder", "pre_tokenizer") for name in _types(document.get(part))}
    texts = [b""] * vocabulary.size
    for text, token in pairs:
        if token < vocabulary.size:
            if "ByteLevel" in kinds:
                texts[token] = _byte_level(text)
            elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                texts[token] = bytes([int(text[3:5], 16)])
            else:
                texts[token] = text.replace("\u2581", " ").encode()
    for added in document.get("added_tokens", ()):
        if added["id"] < vocabulary.size:
            texts[added["id"]] = b"" if added.get("special") else str(added["content"]).encode()
    for token in (*vocabulary.special, *vocabulary.stop_ids):
        texts[token] = b""
    return tuple(texts)


def _types(node: Any) -> list[str]:
    if isinstance(node, dict):
        return [str(node.get("type")), *(t for child in node.values() for t in _types(child))]
    if isinstance(node, list):
        return [t for child in node for t in _types(child)]
    return []


def _byte_level(text: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary; a text in other letters stands for itself."""
    if not _FOREIGN.search(text):
        return text.translate(_BYTES).encode("latin-1")
    return text.encode()


def _alphabet() -> dict[int, int]:
    """Return the letters in which byte-level vocabularies write bytes (GPT-2, Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: b for b in printable} | {256 + i: b for i, b in enumerate(others)}


_BYTES = _alphabet()
_FOREIGN = re.compile("[^" + "".join(re.escape(chr(letter)) for letter in _BYTES) + "]")
