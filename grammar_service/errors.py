"""The errors of the grammar process. Each one has the gRPC status with which the servicer answers.

    GrammarServiceError
    |- InvalidGrammar    INVALID_ARGUMENT      the grammar is wrong
    |  `- NotEnforced    INVALID_ARGUMENT      the backend does not enforce all of it; names each part
    |- InvalidField      INVALID_ARGUMENT      another field of the request is wrong; names the field
    |- LimitExceeded     RESOURCE_EXHAUSTED    a stated bound on bytes, memory or time; names the setting and its value
    |- NotConfigured     FAILED_PRECONDITION   Configure has not been called
    |- UnknownGrammar    NOT_FOUND             the grammar is no longer cached: compile it again
    |- NotSupported      UNIMPLEMENTED         the backend is not installed, or does not know this kind of grammar
    `- InternalError     INTERNAL              a defect of this process, or a compile worker that crashed

The tree knows the names of the status codes and does not import grpc, because compile workers use it and never load
grpc.
"""

from __future__ import annotations


class GrammarServiceError(Exception):
    """The base of every error that the engine may see.
    `str(error)` is its message, `status` the name of its gRPC code."""

    status = "INTERNAL"


class InvalidGrammar(GrammarServiceError):
    """The grammar does not compile, or a part of it would not be enforced. The message says where."""

    status = "INVALID_ARGUMENT"


class NotEnforced(InvalidGrammar):
    """The grammar is valid, but this backend would ignore parts of it. The message names each part."""


class InvalidField(GrammarServiceError):
    """A field of the request is wrong. `field` is its name."""

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class LimitExceeded(GrammarServiceError):
    """A limit is reached. The message names the setting and its value."""

    status = "RESOURCE_EXHAUSTED"


class NotConfigured(GrammarServiceError):
    """Configure has not been called, so there is no tokenizer yet."""

    status = "FAILED_PRECONDITION"


class UnknownGrammar(GrammarServiceError):
    """No grammar with this id is in the cache."""

    status = "NOT_FOUND"


class NotSupported(GrammarServiceError):
    """The backend does not support the request, or it is not installed."""

    status = "UNIMPLEMENTED"


class InternalError(GrammarServiceError):
    """A defect of this process. The log has the details."""


_BY_NAME: dict[str, type[GrammarServiceError]] = {
    kind.__name__: kind for kind in (InvalidGrammar, NotEnforced, LimitExceeded, NotSupported, InternalError)
}


def to_wire(error: BaseException) -> tuple[str, str]:
    """Return (class name, message) for an error of a compile worker. Any other exception becomes an InternalError."""
    if type(error).__name__ in _BY_NAME and isinstance(error, GrammarServiceError):
        return type(error).__name__, str(error)
    return InternalError.__name__, f"{type(error).__name__}: {error}"


def from_wire(name: str, message: str) -> GrammarServiceError:
    """Return the error that `to_wire` described."""
    return _BY_NAME.get(name, InternalError)(message)
