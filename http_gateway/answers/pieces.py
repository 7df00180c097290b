"""What an answer consists of: content, reasoning, and tool calls, as pieces of text in their order.

Invariant: the pieces of one sequence joined are its answer. A sequence whose responses have parts is read from the
parts alone: its text has the model's own markers as well.

Not responsible for: the shape in which HTTP shows them (chat.py, completions.py, responses.py).
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Literal

from http_gateway.wire.errors import ApiError
from protos.engine.v1 import engine_pb2 as pb

Kind = Literal["content", "reasoning", "call", "arguments"]

_KINDS: dict[int, Kind] = {
    pb.AnswerPart.KIND_REASONING: "reasoning",
    pb.AnswerPart.KIND_CONTENT: "content",
    pb.AnswerPart.KIND_TOOL_CALL: "call",
    pb.AnswerPart.KIND_TOOL_ARGUMENTS: "arguments",
}
_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_GRAMMAR_CLOSED: "length",
    pb.FINISH_REASON_GRAMMAR_INCOMPLETE: "length",
    pb.FINISH_REASON_REPETITION: "repetition",
}
CLOSED = "grammar_closed"


@dataclass(frozen=True, slots=True)
class Piece:
    """A delta of one part."""

    kind: Kind
    text: str = ""
    call: int = 0
    """Which call of the answer, from 0."""
    id: str = ""
    """In the piece that begins a call."""
    name: str = ""
    """The tool's name, in the piece that begins a call."""


@dataclass(slots=True)
class Parts:
    """Reads the pieces of one sequence."""

    apart: bool
    """The responses have parts: their text is more than the answer."""
    custom: Container[str] = ()
    """The tools whose input is text."""
    calls: int = 0
    """Calls that have begun."""
    is_cut: bool = False
    """A stop of the request ended the answer within the arguments of its last call."""
    _name: str = ""
    _arguments: list[str] = field(default_factory=list)
    """Of the last call, as its tool's name."""

    def of(self, response: pb.GenerateResponse) -> Iterator[Piece]:
        """Yield the pieces of a response."""
        if not self.apart:
            if response.text:
                yield Piece("content", response.text)
            return
        for part in response.parts:
            kind = _KINDS[part.kind]
            if kind == "call":
                self.calls += 1
                self._name, self._arguments = part.tool_name, []
            if kind in ("call", "arguments"):
                self._arguments.append(part.text)
            yield Piece(kind, part.text, part.tool_call_index, part.tool_call_id, part.tool_name)
        if response.HasField("matched_stop_str") or response.HasField("matched_token_id"):
            self.is_cut = bool(self.calls) and self._name not in self.custom and not _is_json("".join(self._arguments))

    def reason(self, response: pb.GenerateResponse) -> str:
        """Return the finish reason of the sequence's last response; a call that was cut is not one to run.

        Raises ApiError, as `finish_reason`.
        """
        return finish_reason(response, 0 if self.is_cut else self.calls)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def finish_reason(response: pb.GenerateResponse, calls: int) -> str:
    """Return OpenAI's name for the finish reason, or vLLM's "repetition".

    Raises ApiError for an aborted sequence and for a grammar error; HTTP reports these as errors.

    calls: number of tool calls that the sequence has made.
    """
    reason = _REASONS.get(response.finish_reason)
    if reason is not None:
        return "tool_calls" if reason == "stop" and calls else reason
    if response.finish_reason == pb.FINISH_REASON_ABORTED:
        raise ApiError("the answer was aborted", status=503, kind="server_error", code="aborted")
    if response.finish_reason == pb.FINISH_REASON_GRAMMAR_INVALID:
        raise ApiError(
            "the answer cannot become valid any more, by parts of the schema that are verified and not enforced",
            status=422,
            code="grammar_invalid",
        )
    if response.finish_reason == pb.FINISH_REASON_GRAMMAR_INEXACT:
        raise ApiError(
            f"grammar_exact: no answer was accepted in {response.telemetry.exact_tries} tries",
            status=422,
            code="grammar_inexact",
        )
    raise ApiError(
        "the grammar left no legal token: together with the banned tokens and the stops it allows no answer, or its "
        "library reached a limit",
        status=422,
        code="grammar_error",
    )


def stop_reason(response: pb.GenerateResponse, asked: Container[int]) -> str | int | None:
    """Return the stop of the request that matched: a string, or a token's id; None for an end of sequence.

    CLOSED for an answer that the server led to its end at `max_tokens`: it is complete by its grammar, and what the
    model had no room for was left out or made up.

    asked: the request's stop tokens.
    """
    if response.HasField("matched_stop_str"):
        return response.matched_stop_str
    if response.matched_token_id in asked:
        return response.matched_token_id
    return CLOSED if response.finish_reason == pb.FINISH_REASON_GRAMMAR_CLOSED else None
