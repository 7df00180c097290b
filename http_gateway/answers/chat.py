"""Answers of `/v1/chat/completions`, whole and as a stream of chunks.

Invariant: the deltas of a stream joined are the message of the whole answer.

Not responsible for: the connection (http/stream.py), the request (prompts.py, sampling.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from http_gateway.answers.beams import is_missing
from http_gateway.answers.logprobs import Texts, chat_logprobs, prompt_logprobs
from http_gateway.answers.pieces import Parts, Piece, stop_reason
from http_gateway.answers.usage import Counts, field_logprobs, telemetry, token_origins, value_events
from http_gateway.wire.chat import ChatRequest
from protos.engine.v1 import engine_pb2 as pb


@dataclass(slots=True)
class ChatShape:
    """What the answer of one request carries."""

    id: str
    model: str
    """The name that the client gave, or the model's preferred one."""
    fields: ChatRequest
    custom: frozenset[str]
    """The tools whose input is text."""
    apart: bool
    """The engine tells the parts of the answer apart (see pieces.py)."""
    texts: Texts
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_ids: tuple[int, ...] = ()
    """Known where the answer shows them or counts them in every event."""
    virtual_tokens: int = 0
    """Before the prompt: those of a prompt adapter."""

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields with which an answer or a chunk begins."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def hides(self, piece: Piece) -> bool:
        """Return whether the client does not want to see this piece."""
        return piece.kind == "reasoning" and self.fields.include_reasoning is False

    def begin_call(self, piece: Piece, text: str) -> dict[str, Any]:
        """Return a tool call with its id and name, and `text` as its arguments or input."""
        if piece.name in self.custom:
            return {"id": piece.id, "type": "custom", "custom": {"name": piece.name, "input": text}}
        return {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": text}}

    def extras(self, response: pb.GenerateResponse) -> dict[str, Any]:
        """Return the fields of a finished choice that clients ask for by name."""
        extra: dict[str, Any] = {"stop_reason": stop_reason(response, self.fields.stop_token_ids or ())}
        if self.fields.field_logprobs:
            extra["field_logprobs"] = field_logprobs(response)
        if response.receipt:
            extra["receipt"] = response.receipt
        if response.HasField("beam_score"):
            extra["beam_score"] = response.beam_score
        if self.fields.telemetry:
            extra["telemetry"] = telemetry(response)
        return extra


def thought(text: str) -> dict[str, str]:
    """Return the reasoning under both of its names: DeepSeek's and older vLLM's, and newer vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


class ChatStream:
    """Turns responses into chunks."""

    def __init__(self, shape: ChatShape) -> None:
        self._shape = shape
        known = {0: shape.virtual_tokens + len(shape.prompt_ids)} if shape.prompt_ids else {}
        self._counts = Counts(prompt=known)
        self._sequences: dict[int, Parts] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._with_usage, self._always = shape.fields.usage_events()

    def chunks(self, response: pb.GenerateResponse) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a response. Raises ApiError for a sequence that failed."""
        index = response.index
        self._counts.take(response)
        parts = self._sequences.get(index)
        deltas: list[dict[str, Any]] = []
        if parts is None:
            parts = self._sequences[index] = Parts(self._shape.apart, self._shape.custom)
            yield self._chunk(index, {"role": "assistant", "content": ""})
        deltas += [self._delta(index, piece) for piece in parts.of(response) if not self._shape.hides(piece)]
        reason = parts.reason(response) if response.finish_reason else None
        logprobs = self._logprobs(response)
        tokens = self._tokens(response)
        if not deltas and (reason or logprobs or tokens):
            deltas = [{}]
        for number, delta in enumerate(deltas):
            chunk = self._chunk(index, delta)
            choice = chunk["choices"][0]
            if number == 0:
                choice["logprobs"] = logprobs
                choice |= tokens
            if reason and number == len(deltas) - 1:
                choice["finish_reason"] = reason
                choice |= self._shape.extras(response)
            yield chunk

    def last(self) -> dict[str, Any] | None:
        """Return the chunk after the last sequence; None where the client asked for none."""
        if not self._with_usage:
            return None
        return self._shape.head("chat.completion.chunk") | {"choices": [], "usage": self._counts.usage()}

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._shape.head("chat.completion.chunk") | {"choices": [choice]}
        if self._always:
            chunk["usage"] = self._counts.usage()
        elif self._with_usage:
            chunk["usage"] = None
        return chunk

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        match piece.kind:
            case "content":
                return {"content": piece.text}
            case "reasoning":
                return thought(piece.text)
            case "call":
                self._names[index, piece.call] = piece.name
                return {"tool_calls": [{"index": piece.call} | self._shape.begin_call(piece, piece.text)]}
        if self._names.get((index, piece.call)) in self._shape.custom:
            return {"tool_calls": [{"index": piece.call, "custom": {"input": piece.text}}]}
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}

    def _tokens(self, response: pb.GenerateResponse) -> dict[str, Any]:
        """Return what the client wants to see of the new tokens and values."""
        fields, shown = self._shape.fields, dict[str, Any]()
        if fields.return_token_ids and response.token_ids:
            shown["token_ids"] = list(response.token_ids)
        if response.token_origins:
            shown["token_origins"] = token_origins(response, self._shape.texts)
        if response.value_events:
            shown["value_events"] = value_events(response)
        return shown

    def _logprobs(self, response: pb.GenerateResponse) -> dict[str, Any] | None:
        if not response.logprobs:
            return None
        return {"content": chat_logprobs(response.token_ids, response.logprobs, self._shape.texts), "refusal": None}


