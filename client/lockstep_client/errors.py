"""The errors of the client, and the one place that maps a gRPC status to them.

    LockstepError
    |- CallError                 a call failed; `code` is the gRPC status, `details` the server's message
    |  |- InvalidRequest         INVALID_ARGUMENT; `field` names the field
    |  |- UnknownGrammar         NOT_FOUND: compile the grammar again
    |  |- LimitExceeded          RESOURCE_EXHAUSTED: a queue is full, or a stated limit is reached
    |  |- GrammarNotConfigured   FAILED_PRECONDITION: a grammar on a server without a grammar process
    |  |- NotSupported           UNIMPLEMENTED: the server is older than the call
    |  |- NotAuthenticated       UNAUTHENTICATED, PERMISSION_DENIED
    |  |- Unavailable            UNAVAILABLE: no server, or it is closing
    |  |- TimedOut               DEADLINE_EXCEEDED
    |  |- Cancelled              CANCELLED
    |  `- ServerFailed           INTERNAL and every other status
    |- NotParsed                 the answer has no value of the schema: it was cut, or it is a tool call
    `- EmbeddedServerError       a server of one's own cannot be started
       `- EngineNotInstalled     there is no engine to start

The invariant: no grpc.RpcError leaves the client; only `from_rpc` maps it. A wrong argument is a ValueError or a
TypeError that names it, before anything is sent.
"""

from __future__ import annotations

import re

import grpc

_FIELD = re.compile(r"([a-z_]+(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)*): ")


class LockstepError(Exception):
    """Base of every error of this client."""


class CallError(LockstepError):
    """A call failed. `str(error)` is the status and the server's message."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details

    def __reduce__(self) -> tuple[type[CallError], tuple[grpc.StatusCode, str]]:
        return type(self), (self.code, self.details)


class InvalidRequest(CallError):
    """A field of the request, or the grammar, is wrong."""

    @property
    def field(self) -> str | None:
        """The field as the message names it, such as `sampling.temperature`; None where it names none."""
        found = _FIELD.match(self.details)
        return found[1] if found else None


class UnknownGrammar(CallError):
    """The server does not know this grammar id, or has dropped the grammar."""


class LimitExceeded(CallError):
    """A queue is full, or a limit on bytes, time or memory is reached; the message names its setting."""


class GrammarNotConfigured(CallError):
    """The request has a grammar, and the server runs without a grammar process."""


class NotSupported(CallError):
    """The server does not know the call."""


class NotAuthenticated(CallError):
    """The server needs a token or a certificate, and the call had none that is valid."""


class Unavailable(CallError):
    """No server answers at the address, it is closing, or its grammar process is away."""


class TimedOut(CallError):
    """The call took longer than its `timeout_s`."""


class Cancelled(CallError):
    """The call was cancelled."""


class ServerFailed(CallError):
    """A defect of the server, or a status that a Lockstep server does not send."""


class NotParsed(LockstepError):
    """The answer has no value: it was cut, it is a tool call, or the request had no grammar of JSON."""


class EmbeddedServerError(LockstepError):
    """A server of the client's own did not start, or ended."""


class EngineNotInstalled(EmbeddedServerError):
    """There is no engine in this environment or on the PATH."""


_BY_CODE: dict[grpc.StatusCode, type[CallError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: UnknownGrammar,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
    grpc.StatusCode.FAILED_PRECONDITION: GrammarNotConfigured,
    grpc.StatusCode.UNIMPLEMENTED: NotSupported,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticated,
    grpc.StatusCode.PERMISSION_DENIED: NotAuthenticated,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def from_status(code: grpc.StatusCode, details: str | None) -> CallError:
    """Return the error of a status."""
    return _BY_CODE.get(code, ServerFailed)(code, details or "")


def from_rpc(error: grpc.RpcError) -> CallError:
    """Return the error of a failed call."""
    return from_status(error.code(), error.details())
