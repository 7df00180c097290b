"""The engine's errors, and their gRPC status codes.

    LockstepError
    |- InvalidRequest        INVALID_ARGUMENT      the caller's fault; the message names the field and the limit
    |- LimitExceeded         RESOURCE_EXHAUSTED    a stated limit (queue, compile time, grammar bytes) is reached
    |- GrammarUnavailable    UNAVAILABLE           the grammar process is lost or starting; try again
    |- UnknownGrammar        NOT_FOUND             a grammar_id that this server does not know, or has forgotten
    |- UnknownModel          NOT_FOUND             a model that this server does not have
    |- UnknownAdapter        NOT_FOUND             an adapter, or its directory, that this server does not have
    |- AdapterRefused        FAILED_PRECONDITION   adapters are not allowed here, or one of that name is in use
    |- ExchangeRefused       FAILED_PRECONDITION   the draft model of this server cannot be exchanged
    |- GrammarNotConfigured  FAILED_PRECONDITION   a grammar on a server without a grammar process
    |- NotSupported          UNIMPLEMENTED         this server does not support it
    |- WrongRole             FAILED_PRECONDITION   this server's role does not include the call
    |- NotAdmitted           UNAUTHENTICATED       the caller is no tenant of this server
    |- PagesDiffer           FAILED_PRECONDITION   another engine's KV pages have another format
    |- TransferStalled       DEADLINE_EXCEEDED     another engine does not take its KV pages
    |- QueueTimeout          DEADLINE_EXCEEDED     the request waited for a slot longer than it may
    |- ShuttingDown          UNAVAILABLE           the server is closing
    |- ProcessorFailed       INTERNAL              a logits processor of the server's own raised or returned nonsense
    `- InternalError         INTERNAL              a defect of Lockstep

The invariant: handlers raise these errors, and only `status_of` maps them to gRPC.

Not responsible for: the end of a sequence, which is a result (`FinishReason` in request.py).
"""

from __future__ import annotations

import grpc


class LockstepError(Exception):
    """Base of every error that a client may see. `str(error)` is the message for the client."""


class InvalidRequest(LockstepError):
    """A field of the request is wrong. `field` is its path, as in `sampling.temperature`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem


class LimitExceeded(LockstepError):
    """A stated limit is reached; the message names the limit and its setting."""


class GrammarUnavailable(LockstepError):
    """The grammar process does not answer."""


class UnknownGrammar(LockstepError):
    """No grammar has this id; the client compiles it again."""


class UnknownModel(LockstepError):
    """The server has no model of this name and version; the message names the models that it has."""


class UnknownAdapter(LockstepError):
    """No adapter has this name, or the directory has none."""


class AdapterRefused(LockstepError):
    """The server allows no adapters, or not this one now."""


class ExchangeRefused(LockstepError):
    """The server has no draft model that can be exchanged, or its settings allow no other."""


class GrammarNotConfigured(LockstepError):
    """The request has a grammar, and this server runs without a grammar process."""


class NotSupported(LockstepError):
    """The request asks for something that this server does not do."""


class WrongRole(LockstepError):
    """The server's role does not include the call; the message names the role."""


class NotAdmitted(LockstepError):
    """The server has tenants, and the caller is none of them."""


class PagesDiffer(LockstepError):
    """Two engines' KV pages differ in format; the message names the first field that does."""


class TransferStalled(LockstepError):
    """An engine does not take the KV pages that it has asked for."""


class QueueTimeout(LockstepError):
    """The request waited for a slot longer than its `max_queue_ms`; the message has both times."""


class ShuttingDown(LockstepError):
    """The server is closing."""


class ProcessorFailed(LockstepError):
    """A logits processor raised, or returned what it may not. The message names it; the log has the details."""


class InternalError(LockstepError):
    """A defect of Lockstep; the log has the details."""


class RankLost(RuntimeError):
    """A rank of the model died or does not answer, so the engine can run no further forward. The message has the
    reason in one line."""


_STATUS: dict[type[LockstepError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    GrammarUnavailable: grpc.StatusCode.UNAVAILABLE,
    UnknownGrammar: grpc.StatusCode.NOT_FOUND,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    UnknownAdapter: grpc.StatusCode.NOT_FOUND,
    AdapterRefused: grpc.StatusCode.FAILED_PRECONDITION,
    ExchangeRefused: grpc.StatusCode.FAILED_PRECONDITION,
    GrammarNotConfigured: grpc.StatusCode.FAILED_PRECONDITION,
    NotSupported: grpc.StatusCode.UNIMPLEMENTED,
    WrongRole: grpc.StatusCode.FAILED_PRECONDITION,
    NotAdmitted: grpc.StatusCode.UNAUTHENTICATED,
    PagesDiffer: grpc.StatusCode.FAILED_PRECONDITION,
    TransferStalled: grpc.StatusCode.DEADLINE_EXCEEDED,
    QueueTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    ShuttingDown: grpc.StatusCode.UNAVAILABLE,
    ProcessorFailed: grpc.StatusCode.INTERNAL,
    InternalError: grpc.StatusCode.INTERNAL,
}


def status_of(error: BaseException) -> grpc.StatusCode:
    """Return the gRPC status of `error`; an error outside the tree is INTERNAL."""
    return next((code for kind, code in _STATUS.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
