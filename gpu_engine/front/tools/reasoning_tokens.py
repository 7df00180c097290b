"""How many tokens of an answer are its reasoning.

Invariant: the count depends only on the tokens, not on the steps that brought them. It begins with the answer's first
token and ends with the token that completes the marker `end`; an answer that begins otherwise has no reasoning.

Not responsible for: the text of the reasoning (see parts.py), its limit (the grammar process counts for itself).
"""

from __future__ import annotations

from gpu_engine.front.tools.formats import Markers

_SPACE = " \t\n\r"


class ReasoningTokens:
    """Counts the tokens of one answer. Used by one task at a time."""

    def __init__(self, markers: Markers, *, is_open: bool) -> None:
        """Args: see below.

        markers: of the reasoning.
        is_open: the prompt has ended with `begin`.
        """
        self._markers = markers
        self._begun, self._ended = is_open, False
        self._tokens = 0
        self._held = ""
        """Text that may still belong to a marker."""

    @property
    def count(self) -> int:
        """Tokens of the reasoning so far, its markers included."""
        return self._tokens if self._begun else 0

    def push(self, text: str) -> None:
        """Count one token of the answer, whose text is `text`; "" for a part of a character."""
        if self._ended:
            return
        self._tokens += 1
        self._held += text
        if not self._begun:
            self._begin()
        if self._begun:
            self._look_for_end()

    def _begin(self) -> None:
        text = self._held.lstrip(_SPACE)
        if text.startswith(self._markers.begin):
            self._begun, self._held = True, text[len(self._markers.begin) :]
        elif not self._markers.begin.startswith(text):
            self._ended = True

    def _look_for_end(self) -> None:
        end = self._markers.end
        if end in self._held:
            self._ended = True
        else:
            self._held = self._held[max(0, len(self._held) - len(end) + 1) :]

    def __repr__(self) -> str:
        return f"<ReasoningTokens {self.count}{' ended' if self._ended else ''}>"
