"""From token events to deltas for the client: detokenisation, stop strings, and the state of one sequence's output.

Invariant: text, token ids, finish reason and usage depend only on the tokens of a sequence, never on how many of them
one step brought. `SequenceOutput` therefore handles one token at a time, with two parts:

    Detokenizer    token ids to text; text that it returns never changes, and a character is never split
    StopScanner    finds stop strings in text that arrives in pieces

Not responsible for: protobuf messages (see responses.py), gRPC (see calls.py), waiting for events (see mailbox.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gpu_engine.api.errors import LockstepError
from gpu_engine.api.output_tensors import OutputRows
from gpu_engine.api.request import FinishReason, Logprobs, PromptLogprobs, Request, Telemetry, TokenEvent, TokenOrigin
from gpu_engine.front.receipts import Receipt
from gpu_engine.front.tokens.field_logprobs import FieldLogprob, FieldScorer
from gpu_engine.front.tokens.value_events import ScoredEvent, ValueEvents
from gpu_engine.front.tools.parts import Part, PartKind, PartsParser
from gpu_engine.front.tools.reasoning_tokens import ReasoningTokens

Decode = Callable[[Sequence[int]], str]
"""Maps token ids to text, without clean-up; special tokens are dropped or not, as the request asks."""

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6
"""Prompt tokens that are decoded before the answer's first token, so that its leading space is kept."""
MAX_HELD_TOKENS = 64
"""A run of this many tokens without one complete character is not UTF-8 text; its text is returned as it is."""


_STOPPED = frozenset({FinishReason.STOP, FinishReason.GRAMMAR_CLOSED, FinishReason.REPETITION})
"""Reasons of an answer that ends with a stop token, if one matched."""


@dataclass(slots=True)
class Delta:
    """What is new since the last delta. `text` may have fewer tokens than `token_ids`."""

    text: str = ""
    echo: str | None = None
    """The prompt's text, which precedes `text`; only in the first delta, if the request asked for it."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    """The log-probabilities of the prompt; with the first token, if the request asked for them."""
    outputs: list[OutputRows] = field(default_factory=list)
    """Rows of the tensors that were asked for."""
    finish: FinishReason | None = None
    matched_token_id: int | None = None
    matched_stop: str | None = None
    parts: list[Part] = field(default_factory=list)
    """The text by part, where the answer has parts."""
    fields: list[FieldLogprob] = field(default_factory=list)
    """The leaves of the answer's content; in the last delta, if the request asked for them."""
    values: list[ScoredEvent] = field(default_factory=list)
    """Events of the answer's values, if the request asked for them."""
    beam_score: float | None = None
    """The score of a sequence of a beam search, in its last delta."""
    origins: list[TokenOrigin] = field(default_factory=list)
    """How the step chose each token, if the request asked for it."""
    num_held: int = 0
    """Tokens of a verified answer that are held back."""
    receipt: str = ""
    """The receipt of the sequence; in the last delta, if the request asked for it."""
    error: LockstepError | None = None
    """The engine failed the sequence; the tokens before the failure are valid."""

    @property
    def ended(self) -> bool:
        """This is the last delta of the sequence."""
        return self.finish is not None or self.error is not None

    def add(self, later: Delta) -> None:
        """Append the next delta of the sequence: this one is then what is new since the delta before it.

        Rows of tensors are not added up: the rows of `later` replace the earlier ones. Events are, until they are sent.
        """
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.origins += later.origins
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        for part in later.parts:
            last = self.parts[-1] if self.parts else None
            if last and last.kind is part.kind and last.tool_call_index == part.tool_call_index:
                self.parts[-1] = replace(last, text=last.text + part.text)
            else:
                self.parts.append(part)
        self.outputs = later.outputs
        self.values += later.values
        self.beam_score, self.num_held, self.receipt = later.beam_score, later.num_held, later.receipt
        self.finish, self.error, self.fields = later.finish, later.error, later.fields
        self.matched_token_id, self.matched_stop = later.matched_token_id, later.matched_stop


