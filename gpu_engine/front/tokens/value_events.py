"""The events of a JSON answer that a request asks for, with their log-probabilities.

Invariant: an event is made of text that the client may see, so it is final: text that is held back, because the answer
may go back over it or because it may begin a stop string, is not read before it is certain.

Not responsible for: where values begin and end (see json_reader.py), which text is certain (see text_output.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_engine.front.tokens.json_reader import EventKind, JsonReader, ValueEvent
from gpu_engine.front.tokens.token_spans import TokenSpans


@dataclass(frozen=True, slots=True)
class ScoredEvent:
    """An event, and how likely the value's tokens were."""

    event: ValueEvent
    logprob: float | None = None
    """The sum over the value's tokens, natural logarithm; None: not asked for, or the value has not ended."""
    tokens: int = 0
    """Number of these tokens; 0 without `logprob`."""


class ValueEvents:
    """The events of one answer. Used by one task at a time."""

    def __init__(self, *, values: bool, items_of: str | None, scored: bool) -> None:
        """Args: see below.

        values: each value has events when it begins and ends.
        items_of: JSON Pointer of the array whose items have events; None: none.
        scored: the events have log-probabilities; `push` is called for each token, before `take` gets its text.
        """
        self._values = values
        self._reader = JsonReader(items_of)
        self._spans = TokenSpans() if scored else None

    def push(self, piece: str, logprob: float, *, holds: bool) -> None:
        """Add a token and the text that is known since it; `holds`: it ends in the middle of the next character."""
        if self._spans is not None:
            self._spans.push(piece, logprob, holds=holds)

    def take(self, text: str, *, complete: bool) -> list[ScoredEvent]:
        """Return the events that `text` decides, the next part of the visible answer; `complete`: it is the last part
        of a whole answer."""
        events = self._reader.push(text) + (self._reader.finish() if complete else [])
        return [self._scored(event) for event in events if self._values or event.kind is EventKind.ITEM]

    def _scored(self, event: ValueEvent) -> ScoredEvent:
        if self._spans is None or event.kind is EventKind.STARTED:
            return ScoredEvent(event)
        return ScoredEvent(event, *self._spans.score(event.begin, event.end))

    def __repr__(self) -> str:
        return f"<ValueEvents {self._reader!r}>"
