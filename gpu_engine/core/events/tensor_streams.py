"""The tensors of running sequences: one forward an iteration computes some rows, and tokens wait for theirs.

A token of a sequence that returns rows of its answer is sent together with its row, so that a sequence that ends at a
stop string has exactly the rows of its tokens. The first tokens are sent one or two at a time, and later ones `_GROUP`
together. Invariant: each row is sent once, in the order of positions, also after a preemption. Not responsible
for: computing rows (see step/outputs/tensors.py), slots and pages (see scheduler.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_engine.api.output_tensors import OutputRows, WantedOutput
from gpu_engine.api.request import FinishReason, Logprobs, PromptLogprobs, TokenEvent, TokenOrigin
from gpu_engine.core.running import RunningSequence
from gpu_engine.step.outputs.tensors import Bytes, Piece, TensorOutputs

_GROUP = 16
"""Tokens that wait for one forward. Forwards end at multiples of it, as most pages do."""


@dataclass(slots=True, eq=False)
class _Stream:
    """The rows and the tokens of one sequence that are not sent yet."""

    sequence: RunningSequence
    wanted: tuple[WantedOutput, ...]
    parts: dict[str, int]
    """Bytes of a row by source."""
    first: int = -1
    """Tokens of the prompt that the prefix cache had, once the first row is computed; -1 before."""
    next: int = -1
    """The next position whose row is computed."""
    piece: Piece | None = None
    """The rows that a forward computes now."""
    sent: int = 0
    """Tokens of the answer that were sent."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    rows: list[OutputRows] = field(default_factory=list)
    finish: FinishReason | None = None
    """The sequence has ended, and holds its slot until its rows are computed."""

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.sequence.request.prompt_ids)

    @property
    def end(self) -> int:
        """The position after the last row that the known tokens have."""
        ends = [self.sequence.length - 1 if each.answer else self.prompt_length for each in self.wanted]
        return max(self.prompt_length, *ends) if self.with_context else max(ends)

    @property
    def with_context(self) -> bool:
        """Rows of the prompt are wanted."""
        return any(each.context for each in self.wanted)

    @property
    def holds_tokens(self) -> bool:
        """Tokens wait for their rows."""
        return any(each.answer for each in self.wanted)

    @property
    def is_complete(self) -> bool:
        """Every row of an ended sequence is computed."""
        return self.finish is not None and self.piece is None and self.next >= self.end

    def due(self) -> int:
        """Return how many rows the next forward should compute; 0: none yet."""
        sequence = self.sequence
        if self.piece is not None or sequence.slot < 0 or sequence.prefilled < sequence.prefill_end:
            return 0
        if self.first < 0:
            self.first = sequence.num_cached_tokens
            self.next = self.first if self.with_context else self.prompt_length - 1
        pending, answer = self.end - self.next, self.next - (self.prompt_length - 1)
        if answer < 0 or self.finish is not None or not sequence.decoding:
            return pending
        if answer + 1 < _GROUP:
            return pending if pending > answer else 0
        # A forward begins at the start of a page: rows before `next` there would be computed again.
        return max(self.end // _GROUP * _GROUP - self.next, 0)

    def take(self, results: dict[str, Bytes], start: int) -> None:
        """Keep the rows of positions from `start` on."""
        for each in self.wanted:
            data = results[each.source]
            wanted = each.rows(self.first, self.prompt_length, start + len(data))
            begin = max(start, wanted.start)
            if begin < wanted.stop:
                rows = data[begin - start : wanted.stop - start]
                self.rows.append(OutputRows(each.name, each.spec, begin, rows))

    def event(self) -> TokenEvent | None:
        """Return the tokens whose rows are computed, and the rows; None where there are neither."""
        count = len(self.tokens)
        if self.holds_tokens:
            count = min(count, max(self.next - (self.prompt_length - 1) - self.sent, 0))
        if not count and not self.rows:
            return None
        return self._event(count)

    def last_event(self) -> TokenEvent:
        """Return all tokens and rows that were not sent."""
        return self._event(len(self.tokens))

    def _event(self, count: int) -> TokenEvent:
        scores = self.prompt_logprobs if count else None
        index = self.sequence.request.index
        event = TokenEvent(
            index,
            tuple(self.tokens[:count]),
            tuple(self.logprobs[:count]),
            prompt_logprobs=scores,
            outputs=tuple(self.rows),
            origins=tuple(self.origins[:count]),
        )
        del self.tokens[:count], self.logprobs[:count], self.origins[:count]
        self.rows.clear()
        self.prompt_logprobs = None if count else self.prompt_logprobs
        self.sent += count
        return event


class OutputStreams:
    """The sequences that return tensors. Used only by the engine thread.

    Args:
        tensors: computes the rows.
        write_pages: brings a slot's row of the page table up to date.
        end: called with a sequence that had ended, and the reason, when its rows are computed.
    """

    def __init__(
        self,
        tensors: TensorOutputs,
        write_pages: Callable[[RunningSequence], None],
        end: Callable[[RunningSequence, FinishReason], None],
    ) -> None:
        self._tensors, self._write_pages, self._end = tensors, write_pages, end
        self._streams: dict[RunningSequence, _Stream] = {}

    def add(self, sequence: RunningSequence) -> None:
        """Add a sequence, if its request asks for tensors."""
        if wanted := sequence.request.outputs.tensors:
            parts = {each.source: each.spec.row_bytes for each in wanted}
            self._streams[sequence] = _Stream(sequence, wanted, parts)

    def __contains__(self, sequence: RunningSequence) -> bool:
        return sequence in self._streams

    def __bool__(self) -> bool:
        return bool(self._streams)

    def hold(self, sequence: RunningSequence, event: TokenEvent, finish: FinishReason | None = None) -> None:
        """Send the event's tokens when their rows are computed. `finish`: no more tokens come."""
        stream = self._streams[sequence]
        stream.tokens += event.token_ids
        stream.logprobs += event.logprobs
        stream.origins += event.origins
        stream.prompt_logprobs = stream.prompt_logprobs or event.prompt_logprobs
        stream.finish = finish

    def reused(self, sequence: RunningSequence) -> int | None:
        """Return how many tokens of the prompt have no rows, because the prefix cache had them; None: not known yet."""
        stream = self._streams[sequence]
        return stream.first if stream.first >= 0 and stream.with_context else None

    def run(self, *, wait: bool) -> bool:
        """Launch one forward, and send what is computed. `wait`: wait for a forward in flight, as nothing else runs.

        Returns whether a forward was launched or is in flight.
        """
        launched = self._launch()
        for stream in list(self._streams.values()):
            if stream.piece is not None and (wait or stream.piece.ready()):
                piece, stream.piece = stream.piece, None
                stream.take(piece.take(), piece.start)
                stream.next = piece.end
            if stream.is_complete:
                assert stream.finish is not None
                self._end(stream.sequence, stream.finish)
            elif stream.finish is None and (event := stream.event()) is not None:
                stream.sequence.request.sink(event)
        return launched or any(stream.piece is not None for stream in self._streams.values())

    def close(self, sequence: RunningSequence) -> TokenEvent:
        """Forget a sequence, and return what was not sent: rows may be missing unless it was complete."""
        stream = self._streams.pop(sequence)
        if stream.piece is not None:
            stream.piece.drop()
        return stream.last_event()

    def _launch(self) -> bool:
        """Launch the forward of the sequence that has ended, or else of the one that waits for the most rows."""
        due = [(stream.finish is not None, stream.due(), stream) for stream in self._streams.values()]
        _, pending, stream = max(due, key=lambda one: one[:2])
        if not pending:
            return False
        self._write_pages(stream.sequence)
        stream.piece = self._tensors.launch(stream.sequence.slot, stream.next, stream.next + pending, stream.parts)
        return stream.piece is not None

    def __repr__(self) -> str:
        return f"<OutputStreams of {len(self._streams)} sequences>"