class SequenceOutput:
    """Turns the events of one request into deltas. Used by one task at a time."""

    def __init__(
        self,
        request: Request,
        decode: Decode,
        *,
        telemetry: Telemetry | None = None,
        parser: PartsParser | None = None,
        fields: FieldScorer | None = None,
        values: ValueEvents | None = None,
        receipt: Receipt | None = None,
        decode_special: Decode | None = None,
        reasoning: ReasoningTokens | None = None,
    ) -> None:
        """Args: see below.

        telemetry: times and counts of the sequence, which the engine's thread writes; None: all of them are 0.
        parser: reads the parts of this sequence; None: the deltas have no parts.
        fields: collects the log-probabilities of the answer's leaves, which its events have; None: not asked for.
        values: makes the events of the answer's values; None: not asked for.
        receipt: names the tokens of the sequence; None: not asked for.
        decode_special: keeps special tokens, for a parser that reads them; None: it reads the text.
        reasoning: counts the tokens of the reasoning; None: the answer has none.
        """
        sampling, response = request.sampling, request.response
        self.request = request
        self.telemetry = telemetry or Telemetry()
        self.completion_tokens = 0
        self.ended = False
        self.finished_s = 0.0
        """`time.monotonic()` of the end; 0.0 before it."""
        self._with_text = with_text = not response.omit_text
        self._echo = request.echo_text
        self._with_logprobs, self._fields, self._values = request.outputs.logprobs is not None, fields, values
        self._receipt = receipt
        self._content: list[str] = []
        """The text that was sent, without reasoning and tool calls; empty without `fields`."""
        needs_text = with_text or fields is not None or values is not None or reasoning is not None
        self._reasoning = reasoning
        self._parser = parser if with_text or fields is not None else None
        self._min_tokens = sampling.min_tokens
        self._keep_stop = response.include_stop_str_in_output
        self._detokenizer = Detokenizer(decode, request.text_prompt_ids) if needs_text or sampling.stop else None
        self._scanner = StopScanner(sampling.stop, keep_match=self._keep_stop)
        reads_special = self._parser is not None or reasoning is not None
        special = Detokenizer(decode_special, request.text_prompt_ids) if decode_special and reads_special else None
        self._special = special
        self._special_scanner = StopScanner(sampling.stop, keep_match=self._keep_stop)
        self._special_text = ""
        """For the parser: text with special tokens that it has not read."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, its markers included."""
        return self._reasoning.count if self._reasoning is not None else 0

    def take(self, events: Sequence[TokenEvent]) -> Delta:
        """Merge all events that arrived into one delta. Events after the end are ignored."""
        delta = Delta(echo=self._echo)
        self._echo = None
        text: list[str] = []
        for event in events:
            if not self.ended:
                self._take_one(event, delta, text)
        if delta.matched_stop is not None:  # the event may have had tokens after the stop string
            end = len(self.request.prompt_ids) + self.completion_tokens - 1
            delta.outputs = [rows.before(end) for rows in delta.outputs if rows.start < end]
        joined = "".join(text)
        parts = self._parts(joined, ended=delta.ended)
        if self._with_text:
            delta.text, delta.parts = joined, parts
        whole = delta.finish in _STOPPED and delta.matched_stop is None
        if self._fields is not None:
            content = [part.text for part in parts if part.kind is PartKind.CONTENT]
            self._content += [joined] if self._parser is None else content
            if delta.finish is not None:
                delta.fields = self._fields.fields("".join(self._content), complete=whole)
        if self._values is not None:
            delta.values = self._values.take(joined, complete=whole)
        if self._receipt is not None:
            self._receipt.push(delta.token_ids)
            if delta.finish is not None and delta.finish is not FinishReason.ABORTED:
                delta.receipt = self._receipt.write(delta.finish, self.telemetry)
        return delta

    def _parts(self, text: str, *, ended: bool) -> list[Part]:
        if self._special:
            text, self._special_text = self._special_text, ""
        if self._parser is None:
            return []
        parts = self._parser.push(text)
        return parts + self._parser.finish() if ended else parts

    def _take_one(self, event: TokenEvent, delta: Delta, text: list[str]) -> None:
        stop_token_last = event.finish in _STOPPED and event.matched_token_id is not None
        delta.prompt_logprobs = delta.prompt_logprobs or event.prompt_logprobs
        delta.outputs += event.outputs
        delta.num_held = event.num_held
        for i, token_id in enumerate(event.token_ids):
            delta.token_ids.append(token_id)
            if event.logprobs and self._with_logprobs:
                delta.logprobs.append(event.logprobs[i])
            if self.request.outputs.token_origins:  # a beam search drafts nothing
                delta.origins.append(event.origins[i] if event.origins else TokenOrigin.SAMPLED)
            self.completion_tokens += 1
            hidden = stop_token_last and i == len(event.token_ids) - 1 and not self._keep_stop
            special = self._special.push(token_id) if self._special and not hidden else ""
            if special:
                self._scan_special(special)
            if hidden or self._detokenizer is None:
                continue
            piece = self._detokenizer.push(token_id)
            if self._reasoning is not None:
                self._reasoning.push(special if self._special else piece)
            if self._fields is not None:
                self._fields.push(piece, event.logprobs[i].logprob, holds=self._detokenizer.holds)
            if self._values is not None and event.logprobs:
                self._values.push(piece, event.logprobs[i].logprob, holds=self._detokenizer.holds)
            if self._scan(piece, delta, text):
                return  # tokens after a stop string do not count, though the same step brought them
        if event.finish is None and event.error is None:
            return
        if self._special:
            self._scan_special(self._special.flush())
            self._special_text += self._special_scanner.flush()
        if self._detokenizer is not None:
            piece = self._detokenizer.flush()
            if self._fields is not None:
                self._fields.push_text(piece)
            if self._scan(piece, delta, text):
                return
        text.append(self._scanner.flush())
        delta.finish, delta.matched_token_id, delta.error = event.finish, event.matched_token_id, event.error
        delta.beam_score = event.beam_score
        self._end()

    def _scan(self, piece: str, delta: Delta, text: list[str]) -> bool:
        """Append what may be sent of `piece`; return whether a stop string ended the sequence."""
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

    def _scan_special(self, piece: str) -> None:
        """Add what the parser may read of `piece`; stop strings are cut off as in the text."""
        result = piece if self.completion_tokens < self._min_tokens else self._special_scanner.push(piece)
        self._special_text += result.text if isinstance(result, StopMatch) else result

    def _end(self) -> None:
        self.ended = True
        self.finished_s = time.monotonic()

    def __repr__(self) -> str:
        state = "ended" if self.ended else "running"
        return f"<SequenceOutput {self.request.key} {state} tokens={self.completion_tokens} {self._scanner!r}>"


