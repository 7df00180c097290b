"""The counts of tokens of an answer, and what the engine says about its time.

Invariant: a prompt counts once, however many sequences and events its answer has.

Not responsible for: counting (the engine).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protos.engine.v1 import engine_pb2 as pb


@dataclass(slots=True)
class Counts:
    """The tokens of all sequences of a call."""

    prompt: dict[int, int] = field(default_factory=dict)
    """By prompt of the call."""
    cached: dict[int, int] = field(default_factory=dict)
    answer: dict[tuple[int, int], int] = field(default_factory=dict)
    """By prompt and sequence."""
    reasoning: dict[tuple[int, int], int] = field(default_factory=dict)
    """By prompt and sequence; known at its end."""

    def take(self, response: pb.GenerateResponse, prompt: int = 0) -> None:
        """Count a response of the prompt with that index."""
        key = prompt, response.index
        if response.HasField("usage"):
            self.prompt[prompt] = response.usage.prompt_tokens
            self.cached[prompt] = max(self.cached.get(prompt, 0), response.usage.cached_tokens)
            self.answer[key] = response.usage.completion_tokens
            self.reasoning[key] = response.usage.reasoning_tokens
        elif response.token_ids:
            self.answer[key] = self.answer.get(key, 0) + len(response.token_ids)

    def usage(self) -> dict[str, Any]:
        """Return the usage of chat and completions. The tokens of the reasoning are left out until they are known."""
        prompt, answer = sum(self.prompt.values()), sum(self.answer.values())
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }
        if self.reasoning.keys() >= self.answer.keys():
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(self.reasoning.values())}
        return usage


def telemetry(response: pb.GenerateResponse) -> dict[str, Any]:
    """Return where the time of a sequence went, in the engine's names."""
    values = {field.name: getattr(response.telemetry, field.name) for field in pb.Telemetry.DESCRIPTOR.fields}
    return values | {
        "backend": pb.Backend.Name(response.telemetry.backend).removeprefix("BACKEND_").lower(),
        "warnings": list(response.telemetry.warnings),
    }


def token_origins(response: pb.GenerateResponse, texts: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the text of each new token, and how its step came to it."""
    return [
        {"token": texts[token], "origin": pb.TokenOrigin.Name(origin).removeprefix("TOKEN_ORIGIN_").lower()}
        for token, origin in zip(response.token_ids, response.token_origins, strict=True)
    ]


def value_events(response: pb.GenerateResponse) -> list[dict[str, Any]]:
    """Return the events of values; each has its text and log-probability where the engine sent them."""
    return [
        {
            "kind": pb.ValueEvent.Kind.Name(event.kind).removeprefix("KIND_").lower(),
            "pointer": event.pointer,
            "type": pb.ValueEvent.Type.Name(event.type).removeprefix("TYPE_").lower(),
        }
        | ({"value_json": event.value_json} if event.HasField("value_json") else {})
        | ({"logprob": event.logprob, "tokens": event.tokens} if event.HasField("logprob") else {})
        for event in response.value_events
    ]


def field_logprobs(response: pb.GenerateResponse) -> list[dict[str, Any]]:
    """Return the log-probability of each leaf of the answer."""
    return [{"pointer": f.pointer, "logprob": f.logprob, "tokens": f.tokens} for f in response.field_logprobs]
