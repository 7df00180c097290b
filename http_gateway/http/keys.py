"""API keys of clients: `Authorization: Bearer KEY` on every call except those that need none.

Invariant: with an `api_key_file`, no handler sees a request without a known key. Keys are compared in constant time,
and never logged.

Not responsible for: encryption (see tls.py).
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from http_gateway.wire.errors import ApiError
from service_runtime.from_files import FromFiles
from service_runtime.tokens import Digests, known

OPEN_PATHS = frozenset({"/", "/health"})
"""The page asks for a key itself, and probes have none."""


class ApiKeys:
    """ASGI middleware: passes requests with a known key on, answers others with 401."""

    def __init__(self, app: ASGIApp, keys: FromFiles[Digests]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check an HTTP request."""
        # A preflight request of a browser carries no key, and reaches the CORS middleware alone.
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            problem = self._problem(Headers(scope=scope).getlist("authorization"))
            if problem is not None:
                error = ApiError(
                    f"Authorization: {problem}", status=401, kind="authentication_error", code="invalid_api_key"
                )
                response = JSONResponse(error.body(), 401, {"WWW-Authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, values: list[str]) -> str | None:
        if len(values) != 1:
            return "is missing; send `Authorization: Bearer KEY`" if not values else "was sent more than once"
        scheme, _, key = values[0].partition(" ")
        if scheme.lower() != "bearer" or not key:
            return "is not of the form `Bearer KEY`"
        return None if known(key.strip().encode("latin-1"), self._keys.get()) else "holds an unknown key"


def bearer(authorization: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata that hands a client's key on to an engine."""
    return (("authorization", authorization),) if authorization else ()
