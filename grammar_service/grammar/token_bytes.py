"""The bytes of each token of a vocabulary, read only from tokenizer.json.

Invariant: a special token, a stop token and padding have no bytes, so no text is ever spelled with them.
Not responsible for: which tokens are special (see vocabulary.py), the tokenizer's own choice of tokens for a text.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grammar_service.grammar.vocabulary import Vocabulary

MAX_TOKEN_BYTES = 32
"""Longer tokens are not used to spell a text."""

_MAX_CACHED = 4096
"""Spelled texts that are cached; the cache is emptied when it is full."""

_IMPOSSIBLE = 1 << 30


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """A vocabulary as bytes. Immutable except for its cache; any thread may use it."""

    texts: tuple[bytes, ...]
    """By token id; empty for a token without bytes."""
    ids: dict[bytes, int] = field(repr=False)
    """The lowest token id of each text."""
    _spelled: dict[bytes, tuple[int, ...]] = field(default_factory=dict, repr=False)
    _lengths: dict[bytes, bytes] = field(default_factory=dict, repr=False)
    """Text -> what `_first_lengths` returns; no longer than `_spelled`, except for texts that no tokens spell."""

    @staticmethod
    def of(vocabulary: Vocabulary) -> TokenBytes:
        """Return the bytes of a vocabulary. The last results are cached. Any thread may call it."""
        with _LOCK:
            if vocabulary.digest not in _LAST:
                while len(_LAST) >= _MAX_VOCABULARIES:
                    del _LAST[next(iter(_LAST))]
                _LAST[vocabulary.digest] = _read(vocabulary)
            return _LAST[vocabulary.digest]

    def text(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of a sequence of tokens."""
        return b"".join(self.texts[token] for token in tokens)

    def spell(self, text: bytes, at: int = 0) -> tuple[int, ...] | None:
        """Return the fewest tokens whose bytes are `text[at:]`, longer ones first; None if there are no such tokens.

        The ends of one text share their work.
        """
        end = text[at:]
        cached = self._spelled.get(end)
        if cached is not None:
            return cached
        lengths = self._first_lengths(text)[at:]
        tokens, place = [], 0
        while place < len(end):
            if not lengths[place]:
                return None
            tokens.append(self.ids[end[place : place + lengths[place]]])
            place += lengths[place]
        if len(self._spelled) >= _MAX_CACHED:
            self._spelled.clear()
            self._lengths.clear()
        self._spelled[end] = tuple(tokens)
        self._lengths[end] = lengths
        return tuple(tokens)

    def _first_lengths(self, text: bytes) -> bytes:
        """Return, for each end of `text`, the length of the first of its fewest tokens; 0: no tokens spell it."""
        found = self._lengths.get(text)
        if found is not None:
            return found
        ids, size = self.ids, len(text)
        fewest = [0] * (size + 1)
        lengths = bytearray(size)
        for i in range(size - 1, -1, -1):
            stop = min(i + MAX_TOKEN_BYTES, size) + 1
            options = [(fewest[j] + 1, -j) for j in range(i + 1, stop) if text[i:j] in ids]
            least, end = min(options, default=(_IMPOSSIBLE, -i))
            fewest[i], lengths[i] = (least, -end - i) if least < _IMPOSSIBLE else (_IMPOSSIBLE, 0)
        self._lengths[text] = bytes(lengths)
        return self._lengths[text]

    def __repr__(self) -> str:
        return f"<TokenBytes {len(self.texts)} tokens>"


_LOCK = threading.Lock()
_LAST: dict[str, TokenBytes] = {}
"""The last vocabularies that were read, by their digest. Guarded by the lock."""
_MAX_VOCABULARIES = 2
"""The model's, and the one in which the special tokens of its tool calls are text."""


def decoder_types(tokenizer: dict[str, Any]) -> set[str]:
    """Return every `type` in the decoder and the pre-tokenizer of a tokenizer.json, nested ones included."""
    return {name for part in ("decoder", "pre_tokenizer") for name in _types(tokenizer.get(part))}


def _read(vocabulary: Vocabulary) -> TokenBytes:
    texts = _decoded(vocabulary)
    ids: dict[bytes, int] = {}
    for token, text in enumerate(texts):
        if text:
            ids.setdefault(text, token)
    return TokenBytes(texts, ids)


def _decoded(vocabulary: Vocabulary) -> tuple[bytes, ...]:
    """Return the bytes of every token, as the decoder that tokenizer.json names reads them."""
    document = json.loads(vocabulary.tokenizer_json)
    vocab = document["model"].get("vocab") or {}
    pairs = ((entry[0], i) for i, entry in enumerate(vocab)) if isinstance(vocab, list) else vocab.items()
    byte_level = "ByteLevel" in decoder_types(document)
    texts = [b""] * vocabulary.size
    for text, token in pairs:
        if token < vocabulary.size:
            if byte_level:
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
        return [str(node.get("type")), *(name for child in node.values() for name in _types(child))]
    if isinstance(node, list):
        return [name for child in node for name in _types(child)]
    return []


def _byte_level(text: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary. A text in other letters means itself."""
    if not _FOREIGN.search(text):
        return text.translate(_BYTE_OF_LETTER).encode("latin-1")
    return text.encode()


def _byte_alphabet() -> dict[int, int]:
    """Return letter -> byte for the letters that byte-level vocabularies use (GPT-2, Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: b for b in printable} | {256 + i: b for i, b in enumerate(others)}


_BYTE_OF_LETTER = _byte_alphabet()
_FOREIGN = re.compile("[^" + "".join(re.escape(chr(letter)) for letter in _BYTE_OF_LETTER) + "]")