@dataclass(slots=True)
class _Sequence:
    parts: Parts
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, Piece] = field(default_factory=dict)
    arguments: dict[int, list[str]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    origins: list[dict[str, Any]] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    last: pb.GenerateResponse | None = None


class ChatWhole:
    """Joins responses into one answer."""

    def __init__(self, shape: ChatShape) -> None:
        self._shape = shape
        self._counts = Counts()
        self._sequences: dict[int, _Sequence] = {}
        self._prompt_logprobs: list[Any] | None = None

    def take(self, response: pb.GenerateResponse) -> None:
        """Add a response."""
        if is_missing(self._shape.fields, response):
            return
        self._counts.take(response)
        sequence = self._sequences.get(response.index)
        if sequence is None:
            sequence = self._sequences[response.index] = _Sequence(Parts(self._shape.apart, self._shape.custom))
        for piece in sequence.parts.of(response):
            match piece.kind:
                case "content":
                    sequence.content.append(piece.text)
                case "reasoning":
                    sequence.reasoning.append(piece.text)
                case "call":
                    sequence.calls[piece.call] = piece
                    sequence.arguments[piece.call] = [piece.text]
                case "arguments":
                    sequence.arguments[piece.call].append(piece.text)
        sequence.token_ids.extend(response.token_ids)
        sequence.origins += token_origins(response, self._shape.texts) if response.token_origins else []
        sequence.values += value_events(response)
        if response.logprobs:
            sequence.logprobs += chat_logprobs(response.token_ids, response.logprobs, self._shape.texts)
        if response.prompt_logprobs:
            self._prompt_logprobs = prompt_logprobs(self._shape.prompt_ids, response.prompt_logprobs, self._shape.texts)
        if response.finish_reason:
            sequence.last = response

    def result(self) -> dict[str, Any]:
        """Return the answer. Raises ApiError for a sequence that failed."""
        result = self._shape.head("chat.completion")
        result["choices"] = [self._choice(index, self._sequences[index]) for index in sorted(self._sequences)]
        result["usage"] = self._counts.usage()
        if self._prompt_logprobs is not None:
            result["prompt_logprobs"] = self._prompt_logprobs
        if self._shape.fields.return_token_ids:
            result["prompt_token_ids"] = list(self._shape.prompt_ids)
        return result

    def _choice(self, index: int, sequence: _Sequence) -> dict[str, Any]:
        last = sequence.last
        assert last is not None, "the engine ends a stream after the finish reason of every sequence"
        reason = sequence.parts.reason(last)
        content = "".join(sequence.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if sequence.calls and not content else content,
            "refusal": None,
        }
        if sequence.reasoning and self._shape.fields.include_reasoning is not False:
            message |= thought("".join(sequence.reasoning))
        if sequence.calls:
            message["tool_calls"] = [
                self._shape.begin_call(piece, "".join(sequence.arguments[number]))
                for number, piece in sorted(sequence.calls.items())
            ]
        choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": reason}
        choice["logprobs"] = {"content": sequence.logprobs, "refusal": None} if self._shape.fields.logprobs else None
        if self._shape.fields.return_token_ids:
            choice["token_ids"] = sequence.token_ids
        if self._shape.fields.token_origins:
            choice["token_origins"] = sequence.origins
        if self._shape.fields.wants_events:
            choice["value_events"] = sequence.values
        return choice | self._shape.extras(last)
