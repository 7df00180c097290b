"""One sequence on its way out: token events in, deltas for the client out.

The invariant: text, token ids, finish reason and usage depend only on the tokens, never on how many of them a step
brought. So everything is done token by token: the token that completes a stop string is the last that counts, and what
the same step brought after it is dropped. Not here: protobuf, gRPC, and anything that waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu_engine.api.errors import LockstepError
from gpu_engine.api.request import FinishReason, Logprobs, Request, TokenEvent
from gpu_engine.front.detokenizer import Decode, Detokenizer
from gpu_engine.front.stop_strings import StopMatch, StopScanner


@dataclass(slots=True)
class Delta:
    """What is new since the last delta. `text` may lag behind `token_ids`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    matched_token_id: int | None = None
    matched_stop: str | None = None
    error: LockstepError | None = None
    """The engine failed the sequence; what came before it stands."""

    @property
    def ended(self) -> bool:
        """Nothing comes after this delta."""
        return self.finish is not None or self.error is not None


class SequenceOutput:
    """Turns the events of one request into deltas. Used by one task at a time."""

    def __init__(self, request: Request, decode: Decode, *, with_text: bool = True) -> None:
        """Args: `decode` maps ids to text as `skip_special_tokens` asks; without text only stop strings are found."""
        sampling = request.sampling
        self.request = request
        self.completion_tokens = 0
        self.ended = False
        self.finished_s = 0.0
        self._with_text = with_text
        self._min_tokens = sampling.min_tokens
        self._keep_stop = sampling.include_stop_str_in_output
        self._detokenizer = Detokenizer(decode, request.prompt_ids) if with_text or sampling.stop else None
        self._scanner = StopScanner(sampling.stop, keep_match=self._keep_stop)

    def take(self, events: Sequence[TokenEvent]) -> Delta:
        """Merge everything that waits into one delta. Events after the end are ignored."""
        delta = Delta()
        text: list[str] = []
        for event in events:
            if not self.ended:
                self._take_one(event, delta, text)
        delta.text = "".join(text) if self._with_text else ""
        return delta

    def _take_one(self, event: TokenEvent, delta: Delta, text: list[str]) -> None:
        stopped = event.finish in (FinishReason.STOP, FinishReason.GRAMMAR_CLOSED)
        stop_token_last = stopped and event.matched_token_id is not None
        for i, token_id in enumerate(event.token_ids):
            delta.token_ids.append(token_id)
            if event.logprobs:
                delta.logprobs.append(event.logprobs[i])
            self.completion_tokens += 1
            hidden = stop_token_last and i == len(event.token_ids) - 1 and not self._keep_stop
            if not hidden and self._detokenizer and self._scan(self._detokenizer.push(token_id), delta, text):
                return
        if event.finish is None and event.error is None:
            return
        if self._detokenizer and self._scan(self._detokenizer.flush(), delta, text):
            return
        text.append(self._scanner.flush())
        delta.finish, delta.matched_token_id, delta.error = event.finish, event.matched_token_id, event.error
        self._end()

    def _scan(self, piece: str, delta: Delta, text: list[str]) -> bool:
        if self.completion_tokens < self._min_tokens:
            text.append(piece)
            return False
        result = self._scanner.push(piece)
        if isinstance(result, StopMatch):
            text.append(result.text)
            delta.finish, delta.matched_stop = FinishReason.STOP, result.stop
            self._end()
            return True
        text.append(result)
        return False

    def _end(self) -> None:
        self.ended = True
        self.finished_s = time.monotonic()

    def __repr__(self) -> str:
        state = "ended" if self.ended else "running"
        return f"<SequenceOutput {self.request.key} {state} tokens={self.completion_tokens} {self._scanner!r}>"
