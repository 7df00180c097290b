"""Joins the deltas of a stream to whole answers.

The invariant: pure, and the same for both clients. A stream that ends before each of its sequences has a finish reason
is an error, never a shorter answer.

Not responsible for: reading the stream (see client.py and async_client.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from lockstep_client.answers import Answer, Delta, PartKind, joined_outputs
from lockstep_client.errors import from_status
from lockstep_client.messages import ToolCall

Parse = Callable[[str], Any]


@dataclass(slots=True)
class _Call:
    """A tool call whose arguments grow."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    """The deltas of one sequence so far."""

    deltas: list[Delta] = field(default_factory=list)
    has_parts: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)

    def take(self, delta: Delta) -> None:
        self.deltas.append(delta)
        for part in delta.parts:
            self.has_parts = True
            match part.kind:
                case PartKind.CONTENT:
                    self.content.append(part.text)
                case PartKind.REASONING:
                    self.reasoning.append(part.text)
                case PartKind.TOOL_CALL:
                    self.calls[part.tool_call_index] = _Call(part.tool_call_id, part.tool_name)
                case PartKind.TOOL_ARGUMENTS:
                    self.calls[part.tool_call_index].arguments.append(part.text)

    def answer(self, parse: Parse | None) -> Answer[Any] | None:
        """Return the whole answer, or None before its end."""
        first, last = self.deltas[0], self.deltas[-1]
        if last.finish_reason is None or last.usage is None or last.telemetry is None:
            return None
        text = "".join(delta.text for delta in self.deltas)
        return Answer(
            request_id=last.request_id,
            index=last.index,
            text=text,
            token_ids=tuple(token for delta in self.deltas for token in delta.token_ids),
            finish_reason=last.finish_reason,
            usage=last.usage,
            telemetry=last.telemetry,
            matched_token_id=last.matched_token_id,
            matched_stop_str=last.matched_stop_str,
            logprobs=tuple(each for delta in self.deltas for each in delta.logprobs),
            content="".join(self.content) if self.has_parts else text,
            reasoning="".join(self.reasoning),
            tool_calls=tuple(
                ToolCall(call.id, call.name, "".join(call.arguments)) for _, call in sorted(self.calls.items())
            ),
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs,
            field_logprobs=last.field_logprobs,
            outputs=joined_outputs(each for delta in self.deltas for each in delta.outputs),
            beam_score=last.beam_score,
            token_origins=tuple(each for delta in self.deltas for each in delta.token_origins),
            receipt=last.receipt,
            _parse=parse,
        )


class Joined:
    """Takes the deltas of one request."""

    def __init__(self, parse: Parse | None, wants_sequences: int, *, cumulative: bool = False) -> None:
        """Begin without deltas.

        Args:
            parse: returns the value of a complete answer's content. None: answers have no value.
            wants_sequences: the request's `n`.
            cumulative: each delta has the whole sequence so far, instead of only the new part.

        """
        self._parse = parse
        self._wanted = wants_sequences
        self._cumulative = cumulative
        self._sequences: dict[int, _Sequence] = {}

    def take(self, delta: Delta) -> None:
        """Add a delta."""
        before = self._sequences.get(delta.index)
        if self._cumulative and before is not None:
            first, last = before.deltas[0], before.deltas[-1]
            if not delta.text and not delta.token_ids:  # rows of tensors that are too many for the message before
                kept = {"text": last.text, "token_ids": last.token_ids, "logprobs": last.logprobs, "parts": last.parts}
                delta = replace(delta, **kept)  # type: ignore[arg-type]  # of the fields' own types
            outputs = before.deltas[-1].outputs + delta.outputs  # a tensor is sent once
            delta = replace(
                delta,
                prompt_token_ids=first.prompt_token_ids,
                prompt_logprobs=first.prompt_logprobs,
                outputs=outputs,
            )
            del self._sequences[delta.index]
        self._sequences.setdefault(delta.index, _Sequence()).take(delta)

    def answer(self) -> Answer[Any]:
        """Return sequence 0 with the others. Raises ServerFailed for a stream that ended too early."""
        found = [self._sequences[index].answer(self._parse) for index in sorted(self._sequences)]
        answers = [answer for answer in found if answer is not None]
        if len(answers) < self._wanted:
            raise from_status(
                grpc.StatusCode.DATA_LOSS, f"the stream ended with {len(answers)} of {self._wanted} answers"
            )
        answers[0].others = tuple(answers[1:])
        return answers[0]
