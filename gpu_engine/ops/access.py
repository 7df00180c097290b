"""One Generate call as it is seen from outside: what its access line, its metrics and its spans are made of.

The invariant: a record holds numbers, names and ids, never a prompt, a grammar or an answer. Filled by the servicer on
the event loop; read once, when the call has ended. Not here: who counts (`metrics_requests.py`), spans (`tracing.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_engine.api.checked import Chat, Checked
from gpu_engine.api.request import FinishReason, Request, Telemetry
from service_runtime.logs import REQUEST_ID

log = logging.getLogger(__name__)

BACKENDS = {0: "", 1: "xgrammar", 2: "llguidance"}
"""Names of the Backend enum of the protos."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that came to its end."""

    request: Request
    finish: FinishReason
    completion_tokens: int
    finished_s: float

    @property
    def telemetry(self) -> Telemetry:
        """Of the sequence."""
        return self.request.telemetry


@dataclass(slots=True)
class CallRecord:
    """A Generate call, as far as it has come. Times are `time.monotonic()` seconds."""

    metadata: Sequence[tuple[str, str | bytes]] = ()
    """Of the call, for a trace that it belongs to."""
    arrived_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    status: str = ""
    """Name of the gRPC status, once it is known."""
    request_id: str = ""
    """As the client gave it, or drawn. A request that is refused has one, too, if the client gave one."""
    checked: Checked | None = None
    """None: it did not get so far."""
    compiled_s: float = 0.0
    """Its grammar was compiled, or found; 0: it has none, or did not get so far."""
    ended: list[Ended] = field(default_factory=list)

    def named(self, request_id: str) -> None:
        """It has an id that may stand in a line: from here on lines of this task carry it."""
        self.request_id = request_id
        REQUEST_ID.set(request_id)

    def begin(self, checked: Checked) -> None:
        """The request is within all limits."""
        self.checked = checked
        self.named(checked.request_id)

    def finished(self, request: Request, finish: FinishReason, completion_tokens: int, finished_s: float) -> None:
        """One of its sequences has ended."""
        self.ended.append(Ended(request, finish, completion_tokens, finished_s))

    @property
    def operation(self) -> str:
        """ "chat" or "text_completion"."""
        return "chat" if self.checked and isinstance(self.checked.prompt, Chat) else "text_completion"

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt, which n sequences share."""
        return len(self.ended[0].request.prompt_ids) if self.ended else 0

    @property
    def completion_tokens(self) -> int:
        """Of all sequences that ended."""
        return sum(each.completion_tokens for each in self.ended)

    def access_fields(self) -> dict[str, Any]:
        """Return what the access line says."""
        fields: dict[str, Any] = {"status": self.status}
        if self.request_id:
            fields["request_id"] = self.request_id
        if self.ended:
            fields["finish"] = ",".join(each.finish.name for each in self.ended)
            fields["prompt_tokens"], fields["completion_tokens"] = self.prompt_tokens, self.completion_tokens
            first = [each.telemetry for each in self.ended]
            fields["queue_ms"] = _ms(self.arrived_s, min(t.scheduled_s for t in first))
            fields["ttft_ms"] = _ms(self.arrived_s, min(t.first_token_s for t in first))
        fields["total_ms"] = _ms(self.arrived_s, self.ended_s)
        if steps := sum(each.telemetry.steps for each in self.ended):
            accepted = sum(each.telemetry.accepted_draft_tokens for each in self.ended)
            fields["acceptance_length"] = round((accepted + steps) / steps, 3)
        if self.checked and self.checked.grammar:
            fields["grammar"] = self.checked.grammar.kind.name.lower()
            fields["backend"] = next((BACKENDS.get(each.telemetry.backend, "") for each in self.ended), "")
        return fields

    def log(self) -> None:
        """Write the access line."""
        if log.isEnabledFor(logging.INFO):
            fields = self.access_fields()
            log.info("generate", extra={"fields": fields, "request_id": fields.pop("request_id", "")})


def _ms(begin_s: float, end_s: float) -> float:
    return round((end_s - begin_s) * 1e3, 3) if end_s else 0.0
