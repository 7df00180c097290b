"""Spells a jump-forward text in tokens as the tokenizer would, and cuts it where a later character could change it.

xgrammar names only the text that must follow, not its tokens. The tokens are proposals: the engine verifies them.
Invariant: the bytes of the tokens are the text or a beginning of it, and depend only on the text and the matcher.
Not responsible for: finding the text (see backend.py).
"""

from __future__ import annotations

import threading
from bisect import bisect_right

from tokenizers import Tokenizer

from grammar_service.backends.backend import Matcher
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.vocabulary import Vocabulary

_MAX_CANDIDATES = 64
"""Tokens with one beginning that are tried. If there are more, one of them is assumed to be legal."""
_UNSURE_TOKENS = 3
"""Tokens at the end of a text that a longer token might replace."""
_MAX_CHARACTERS = 256
"""The part of a jump-forward text that is spelled; it has more tokens than a step verifies."""


class Spelling:
    """The spelling of texts in one vocabulary. Any thread may use it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._token_bytes: TokenBytes | None = None
        self._sorted: list[tuple[bytes, int]] = []
        self._tokenizer: Tokenizer | None = None

    def certain(self, text: str, matcher: Matcher) -> tuple[int, ...]:
        """Return the tokens of `text` up to the first one that a longer, legal token could replace.

        `matcher` is in the state before `text`. It is moved, so the caller passes a copy.
        """
        token_bytes = self.ready()
        tokens = self.spell(text[:_MAX_CHARACTERS])
        if len(text) > _MAX_CHARACTERS:
            return tokens[:-_UNSURE_TOKENS]
        sure = max(0, len(tokens) - _UNSURE_TOKENS)
        if not all(matcher.accept(token) for token in tokens[:sure]):
            return ()
        for at in range(sure, len(tokens)):
            if self._has_longer_token(token_bytes.text(tokens[at:]), matcher):
                return tokens[:at]
            if not matcher.accept(tokens[at]):
                return tokens[:at]
        return tokens

    def spell(self, text: str) -> tuple[int, ...]:
        """Return tokens that spell `text`; none if the vocabulary cannot spell it."""
        token_bytes, data = self.ready(), text.encode()
        if self._tokenizer is not None:
            tokens = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
            # A normalizer or a prefix may have changed the text.
            if token_bytes.text(tokens) == data:
                return tokens
        return token_bytes.spell(data) or ()

    def _has_longer_token(self, end: bytes, matcher: Matcher) -> bool:
        """Return whether a token is legal that begins with all of `end` and is longer."""
        first = bisect_right(self._sorted, (end, len(self._vocabulary.special) + self._vocabulary.size))
        for text, token in self._sorted[first : first + _MAX_CANDIDATES]:
            if not text.startswith(end):
                return False
            if matcher.accept(token):
                matcher.rollback(1)
                return True
        following = first + _MAX_CANDIDATES
        return following < len(self._sorted) and self._sorted[following][0].startswith(end)

    def ready(self) -> TokenBytes:
        """Read the vocabulary at the first call, which takes a second for a large one, and return its bytes."""
        with self._lock:
            if self._token_bytes is None:
                self._tokenizer = Tokenizer.from_str(self._vocabulary.tokenizer_json.decode())
                token_bytes = TokenBytes.of(self._vocabulary)
                self._sorted = sorted((text, token) for token, text in enumerate(token_bytes.texts) if text)
                self._token_bytes = token_bytes
            return self._token_bytes

    def __repr__(self) -> str:
        return f"<Spelling of {self._vocabulary.size} tokens>"