class Detokenizer:
    """Decodes the tokens of one sequence.

    Invariant: the concatenation of all deltas equals the text of all tokens. Text that the next token may still change
    (an incomplete UTF-8 sequence) is held back until then, or until `flush`.

    A window of the last tokens is decoded again with each new one, because with every decoder but the byte-level one
    the text of a token depends on its left neighbour (the prefix-offset method of Hugging Face's
    text-generation-inference).
    """

    def __init__(self, decode: Decode, prompt_tail: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt_tail[-CONTEXT_TOKENS:])
        """The window: context tokens, whose text was returned, then tokens whose text is held back in part or whole."""
        self._context = len(self._ids)
        """Number of context tokens."""
        self._returned = self._complete(self._decode(self._ids)) if self._ids else 0
        """Characters of the window's text that were returned."""
        self.holds = False
        """The last token ended in the middle of a character."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that can no longer change, often empty in the middle of a character."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        self.holds = text.endswith(REPLACEMENT)
        if self.holds and len(self._ids) - self._context <= MAX_HELD_TOKENS:
            end = max(self._complete(text), self._returned)
            delta, self._returned = text[self._returned : end], end
            return delta
        delta = text[self._returned :]
        if len(self._ids) - self._context > 0 and text:
            self._slide(text)
        return delta

    def flush(self) -> str:
        """Return the text that is held back, replacement characters included. Call once, after the last token."""
        text = self._decode(self._ids)
        delta, self._returned = text[self._returned :], len(text)
        return delta

    def _slide(self, text: str) -> None:
        # The new window keeps one complete stretch as the left neighbour of the next tokens. That stretch must not be
        # empty text (special tokens that were dropped), or the next token would begin a text and lose its space.
        tail = self._ids[self._context :]
        tail_text = self._decode(tail)
        if tail_text.strip():
            self._ids, self._context, self._returned = tail, len(tail), len(tail_text)
        else:
            self._context, self._returned = len(self._ids), len(text)

    @staticmethod
    def _complete(text: str) -> int:
        """Return the number of characters before the incomplete end."""
        return len(text.rstrip(REPLACEMENT))

    def __repr__(self) -> str:
        return f"<Detokenizer window={len(self._ids)} held={len(self._ids) - self._context}>"


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found."""

    text: str
    """Text to send before the end."""
    stop: str


class StopScanner:
    """Scans for `stops` (non-empty strings). Of two matches in one piece the earlier start wins, then the longer one.

    Invariant: text that was returned contains no stop string, and does not end with the beginning of one that the next
    piece could complete. Fed one token's text at a time, a match does not depend on how tokens are grouped.
    """

    def __init__(self, stops: tuple[str, ...], *, keep_match: bool) -> None:
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._keep_match = keep_match
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._longest_beginning = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""

    def push(self, text: str) -> str | StopMatch:
        """Add text; return the text that may be sent, or the match."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # min() returns the first of equals: the longest, by the order of self._stops.
            at, stop = min(found, key=lambda match: match[0])
            self._held = ""
            return StopMatch(text[: at + len(stop)] if self._keep_match else text[:at], stop)
        end = self._beginning(text)
        self._held = text[end:]
        return text[:end]

    def flush(self) -> str:
        """Return the text that is held back: no more text comes."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Return where the longest suffix starts that a stop string begins with; len(text) when there is none."""
        for at in range(max(0, len(text) - self._longest_beginning), len(text)):
            if text[at] in self._first_chars:
                suffix = text[at:]
                if any(stop.startswith(suffix) for stop in self._stops):
                    return at
        return len(text)

    def __repr__(self) -> str:
        return f"<StopScanner stops={len(self._stops)} held={len(self._held)}>"
