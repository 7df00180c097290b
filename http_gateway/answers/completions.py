"""Answers of `/v1/completions`, whole and as a stream of chunks: one choice for each prompt and sequence.

Invariant: the texts of a stream joined are the text of the whole answer.

Not responsible for: the connection (http/stream.py), the request (sampling.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from http_gateway.answers.beams import is_missing
from http_gateway.answers.logprobs import Texts, completion_logprobs, prompt_logprobs
from http_gateway.answers.pieces import finish_reason, stop_reason
from http_gateway.answers.usage import Counts, field_logprobs, telemetry, token_origins, value_events
from http_gateway.wire.completions import CompletionRequest
from protos.engine.v1 import engine_pb2 as pb

_LISTS = ("token_ids", "token_origins", "value_events")
"""Fields of a choice that grow with the answer."""


@dataclass(slots=True)
class CompletionShape:
    """What the answer of one request carries."""

    id: str
    model: str
    fields: CompletionRequest
    texts: Sequence[Texts]
    """By prompt: prompts of one request may be on several engines."""
    echo_alone: dict[int, str] = field(default_factory=dict)
    """By prompt, where the client wants its prompt and no token (max_tokens is 0): the prompt's text."""
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By prompt; known where the answer shows them or counts them in every event."""
    virtual_tokens: int = 0
    """Before each prompt: those of a prompt adapter."""

    def head(self) -> dict[str, Any]:
        """Return the fields with which an answer or a chunk begins."""
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}


@dataclass(slots=True)
class _Choice:
    """One prompt's sequence."""

    offset: int = 0
    """Characters of the tokens so far."""
    begun: bool = False


