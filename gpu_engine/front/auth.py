"""Bearer tokens for the public port: who may call at all.

The invariant: without a token of the file no method runs and no message is read, but the health service's, which load
balancers ask without one. Reflection needs a token. Tokens are kept as digests and compared in constant time. Not here:
encryption (`tls.py`); without it a token is anybody's who sees the wire.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health

from gpu_engine.front.from_files import FromFiles, read_bytes

log = logging.getLogger(__name__)

HEADER = "authorization"
SCHEME = "bearer"
MIN_TOKEN_CHARS = 16
"""Shorter ones can be guessed."""
_EXEMPT = f"/{health.SERVICE_NAME}/"

Digests = tuple[bytes, ...]


def token_file(path: Path) -> FromFiles[Digests]:
    """Return the tokens of the file, followed as it changes. Raises ValueError that says the line and what is wrong."""
    return FromFiles([path], lambda: parse_tokens(read_bytes("auth_token_file", path), path))


def parse_tokens(content: bytes, path: Path) -> Digests:
    """Return the digests of the tokens, one a line; empty lines and those that begin with # are none."""
    digests = []
    for number, line in enumerate(content.splitlines(), 1):
        token = line.strip()
        if not token or token.startswith(b"#"):
            continue
        if (
            len(token) < MIN_TOKEN_CHARS
            or not token.isascii()
            or not token.decode("ascii").isprintable()
            or b" " in token
        ):
            raise ValueError(
                f"auth_token_file: {path}, line {number}: a token has at least {MIN_TOKEN_CHARS} printable ASCII "
                "characters and no space; `openssl rand -hex 32` makes one"
            )
        digests.append(hashlib.sha256(token).digest())
    if not digests:
        raise ValueError(f"auth_token_file: {path} holds no token; `openssl rand -hex 32 >{path}` makes one")
    return tuple(digests)


class BearerTokens(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stub alone
    """Lets a call through that carries `authorization: Bearer TOKEN`; any other is UNAUTHENTICATED."""

    def __init__(self, tokens: FromFiles[Digests]) -> None:
        self._tokens = tokens
        self.refused = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the method's handler, or one that refuses."""
        details: Any = handler_call_details
        if details.method.startswith(_EXEMPT):
            return await continuation(handler_call_details)
        problem = self._problem([value for key, value in details.invocation_metadata if key == HEADER])
        if problem is None:
            return await continuation(handler_call_details)
        self.refused += 1
        log.info("refused", extra={"fields": {"status": "UNAUTHENTICATED", "method": details.method, "why": problem}})
        return _refusal(problem)

    def _problem(self, values: list[str | bytes]) -> str | None:
        if not values:
            return "is missing; send `authorization: Bearer TOKEN`"
        if len(values) > 1:
            return "was sent more than once"
        value = values[0].encode() if isinstance(values[0], str) else values[0]
        scheme, _, token = value.partition(b" ")
        if scheme.lower() != SCHEME.encode() or not token:
            return "is not of the form `Bearer TOKEN`"
        return None if known(token.strip(), self._tokens.get()) else "holds a token that is not known here"

    def __repr__(self) -> str:
        return f"<BearerTokens {self._tokens!r} refused={self.refused}>"


def known(token: bytes, digests: Iterable[bytes]) -> bool:
    """Return whether the token is one of them; takes as long for a wrong one as for a right one."""
    digest, found = hashlib.sha256(token).digest(), False
    for candidate in digests:
        found |= hmac.compare_digest(candidate, digest)
    return found


def _refusal(problem: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{HEADER}: {problem}")

    # On the wire every method is a pair of streams, and this kind reads nothing of the caller's before it answers.
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(refuse)
    return handler
