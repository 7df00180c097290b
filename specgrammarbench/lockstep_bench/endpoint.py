"""What is asked of a server, and what came back; the tracks know servers only through this.

Invariant: a server's refusal and failure are outcomes and never exceptions: a track counts them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from lockstep_bench.cases import Grammar


class Outcome(enum.Enum):
    """How a request ended."""

    DONE = "done"
    """With a finish reason."""
    REFUSED = "refused"
    """With an error that blames the request (4xx, INVALID_ARGUMENT)."""
    FAILED = "failed"
    """With any other error, a broken connection, or no answer in time."""
    NOT_OFFERED = "not offered"
    """The API has no field for it; nothing was sent."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: str
    max_tokens: int
    grammar: Grammar | None = None
    temperature: float = 0.0
    seed: int | None = None
    drafts: bool = True
    """False: without drafts, where the API can say so."""


@dataclass(slots=True)
class Reply:
    """One answer. Times are `time.perf_counter()` seconds."""

    outcome: Outcome
    text: str = ""
    finish: str = ""
    detail: str = ""
    """Status and message of an error."""
    tokens: int = 0
    """Generated tokens as the server counts them, or the pieces of the stream where it does not."""
    began_s: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """When each piece of text arrived."""

    @property
    def done(self) -> bool:
        """The answer has a finish reason."""
        return self.outcome is Outcome.DONE

    @property
    def duration_s(self) -> float:
        """From the first piece to the last."""
        return self.arrivals[-1] - self.arrivals[0] if self.arrivals else 0.0


@dataclass(frozen=True, slots=True)
class About:
    """What a server says of itself."""

    server: str
    model: str


class Endpoint(Protocol):
    """A server that answers."""

    @property
    def drafts_by_request(self) -> bool:
        """Whether `Ask.drafts` reaches the server."""
        ...

    async def about(self) -> About:
        """Describe the server. Raises ConnectionError where there is none."""
        ...

    async def ask(self, ask: Ask) -> Reply:
        """Answer a request. Cancelling the task closes the stream."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...