class Completions:
    """Turns responses into choices: of a chunk each, or joined."""

    def __init__(self, shape: CompletionShape) -> None:
        self._shape = shape
        self._n = shape.fields.n or 1
        self._choices: dict[int, _Choice] = {}
        self._prompts: dict[int, pb.GenerateResponse] = {}
        """By prompt: the response that has its log-probabilities."""
        self._kept: dict[int, list[pb.GenerateResponse]] = {}
        """By prompt: the responses of other sequences that came before that one."""
        self._joined: dict[int, dict[str, Any]] = {}
        known = {prompt: shape.virtual_tokens + len(ids) for prompt, ids in shape.prompt_ids.items()}
        self._counts = Counts(prompt=known)
        self._with_usage, self._always = shape.fields.usage_events()

    def chunks(self, prompt: int, response: pb.GenerateResponse) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a response that are not empty. Raises ApiError for a failed sequence."""
        for each in self._after_prompt(prompt, response):
            choice = self._choice(prompt, each)
            shown = (choice["text"], choice["logprobs"], choice["finish_reason"])
            if not (any(shown) or any(choice.get(name) for name in _LISTS)):
                continue
            chunk = self._shape.head() | {"choices": [choice]}
            if self._always:
                chunk["usage"] = self._counts.usage()
            elif self._with_usage:
                chunk["usage"] = None
            yield chunk

    def last(self) -> dict[str, Any] | None:
        """Return the chunk after the last sequence; None where the client asked for none."""
        return self._shape.head() | {"choices": [], "usage": self._counts.usage()} if self._with_usage else None

    def take(self, prompt: int, response: pb.GenerateResponse) -> None:
        """Add a response to the whole answer."""
        if is_missing(self._shape.fields, response):
            return
        for each in self._after_prompt(prompt, response):
            self._join(self._choice(prompt, each))

    def _join(self, new: dict[str, Any]) -> None:
        joined = self._joined.get(new["index"])
        if joined is None:
            self._joined[new["index"]] = new
            return
        joined["text"] += new["text"]
        if new["logprobs"]:
            for name, values in new["logprobs"].items():
                joined["logprobs"] = joined["logprobs"] or {}
                joined["logprobs"].setdefault(name, []).extend(values)
        for name in _LISTS:
            if name in new:
                joined[name] += new[name]
        added = ("text", "logprobs", *_LISTS)
        joined |= {name: new[name] for name in new if name not in added}

    def result(self) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [self._joined[index] for index in sorted(self._joined)]
        return self._shape.head() | {"choices": choices, "usage": self._counts.usage()}

    def _after_prompt(self, prompt: int, response: pb.GenerateResponse) -> Iterator[pb.GenerateResponse]:
        """Yield the response, or keep it until sequence 0 has begun, which brings the log-probabilities of the prompt.

        Every choice of the prompt begins with them.
        """
        fields = self._shape.fields
        scored = fields.prompt_logprobs is not None or (fields.echo and fields.logprobs is not None)
        if scored and response.index and prompt not in self._prompts:
            self._kept.setdefault(prompt, []).append(response)
            return
        if response.prompt_logprobs:
            self._prompts[prompt] = response
        yield response
        yield from self._kept.pop(prompt, ())

    def _choice(self, prompt: int, response: pb.GenerateResponse) -> dict[str, Any]:
        fields = self._shape.fields
        index = prompt * self._n + response.index
        state = self._choices.setdefault(index, _Choice())
        first, state.begun = not state.begun, True
        if self._shape.echo_alone:
            response = self._without_answer(prompt, response, first=first)
        self._counts.take(response, prompt)
        choice: dict[str, Any] = {
            "index": index,
            "text": response.text,
            "logprobs": self._logprobs(prompt, response, state, first=first),
            "finish_reason": None,
        }
        if fields.return_token_ids:
            choice["token_ids"] = list(response.token_ids)
            if first:
                choice["prompt_token_ids"] = list(self._shape.prompt_ids.get(prompt, ()))
        if fields.token_origins:
            choice["token_origins"] = (
                token_origins(response, self._shape.texts[prompt]) if response.token_origins else []
            )
        if fields.wants_events:
            choice["value_events"] = value_events(response)
        if first and fields.prompt_logprobs is not None and prompt in self._prompts:
            rows = self._prompts[prompt].prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(self._shape.prompt_ids[prompt], rows, self._shape.texts[prompt])
        if response.finish_reason:
            choice["finish_reason"] = "length" if self._shape.echo_alone else finish_reason(response, 0)
            choice["stop_reason"] = stop_reason(response, fields.stop_token_ids or ())
            if fields.field_logprobs:
                choice["field_logprobs"] = field_logprobs(response)
            if response.receipt:
                choice["receipt"] = response.receipt
            if response.HasField("beam_score"):
                choice["beam_score"] = response.beam_score
            if fields.telemetry:
                choice["telemetry"] = telemetry(response)
        return choice

    def _without_answer(self, prompt: int, response: pb.GenerateResponse, *, first: bool) -> pb.GenerateResponse:
        """Return the response without the one token that the engine generates at least."""
        kept = pb.GenerateResponse()
        kept.CopyFrom(response)
        kept.text = self._shape.echo_alone[prompt] if first else ""
        kept.ClearField("token_ids")
        kept.ClearField("logprobs")
        kept.ClearField("token_origins")
        kept.ClearField("value_events")
        kept.ClearField("receipt")
        if kept.HasField("usage"):
            kept.usage.completion_tokens = 0
        return kept

    def _logprobs(
        self, prompt: int, response: pb.GenerateResponse, state: _Choice, *, first: bool
    ) -> dict[str, Any] | None:
        if self._shape.fields.logprobs is None:
            return None
        ids: list[int] = []
        entries: list[pb.TokenLogprobs] = []
        at_start = first and bool(self._shape.fields.echo)
        if at_start and (source := self._prompts.get(prompt)) is not None:
            ids += source.prompt_token_ids
            entries += source.prompt_logprobs
        ids += response.token_ids
        entries += response.logprobs
        if not ids:
            return None
        made, state.offset = completion_logprobs(
            ids, entries, self._shape.texts[prompt], state.offset, at_start=at_start
        )
        return made
