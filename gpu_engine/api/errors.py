"""The engine's errors, and the one place where they become gRPC status codes.

    LockstepError
    |- InvalidRequest        INVALID_ARGUMENT      the caller's fault; names the field and the limit
    |- LimitExceeded         RESOURCE_EXHAUSTED    a stated bound (queue, compile time, grammar bytes) is reached
    |- GrammarUnavailable    UNAVAILABLE           the sidecar is gone, or was lost in mid-answer; try again
    |- UnknownGrammar        NOT_FOUND             a grammar_id that this server does not know (any more)
    |- GrammarNotConfigured  FAILED_PRECONDITION   a grammar on a server that has no sidecar
    |- NotSupported          UNIMPLEMENTED         known, but not by this server
    |- ShuttingDown          UNAVAILABLE           the server is closing
    `- InternalError         INTERNAL              a defect of ours

Handlers raise these; only `status_of` knows gRPC. Not here: endings of a sequence (`FinishReason`), which are results.
"""

from __future__ import annotations

import grpc


class LockstepError(Exception):
    """Base of every error that a client may see. `str(error)` is the message for the client."""


class InvalidRequest(LockstepError):
    """A field of the request is wrong. `field` is its path, as in `sampling.temperature`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class LimitExceeded(LockstepError):
    """A stated bound is reached; the message names the bound and its setting."""


class GrammarUnavailable(LockstepError):
    """The grammar process does not answer."""


class UnknownGrammar(LockstepError):
    """No grammar with this id is kept: compile it again."""


class GrammarNotConfigured(LockstepError):
    """The request carries a grammar and this server runs without a grammar process."""


class NotSupported(LockstepError):
    """The request asks for something that this server does not do."""


class ShuttingDown(LockstepError):
    """The server is closing."""


class InternalError(LockstepError):
    """A defect of ours; the log has the details."""


_STATUS: dict[type[LockstepError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    GrammarUnavailable: grpc.StatusCode.UNAVAILABLE,
    UnknownGrammar: grpc.StatusCode.NOT_FOUND,
    GrammarNotConfigured: grpc.StatusCode.FAILED_PRECONDITION,
    NotSupported: grpc.StatusCode.UNIMPLEMENTED,
    ShuttingDown: grpc.StatusCode.UNAVAILABLE,
    InternalError: grpc.StatusCode.INTERNAL,
}


def status_of(error: BaseException) -> grpc.StatusCode:
    """Return the gRPC status of `error`; anything outside the tree is INTERNAL."""
    return next((code for kind, code in _STATUS.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
