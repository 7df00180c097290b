"""API keys of clients: `Authorization: Bearer KEY` on every call except those that need none.

Clients of Anthropic's API may send `x-api-key: KEY` instead.

Invariant: with an `api_key_file` or a `tenant_file`, no handler sees a request without a known key. Keys are compared
in constant time, and never logged.

Not responsible for: encryption (see tls.py).
"""

from __future__ import annotations

from typing import Protocol

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from http_gateway.wire.errors import ApiError, is_message, shown
from service_runtime.from_files import FromFiles
from service_runtime.tenants import TenantTable
from service_runtime.tokens import Digests, known

OPEN_PATHS = frozenset({"/", "/health"})
"""The page asks for a key itself, and probes have none."""


MESSAGE_KEY = "x-api-key"
OPERATOR_PATHS = frozenset({"/metrics"})
"""They show what concerns all tenants."""


class Keys(Protocol):
    """The keys of clients, as digests. They follow their file."""

    def all(self) -> Digests:
        """Return every key's."""

    def operators(self) -> Digests:
        """Return those that may use OPERATOR_PATHS."""


class KeyFile:
    """The keys of `api_key_file`, which may all do the same."""

    def __init__(self, file: FromFiles[Digests]) -> None:
        self._file = file

    def all(self) -> Digests:
        """See `Keys`."""
        return self._file.get()

    operators = all

    def __repr__(self) -> str:
        return f"<KeyFile {self._file!r}>"


class TenantKeys:
    """The tokens of tenants."""

    def __init__(self, file: FromFiles[TenantTable]) -> None:
        self._file = file

    def all(self) -> Digests:
        """See `Keys`."""
        return self._file.get().digests

    def operators(self) -> Digests:
        """See `Keys`."""
        return self._file.get().operator_digests

    def __repr__(self) -> str:
        return f"<TenantKeys {self._file!r}>"


class ApiKeys:
    """ASGI middleware: passes requests with a known key on, answers others with 401 or 403."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check an HTTP request."""
        # A preflight request of a browser carries no key, and reaches only the CORS middleware.
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            error = self._error(Headers(scope=scope), scope["path"])
            if error is not None:
                status, body = shown(scope["path"], error)
                response = JSONResponse(body, status, error.headers)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _error(self, headers: Headers, path: str) -> ApiError | None:
        key = _message_key(headers) if is_message(path) else None
        if key is None:
            key = _key_of(headers.getlist("authorization"))
        if isinstance(key, str):
            return _unauthenticated(key)
        if not known(key, self._keys.all()):
            return _unauthenticated("holds an unknown key")
        if path in OPERATOR_PATHS and not known(key, self._keys.operators()):
            return ApiError(f"{path}: is for operators", status=403, kind="permission_error", code="forbidden")
        return None


def _key_of(values: list[str]) -> bytes | str:
    """Return the key of a request, or as text what is wrong with its header."""
    if len(values) != 1:
        return "is missing; send `Authorization: Bearer KEY`" if not values else "was sent more than once"
    scheme, _, key = values[0].partition(" ")
    if scheme.lower() != "bearer" or not key:
        return "is not of the form `Bearer KEY`"
    return key.strip().encode("latin-1")


def _unauthenticated(problem: str) -> ApiError:
    return ApiError(
        f"Authorization: {problem}",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _message_key(headers: Headers) -> bytes | str | None:
    """Return the key in the header of Anthropic's API, or as text what is wrong with it; None: there is none."""
    values = headers.getlist(MESSAGE_KEY)
    if len(values) > 1:
        return f"is needed once, but {MESSAGE_KEY} was sent more than once"
    return values[0].strip().encode("latin-1") if values else None


def forwarded(headers: Headers, path: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that hands a client's key on to an engine."""
    authorization = headers.get("authorization")
    if is_message(path) and (key := headers.get(MESSAGE_KEY)):
        authorization = f"Bearer {key}"
    return (("authorization", authorization),) if authorization else ()
