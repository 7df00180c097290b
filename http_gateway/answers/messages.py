"""Answers of Anthropic's `/v1/messages`: content blocks, and the events that build them.

Invariant: the blocks of the events joined are the blocks of the whole answer.

Not responsible for: the request (wire/messages.py), the connection (http/stream.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from http_gateway.answers.pieces import Parts, Piece
from http_gateway.answers.usage import Counts
from http_gateway.wire.errors import ApiError, message_error
from protos.engine.v1 import engine_pb2 as pb

Event = dict[str, Any]

_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "repetition": "end_turn"}
"""OpenAI's finish reasons -> Anthropic's stop reasons."""


@dataclass(slots=True)
class MessageShape:
    """What the answer of one request carries."""

    id: str
    model: str
    apart: bool
    """The engine tells the parts of the answer apart (see pieces.py)."""
    prompt_tokens: int
    """0 where the events do not say it."""
    max_tokens: int
    max_model_len: int
    """Most tokens of prompt and answer."""


@dataclass(slots=True)
class _Block:
    """One content block that grows."""

    type: str
    head: dict[str, Any]
    """Its fields but for those that grow."""
    text: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, piece: Piece) -> _Block:
        """Return the block that a piece begins."""
        match piece.kind:
            case "content":
                return cls("text", {})
            case "reasoning":
                return cls("thinking", {"signature": ""})
        return cls("tool_use", {"id": piece.id, "name": piece.name})

    def json(self) -> dict[str, Any]:
        """Return the block as it is now."""
        text = "".join(self.text)
        grown: dict[str, Any] = {"input": _object(text)} if self.type == "tool_use" else {self.type: text}
        return {"type": self.type} | self.head | grown

    def delta(self, text: str) -> Event:
        """Add text, and return its delta."""
        self.text.append(text)
        if self.type == "tool_use":
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": f"{self.type}_delta", self.type: text}


def _object(text: str) -> dict[str, Any]:
    """Return the input of a call; {} for one that is cut."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class MessageAnswer:
    """Turns the responses of one sequence into events, and into the whole answer."""

    def __init__(self, shape: MessageShape) -> None:
        self._shape = shape
        self._parts = Parts(shape.apart)
        self._counts = Counts(prompt={0: shape.prompt_tokens})
        self._blocks: list[_Block] = []
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def begin(self) -> Iterator[Event]:
        """Yield the events before the first block."""
        yield {"type": "message_start", "message": self.json()}
        yield {"type": "ping"}

    def take(self, response: pb.GenerateResponse) -> Iterator[Event]:
        """Add a response; yield its events. Raises ApiError for a sequence that failed."""
        self._counts.take(response)
        for piece in self._parts.of(response):
            yield from self._piece(piece)
        if not response.finish_reason:
            return
        reason = self._parts.reason(response)
        self._stop["stop_reason"] = _REASONS[reason]
        if reason == "length" and response.usage.prompt_tokens + self._shape.max_tokens > self._shape.max_model_len:
            self._stop["stop_reason"] = "model_context_window_exceeded"
        if reason == "stop" and response.HasField("matched_stop_str"):
            self._stop = {"stop_reason": "stop_sequence", "stop_sequence": response.matched_stop_str}
        yield from self._close()
        yield {"type": "message_delta", "delta": dict(self._stop), "usage": self._usage()}
        yield {"type": "message_stop"}

    def json(self) -> dict[str, Any]:
        """Return the message as it is now."""
        return {
            "id": self._shape.id,
            "type": "message",
            "role": "assistant",
            "model": self._shape.model,
            "content": [block.json() for block in self._blocks],
            **self._stop,
            "usage": self._usage(),
        }

    def failed(self, error: ApiError) -> Event:
        """Return the event of an error that ends the answer."""
        return message_error(error)[1]

    def _piece(self, piece: Piece) -> Iterator[Event]:
        wanted = {"content": "text", "reasoning": "thinking"}.get(piece.kind, "tool_use")
        if piece.kind == "call" or not self._blocks or self._blocks[-1].type != wanted:
            if wanted != "tool_use" and not piece.text:
                return
            yield from self._close()
            self._blocks.append(_Block.of(piece))
            yield self._at("content_block_start") | {"content_block": self._blocks[-1].json()}
        if piece.text:
            yield self._at("content_block_delta") | {"delta": self._blocks[-1].delta(piece.text)}

    def _close(self) -> Iterator[Event]:
        if not self._blocks:
            return
        if self._blocks[-1].type == "thinking":
            yield self._at("content_block_delta") | {"delta": {"type": "signature_delta", "signature": ""}}
        yield self._at("content_block_stop")

    def _at(self, kind: str) -> Event:
        return {"type": kind, "index": len(self._blocks) - 1}

    def _usage(self) -> dict[str, Any]:
        """Return the usage. Anthropic counts the tokens from the cache apart from the others."""
        usage = self._counts.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
