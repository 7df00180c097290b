"""The counts of tokens of an answer, and what the engine says about its time.

Invariant: a prompt counts once, however many sequences and events its answer has.

Not responsible for: counting (the engine).
"""

from __future__ import annotations

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

    def take(self, response: pb.GenerateResponse, prompt: int = 0) -> None:
        """Count a response of the prompt with that index."""
        key = prompt, response.index
        if response.HasField("usage"):
            self.prompt[prompt] = response.usage.prompt_tokens
            self.cached[prompt] = max(self.cached.get(prompt, 0), response.usage.cached_tokens)
            self.answer[key] = response.usage.completion_tokens
        elif response.token_ids:
            self.answer[key] = self.answer.get(key, 0) + len(response.token_ids)

    def usage(self) -> dict[str, Any]:
        """Return the usage of chat and completions."""
        prompt, answer = sum(self.prompt.values()), sum(self.answer.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


def telemetry(response: pb.GenerateResponse) -> dict[str, Any]:
    """Return where the time of a sequence went, in the engine's names."""
    values = {field.name: getattr(response.telemetry, field.name) for field in pb.Telemetry.DESCRIPTOR.fields}
    return values | {
        "backend": pb.Backend.Name(response.telemetry.backend).removeprefix("BACKEND_").lower(),
        "warnings": list(response.telemetry.warnings),
    }


def field_logprobs(response: pb.GenerateResponse) -> list[dict[str, Any]]:
    """Return the log-probability of each leaf of the answer."""
    return [{"pointer": f.pointer, "logprob": f.logprob, "tokens": f.tokens} for f in response.field_logprobs]
