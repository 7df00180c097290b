"""Errors in OpenAI's and in Anthropic's shape, and the one table from gRPC's statuses to HTTP's.

Invariant: every answer that is no success has OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, or,
below `MESSAGES_PATH`, Anthropic's: `{"type": "error", "error": {"type", "message"}}`.

Not responsible for: what is an error (see fields.py, the engine, and http/app.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import grpc

RETRY_AFTER_S = 1
"""Where the engine's message names no time."""
_TRY_AGAIN = re.compile(r"try again in ([0-9.]+) s\b")
MESSAGES_PATH = "/v1/messages"


class ApiError(Exception):
    """An answer with an HTTP status of 400 or more."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Args: see below.

        kind: the `type` of the body.
        param: the field at fault.
        code: a word for programs.
        """
        super().__init__(message)
        self.message, self.status, self.kind, self.param, self.code = message, status, kind, param, code
        self.headers = dict(headers or {})

    def rename(self, param: str) -> None:
        """Give the field at fault another name, in the message as well."""
        if self.message.startswith(f"{self.param}: "):
            self.message = param + self.message.removeprefix(str(self.param))
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


OVERLOADED = 529
_MESSAGE_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def message_error(error: ApiError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error for a client of Anthropic's API."""
    status = OVERLOADED if error.status == 503 else error.status
    kind = _MESSAGE_KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return status, {"type": "error", "error": {"type": kind, "message": error.message}}


def shown(path: str, error: ApiError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error, in the shape that clients of the path read."""
    return message_error(error) if is_message(path) else (error.status, error.body())


def is_message(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


class EngineLost(ApiError):
    """An engine is gone, or closes: another one may answer the request."""

    address = ""
    """Of an engine that had begun an answer."""


class _Row(NamedTuple):
    status: int
    kind: str
    code: str
    retry: bool = False


_C = grpc.StatusCode
TABLE: dict[grpc.StatusCode, _Row] = {
    _C.INVALID_ARGUMENT: _Row(400, "invalid_request_error", "invalid_value"),
    _C.OUT_OF_RANGE: _Row(400, "invalid_request_error", "invalid_value"),
    _C.FAILED_PRECONDITION: _Row(400, "invalid_request_error", "not_supported"),
    _C.UNIMPLEMENTED: _Row(400, "invalid_request_error", "not_supported"),
    _C.UNAUTHENTICATED: _Row(401, "authentication_error", "invalid_api_key"),
    _C.PERMISSION_DENIED: _Row(403, "permission_error", "forbidden"),
    _C.NOT_FOUND: _Row(404, "invalid_request_error", "not_found"),
    _C.ALREADY_EXISTS: _Row(409, "invalid_request_error", "already_exists"),
    _C.RESOURCE_EXHAUSTED: _Row(429, "rate_limit_error", "overloaded", retry=True),
    _C.UNAVAILABLE: _Row(503, "server_error", "unavailable", retry=True),
    _C.ABORTED: _Row(503, "server_error", "aborted", retry=True),
    _C.DEADLINE_EXCEEDED: _Row(504, "server_error", "timeout"),
}
_INTERNAL = _Row(500, "server_error", "internal")
_TOO_LARGE = re.compile(
    r"max_(grammar_bytes|grammar_depth|rule_depth|artifact_bytes): |exceeds the library's limits|open in one place"
)
"""In the engine's messages about a grammar that is over a limit each time that it is sent."""
_TOO_LONG = "(max_model_len "
"""In the engine's messages about a prompt that does not fit; clients look for `context_length_exceeded`."""

_FIELD = re.compile(r"([a-z_]+(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)*): ")
"""The engine's messages begin with the field."""
_INSIDE = frozenset({"sampling", "response", "messages", "tools"})
"""Messages of the engine whose fields stand at the top of the HTTP body."""
_HTTP_NAMES = {
    "sampling.repetition_max_pattern_size": "repetition_detection.max_pattern_size",
    "sampling.repetition_min_pattern_size": "repetition_detection.min_pattern_size",
    "sampling.repetition_min_count": "repetition_detection.min_count",
    "response.per_field_logprobs": "field_logprobs",
    "text": "prompt",
    "tools.name": "tool_choice",
    "tools.choice": "tool_choice",
    "tools.parallel": "parallel_tool_calls",
    "beam_search": "use_beam_search",
    "beam_search.beam_width": "beam_width",
    "beam_search.length_penalty": "length_penalty",
    "beam_search.early_stopping": "early_stopping",
    "reasoning.effort": "reasoning_effort",
    "reasoning.max_tokens": "thinking_token_budget",
    "lora": "model",
    "prompt_adapter": "model",
}
"""Other names of the engine -> HTTP's."""


def from_grpc(error: grpc.aio.AioRpcError) -> ApiError:
    """Return the HTTP error of a call that failed."""
    return from_status(error.code(), error.details() or error.code().name)


def from_status(status: grpc.StatusCode, details: str) -> ApiError:
    """Return the HTTP error of a gRPC status with its message."""
    row = TABLE.get(status, _INTERNAL)
    if status is _C.RESOURCE_EXHAUSTED and _TOO_LARGE.search(details):
        row = _Row(400, "invalid_request_error", "grammar_too_large")
    names_field = row.status in (400, 404) or details.startswith("grammar")
    field = _FIELD.match(details) if names_field else None
    param = _http_name(field[1]) if field else None
    kind = EngineLost if status is _C.UNAVAILABLE else ApiError
    return kind(
        f"{param}: {details[field.end() :]}" if field else details,
        status=row.status,
        kind=row.kind,
        param=param,
        code="context_length_exceeded" if row.status == 400 and _TOO_LONG in details else row.code,
        headers={"Retry-After": str(_retry_after_s(details))} if row.retry else None,
    )


def _retry_after_s(details: str) -> int:
    """Return the time that the engine's message names, in whole seconds; the header has no parts of them."""
    found = _TRY_AGAIN.search(details)
    return max(RETRY_AFTER_S, math.ceil(float(found[1]))) if found else RETRY_AFTER_S


_HTTP_PATTERNS = (
    (re.compile(r"^token_ids\.ids"), "prompt"),
    (re.compile(r"^(logits_processors\[\d+\])\.name"), r"\1.qualname"),
    (re.compile(r"^(logits_processors\[\d+\])\.arguments"), r"\1.kwargs"),
)
"""The same for fields with an index."""


def _http_name(field: str) -> str:
    for pattern, name in _HTTP_PATTERNS:
        field = pattern.sub(name, field)
    first, _, rest = field.partition(".")
    return _HTTP_NAMES.get(field) or (rest if rest and first in _INSIDE else field)
