"""Answers of `/v1/responses`: output items, and the events that build them.

Invariant: the items of the last event are the items of the whole answer; each event has the next sequence number.

Not responsible for: the request (wire/responses.py), the connection (http/stream.py).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from http_gateway.answers.logprobs import Texts, chat_logprobs
from http_gateway.answers.pieces import Parts, Piece
from http_gateway.answers.usage import Counts
from http_gateway.wire.errors import ApiError
from http_gateway.wire.responses import ResponsesRequest
from protos.engine.v1 import engine_pb2 as pb

Event = dict[str, Any]


@dataclass(slots=True)
class ResponseShape:
    """What the answer of one request carries."""

    id: str
    model: str
    fields: ResponsesRequest
    custom: frozenset[str]
    apart: bool
    texts: Texts
    created_s: float = field(default_factory=time.time)


class _Item:
    """One output item that grows. Each kind has a text under its own name."""

    def __init__(self, piece: Piece, index: int, *, custom: bool) -> None:
        kinds = {"content": "message", "reasoning": "reasoning"}
        self.type = kinds.get(piece.kind, "custom_tool_call" if custom else "function_call")
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}[self.type]
        self.id = f"{prefix}_{uuid.uuid4().hex}"
        self.index = index
        self.call_id, self.name = piece.id, piece.name
        self.text: list[str] = []
        self.logprobs: list[dict[str, Any]] = []

    def json(self, status: str) -> dict[str, Any]:
        """Return the item as it is now."""
        head: dict[str, Any] = {"id": self.id, "type": self.type, "status": status}
        text = "".join(self.text)
        match self.type:
            case "message":
                return head | {"role": "assistant", "content": [] if status == "in_progress" else [self.part()]}
            case "reasoning":
                return head | {"summary": [], "content": [{"type": "reasoning_text", "text": text}] if text else []}
            case "function_call":
                return head | {"call_id": self.call_id, "name": self.name, "arguments": text}
        return head | {"call_id": self.call_id, "name": self.name, "input": text}

    def part(self) -> dict[str, Any]:
        """Return the one part of a message."""
        return {"type": "output_text", "text": "".join(self.text), "annotations": [], "logprobs": self.logprobs}

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        """Add text, and return its event."""
        self.text.append(text)
        self.logprobs += logprobs
        where: Event = {"item_id": self.id, "output_index": self.index, "delta": text}
        match self.type:
            case "message":
                return {"type": "response.output_text.delta", "content_index": 0, "logprobs": logprobs} | where
            case "reasoning":
                return {"type": "response.reasoning_text.delta", "content_index": 0} | where
            case "function_call":
                return {"type": "response.function_call_arguments.delta"} | where
        return {"type": "response.custom_tool_call_input.delta"} | where

    def opened(self) -> Iterator[Event]:
        """Yield the events with which it begins."""
        yield {"type": "response.output_item.added", "output_index": self.index, "item": self.json("in_progress")}
        if self.type == "message":
            yield self._at("response.content_part.added") | {"content_index": 0, "part": self.part()}

    def closed(self, status: str) -> Iterator[Event]:
        """Yield the events with which it ends."""
        text = "".join(self.text)
        match self.type:
            case "message":
                at = {"content_index": 0}
                yield self._at("response.output_text.done") | at | {"text": text, "logprobs": self.logprobs}
                yield self._at("response.content_part.done") | at | {"part": self.part()}
            case "reasoning":
                yield self._at("response.reasoning_text.done") | {"content_index": 0, "text": text}
            case "function_call":
                yield self._at("response.function_call_arguments.done") | {"name": self.name, "arguments": text}
            case _:
                yield self._at("response.custom_tool_call_input.done") | {"input": text}
        yield {"type": "response.output_item.done", "output_index": self.index, "item": self.json(status)}

    def _at(self, kind: str) -> Event:
        return {"type": kind, "item_id": self.id, "output_index": self.index}


class ResponseAnswer:
    """Turns the responses of one sequence into events, and into the whole answer."""

    def __init__(self, shape: ResponseShape) -> None:
        self._shape = shape
        self._parts = Parts(shape.apart, shape.custom)
        self._counts = Counts()
        self._items: list[_Item] = []
        self._logprobs: list[dict[str, Any]] = []
        """Of the tokens whose text has not come yet: a part of a character, or held back as the beginning of a stop."""
        self._number = 0
        self.reason = ""
        """Why the sequence ended; empty while it runs."""

    def begin(self) -> Iterator[Event]:
        """Yield the events before the first item."""
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered({"type": kind, "response": self.json("in_progress")})

    def take(self, response: pb.GenerateResponse) -> Iterator[Event]:
        """Add a response; yield its events. Raises ApiError for a sequence that failed."""
        self._counts.take(response)
        self._logprobs += chat_logprobs(response.token_ids, response.logprobs, self._shape.texts)
        for piece in self._parts.of(response):
            for event in self._piece(piece):
                yield self._numbered(event)
        if response.finish_reason:
            self.reason = self._parts.reason(response)
            if not self._items:  # an empty answer is a message, too
                for event in self._piece(Piece("content")):
                    yield self._numbered(event)
            if self._logprobs and self._items[-1].type == "message":
                yield self._numbered(self._items[-1].delta("", self._logprobs))
            for event in self._items[-1].closed(self._last_status):
                yield self._numbered(event)
            yield self._numbered({"type": f"response.{self._status}", "response": self.json(self._status)})

    def json(self, status: str | None = None) -> dict[str, Any]:
        """Return the response object as it is now."""
        status = status or self._status
        fields = self._shape.fields
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        given = fields.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {
            "id": self._shape.id,
            "object": "response",
            "created_at": int(self._shape.created_s),
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "model": self._shape.model,
            "output": [] if status == "in_progress" else self._output(),
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": fields.reasoning.effort if fields.reasoning else None, "summary": None},
            "store": False,
            "temperature": fields.temperature,
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": fields.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": fields.user,
            "metadata": fields.metadata or {},
        }

    def failed(self, error: ApiError) -> Event:
        """Return the event of an error that ends the answer."""
        return self._numbered({"type": "error", "code": error.code, "message": error.message, "param": error.param})

    @property
    def _status(self) -> str:
        return "incomplete" if self.reason == "length" else "completed"

    @property
    def _last_status(self) -> str:
        return "incomplete" if self._parts.is_cut else self._status

    def _output(self) -> list[dict[str, Any]]:
        return [item.json(self._last_status if item is self._items[-1] else "completed") for item in self._items]

    def _piece(self, piece: Piece) -> Iterator[Event]:
        current = self._items[-1] if self._items else None
        wanted = {"content": "message", "reasoning": "reasoning"}.get(piece.kind, "call")
        if current is None or piece.kind == "call" or (wanted != "call" and current.type != wanted):
            if current is not None:
                yield from current.closed("completed")
            current = _Item(piece, len(self._items), custom=piece.name in self._shape.custom)
            self._items.append(current)
            yield from current.opened()
        if piece.text:
            logprobs, self._logprobs = self._logprobs, []
            yield current.delta(piece.text, logprobs if current.type == "message" else [])

    def _usage(self) -> dict[str, Any]:
        usage = self._counts.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": usage["total_tokens"],
        }

    def _numbered(self, event: Event) -> Event:
        event["sequence_number"] = self._number
        self._number += 1
        return event
