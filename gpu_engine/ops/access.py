"""The record of one Generate call, from which its access line, its metrics and its spans are made.

The invariant: neither the access line nor any other reader of a record passes on a prompt, a grammar text or an answer.
The servicer fills a record on the event loop; it is read once, when the call has ended.

Not responsible for: metrics (metrics_requests.py), spans (tracing.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_engine.api.conversation import Chat
from gpu_engine.api.request import FinishReason, Params, Request, Telemetry, ValidatedRequest
from service_runtime.logs import REQUEST_ID

log = logging.getLogger(__name__)

BACKENDS = {0: "", 1: "xgrammar", 2: "llguidance"}
"""Names of the Backend enum of the protos."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that has ended."""

    request: Request
    telemetry: Telemetry
    finish: FinishReason
    completion_tokens: int
    finished_s: float


@dataclass(slots=True)
class CallRecord:
    """A Generate call, running or ended. Times are `time.monotonic()` seconds."""

    metadata: Sequence[tuple[str, str | bytes]] = ()
    """The call's gRPC metadata, which may name a parent trace."""
    tenant: str = ""
    """The caller's tenant; empty: the server has no tenants."""
    method: str = "Generate"
    """The gRPC method that brought the request."""
    arrived_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    status: str = ""
    """Name of the gRPC status; empty while the call runs."""
    request_id: str = ""
    """Given by the client, or drawn. A refused request has one only if the client gave a valid one."""
    validated: ValidatedRequest | None = None
    """None: the request is not checked yet, or was refused."""
    compiled_s: float = 0.0
    """The time at which its grammar was compiled or found in the cache; 0: no grammar, or not compiled yet."""
    ended: list[Ended] = field(default_factory=list)

    def set_request_id(self, request_id: str) -> None:
        """Set the id. From now on, log lines of this task carry it."""
        self.request_id = request_id
        REQUEST_ID.set(request_id)

    def begin(self, valid: ValidatedRequest) -> None:
        """Set the request, which is within all limits."""
        self.validated = valid
        self.set_request_id(valid.request_id)

    @property
    def params(self) -> Params | None:
        """The parts of the request; None: it is not checked yet, or was refused."""
        return None if self.validated is None else self.validated.params

    @property
    def operation(self) -> str:
        """ "chat" or "text_completion"."""
        return "chat" if self.validated and isinstance(self.validated.prompt, Chat) else "text_completion"

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, which all sequences of the call share."""
        return len(self.ended[0].request.prompt_ids) if self.ended else 0

    @property
    def completion_tokens(self) -> int:
        """Tokens of all sequences that have ended."""
        return sum(each.completion_tokens for each in self.ended)

    def access_fields(self) -> dict[str, Any]:
        """Return the fields of the access line."""
        fields: dict[str, Any] = {"status": self.status}
        if self.request_id:
            fields["request_id"] = self.request_id
        if self.tenant:
            fields["tenant"] = self.tenant
        if self.params and self.params.scheduling.client_id:
            fields["client_id"] = self.params.scheduling.client_id
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
        if self.params and self.params.grammar:
            fields["grammar"] = self.params.grammar.kind.name.lower()
            fields["backend"] = next((BACKENDS.get(each.telemetry.backend, "") for each in self.ended), "")
        return fields

    def log(self) -> None:
        """Write the access line."""
        if log.isEnabledFor(logging.INFO):
            fields = self.access_fields()
            log.info("generate", extra={"fields": fields, "request_id": fields.pop("request_id", "")})


def _ms(begin_s: float, end_s: float) -> float:
    return round((end_s - begin_s) * 1e3, 3) if end_s else 0.0
