"""Forced text as tokens, for a library that names the text alone: spelled as the tokenizer would, and cut where unsure.

Invariant: the tokens' bytes are the text's, or a beginning of it; nothing is decided by chance or time. `tokenizers`
spells where it is installed (it comes with xgrammar), else the fewest tokens do. Loads no torch. Not here: what is
forced (backends), and what becomes of the tokens: they are proposals, and verified.
"""

from __future__ import annotations

import threading
from bisect import bisect_right

from tokenizers import Tokenizer

from grammar_service.backends.backend import Matcher
from grammar_service.grammar.token_bytes import TokenBytes
from grammar_service.grammar.vocabulary import Vocabulary

_LONGER = 64
"""Tokens with one beginning that are tried; where there are more, one of them is taken to be legal."""
_BACK = 3
"""Token boundaries before the end at which a longer token might begin."""
_MOST = 256
"""Characters of a forced text that are looked at: more than a step verifies."""


class Spelling:
    """One vocabulary's. Any thread. `ready` costs a second for a large one, and is called before the first use."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._texts: TokenBytes | None = None
        self._sorted: list[tuple[bytes, int]] = []
        self._tokenizer: Tokenizer | None = None

    def certain(self, text: str, matcher: Matcher) -> tuple[int, ...]:
        """Return the tokens of `text` whose end nothing that follows could change. Moves `matcher`, a copy.

        A token is unsure from where a longer one, legal there, goes on beyond the end of `text`.
        """
        texts = self.ready()
        whole = len(text) <= _MOST
        tokens = self.spell(text[:_MOST])
        if not whole:
            return tokens[:-_BACK]
        sure = max(0, len(tokens) - _BACK)
        if not all(matcher.accept(token) for token in tokens[:sure]):
            return ()
        for at in range(sure, len(tokens)):
            if self._goes_on(texts.text(tokens[at:]), matcher):
                return tokens[:at]
            if not matcher.accept(tokens[at]):
                return tokens[:at]
        return tokens

    def spell(self, text: str) -> tuple[int, ...]:
        """Return tokens whose bytes are the text's; none when the vocabulary cannot say it."""
        texts, data = self.ready(), text.encode()
        if self._tokenizer is not None:
            tokens = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
            # A normalizer or a prefix may have changed the text.
            if texts.text(tokens) == data:
                return tokens
        return texts.spell(data) or ()

    def _goes_on(self, end: bytes, matcher: Matcher) -> bool:
        """Say whether a token that begins with all of `end` and has more is legal."""
        first = bisect_right(self._sorted, (end, len(self._vocabulary.special) + self._vocabulary.size))
        for text, token in self._sorted[first : first + _LONGER]:
            if not text.startswith(end):
                return False
            if matcher.accept(token):
                matcher.rollback(1)
                return True
        return first + _LONGER < len(self._sorted) and self._sorted[first + _LONGER][0].startswith(end)

    def ready(self) -> TokenBytes:
        """Read the vocabulary, once."""
        with self._lock:
            if self._texts is None:
                self._tokenizer = Tokenizer.from_str(self._vocabulary.tokenizer_json.decode())
                texts = TokenBytes.of(self._vocabulary)
                self._sorted = sorted((text, token) for token, text in enumerate(texts.texts) if text)
                self._texts = texts
            return self._texts

    def __repr__(self) -> str:
        return f"<Spelling {'by the tokenizer' if self._tokenizer is not None else 'by the fewest tokens'}>"
