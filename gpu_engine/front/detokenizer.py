"""Token ids to text, one token at a time: what was given out never changes, and a character is never split.

The invariant: the concatenation of all deltas equals the text of all tokens, however they were grouped into steps. Text
whose end may still change (an unfinished UTF-8 sequence) is held until the next tokens settle it or `flush` gives up on
it.

A window of the last tokens is decoded again for each new one, because with every decoder but the byte-level one the
text of a token depends on its left neighbour (the prefix-offset method of Hugging Face's text-generation-inference).
Not here: stop strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6
"""Prompt tokens that stand left of the answer's first token, so that its leading space is kept."""
MAX_HELD_TOKENS = 64
"""A run of tokens this long without one settled end is not UTF-8 text; it is given out as it stands."""


class Detokenizer:
    """Decodes one sequence. `decode` maps token ids to text without clean-up, special tokens dropped or not."""

    def __init__(self, decode: Decode, prompt_tail: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt_tail[-CONTEXT_TOKENS:])
        """The window: tokens whose text is given out, then tokens whose text is held in part or whole."""
        self._context = len(self._ids)
        """How many of them are of the first kind."""
        self._given = self._settled(self._decode(self._ids)) if self._ids else 0
        """Characters of the window's text that were given out."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that can no longer change, often empty in the middle of a character."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._context <= MAX_HELD_TOKENS:
            end = max(self._settled(text), self._given)
            delta, self._given = text[self._given : end], end
            return delta
        delta = text[self._given :]
        if len(self._ids) - self._context > 0 and text:
            self._slide(text)
        return delta

    def flush(self) -> str:
        """Return what is held, replacement characters and all. Call once, after the last token."""
        text = self._decode(self._ids)
        delta, self._given = text[self._given :], len(text)
        return delta

    def _slide(self, text: str) -> None:
        # The new window keeps one settled stretch as the left neighbour of what follows. It must not be empty text
        # (special tokens that were dropped), or the next token would count as the first of a text and lose its space.
        tail = self._ids[self._context :]
        tail_text = self._decode(tail)
        if tail_text.strip():
            self._ids, self._context, self._given = tail, len(tail), len(tail_text)
        else:
            self._context, self._given = len(self._ids), len(text)

    @staticmethod
    def _settled(text: str) -> int:
        return len(text.rstrip(REPLACEMENT))

    def __repr__(self) -> str:
        return f"<Detokenizer window={len(self._ids)} held={len(self._ids) - self._context}>"
